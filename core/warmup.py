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
from typing import IO

from shrinkpoint.compilation import cache_folder, compile_coders, is_compiled
from shrinkpoint.telling import tell

__all__ = ["Warmup"]

_LIMIT_S = 900.0


class Warmup:
    """Has the coders of one scheme compiled beside the training.

    Args:
        scheme: one of `shrinkpoint.schemes.catalogue.SCHEMES`.
        options: its own, of which the effort matters.
    """

    def __init__(self, scheme: str, options: object) -> None:
        self._scheme = scheme
        self._effort: str | None = getattr(options, "effort", None)
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin, unless it was begun; returns at once. Nothing happens where the coders are compiled already."""
        if self._thread is None:
            # looking whether they are imports numba, which takes a second
            self._thread = threading.Thread(target=self._run, name="shrinkpoint-compile", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return when what was begun has ended, in whatever way."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """End it: what is compiled by then stays so."""
        self._stopped.set()
        if self._child is not None:
            _end(self._child)
        self.wait()

    def _run(self) -> None:
        try:
            if self._stopped.is_set() or not _worthwhile(self._scheme, self._effort):
                return
            with tempfile.TemporaryFile() as errors, _spawn(self._scheme, self._effort, errors) as child:
                self._child = child
                weakref.finalize(self, _give_up, child, self._stopped)  # when the interpreter exits
                if self._stopped.is_set():
                    _end(child)
                code = _waited(child)
                if code and not self._stopped.is_set():
                    errors.seek(0)
                    lines = errors.read().decode(errors="replace").strip().splitlines()
                    _tell_failure(f"exit code {code}: {lines[-1] if lines else 'it said nothing'}")
        except OSError as error:
            _tell_failure(str(error))


def _worthwhile(scheme: str, effort: str | None) -> bool:
    if not sys.executable or cache_folder() is None:
        return False
    return not (is_compiled(scheme, effort) and is_compiled("lossless"))


def _spawn(scheme: str, effort: str | None, errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "shrinkpoint.warmup", scheme, *([effort] if effort else [])]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # closed when this process ends, however it ends
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,  # a Ctrl-C is for the training to answer
    )


def _waited(child: "subprocess.Popen[bytes]") -> int:
    try:
        return child.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        _end(child)
        return child.wait()


def _give_up(child: "subprocess.Popen[bytes]", stopped: threading.Event) -> None:
    stopped.set()
    _end(child)


def _end(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is None:
        child.kill()
        child.wait()


def _tell_failure(why: str) -> None:
    tell(f"the coders could not be compiled in a process of their own ({why}); the first save compiles them")


def _die_with_parent() -> None:
    sys.stdin.buffer.read(1)  # nothing is ever written: it returns when the other end is closed
    os._exit(1)


def _main(scheme: str, effort: str | None = None) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    compile_coders(scheme, effort)
    compile_coders("lossless")  # for checkpoints that are stored bit-exactly


if __name__ == "__main__":
    _main(*sys.argv[1:])
