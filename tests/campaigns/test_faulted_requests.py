"""One fault at the K-th request, for every K of opening a run, saving to it and restoring from it."""

import hashlib
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
from support.chaos_worker import verified_digest
from support.fault_proxy import FaultProxy
from support.faults import CorruptDown, DropResponse, Fault, ResetBefore, Rule, Status, Truncate, Zombie
from support.matrices import some_fast
from support.newest import newest_sound
from support.s3 import S3Server, new_bucket, storage_options

from shrinkpoint.errors import StoreError
from shrinkpoint.store.connect import open_objects
from shrinkpoint.store.objects import ObjectInfo, ObjectStore
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped.objects import StripedObjects

FAULTS: list[Fault] = [
    DropResponse(),
    ResetBefore(),
    Status(500, "InternalError"),
    Truncate(20),
    CorruptDown(30),
    Zombie(0.2),
]
REFUSALS: list[Fault] = [Status(403, "AccessDenied"), Status(503), ResetBefore()]
QUICK = RetryPolicy(attempts=3, first_delay_s=0.01, max_delay_s=0.05)


class _Below:
    """A part of another object store: many runs over one client, whose start is what costs time."""

    create_is_atomic = None

    def __init__(self, objects: ObjectStore, folder: str) -> None:
        self._objects = objects
        self._folder = f"{folder}/"
        self.display = f"{objects.display}/{folder}"

    def show(self, key: str) -> str:
        return self._objects.show(self._folder + key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._objects.put_if_absent(self._folder + key, data)

    def put(self, key: str, data: bytes) -> None:
        self._objects.put(self._folder + key, data)

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        return self._objects.get(self._folder + key, start, end, max_size=max_size)

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        infos = self._objects.list(self._folder + prefix, limit=limit)
        return [replace(info, key=info.key.removeprefix(self._folder)) for info in infos]

    def delete(self, keys: Collection[str]) -> None:
        self._objects.delete([self._folder + key for key in keys])

    def server_time(self) -> float:
        return self._objects.server_time()

    def sweep(self, before: float) -> int:
        return self._objects.sweep(before)


@dataclass
class _Bench:
    """One bucket or several, reached directly and through the proxy."""

    proxy: FaultProxy
    direct: list[ObjectStore]
    faulty: list[ObjectStore]

    def run(self) -> tuple[ObjectStore, ObjectStore]:
        """A new run: without and with faults."""
        folder = uuid.uuid4().hex
        return self._below(self.direct, folder), self._below(self.faulty, folder)

    def _below(self, buckets: list[ObjectStore], folder: str) -> ObjectStore:
        below: list[ObjectStore] = [_Below(bucket, folder) for bucket in buckets]
        if len(below) == 1:
            return below[0]
        return StripedObjects([RetryingObjects(each, QUICK) for each in below])

    def positions(self, number: int) -> range:
        """Of the requests that the quick form breaks with the fault of this number: of several stores one of some 170."""
        total = self.requests
        return (
            range(1 + number, total, 36) if len(self.direct) == 1 else range(1 + 27 * number, 2 + 27 * number)
        )

    @cached_property
    def requests(self) -> int:
        """One more than a save and a resume make at least; several stores are probed at once, which takes a few more or less."""
        most = [_requests(self) for _ in range(1 if len(self.direct) == 1 else 3)]
        return min(most) + 1 - (0 if len(self.direct) == 1 else 9)


@pytest.fixture(scope="module", params=[1, 3], ids=["one", "several"])
def bench(request: pytest.FixtureRequest, moto: S3Server) -> Iterator[_Bench]:
    urls = [f"s3://{new_bucket(moto)}/runs" for _ in range(request.param)]
    with FaultProxy((moto.host, moto.port)) as proxy:
        direct, faulty = (
            [open_objects(url, storage_options(moto, end)) for url in urls]
            for end in (moto.endpoint, proxy.url)
        )
        for objects in faulty:
            objects.list("")  # the client asks for its own set-up now and not in the middle of a count
        yield _Bench(proxy, direct, faulty)


def _store(objects: ObjectStore) -> RunStore:
    return RunStore("s3://given/objects", objects=objects, retry=QUICK)


def _save(store: RunStore, content: bytes) -> str:
    """Continue from the newest checkpoint with a delta, or begin with a base; returns the acknowledged digest."""
    found = newest_sound(store, verified_digest)
    parent = found[0] if found else None
    digest = hashlib.sha256((parent.state_digest if parent else "").encode() + content).hexdigest()
    with store.writer() as writer:
        writer.commit(
            content,
            step=parent.step + 1 if parent else 0,
            kind="delta" if parent else "base",
            parent=parent,
            state_digest=digest,
            meta={},
        )
    return digest


def _save_and_resume(objects: ObjectStore, content: bytes) -> str:
    digest = _save(_store(objects), content)
    found = newest_sound(_store(objects), verified_digest)
    assert found is not None
    assert found[1] == digest
    return digest


def _requests(bench: _Bench) -> int:
    """How many requests one save and one resume in a run with one checkpoint make."""
    direct, faulty = bench.run()
    _save(_store(direct), b"first")
    bench.proxy.clear()
    _save_and_resume(faulty, b"second")
    return len(bench.proxy.log)


def _run(bench: _Bench, position: int, fault: Fault) -> None:
    where = f"{fault} at request {position}"
    direct, faulty = bench.run()
    clean = _store(direct)
    first = _save(clean, b"first")
    bench.proxy.clear()
    rule = bench.proxy.add(Rule("", fault, skip=position - 1))
    second = _save_and_resume(faulty, b"second")  # one fault is ridden out, not passed on
    bench.proxy.settle()
    assert rule.hits == 1, where
    stored = {manifest.state_digest: manifest for manifest in clean.manifests()}
    for digest in (first, second):
        assert verified_digest(stored[digest], clean.fetch(stored[digest])) == digest, where
    assert len(stored) == 2, where
    third = _save(clean, b"third")
    found = newest_sound(clean, verified_digest)
    assert found is not None, where
    assert found[1] == third, where


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_fault_at_sampled_requests(bench: _Bench, fault: Fault) -> None:
    for position in bench.positions(FAULTS.index(fault)):
        _run(bench, position, fault)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_fault_at_every_request(bench: _Bench, fault: Fault, pytestconfig: pytest.Config) -> None:
    """With ``--exhaustive``, which takes an hour; else every twelfth, and of several stores every 192nd, each fault at others."""
    total = bench.requests - 1
    positions = range(1, total + 1)
    if not pytestconfig.getoption("exhaustive"):
        every = len(FAULTS) * (2 if len(bench.direct) == 1 else 32)
        positions = positions[FAULTS.index(fault) % every :: every]
    for position in positions:
        _run(bench, position, fault)
    print(f"{type(fault).__name__} at {len(positions)} of {total} requests: nothing lost")


@pytest.mark.parametrize("fault", some_fast(REFUSALS, REFUSALS[:1], slow=[]), ids=str)
def test_failing_listing_is_an_error_and_not_an_empty_run(bench: _Bench, fault: Fault) -> None:
    direct, faulty = bench.run()
    _save(_store(direct), b"first")
    bench.proxy.clear()
    bench.proxy.add(Rule("list-type=2", fault, times=None))
    with pytest.raises(StoreError):
        newest_sound(_store(faulty), verified_digest)
