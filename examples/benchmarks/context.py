"""Bits per symbol and speed of the context coder on planes of levels from real training.

    OMP_NUM_THREADS=1 python examples/benchmarks/context.py --threads 2

A small GPT is trained for 150 steps and quantized every 50 in three ways: a dead-zone residual with its first moment,
ExCP, and shrinkpoint's present codecs. The last checkpoint's planes are coded, given those of the one before. ``--states`` takes a
folder of ``step_XXXX.pt`` files (keys model, optim, param_names) instead, and ``--steps`` which four of them.

Columns: entropy of order 0, and given the previous plane (both ideal, tables not counted); ``3x3``, what a small network
over the 3x3 neighbourhood in the previous plane needs, the context of the ITMO coder (arXiv 2506.12000), in its second
pass, hence without what learning costs; then the three efforts, all bytes counted.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
import torch
from context_planes import (
    Quantization,
    UInt8s,
    dead_zone,
    excp,
    present_codecs,
    states_of,
    states_of_training,
)

from shrinkpoint.entropy.contexts.coder import Effort, Side, decode_plane, encode_plane
from shrinkpoint.entropy.symbols import count_symbols
from shrinkpoint.entropy.tables import data_bits

Result = TypeVar("Result")
EFFORTS: tuple[Effort, ...] = get_args(Effort)


def neighbourhood_bits(pairs: list[tuple[UInt8s, UInt8s]], batch: int = 2048, width: int = 64) -> float:
    """Bits that a network over the 3x3 neighbourhood in the previous plane needs for all planes, second of two passes."""
    torch.manual_seed(0)
    inputs = np.concatenate([_windows(previous) for _, previous in pairs])
    _, codes = np.unique(
        np.concatenate([inputs.ravel(), *(plane.ravel() for plane, _ in pairs)]), return_inverse=True
    )
    kinds = int(codes.max()) + 1
    x = torch.from_numpy(codes[: inputs.size].reshape(-1, 9) + kinds * np.arange(9))
    y = torch.from_numpy(codes[inputs.size :])
    first = torch.nn.EmbeddingBag(9 * kinds, width, mode="sum")
    rest = torch.nn.Sequential(
        torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, kinds)
    )
    optimizer = torch.optim.Adam([*first.parameters(), *rest.parameters()], lr=3e-3)
    total = 0.0
    for _ in range(2):
        total = 0.0
        for start in range(0, len(y), batch):
            part = slice(start, start + batch)
            loss = torch.nn.functional.cross_entropy(rest(first(x[part])), y[part], reduction="sum")
            total += loss.item()
            optimizer.zero_grad()
            (loss / batch).backward()
            optimizer.step()
    return total / float(np.log(2))


def _windows(plane: UInt8s) -> UInt8s:
    padded = np.pad(plane, 1)
    rows, columns = plane.shape
    shifted = [padded[i : i + rows, j : j + columns].ravel() for i in range(3) for j in range(3)]
    return np.stack(shifted, axis=1)


def coded(
    quantization: Quantization, key: str, name: str, effort: Effort
) -> tuple[int, Callable[[], bytes], Callable[[bytes], UInt8s]]:
    """Symbols, encoder and decoder of one plane of the last checkpoint."""
    return _coders(*_plane_and_sides(quantization, key, [name]), effort, 1)


def _plane_and_sides(quantization: Quantization, key: str, names: list[str]) -> tuple[UInt8s, list[Side]]:
    """Planes of the last checkpoint, one under the other, and what they are given: the previous ones and siblings."""
    now, before = quantization.levels[-1], quantization.levels[-2]
    siblings = quantization.order[: quantization.order.index(key)]
    given = [np.concatenate([before[name][key] for name in names])]
    given += [np.concatenate([now[name][sibling] for name in names]) for sibling in siblings]
    plane = np.concatenate([now[name][key] for name in names])
    return plane, [Side(side.ravel(), int(side.max()) + 1) for side in given]


def _coders(
    plane: UInt8s, sides: list[Side], effort: Effort, threads: int
) -> tuple[int, Callable[[], bytes], Callable[[bytes], UInt8s]]:
    symbols, columns, alphabet = plane.ravel(), plane.shape[1], int(plane.max()) + 1
    return (
        symbols.size,
        lambda: encode_plane(symbols, alphabet, columns=columns, sides=sides, effort=effort, threads=threads),
        lambda payload: decode_plane(
            payload, symbols.size, alphabet, columns=columns, sides=sides, threads=threads
        ),
    )


def print_sizes(quantization: Quantization, network: bool) -> None:
    """One line for each plane, and their sum."""
    now, before = quantization.levels[-1], quantization.levels[-2]
    sums = np.zeros(6)
    for key in (*quantization.order, "sum"):
        bits = sums
        if key != "sum":
            pairs = [(now[name][key], before[name][key]) for name in now]
            flat = [(plane.ravel(), previous.ravel()) for plane, previous in pairs]
            bits = np.array(
                [
                    sum(float(data_bits(count_symbols(plane, None, 256, 1)).sum()) for plane, _ in flat),
                    sum(
                        float(data_bits(count_symbols(plane, previous, 256, 256)).sum())
                        for plane, previous in flat
                    ),
                    neighbourhood_bits(pairs) if network else np.nan,
                    *(8 * sum(len(coded(quantization, key, n, e)[1]()) for n in now) for e in EFFORTS),
                ]
            ) / sum(plane.size for plane, _ in pairs)
            sums += bits
        gains = f"{bits[2] / bits[4]:>9.2f}{bits[2] / bits[5]:>9.2f}"
        print(f"{quantization.name:<26}{key:>4}" + "".join(f"{b:>9.4f}" for b in bits) + gains, flush=True)


def print_speeds(quantization: Quantization, key: str, repeats: int, threads: int) -> None:
    """Millions of symbols per second on all matrices of the most frequent width, one under the other."""
    now = quantization.levels[-1]
    widths = [planes[key].shape[1] for planes in now.values()]
    names = [name for name in now if now[name][key].shape[1] == max(set(widths), key=widths.count)]
    plane, sides = _plane_and_sides(quantization, key, names)
    for effort in EFFORTS:
        size, encode, decode = _coders(plane, sides, effort, threads)
        encode_s, payload = best_of(repeats, encode)
        decode_s, decoded = best_of(repeats, lambda payload=payload, decode=decode: decode(payload))
        if not np.array_equal(decoded, plane.ravel()):
            raise SystemExit(f"{quantization.name}: decoding does not give the plane back")
        speeds = "".join(f"{size / s / 1e6:>9.1f}{4 * size / s / 1e6:>9.0f}" for s in (encode_s, decode_s))
        print(f"{quantization.name:<26}{key:>4} {effort:<8}{speeds}", flush=True)


def best_of(repeats: int, function: Callable[[], Result]) -> tuple[float, Result]:
    """Shortest time in seconds, and the result; one call before compiles the kernels."""
    result = function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - started)
    return min(times), result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=Path, help="folder of step_XXXX.pt files instead of a training")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100, 150], help="checkpoints, ascending")
    parser.add_argument("--threads", type=int, default=1, help="threads of the coders (default 1)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed runs, of which the best counts (default 3)"
    )
    parser.add_argument(
        "--no-network", action="store_true", help="leave out the 3x3 column, which takes longest"
    )
    parser.add_argument("--speed-only", action="store_true", help="leave out the sizes")
    options = parser.parse_args()
    states = list(
        states_of(options.states, options.steps) if options.states else states_of_training(options.steps)
    )
    quantizations = [
        dead_zone(states, 3.0, 1.0),
        excp(states, 5e-5),
        excp(states, 1e-3),
        present_codecs(states, 8),
        present_codecs(states, 32),
    ]
    if not options.speed_only:
        heads = ("order 0", "previous", "3x3", *EFFORTS, "3x3/def", "3x3/max")
        print(f"{'bits per symbol':<30}" + "".join(f"{head:>9}" for head in heads))
        for quantization in quantizations:
            print_sizes(quantization, not options.no_network)
    print(
        f"\n{'':<39}{'encode, M/s and MB/s':>18}{'decode':>18}   (MB of the fp32 that the symbols stand for)"
    )
    for quantization, key in ((quantizations[0], "w"), (quantizations[3], "m"), (quantizations[3], "w")):
        print_speeds(quantization, key, options.repeats, options.threads)


if __name__ == "__main__":
    main()
