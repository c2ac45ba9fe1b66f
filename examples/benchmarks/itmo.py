"""Bits per symbol of the ITMO coder's LSTM beside those of the context coder, on planes of levels from the bench's trainings.

    OMP_NUM_THREADS=1 python examples/benchmarks/itmo.py [--model gpt] [--every 50] [--seeds 1,2,3] [--parameters "*"] [--deltas]

A training of `schemes.py` is taken from its cache, or run. The planes of its middle and its last checkpoint (``--deltas``:
of all but the first) are coded, given those of the checkpoint before: ExCP's symbols, for which the LSTM was published
(arXiv 2506.12000), and those of scheme ``auto``: the levels of first moments, and of weights how many points each lies from the one
nearest to where it is expected, among those of its state of the trellis (0 in rows that are kept): what its quantizers give, before
anything is made of it. With
``--symbols ranks`` it is how many points each lies beyond the one that its coder finds the best by looking ahead: what is left
when dither and trellis are taken into account, which the LSTM's contexts do not. Both are of one effort (``--effort``), since
efforts differ in their trellises. For one block of the GPT that takes some minutes a seed; ``--parameters "*"`` takes all matrices, ``--only auto``
leaves ExCP's symbols out.

Columns: entropy of order 0, and given the symbol at the same place before (both ideal, tables not counted); ``stored``, what
scheme ``itmo`` writes, which is by tables where those are shorter; ``one LSTM``, a single network that learns on through all
matrices of the same width, one under the other, as the paper may mean it; the context coder given the same previous plane and
no other; and ``used``, what the scheme gives it: for ExCP's planes the previous one and siblings, for auto's weights what its codec
knows of dither, paths and places, and for its moments nothing: the bytes that it stores. ``LSTM`` is the better of its two, chosen for every kind
of plane and width by itself, and the last columns how many times those bits are what is used. The last line of each is the sum over a
parameter's planes. All bytes are counted, and everything is decoded and compared.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from context_planes import Levels, Quantization, Tensors, UInt8s, excp
from rich.console import Console
from rich.progress import Progress
from schemes import ROOT, course_of
from schemes_measure import Chain
from schemes_models import MODELS, Undisturbed
from schemes_settings import Setting

from shrinkpoint.arrays import Float32s, Float64s, Int16s, Int64s
from shrinkpoint.entropy.contexts import coder as context
from shrinkpoint.entropy.contexts.coder import Effort, Side
from shrinkpoint.entropy.lstm import coder as lstm
from shrinkpoint.entropy.lstm.coder import LstmOptions
from shrinkpoint.entropy.static.bytes import decode_bytes
from shrinkpoint.entropy.symbols import count_symbols
from shrinkpoint.entropy.tables import data_bits
from shrinkpoint.entropy.trellis import coder as trellis_planes
from shrinkpoint.entropy.trellis.coder import CodedPoints
from shrinkpoint.schemes.auto import first_moments, trellis_sections
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.scheme import AutoOptions
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.state.training import Role, TensorSpec, TrainingState

EFFORTS: tuple[Effort, ...] = ("default", "max")
HEADS = ("order 0", "previous", "stored", "one LSTM", *EFFORTS, "def used", "max used", "LSTM")
LSTM_COLUMN = len(HEADS) - 1
RADIUS = 126


def chosen(spec: TensorSpec, pattern: str) -> str | None:
    """The parameter that a tensor belongs to, if it has several rows and its name is asked for."""
    parameter = spec.tag.parameter
    return parameter if parameter and len(spec.shape) > 1 and fnmatch(parameter, pattern) else None


def matrices(state: TrainingState, pattern: str) -> Tensors:
    """Weight, first and second moment, as rows and columns, of every parameter of that name which has several rows."""
    found: dict[str, dict[Role, Float32s]] = {}
    for name, spec in state.specs.items():
        parameter = chosen(spec, pattern)
        if parameter is not None:
            rows = state.tensors[name].reshape(spec.shape[0], -1).numpy()
            found.setdefault(parameter, {})[spec.tag.role] = rows
    roles = (Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ)
    return {name: tuple(parts[role] for role in roles) for name, parts in found.items()}  # type: ignore[misc]


def chains(
    run: Undisturbed, steps: Sequence[int], scale: float, pattern: str, effort: Effort, symbols: str
) -> dict[int, Quantization]:
    """The symbols of weights and of first moments, as scheme ``auto`` codes a chain of the run's states."""
    planes: dict[int, Levels] = {}
    sizes: dict[int, dict[Effort, dict[str, dict[str, int]]]] = {}
    options = AutoOptions(weight_scale=scale, effort=effort)
    chain = Chain(Setting(scheme="auto", label=effort, options=options))
    for step in (step for step in run.course.save_steps if step <= max(steps)):
        with recorded(symbols) as found:
            coded = chain.add(run.state(step), step)
        levels: Levels = {}
        stored: dict[str, dict[str, int]] = {}
        entries = [entry for entry in coded.checkpoint.entries if section_of(entry.encoded) is not None]
        for entry, plane in zip(entries, found, strict=True):
            spec, section = entry.spec, section_of(entry.encoded)
            parameter, key = chosen(spec, pattern), KEYS.get(spec.tag.role)
            if parameter is not None and key is not None and section is not None:
                levels.setdefault(parameter, {})[key] = whole(plane, entry.encoded, spec)
                stored.setdefault(parameter, {})[key] = len(entry.encoded.sections[section])
        planes[step], sizes[step] = levels, {effort: stored}
    return {
        step: Quantization(
            f"auto, scale {scale:g}",
            ("m", "w"),
            [planes[step - run.course.every], planes[step]],
            sizes[step],
        )
        for step in steps
    }


def section_of(encoded: EncodedTensor) -> str | None:
    """Of the symbols that are recorded."""
    sections = {
        TrellisWeightCodec.id: "points",
        CentroidFirstMomentCodec.id: "levels",
        CentroidMomentumCodec.id: "levels",
    }
    return sections.get(encoded.codec)


def whole(plane: UInt8s, encoded: EncodedTensor, spec: TensorSpec) -> UInt8s:
    """The symbols as a matrix; of rows that are kept, they are those of weights that have not moved."""
    rows, columns = spec.shape[0], spec.numel // spec.shape[0]
    if "kept" not in encoded.sections:
        return plane.reshape(rows, columns)
    bits = np.unpackbits(decode_bytes(encoded.sections["kept"], -(-rows // 8), 1), count=rows)
    matrix = np.full((rows, columns), RADIUS, np.uint8)
    matrix[bits == 0] = plane.reshape(-1, columns)
    return matrix


@contextmanager
def recorded(symbols: str) -> Iterator[list[UInt8s]]:
    """The symbols of every plane of points or of levels that is coded meanwhile, in the order of the checkpoint's tensors."""
    found: list[UInt8s] = []

    def record(points: Int16s, path: trellis_planes.Path, threads: int = 1) -> CodedPoints:
        coded = trellis_planes.encode_points(points, path, threads)
        moves = coded.ranks.astype(np.int64) if symbols == "ranks" else moves_of(points, path)
        found.append((np.clip(moves, -RADIUS, RADIUS) + RADIUS).astype(np.uint8))
        return coded

    def record_levels(plane: UInt8s, alphabet: int, **more: Any) -> bytes:
        found.append((plane.astype(np.int64) - alphabet // 2 + RADIUS).astype(np.uint8))
        return context.encode_plane(plane, alphabet, **more)

    with (
        mock.patch.object(trellis_sections, "encode_points", record),
        mock.patch.object(first_moments, "encode_plane", record_levels),
    ):
        yield found


def moves_of(points: Int16s, path: trellis_planes.Path) -> Int64s:
    """How many points each lies from the one nearest to where it is expected, among those of its state."""
    beside = points.astype(np.int64) & 1  # half a step, in states whose points lie there
    nearest = (path.places.astype(np.int64) - 128 * beside + 128) >> 8
    return (points.astype(np.int64) - beside) // 2 - nearest


KEYS = {Role.WEIGHT: "w", Role.EXP_AVG: "m"}


def pruned(run: Undisturbed, step: int, alpha: float, pattern: str) -> Quantization:
    """ExCP's symbols of a save, after a chain of up to three before it; the second save has no planes before it but zeros."""
    steps = [s for s in run.course.save_steps if s <= step][-4:]
    found = excp([matrices(run.state(s), pattern) for s in steps], alpha)
    if len(found.levels) == 1:
        zeros = {name: {key: 0 * plane for key, plane in p.items()} for name, p in found.levels[0].items()}
        found.levels.insert(0, zeros)
    return found


def by_lstm(plane: UInt8s, previous: UInt8s, options: LstmOptions) -> bytes:
    """The payload, which the encoder has decoded."""
    symbols, before, alphabet = plane.ravel(), previous.ravel(), int(max(plane.max(), previous.max())) + 1
    columns = plane.shape[1]
    return lstm.encode_plane(symbols, alphabet, columns=columns, previous=before, options=options)


def by_contexts(plane: UInt8s, sides: Sequence[UInt8s], effort: Effort) -> int:
    """Bytes of the context coder's payload."""
    symbols, alphabet, columns = plane.ravel(), int(plane.max()) + 1, plane.shape[1]
    given = [Side(side.ravel(), int(side.max()) + 1) for side in sides]
    payload = context.encode_plane(symbols, alphabet, columns=columns, sides=given, effort=effort)
    decoded = context.decode_plane(payload, symbols.size, alphabet, columns=columns, sides=given)
    if not np.array_equal(decoded, symbols):
        raise SystemExit("the context coder does not give the plane back")
    return len(payload)


class Timer:
    """Symbols per second of the LSTM, and a progress bar."""

    def __init__(self, bar: Progress, symbols: int) -> None:
        self._bar, self._task = bar, bar.add_task("LSTM", total=symbols)
        self.symbols, self.seconds = 0, 0.0

    def code(self, plane: UInt8s, previous: UInt8s, options: LstmOptions) -> bytes:
        started = time.perf_counter()
        payload = by_lstm(plane, previous, options)
        self.seconds += time.perf_counter() - started
        symbols = 2 * plane.size  # they are coded twice: to write and to verify them
        self.symbols += symbols
        self._bar.advance(self._task, symbols)
        return payload


def row(
    quantization: Quantization, key: str, names: list[str], options: LstmOptions, timer: Timer
) -> Float64s:
    """Bits per symbol of one kind of plane: the columns of `HEADS`."""
    now, before = quantization.levels[-1], quantization.levels[-2]
    siblings = quantization.order[: quantization.order.index(key)]
    whole = LstmOptions(width=options.width, rate=options.rate, chunk=24)
    total = np.zeros(len(HEADS))
    for width in sorted({now[name][key].shape[1] for name in names}):
        same = [name for name in names if now[name][key].shape[1] == width]
        bits = np.zeros(len(HEADS))
        for name in same:
            plane, previous = now[name][key], before[name][key]
            bits[0] += float(data_bits(count_symbols(plane.ravel(), None, 256, 1)).sum())
            bits[1] += float(data_bits(count_symbols(plane.ravel(), previous.ravel(), 256, 256)).sum())
            bits[2] += 8 * len(timer.code(plane, previous, options))
            for place, effort in enumerate(EFFORTS):
                bits[4 + place] += 8 * by_contexts(plane, [previous], effort)
                if quantization.own:
                    own = quantization.own.get(effort)
                    bits[6 + place] += 8 * own[name][key] if own else np.nan
                else:
                    sides = [previous, *(now[name][sibling] for sibling in siblings)]
                    bits[6 + place] += 8 * by_contexts(plane, sides, effort)
        stacked = (np.concatenate([levels[name][key] for name in same]) for levels in (now, before))
        bits[3] += 8 * len(timer.code(*stacked, whole))
        bits[LSTM_COLUMN] = min(bits[2], bits[3])
        total += bits
    return total / sum(now[name][key].size for name in names)


def ratios(bits: Float64s) -> Float64s:
    """How many times the bits that are used, by effort, the LSTM's are."""
    return bits[LSTM_COLUMN] / bits[6 : 6 + len(EFFORTS)]


def line(name: str, key: str, bits: Float64s) -> str:
    """One line of the table."""
    return (
        f"{name:<36}{key:>4}"
        + "".join(f"{b:>10.4f}" for b in bits)
        + "".join(f"{r:>8.3f}" for r in ratios(bits))
    )


def measure(name: str, quantization: Quantization, network: LstmOptions, timer: Timer) -> Float64s:
    """Print the lines of one checkpoint, and return the last: bits per parameter."""
    names = list(quantization.levels[-1])
    total = np.zeros(len(HEADS))
    for key in quantization.order:
        before = timer.symbols, timer.seconds
        bits = row(quantization, key, names, network, timer)
        total += bits
        speed = (timer.symbols - before[0]) / (timer.seconds - before[1])
        print(f"{line(name, key, bits)}   {speed / 1e3:.0f} thousand symbols/s", flush=True)
    print(line(name, "all", total), flush=True)
    return total


def summary(name: str, bits: dict[int, list[Float64s]]) -> str:
    """How many times the bits that are used the LSTM's are, over all checkpoints of a seed, and over the seeds."""
    quotients = np.stack([ratios(np.sum(checkpoints, axis=0)) for checkpoints in bits.values()])
    alone = np.stack([ratios(b) for checkpoints in bits.values() for b in checkpoints])
    return "\n".join(
        f"{name}, {effort}: {values.mean():.3f} ({values.min():.3f} to {values.max():.3f}, {len(values)} seeds);"
        f" single checkpoints {each.min():.3f} to {each.max():.3f}"
        for effort, values, each in zip(EFFORTS, quotients.T, alone.T, strict=True)
        if not np.isnan(values).any()
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="gpt", help="which training (default gpt)")
    parser.add_argument("--every", type=int, default=None, help="steps between checkpoints (default 50)")
    parser.add_argument("--seeds", default="1", help="of the trainings, by commas (default 1)")
    parser.add_argument("--parameters", default="blocks.0.*", help='which, "*" for all (default blocks.0.*)')
    parser.add_argument("--deltas", action="store_true", help="all checkpoints but the first")
    parser.add_argument("--only", choices=("excp", "auto"), help="one kind of symbols alone")
    parser.add_argument("--alpha", type=float, default=1e-3, help="ExCP's threshold (default 1e-3)")
    parser.add_argument("--scale", type=float, default=1.0, help="of auto's noise (default 1)")
    parser.add_argument("--effort", choices=EFFORTS, default="default", help="of auto (default default)")
    parser.add_argument(
        "--symbols", choices=("moves", "ranks"), default="moves", help="of auto (default moves)"
    )
    parser.add_argument("--width", type=int, default=32, help="units per layer (default 32)")
    parser.add_argument("--rate", type=int, default=7, help="learning rate 2^-rate (default 7)")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: no real numbers")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "bench-schemes", help="of the bench")
    return parser.parse_args()


def compare(run: Undisturbed, options: argparse.Namespace) -> dict[str, list[Float64s]]:
    """Print the lines of one training's checkpoints; bits per parameter of each, by kind of symbols."""
    network = LstmOptions(width=options.width, rate=options.rate)
    steps = run.course.save_steps[1:] if options.deltas else run.course.probes
    coded = {}
    if options.only != "excp":
        coded = chains(run, steps, options.scale, options.parameters, options.effort, options.symbols)
    found: dict[str, list[Float64s]] = {}
    for step in steps:
        quantizations = [coded[step]] if coded else []
        if options.only != "auto":
            quantizations.insert(0, pruned(run, step, options.alpha, options.parameters))
        planes = [plane for q in quantizations for p in q.levels[-1].values() for plane in p.values()]
        with Progress(console=Console(stderr=True), transient=True) as bar:
            timer = Timer(bar, 2 * sum(plane.size for plane in planes))
            for quantization in quantizations:
                name = f"seed {run.course.seed}, step {step}: {quantization.name}"
                found.setdefault(quantization.name, []).append(measure(name, quantization, network, timer))
    return found


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    print(f"{'bits per symbol':<40}" + "".join(f"{head:>10}" for head in HEADS) + " LSTM/def LSTM/max")
    found: dict[str, dict[int, list[Float64s]]] = {}
    for seed in map(int, options.seeds.split(",")):
        run = Undisturbed(
            course_of(options.model, seed, options.every, options.quick), options.cache / "runs"
        )
        run.train()
        for name, bits in compare(run, options).items():
            found.setdefault(name, {})[seed] = bits
    print("the LSTM's bits over those used, all these checkpoints of a seed together:")
    for name, by_seed in found.items():
        print(summary(name, by_seed))


if __name__ == "__main__":
    main()
