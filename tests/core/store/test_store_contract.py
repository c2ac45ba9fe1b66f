"""What every object store owes the run store, asked of each of them in the same words."""

import os
import pickle
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fake_objects import FakeObjects
from support.newest import newest_sound
from support.s3 import S3Server, moto_server, new_bucket, storage_options

from shrinkpoint.errors import CorruptionError, StoreError
from shrinkpoint.store.connect import open_objects
from shrinkpoint.store.objects import MissingKeyError, ObjectStore
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped.objects import StripedObjects
from shrinkpoint.store.urls import Stores

KEY = "data/000000000001-0123456789abcdef-0123456789abcdef.shrink"
OTHER = "data/000000000002-0123456789abcdef-0123456789abcdef.shrink"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


class ObjectStoreContract:
    """Inherit, and give a fixture `objects` that yields an empty store."""

    def test_absent_key(self, objects: ObjectStore) -> None:
        with pytest.raises(MissingKeyError, match="data/"):
            objects.get(KEY, max_size=10)
        assert objects.list("data/") == []
        objects.delete([KEY])

    def test_put_then_get(self, objects: ObjectStore) -> None:
        objects.put(KEY, b"0123456789")
        assert objects.get(KEY, max_size=10) == b"0123456789"
        assert objects.get(KEY, 3, 6, max_size=3) == b"345"
        assert objects.get(KEY, 3, 3, max_size=0) == b""

    def test_put_again_is_the_same_object(self, objects: ObjectStore) -> None:
        objects.put(KEY, b"same")
        objects.put(KEY, b"same")
        assert [info.key for info in objects.list("")] == [KEY]
        assert objects.get(KEY, max_size=4) == b"same"

    def test_too_large(self, objects: ObjectStore) -> None:
        objects.put(KEY, b"0123456789")
        with pytest.raises(CorruptionError):
            objects.get(KEY, max_size=9)

    def test_range_past_the_end(self, objects: ObjectStore) -> None:
        objects.put(KEY, b"0123456789")
        for start, end in [(8, 11), (20, 30)]:
            with pytest.raises(CorruptionError):
                objects.get(KEY, start, end, max_size=100)

    def test_put_if_absent_keeps_the_first(self, objects: ObjectStore) -> None:
        assert objects.put_if_absent(KEY, b"first")
        assert not objects.put_if_absent(KEY, b"second")
        assert objects.get(KEY, max_size=10) == b"first"

    def test_race_has_one_winner(self, objects: ObjectStore) -> None:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(3):
                key = f"probe/{uuid.uuid4().hex[:16]}"
                wins = list(pool.map(lambda n, key=key: objects.put_if_absent(key, b"%d" % n), range(8)))
                assert wins.count(True) == 1
                assert objects.get(key, max_size=1) == b"%d" % wins.index(True)

    def test_list_by_prefix(self, objects: ObjectStore) -> None:
        now = objects.server_time()
        objects.put(KEY, b"1")
        objects.put(OTHER, b"22")
        objects.put("format.json", b"333")
        assert sorted((info.key, info.size) for info in objects.list("")) == [
            (KEY, 1),
            (OTHER, 2),
            ("format.json", 3),
        ]
        assert [info.key for info in objects.list(KEY)] == [KEY]
        assert sorted(info.key for info in objects.list("data/")) == [KEY, OTHER]
        assert len(objects.list("", limit=2)) == 2
        for info in objects.list("data/"):
            assert info.modified is not None
            assert abs(info.modified - now) < 600

    def test_listing_sees_changes_of_another_instance(self, objects: ObjectStore) -> None:
        assert objects.list("data/") == []
        other = pickle.loads(pickle.dumps(objects)) if not isinstance(objects, FakeObjects) else objects
        other.put(KEY, b"1")
        assert [info.key for info in objects.list("data/")] == [KEY]
        other.delete([KEY])
        assert objects.list("data/") == []

    def test_delete(self, objects: ObjectStore) -> None:
        objects.put(KEY, b"1")
        objects.put(OTHER, b"2")
        objects.delete([KEY])
        assert [info.key for info in objects.list("")] == [OTHER]

    def test_time_and_sweep_leave_nothing(self, objects: ObjectStore) -> None:
        objects.put(KEY, b"1")
        now = objects.server_time()
        assert objects.sweep(now + 3600) == 0
        assert [info.key for info in objects.list("")] == [KEY]

    def test_a_run_on_top(self, objects: ObjectStore) -> None:
        store = RunStore("ignored", objects=objects)
        assert not store.exists()
        assert newest_sound(store, lambda manifest, blobs: blobs) is None
        with store.writer() as writer:
            assert writer.mode == "conditional"
            base = writer.commit(b"base", step=1, kind="base", parent=None, state_digest="a", meta={})
            delta = writer.commit(
                b"delta", step=2, kind="delta", parent=base, state_digest="b", meta={"x": 1}
            )
            writer.pin("best", delta)
        assert store.exists()
        assert store.pins() == {"best": 1}
        found = newest_sound(RunStore("ignored", objects=objects), lambda manifest, blobs: blobs)
        assert found == (delta, [b"base", b"delta"])
        assert store.fetch_range(delta.chain[1], 1, 3) == b"el"


class TestFake(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> ObjectStore:
        return FakeObjects()


class TestLocal(ObjectStoreContract):
    @pytest.fixture
    def objects(self, tmp_path: Path) -> ObjectStore:
        return open_objects(tmp_path / "deep" / "run")


class TestMemory(ObjectStoreContract):
    @pytest.fixture
    def objects(self) -> ObjectStore:
        return open_objects(f"memory://{uuid.uuid4().hex}/run")


class TestStripedFolders(ObjectStoreContract):
    @pytest.fixture(
        params=[(3, 1), *(pytest.param(p, marks=pytest.mark.slow) for p in [(2, 1), (3, 0), (3, 2), (5, 2)])],
        ids=str,
    )
    def objects(self, request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
        stores, parity = request.param
        return StripedObjects([open_objects(tmp_path / f"{i}" / "run") for i in range(stores)], parity=parity)


class TestS3(ObjectStoreContract):
    @pytest.fixture
    def objects(self, server: S3Server) -> ObjectStore:
        return open_objects(f"s3://{new_bucket(server)}/some/run", storage_options(server))


class TestS3WholeBucket(ObjectStoreContract):
    @pytest.fixture
    def objects(self, server: S3Server) -> ObjectStore:
        return open_objects(f"s3://{new_bucket(server)}", storage_options(server))


@pytest.mark.slow
class TestStripedBuckets(ObjectStoreContract):
    @pytest.fixture
    def objects(self, server: S3Server, tmp_path: Path) -> ObjectStore:
        urls = [f"s3://{new_bucket(server)}/run", f"s3://{new_bucket(server)}/run", str(tmp_path / "run")]
        return open_objects(Stores(urls, parity=1), storage_options(server))


@pytest.mark.parametrize("kind", ["local", "s3", "several"])
def test_fork_while_open(kind: str, tmp_path: Path, server: S3Server) -> None:
    """A child reads and opens its own writer; the parent's writer refuses to work there."""
    urls = {"local": str(tmp_path), "several": [tmp_path / name for name in "abc"]}
    url = urls.get(kind) or f"s3://{new_bucket(server)}/run"
    store = RunStore(url, storage_options=storage_options(server) if kind == "s3" else None)
    writer = store.writer()
    base = writer.commit(b"base", step=1, kind="base", parent=None, state_digest="", meta={})
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                writer.commit(b"no", step=2, kind="base", parent=None, state_digest="", meta={})
            except StoreError as error:
                refused = "fork" in str(error)
            with store.writer() as own:
                own.commit(b"child", step=3, kind="delta", parent=base, state_digest="", meta={})
            status = 0 if refused and store.fetch(base) == [b"base"] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [manifest.step for manifest in store.manifests()] == [3, 1]


def test_pickle_holds_no_connection(server: S3Server) -> None:
    store = RunStore(f"s3://{new_bucket(server)}/run", storage_options=storage_options(server))
    with store.writer() as writer:
        writer.commit(b"base", step=1, kind="base", parent=None, state_digest="", meta={})
    assert b"s3fs" not in pickle.dumps(store)
    assert [manifest.step for manifest in pickle.loads(pickle.dumps(store)).manifests()] == [1]
