"""What one scheme costs and spares on one training: sizes, losses after restores, speed. Each function makes one cell."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import zstandard
from schemes_models import Training, Undisturbed
from schemes_settings import SLOW, Setting

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import Decoded, decode_chain, in_memory
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.quantize.movement import MovementTracker
from shrinkpoint.schemes.base import ReferenceState, SaveContext
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.training import Role, TrainingState

__all__ = ["Chain", "Size", "measure_chain", "measure_restores", "measure_slice", "measure_speed", "slice_of"]

_REPEATS = 3
_SHORT = 3  # saves of a chain where more would tell no more
_LEAST_SLICE = 20_000


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of one checkpoint, in bytes."""

    kind: str
    stored: int
    """The whole file."""
    raw: int
    weights: int
    """The weights' sections."""
    raw_weights: int


class Chain:
    """A base and its deltas, coded one after another as the library's own saver does.

    Args:
        setting: the scheme.
        start: the state that training starts from, where that is known.
    """

    def __init__(self, setting: Setting, start: TrainingState | None = None) -> None:
        self._setting = setting
        self.files: list[bytes] = []
        self.sizes: list[Size] = []
        self.kept_exactly: dict[str, str] = {}
        """Tensors that the scheme refused at some save, with the reason."""
        self._held: dict[str, ReferenceState] | None = None
        self._parent: str | None = None
        self._restored = False
        self._movement = MovementTracker()
        if start is not None:
            self._movement.note(start, 0)

    def encode(self, state: TrainingState, step: int, threads: int = 1) -> tuple[EncodedState, bytes]:
        """The next checkpoint, which is not added."""
        save_context = SaveContext(
            state=state,
            step=step,
            reference=self._held,
            restored=self._restored,
            movement=self._movement.since(state, step),
        )
        scheme = self._setting.build(save_context)
        coded = encode_state(
            state, scheme, step=step, reference=self._held, parent=self._parent, threads=threads
        )
        return coded, write_container(coded.checkpoint)

    def add(self, state: TrainingState, step: int) -> EncodedState:
        """Code a state as the next checkpoint."""
        coded, file = self.encode(state, step)
        entries = coded.checkpoint.entries
        weights = [entry for entry in entries if entry.spec.tag.role is Role.WEIGHT]
        self.files.append(file)
        self.sizes.append(
            Size(
                kind=coded.checkpoint.kind,
                stored=len(file),
                raw=sum(entry.spec.nbytes for entry in entries),
                weights=sum(entry.encoded.nbytes for entry in weights),
                raw_weights=sum(entry.spec.nbytes for entry in weights),
            )
        )
        self.kept_exactly |= coded.kept_exactly
        self._held, self._parent = dict(coded.reference), coded.checkpoint.state_digest
        self._restored = False
        self._movement.note(state, step)
        return coded

    def read(self, count: int | None = None, threads: int = 1) -> Decoded:
        """What a reader gets of the last one of so many checkpoints; None counts all."""
        return decode_chain([*map(in_memory, self.files[:count])], threads=threads)

    def restore(self) -> Decoded:
        """The same of the last checkpoint, from which training, and the chain, then go on."""
        decoded = self.read()
        self._held, self._restored = dict(decoded.reference), True
        self._movement.note(decoded.state, decoded.header.step)
        return decoded

    def summary(self) -> dict[str, Any]:
        """Sizes in JSON's kinds."""
        return {"sizes": [asdict(size) for size in self.sizes], "kept_exactly": self.kept_exactly}


def measure_chain(run: Undisturbed, setting: Setting) -> dict[str, Any]:
    """A chain of the undisturbed run's states; and what a restore of two of them costs, at once and steps later."""
    course = run.course
    chain = Chain(setting, Training(course).state())
    for step in course.save_steps:
        chain.add(run.state(step), step)
    probes = []
    for step in course.probes:
        training = Training(course)
        training.load(chain.read(course.save_steps.index(step) + 1).state)
        probes.append(run.rises(training, course.marks))
    rises = {mark: sum(probe[mark] for probe in probes) / len(probes) for mark in course.marks}
    return {**chain.summary(), "rises": rises, "probes": probes}


def measure_restores(run: Undisturbed, setting: Setting) -> dict[str, Any]:
    """A run that goes on from what a reader gets of every one of its checkpoints, against the undisturbed one."""
    course = run.course
    training = Training(course)
    chain = Chain(setting, training.state())
    training.load(run.state(course.save_steps[0]))  # until there, nothing disturbs it
    for step in course.save_steps:
        training.run(step)
        chain.add(training.state(), step)
        training.load(chain.restore().state)
    training.run(course.steps)
    return {**chain.summary(), "rise": training.loss() / run.losses[course.steps] - 1}


def measure_speed(run: Undisturbed, setting: Setting) -> dict[str, Any]:
    """MB of raw state per second with 1 and 2 threads, and of zstd at level 3 in the same minute.

    Encoding is that of the last delta, from tensors in memory to the file's bytes; decoding, that of a whole chain of
    three files, per checkpoint. The best of three times.
    """
    chain = Chain(setting)
    *before, last = run.course.save_steps[-_SHORT:]
    for step in before:
        chain.add(run.state(step), step)
    state, speeds = run.state(last), {}
    megabytes = state.nbytes / 1e6
    for threads in (1, 2):
        speeds[f"encode_{threads}"] = megabytes / _best(lambda n=threads: chain.encode(state, last, n))
    chain.add(state, last)
    for threads in (1, 2):
        speeds[f"decode_{threads}"] = _SHORT * megabytes / _best(lambda n=threads: chain.read(threads=n))
    return {"speeds": speeds, "zstd": _zstd_speeds(state)}


def _zstd_speeds(state: TrainingState) -> dict[str, float]:
    data = b"".join(bytes(tensor_to_bytes(tensor)) for tensor in state.tensors.values())
    megabytes, speeds = len(data) / 1e6, {}
    for threads in (1, 2):
        compressor = zstandard.ZstdCompressor(level=3, threads=threads if threads > 1 else 0)
        speeds[f"encode_{threads}"] = megabytes / _best(lambda c=compressor: c.compress(data))
    packed = zstandard.ZstdCompressor(level=3).compress(data)
    speed = megabytes / _best(lambda: zstandard.ZstdDecompressor().decompress(packed))
    return {**speeds, "decode_1": speed, "decode_2": speed}  # its format decodes in one thread


def _best(work: Callable[[], object]) -> float:
    work()  # compiles what is compiled on first use, and fills the caches
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def slice_of(state: TrainingState) -> str:
    """The name of a parameter small enough for a slow coder: a matrix in the middle of the model."""
    sizes = {
        spec.tag.parameter or spec.name: spec.numel
        for spec in state.specs.values()
        if spec.tag.role is Role.WEIGHT and len(spec.shape) >= 2
    }
    least = min((size for size in sizes.values() if size >= _LEAST_SLICE), default=max(sizes.values()))
    same = [name for name, size in sizes.items() if size == least]
    return same[len(same) // 2]


def _cut(state: TrainingState, parameter: str) -> TrainingState:
    specs = {name: spec for name, spec in state.specs.items() if spec.tag.parameter == parameter}
    return TrainingState(None, {name: state.tensors[name] for name in specs}, specs)


def measure_slice(run: Undisturbed, setting: Setting) -> dict[str, Any]:
    """Bits per element of one matrix and its moments, in the last delta of a short chain; and the seconds it took.

    Slow schemes, which look at every parameter by itself, code nothing but the slice; others the whole state.
    """
    started, chain = time.perf_counter(), Chain(setting)
    parameter = slice_of(run.state(run.course.save_steps[0]))
    for step in run.course.save_steps[-_SHORT:]:
        state = run.state(step)
        chain.add(_cut(state, parameter) if setting.scheme in SLOW else state, step)
    entries = [e for e in read_container(chain.files[-1]).entries if e.spec.tag.parameter == parameter]
    bits = {entry.spec.tag.role.value: 8 * entry.encoded.nbytes / entry.spec.numel for entry in entries}
    return {"parameter": parameter, "bits": bits, "seconds": time.perf_counter() - started}
