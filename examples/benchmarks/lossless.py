"""Exact coding of a real training state: ours against zstd, ZipNN, FastCheck's form and DCP's zstd extension.

    OMP_NUM_THREADS=1 python examples/benchmarks/lossless.py

Trains the GPT of examples/gpt.py with AdamW (minutes) and codes two of its states: the last one alone, and as a difference
to the one ``--every`` steps before. Every tensor of at least 4096 elements goes through every coder by itself, on one thread,
and comes back bit by bit. Where a coder has no differences of its own it gets the XOR of the two states' bytes.

The columns of groups and "all" are ratios: raw bytes over coded bytes. Speeds are raw bytes per second of CPU time, over all three
groups, with multiples of those of zstd -3 on the same bytes in the same run. ZipNN is measured where ``pip install zipnn`` has been run.
"""

import importlib.util
import io
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
import zstandard
from common import TextTraining, parsed, show
from fastcheck import differences, from_differences, from_index, indexed, ordered
from gpt import GPTConfig
from torch.distributed.checkpoint._extension import ZStandard

from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.training import TensorSpec

Tensors = dict[str, dict[str, torch.Tensor]]
"""By role, then by parameter's name."""

GROUPS = {"exp_avg_sq": "second moments", "exp_avg": "first moments", "weight": "weights"}

_LEAST, _FIRST = 4096, "zstd -3"


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
        return Result(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


Coder = Callable[[str, str, torch.Tensor, Tensors | None], Result]
"""Codes one tensor, given its role and name, and the state before; checks that it comes back bit by bit."""


def coded(coder: Coder, now: Tensors, before: Tensors | None) -> dict[str, Result]:
    """Code every tensor of a state; the sums of its groups."""
    return {
        role: sum((coder(role, name, tensor, before) for name, tensor in now[role].items()), Result())
        for role in GROUPS
    }


def of_bytes(compress: Callable[[bytes], bytes], decompress: Callable[[bytes], bytes]) -> Coder:
    """A compressor of bytes."""

    def measure(role: str, name: str, tensor: torch.Tensor, before: Tensors | None) -> Result:
        raw = tensor_to_bytes(tensor)
        reference = None if before is None else tensor_to_bytes(before[role][name])
        started = time.thread_time()
        coded = compress(raw.tobytes() if reference is None else (raw ^ reference).tobytes())
        encoded = time.thread_time()
        back = np.frombuffer(decompress(coded), dtype=np.uint8)
        restored = back if reference is None else back ^ reference
        decoded = time.thread_time()
        assert np.array_equal(restored, raw)
        return Result(raw.size, len(coded), encoded - started, decoded - encoded)

    return measure


def _by_dcp(data: bytes) -> bytes:
    out = io.BytesIO()
    stream = ZStandard().transform_to(out)
    stream.write(data)
    stream.flush()
    return out.getvalue()


def fastcheck(role: str, name: str, tensor: torch.Tensor, before: Tensors | None) -> Result:
    """What FastCheck publishes (`fastcheck.py`): weights as differences to those before, moments by an index of their prefixes."""
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
    return Result(raw.size, size, encoded - started, decoded - encoded)


def ours(role: str, name: str, tensor: torch.Tensor, before: Tensors | None) -> Result:
    """The codec of exact tensors."""
    spec, codec = TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)), ExactCodec()
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
    return Result(spec.nbytes, size, encoded - started, decoded - again)


def _size(encoded: EncodedTensor) -> int:
    """Sections, and what names them and their params in a header, roughly."""
    return encoded.nbytes + len(repr(dict(encoded.params))) + 20 * len(encoded.sections)


def coders() -> Iterator[tuple[str, Coder]]:
    """All that are installed, zstd first."""
    zstd = zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress
    yield _FIRST, of_bytes(*zstd)
    yield (
        "DCP, ZStandard extension",
        of_bytes(_by_dcp, lambda data: bytes(ZStandard().transform_from(io.BytesIO(data)).read())),
    )
    if importlib.util.find_spec("zipnn") is not None:
        from zipnn import ZipNN

        zipnn: Any = ZipNN(input_format="byte", bytearray_dtype="float32", threads=1)
        compress = lambda data: bytes(zipnn.compress(bytearray(data)))  # noqa: E731
        yield "ZipNN", of_bytes(compress, lambda data: bytes(zipnn.decompress(data)))
    yield "FastCheck's form", fastcheck
    yield "ours (`exact`)", ours


def table(title: str, found: Mapping[str, Mapping[str, Result]]) -> None:
    """Print a table."""
    zstd, rows = sum(found[_FIRST].values(), Result()), []
    for name, groups in found.items():
        whole = sum(groups.values(), Result())
        ratios = (f"{r.raw / r.size:.3f}" for r in (*groups.values(), whole))
        row = [name, *ratios, f"{whole.size / 1e6:.2f} MB"]
        for mine, theirs in ((whole.encode_s, zstd.encode_s), (whole.decode_s, zstd.decode_s)):
            row += [f"{whole.raw / mine / 1e6:.0f}", f"{theirs / mine:.2f}x"]
        rows.append(row)
    size = f"of {zstd.raw / 1e6:.1f} MB"
    show([title, *GROUPS.values(), "all", size, "encode MB/s", "", "decode MB/s", ""], rows)
    print()


def main() -> None:
    defaults = GPTConfig()
    sizes = {"width": defaults.width, "layers": defaults.layers}
    options = parsed(__doc__, steps=defaults.steps, every=50, **sizes)
    config = GPTConfig(width=options.width, layers=options.layers, steps=options.steps)
    before, now = trained(config, options.every)
    for title, reference in (("alone", None), (f"against {options.every} steps before", before)):
        # the first round compiles kernels
        rounds = {name: [coded(coder, now, reference) for _ in range(2)] for name, coder in coders()}
        table(title, {name: found[-1] for name, found in rounds.items()})


if __name__ == "__main__":
    main()
