"""Local disk: a kill at, or an error from, every system call that writes loses nothing that was acknowledged."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from support import chaos_worker
from support.chaos import Account, audit
from support.chaos_worker import WorkerConfig, command, verified_digest
from support.journal import read_journal
from support.newest import newest_sound
from support.syscalls import Call, mutating_calls, run_failing_from, run_killed_at, why_no_strace

from shrinkpoint.store.run import RunStore

pytestmark = pytest.mark.skipif(why_no_strace() is not None, reason=str(why_no_strace()))

SAVES = 3
ERRORS = {
    "write": ("ENOSPC", "EIO"),
    "fsync": ("EIO", "ENOSPC"),
    "openat": ("ENOSPC", "EMFILE"),
    "link": ("ENOSPC", "EIO"),
    "mkdir": ("ENOSPC",),
    "unlink": ("EIO",),
}


def _config(folder: Path) -> WorkerConfig:
    return WorkerConfig(
        url=str(folder / "run"),
        journal=str(folder / "journal"),
        saves=SAVES,
        retire_every=3,
        keep=1,
        grace_s=0.0,
    )


@pytest.fixture(scope="session")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """The mutating calls of a worker that is left alone; compiled modules are in their cache afterwards."""
    warm = tmp_path_factory.mktemp("warm")
    mutating_calls(command(_config(warm)), warm / "run", warm / "trace")
    folder = tmp_path_factory.mktemp("recorded")
    return mutating_calls(command(_config(folder)), folder / "run", folder / "trace")


def _check(folder: Path) -> None:
    """Everything acknowledged is there, and saving goes on."""
    config = _config(folder)
    store = RunStore(config.url)
    journal = Path(config.journal)
    account = audit(store, Account(), [journal])
    assert account.lost == []
    resumed = folder / "resumed"
    again = dataclasses.replace(config, journal=str(resumed), retire_every=None, seed=1)
    assert chaos_worker.work(again) == 0
    events = [event["event"] for event in read_journal(resumed)]
    assert events == ["start", "resumed", "opened", *["ack"] * SAVES, "end"]
    found = newest_sound(store, verified_digest)
    assert found is not None
    assert found[1] == read_journal(resumed)[-2]["digest"]


def _each(tmp_path: Path, points: list[Call], run: Callable[[list[str], Call], None]) -> None:
    for at, call in enumerate(points):
        folder = tmp_path / f"{at}-{call.name}-{call.number}"
        folder.mkdir()
        run(command(_config(folder)), call)
        _check(folder)


def _kill(command: list[str], call: Call) -> None:
    assert run_killed_at(command, call) == -9, call


def test_recorded_calls_are_a_whole_protocol(calls: list[Call]) -> None:
    names = [call.name for call in calls]
    assert names.count("write") >= 2 * SAVES
    assert names.count("fsync") >= 4 * SAVES
    assert {"mkdir", "openat", "link", "unlink"} <= set(names)


def test_killed_at_sampled_calls(tmp_path: Path, calls: list[Call]) -> None:
    _each(tmp_path, calls[1::7], _kill)


@pytest.mark.slow
def test_killed_at_every_call(tmp_path: Path, calls: list[Call], pytestconfig: pytest.Config) -> None:
    """With ``--exhaustive``; else at every second."""
    points = calls[:: 1 if pytestconfig.getoption("exhaustive") else 2]
    _each(tmp_path, points, _kill)
    print(f"killed at {len(points)} of {len(calls)} system calls: nothing lost")


def _errors(calls: list[Call]) -> list[tuple[Call, str]]:
    return [(call, error) for call in calls for error in ERRORS.get(call.name, ())]


def _fail(tmp_path: Path, points: list[tuple[Call, str]]) -> None:
    for at, (call, error) in enumerate(points):
        folder = tmp_path / f"{at}-{call.name}-{call.number}-{error}"
        folder.mkdir()
        status = run_failing_from(command(_config(folder)), call, error)
        assert status in (0, chaos_worker.FAILED), (call, error)  # a shrinkpoint error, never a bare OSError
        _check(folder)


def test_failing_from_sampled_calls(tmp_path: Path, calls: list[Call]) -> None:
    _fail(tmp_path, _errors(calls)[3::17])


@pytest.mark.slow
def test_failing_from_every_call(tmp_path: Path, calls: list[Call], pytestconfig: pytest.Config) -> None:
    """With ``--exhaustive``; else from every third call and error."""
    points = _errors(calls)[:: 1 if pytestconfig.getoption("exhaustive") else 3]
    _fail(tmp_path, points)
    print(f"{len(points)} runs with failing system calls: nothing lost")
