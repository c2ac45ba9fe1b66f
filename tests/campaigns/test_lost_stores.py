"""kill -9 in mid-save, then a store lost, blank, put back to an earlier day, rotten, or gone and back: nothing is lost.

``--trials 250`` asks for so many trials of each kind of set. Negative controls, which save in other ways, do lose.
"""

import os
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.ceph import CephGateway, missing_programs
from support.chaos import draw_fault
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.s3 import S3Server
from support.store_places import BucketPlace, FolderPlace, Place
from support.store_trials import KINDS, STEPPED_BACK, UNRESTORABLE, Nursery, Trial
from support.stores_worker import WriterConfig, open_objects, open_run, taken

from shrinkpoint.errors import ShrinkpointWarning

pytestmark = pytest.mark.timeout(14400)

TRIALS = 20
FAULTED = 0.03


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "stderr")
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def nurseries(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[list[Nursery]]:
    """One for each trial at a time: trials wait most of the time, for disks and servers and for another attempt."""
    folder = tmp_path_factory.mktemp("nurseries")
    count = min(pytestconfig.getoption("at_once"), pytestconfig.getoption("kills") or TRIALS)
    several = [Nursery(folder / str(i)) for i in range(count)]
    yield several
    for nursery in several:
        nursery.close()


def _trials(
    nurseries: Sequence[Nursery],
    folder: Path,
    count: int,
    *,
    first: int = 0,
    stores: int,
    parity: int,
    how: str = "ours",
    kinds: tuple[str, ...] = KINDS,
    where: Callable[[Path], AbstractContextManager[Sequence[Place]]] | None = None,
    slowness: float = 1.0,
) -> list[tuple[int, str, list[str]]]:
    """The trials that lost something: number, kind, what was wrong. As many at once as there are nurseries."""
    began, free = time.monotonic(), SimpleQueue[Nursery]()
    for nursery in nurseries:
        free.put(nursery)

    def run(seed: int) -> Trial:
        rng = random.Random(f"{how} {stores} {parity} {seed}")
        victims = rng.sample(range(stores), max(1, parity))
        root = folder / str(seed)
        root.mkdir()
        with where(root) if where else nullcontext([FolderPlace(root, i) for i in range(stores)]) as places:
            nursery = free.get()
            try:
                trial = Trial(nursery, root, rng, places, parity, how, slowness)
                trial.run(kinds[seed % len(kinds)], victims)
            finally:
                free.put(nursery)
        shutil.rmtree(root)
        return trial

    bad, seen, checked = [], Counter[str](), 0
    with warnings.catch_warnings(), ThreadPoolExecutor(len(nurseries)) as pool:
        warnings.simplefilter("ignore", ShrinkpointWarning)
        numbers = range(first, first + count)
        for done, (seed, trial) in enumerate(zip(numbers, pool.map(run, numbers), strict=True), 1):
            kind = kinds[seed % len(kinds)]
            seen[kind] += 1
            checked += trial.checked
            if trial.wrong:
                bad.append((seed, kind, trial.wrong))
                print("   ", seed, kind, trial.wrong, flush=True)
            if done % (25 if where is None else 5) == 0:  # a long campaign is looked at before its end
                spent = time.monotonic() - began
                print(
                    f"{how}, {stores} stores, parity {parity}: {done} trials, {len(bad)} lost, {spent:.0f} s",
                    flush=True,
                )
    print(
        f"{how}, {stores} stores, parity {parity}: {dict(seen)}; {checked} times a checkpoint was read that had been"
        f" acknowledged; {len(bad)} of {count} trials lost something"
    )
    return bad


def test_nothing_acknowledged_is_lost_quickly(nursery: Nursery, tmp_path: Path) -> None:
    assert _trials([nursery], tmp_path, len(KINDS), stores=3, parity=1) == []


@pytest.mark.slow
@pytest.mark.parametrize(("stores", "parity"), [(3, 1), (5, 2)])
def test_nothing_acknowledged_is_lost(
    nurseries: list[Nursery], tmp_path: Path, pytestconfig: pytest.Config, stores: int, parity: int
) -> None:
    count = pytestconfig.getoption("kills") or TRIALS
    first = pytestconfig.getoption("first_trial")
    assert _trials(nurseries, tmp_path, count, first=first, stores=stores, parity=parity) == []


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
@pytest.mark.long
@pytest.mark.real_s3
def test_nothing_acknowledged_is_lost_of_two_gateways_and_a_folder(
    nurseries: list[Nursery], tmp_path: Path, pytestconfig: pytest.Config, gateways: list[S3Server]
) -> None:
    @contextmanager
    def where(root: Path) -> Iterator[list[Place]]:
        with ExitStack() as stack:
            buckets = []
            for number, server in enumerate(gateways):
                seed = f"trial {root.name}, gateway {number}"
                proxy = stack.enter_context(FaultProxy((server.host, server.port), seed=seed))
                noise = Rule("", draw_fault, times=None, probability=FAULTED)
                buckets.append(BucketPlace(server, proxy, noise))
                stack.callback(buckets[-1].close)
            yield [buckets[0], FolderPlace(root, 1), buckets[1]]

    count = pytestconfig.getoption("kills") or len(KINDS)
    first = pytestconfig.getoption("first_trial")
    lost = _trials(nurseries, tmp_path, count, first=first, stores=3, parity=1, where=where, slowness=4.0)
    assert lost == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "losses"),
    [
        ("no parity", {"lost": UNRESTORABLE, "rot": UNRESTORABLE}),
        ("manifests on store 1 only", {"lost": UNRESTORABLE, "stale": STEPPED_BACK}),
        ("committed at one copy", {"lost": STEPPED_BACK, "blank": STEPPED_BACK}),
    ],
)
def test_other_ways_lose(nursery: Nursery, tmp_path: Path, how: str, losses: dict[str, str]) -> None:
    lost = _trials([nursery], tmp_path, 4, stores=3, parity=1, how=how, kinds=tuple(losses))
    as_expected = [number for number, kind, wrong in lost if any(losses[kind] in each for each in wrong)]
    assert as_expected == [0, 1, 2, 3]


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
