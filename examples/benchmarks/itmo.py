"""Bits per symbol of the ITMO coder's LSTM next to what scheme ``auto`` stores, on the symbols of trainings of the bench of schemes.

    OMP_NUM_THREADS=1 python examples/benchmarks/itmo.py [--model gpt] [--every 50] [--seeds 1,2,3] [--parameters "*"] [--deltas]

A training of `schemes.py` is taken from its cache, or run. The symbols of its middle and its last checkpoint (``--deltas``: of
all but the first) are coded by the LSTM (arXiv 2506.12000), given those of the checkpoint before: levels of first moments; and of weights how
many points each lies from the nearest of its trellis state's, counted from where it is expected (0 in rows that are kept). For one block of the
GPT that takes some minutes a seed; ``--parameters "*"`` takes all matrices.

Columns: entropy of order 0, and given the symbol at the same place before (both ideal, tables not counted); ``stored``, what
the coder of scheme ``itmo`` writes, which is by tables where those are shorter; ``one LSTM``, a single network that learns on through
all matrices of the same width, one under the other, as the paper may mean it; ``used``, the bytes that `auto` stores; ``LSTM``, the better
of its two, chosen for every kind of symbols and width by itself, and how many times those bits are what is used. The last
line of each checkpoint is the sum over a parameter's symbols. All bytes are counted, and what the LSTM codes is decoded and compared.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from schemes import ROOT, course_of
from schemes_measure import Chain
from schemes_models import MODELS, Undisturbed
from schemes_settings import Setting

from shrinkpoint.arrays import Float64s, Int16s, Int64s, UInt8s
from shrinkpoint.entropy.lanes.coder import encode_matrix
from shrinkpoint.entropy.lstm import coder as lstm
from shrinkpoint.entropy.lstm.coder import LstmOptions
from shrinkpoint.entropy.numbers import decode_numbers
from shrinkpoint.entropy.static.tables import count_symbols, data_bits
from shrinkpoint.schemes.auto import first_moments, trellis_weights
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.scheme import AutoOptions
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.state.training import Role, TensorSpec

HEADS = ("order 0", "previous", "stored", "one LSTM", "used", "LSTM")
RADIUS = 126
KEYS = {Role.WEIGHT: "w", Role.EXP_AVG: "m"}
SECTIONS = {
    TrellisWeightCodec.id: "points",
    CentroidFirstMomentCodec.id: "levels",
    CentroidMomentumCodec.id: "levels",
}

Levels = dict[str, dict[str, UInt8s]]
"""Symbols (w or m) of every matrix, by name."""


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's symbols, those of the one before, and the bytes that are stored of them."""

    levels: Levels
    before: Levels
    used: dict[str, dict[str, int]]


def chosen(spec: TensorSpec, pattern: str) -> str | None:
    """The parameter that a tensor belongs to, if it has several rows and its name is asked for."""
    parameter = spec.tag.parameter
    return parameter if parameter and len(spec.shape) > 1 and fnmatch(parameter, pattern) else None


def chains(run: Undisturbed, steps: Sequence[int], scale: float, pattern: str) -> dict[int, Quantization]:
    """The symbols of weights and of first moments, as scheme ``auto`` codes a chain of the run's states."""
    planes: dict[int, Levels] = {}
    used: dict[int, dict[str, dict[str, int]]] = {}
    chain = Chain(Setting(scheme="auto", label="auto", options=AutoOptions(weight_scale=scale)))
    for step in (step for step in run.course.save_steps if step <= max(steps)):
        with recorded() as found:
            coded = chain.add(run.state(step), step)
        levels: Levels = {}
        sizes: dict[str, dict[str, int]] = {}
        entries = [entry for entry in coded.checkpoint.entries if entry.encoded.codec in SECTIONS]
        for entry, plane in zip(entries, found, strict=True):
            spec, encoded = entry.spec, entry.encoded
            parameter, key = chosen(spec, pattern), KEYS.get(spec.tag.role)
            if parameter is not None and key is not None:
                levels.setdefault(parameter, {})[key] = whole(plane, encoded, spec)
                sizes.setdefault(parameter, {})[key] = len(encoded.sections[SECTIONS[encoded.codec]])
        planes[step], used[step] = levels, sizes
    return {step: Quantization(planes[step], planes[step - run.course.every], used[step]) for step in steps}


def whole(plane: UInt8s, encoded: EncodedTensor, spec: TensorSpec) -> UInt8s:
    """The symbols as a matrix; of rows that are kept, they are those of weights that have not moved."""
    rows, columns = spec.shape[0], spec.numel // spec.shape[0]
    if "kept" not in encoded.sections:
        return plane.reshape(rows, columns)
    bits = np.unpackbits(decode_numbers(encoded.sections["kept"], -(-rows // 8), np.uint8), count=rows)
    matrix = np.full((rows, columns), RADIUS, np.uint8)
    matrix[bits == 0] = plane.reshape(-1, columns)
    return matrix


@contextmanager
def recorded() -> Iterator[list[UInt8s]]:
    """The symbols of every matrix of points or of levels that is coded meanwhile, in the order of the checkpoint's tensors."""
    found: list[UInt8s] = []

    def record(points: Int16s, places: Int16s | None, **more: Any) -> bytes:
        moves = points if places is None else moves_of(points, places)
        found.append((np.clip(moves, -RADIUS, RADIUS) + RADIUS).astype(np.uint8))
        return encode_matrix(points, places, **more)

    with (
        mock.patch.object(trellis_weights, "encode_matrix", record),
        mock.patch.object(first_moments, "encode_matrix", record),
    ):
        yield found


def moves_of(points: Int16s, places: Int16s) -> Int64s:
    """How many points each lies from the one nearest to where it is expected, among those of its state."""
    odd = points.astype(np.int64) & 1  # half a step, in states whose points lie there
    nearest = (places.astype(np.int64) - 128 * odd + 128) >> 8
    return (points.astype(np.int64) - odd) // 2 - nearest


def by_lstm(plane: UInt8s, previous: UInt8s, options: LstmOptions) -> bytes:
    """The payload, which the encoder has decoded."""
    symbols, before, alphabet = plane.ravel(), previous.ravel(), int(max(plane.max(), previous.max())) + 1
    columns = plane.shape[1]
    return lstm.encode_plane(symbols, alphabet, columns=columns, previous=before, options=options)


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
    """Bits per symbol of one kind of symbols: the columns of `HEADS`."""
    now, before = quantization.levels, quantization.before
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
            bits[4] += 8 * quantization.used[name][key]
        stacked = (np.concatenate([levels[name][key] for name in same]) for levels in (now, before))
        bits[3] += 8 * len(timer.code(*stacked, whole))
        bits[5] = min(bits[2], bits[3])
        total += bits
    return total / sum(now[name][key].size for name in names)


def ratio(bits: Float64s) -> float:
    """How many times the bits that are used the LSTM's are."""
    return float(bits[5] / bits[4])


def line(name: str, key: str, bits: Float64s) -> str:
    """One line of the table."""
    return f"{name:<36}{key:>4}" + "".join(f"{b:>10.4f}" for b in bits) + f"{ratio(bits):>10.3f}"


def measure(name: str, quantization: Quantization, network: LstmOptions, timer: Timer) -> Float64s:
    """Print the lines of one checkpoint, and return the last: bits per parameter."""
    names = list(quantization.levels)
    total = np.zeros(len(HEADS))
    for key in ("m", "w"):
        before = timer.symbols, timer.seconds
        bits = row(quantization, key, names, network, timer)
        total += bits
        speed = (timer.symbols - before[0]) / (timer.seconds - before[1])
        print(f"{line(name, key, bits)}   {speed / 1e3:.0f} thousand symbols/s", flush=True)
    print(line(name, "all", total), flush=True)
    return total


def summary(bits: dict[int, list[Float64s]]) -> str:
    """How many times the bits that are used the LSTM's are, over all checkpoints of a seed, and over the seeds."""
    values = np.array([ratio(np.sum(checkpoints, axis=0)) for checkpoints in bits.values()])
    alone = [ratio(b) for checkpoints in bits.values() for b in checkpoints]
    return (
        f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f}, {len(values)} seeds);"
        f" single checkpoints {min(alone):.3f} to {max(alone):.3f}"
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
    parser.add_argument("--scale", type=float, default=1.0, help="of the noise (default 1)")
    parser.add_argument("--width", type=int, default=32, help="units per layer (default 32)")
    parser.add_argument("--rate", type=int, default=7, help="learning rate 2^-rate (default 7)")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: no real numbers")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "bench-schemes", help="of the bench")
    return parser.parse_args()


def compare(run: Undisturbed, options: argparse.Namespace) -> list[Float64s]:
    """Print the lines of one training's checkpoints; bits per parameter of each."""
    network = LstmOptions(width=options.width, rate=options.rate)
    steps = run.course.save_steps[1:] if options.deltas else run.course.probes
    coded = chains(run, steps, options.scale, options.parameters)
    found = []
    for step in steps:
        planes = [plane for parts in coded[step].levels.values() for plane in parts.values()]
        with Progress(console=Console(stderr=True), transient=True) as bar:
            timer = Timer(bar, 4 * sum(plane.size for plane in planes))
            name = f"seed {run.course.seed}, step {step}: scale {options.scale:g}"
            found.append(measure(name, coded[step], network, timer))
    return found


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    print(f"{'bits per symbol':<40}" + "".join(f"{head:>10}" for head in HEADS) + " LSTM/used")
    found: dict[int, list[Float64s]] = {}
    for seed in map(int, options.seeds.split(",")):
        run = Undisturbed(
            course_of(options.model, seed, options.every, options.quick), options.cache / "runs"
        )
        run.train()
        found[seed] = compare(run, options)
    print(f"the LSTM's bits over those used, all these checkpoints of a seed together: {summary(found)}")


if __name__ == "__main__":
    main()
