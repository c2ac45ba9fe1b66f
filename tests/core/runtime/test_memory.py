"""What is kept between saves of large states: not the snapshot, and the files are the same."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from support.training import OPTIMIZERS, TinyGPT, capture, train

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.engine.movement import MovementTracker
from shrinkpoint.runtime import memory
from shrinkpoint.saver import Saver, SaverConfig
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import Role, TrainingState


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("state.snapshot", "engine.background"):
        monkeypatch.setattr(f"shrinkpoint.{module}.LARGE", 1)


def saved(folder: Path, scheme: str, saves: int = 3) -> Checkpointer:
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = OPTIMIZERS["AdamW"](model)
    checkpointer = Checkpointer(
        str(folder), model, optimizer, scheme=scheme, evaluate=lambda: float(model.head.weight.abs().mean())
    )
    checkpointer.resume()
    for step in range(1, saves + 1):
        train(model, optimizer, range(10 * step, 10 * step + 5))
        checkpointer.save(step, wait=True)
    return checkpointer


def containers(folder: Path) -> list[bytes]:
    files = sorted((folder / "data").rglob("*"), key=lambda file: file.name)
    return [file.read_bytes() for file in files if file.is_file()]


def test_a_large_snapshot_is_its_takers_alone(all_are_large) -> None:
    state = TrainingState.capture({"a": torch.randn(4, 4)})
    snapshotter = Snapshotter()
    first, second = snapshotter.take(state), snapshotter.take(state)
    assert first.lasting
    assert first.wait().tensors["a"].data_ptr() != second.wait().tensors["a"].data_ptr()
    gone = weakref.ref(first.state.tensors["a"])
    del first
    gc.collect()
    assert gone() is None


def test_small_ones_are_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    state = TrainingState.capture({"a": torch.randn(4, 4)})
    assert state.nbytes < memory.LARGE
    assert not Snapshotter().take(state).lasting


def test_weights_that_last_are_not_copied() -> None:
    model = TinyGPT()
    state = Snapshotter().take(capture(model, OPTIMIZERS["AdamW"](model))).wait()
    tracker = MovementTracker()
    tracker.note(state, 1, lasting=True)
    weights = [name for name, spec in state.specs.items() if spec.tag.role is Role.WEIGHT]
    assert weights
    assert all(tracker.noted[name] is state.tensors[name] for name in weights)
    moved = tracker.since(state, 2)
    assert moved is not None
    assert not any(rows.any() for rows in moved.rows.values())


@pytest.mark.parametrize("scheme", ["auto", "lossless", "inshrinkerator"])
def test_nothing_but_weights_and_planes_is_left_of_a_large_snapshot(
    all_are_large, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    taken: list[dict[str, weakref.ref[torch.Tensor]]] = []
    take = Snapshotter.take

    def watched(self: Snapshotter, state: TrainingState) -> object:
        snapshot = take(self, state)
        taken.append({name: weakref.ref(tensor) for name, tensor in snapshot.state.tensors.items()})
        return snapshot

    monkeypatch.setattr(Snapshotter, "take", watched)
    checkpointer = saved(tmp_path, scheme)
    gc.collect()
    followed = set(checkpointer.saver._background.movement.noted)
    assert bool(followed) == (scheme != "lossless")
    assert len(taken) == 3 + bool(followed)  # where training begins, too
    for snapshot in taken[:-1]:
        assert not [name for name, tensor in snapshot.items() if tensor() is not None]
    assert {name for name, tensor in taken[-1].items() if tensor() is not None} == followed
    checkpointer.close()


@pytest.mark.parametrize(
    "scheme", ["auto", "lossless"]
)  # how far inshrinkerator's search gets depends on the time
def test_the_files_are_those_of_snapshots_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    saved(tmp_path / "kept", scheme).close()
    for module in ("state.snapshot", "engine.background"):
        monkeypatch.setattr(f"shrinkpoint.{module}.LARGE", 1)
    saved(tmp_path / "let go", scheme).close()
    kept, let_go = (containers(tmp_path / folder) for folder in ("kept", "let go"))
    assert len(kept) == 3
    assert kept == let_go


def test_what_is_held_does_not_follow_the_training(all_are_large, tmp_path: Path) -> None:
    """Planes may share a snapshot's memory, which the training never writes to: deltas of it restore what was saved."""
    checkpointer = saved(tmp_path, "lossless")
    live = {name: value.clone() for name, value in checkpointer._objects.state()["model"].items()}
    checkpointer.close()
    restored = Saver(str(tmp_path), SaverConfig(scheme="lossless")).restore()
    assert restored is not None
    found = restored.state.to_object()["model"]
    assert all(torch.equal(found[name], value) for name, value in live.items())


def test_memory_is_given_back_after_large_saves_alone(
    all_are_large, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[None] = []
    monkeypatch.setattr("shrinkpoint.engine.background.give_back", lambda: given.append(None))
    saved(tmp_path / "large", "lossless", saves=1).close()
    once = len(given)
    saved(tmp_path / "again", "lossless", saves=2).close()
    assert len(given) == 3 * once > 0
    for module in ("state.snapshot", "engine.background"):
        monkeypatch.setattr(f"shrinkpoint.{module}.LARGE", memory.LARGE)
    saved(tmp_path / "small", "lossless", saves=2).close()
    assert len(given) == 3 * once


def test_memory_is_given_back_some_times_while_a_large_state_is_worked_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[None] = []
    monkeypatch.setattr(memory, "give_back", lambda: given.append(None))
    small, large = memory.Returns(memory.LARGE - 1), memory.Returns(memory.LARGE)
    for _ in range(1000):
        small.after(memory.LARGE // 1000)
    assert not given
    for _ in range(1000):
        large.after(memory.LARGE // 1000)
    assert 12 <= len(given) <= 16


def test_where_the_c_library_cannot_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    memory._trim.cache_clear()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    memory.give_back()
    memory._trim.cache_clear()
    monkeypatch.undo()
    memory.give_back()


def test_after_a_save_that_failed_less_movement_is_known_never_more(
    all_are_large, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned_in_background: list[Warning]
) -> None:
    checkpointer = saved(tmp_path, "auto", saves=1)
    background = checkpointer.saver._background
    with monkeypatch.context() as patched:
        patched.setattr("shrinkpoint.engine.background.write_container", lambda checkpoint, **_: 1 / 0)
        with pytest.warns(match="division by zero"):
            assert checkpointer.save(2, wait=True) is None
    assert background.movement.step == 2
    assert checkpointer.save(3, wait=True) is not None
    assert [(report.step, report.kind) for report in checkpointer.reports()] == [(1, "base"), (3, "base")]
    checkpointer.close()
    restored = Saver(str(tmp_path)).restore()
    assert restored is not None
    assert restored.manifest.step == 3
    warned_in_background.clear()
