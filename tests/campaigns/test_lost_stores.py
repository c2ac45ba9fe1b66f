"""kill -9 in mid-save, then a store lost, blank, put back to an earlier day, rotten, or gone and back: nothing is lost.

``--trials 250`` asks for so many trials of each kind of set. Negative controls, which save in other ways, do lose.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import stores_worker
from support.ceph import CephGateway, missing_programs
from support.chaos import draw_fault
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.s3 import S3Server
from support.store_places import BucketPlace, FolderPlace, Place
from support.stores_worker import WriterConfig, content, open_objects, open_run, request_of, retired, taken

from shrinkpoint.errors import ShrinkpointError, ShrinkpointWarning
from shrinkpoint.store.striped import StripedObjects
from shrinkpoint.store.striped.heal import heal

pytestmark = pytest.mark.timeout(14400)

TRIALS = 20
FAULTED = 0.03
KINDS = ("lost", "blank", "stale", "rot", "gone and back")
QUICK = len(KINDS)


class Nursery:
    """The server of `support.stores_worker`."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        path = str(Path(stores_worker.__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self._process = subprocess.Popen(
            [sys.executable, stores_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.open("wb"),
            text=True,
            env=environment,
        )

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self.errors.read_text()[-4000:]
        return int(answer)

    def start(self, config: WriterConfig) -> int:
        return self._ask(request_of(config))

    def reap(self, pid: int) -> int:
        return self._ask(json.dumps({"reap": pid}))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "stderr")
    yield nursery
    nursery.close()


class Trial:
    """One run, and what happens to it."""

    def __init__(
        self,
        nursery: Nursery,
        root: Path,
        rng: random.Random,
        places: Sequence[Place],
        parity: int,
        how: str,
        slowness: float = 1.0,
    ) -> None:
        self.places = places
        self.slowness = slowness
        stores = len(places)
        self.nursery, self.root, self.rng = nursery, str(root), rng
        self.stores, self.parity, self.how = stores, parity, how
        self.wrong: list[str] = []

    def objects(self) -> StripedObjects:
        opened = [place.opened for place in self.places]
        return open_objects(self.root, self.stores, self.parity, self.how, opened)

    def save(self, more: int, *, resume: bool = True, vanish: list[int] | None = None) -> None:
        """Save until so many more are acknowledged, and kill it in the middle of what follows."""
        before = len(taken(self.root))
        remote = [store for store in vanish or () if self.places[store].opened is not None]
        config = WriterConfig(
            root=self.root,
            stores=self.stores,
            parity=self.parity,
            how=self.how,
            resume=resume,
            vanish=[store for store in vanish or () if store not in remote],
            places=[place.opened for place in self.places],
        )
        pid = self.nursery.start(config)
        deadline = time.monotonic() + 60 * self.slowness
        while len(taken(self.root)) < before + more and time.monotonic() < deadline:
            if not _lives(pid):
                if self.slowness == 1.0:
                    break
                # Where requests fail at random, a start may: all stores must answer then. It is made again, as a user would.
                self.nursery.reap(pid)
                pid = self.nursery.start(replace(config, resume=resume or bool(taken(self.root))))
            time.sleep(0.002)
            if remote and len(taken(self.root)) >= before + 3:
                for store in remote:
                    self.places[store].vanish()
                remote = []
        time.sleep(self.rng.random() * 0.03 * self.slowness)
        os.kill(pid, signal.SIGKILL)
        self.nursery.reap(pid)
        if self.how == "ours" and len(taken(self.root)) < before + more:
            self.wrong.append(f"saving did not go on: {self.nursery.errors.read_text()[-600:]}")

    def check(self, when: str) -> None:
        """Everything that was acknowledged and not retired is there, and the newest is at least the last of them."""
        acks = taken(self.root)
        last = max((step for step, _, _ in acks), default=0)
        run = open_run(self.objects())
        try:
            found = run.newest_sound(lambda manifest, blobs: blobs)
            manifests = {manifest.digest: manifest for manifest in run.manifests()}
            for step, _, digest in acks[-5:]:
                if step >= retired(self.root):
                    run.fetch(manifests[digest])
        except (ShrinkpointError, KeyError) as error:
            self.wrong.append(f"{when}: {type(error).__name__} ({error}), {last} acknowledged")
            return
        if found is None or found[0].step < last:
            self.wrong.append(f"{when}: {found and found[0].step} found, {last} acknowledged")
        elif any(blob != content(found[0].step - len(found[1]) + 1 + i) for i, blob in enumerate(found[1])):
            self.wrong.append(f"{when}: other bytes")

    def heal(self) -> None:
        for place in self.places:
            place.replace()
        objects = self.objects()
        run = open_run(objects)
        needed = {ref.key for manifest in run.manifests() for ref in manifest.chain}
        healed = heal(objects, needed)
        if healed.lost:
            self.wrong.append(f"healing: {healed.lost}")

    def run(self, kind: str, victims: list[int]) -> None:
        self.save(self.rng.randrange(3, 14), resume=False)
        if kind == "gone and back":
            self.save(12, vanish=victims)
            self.check("while it is gone")
            for victim in victims:
                self.places[victim].come_back()
            self.check("when it is back")
        elif kind == "stale":
            for victim in victims:
                self.places[victim].remember()
            self.save(6)
            for victim in victims:
                self.places[victim].put_back()
            self.check("of an earlier day")
        elif kind == "rot":
            for victim in victims:
                self.places[victim].rot(self.rng)
            self.check("rotten")
        else:
            for victim in victims:
                place = self.places[victim]
                place.blank() if kind == "blank" else place.lose()
            self.check(kind)
        self.save(4)
        self.check("gone on")
        if self.how == "ours":  # as before: as many others may be lost now
            self.heal()
            others = [store for store in range(self.stores) if store not in victims]
            for store in self.rng.sample(others, self.parity):
                self.places[store].lose()
            self.check("healed, and others lost")
            self.save(2)
            self.check("gone on after that")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _trials(
    nursery: Nursery,
    folder: Path,
    count: int,
    *,
    stores: int,
    parity: int,
    how: str = "ours",
    kinds: tuple[str, ...] = KINDS,
    victim: int | None = None,
    where: Callable[[Path], AbstractContextManager[Sequence[Place]]] | None = None,
    slowness: float = 1.0,
) -> list[tuple[int, str, list[str]]]:
    bad, seen = [], Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        for seed in range(count):
            rng = random.Random(f"{how} {stores} {parity} {seed}")
            kind = kinds[seed % len(kinds)]
            victims = [victim] if victim is not None else rng.sample(range(stores), max(1, parity))
            root = folder / str(seed)
            root.mkdir()
            with (
                where(root) if where else nullcontext([FolderPlace(root, i) for i in range(stores)]) as places
            ):
                trial = Trial(nursery, root, rng, places, parity, how, slowness)
                trial.run(kind, victims)
            seen[kind] += 1
            if trial.wrong:
                bad.append((seed, kind, trial.wrong))
                print("   ", seed, kind, trial.wrong, flush=True)
            shutil.rmtree(root)
            if (seed + 1) % (25 if where is None else 5) == 0:  # a long campaign is looked at before its end
                print(
                    f"{how}, {stores} stores, parity {parity}: {seed + 1} trials, {len(bad)} lost", flush=True
                )
    print(f"{how}, {stores} stores, parity {parity}: {dict(seen)}, {len(bad)} of {count} lost something")
    return bad


def test_nothing_acknowledged_is_lost_quickly(nursery: Nursery, tmp_path: Path) -> None:
    assert _trials(nursery, tmp_path, QUICK, stores=3, parity=1) == []


@pytest.mark.slow
@pytest.mark.parametrize(("stores", "parity"), [(3, 1), (5, 2)])
def test_nothing_acknowledged_is_lost(
    nursery: Nursery, tmp_path: Path, pytestconfig: pytest.Config, stores: int, parity: int
) -> None:
    count = pytestconfig.getoption("kills") or TRIALS
    assert _trials(nursery, tmp_path, count, stores=stores, parity=parity) == []


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[S3Server]]:
    """Two servers, each of its own monitor and disk."""
    if missing := missing_programs():
        reason = f"not on PATH: {', '.join(missing)} (Debian: radosgw ceph-mon ceph-osd ceph-common)"
        if os.environ.get("SHRINKPOINT_REQUIRE_REAL_S3") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ceph")
    with CephGateway(folder / "a") as first, CephGateway(folder / "b") as second:
        yield [first, second]


@pytest.mark.slow
@pytest.mark.real_s3
def test_nothing_acknowledged_is_lost_of_two_gateways_and_a_folder(
    nursery: Nursery, tmp_path: Path, pytestconfig: pytest.Config, gateways: list[S3Server]
) -> None:
    @contextmanager
    def where(root: Path) -> Iterator[list[Place]]:
        with ExitStack() as stack:
            buckets = []
            for server in gateways:
                proxy = stack.enter_context(FaultProxy((server.host, server.port), seed=len(root.name)))
                noise = Rule("", draw_fault, times=None, probability=FAULTED)
                buckets.append(BucketPlace(server, proxy, noise))
                stack.callback(buckets[-1].close)
            yield [buckets[0], FolderPlace(root, 1), buckets[1]]

    count = pytestconfig.getoption("kills") or 2
    assert _trials(nursery, tmp_path, count, stores=3, parity=1, where=where, slowness=4.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kinds", "victim"),
    [
        ("no parity", ("lost", "rot"), None),
        ("manifests on store 1 only", ("lost", "stale"), 0),
        ("committed at one copy", ("lost", "blank"), None),
    ],
)
def test_other_ways_lose(
    nursery: Nursery, tmp_path: Path, how: str, kinds: tuple[str, ...], victim: int | None
) -> None:
    assert len(_trials(nursery, tmp_path, 4, stores=3, parity=1, how=how, kinds=kinds, victim=victim)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("gone", [None, 0, 1, 2])
def test_of_two_writers_the_older_is_fenced(nursery: Nursery, tmp_path: Path, gone: int | None) -> None:
    common: dict[str, Any] = {"root": str(tmp_path), "pause_s": 0.005, "collects": False}
    first = nursery.start(WriterConfig(journal="a", steps=150, **common))
    while len(taken(str(tmp_path), "a")) < 10:
        time.sleep(0.01)
    if gone is not None:
        os.rename(tmp_path / f"s{gone}", tmp_path / "gone")
    second = nursery.start(WriterConfig(journal="b", steps=20, **common))
    nursery.reap(first), nursery.reap(second)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        there = {m.digest: m for m in open_run(open_objects(str(tmp_path), 3, 1)).manifests()}
    a, b = (taken(str(tmp_path), name) for name in "ab")
    print(f"{len(a)} and {len(b)} acknowledged, {len(there)} there")
    assert {digest for _, _, digest in a + b} <= set(there)
    text = (tmp_path / "a").read_text()
    assert "# fenced" in text
    assert len(b) == 20
    newest = next(iter(there.values()))
    assert newest.meta["who"] == "b"
    assert newest.digest == b[-1][2]
