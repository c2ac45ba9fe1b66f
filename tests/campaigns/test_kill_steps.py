"""Training that logs its steps and is killed with -9 at random moments goes on as if it had not been.

``--kills 200`` asks for more than the default.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import stepped
from support.stepped import Training

QUICK = 5
THOROUGH = 50
EVERY = 20  # as `stepped.main` has it


class _Truth:
    """The undisturbed training, as far as it is needed."""

    def __init__(self) -> None:
        self._training = Training()
        self._found: list[tuple[float | None, str]] = [(None, self._training.digest)]

    def __getitem__(self, step: int) -> tuple[float | None, str]:
        while len(self._found) <= step:
            (loss,) = self._training.run(len(self._found) - 1, len(self._found))
            self._found.append((loss, self._training.digest))
        return self._found[step]


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _campaign(folder: Path, kills: int, *, machines: float = 0.0) -> None:
    """Kill a training again and again.

    Args:
        folder: for everything.
        kills: how often.
        machines: the share of the failures that take the folder of the log with them; it is then copied to the run.
    """
    if machines:
        (folder / "copy").touch()
    tests = str(Path(stepped.__file__).parents[1])
    places = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    errors = folder / "errors"
    with errors.open("wb") as stderr:
        nursery = subprocess.Popen(
            [sys.executable, stepped.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )

    def ask(line: str) -> int:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(line + "\n")
        nursery.stdin.flush()
        answer = nursery.stdout.readline()
        assert answer, errors.read_text()[-4000:]
        return int(answer)

    rng, truth, journal = random.Random(0), _Truth(), folder / "journal"
    lost: list[int] = []
    kept = done = replayed = gone = 0
    for _ in range(kills):
        known = len(_lines(journal))
        child = ask(str(folder))
        target, deadline = known + rng.randrange(2, 30), time.monotonic() + 120
        while len(_lines(journal)) < target:
            assert time.monotonic() < deadline, errors.read_text()[-4000:]
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(ask(str(child))), errors.read_text()[-4000:]
        resumed, *steps = _lines(journal)[known:]
        assert resumed["resumed"] >= kept  # whatever was written is there
        assert resumed["digest"] == truth[resumed["resumed"]][1]
        for line in steps:
            assert (line["loss"], line["digest"]) == truth[line["step"]]
        lost.append(done - resumed["resumed"])
        replayed += resumed["resumed"] % EVERY != 0
        done = steps[-1]["step"] if steps else resumed["resumed"]
        kept = max([resumed["resumed"], *(line["written"] or 0 for line in steps)])
        if rng.random() < machines:
            shutil.rmtree(folder / "log")
            gone, kept = gone + 1, 0  # what was copied by then is there
    assert nursery.stdin is not None
    nursery.stdin.close()
    nursery.wait()
    print(
        f"{kills} kills in {done} steps, {gone} lost machines, {replayed} resumes from the log; steps to compute again:"
        f" {sum(lost) / len(lost):.1f} on average, {max(lost)} at most"
    )
    assert replayed
    assert bool(gone) == bool(machines)


def test_a_few_kills(tmp_path):
    _campaign(tmp_path, QUICK)


@pytest.mark.slow
def test_a_few_lost_machines(tmp_path):
    _campaign(tmp_path, QUICK, machines=0.5)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_lost_machines(tmp_path, pytestconfig):
    _campaign(tmp_path, pytestconfig.getoption("--kills") or THOROUGH, machines=0.3)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_kills(tmp_path, pytestconfig):
    _campaign(tmp_path, pytestconfig.getoption("--kills") or THOROUGH)
