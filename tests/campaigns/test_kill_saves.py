"""Training that is killed with -9 at random moments of its saves always finds its last checkpoint, bit for bit.

``--kills 10000`` asks for more than the default.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import training_worker
from support.journal import read_journal
from support.training_worker import Scheme, TrainingConfig, state_digest

from shrinkpoint.saver import Saver

QUICK = 12
THOROUGH = 100


class _Nursery:
    """The server of :mod:`support.training_worker`."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._process = subprocess.Popen(
            [sys.executable, training_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.open("wb"),
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(training_worker.__file__).parents[1]),
            },
        )

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._errors.read_text()[-4000:]
        return int(answer)

    def start(self, config: TrainingConfig) -> int:
        return self._ask(dataclasses.asdict(config))

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        status = self._ask({"reap": pid})
        assert os.WIFSIGNALED(status), self._errors.read_text()[-4000:]

    def close(self) -> None:
        self._process.kill()  # closing its input is not enough where a fork of this process has the pipe as well
        self._process.wait()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Nursery]:
    nursery = _Nursery(tmp_path_factory.mktemp("nursery") / "stderr")
    yield nursery
    nursery.close()


def _wait_for_event(journal: Path, event: str, known: int, seconds: float = 60.0) -> None:
    """Wait until a new ``event`` follows the first ``known`` lines."""
    deadline = time.monotonic() + seconds
    while not any(line["event"] == event for line in read_journal(journal)[known:]):
        assert time.monotonic() < deadline, f"no {event} in {seconds} s"
        time.sleep(0.002)


def _check(config: TrainingConfig, events: list[dict[str, Any]]) -> int:
    """Restore and compare with what the process wrote down before each save; returns the step."""
    restored = Saver(config.url).restore()
    acked = max((event["step"] for event in events if event["event"] == "ack"), default=0)
    if restored is None:
        assert acked == 0
        return 0
    step = restored.manifest.step
    assert step >= acked
    noted = [event["digest"] for event in events if event["event"] == "saving" and event["step"] == step]
    assert noted, f"step {step} was never saved"
    if config.scheme == "lossless":
        state = restored.state.to_object()
        assert isinstance(state, dict)
        assert state_digest(state["model"], state["optimizers"]) == noted[-1]
    return step


def _campaign(nursery: _Nursery, config: TrainingConfig, kills: int) -> None:
    rng = random.Random(0)
    journal = Path(config.journal)
    step = 0
    for number in range(kills):
        known = len(read_journal(journal))
        pid = nursery.start(config)
        try:
            # Every fourth has stored something, however slow the machine is.
            _wait_for_event(journal, "saving" if number % 4 else "ack", known)
            time.sleep(rng.uniform(0.0, 0.3))
        finally:
            nursery.kill(pid)
        events = read_journal(journal)
        resumed = next(event for event in events[known:] if event["event"] == "resumed")
        assert resumed["step"] == step  # what the check restored is what training went on from
        step = _check(config, events)
    acks = sum(event["event"] == "ack" for event in read_journal(journal))
    print(f"{kills} kills, {acks} acknowledged saves, none lost; newest step {step}")
    assert step > 0


def _config(folder: Path, scheme: Scheme, stores: int) -> TrainingConfig:
    urls = [str(folder / f"run{number}") for number in range(stores)]
    url = urls if stores > 1 else urls[0]
    return TrainingConfig(url=url, journal=str(folder / "journal"), scheme=scheme)


@pytest.mark.filterwarnings("ignore:.*lost together:shrinkpoint.errors.ShrinkpointWarning")
@pytest.mark.parametrize(("stores", "kills"), [(1, QUICK), (3, QUICK // 2)])
def test_killed_while_saving(
    nursery: _Nursery, tmp_path: Path, pytestconfig: pytest.Config, stores: int, kills: int
) -> None:
    _campaign(nursery, _config(tmp_path, "lossless", stores), pytestconfig.getoption("--kills") or kills)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("scheme", "stores"),
    [
        ("lossless", 1),
        ("inshrinkerator", 3),
        pytest.param("lossless", 3, marks=pytest.mark.long),
        pytest.param("inshrinkerator", 1, marks=pytest.mark.long),
    ],
)
def test_killed_while_saving_many_times(
    nursery: _Nursery,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    scheme: Scheme,
    stores: int,
) -> None:
    _campaign(nursery, _config(tmp_path, scheme, stores), pytestconfig.getoption("--kills") or THOROUGH)
