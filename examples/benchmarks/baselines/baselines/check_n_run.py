"""Check-N-Run (NSDI 2022): adaptive asymmetric uniform quantization of rows, and incremental checkpoints of changed
rows.

Asymmetric uniform quantization of every embedding row between its own least and greatest value, these two moved inwards
step by step, each time the one that leaves the smaller squared error ("adaptive asymmetric"); checkpoints hold the rows
that changed since the last one (incremental); plain indices. Weights only. Here it applies to every matrix, not
only to embeddings, a row being an index of the first dimension; and changes are found in the restored values, without
tracking which rows training touched.

Implemented from the paper's abstract and from descriptions of it; details that these leave open are our choice.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from baselines.scheme import WeightScheme, check_choice
from shrinkpoint.arrays import Float32s, Float64s, UInt8s
from shrinkpoint.entropy.static.rans import decode_symbols, encode_symbols
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, Staged
from shrinkpoint.schemes.closed_loop import VALUE, previous_value
from shrinkpoint.schemes.codec_io import as_float32, check_sections, emit, floats, integer, normal, section
from shrinkpoint.schemes.recipe import WeightOptions, check_number
from shrinkpoint.schemes.symbol_coders import decode_plane, encode_plane
from shrinkpoint.state.training import TensorSpec

_BINS = {1: 25, 2: 25, 3: 25, 4: 45}  # steps of the range; wider levels gain nothing by a search
_CHUNK = 1 << 16  # elements searched at once, so that the temporaries stay in cache


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions(WeightOptions):
    """Settings of Check-N-Run's quantization."""

    bits: int = 4
    """Width of an index. The paper takes 2 for one restore in a run, 3 for up to three, 4 below 20, and 8 from there on."""
    num_bins: int | None = None
    """Steps that a row's range is divided into in the search; None takes 25 up to 3 bits, 45 for 4, no search beyond."""
    ratio: float = 1.0
    """Share of the steps that the search tries."""
    coder: Literal["packed", "rans"] = "packed"
    """Plain indices as published, or rANS."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "bits", 1, 8, whole=True)
        check_number(self, "ratio", 0, 1)
        if self.num_bins is not None:
            check_number(self, "num_bins", 1, 10_000, whole=True)
        check_choice(self, "coder", "packed", "rans")

    @property
    def iterations(self) -> int:
        """Steps of the search."""
        return int(self.bins * self.ratio)

    @property
    def bins(self) -> int:
        """Steps that a row's range is divided into; 0 for no search."""
        return self.num_bins if self.num_bins is not None else _BINS.get(self.bits, 0)


def search_bounds(rows: Float32s, bits: int, bins: int, iterations: int) -> tuple[Float32s, Float32s]:
    """The bounds between which each row is quantized with the least squared error, greedily, in so many steps of a bin inwards."""
    low, high = rows.min(axis=1), rows.max(axis=1)
    step = (high - low) / np.float32(max(bins, 1))
    best_low, best_high = low.copy(), high.copy()
    best = _error(rows, low, high, bits) if iterations else np.zeros(0)
    for _ in range(iterations):
        from_below, from_above = _error(rows, low + step, high, bits), _error(rows, low, high - step, bits)
        below = from_below < from_above
        low, high = np.where(below, low + step, low), np.where(below, high, high - step)
        error = np.minimum(from_below, from_above)
        better = (error < best) & (low <= high)
        best = np.where(better, error, best)
        best_low, best_high = np.where(better, low, best_low), np.where(better, high, best_high)
    return best_low, best_high


def _error(rows: Float32s, low: Float32s, high: Float32s, bits: int) -> Float64s:
    scale = _scale(low, high, bits)
    levels = _levels(rows, low, scale, bits)
    error = levels * scale[:, None] + low[:, None] - rows
    squares: Float64s = np.einsum("ij,ij->i", error, error, dtype=np.float64)
    return squares


def _scale(low: Float32s, high: Float32s, bits: int) -> Float32s:
    return normal(np.maximum(high - low, 0) / np.float32((1 << bits) - 1))


def _levels(rows: Float32s, low: Float32s, scale: Float32s, bits: int) -> Float32s:
    unit = np.where(scale > 0, scale, np.float32(1))[:, None]
    levels: Float32s = np.clip(np.rint((rows - low[:, None]) / unit), 0, (1 << bits) - 1)
    return levels


@dataclass(frozen=True, kw_only=True)
class CheckNRunWeightCodec:
    """Codes one weight by rows; a row whose restored values are unchanged is not stored again.

    Planes: ``value``, the reconstruction in fp32. Guarantees: an element between its row's bounds is restored within half
    a level, up to rounding, others as the bound.
    """

    id: ClassVar[str] = "shrinkpoint-baselines:check-n-run-weight"
    needs: ClassVar[tuple[str, ...]] = ()

    options: AdaptiveOptions = field(default_factory=AdaptiveOptions)

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses ranges beyond fp32."""
        rows = as_float32(tensor, spec).reshape(_height(spec), -1)
        with np.errstate(over="ignore", invalid="ignore"):  # seen in the value
            levels, low, scale = self._quantize(rows)
            value = _restore(levels, low, scale)
        restored = emit(value.reshape(-1), spec)
        if not bool(torch.isfinite(restored).all()):
            raise CannotRepresentError(f"{spec.name}: {spec.dtype} cannot hold its range: stored exactly")
        previous = previous_value(context.reference, spec)
        changed = np.ones(rows.shape[0], dtype=np.bool_)
        if previous is not None:
            reference = previous.reshape(rows.shape)
            changed = np.any(value.view(np.uint32) != reference.view(np.uint32), axis=1)
        plane = levels[changed].reshape(-1)
        sections = {
            "rows": encode_symbols(changed.astype(np.uint8), None, 2, 1),
            "bounds": np.concatenate([low[changed], scale[changed]]).astype("<f4").tobytes(),
            "levels": encode_plane(plane, 1 << self.options.bits, self.options.coder, None),
        }
        encoded = EncodedTensor(self.id, {"bits": self.options.bits}, sections, previous is not None)
        return Staged(restored, lambda: (encoded, {VALUE: value.reshape(-1)}))

    def _quantize(self, rows: Float32s) -> tuple[UInt8s, Float32s, Float32s]:
        bits = self.options.bits
        levels = np.empty(rows.shape, dtype=np.uint8)
        lows, scales = np.empty(rows.shape[0], np.float32), np.empty(rows.shape[0], np.float32)
        height = max(1, _CHUNK // rows.shape[1])
        for start in range(0, rows.shape[0], height):
            part = slice(start, start + height)
            low, high = search_bounds(rows[part], bits, self.options.bins, self.options.iterations)
            lows[part], scales[part] = normal(low), _scale(low, high, bits)
            levels[part] = _levels(rows[part], lows[part], scales[part], bits)
        return levels, lows, scales

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        check_sections(encoded, spec, "rows", "bounds", "levels")
        bits = integer(encoded.params, spec, "bits", 1, 8)
        if spec.numel == 0:
            raise FormatError(f"{spec.name}: codec {self.id!r} holds no empty tensors")
        height = _height(spec)
        width = spec.numel // height
        changed = decode_symbols(section(encoded, spec, "rows"), None, height, 2, 1) > 0
        count = int(np.count_nonzero(changed))
        low, scale = np.split(floats(encoded, spec, "bounds", 2 * count), 2)
        payload = section(encoded, spec, "levels")
        levels = decode_plane(payload, count * width, 1 << bits, None)
        fresh = _restore(levels.reshape(count, width), low, scale)
        if count == height:
            return {VALUE: fresh.reshape(-1)}
        previous = previous_value(context.reference, spec) if encoded.uses_reference else None
        if previous is None:
            raise FormatError(f"{spec.name}: some rows are missing, and there is no predecessor")
        value = previous.reshape(height, width).copy()
        value[changed] = fresh
        return {VALUE: value.reshape(-1)}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        return emit(np.asarray(planes[VALUE], np.float32), spec)


def _height(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def _restore(levels: npt.NDArray[Any], low: Float32s, scale: Float32s) -> Float32s:
    """One fp32 product and one sum."""
    with np.errstate(over="ignore", invalid="ignore"):
        return normal(normal(levels.astype(np.float32) * scale[:, None]) + low[:, None])


@dataclass(frozen=True, kw_only=True)
class Adaptive(WeightScheme):
    name: ClassVar[str] = "adaptive"
    codec: ClassVar[Any] = CheckNRunWeightCodec

    options: AdaptiveOptions = field(default_factory=AdaptiveOptions)
