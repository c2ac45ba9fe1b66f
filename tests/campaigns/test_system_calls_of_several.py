"""Several folders: a kill at, or an error from, every system call that writes loses nothing that was acknowledged.

As test_system_calls.py for one folder, whose calls strace counts; here several threads write.
"""

import dataclasses
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import chaos_worker
from support.chaos import Account, audit
from support.chaos_worker import WorkerConfig, command, verified_digest
from support.journal import read_journal
from support.newest import newest_sound

from shrinkpoint.store.run import RunStore

pytestmark = pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")

SAVES = 3
ERRORS = {
    "write": ("ENOSPC", "EIO"),
    "fsync": ("EIO",),
    "open": ("ENOSPC", "EMFILE"),
    "link": ("EIO",),
    "mkdir": ("ENOSPC",),
    "unlink": ("EIO",),
}


def _config(folder: Path) -> WorkerConfig:
    return WorkerConfig(
        url=[str(folder / name) for name in "abc"],
        journal=str(folder / "journal"),
        saves=SAVES,
        container_bytes=200_000,
        retire_every=3,
        keep=1,
        grace_s=0.0,
    )


def _run(folder: Path, **how: object) -> tuple[int, list[str]]:
    """A worker of its own: its exit status, and what is in its journal."""
    config = dataclasses.replace(_config(folder), inject=how)
    status = subprocess.run(command(config), check=False, stderr=subprocess.DEVNULL).returncode
    return status, [event["event"] for event in read_journal(config.journal)]


@pytest.fixture(scope="session")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """The calls of a worker that is left alone."""
    folder = tmp_path_factory.mktemp("recorded")
    assert _run(folder)[0] == 0
    return next(e["calls"] for e in read_journal(folder / "journal") if e["event"] == "calls")


def _check(folder: Path) -> None:
    """Everything acknowledged is there, and saving goes on."""
    config = _config(folder)
    store = RunStore(config.url)
    account = audit(store, Account(), [Path(config.journal)])
    assert account.lost == []
    resumed = folder / "resumed"
    again = dataclasses.replace(config, journal=str(resumed), retire_every=None, seed=1)
    assert chaos_worker.work(again) == 0, resumed.read_text()
    events = [event["event"] for event in read_journal(resumed)]
    assert events == ["start", "resumed", "opened", *["ack"] * SAVES, "end"]
    found = newest_sound(store, verified_digest)
    assert found is not None
    assert found[1] == read_journal(resumed)[-2]["digest"]


def _kill(tmp_path: Path, numbers: Iterable[int]) -> int:
    killed = 0
    for number in numbers:
        folder = tmp_path / f"kill-{number}"
        folder.mkdir()
        # Threads take turns as they like: the last few calls may not be made.
        status, _ = _run(folder, kill_at=number)
        assert status in (-9, 0), number
        killed += status == -9
        _check(folder)
    return killed


def test_recorded_calls_are_a_whole_protocol(calls: list[tuple[str, str]]) -> None:
    names = [name for name, _ in calls]
    assert names.count("fsync") >= 3 * 4 * SAVES
    assert {"mkdir", "open", "write", "link", "replace", "unlink"} <= set(names)


def test_killed_at_sampled_calls(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    assert _kill(tmp_path, range(5, len(calls), len(calls) // 7)) >= 6


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_at_every_call(
    tmp_path: Path, calls: list[tuple[str, str]], pytestconfig: pytest.Config
) -> None:
    """At every third, and at every one with ``--exhaustive``."""
    numbers = range(1, len(calls) + 1, 1 if pytestconfig.getoption("exhaustive") else 3)
    killed = _kill(tmp_path, numbers)
    print(f"killed at {killed} of {len(calls)} system calls of several folders: nothing lost")


def _fail(tmp_path: Path, points: list[tuple[int, str, str]], stores: str) -> None:
    for number, name, error in points:
        folder = tmp_path / f"{name}-{number}-{error}-{stores}"
        folder.mkdir()
        below = str(folder / stores) if len(stores) == 1 else "/"
        status, events = _run(folder, fail=name, fail_from=number, error=error, below=below)
        assert status in (0, chaos_worker.FAILED), (number, name, error)  # a shrinkpoint error, no other
        if len(stores) == 1 and "opened" in events:  # the others take every save
            assert events.count("ack") == SAVES, (number, name, error, stores)
        _check(folder)


def _errors(calls: list[tuple[str, str]]) -> list[tuple[int, str, str]]:
    return [(at, name, error) for at, (name, _) in enumerate(calls, 1) for error in ERRORS.get(name, ())]


@pytest.mark.parametrize("stores", ["a", "c", "abc"])
def test_failing_from_sampled_calls(tmp_path: Path, calls: list[tuple[str, str]], stores: str) -> None:
    points = _errors(calls)
    _fail(tmp_path, points[len(points) // 9 :: len(points) // 3], stores)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "stores",
    [
        *(pytest.param(store, marks=pytest.mark.long) for store in "abc"),
        "abc",
    ],  # one store: sampled calls above
)
def test_failing_from_every_tenth_call(
    tmp_path: Path, calls: list[tuple[str, str]], stores: str, pytestconfig: pytest.Config
) -> None:
    """And from every fifth with ``--exhaustive``."""
    points = _errors(calls)[:: 5 if pytestconfig.getoption("exhaustive") else 10]
    _fail(tmp_path, points, stores)
    print(f"{len(points)} runs with system calls that fail in {stores}: nothing lost")
