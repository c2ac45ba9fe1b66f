"""Real processes that train with Hugging Face's Trainer are killed, and new ones continue the run."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.containers import identical
from support.transformers_models import assert_continues

from shrinkpoint.saver import Saver
from shrinkpoint.session.adapter import SESSION
from shrinkpoint.store.run import RunStore

PROGRAM = Path(__file__).parents[1] / "support" / "transformers_killed.py"
LOOP = PROGRAM.with_name("accelerate_killed.py")
LONGEST_S = 280


def start(
    folder: Path, name: str, *, processes: int = 1, program: Path = PROGRAM
) -> "list[subprocess.Popen[bytes]]":
    """One process, or several as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        several = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        environment = {key: str(value) for key, value in several.items()} if processes > 1 else {}
        with (folder / "log.txt").open("ab") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", str(program), str(folder), name],
                    env=os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"} | environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return started


def progress(folder: Path) -> list[int]:
    path = folder / "progress"
    return [int(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def interrupt(
    folder: Path,
    *,
    step: int,
    number: int,
    processes: int = 1,
    name: str = "killed",
    program: Path = PROGRAM,
    saved: bool = False,
) -> list[int]:
    """Train, and send a signal soon after the given step, with `saved` not before a checkpoint is stored; the exit statuses."""
    running = start(folder, name, processes=processes, program=program)
    deadline = time.monotonic() + LONGEST_S
    try:
        commits = folder / "run" / "commits"
        while max(progress(folder), default=0) < step or (saved and not any(commits.glob("[0-9]*.json"))):
            assert all(each.poll() is None for each in running), (folder / "log.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for each in running:
            each.send_signal(number)
        return [each.wait(timeout=LONGEST_S) for each in running]
    finally:
        for each in running:
            each.kill()


def finish(folder: Path, name: str, *, processes: int = 1, program: Path = PROGRAM) -> list[Any]:
    """Train to the end in new processes; gives what each has left."""
    for each in start(folder, name, processes=processes, program=program):
        assert each.wait(timeout=LONGEST_S) == 0, (folder / "log.txt").read_text()
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.long
def test_three_processes_with_several_gradient_buckets_are_killed_and_continue_bit_by_bit(
    tmp_path: Path,
) -> None:
    """From three on, sums depend on the buckets, which DDP makes anew after its first step."""
    whole = finish(tmp_path, "whole", processes=3)
    killed = interrupt(tmp_path, step=8, number=signal.SIGKILL, processes=3, saved=True)
    assert killed == [-signal.SIGKILL] * 3
    stored = Saver(str(tmp_path / "run")).restore(adopt=False)
    assert stored is not None
    assert len(stored.state.to_object()[SESSION]["buckets"]) > 1
    rest = finish(tmp_path, "rest", processes=3)
    assert rest[0].steps[0][0] in (6, 11)
    for undisturbed, continued in zip(whole, rest, strict=True):
        assert_continues(undisturbed, continued)


@pytest.mark.slow
def test_a_loop_of_two_processes_with_accelerate_is_killed_and_continues_bit_by_bit(tmp_path: Path) -> None:
    whole = finish(tmp_path, "whole", processes=2, program=LOOP)
    killed = interrupt(tmp_path, step=12, number=signal.SIGKILL, processes=2, program=LOOP)
    assert killed == [-signal.SIGKILL] * 2
    rest = finish(tmp_path, "rest", processes=2, program=LOOP)
    assert [each.pop("begins") for each in whole] == [0, 0]
    assert rest[0]["begins"] in (5, 10)  # the save of step 10 may have been under way
    assert rest[1].pop("begins") == rest[0].pop("begins")
    for undisturbed, continued in zip(whole, rest, strict=True):
        assert len(continued["optimizer"]["param_groups"]) == 2
        assert identical(undisturbed, continued)


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_that_adopt_are_killed_and_continue_bit_by_bit(tmp_path: Path) -> None:
    whole = finish(tmp_path, "adopting whole", processes=2)
    (tmp_path / "progress").unlink()
    killed = interrupt(tmp_path, step=12, number=signal.SIGKILL, processes=2, name="adopting killed")
    assert killed == [-signal.SIGKILL] * 2
    rest = finish(tmp_path, "adopting rest", processes=2)
    assert rest[0].steps[0][0] in (6, 11)  # the save of step 10 may have been under way
    saves = [
        m.meta["save"] for m in RunStore(str(tmp_path / "run")).manifests() if m.meta["adoption"]["planned"]
    ]
    assert any(save["measured"] == "measured" for save in saves)  # and not stored exactly
    for undisturbed, continued in zip(whole, rest, strict=True):
        assert_continues(undisturbed, continued)


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_that_do_not_adopt_continue_as_another_run(tmp_path: Path) -> None:
    whole = finish(tmp_path, "whole", processes=2)
    killed = interrupt(tmp_path, step=12, number=signal.SIGKILL, processes=2, name="lossy killed", saved=True)
    assert killed == [-signal.SIGKILL] * 2
    rest = finish(tmp_path, "lossy rest", processes=2)
    assert rest[0].finished
    assert rest[0].steps[0][0] in (6, 11)
    for undisturbed, continued in zip(whole, rest, strict=True):
        assert any(
            not torch.equal(value, continued.weights[name]) for name, value in undisturbed.weights.items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", pytest.param("sharded adopting", marks=pytest.mark.long)])
def test_a_sharded_model_is_killed_and_continued_bit_by_bit(how: str, tmp_path: Path) -> None:
    """By FSDP2, on two processes; and then on three, from the same weights, but not with another optimizer."""
    whole = finish(tmp_path, f"{how} whole", processes=2)
    killed = interrupt(
        tmp_path, step=11, number=signal.SIGKILL, processes=2, name=f"{how} killed", saved=True
    )
    assert killed == [-signal.SIGKILL] * 2
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    rest = finish(tmp_path, f"{how} rest", processes=2)
    assert rest[0].steps[0][0] in (6, 11)
    whole[1].history = rest[
        1
    ].history  # of gradients of its own shards; all get the first one's, as from the trainer's own files
    for undisturbed, continued in zip(whole, rest, strict=True):
        assert_continues(undisturbed, continued)
    if how == "sharded adopting":  # its ranks are part of the way that it goes
        return
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "copy", tmp_path / "run")
    wider = finish(tmp_path, f"{how} wider", processes=3)
    assert wider[0].steps[0][0] == rest[0].steps[0][0]
    assert all(each.finished for each in wider)
