"""Delta-DNN (ICPP 2020, doi 10.1145/3404397.3404408): the difference to the neighbouring snapshot, error-bounded.

``M = floor((A - B) / (2 log(1 + eps)) + 0.5)`` for the new weights A and the neighbouring ones B as they
are restored, so that errors are at most ``log(1 + eps)``; the integers go through LZMA, the best of the
lossless coders that the paper compares. One absolute bound applies to all layers, which QD-Compressor criticizes;
`DeltaDnnOptions.relative` takes it in units of each layer's root mean square. Weights only, the first snapshot in full.

Implemented from the paper's abstract and from descriptions of it; details that these leave open are our choice.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from baselines.scheme import WeightScheme, check_choice
from shrinkpoint.arrays import Float32s, Int32s
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor
from shrinkpoint.schemes.closed_loop import VALUE, ClosedLoopCodec, Delta, add
from shrinkpoint.schemes.codec_io import check_sections, integer, normal, number, section
from shrinkpoint.schemes.recipe import WeightOptions, check_number
from shrinkpoint.schemes.symbol_coders import deflate, inflate
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

_LIMIT = 1 << 24  # steps on each side, below which fp32 represents every integer


@dataclass(frozen=True, kw_only=True)
class DeltaDnnOptions(WeightOptions):
    """Settings of Delta-DNN."""

    error_bound: float = 1e-3
    """eps: the error is at most ``log(1 + eps)``."""
    relative: bool = False
    """Whether that is in units of the layer's root mean square."""
    coder: Literal["lzma", "numbers"] = "lzma"
    """LZMA as published, or what codes exact tensors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "error_bound", 1e-12, 1e3)
        check_choice(self, "relative", True, False)
        check_choice(self, "coder", "lzma", "numbers")


@dataclass(frozen=True, kw_only=True)
class DeltaDnnCodec(ClosedLoopCodec):
    """Codes one weight's difference in steps of twice the error bound.

    Guarantees: every element is restored within the bound, up to rounding.
    """

    id: ClassVar[str] = "shrinkpoint-baselines:delta-dnn-weight"

    options: DeltaDnnOptions = field(default_factory=DeltaDnnOptions)

    def encode_delta(self, target: Float32s, previous: Float32s, spec: TensorSpec, context: Context) -> Delta:
        """See `ClosedLoopCodec.encode_delta`; refuses differences of more than 2^24 steps."""
        unit = 1.0
        if self.options.relative:
            unit = float(np.sqrt(np.mean(np.square(target, dtype=np.float64)))) or 1.0
        step = np.float32(2 * math.log1p(self.options.error_bound) * unit)
        if not np.finfo(np.float32).tiny <= step <= np.finfo(np.float32).max:
            raise CannotRepresentError(f"{spec.name}: fp32 cannot represent the error bound: stored exactly")
        steps = np.floor((target.astype(np.float64) - previous) / float(step) + 0.5)
        if np.abs(steps).max() > _LIMIT:
            raise CannotRepresentError(f"{spec.name} changed by more than 2^24 steps: stored exactly")
        whole = steps.astype(np.int32)
        size, zigzag = _narrow(whole)
        payload = (
            b"\1" + deflate(zigzag.tobytes())
            if self.options.coder == "lzma"
            else b"\0" + encode_numbers(zigzag)
        )
        value = add(previous, normal(whole.astype(np.float32) * step))
        params: dict[str, JSON] = {"step": float(step), "size": size}
        return Delta(params=params, sections={"steps": payload}, value=value, planes={})

    def decode_delta(
        self, encoded: EncodedTensor, previous: Float32s, spec: TensorSpec, context: Context
    ) -> dict[str, npt.NDArray[np.generic]]:
        check_sections(encoded, spec, "steps")
        size = integer(encoded.params, spec, "size", 1, 4)
        payload = section(encoded, spec, "steps")
        if size == 3 or payload[:1] not in (b"\0", b"\1"):
            raise FormatError(f"{spec.name}: its steps are coded in no known way")
        if payload[0]:
            found = np.frombuffer(inflate(payload[1:], size * spec.numel), f"<u{size}")
        else:
            found = decode_numbers(payload[1:], spec.numel, f"u{size}")
        zigzag = found.astype(np.uint32)
        whole = (zigzag >> 1).astype(np.int32) ^ -(zigzag & 1).astype(np.int32)
        with np.errstate(over="ignore"):
            moved = normal(whole.astype(np.float32) * number(encoded.params, spec, "step"))
        return {VALUE: add(previous, moved)}


def _narrow(steps: Int32s) -> tuple[int, npt.NDArray[Any]]:
    """Zigzagged integers in as few bytes as the largest needs, and their size."""
    zigzag = ((steps << 1) ^ (steps >> 31)).view(np.uint32)
    size = next(size for size in (1, 2, 4) if int(zigzag.max()) < 1 << 8 * size)
    return size, zigzag.astype(f"<u{size}")


@dataclass(frozen=True, kw_only=True)
class DeltaDnn(WeightScheme):
    name: ClassVar[str] = "delta-dnn"
    codec: ClassVar[Any] = DeltaDnnCodec

    options: DeltaDnnOptions = field(default_factory=DeltaDnnOptions)
