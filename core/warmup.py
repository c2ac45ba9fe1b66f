"""Has the coders compiled before the first save needs them, in a process of its own.

Where nothing is compiled yet, as in every fresh container, that takes a minute or two of one core, and a thread that
compiles holds the GIL for most of it: the training beside it would wait at every step. A child fills numba's cache
meanwhile, from which the first save loads.

Nothing depends on it. Where the child cannot run or fails, kernels are compiled where they are called.
"""

import os
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass
from typing import IO

from shrinkpoint.compilation import cache_folder, compile_coders, is_compiled
from shrinkpoint.telling import tell

__all__ = ["Warmup"]

_LIMIT_S = 900.0
# One thread and no GPU; and modules of the working folder are not taken for the library's own.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}


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
        with self.process, self.errors:  # which waits, and closes what led there
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Warmup:
    """Has the coders of one scheme compiled beside the training.

    Args:
        scheme: one of `shrinkpoint.schemes.catalogue.SCHEMES`.
        options: its own, of which the effort matters.
    """

    def __init__(self, scheme: str, options: object) -> None:
        self._scheme = scheme
        self._effort: str | None = getattr(options, "effort", None)
        self._begun = False
        self._child: _Child | None = None

    def start(self) -> None:
        """Begin, unless it was begun; nothing happens where the coders are compiled already.

        To be called before training starts: to see whether they are imports numba, which takes a second, and a thread that
        imports while data loaders fork would leave them its locks.
        """
        if self._begun:
            return
        self._begun = True
        try:
            if _worthwhile(self._scheme, self._effort):
                self._child = _spawn(self._scheme, self._effort)
                weakref.finalize(self, self._child.end)  # when the interpreter exits, if not before
        except OSError as error:
            _tell_failure(str(error))

    def wait(self) -> None:
        """Return when what was begun has ended, in whatever way."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            code: int | str = child.process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = f"none after {_LIMIT_S:g} s"
        said = child.end()
        if code:
            _tell_failure(f"exit code {code}: {said}")

    def stop(self) -> None:
        """End it: what is compiled by then stays so."""
        child, self._child = self._child, None
        if child is not None:
            child.end()


def _worthwhile(scheme: str, effort: str | None) -> bool:
    if not sys.executable or cache_folder() is None:
        return False
    return not (is_compiled(scheme, effort) and is_compiled("lossless"))


def _spawn(scheme: str, effort: str | None) -> _Child:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - `_Child.end` closes it
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "shrinkpoint.warmup", scheme, *([effort] if effort else [])],
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # a Ctrl-C is for the training to answer
        )
    except OSError:
        errors.close()
        raise
    return _Child(process, errors)


def _tell_failure(why: str) -> None:
    tell(f"the coders could not be compiled in a process of their own ({why}); the first save compiles them")


def _die_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written: it returns when the other end is closed
    os._exit(1)


def _main(scheme: str, effort: str | None = None) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    compile_coders(scheme, effort)
    compile_coders("lossless")  # for checkpoints that are stored bit-exactly


if __name__ == "__main__":
    _main(*sys.argv[1:])
