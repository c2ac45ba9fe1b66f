"""Compiles the coders of a scheme by making and restoring some checkpoints of a small training, and notes that it did.

numba compiles what is called for the first time: up to a minute of one core for the coders of scheme ``auto``. It keeps what
it compiled in a folder, which also gets one file for each scheme, named after numba's version and the
processor. It lists the coders' sources and numba's files: if one of these is missing, all are compiled again.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.coding.selective import decode_chain, in_memory
from shrinkpoint.container.writer import write_container
from shrinkpoint.quantize.movement import MovementTracker
from shrinkpoint.schemes.base import ReferenceState, SaveContext
from shrinkpoint.schemes.catalogue import SCHEMES, build, options_of
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import TrainingState

if TYPE_CHECKING:
    from shrinkpoint.runtime.kernel_cache import KernelCache

__all__ = ["cache_folder", "compile_coders", "is_compiled", "precompile"]

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
    from shrinkpoint.runtime.kernel_cache import kernel_sources

    options = options_of(scheme)
    folder = cache_folder()
    if folder is None:
        return False
    _make_and_restore(scheme, options)
    if scheme != "lossless":
        _make_and_restore("lossless", None)
    mark = folder / _mark(scheme)
    mark.parent.mkdir(parents=True, exist_ok=True)
    part = mark.with_suffix(f".{os.getpid()}")
    files = [os.path.relpath(file, mark.parent) for file in _cached_files()]
    part.write_text(json.dumps({"sources": kernel_sources(), "files": files}))
    part.replace(mark)
    return True


def is_compiled(scheme: str) -> bool:
    """Whether `compile_coders` has been here since the coders, numba or the processor last changed, or the installed wheel
    has its coders compiled (`precompile`).

    Raises:
        ConfigError: as `compile_coders`.
    """
    from shrinkpoint.runtime.precompiled import includes

    options_of(scheme)
    name = _mark(scheme)
    return includes([scheme]) or any(_is_sound(folder / name) for folder in _folders())


def precompile(package: Path) -> int:
    """Compile the coders of all schemes into a package's folder, of which a wheel is then made.

    numba's cache must be empty, and its processor the level that is compiled for: see `shrinkpoint.runtime.precompiled`.

    Args:
        package: the folder that is imported as shrinkpoint where the wheel is installed.

    Returns:
        How many compiled functions it contains.

    Raises:
        RuntimeError: as `shrinkpoint.runtime.precompiled.write`.
    """
    from shrinkpoint.runtime.precompiled import write

    for scheme in SCHEMES:
        _make_and_restore(scheme, options_of(scheme))
    return write((kernel for _, kernel in _called_kernels()), list(SCHEMES), at=package)


def _is_sound(mark: Path) -> bool:
    from shrinkpoint.runtime.kernel_cache import kernel_sources

    try:
        noted = json.loads(mark.read_text())
        same, files = noted["sources"] == kernel_sources(), noted["files"]
        return same and all((mark.parent / file).is_file() for file in files)
    except (OSError, ValueError, TypeError, KeyError):  # none, or damaged
        return False


def cache_folder() -> Path | None:
    """Where the compiled coders are kept; None where none are: no folder that may be written to, ``NUMBA_DISABLE_JIT``."""
    from shrinkpoint.entropy.static import rans_kernels

    stats = getattr(rans_kernels.encode, "stats", None)  # none where compiling is turned off
    return Path(stats.cache_path) if stats is not None and stats.cache_path is not None else None


def _folders() -> Iterator[Path]:
    """Where they are looked for: `cache_folder`, and others that need not be writable."""
    from shrinkpoint.entropy.static import rans_kernels
    from shrinkpoint.runtime.kernel_cache import kept_of

    folder, kept = cache_folder(), kept_of(rans_kernels.encode)
    if folder is not None:
        yield folder
    if kept is not None:
        yield from (other for other in kept.folders() if other != folder)


def _cached_files() -> list[Path]:
    """What is kept of the kernels that this process has called: an index of each, and its object files."""
    found: set[Path] = set()
    for kept, kernel in _called_kernels():
        stem = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__qualname__}-"
        for folder in kept.folders():
            found.update(folder.glob(f"{stem}*.nb[ic]"))
    return sorted(found)


def _called_kernels() -> Iterator[tuple["KernelCache", Any]]:
    from shrinkpoint.runtime.kernel_cache import kept_of

    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("shrinkpoint."):
            found.update({id(item): item for item in vars(module).values()})
    for kernel in found.values():
        kept = kept_of(kernel)
        if kept is not None and kernel.signatures:
            yield kept, kernel


def _names(options: Any) -> set[str]:
    return {item.name for item in fields(options)} if options is not None else set()


def _make_and_restore(scheme: str, options: Any) -> None:
    if "weight_scale" in _names(options):
        options = replace(options, weight_scale=0.25)  # none is given to be measured
    for dtype in (torch.float32, torch.bfloat16):
        _make_and_restore_one(scheme, options, _SmallTraining(dtype))


def _make_and_restore_one(scheme: str, options: Any, training: "_SmallTraining") -> None:
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
        """A copy of the state some steps later."""
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
    """The file that lists what was compiled for this processor; it is in numba's folder."""
    import numba
    from numba.core.registry import cpu_target

    machine = cpu_target.target_context.codegen().magic_tuple()
    processor = [numba.__version__, sys.implementation.cache_tag, repr(machine)]
    named = hashlib.sha256(json.dumps([scheme, processor]).encode()).hexdigest()[:16]
    return f"shrinkpoint-{named}.compiled"
