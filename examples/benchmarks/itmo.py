"""Bits per symbol of the ITMO coder's LSTM beside those of the context coder, on planes of levels from real training.

    OMP_NUM_THREADS=1 python examples/benchmarks/itmo.py

A small GPT is trained for 200 steps and saved every 50. The last save's planes of one of its blocks are coded, given
those of the save before: ExCP's symbols, for which the LSTM was published (arXiv 2506.12000), and those of shrinkpoint's own
lattices: how many steps each weight has moved, and the levels of the first moments. That takes some two minutes
after the training; ``--blocks 4`` takes the whole model. ``--states`` takes a folder of ``step_XXXX.pt`` files (keys model,
optim, param_names) instead of a training, and ``--steps`` which four of them.

Columns: entropy of order 0, and given the symbol at the same place before (both ideal, tables not counted); ``stored``, what
scheme ``itmo`` writes, which is by tables where those are shorter;
``one LSTM``, a single network that learns on through all matrices of the same width, one under the other, as the paper may
mean it; the context coder given the same previous plane and no other; and ``used``, what the scheme gives it: for ExCP's planes the
previous one and siblings, for the lattices what their codecs know of a dither and of a weight's history. The last line of each is the
sum over a parameter's planes. All bytes are counted, and everything is decoded and compared.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from context_planes import Levels, Quantization, Tensors, UInt8s, excp, states_of, states_of_training
from rich.console import Console
from rich.progress import Progress

from shrinkpoint.entropy import context, lstm
from shrinkpoint.entropy.context import Effort, Side
from shrinkpoint.entropy.lstm import Advance, LstmOptions
from shrinkpoint.entropy.symbols import conditional_entropy_bits
from shrinkpoint.schemes.base import Context, Held
from shrinkpoint.schemes.dithered_moments import DitheredFirstMomentCodec, FactoredSecondMomentCodec
from shrinkpoint.schemes.lattice import LatticeCodec, curvature_exponents
from shrinkpoint.state import Role, Tag, TensorSpec

EFFORTS: tuple[Effort, ...] = ("default", "max")
HEADS = ("order 0", "previous", "stored", "one LSTM", *EFFORTS, "def used", "max used", "LSTM/def")
RADIUS = 126


def lattice(states: list[Tensors], scale: float, moment_step: float) -> Quantization:
    """Moves on dithered lattices and dithered first moments, as `shrinkpoint.schemes.auto` sets them up for Adam."""
    by_effort = {effort: _chain(states, scale, moment_step, effort) for effort in EFFORTS}
    own = {effort: sizes for effort, (_, sizes) in by_effort.items()}
    return Quantization(f"lattice, scale {scale:g}", ("m", "w"), by_effort["default"][0], own)


def _chain(
    states: list[Tensors], scale: float, moment_step: float, effort: Effort
) -> tuple[list[Levels], dict[str, dict[str, int]]]:
    """The planes of all checkpoints, and the codecs' own bytes of the last one's."""
    elements = sum(weight.size for weight, _, _ in states[0].values())
    size = math.sqrt(
        sum(float((w.astype(np.float64) ** 2).sum()) for w, _, _ in states[0].values()) / elements
    )
    held: dict[str, Held] = {}
    planes: list[Levels] = []
    sizes: dict[str, dict[str, int]] = {}
    for number, state in enumerate(states):
        logs = {name: float(np.log(np.maximum(v, 1e-30)).mean()) for name, (_, _, v) in state.items()}
        mean = sum(logs[name] * v.size for name, (_, _, v) in state.items()) / elements
        levels: Levels = {}
        for name, parts in state.items():
            weight, first, second = map(torch.from_numpy, parts)
            shape = tuple(weight.shape)
            v = FactoredSecondMomentCodec().encode(second, spec(name, shape, Role.EXP_AVG_SQ), Context())
            moment = DitheredFirstMomentCodec(step=moment_step, seed=number, effort=effort)
            siblings = {Role.EXP_AVG_SQ.value: v.value}
            m = moment.encode(first, spec(name, shape, Role.EXP_AVG), Context(siblings=siblings))
            codec = LatticeCodec(
                step=scale * size * math.exp((mean - logs[name]) / 4),
                exponents=curvature_exponents(second, shape),
                tolerance=0.99,  # of one lattice's indices only the differences are moves
                effort=effort,
            )
            w = codec.encode(weight, spec(name, shape, Role.WEIGHT), Context(held.get(name)))
            index = np.asarray(w.planes["index"], np.int64)
            before = np.asarray(held[name].planes["index"], np.int64) if name in held else index
            moved = np.clip(index - before, -RADIUS, RADIUS) + RADIUS
            levels[name] = {
                "m": np.asarray(m.planes["levels"], np.uint8).reshape(shape),
                "w": moved.astype(np.uint8).reshape(shape),
            }
            held[name] = Held(w.encoded.codec, w.encoded.params, w.planes)
            sizes[name] = {key: len(coded.encoded.sections["levels"]) for key, coded in (("m", m), ("w", w))}
        planes.append(levels)
    return planes, sizes


def spec(name: str, shape: tuple[int, ...], role: Role) -> TensorSpec:
    return TensorSpec(name=name, dtype=torch.float32, shape=shape, tag=Tag(role=role))


def by_lstm(plane: UInt8s, previous: UInt8s, options: LstmOptions, advance: Advance) -> bytes:
    """The payload, which the encoder has decoded."""
    symbols, before, alphabet = plane.ravel(), previous.ravel(), int(max(plane.max(), previous.max())) + 1
    columns = plane.shape[1]
    return lstm.encode_plane(
        symbols, alphabet, columns=columns, previous=before, options=options, advance=advance
    )


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

    def advance(self, symbols: int) -> None:
        self.symbols += symbols
        self._bar.advance(self._task, symbols)

    def code(self, plane: UInt8s, previous: UInt8s, options: LstmOptions) -> bytes:
        started = time.perf_counter()
        payload = by_lstm(plane, previous, options, self.advance)
        self.seconds += time.perf_counter() - started
        return payload


def row(
    quantization: Quantization, key: str, names: list[str], options: LstmOptions, timer: Timer
) -> npt.NDArray[np.float64]:
    """Bits per symbol of one plane: the columns of `HEADS`, up to those of its efforts."""
    now, before = quantization.levels[-1], quantization.levels[-2]
    siblings = quantization.order[: quantization.order.index(key)]
    bits = np.zeros(8)
    for name in names:
        plane, previous = now[name][key], before[name][key]
        bits[0] += conditional_entropy_bits(plane.ravel(), None, 256, 1)
        bits[1] += conditional_entropy_bits(plane.ravel(), previous.ravel())
        bits[2] += 8 * len(timer.code(plane, previous, options))
        for place, effort in enumerate(EFFORTS):
            bits[4 + place] += 8 * by_contexts(plane, [previous], effort)
            if quantization.own:
                bits[6 + place] += 8 * quantization.own[effort][name][key]
            else:
                sides = [previous, *(now[name][sibling] for sibling in siblings)]
                bits[6 + place] += 8 * by_contexts(plane, sides, effort)
    whole = LstmOptions(width=options.width, rate=options.rate, chunk=24)
    for width in {now[name][key].shape[1] for name in names}:
        same = [name for name in names if now[name][key].shape[1] == width]
        stacked = (np.concatenate([levels[name][key] for name in same]) for levels in (now, before))
        bits[3] += 8 * len(timer.code(*stacked, whole))
    return bits / sum(now[name][key].size for name in names)


def line(name: str, key: str, bits: npt.NDArray[np.float64]) -> str:
    """One line of the table; its last column is how many times smaller the planes are than by the better LSTM."""
    ratio = min(bits[2], bits[3]) / bits[6]
    return f"{name:<22}{key:>5}" + "".join(f"{b:>10.4f}" for b in bits) + f"{ratio:>10.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=Path, help="folder of step_XXXX.pt files instead of a training")
    parser.add_argument("--steps", type=int, nargs=4, default=[50, 100, 150, 200], help="saves, ascending")
    parser.add_argument("--blocks", type=int, default=1, help="how many of the model's blocks (default 1)")
    parser.add_argument("--alpha", type=float, default=1e-3, help="ExCP's threshold (default 1e-3)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lattice's steps (default 1)")
    parser.add_argument("--width", type=int, default=32, help="units per layer (default 32)")
    parser.add_argument("--rate", type=int, default=7, help="learning rate 2^-rate (default 7)")
    options = parser.parse_args()
    found = states_of(options.states, options.steps) if options.states else states_of_training(options.steps)
    states = list(found)
    names = [name for name in states[0] for block in range(options.blocks) if f"blocks.{block}." in name]
    states = [{name: state[name] for name in names} for state in states]
    quantizations = [excp(states, options.alpha), lattice(states, options.scale, 3.0)]
    network = LstmOptions(width=options.width, rate=options.rate)
    total = sum(4 * states[0][name][0].size * len(q.order) for q in quantizations for name in names)
    print(f"{'bits per symbol':<27}" + "".join(f"{head:>10}" for head in HEADS))
    with Progress(console=Console(stderr=True), transient=True) as bar:
        timer = Timer(bar, total)
        for quantization in quantizations:
            total = np.zeros(8)
            for key in quantization.order:
                before = timer.symbols, timer.seconds
                bits = row(quantization, key, names, network, timer)
                total += bits
                speed = (timer.symbols - before[0]) / (timer.seconds - before[1])
                print(
                    f"{line(quantization.name, key, bits)}   {speed / 1e3:.0f} thousand symbols/s", flush=True
                )
            print(line(quantization.name, "all", total), flush=True)


if __name__ == "__main__":
    main()
