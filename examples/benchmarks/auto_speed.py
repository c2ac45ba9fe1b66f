"""Speed and memory of ``scheme="auto"`` from a snapshot to a container and back, by threads and stage.

    OMP_NUM_THREADS=1 python examples/benchmarks/auto_speed.py --threads 1 2

The state is Adam's, fp32, of a GPT of a few million or a few hundred million parameters (``--layers``, ``--width``): no
training, but tensors with the shapes and statistics of one. Second moments are rows times columns times a scatter, the
first are a few outer products and noise in units of their roots, and weights move between saves so that about one in
fifteen leaves its cell. A base and two deltas are coded, and read as a chain.

MB/s are of raw state per second, a delta's being the second one's; reading is done twice, and the faster one counts,
for memory that a virtual machine has never touched costs more than all decoding. Stages are CPU time per megabyte of state, of all
threads together, each without the stages that it calls. ``memory`` is the largest growth of the process during the
save, without what the reader holds, as a share of the state. The machine's own speed is in the first line: memcpy, and
zstd at level 3 on the same state.
"""

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from auto_speed_stages import Stages

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import decode_chain, in_memory
from shrinkpoint.container.writer import write_container
from shrinkpoint.schemes.auto.scheme import AutoOptions
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.catalogue import build
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.training import LayerType, Role, Tag, TrainingState

_SAVES = 3
_WEIGHT_ROLES = {"weight": Role.WEIGHT, "exp_avg": Role.EXP_AVG, "exp_avg_sq": Role.EXP_AVG_SQ}


class Shape(NamedTuple):
    """A GPT's sizes."""

    layers: int
    width: int
    tokens: int

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes."""
        d = self.width
        yield "token.weight", (self.tokens, d)
        yield "position.weight", (256, d)
        for layer in range(self.layers):
            for name, rows, columns in (
                ("qkv", 3 * d, d),
                ("out", d, d),
                ("up", 4 * d, d),
                ("down", d, 4 * d),
            ):
                yield f"blocks.{layer}.{name}.weight", (rows, columns)
                yield f"blocks.{layer}.{name}.bias", (rows,)
            for norm in ("norm1", "norm2"):
                yield f"blocks.{layer}.{norm}.weight", (d,)


def states_of(shape: Shape, seed: int = 0) -> Iterator[TrainingState]:
    """The states of `_SAVES` saves; weights move on in place of being drawn again."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, dict[str, torch.Tensor]] = {
        name: {"weight": 0.02 * torch.randn(size, generator=generator)} for name, size in shape.parameters()
    }
    for _ in range(_SAVES):
        for parts in found.values():
            _advance(parts, generator)
        yield TrainingState.capture(
            {name: dict(parts) for name, parts in found.items()}, lambda path, _: _tag(path)
        )


def _tag(path: tuple[Any, ...]) -> Tag:
    kind = LayerType.NORM if "norm" in str(path[0]) else LayerType.LINEAR
    return Tag(role=_WEIGHT_ROLES[str(path[1])], layer_type=kind, parameter=str(path[0]))


def _advance(parts: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    size = parts["weight"].shape
    rows, columns = size[0] if len(size) > 1 else 1, size[-1]
    octaves = torch.randn((rows, 1), generator=generator) + torch.randn(columns, generator=generator)
    roots = (1e-4 * 2 ** (octaves / 2)).reshape(rows, columns)
    noise = torch.randn((rows, columns), generator=generator)
    ranks = torch.randn((rows, 4), generator=generator) @ torch.randn((4, columns), generator=generator)
    momentum = 0.2 * noise + 0.05 * ranks
    parts["exp_avg"] = (roots * momentum).reshape(size)
    scatter = 2 ** (0.5 * noise.roll(1))
    parts["exp_avg_sq"] = (roots * roots * scatter).reshape(size)
    parts["weight"] = parts["weight"] + (2e-3 * momentum).reshape(size)


def memory() -> tuple[int, int]:
    """What the process has and the most that it had since the last call, in bytes (Linux with glibc)."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
        refs.write("5")
    now, most = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, most


class Timing(NamedTuple):
    """One phase: seconds on the clock, and CPU seconds by stage."""

    seconds: float
    stages: Mapping[str, float]


def timed(function: Callable[[], Any]) -> tuple[Any, Timing]:
    """Run with the stages counted."""
    with Stages() as stages:
        start = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - start
    return result, Timing(seconds, stages.seconds)


class Row(NamedTuple):
    """What one number of threads gave."""

    phases: Mapping[str, Timing]
    sizes: tuple[int, ...]
    extra: float


def _write(
    state: TrainingState, number: int, before: EncodedState | None, threads: int
) -> tuple[EncodedState, bytes]:
    reference = before.reference if before is not None else None
    digest = before.checkpoint.state_digest if before is not None else None
    scheme = build("auto", AutoOptions(), SaveContext(state=state, step=number, reference=reference))
    encoded = encode_state(state, scheme, step=number, reference=reference, parent=digest, threads=threads)
    return encoded, write_container(encoded.checkpoint)


def _read(chain: Sequence[bytes], threads: int) -> None:
    decode_chain([*map(in_memory, chain)], threads=threads)


def run(states: list[TrainingState], threads: int) -> Row:
    """Write the chain, and read it."""
    encoded: EncodedState | None = None
    files: list[bytes] = []
    phases: dict[str, Timing] = {}
    extra = 0.0
    for number, state in enumerate(states):
        before, _ = memory()
        write = partial(_write, state, number, encoded, threads)
        (encoded, data), phases[f"encode {'base' if number == 0 else 'delta'}"] = timed(write)
        _, most = memory()
        planes = sum(row.nbytes for row in encoded.reference.values())
        extra = max(extra, (most - before - planes) / state.nbytes)
        files.append(data)
        assert not encoded.kept_exactly, encoded.kept_exactly
    for name, chain in (("decode base", files[:1]), ("decode chain", files)):
        runs = [timed(partial(_read, chain, threads))[1] for _ in range(2)]
        phases[name] = min(runs, key=lambda timing: timing.seconds)
    return Row(phases, tuple(map(len, files)), extra)


def machine(state: TrainingState) -> tuple[float, float, float]:
    """MB/s of memcpy, and of zstd at level 3 both ways, on one core."""
    sample = np.concatenate([tensor_to_bytes(tensor)[: 1 << 22] for tensor in state.tensors.values()])
    sample = sample[: 1 << 26]
    copies = []
    for _ in range(5):
        start = time.perf_counter()
        sample.copy()
        copies.append(time.perf_counter() - start)
    start = time.thread_time()
    packed = zstandard.ZstdCompressor(level=3).compress(sample.data)
    middle = time.thread_time()
    zstandard.ZstdDecompressor().decompress(packed)
    stop = time.thread_time()
    megabytes = sample.nbytes / 1e6
    return megabytes / min(copies), megabytes / (middle - start), megabytes / (stop - middle)


def report(
    row: Row, state: TrainingState, threads: int, zstd: tuple[float, float], least_share: float
) -> None:
    """Print what was measured, and the stages that take at least a share of a phase's CPU time."""
    megabytes = state.nbytes / 1e6
    ratios = " ".join(f"{state.nbytes / size:.1f}x" for size in row.sizes)
    print(f"\n{threads} thread(s): {ratios}, memory +{row.extra:.2f} of the state")
    for name, timing in row.phases.items():
        cpu = sum(timing.stages.values())
        files = _SAVES if name == "decode chain" else 1
        speed, per_core = files * megabytes / timing.seconds, files * megabytes / cpu
        against = zstd[name.startswith("decode")]
        print(
            f"  {name:13s} {speed:7.0f} MB/s {per_core:7.0f} per CPU second, {per_core / against:.2f} of zstd -3"
        )
        for stage, seconds in sorted(timing.stages.items(), key=lambda item: -item[1]):
            if seconds > least_share * cpu:
                print(f"      {stage:34s} {1000 * seconds / files / megabytes:7.3f} ms/MB")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument(
        "--least-share", type=float, default=0.004, help="of a phase; 1 leaves the stages out"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    warm = list(states_of(Shape(1, 64, 512)))
    states = list(states_of(Shape(args.layers, args.width, args.tokens)))
    copy, *zstd = machine(states[0])
    count = states[0].nbytes // 12
    print(
        f"{count / 1e6:.1f} M parameters, {states[0].nbytes / 1e6:.0f} MB; {os.cpu_count()} CPUs; "
        f"memcpy {copy:.0f} MB/s, zstd -3 {zstd[0]:.0f} and {zstd[1]:.0f} MB/s"
    )
    run(warm, 1)  # compiles
    for threads in args.threads:
        row = run(states, threads)
        report(row, states[0], threads, (zstd[0], zstd[1]), args.least_share)


if __name__ == "__main__":
    main()
