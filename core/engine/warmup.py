"""Compiles the coders of a scheme before a training's first save needs them, in a process of its own.

numba compiles what is called for the first time: up to a minute of one core for the coders of scheme ``auto``, and a thread that
compiles holds the GIL for most of it, so that training in the same process would wait at every step. A child makes and restores
some checkpoints of a small training meanwhile, and what it compiles is kept in numba's cache, from which the first save loads.
An empty file for each scheme, named after the coders' sources, numba's version and the processor, notes that this was done.

Nothing depends on it. Where the child cannot run or fails, kernels are compiled where they are called.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import nn

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.coding.selective import decode_chain, in_memory
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.movement import MovementTracker
from shrinkpoint.schemes.base import ReferenceState, SaveContext
from shrinkpoint.schemes.catalogue import SCHEMES, build, options_of
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import TrainingState
from shrinkpoint.warn import warn

if TYPE_CHECKING:
    from shrinkpoint.runtime.kernel_cache import KernelCache

_WIDTH, _ROWS, _SAVES, _STEPS = 64, 512, 3, 10


def compile_coders(scheme: str) -> bool:
    """Compile what saves and restores of a scheme call, exact ones too, by making some of a small training.

    Args:
        scheme: its name.

    Returns:
        Whether it was done: False where no folder may be written to, for nothing would last.

    Raises:
        ConfigError: there is no such scheme.
    """
    options = options_of(scheme)
    folder = cache_folder()
    if folder is None:
        return False
    _make_and_restore(scheme, options)
    if scheme != "lossless":
        _make_and_restore("lossless", None)
    mark = folder / _mark(scheme)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return True


def is_compiled(scheme: str) -> bool:
    """Return whether `compile_coders` has been here since the coders, numba or the processor last changed, or the installed wheel
    has its coders compiled (`precompile`).

    Raises:
        ConfigError: as `compile_coders`.
    """
    from shrinkpoint.runtime.kernel_cache import includes

    options_of(scheme)
    name = _mark(scheme)
    return includes([scheme]) or any((folder / name).is_file() for folder in _folders())


def precompile(package: Path) -> int:
    """Compile the coders of all schemes into a package's folder, of which a wheel is then made.

    numba's cache must be empty, and its processor the level that is compiled for: see `shrinkpoint.runtime.kernel_cache`.

    Args:
        package: the folder that is imported as shrinkpoint where the wheel is installed.

    Returns:
        How many compiled functions it contains.

    Raises:
        RuntimeError: as `shrinkpoint.runtime.kernel_cache.write`.
    """
    from shrinkpoint.runtime.kernel_cache import write

    for scheme in SCHEMES:
        _make_and_restore(scheme, options_of(scheme))
    return write(_called_kernels(), list(SCHEMES), at=package)


def cache_folder() -> Path | None:
    """Return where the compiled coders are kept; None where none are: no folder that may be written to, ``NUMBA_DISABLE_JIT``."""
    kept = _cache()
    return None if kept is None or kept.cache_path is None else Path(kept.cache_path)


def _folders() -> Iterator[Path]:
    """Yield where they are looked for: `cache_folder`, and others that need not be writable."""
    kept = _cache()
    return iter(()) if kept is None else kept.folders()


def _cache() -> "KernelCache | None":
    from shrinkpoint.entropy.static import rans_kernels
    from shrinkpoint.runtime.kernel_cache import kept_of

    return kept_of(rans_kernels.encode)


def _called_kernels() -> Iterator[Any]:
    from shrinkpoint.runtime.kernel_cache import kept_of

    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("shrinkpoint."):
            found.update({id(item): item for item in vars(module).values()})
    for kernel in found.values():
        if kept_of(kernel) is not None and kernel.signatures:
            yield kernel


def _make_and_restore(scheme: str, options: Any) -> None:
    if hasattr(options, "weight_scale"):
        options = replace(options, weight_scale=0.25)  # none is given to be measured
    for dtype in (torch.float32, torch.bfloat16):
        training = _SmallTraining(dtype)
        reference: Mapping[str, ReferenceState] | None = None
        parent, chain, tracker = None, [], MovementTracker()
        for step in range(1, _SAVES + 1):
            state = training.go_on()
            movement = tracker.since(state, step)
            tracker.note(state, step)
            save_context = SaveContext(state=state, step=step, reference=reference, movement=movement)
            coder = build(scheme, options, save_context)
            coded = encode_state(state, coder, step=step, reference=reference, parent=parent)
            reference, parent = dict(coded.reference), coded.checkpoint.state_digest
            chain.append(in_memory(write_container(coded.checkpoint)))
        decode_chain(chain)


class _SmallTraining:
    """With what a real one has, as far as coders choose by it: several shapes, rows that hardly change, and growing moments."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._random = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            layers = (
                nn.Embedding(_ROWS, _WIDTH),
                nn.Linear(_WIDTH, _WIDTH),
                nn.LayerNorm(_WIDTH),
                nn.Linear(_WIDTH, _ROWS),
            )
        self._model = nn.Sequential(*layers).to(dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._snapshotter = Snapshotter()
        self._size = 1.0

    def go_on(self) -> TrainingState:
        """Return a copy of the state some steps later."""
        self._size *= 3  # so that second moments grow by octaves, and steps with them
        for _ in range(_STEPS):
            tokens = torch.randint(_ROWS // 8, (32,), generator=self._random)
            self._optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self._model(tokens), tokens.roll(1))
            (self._size * loss).backward()
            self._optimizer.step()
        live = {"model": self._model.state_dict(), "optimizers": [self._optimizer.state_dict()]}
        describe = describe_training(
            self._model, [self._optimizer], model_path=("model",), optimizers_path=("optimizers",)
        )
        return self._snapshotter.take(TrainingState.capture(live, describe)).wait()


def _mark(scheme: str) -> str:
    """Return the empty file that says that these sources were compiled for this processor; it is in numba's folder."""
    import numba
    from numba.core.registry import cpu_target

    from shrinkpoint.runtime.kernel_cache import kernel_sources

    machine = cpu_target.target_context.codegen().magic_tuple()
    processor = [numba.__version__, sys.implementation.cache_tag, repr(machine)]
    named = hashlib.sha256(json.dumps([scheme, kernel_sources(), processor]).encode()).hexdigest()[:16]
    return f"shrinkpoint-{named}.compiled"


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
    """Return what went wrong, if anything did."""
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
