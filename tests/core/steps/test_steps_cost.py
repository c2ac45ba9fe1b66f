"""What the training's thread spends in the exact log: all of it is counted, and how long it may wait is bounded."""

import threading
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch
from support.small_log import SmallLogTraining
from support.stepped import Training, held_up

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.steps import exact, log
from shrinkpoint.steps.capture import Copies

MB = 10**6


class Clock:
    """Stands still but where it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def thread_time(self) -> float:
        return self.now / 2


@pytest.mark.parametrize("closure", [False, True])
def test_copies_of_gradients_are_counted_and_the_closure_is_not(monkeypatch, closure, places):
    clock, taken = Clock(), []
    take = Copies.take

    def slow(*arguments, **options):
        taken.append(arguments[1])
        clock.now += 1.0
        return take(*arguments, **options)

    training = Training(closure=closure).log(*places, every=50, steps=2)
    batch = training.batches.next

    def slow_batch() -> torch.Tensor:
        clock.now += 100.0
        return batch()

    training.checkpointer.resume()
    with monkeypatch.context() as patch:
        patch.setattr(log, "time", clock)
        patch.setattr(Copies, "take", slow)
        patch.setattr(training.batches, "next", slow_batch)
        before, before_cpu = (
            training.checkpointer.step_log.log.blocked_s,
            training.checkpointer.step_log.log.blocked_cpu_s,
        )
        training.run(0, 4)
        assert taken.count("0") == 4  # a copy of the first optimizer's gradients in each step
        assert taken.count("remainder") == 2
        own = training.checkpointer.step_log.log
        assert (own.blocked_s - before, own.blocked_cpu_s - before_cpu) == (6.0, 3.0)
    training.crash()


def test_a_segment_waits_until_the_one_before_is_written(monkeypatch, places):
    training = Training().log(*places, every=50, steps=2)
    training.checkpointer.resume()
    writer, go = training.checkpointer.step_log.log._writer, threading.Event()
    assert writer.submit(go.wait, size=1, patience_s=0.0)
    assert not writer.submit(lambda: None, size=1, patience_s=0.01)
    assert writer.submit(lambda: None, size=1, ahead=1, patience_s=0.0)
    assert writer.submit(lambda: None)  # what holds no memory
    go.set()
    assert writer.submit(lambda: None, size=1)
    training.crash()


def test_waiting_is_bounded_by_its_share(monkeypatch, places):
    """A second at once, then a share of the training's time; what was waited counts."""
    clock = Clock()
    monkeypatch.setattr(exact, "time", clock)
    training = Training().log(*places, every=50, steps=1, overhead=0.02)
    training.checkpointer.resume()
    allowed, waits = [], [1.0, 0.0, 50.0, 0.0]

    def submit(*arguments, patience_s: float, **options) -> bool:
        allowed.append(patience_s)
        clock.now += waits[len(allowed) - 1]
        return True

    monkeypatch.setattr(training.checkpointer.step_log.log._writer, "submit", submit)
    for step in range(4):
        training.run(step, step + 1) if step == 0 else (
            training.step(step),
            training.checkpointer.step(step + 1),
        )
        clock.now += 100.0
    assert allowed == pytest.approx([1.0, 0.02 * 101.0, 0.02 * 201.0 + 0.0, 0.0])
    training.checkpointer.step_log.log._recorder.close()


def test_a_step_waits_for_no_other_work_of_the_writer(places, monkeypatch):
    """A digest is taken at once, and what is written of it waits."""
    training = Training().log(*places, every=50, steps=2)
    with monkeypatch.context() as patch:
        go = held_up(patch)
        training.checkpointer.resume()
        training.run(0, 3)  # one segment and a half: the second one would wait for the first
        assert not go.is_set()
        go.set()
        training.crash()
    assert Training().log(*places).checkpointer.resume() == 2


def test_no_memory_for_a_copy_turns_the_log_off_and_training_goes_on(monkeypatch, places):
    training = Training().log(*places, every=50, steps=4)
    training.checkpointer.resume()
    training.run(0, 3)

    def fails(self, state):
        raise MemoryError("no memory for this")

    with monkeypatch.context() as patch:
        patch.setattr(Snapshotter, "take", fails)
        with pytest.warns(ShrinkpointWarning, match="step log is off: MemoryError: no memory for this"):
            training.run(3, 4)
    training.run(4, 6)
    assert "MemoryError" in training.checkpointer.step_log.log.off
    training.checkpointer.close()


# ---- a file system with too little room: the log is off before it is full


def file_system(monkeypatch, folder, total):
    """Let a folder seem to be all that there is in a small file system; returns the bytes in it now."""

    def there() -> float:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    monkeypatch.setattr(
        "shrinkpoint.steps.writer.shutil.disk_usage",
        lambda path: SimpleNamespace(total=total, used=there(), free=total - there()),
    )
    return there


def test_a_sixteenth_is_left_to_others_and_what_is_kept_is_removed_later(tmp_path, monkeypatch):
    truth = Training()
    losses = truth.run(0, 20)
    training = Training().log(f"memory://{uuid4().hex}/run", str(tmp_path / "log"), every=6)
    training.checkpointer.resume()
    training.run(0, 2)
    training.checkpointer.step_log.flush()
    of_segment = sum(path.stat().st_size for path in (tmp_path / "log").rglob("*.steps"))
    there = file_system(monkeypatch, tmp_path / "log", total=5 * of_segment)
    with pytest.warns(ShrinkpointWarning, match="which leaves|that are left to other programs") as warned:
        assert training.run(2, 12) == losses[2:12]
    assert len(warned) == 1
    assert 2 * of_segment < there() < 5 * of_segment * 15 / 16
    assert training.run(12, 20) == losses[12:]
    training.checkpointer.close()
    assert there() < of_segment  # no checkpoint needs them any more


def test_a_small_log_without_room_is_off(tmp_path, monkeypatch):
    there = file_system(monkeypatch, tmp_path / "run" / "steps", total=20_000)
    training = SmallLogTraining(tmp_path / "run", every=10)
    with pytest.warns(ShrinkpointWarning, match="the step log is off: the next steps take"):
        training.run(0, 30)
    assert training.log.off is not None
    assert there() < 20_000
    training.checkpointer.close()
