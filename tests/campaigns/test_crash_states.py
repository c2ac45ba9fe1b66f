"""No power cut loses an acknowledged save on a local disk, whichever unsynced effects reached it.

The system calls of a real writer are recorded, every state that a disk may be in after a cut at any point is laid out,
and recovery is run on it. The same recording with one safeguard taken out must lose saves: that shows the test sees.
"""

import hashlib
import itertools
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
from support.chaos_worker import verified_digest
from support.crash_states import (
    CrashState,
    Operation,
    Recorder,
    acknowledged_early,
    crash_states,
    in_place,
    without_file_syncs,
    without_folder_syncs,
    without_parent_syncs,
)
from support.newest import newest_sound

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.store import local
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped.blobs import MIRROR_BELOW

RUN = "outer/inner/run"  # two folders above it that the writer has to make as well
SEVERAL = ("a/run", "b/run", "c/run")  # on one machine, whose power is cut


def _store(base: Path, runs: Sequence[str]) -> RunStore:
    return RunStore([str(base / run) for run in runs])


def _record(
    base: Path, monkeypatch: pytest.MonkeyPatch, saves: int, runs: Sequence[str] = (RUN,)
) -> list[Operation]:
    """Chains of up to four checkpoints; every eighth save is followed by a collection that keeps the newest three."""
    base.mkdir()
    recorder = Recorder(base)
    rng = random.Random(7)
    with monkeypatch.context() as patch:
        patch.setattr(local, "os", recorder)
        store = _store(base, runs)
        writer = store.writer()
        parent = None
        for step in range(saves):
            parent = None if step % 4 == 0 else parent
            container = rng.randbytes(200 + step if step % 2 or len(runs) == 1 else MIRROR_BELOW + step)
            digest = hashlib.sha256((parent.state_digest if parent else "").encode() + container).hexdigest()
            kind: Literal["base", "delta"] = "delta" if parent else "base"
            parent = writer.commit(
                container, step=step, kind=kind, parent=parent, state_digest=digest, meta={}
            )
            recorder.ack(digest)
            if step % 8 == 7:
                manifests = store.manifests()
                for old in manifests[3:]:
                    recorder.retire(old.state_digest)
                writer.collect([manifest.seq for manifest in manifests[:3]], grace_s=0.0)
        writer.close()
    return recorder.operations


def _lost(state: CrashState, folder: Path, runs: Sequence[str]) -> list[str]:
    """What was acknowledged and cannot be restored from ``state``."""
    if not state.acked:
        return []
    state.write_to(folder)
    store = _store(folder, runs)
    try:
        manifests = {manifest.state_digest: manifest for manifest in store.manifests()}
        missing = []
        for digest in state.acked:
            try:
                store.fetch(manifests[digest])
            except (KeyError, ShrinkpointError) as error:
                missing.append(f"{digest[:8]}: {error!r}")
        found = newest_sound(store, verified_digest)
        if found is None or found[1] not in (state.acked[-1], *_later(state, found[1])):
            missing.append(f"recovery finds {found and found[0].seq}")
    except ShrinkpointError as error:
        missing = [f"recovery fails: {error!r}"]
    return missing


def _later(state: CrashState, digest: str) -> list[str]:
    """``digest`` if it belongs to a save that was committed and not yet acknowledged."""
    return [] if digest in state.acked else [digest]


def _losing(
    operations: Sequence[Operation],
    folder: Path,
    most: int = 48,
    runs: Sequence[str] = (RUN,),
    every: int = 1,
) -> tuple[list[str], int]:
    """One example for each crash state that loses something, and how many states were tried: each, or a sample."""
    examples, total = [], 0
    for state in itertools.islice(crash_states(operations, most=most), 0, None, every):
        total += 1
        examples += _lost(state, folder / "state", runs)[:1]
        shutil.rmtree(folder / "state", ignore_errors=True)
    return examples, total


def _first_loss(operations: Sequence[Operation], folder: Path, runs: Sequence[str]) -> tuple[int, str | None]:
    """How many crash states were tried until one lost something, and what: nothing if none does."""
    tried = 0
    for tried, state in enumerate(crash_states(operations, most=6), 1):
        lost = _lost(state, folder / "state", runs)
        shutil.rmtree(folder / "state", ignore_errors=True)
        if lost:
            return tried, lost[0]
    return tried, None


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
@pytest.mark.parametrize(("saves", "least"), [(9, 150), pytest.param(34, 1000, marks=pytest.mark.slow)])
def test_no_state_loses_an_acknowledged_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int, least: int
) -> None:
    examples, total = _losing(_record(tmp_path / "recorded", monkeypatch, saves), tmp_path)
    print(f"{len(examples)} of {total} crash states lose an acknowledged save")
    assert not examples
    assert total >= least


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
@pytest.mark.parametrize(
    ("saves", "every", "least"),
    [(4, 4, 50), pytest.param(12, 1, 1000, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_no_state_of_several_stores_loses_an_acknowledged_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int, every: int, least: int
) -> None:
    """Each of the three may be in whatever state it likes, after one and the same cut."""
    operations = _record(tmp_path / "recorded", monkeypatch, saves, SEVERAL)
    examples, total = _losing(operations, tmp_path, most=12, runs=SEVERAL, every=every)
    print(f"{len(examples)} of {total} crash states of several stores lose an acknowledged save")
    assert not examples
    assert total >= least


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
def test_saving_goes_on_from_sampled_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = crash_states(_record(tmp_path / "recorded", monkeypatch, saves=10))
    for state in itertools.islice(states, 0, None, 12):
        place = tmp_path / "state"
        state.write_to(place)
        store = RunStore(str(place / RUN))
        digest = hashlib.sha256(b"after").hexdigest()
        with store.writer() as writer:
            writer.commit(b"after", step=1000, kind="base", parent=None, state_digest=digest, meta={})
        found = newest_sound(store, verified_digest)
        assert found is not None
        assert found[1] == digest
        shutil.rmtree(place)


def _early(operations: Sequence[Operation]) -> list[Operation]:
    return acknowledged_early(operations, lambda name: name[:10].isdigit() and name.endswith(".json"))


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
@pytest.mark.parametrize("runs", [(RUN,), SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize(
    "sabotage", [without_file_syncs, without_folder_syncs, without_parent_syncs, in_place, _early]
)
def test_without_one_safeguard_saves_are_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: Callable[[Sequence[Operation]], list[Operation]],
    runs: Sequence[str],
) -> None:
    """No sample: the order of what several stores record differs from run to run, and so does which states lose."""
    operations = sabotage(_record(tmp_path / "recorded", monkeypatch, 3, runs))
    total, example = _first_loss(operations, tmp_path, runs)
    print(f"{sabotage.__name__}: crash state {total} loses an acknowledged save: {example}")
    assert example
