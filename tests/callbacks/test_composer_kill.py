"""A real process is killed or asked to end from outside, and a new one continues the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("composer")

from support.composer_killed import SETUP
from support.composer_models import Outcome, assert_continues, fit

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

PROGRAM = Path(__file__).parents[1] / "support" / "composer_killed.py"
LONGEST_S = 250


def start(folder: Path, seed: int, interval: str) -> "subprocess.Popen[bytes]":
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(seed), interval],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def progress(folder: Path) -> list[int]:
    """The batches that all processes together have trained on; a process that was killed may have left half a line."""
    path = folder / "progress"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [int(line) for line in lines]


def interrupt(folder: Path, seed: int, interval: str, *, batch: int, number: int) -> int:
    """Train in a process and send it a signal soon after the given batch; gives its exit status."""
    process = start(folder, seed, interval)
    deadline = time.monotonic() + LONGEST_S
    try:
        while max(progress(folder), default=0) < batch:
            assert process.poll() is None, (folder / "log.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(number)
        return process.wait(timeout=LONGEST_S)
    finally:
        process.kill()


def finish(folder: Path, interval: str) -> Outcome:
    """Train to the end in a new process."""
    process = start(folder, 999, interval)
    assert process.wait(timeout=LONGEST_S) == 0, (folder / "log.txt").read_text()
    outcome: Outcome = torch.load(folder / "outcome.pt", weights_only=False)
    return outcome


@pytest.fixture(scope="module", name="whole")
def _whole() -> Outcome:
    torch.set_num_threads(1)
    return fit(setup=SETUP)


@pytest.mark.slow
def test_killed_twice(tmp_path: Path, whole: Outcome) -> None:
    assert interrupt(tmp_path, 1, "5ba", batch=31, number=signal.SIGKILL) == -signal.SIGKILL
    assert interrupt(tmp_path, 2, "5ba", batch=57, number=signal.SIGKILL) == -signal.SIGKILL
    rest = finish(tmp_path, "5ba")
    assert rest.trace[0][2] % 5 == 0
    assert rest.trace[0][2] >= 50  # the save of batch 55 may have been under way
    assert_continues(whole, rest)


@pytest.mark.slow
def test_killed_after_the_end_of_an_epoch(tmp_path: Path, whole: Outcome) -> None:
    interrupt(tmp_path, 1, "1ep", batch=35, number=signal.SIGKILL)
    rest = finish(tmp_path, "1ep")
    assert rest.trace[0][2] in (24, 32, 40)
    assert_continues(whole, rest)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_asked_to_end(tmp_path: Path, whole: Outcome, number: signal.Signals) -> None:
    assert interrupt(tmp_path, 1, "1000ba", batch=37, number=number) == 128 + number
    last = progress(tmp_path)[-1]
    assert last < 96
    rest = finish(tmp_path, "1000ba")
    assert rest.trace[0][2] == last
    assert_continues(whole, rest)
