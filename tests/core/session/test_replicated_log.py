"""Data parallel training in a plain loop that logs its steps continues from the log, bit by bit, on every process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.replicas import LOGGED, STEPS, Replica, logged, spoiled
from support.sharded import launch

import shrinkpoint
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.group.group import Alone
from shrinkpoint.steps.training import TrainingLog


class _OneOfSeveral(Alone):
    size = 2


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One process that goes the way of several."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    monkeypatch.setattr("shrinkpoint.checkpointer.world", _OneOfSeveral)
    yield tmp_path
    dist.destroy_process_group()


def replica(folder: Path, name: str = "run", **options: Any) -> Replica:
    log = {"step_log": shrinkpoint.StepLog(segment_steps=2, overhead=None), "log_url": f"{folder}/log"}
    return Replica(0, 1, f"{folder}/{name}", **{**LOGGED, "every": 6, **log, **options})


def crash(made: Replica) -> None:
    made.checkpointer.step_log.flush()
    made.checkpointer.flush()
    made.checkpointer.step_log.log._recorder.close()
    made.checkpointer.saver.close()


@pytest.mark.slow
@pytest.mark.parametrize(("every", "stop"), [(6, 11), pytest.param(50, 5, marks=pytest.mark.long)])
def test_three_killed_processes_continue_from_the_log(every: int, stop: int, tmp_path: Path) -> None:
    """After a checkpoint, and without one."""
    true = launch(logged, 3, tmp_path, str(tmp_path / "whole"), every)
    assert len({str(noted) for _, noted, _ in true}) == 3  # each has its own batches
    assert [off for _, _, off in true] == [None] * 3
    launch(logged, 3, tmp_path, str(tmp_path / "killed"), every, stop, killed=True)
    for (_, whole, _), (began, rest, _) in zip(
        true, launch(logged, 3, tmp_path, str(tmp_path / "killed"), every), strict=True
    ):
        assert began == stop - 1  # segments of two steps
        assert rest == {step: whole[step] for step in whole if step > began}


def damaged(folder: Path) -> None:
    last = sorted(folder.rglob("*.steps"))[-1]
    data = bytearray(last.read_bytes())
    data[-10] ^= 1
    last.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "every", "stop"), [("damaged", 50, 5), ("spoiled", 6, 11)])
def test_three_processes_go_back_together(how: str, every: int, stop: int, tmp_path: Path) -> None:
    true = launch(logged, 3, tmp_path, str(tmp_path / "whole"), every)
    launch(logged, 3, tmp_path, str(tmp_path / "killed"), every, stop, killed=True)
    if how == "damaged":
        damaged(tmp_path / "killed" / "log")
    wrong = stop - 1 if how == "spoiled" else None
    for (_, whole, _), (began, rest, _) in zip(
        true, launch(logged, 3, tmp_path, str(tmp_path / "killed"), every, None, wrong), strict=True
    ):
        assert began == stop - 3
        assert rest == {step: whole[step] for step in whole if step > began}


@pytest.mark.parametrize("every", [6, 50])
def test_the_state_before_the_replay_is_restored(
    every: int, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = replica(alone, every=every).run(11)
    crash(killed)
    monkeypatch.setattr("shrinkpoint.steps.replay.decode_record", spoiled(10))
    with pytest.warns(ShrinkpointWarning, match="give another state"):
        again = replica(alone, every=every)
    assert (again.began, again.place.at) == (8, 8)
    assert again.run(11).noted == {step: noted for step, noted in killed.noted.items() if step > 8}
    again.checkpointer.close()


@pytest.mark.parametrize("every", [6, 50])
def test_the_log_is_replayed(every: int, alone: Path) -> None:
    true = replica(alone, "whole", every=every, step_log=None, log_url=None, adopt=False)
    whole = true.run(STEPS).noted
    true.checkpointer.close()
    killed = replica(alone, every=every).run(11)
    assert isinstance(killed.checkpointer.step_log, TrainingLog)
    assert killed.checkpointer.step_log.log.off is None
    crash(killed)
    assert killed.checkpointer.step_log.log.written == 10
    again = replica(alone, every=every)
    assert (again.began, again.place.at) == (10, 10)
    assert again.run(STEPS).noted == {step: whole[step] for step in whole if step > 10}
    again.checkpointer.close()


def test_gradients_that_are_accumulated_over_calls_turn_the_log_off(alone: Path) -> None:
    made = replica(alone, every=50)
    made.run(2)
    made.optimizer.zero_grad()
    made._loss(made.wrapped, 1).backward()  # other ones on each process, where they are not summed
    made.checkpointer.step(3)
    with pytest.warns(ShrinkpointWarning, match="call it after optimizer.step.. only"):
        made.checkpointer.step(4)
    assert "accumulated" in made.checkpointer.step_log.log.off
    made.reached = 4
    made.run(6)  # and the training goes on
    made.checkpointer.close()


def test_a_hook_with_a_state_turns_the_log_off(alone: Path) -> None:
    class State:
        pass

    made = replica(alone, every=50)
    made.wrapped.register_comm_hook(State(), kept)
    with pytest.warns(ShrinkpointWarning, match="State, is each process's own"):
        made.run(2)
    assert "hook" in made.checkpointer.step_log.log.off
    made.checkpointer.close()


def kept(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_a_small_log_of_several_processes(alone: Path) -> None:
    log = shrinkpoint.StepLog(kind="small", segment_steps=2, overhead=None)
    made = replica(alone, every=2, step_log=log, log_url=None)
    for step in range(9):
        made.run(step + 1)
        made.checkpointer.flush()
        made.checkpointer.step_log.flush()
    assert made.checkpointer.step_log.log.off is None
    made.checkpointer.close()
    found = shrinkpoint.load_weights(f"{alone}/run#step=9")
    error = (found["table.weight"] - made.model.table.weight).norm()
    assert error < 0.1 * made.model.table.weight.norm()
