"""A training that adopts its checkpoints and is killed with -9, at random moments and at named points, is the undisturbed one.

``--kills 200`` asks for more than the default.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import adopting
from support.adopting import EVERY, POINTS, truth

QUICK = 4
THOROUGH = 30  # in CI, with 28 at named points; --kills 200 as in docs/resuming.md
FARTHEST = 12
"""Steps from kill to kill, at most."""


class Nursery:
    """Forks trainings of `support.adopting`."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path, stores: int) -> None:
        self._process, self._errors, self._stores = process, errors, stores

    def start(self, folder: Path, end: int, point: str = "", save: int = 0, case: str = "adamw") -> int:
        """The process id of a new training."""
        return self._ask([str(folder), point, save, end, self._stores, case])

    def reap(self, child: int) -> int:
        """Its exit status, when it has ended."""
        return self._ask(child)

    def said(self) -> str:
        """What it complained of."""
        return self._errors.read_text()[-4000:]

    def _ask(self, job: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self.said()
        return int(answer)


@contextmanager
def nursery(folder: Path, stores: int = 1) -> Iterator[Nursery]:
    tests = str(Path(adopting.__file__).parents[1])
    places = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    errors = folder / "errors"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, adopting.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
    try:
        yield Nursery(process, errors, stores)
    finally:
        process.kill()  # closing its input is not enough where a fork of this process has the pipe as well
        process.wait()


def _noted(folder: Path) -> list[dict[str, Any]]:
    journal = folder / "journal"
    return [json.loads(line) for line in journal.read_text().split("\n")[:-1]] if journal.exists() else []


def _check(folder: Path, true: dict[int, tuple[str, str]]) -> int:
    """That every step of every process is the undisturbed one's; how many steps were made again."""
    steps = [line for line in _noted(folder) if "step" in line]
    for line in steps:
        assert tuple(line["noted"]) == true[line["step"]], f"step {line['step']} differs"
    return len(steps) - len({line["step"] for line in steps})


def _at_random(folder: Path, kills: int, stores: int = 1) -> None:
    end = 2 * EVERY * kills + 4 * EVERY  # more than that many kills let it come to
    rng = random.Random(0)
    with nursery(folder, stores) as trainings:
        for _ in range(kills):
            child = trainings.start(folder, end)
            known, target = len(_noted(folder)), rng.randrange(1, FARTHEST)
            deadline = time.monotonic() + 120
            while len(_noted(folder)) < known + target:
                assert time.monotonic() < deadline, trainings.said()
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(child, signal.SIGKILL)
            trainings.reap(child)
        assert trainings.reap(trainings.start(folder, end)) == 0, trainings.said()
    again = _check(folder, truth(folder, steps=end, adopt=end // EVERY))
    assert _noted(folder)[-1]["step"] == end
    assert again
    print(f"{kills} kills in {end} steps; {again} steps were made again, all of them alike")


def _at_points(folder: Path, saves: range, stores: int = 1) -> None:
    end = EVERY * (saves[-1] + 2)
    true = truth(folder, steps=end, adopt=end // EVERY)
    with nursery(folder, stores) as trainings:
        for point in POINTS:
            for save in saves:
                place = folder / f"{point} {save}".replace(" ", "-")
                place.mkdir()
                status = trainings.reap(trainings.start(place, end, point, save))
                assert os.WIFSIGNALED(status), trainings.said()
                assert trainings.reap(trainings.start(place, end)) == 0, trainings.said()
                stored = save if point == "after commit" else save - 1
                resumed = [line["resumed"] for line in _noted(place) if "resumed" in line]
                assert resumed == [0, stored * EVERY]
                again = _check(place, true)
                assert _noted(place)[-1]["step"] == end
                print(f"killed {point}, at save {save}: {again} steps were made again, alike")


@pytest.mark.slow
def test_killed_with_a_gradient_scaler(tmp_path):
    """Its scale and its count of steps are part of what is compared; some steps are skipped for an overflow."""
    end = 4 * EVERY
    true = truth(tmp_path, "scaled", steps=end, adopt=end // EVERY)
    with nursery(tmp_path) as trainings:
        status = trainings.reap(trainings.start(tmp_path, end, "after adopting", 2, "scaled"))
        assert os.WIFSIGNALED(status), trainings.said()
        assert trainings.reap(trainings.start(tmp_path, end, case="scaled")) == 0, trainings.said()
    assert [line["resumed"] for line in _noted(tmp_path) if "resumed" in line] == [0, EVERY]
    assert _check(tmp_path, true)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stores", [pytest.param(1, marks=pytest.mark.long), 3])
def test_killed_at_each_point(tmp_path, stores):
    _at_points(tmp_path, range(2, 3), stores)


def test_a_few_kills(tmp_path):
    _at_random(tmp_path, QUICK)


@pytest.mark.slow
def test_a_few_kills_with_several_stores(tmp_path):
    _at_random(tmp_path, QUICK, stores=3)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)
def test_killed_at_each_point_of_many_saves(tmp_path):
    _at_points(tmp_path, range(1, 8))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_kills(tmp_path, pytestconfig):
    _at_random(tmp_path, pytestconfig.getoption("--kills") or THOROUGH)
