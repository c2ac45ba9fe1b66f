"""GOBO (MICRO 2020, arXiv 2005.03842): a codebook of few centroids for Gaussian weights, outliers in full precision.

Per layer: a normal distribution is fitted, weights whose log density under it is below a threshold are outliers and kept
as they are; the others are put in 2^bits bins of equal population, and bins are reassigned by nearest centroid until the
sum of absolute distances is least (where k-means would go on); one index of `bits` bits each. Weights only; no difference to earlier checkpoints.

Implemented from the paper's abstract and from descriptions of it; details that these leave open are our choice.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from baselines.scheme import WeightScheme, check_choice
from shrinkpoint.arrays import Bools, Float32s, UInt8s, widened
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.quantize.clustering import assign
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, ReferenceState, Staged
from shrinkpoint.schemes.codec_io import (
    WEIGHT_DTYPES,
    as_float32,
    check_sections,
    emit,
    floats,
    integer,
    normal,
    plane_of,
    section,
)
from shrinkpoint.schemes.recipe import WeightOptions, check_number
from shrinkpoint.schemes.symbol_coders import decode_plane, encode_plane, uses_previous
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TensorSpec

_LEVELS = "levels"
_OUTLIER = 0  # level ids: 0 = kept in full, 1.. = ascending centroids
_MAX_ITERATIONS = 100


@dataclass(frozen=True, kw_only=True)
class GoboOptions(WeightOptions):
    """Settings of GOBO."""

    bits: int = 3
    """2^bits centroids."""
    threshold: float = -4.0
    """Log density below which a weight is an outlier."""
    standardized: bool = False
    """Take the density of the weight in units of the layer's deviation. As published it is of the weight itself, so that
    a layer's outliers depend on the unit of its weights."""
    coder: Literal["packed", "rans"] = "packed"
    """Plain indices as published (with outliers as one more index), or rANS given the previous ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "bits", 1, 7, whole=True)
        check_number(self, "threshold", -1000, 0)
        check_choice(self, "standardized", True, False)
        check_choice(self, "coder", "packed", "rans")


def outliers(values: Float32s, threshold: float, standardized: bool) -> Bools:
    """Which values are outliers of their own normal distribution; none if they are all equal."""
    wide = values.astype(np.float64)
    mean, deviation = float(wide.mean()), float(wide.std())
    if deviation == 0:
        return np.zeros(values.size, dtype=np.bool_)
    unit = 1.0 if standardized else deviation
    log_density = -((wide - mean) ** 2) / (2 * deviation**2) - math.log(unit * math.sqrt(2 * math.pi))
    return np.asarray(log_density < threshold)


def l1_centroids(values: Float32s, count: int) -> Float32s:
    """The centroids of the values that are not outliers: ascending, at most `count`.

    Bins of equal population give the first ones; then each value goes to the nearest, and a bin's mean is its centroid,
    as long as the sum of absolute distances falls.
    """
    ordered = np.sort(values).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    bounds = np.unique(np.linspace(0, ordered.size, count + 1).astype(np.int64))
    centroids, best = np.unique(np.diff(sums[bounds]) / np.diff(bounds)), np.inf
    for _ in range(_MAX_ITERATIONS):
        inner = np.searchsorted(ordered, (centroids[1:] + centroids[:-1]) / 2)
        bounds = np.concatenate([[0], inner, [ordered.size]])
        distance = float(np.abs(ordered - np.repeat(centroids, np.diff(bounds))).sum())
        if not distance < best:
            break
        best, kept = distance, centroids
        bounds = np.unique(bounds)
        centroids = np.unique(np.diff(sums[bounds]) / np.diff(bounds))
    return np.unique(normal(kept.astype(np.float32)))


@dataclass(frozen=True, kw_only=True)
class GoboCodec:
    """Codes one weight as indices of centroids, with its outliers kept.

    Guarantees: outliers are exact, any other element is restored as the nearest of at most 2^bits centroids.
    """

    id: ClassVar[str] = "shrinkpoint-baselines:gobo-weight"
    needs: ClassVar[tuple[str, ...]] = ()

    options: GoboOptions = field(default_factory=GoboOptions)

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        values = as_float32(tensor, spec)
        kept = outliers(values, self.options.threshold, self.options.standardized)
        if kept.all():
            raise CannotRepresentError(f"{spec.name}: all its values are outliers: stored exactly")
        group = normal(values[~kept])
        centroids = l1_centroids(group, 1 << self.options.bits)
        levels = np.full(values.size, _OUTLIER, dtype=np.uint8)
        levels[~kept] = assign(torch.from_numpy(group), torch.from_numpy(centroids)).numpy() + 1
        raw = tensor_to_bytes(tensor.detach().reshape(-1)[torch.from_numpy(kept)])
        value = _restore(levels, centroids, values[kept], spec)
        if not bool(torch.isfinite(value).all()):
            raise CannotRepresentError(f"{spec.name} reaches the end of {spec.dtype}'s range: stored exactly")
        alphabet = centroids.size + 1
        previous = _previous(context.reference, spec, alphabet)
        payload = encode_plane(levels, alphabet, self.options.coder, previous)
        sections = {
            "centroids": centroids.astype("<f4").tobytes(),
            "outliers": encode_numbers(raw.view(f"u{spec.dtype.itemsize}")),
            _LEVELS: payload,
        }
        encoded = EncodedTensor(self.id, {"levels": alphabet}, sections, uses_previous(payload))
        return Staged(value, lambda: (encoded, {_LEVELS: levels}))

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        check_sections(encoded, spec, "centroids", "outliers", _LEVELS)
        alphabet = integer(encoded.params, spec, "levels", 2, 129)
        previous = _previous(context.reference, spec, alphabet) if encoded.uses_reference else None
        payload = section(encoded, spec, _LEVELS)
        return {_LEVELS: decode_plane(payload, spec.numel, alphabet, previous)}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        if spec.dtype not in WEIGHT_DTYPES:
            raise FormatError(f"{spec.name}: codec {self.id!r} cannot hold {spec.dtype}")
        centroids = floats(encoded, spec, "centroids", integer(encoded.params, spec, "levels", 2, 129) - 1)
        levels = np.asarray(planes[_LEVELS], np.uint8)
        count = int(np.count_nonzero(levels == _OUTLIER))
        bits = decode_numbers(section(encoded, spec, "outliers"), count, f"u{spec.dtype.itemsize}")
        raw = widened(tensor_from_bytes(bits.view(np.uint8), spec.dtype, (count,)))
        return _restore(levels, centroids, raw, spec)


def _restore(levels: UInt8s, centroids: Float32s, kept: Float32s, spec: TensorSpec) -> torch.Tensor:
    if levels.size and levels.max() > centroids.size:
        raise FormatError(f"{spec.name}: a level lies outside its centroids")
    values = np.concatenate([np.zeros(1, np.float32), centroids])[levels]
    values[levels == _OUTLIER] = kept
    return emit(values, spec)


def _previous(reference: ReferenceState | None, spec: TensorSpec, alphabet: int) -> UInt8s | None:
    plane: npt.NDArray[Any] | None = plane_of(reference, _LEVELS, spec)
    if reference is None or plane is None or reference.params.get("levels") != alphabet:
        return None
    return np.asarray(plane, np.uint8)


@dataclass(frozen=True, kw_only=True)
class Gobo(WeightScheme):
    name: ClassVar[str] = "gobo"
    codec: ClassVar[Any] = GoboCodec

    options: GoboOptions = field(default_factory=GoboOptions)
