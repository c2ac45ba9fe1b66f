"""Faults at single system calls of a process, with strace: kill at the K-th call, or fail from it on."""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["MUTATING", "Call", "mutating_calls", "run_failing_from", "run_killed_at", "why_no_strace"]

MUTATING = (
    *(
        "open",
        "openat",
        "creat",
        "write",
        "pwrite64",
        "writev",
        "ftruncate",
        "fallocate",
        "fsync",
        "fdatasync",
    ),
    *("link", "linkat", "unlink", "unlinkat", "rename", "renameat", "renameat2", "mkdir", "mkdirat", "rmdir"),
)
_LINE = re.compile(r"(?:\[pid +)?(\d+)\]? +(\w+)\((.*)")


@dataclass(frozen=True, order=True)
class Call:
    """The ``number``-th call of ``name`` that the process makes, counted from 1 and from its start."""

    name: str
    number: int


@cache
def why_no_strace() -> str | None:
    """Why system calls cannot be injected into here, or None where they can."""
    if shutil.which("strace") is None:
        return "strace is not on PATH (Debian: strace)"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True, text=True)
    return None if tried.returncode == 0 else f"ptrace is not permitted here: {tried.stderr.strip()[-200:]}"


def mutating_calls(command: Sequence[str], folder: Path, log: Path) -> list[Call]:
    """Run ``command`` to its end and return its calls that changed something below ``folder``, in order."""
    subprocess.run(
        ["strace", "-f", "-y", "-s", "0", "-e", f"trace={','.join(MUTATING)}", "-o", str(log), *command],
        check=True,
    )
    counts: Counter[tuple[str, str]] = Counter()
    calls: list[Call] = []
    processes: set[str] = set()
    for line in log.read_text().splitlines():
        match = _LINE.match(line)
        if match is None:
            continue  # signals, exits, and the second halves of interrupted lines
        process, name, arguments = match.groups()
        counts[process, name] += 1
        reads_only = name in ("open", "openat") and "O_CREAT" not in arguments
        if f"{folder}" in arguments and not reads_only:
            calls.append(Call(name, counts[process, name]))
            processes.add(process)
    assert len(processes) == 1, "calls are counted for each thread: the store must write from one"
    return calls


def _inject(command: Sequence[str], what: str, name: str) -> int:
    options = [
        "-f",
        "-qq",
        "-e",
        f"trace={name}",
        "-e",
        "signal=none",
        "-e",
        f"inject={name}:{what}",
        "-o",
        "/dev/null",
    ]
    return subprocess.run(["strace", *options, *command], check=False).returncode


def run_killed_at(command: Sequence[str], call: Call) -> int:
    """Run ``command`` and kill it as it enters ``call``; returns the exit status, -9 where that happened."""
    return _inject(command, f"signal=KILL:when={call.number}", call.name)


def run_failing_from(command: Sequence[str], call: Call, error: str) -> int:
    """Run ``command`` with ``call`` and every later call of that name failing with ``error`` (such as ENOSPC)."""
    return _inject(command, f"error={error}:when={call.number}+", call.name)
