"""Bits per symbol of the ITMO coder's LSTM beside those of the context coder, on planes of levels from real training.

    OMP_NUM_THREADS=1 python examples/benchmarks/itmo.py

A small GPT is trained for 200 steps and saved every 50. The last save's planes of one of its blocks are coded, given
those of the save before: ExCP's symbols, for which the LSTM was published (arXiv 2506.12000), and those of scheme ``auto``:
how many steps of its lattice each weight has moved, and the levels of the first moments. That takes some two minutes
after the training; ``--blocks 4`` takes the whole model. ``--states`` takes a folder of ``step_XXXX.pt`` files (keys model,
optim, param_names) instead of a training, and ``--steps`` which four of them.

Columns: entropy of order 0, and given the symbol at the same place before (both ideal, tables not counted); ``stored``, what
scheme ``itmo`` writes, which is by tables where those are shorter;
``one LSTM``, a single network that learns on through all matrices of the same width, one under the other, as the paper may
mean it; the context coder given the same previous plane and no other; and ``used``, what the scheme gives it: for ExCP's planes the
previous one and siblings, for auto's what its codecs know of a dither and of a weight's history: the bytes that it stores. The last line
of each is the sum over a parameter's planes. All bytes are counted, and everything is decoded and compared.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from context_planes import (
    Levels,
    Quantization,
    Tensors,
    UInt8s,
    excp,
    learning_rates,
    states_of,
    states_of_training,
)
from rich.console import Console
from rich.progress import Progress

from shrinkpoint.coding import encode_state
from shrinkpoint.entropy import context, lstm
from shrinkpoint.entropy.context import Effort, Side
from shrinkpoint.entropy.lstm import Advance, LstmOptions
from shrinkpoint.entropy.symbols import conditional_entropy_bits
from shrinkpoint.schemes.auto import Auto, AutoOptions
from shrinkpoint.schemes.base import Held, Occasion
from shrinkpoint.state import LayerType, Role, Tag, TrainingState
from shrinkpoint.tree import Path

EFFORTS: tuple[Effort, ...] = ("default", "max")
HEADS = ("order 0", "previous", "stored", "one LSTM", *EFFORTS, "def used", "max used", "LSTM/def")
RADIUS = 126


def lattice(states: list[Tensors], rates: list[float], scale: float, names: list[str]) -> Quantization:
    """Moves on dithered lattices and dithered first moments, coded by scheme ``auto`` itself."""
    chains = {
        effort: _chain(states, rates, names, AutoOptions(weight_scale=scale, effort=effort))
        for effort in EFFORTS
    }
    own = {effort: sizes for effort, (_, sizes) in chains.items()}
    return Quantization(f"auto, scale {scale:g}", ("m", "w"), chains["default"][0], own)


def _chain(
    states: list[Tensors], rates: list[float], names: list[str], options: AutoOptions
) -> tuple[list[Levels], dict[str, dict[str, int]]]:
    """The planes of all checkpoints, and the bytes of the last one's."""
    held: Mapping[str, Held] | None = None
    planes: list[Levels] = []
    for step, (tensors, rate) in enumerate(zip(states, rates, strict=True)):
        state = _state(tensors, rate)
        scheme = Auto(options=options, occasion=Occasion(state=state, step=step, reference=held))
        parent = "0" * 32 if held is not None else None
        coded = encode_state(state, scheme, step=step, reference=held, parent=parent)
        levels: Levels = {}
        for name in names:
            shape = tensors[name][0].shape
            index, before = (
                np.asarray(chain[f"{name}/0"].planes["index"], np.int64).reshape(shape)
                for chain in (coded.held, held or coded.held)
            )
            moved = np.clip(index - before, -RADIUS, RADIUS) + RADIUS
            first = np.asarray(coded.held[f"{name}/1"].planes["levels"], np.uint8)
            levels[name] = {"m": first.reshape(shape), "w": moved.astype(np.uint8)}
        planes.append(levels)
        held = coded.held
    sections = {entry.spec.name: entry.encoded.sections for entry in coded.checkpoint.entries}
    sizes = {
        name: {key: len(sections[f"{name}/{number}"]["levels"]) for key, number in (("w", 0), ("m", 1))}
        for name in names
    }
    return planes, sizes


def _state(tensors: Tensors, rate: float) -> TrainingState:
    """Weights, first and second moments as ``name/0``, ``name/1`` and ``name/2``, with what an optimizer says of itself."""
    roles = (Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ)

    def describe(path: Path, tensor: torch.Tensor) -> Tag:
        return Tag(role=roles[int(path[1])], layer_type=LayerType.LINEAR, parameter=path[0])

    parts: dict[str, Any] = {name: list(map(torch.from_numpy, three)) for name, three in tensors.items()}
    return TrainingState.capture({**parts, "param_groups": [{"lr": rate, "betas": (0.9, 0.95)}]}, describe)


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
    parser.add_argument("--states", type=FilePath, help="folder of step_XXXX.pt files instead of a training")
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
    blocks = [{name: state[name] for name in names} for state in states]
    rates = learning_rates(options.steps)
    quantizations = [excp(blocks, options.alpha), lattice(states, rates, options.scale, names)]
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
