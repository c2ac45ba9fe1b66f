"""QD-Compressor (ICCD 2021, doi 10.1109/ICCD53106.2021.00088): uniform quantization by layer, differences of levels.

Every layer has its own bit width, chosen by the entropy of its weights, and its own range (local-sensitive
quantization); weights are quantized before the difference to the neighbouring snapshot is taken, cyclically, so that a
difference of levels needs no more bits than a level; the differences are Huffman-coded. Weights only.

Implemented from the paper's abstract and from descriptions of it. The rule for the width is our choice: the entropy in
bits of a histogram of 2^max_bits equal bins over the layer's range, rounded up. The paper's error feedback adds the
error of one snapshot to the training that follows; a checkpoint that may never be restored cannot do that, and is
quantized without.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from baselines.scheme import WeightScheme, check_choice
from shrinkpoint.arrays import Float32s, UInt8s
from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, ReferenceState, Staged
from shrinkpoint.schemes.codec_io import (
    as_float32,
    check_sections,
    emit,
    integer,
    normal,
    number,
    plane_of,
    section,
)
from shrinkpoint.schemes.recipe import WeightOptions, check_number
from shrinkpoint.schemes.symbol_coders import decode_plane, encode_plane, uses_previous
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

_LEVELS = "levels"


@dataclass(frozen=True, kw_only=True)
class UniformOptions(WeightOptions):
    """Settings of QD-Compressor."""

    bits: int | None = None
    """One width for all layers; None chooses by entropy, as published."""
    max_bits: int = 8
    """Largest width that the entropy may choose, and the width of the histogram that it is computed from."""
    coder: Literal["cyclic", "rans"] = "cyclic"
    """Huffman codes of cyclic differences as published, or rANS given the previous level."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "max_bits", 1, 8, whole=True)
        if self.bits is not None:
            check_number(self, "bits", 1, 8, whole=True)
        check_choice(self, "coder", "cyclic", "rans")


def entropy_bits(values: Float32s, max_bits: int) -> int:
    """The width of a layer: the entropy of its histogram of 2^max_bits equal bins, in bits, rounded up; at least 1."""
    low, high = float(values.min()), float(values.max())
    if not high > low:
        return 1
    counts = np.histogram(values, bins=1 << max_bits, range=(low, high))[0]
    shares = counts[counts > 0] / values.size
    return min(max(1, math.ceil(float(-(shares * np.log2(shares)).sum()) - 1e-9)), max_bits)


@dataclass(frozen=True, kw_only=True)
class UniformCodec:
    """Codes one weight as levels of equal distance between its least and greatest value.

    Guarantees: every element is restored within half a step, up to rounding.
    """

    id: ClassVar[str] = "shrinkpoint-baselines:qd-compressor-weight"
    needs: ClassVar[tuple[str, ...]] = ()

    options: UniformOptions = field(default_factory=UniformOptions)

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses ranges that fp32 cannot divide."""
        values = normal(as_float32(tensor, spec))
        bits = self.options.bits or entropy_bits(values, self.options.max_bits)
        low = float(values.min())
        with np.errstate(over="ignore"):
            step = float(np.float32((float(values.max()) - low) / ((1 << bits) - 1)))
        if not step < np.finfo(np.float32).max or 0 < step < np.finfo(np.float32).tiny:
            raise CannotRepresentError(f"{spec.name}: fp32 cannot divide its range: stored exactly")
        levels = np.rint((values.astype(np.float64) - low) / step) if step else np.zeros(values.size)
        plane = np.clip(levels, 0, (1 << bits) - 1).astype(np.uint8)
        value = emit(_table(np.float32(low), np.float32(step), bits)[plane], spec)
        if not bool(torch.isfinite(value).all()):
            raise CannotRepresentError(f"{spec.name} reaches the end of {spec.dtype}'s range: stored exactly")
        previous = _previous(context.reference, spec, bits)
        payload = encode_plane(plane, 1 << bits, self.options.coder, previous)
        params: dict[str, JSON] = {"bits": bits, "low": low, "step": step}
        encoded = EncodedTensor(self.id, params, {_LEVELS: payload}, uses_previous(payload))
        return Staged(value, lambda: (encoded, {_LEVELS: plane}))

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        check_sections(encoded, spec, _LEVELS)
        bits = integer(encoded.params, spec, "bits", 1, 8)
        previous = _previous(context.reference, spec, bits) if encoded.uses_reference else None
        payload = section(encoded, spec, _LEVELS)
        return {_LEVELS: decode_plane(payload, spec.numel, 1 << bits, previous)}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        low, step = (number(encoded.params, spec, key) for key in ("low", "step"))
        table = _table(low, step, integer(encoded.params, spec, "bits", 1, 8))
        return emit(table[np.asarray(planes[_LEVELS], np.uint8)], spec)


def _table(low: np.float32, step: np.float32, bits: int) -> Float32s:
    """The value of each level: one fp32 product and one sum."""
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # refused when encoding; when decoding, digests detect it
        return normal(normal(np.arange(1 << bits, dtype=np.float32) * step) + low)


def _previous(reference: ReferenceState | None, spec: TensorSpec, bits: int) -> UInt8s | None:
    """The previous levels modulo this width's number of levels, which is enough for a cyclic difference."""
    plane = plane_of(reference, _LEVELS, spec)
    return np.asarray(plane, np.uint8) & np.uint8((1 << bits) - 1) if plane is not None else None


@dataclass(frozen=True, kw_only=True)
class Uniform(WeightScheme):
    name: ClassVar[str] = "uniform"
    codec: ClassVar[Any] = UniformCodec

    options: UniformOptions = field(default_factory=UniformOptions)
