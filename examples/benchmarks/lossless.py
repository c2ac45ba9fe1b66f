"""Exact coding of a real training state: ours against zstd, ZipNN, FastCheck's form and DCP's zstd extension.

    OMP_NUM_THREADS=1 python examples/benchmarks/lossless.py

Trains the GPT of examples/gpt.py with AdamW (minutes) and codes two of its states: the last one alone, and as a difference
to the one ``--every`` steps before. Every tensor of at least 4096 elements goes through every coder by itself, on one thread,
and comes back bit by bit. Where a coder has no differences of its own it gets the XOR of the two states' bytes.

The columns of groups and "all" are ratios: raw bytes over coded bytes. Speeds are raw bytes per second of CPU time, over all three
groups, with multiples of those of zstd -3 on the same bytes in the same run. ZipNN is measured where ``pip install zipnn`` has been run.
"""

import argparse
import importlib.util
import io
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch.distributed.checkpoint._extension import ZStandard

from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.training import TensorSpec

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (0, 1)]

from common import TextTraining
from demo_report import markdown_table
from fastcheck import differences, from_differences, from_index, indexed, ordered
from gpt import GPTConfig

Tensors = dict[str, dict[str, torch.Tensor]]
"""By role, then by parameter's name."""

GROUPS = {"exp_avg_sq": "second moments", "exp_avg": "first moments", "weight": "weights"}

_LEAST = 4096


def trained(config: GPTConfig, every: int) -> tuple[Tensors, Tensors]:
    """Train; the states ``every`` steps before the end of the training and at its end."""
    training, states = TextTraining(config), []
    for steps in (config.steps - every, every):
        for _ in range(steps):
            training.step()
        found: Tensors = {role: {} for role in GROUPS}
        for name, parameter in training.model.named_parameters():
            if parameter.numel() >= _LEAST:
                kept = {**training.optimizer.state[parameter], "weight": parameter.detach()}
                for role in GROUPS:
                    found[role][name] = kept[role].clone()
        states.append(found)
    return states[0], states[1]


@dataclass
class Result:
    """What one coder made of one group."""

    raw: int = 0
    size: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: "Result") -> "Result":
        return Result(
            self.raw + other.raw,
            self.size + other.size,
            self.encode_s + other.encode_s,
            self.decode_s + other.decode_s,
        )


class Coder(ABC):
    """One row of the tables."""

    name: str

    @abstractmethod
    def measure(self, now: Tensors, before: Tensors | None) -> dict[str, Result]:
        """Code every tensor of a state and decode it again."""


class Bytes(Coder):
    """A compressor of bytes."""

    @abstractmethod
    def compress(self, data: bytes) -> bytes: ...

    @abstractmethod
    def decompress(self, data: bytes) -> bytes: ...

    def measure(self, now: Tensors, before: Tensors | None) -> dict[str, Result]:
        found = {role: Result() for role in GROUPS}
        for role, name, tensor in _walk(now):
            raw = tensor_to_bytes(tensor)
            reference = None if before is None else tensor_to_bytes(before[role][name])
            started = time.thread_time()
            data = raw.tobytes() if reference is None else (raw ^ reference).tobytes()
            coded = self.compress(data)
            encoded = time.thread_time()
            back = np.frombuffer(self.decompress(coded), dtype=np.uint8)
            restored = back if reference is None else back ^ reference
            decoded = time.thread_time()
            assert np.array_equal(restored, raw)
            found[role] += Result(raw.size, len(coded), encoded - started, decoded - encoded)
        return found


class Zstd(Bytes):
    name = "zstd -3"

    def compress(self, data: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=3).compress(data)

    def decompress(self, data: bytes) -> bytes:
        return zstandard.ZstdDecompressor().decompress(data)


class Dcp(Bytes):
    name = "DCP, ZStandard extension"

    def compress(self, data: bytes) -> bytes:
        out = io.BytesIO()
        stream = ZStandard().transform_to(out)
        stream.write(data)
        stream.flush()
        return out.getvalue()

    def decompress(self, data: bytes) -> bytes:
        return bytes(ZStandard().transform_from(io.BytesIO(data)).read())


class ZipNN(Bytes):
    name = "ZipNN"

    def __init__(self) -> None:
        from zipnn import ZipNN as Compressor

        self._compressor: Any = Compressor(input_format="byte", bytearray_dtype="float32", threads=1)

    def compress(self, data: bytes) -> bytes:
        return bytes(self._compressor.compress(bytearray(data)))

    def decompress(self, data: bytes) -> bytes:
        return bytes(self._compressor.decompress(data))


class FastCheck(Coder):
    """What FastCheck publishes (`fastcheck.py`): weights as differences to those before, moments by an index of their prefixes."""

    name = "FastCheck's form"

    def measure(self, now: Tensors, before: Tensors | None) -> dict[str, Result]:
        found = {role: Result() for role in GROUPS}
        for role, name, tensor in _walk(now):
            raw = tensor_to_bytes(tensor)
            bits = raw.view(np.uint32)
            old = None
            if role == "weight" and before is not None:
                old = ordered(tensor_to_bytes(before[role][name]).view(np.uint32))
            started = time.thread_time()
            parts = indexed(bits) if old is None else differences(bits, old)
            encoded = time.thread_time()
            back = from_index(parts, len(bits)) if old is None else from_differences(parts, old)
            decoded = time.thread_time()
            assert np.array_equal(back, bits)
            size = sum(len(part) for part in parts) + 8 * len(parts)
            found[role] += Result(raw.size, size, encoded - started, decoded - encoded)
        return found


class Ours(Coder):
    """The codec of exact tensors."""

    name = "ours (`exact`)"

    def measure(self, now: Tensors, before: Tensors | None) -> dict[str, Result]:
        found, codec = {role: Result() for role in GROUPS}, ExactCodec()
        for role, name, tensor in _walk(now):
            spec = TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            context = Context()
            if before is not None:
                base, planes = codec.stage(before[role][name], spec, context).emit()
                context = Context(reference=ReferenceState(codec.id, base.params, planes))
            started = time.thread_time()
            stored, _ = codec.stage(tensor, spec, context).emit()
            encoded = time.thread_time()
            size = _size(stored)
            again = time.thread_time()
            planes = codec.decode(stored, spec, context)
            restored = codec.reconstruct(stored, planes, spec, context)
            decoded = time.thread_time()
            assert np.array_equal(tensor_to_bytes(restored), tensor_to_bytes(tensor))
            found[role] += Result(spec.nbytes, size, encoded - started, decoded - again)
        return found


def _size(encoded: EncodedTensor) -> int:
    """Sections, and what names them and their params in a header, roughly."""
    return encoded.nbytes + len(repr(dict(encoded.params))) + 20 * len(encoded.sections)


def _walk(state: Tensors) -> Iterator[tuple[str, str, torch.Tensor]]:
    for role in GROUPS:
        for name, tensor in state[role].items():
            yield role, name, tensor


def coders() -> list[Coder]:
    """All that are installed, zstd first."""
    found: list[Coder] = [Zstd(), Dcp()]
    if importlib.util.find_spec("zipnn") is not None:
        found.append(ZipNN())
    return [*found, FastCheck(), Ours()]


def table(title: str, found: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """Make the lines of a table."""
    zstd, rows = sum(found[Zstd.name].values(), Result()), []
    for name, groups in found.items():
        whole = sum(groups.values(), Result())
        row = [
            name,
            *(f"{r.raw / r.size:.3f}" for r in (*groups.values(), whole)),
            f"{whole.size / 1e6:.2f} MB",
        ]
        for ours, theirs in ((whole.encode_s, zstd.encode_s), (whole.decode_s, zstd.decode_s)):
            row += [f"{whole.raw / ours / 1e6:.0f}", f"{theirs / ours:.2f}x"]
        rows.append(row)
    headings = [
        title,
        *GROUPS.values(),
        "all",
        f"of {zstd.raw / 1e6:.1f} MB",
        "encode MB/s",
        "",
        "decode MB/s",
        "",
    ]
    return [*markdown_table(headings, rows), ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = GPTConfig()
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--every", type=int, default=50, help="steps between the two states")
    parser.add_argument("--width", type=int, default=defaults.width)
    parser.add_argument("--layers", type=int, default=defaults.layers)
    arguments = parser.parse_args()
    if not 0 < arguments.every < arguments.steps:
        parser.error("--every must be less than --steps")
    config = GPTConfig(width=arguments.width, layers=arguments.layers, steps=arguments.steps)
    before, now = trained(config, arguments.every)
    measured = coders()
    for title, reference in (("alone", None), (f"against {arguments.every} steps before", before)):
        # the first round compiles kernels
        found = {coder.name: [coder.measure(now, reference) for _ in range(2)][-1] for coder in measured}
        print(*table(title, found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
