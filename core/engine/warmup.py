"""Has the coders compiled before the first save needs them, in a process of its own.

Where nothing is compiled yet, as in every fresh container, that takes up to a minute of one core, and a thread that
compiles holds the GIL for most of it: the training in the same process would wait at every step. A child fills numba's cache
meanwhile, from which the first save loads.

Nothing depends on it. Where the child cannot run or fails, kernels are compiled where they are called.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from shrinkpoint.engine.compilation import cache_folder, compile_coders, is_compiled
from shrinkpoint.warn import warn

__all__ = ["Warmup"]

_LIMIT_S = 600.0
_WATCH_S = 1.0
_INSIDE = "SHRINKPOINT_WARMUP"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", _INSIDE: "1"}
# With the modules of this process and no others: the path of ``-m`` would begin with the working folder.
_PROGRAM = """
import json, sys
sys.path[:], *arguments = json.loads(sys.argv[1])
from shrinkpoint.engine.warmup import _main
_main(*arguments)
"""


@dataclass(frozen=True)
class _Child:
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]

    def end(self) -> str:
        """Make sure that it has ended; the last thing that it said. Once is enough, and more do no harm."""
        if self.errors.closed:
            return ""
        if self.process.poll() is None:
            self.process.kill()
        with self.errors:
            self.process.wait()
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Warmup:
    """Compiles the coders of one scheme in a process of its own.

    Args:
        scheme: its name.
    """

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._begun = False
        self._child: _Child | None = None
        self._failure: str | None = None

    def start(self) -> None:
        """Begin, unless it was begun; nothing happens where the coders are compiled already. Never raises.

        To be called before training starts: to see whether they are imports numba, which takes a second, and a thread that
        imports while data loaders fork would leave them its locks.
        """
        if self._begun:
            return
        self._begun = True
        try:
            if _worthwhile(self._scheme):
                self._child = _spawn(self._scheme)
                weakref.finalize(self, self._child.end)  # when the interpreter exits, if not before
        except Exception as error:  # noqa: BLE001 - training does without
            self._failure = f"{type(error).__name__}: {error}"

    @property
    def running(self) -> bool:
        """Whether a compilation has begun and not ended."""
        child = self._child
        return child is not None and child.process.poll() is None

    def wait(self) -> None:
        """Return when the compilation has ended, in whatever way; a failure gives a warning. Never raises in the background."""
        child, self._child = self._child, None
        failure, self._failure = self._failure, None
        if child is not None:
            failure = _waited(child)
        if failure is not None:
            warn(
                f"the coders could not be compiled in a process of their own ({failure}); the first save compiles them"
            )

    def stop(self) -> None:
        """End it: what is compiled by then stays so. It may be started again."""
        child, self._child = self._child, None
        self._begun = False
        if child is not None:
            child.end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not while this process compiles, too: numba's cache is not made for two that store the same kernels at once."""
        begun = self._begun
        self.stop()
        try:
            yield
        finally:
            if begun:
                self.start()


def _worthwhile(scheme: str) -> bool:
    # in a frozen application the executable is not an interpreter but the application
    if not sys.executable or getattr(sys, "frozen", False) or _INSIDE in os.environ or cache_folder() is None:
        return False
    return not is_compiled(scheme)


def _spawn(scheme: str) -> _Child:
    arguments = [[os.path.abspath(folder) for folder in sys.path], os.getpid(), scheme]
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - `_Child.end` closes it
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # a Ctrl-C is for the training to answer
        )
    except OSError:
        errors.close()
        raise
    return _Child(process, errors)


def _waited(child: _Child) -> str | None:
    """What went wrong, if anything did."""
    code: int | str
    try:
        code = child.process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        code = f"none after {_LIMIT_S:g} s"
    except OSError as error:
        code = f"none ({error})"
    said = child.end()
    return f"exit code {code}: {said}" if code else None


def _main(parent: int, scheme: str) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    compile_coders(scheme)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)
