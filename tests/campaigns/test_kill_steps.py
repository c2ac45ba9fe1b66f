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
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import stepped
from support.stepped import SEGMENT, Life, Training, journal_of, overtaken, saves_no_more

QUICK = 5
THOROUGH = 50
EVERY = 20  # as `stepped.main` has it
LEFT_RUNNING = 0.2  # of all processes
PATIENCE_S = 300.0


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


class _Nursery:
    """Forks processes of the training; each of them is compiled and imported already."""

    def __init__(self, life: Life) -> None:
        self._life = life
        tests = str(Path(stepped.__file__).parents[1])
        places = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._errors = Path(life.folder) / "errors"
        with self._errors.open("wb") as stderr:
            self._server = subprocess.Popen(
                [sys.executable, stepped.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)},
            )

    def _ask(self, line: str) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, self.errors
        return int(answer)

    @property
    def errors(self) -> str:
        """The last of what all processes have printed."""
        return self._errors.read_text()[-4000:]

    def start(self) -> int:
        """The id of a new process."""
        return self._ask(json.dumps(asdict(self._life)))

    def kill(self, process: int) -> None:
        """Kill a process that is still running."""
        os.kill(process, signal.SIGKILL)
        assert os.WIFSIGNALED(self._ask(str(process))), self.errors

    def lines(self, process: int) -> list[dict[str, Any]]:
        """What a process has noted so far."""
        return [json.loads(line) for line in self._noted(process).split(b"\n")[:-1]]

    def _noted(self, process: int) -> bytes:
        path = journal_of(self._life.folder, process)
        return path.read_bytes() if path.exists() else b""

    def wait(self, process: int, lines: int) -> None:
        """Wait until it has noted so many."""
        deadline = time.monotonic() + PATIENCE_S
        while self._noted(process).count(b"\n") < lines:
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.01)

    def wait_for_a_save(self, process: int) -> None:
        """Wait until it has committed a checkpoint: of two processes that have opened a run at once, and not committed, either may win."""
        lines = len(self.lines(process))
        while not any(line.get("saves") for line in self.lines(process)):
            lines += 1
            self.wait(process, lines)

    def end_saves(self, process: int) -> None:
        """Wait until it saves no more: one that commits beside its successor ends its log, and nothing is left to refuse."""
        saves_no_more(self._life.folder, process).touch()
        lines = len(self.lines(process))
        while self.lines(process)[-1].get("saves_on", True):
            lines += 1
            self.wait(process, lines)

    def close(self) -> None:
        """End the server."""
        self._server.kill()  # closing its input is not enough where a fork of this process has the pipe as well
        self._server.wait()


@dataclass
class _Found:
    """What a campaign has seen."""

    lost: list[int] = field(default_factory=list)
    """Steps to compute again after each failure."""
    slow: int = 0
    """Processes of which some segment took longer than a step to be written."""
    gaps: int = 0
    replayed: int = 0
    overtaken: int = 0
    fenced: set[str] = field(default_factory=set)
    """Segments that processes have logged after they were overtaken."""
    steps: int = 0

    def show(self) -> str:
        """For people."""
        kept = self.lost
        return (
            f"{len(kept)} kills in {self.steps} steps, {self.replayed} resumes from the log; segments of"
            f" {SEGMENT}; steps to compute again: {sum(kept) / len(kept):.1f} on average, {max(kept)} at most, in"
            f" {sum(lost <= SEGMENT for lost in kept)} of {len(kept)} failures at most {SEGMENT}; in {self.slow} processes a segment"
            f" took longer than a step, {self.gaps} gaps; {self.overtaken} processes went on after they were overtaken and logged"
            f" {len(self.fenced)} segments then, none of which was replayed"
        )


def _bound(lines: list[dict[str, Any]]) -> int | None:
    """The most steps that a failure of this process may cost: those of one segment where each was written before the next step
    ended; else those of two, the one that is being written and the one that waits for it; any after a gap, of which it warned."""
    resumed, *steps = lines
    if steps and steps[-1]["gaps"]:
        return None
    behind = [line["step"] - (line["written"] or resumed["resumed"]) for line in steps]
    return SEGMENT if max(behind, default=0) <= SEGMENT else 2 * SEGMENT


@contextmanager
def _log_folder(folder: Path) -> Iterator[Path]:
    """In memory where there is such a folder, as `docs/resuming.md` recommends."""
    shared = Path("/dev/shm")
    made = Path(
        tempfile.mkdtemp(prefix="shrinkpoint-kills-", dir=shared if os.access(shared, os.W_OK) else folder)
    )
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _campaign(folder: Path, kills: int, *, left_running: float = LEFT_RUNNING) -> None:
    """Kill a training again and again.

    Args:
        folder: for everything but the log.
        kills: how often.
        left_running: the share of the processes that run on, or are stopped and go on, after another one has taken over.
    """
    with _log_folder(folder) as log:
        nursery = _Nursery(Life(folder=str(folder), log=str(log)))
        found = _killed(nursery, folder, log, kills, left_running)
        nursery.close()
    print(found.show())
    assert found.replayed
    assert found.fenced or not found.overtaken


class _Course:
    """Checks one process of the training after the other against the undisturbed run."""

    def __init__(self) -> None:
        self._truth = _Truth()
        self._done = self._written = 0
        self._bound: int | None = 2 * SEGMENT
        self.found = _Found()

    def check(self, lines: list[dict[str, Any]]) -> None:
        """What a process has noted until it failed, or was overtaken."""
        resumed, *steps = lines
        found, begin = self.found, resumed["resumed"]
        assert begin >= self._written  # whatever was written is there
        assert resumed["digest"] == self._truth[begin][1]
        assert not found.fenced & set(resumed["replayed"])
        for line in steps:
            assert (line["loss"], line["digest"]) == self._truth[line["step"]]
            assert line["off"] is None
        lost = max(0, self._done - begin)
        found.lost.append(lost)
        assert self._bound is None or lost <= self._bound
        found.replayed += begin % EVERY != 0
        found.gaps += steps[-1]["gaps"] if steps else 0
        self._done = found.steps = steps[-1]["step"] if steps else begin
        self._written = max([begin, *(line["written"] or 0 for line in steps)])
        self._bound = _bound(lines)
        found.slow += self._bound != SEGMENT


def _killed(nursery: _Nursery, folder: Path, log: Path, kills: int, left_running: float) -> _Found:
    rng, course = random.Random(0), _Course()
    process = nursery.start()
    for number in range(kills):
        nursery.wait(process, rng.randrange(3, 31))
        time.sleep(rng.uniform(0.0, 0.05))
        if number == 1 or rng.random() < left_running:  # in every campaign one at least
            stops = rng.random() < 0.5
            nursery.wait_for_a_save(process)
            if number == 1 or rng.random() < 0.5:
                nursery.end_saves(process)
            if stops:
                os.kill(process, signal.SIGSTOP)
            course.check(nursery.lines(process))
            successor = nursery.start()
            nursery.wait(successor, 1)
            course.found.overtaken += 1
            course.found.fenced |= _stray(nursery, folder, log, process, successor, stops=stops)
        else:
            nursery.kill(process)
            course.check(nursery.lines(process))
            successor = nursery.start()
        process = successor
    nursery.wait(process, 1)
    nursery.kill(process)
    course.check(nursery.lines(process))
    return course.found


def _stray(
    nursery: _Nursery, folder: Path, log: Path, process: int, successor: int, *, stops: bool
) -> set[str]:
    """Let a process go on for some segments after its successor has resumed; the segments that count no more."""
    overtaken(folder, process).touch()
    if stops:
        os.kill(process, signal.SIGCONT)
    nursery.wait(process, len(nursery.lines(process)) + 3 * SEGMENT)
    nursery.kill(process)
    session = nursery.lines(process)[0]["session"]
    written = {path.name for root in (folder, log) for path in root.rglob(f"*-{session}-*.steps")}
    return written - set(nursery.lines(successor)[0]["replayed"])


def test_a_few_kills(tmp_path):
    _campaign(tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_kills(tmp_path, pytestconfig):
    _campaign(tmp_path, pytestconfig.getoption("--kills") or THOROUGH)
