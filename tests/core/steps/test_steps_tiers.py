"""A log near the training with a copy in the run: after a failure, the better of the two is used."""

import shutil
import threading
from pathlib import Path

import pytest
from support.fake_objects import FakeObjects
from support.stepped import Training

from shrinkpoint.errors import CorruptionError, ShrinkpointWarning, StoreError
from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.tiers import NearAndRun
from shrinkpoint.store.objects import ObjectInfo

END = 14


@pytest.fixture(scope="module")
def truth() -> tuple[list[float], list[str]]:
    training = Training()
    losses, digests = [], [training.digest]
    for step in range(END):
        losses += training.run(step, step + 1)
        digests.append(training.digest)
    return losses, digests


def start(folder: Path, every: int = 5) -> Training:
    log = StepLog(segment_steps=1, copy=True, busy="wait")
    return Training().log(f"{folder}/run", f"{folder}/near", every=every, step_log=log)


def tiers(training: Training) -> NearAndRun:
    return training.checkpointer.step_log._folder._objects


def crash(training: Training, *, copied: bool = True) -> None:
    training.checkpointer.step_log.flush()
    if copied:
        tiers(training).flush()
    training.crash()


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A crash after 9 steps: a checkpoint of step 5, and both places have all segments."""
    folder = tmp_path_factory.mktemp("tiers")
    training = start(folder)
    assert training.checkpointer.resume() == 0
    training.run(0, 9)
    crash(training)
    near, far = names(folder / "near"), names(folder / "run" / "steps")
    assert near == far
    assert len(near) > 4
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.steps"))


def paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.steps"), key=lambda path: path.name)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)


def lose_the_process(folder: Path) -> None:
    """The machine is there, and with it the near folder; the copies lag behind by two steps."""
    for path in paths(folder / "run" / "steps")[-2:]:
        path.unlink()


def lose_the_machine(folder: Path) -> None:
    shutil.rmtree(folder / "near")


def damage_the_near_ones(folder: Path) -> None:
    flip(paths(folder / "near")[-1])
    paths(folder / "near")[-2].write_bytes(b"")


def damage_the_copies(folder: Path) -> None:
    for path in paths(folder / "run" / "steps"):
        flip(path)


def damage_each_elsewhere(folder: Path) -> None:
    flip(paths(folder / "near")[-1])
    flip(paths(folder / "run" / "steps")[-2])


@pytest.mark.parametrize(
    ("failure", "reached"),
    [
        (lambda folder: None, 9),
        (lose_the_process, 9),
        (lose_the_machine, 9),
        (damage_the_near_ones, 9),
        (damage_the_copies, 9),
        (damage_each_elsewhere, 9),
    ],
    ids=["nothing", "process", "machine", "near damaged", "copies damaged", "each elsewhere"],
)
def test_the_better_of_the_two_is_used(crashed, truth, tmp_path, failure, reached):
    for part in ("near", "run"):
        shutil.copytree(crashed / part, tmp_path / part)
    failure(tmp_path)
    training = start(tmp_path)
    assert training.checkpointer.resume() == reached
    assert training.digest == truth[1][reached]
    assert training.run(reached, END) == truth[0][reached:]
    crash(training)
    copies = names(tmp_path / "run" / "steps")
    assert set(names(tmp_path / "near")) <= set(copies)
    assert sum(name.startswith("00000002-") for name in copies) == END - reached + 1


def test_a_machine_that_is_lost_with_a_lagging_copy_costs_the_steps_that_were_not_copied(
    crashed, truth, tmp_path
):
    for part in ("near", "run"):
        shutil.copytree(crashed / part, tmp_path / part)
    lose_the_process(tmp_path)
    lose_the_machine(tmp_path)
    training = start(tmp_path)
    assert training.checkpointer.resume() == 7
    assert training.digest == truth[1][7]
    assert training.run(7, END) == truth[0][7:]
    crash(training)


def test_what_was_not_copied_yet_is_copied_by_the_next_writer(crashed, truth, tmp_path):
    for part in ("near", "run"):
        shutil.copytree(crashed / part, tmp_path / part)
    lose_the_process(tmp_path)
    training = start(tmp_path, every=100)
    assert training.checkpointer.resume() == 9
    training.run(9, 11)
    crash(training)
    lose_the_machine(tmp_path)
    again = start(tmp_path)
    assert again.checkpointer.resume() == 11
    assert again.digest == truth[1][11]
    crash(again)


def test_a_run_s_store_that_fails_ends_the_copies_and_not_the_log(tmp_path, truth, monkeypatch):
    training = start(tmp_path)
    training.checkpointer.resume()
    training.run(0, 6)
    crash_point = threading.Event()

    def broken(key, data):
        crash_point.set()
        raise StoreError("the store is gone")

    def go_on():
        training.run(6, 9)
        training.checkpointer.step_log.flush()
        assert crash_point.wait(20)
        tiers(training).flush()

    tiers(training).flush()
    monkeypatch.setattr(tiers(training).far, "put", broken)
    with pytest.warns(ShrinkpointWarning, match="no longer copied to the run: the store is gone"):
        go_on()
    assert training.checkpointer.step_log.off is None
    training.crash()
    again = start(tmp_path)
    assert again.checkpointer.resume() == 9
    assert again.digest == truth[1][9]
    crash(again)


def test_a_segment_that_is_damaged_near_the_training_ends_the_copies_too():
    near = FakeObjects()

    def damaged(operation: str, key: str) -> None:
        if operation == "get":
            raise CorruptionError(f"{key} is damaged")

    near.before = damaged
    both = NearAndRun(near, FakeObjects())
    both.put("a.steps", b"a")
    flushed = threading.Thread(target=both.flush, daemon=True)
    flushed.start()
    flushed.join(60)
    assert not flushed.is_alive()
    assert both.failure == "a.steps is damaged"


class Slow:
    """A store whose writes wait until they are let through."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.entered = threading.Event()

    def put(self, key: str, data: bytes) -> None:
        self.entered.set()
        assert self.gate.wait(20)
        self.objects[key] = data

    def get(self, key: str, start=None, end=None, *, max_size: int) -> bytes:
        return self.objects[key]

    def list(self, prefix: str, *, limit=None) -> list[ObjectInfo]:
        found = [key for key in self.objects if key.startswith(prefix)]
        return [ObjectInfo(key=key, size=len(self.objects[key]), modified=None) for key in found]

    def delete(self, keys) -> None:
        for key in keys:
            self.objects.pop(key, None)


def test_a_slow_store_never_delays_the_log_and_gets_no_segments_that_were_removed():
    near, far = Slow(), Slow()
    near.gate.set()
    both = NearAndRun(near, far)
    for number in range(4):
        both.put(f"{number}", b"x" * 10)  # none waits for the slow one
    assert far.entered.wait(20)
    assert not far.objects
    both.delete(["0", "1", "2"])
    far.gate.set()
    both.flush()
    deadline = threading.Event()
    for _ in range(200):
        if set(far.objects) == {"3"}:
            break
        deadline.wait(0.05)
    assert set(far.objects) == {"3"}
    assert [info.key for info in both.list("")] == ["3"]
