"""ExCP's quantizer, codecs and settings: see `shrinkpoint.schemes.published.excp` for the scheme and its source.

The quantizer (section 3.4, and ``compress_pythia.py`` of its repository) gives values with a mask symbols: 0 = pruned, 1.. = ascending
clusters.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Bools, Float32s, UInt8s
from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError
from shrinkpoint.quantize.clustering import assign
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, ReferenceState, Staged
from shrinkpoint.schemes.closed_loop import VALUE, ClosedLoopCodec, Delta, add, residual_to
from shrinkpoint.schemes.codec_io import (
    WEIGHT_DTYPES,
    as_float32,
    check_sections,
    emit,
    finite,
    integer,
    matrix_shape,
    normal,
    plane_of,
    section,
)
from shrinkpoint.schemes.recipe import check_choice, check_number, is_weight
from shrinkpoint.schemes.symbol_coders import (
    PlaneCoder,
    SymbolCoder,
    decode_plane,
    encode_plane,
    uses_previous,
)
from shrinkpoint.state.training import Role, TensorSpec
from shrinkpoint.state.tree import JSON
from shrinkpoint.warn import refuses_unknown_options

Codebook = Literal["float32", "float16"]
Refill = Literal["none", "mean", "factored"]
"""The restored value of a pruned second moment: zero as published, its tensor's mean, or row mean x column mean /
mean."""

_ITERATIONS = 25  # faiss.Kmeans' defaults, which the repository uses
_POINTS_PER_CLUSTER = 256
_SEED = 1234

SYMBOLS = "symbols"
"""The plane of symbols: 0 = pruned, 1.. = ascending clusters."""


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """One quantized tensor before any entropy coding."""

    plane: UInt8s
    """0 = pruned, 1.. = cluster + 1; flat in C order."""
    codebook: Float32s
    """Strictly ascending, without the zero of symbol 0; at most 2^bits - 1."""

    def values(self) -> Float32s:
        """Return the values that the symbols represent."""
        table = np.concatenate([np.zeros(1, np.float32), self.codebook])
        values: Float32s = table[self.plane]
        return values


def cluster(values: Float32s, keep: Bools, bits: int, codebook: Codebook) -> Symbols:
    """Quantize the kept nonzero values to at most ``2^bits - 1`` clusters.

    Few enough distinct values are their own clusters, where the repository stores the tensor itself: the same values.

    Args:
        values: flat, finite.
        keep: flat; what is False becomes symbol 0.
        bits: 1..8.
        codebook: dtype that its values are rounded to.

    Raises:
        CannotRepresentError: a centroid is beyond fp16.
    """
    values = normal(values)
    mask = keep & (values != 0)
    kept, size = values[mask], (1 << bits) - 1
    centroids = _centroids(kept, size) if kept.size else np.empty(0, np.float32)
    if codebook == "float16":
        with np.errstate(over="ignore"):
            centroids = centroids.astype(np.float16).astype(np.float32)
        if not np.isfinite(centroids).all():
            raise CannotRepresentError("a cluster lies beyond the range of an fp16 codebook")
    # near the end of the range a mean may round to a subnormal, which decodes as zero, as in fp16
    centroids = np.unique(normal(centroids))
    plane = np.zeros(values.size, dtype=np.uint8)
    if kept.size:
        plane[mask] = assign(torch.from_numpy(kept), torch.from_numpy(centroids)).numpy() + 1
    return Symbols(plane=plane, codebook=centroids)


def _centroids(kept: Float32s, size: int) -> Float32s:
    distinct: Float32s = np.unique(kept[: 1 << 12])
    if distinct.size <= size and (distinct := np.unique(kept)).size <= size:
        return distinct
    return _kmeans(kept, size)


def _kmeans(kept: Float32s, size: int) -> Float32s:
    """Lloyd's algorithm as ``faiss.Kmeans(1, size)`` runs it: a sample of the points, random ones of them to start."""
    generator = np.random.default_rng(_SEED)
    points = kept
    if points.size > _POINTS_PER_CLUSTER * size:
        points = generator.choice(points, _POINTS_PER_CLUSTER * size, replace=False)
    points = np.sort(points).astype(np.float64)
    centres = np.unique(generator.choice(points, size, replace=False))
    sums = np.concatenate([[0.0], np.cumsum(points)])
    for _ in range(_ITERATIONS):
        inner = np.searchsorted(points, (centres[1:] + centres[:-1]) / 2)
        bounds = np.concatenate([[0], inner, [points.size]])
        members = np.diff(bounds)
        moved = np.diff(sums[bounds]) / np.maximum(members, 1)
        centres = np.unique(np.where(members > 0, moved, centres))
    final: Float32s = np.unique(centres.astype(np.float32))
    return final


def refill_factors(second: Float32s, shape: tuple[int, ...], refill: Refill) -> Float32s:
    """Return the stored values from which pruned second moments are refilled: none, the mean, or row and column means."""
    if refill == "none":
        return np.empty(0, np.float32)
    wide = second.astype(np.float64)
    if refill == "mean" or wide.max() <= 0:
        return normal(
            np.array([wide.mean()] * (1 if refill == "mean" else sum(matrix_shape(shape))), np.float32)
        )
    matrix = wide.reshape(matrix_shape(shape))
    rows = (
        matrix.mean(axis=1) / matrix.mean()
    )  # divided here, so that the decoder's one product cannot underflow
    return normal(np.concatenate([rows, matrix.mean(axis=0)]).astype(np.float32))


def refill_values(factors: Float32s, shape: tuple[int, ...]) -> Float32s:
    """Return the refill of every element, flat, from the result of `refill_factors`: stored numbers or one product of two."""
    rows, columns = matrix_shape(shape)
    if factors.size == 1:
        same: Float32s = np.full(rows * columns, factors[0], np.float32)
        return same
    with np.errstate(over="ignore", invalid="ignore"):
        return normal(np.multiply.outer(factors[:rows], factors[rows:]).reshape(-1))


@dataclass(frozen=True, kw_only=True)
class ExcpSettings(ABC):
    """Settings of ExCP's quantization; the defaults are the repository's, except for the codebook's dtype."""

    alpha: float = 5e-5
    """Weights' threshold: min(clamp, alpha / sqrt(mean second moment)) times the median residual (equation 4). Not
    dimensionless: it depends on the gradients' scale, and so on loss scaling and clipping."""
    clamp: float = 2.5
    """Largest threshold, in medians."""
    beta: float = 2.0
    """First moments up to beta times their mean magnitude are pruned (equation 5)."""
    bits: int = 4
    """2^bits - 1 clusters and zero, for each of the three tensors."""
    codebook: Codebook = "float32"
    """``float16`` as published restores second moments below 3e-8 as zero."""
    refill: Refill = "none"
    """The restored value of a pruned second moment: zero as published, its tensor's ``mean``, or ``factored`` by row
    and column."""
    base_moments: Literal["exact", "quantized"] = "exact"
    """In a base: everything in full as published, or the moments pruned by their own threshold and clustered."""
    min_elements: int = 64
    """Parameters with fewer elements are stored exactly: their codebooks would be as large."""
    matrices_only: bool = False
    """Store biases, norms and other one-dimensional parameters exactly, which the repository codes like all others."""

    def __post_init__(self) -> None:
        check_number(self, "alpha", 0, 1e6)
        check_number(self, "clamp", 0.01, 1e6)
        check_number(self, "beta", 0, 1e6)
        check_number(self, "bits", 1, 8, whole=True)
        check_number(self, "min_elements", 1, 2**48, whole=True)
        check_choice(self, "codebook", Codebook)
        check_choice(self, "refill", Refill)
        if self.base_moments not in ("exact", "quantized"):
            raise ConfigError(f"base_moments must be 'exact' or 'quantized', not {self.base_moments!r}")

    def takes(self, spec: TensorSpec) -> bool:
        """Return whether the tensor is coded as a weight."""
        if self.matrices_only:
            return is_weight(spec, self.min_elements)
        of_a_kind = spec.tag.role is Role.WEIGHT and spec.dtype in WEIGHT_DTYPES
        return of_a_kind and spec.numel >= self.min_elements

    @abstractmethod
    def plane_coder(self) -> PlaneCoder:
        """Return the entropy coder of the symbols: see `shrinkpoint.schemes.symbol_coders.encode_plane`."""


@refuses_unknown_options
@dataclass(frozen=True, kw_only=True)
class ExcpOptions(ExcpSettings):
    """Settings of ExCP.

    Examples:
        >>> from shrinkpoint.schemes.catalogue import ExcpOptions
        >>> config = shrinkpoint.SaverConfig(scheme=ExcpOptions(alpha=1e-4, coder="rans"))
    """

    coder: SymbolCoder = "lzma"
    """The paper packs two labels per byte and compresses files with 7-Zip; ``rans`` uses the previous
    labels too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "coder", SymbolCoder)

    def plane_coder(self) -> PlaneCoder:
        """See `ExcpSettings.plane_coder`."""
        return self.coder


@dataclass(frozen=True, kw_only=True)
class ExcpWeightCodec(ClosedLoopCodec):
    """Codes the pruned and clustered residual of one weight.

    Guarantees: an element whose residual is at most `threshold` keeps its previous reconstruction, any other changes by
        the
    nearest cluster.
    """

    id: ClassVar[str] = "excp-weight"

    options: ExcpSettings = field(default_factory=ExcpOptions)
    threshold: float = 0.0

    def encode_delta(self, target: Float32s, previous: Float32s, spec: TensorSpec, context: Context) -> Delta:
        """See `ClosedLoopCodec.encode_delta`; refuses differences beyond fp32."""
        residual = residual_to(target, previous, spec)
        keep = np.abs(residual) > np.float32(self.threshold)
        symbols = cluster(residual, keep, self.options.bits, self.options.codebook)
        params, sections = _store(symbols, spec, self.options, context)
        value = add(previous, symbols.values())
        return Delta(params=params, sections=sections, value=value, planes={SYMBOLS: symbols.plane})

    def decode_delta(
        self, encoded: EncodedTensor, previous: Float32s, spec: TensorSpec, context: Context
    ) -> dict[str, npt.NDArray[np.generic]]:
        """See `ClosedLoopCodec.decode_delta`."""
        check_sections(encoded, spec, "codebook", "symbols")
        symbols = Symbols(plane=_load(encoded, spec, context), codebook=_codebook(encoded, spec))
        return {VALUE: add(previous, _values(symbols, spec)), SYMBOLS: symbols.plane}


@dataclass(frozen=True, kw_only=True)
class ExcpMomentCodec:
    """Codes one moment, pruned by a mask and clustered, without reference to earlier values.

    Guarantees: an element of the mask is restored as its nearest cluster, any other as zero or, if it is a second moment
    and the options say so, as a mean.
    """

    id: ClassVar[str] = "excp-moment"
    needs: ClassVar[tuple[str, ...]] = ()

    options: ExcpSettings = field(default_factory=ExcpOptions)
    keep: Bools | None = None
    """Which elements are not pruned, flat; None for all."""

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses NaN and infinity."""
        values = as_float32(tensor, spec)
        keep = self.keep if self.keep is not None else np.ones(values.size, dtype=np.bool_)
        symbols = cluster(values, keep, self.options.bits, self.options.codebook)
        second = spec.tag.role is Role.EXP_AVG_SQ
        factors = refill_factors(values, spec.shape, self.options.refill if second else "none")
        params, sections = _store(symbols, spec, self.options, context)
        sections["refill"] = factors.astype("<f4").tobytes()
        value = self._restore(symbols, factors, spec)
        if not bool(torch.isfinite(value).all()):
            raise CannotRepresentError(f"{spec.name} reaches the end of {spec.dtype}'s range: stored exactly")
        encoded = EncodedTensor(self.id, params, sections, uses_previous(sections["symbols"]))
        return Staged(value, lambda: (encoded, {SYMBOLS: symbols.plane}))

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        check_sections(encoded, spec, "codebook", "symbols", "refill")
        return {SYMBOLS: _load(encoded, spec, context)}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        symbols = Symbols(plane=np.asarray(planes[SYMBOLS], np.uint8), codebook=_codebook(encoded, spec))
        data = section(encoded, spec, "refill")
        if len(data) not in (0, 4, 4 * sum(matrix_shape(spec.shape))):
            raise FormatError(f"{spec.name}: the refill of its pruned elements has {len(data)} bytes")
        factors = normal(np.frombuffer(data, dtype="<f4").astype(np.float32))
        if not finite(factors):
            raise FormatError(f"{spec.name}: the refill of its pruned elements contains NaN or infinity")
        return self._restore(symbols, factors, spec)

    @staticmethod
    def _restore(symbols: Symbols, factors: Float32s, spec: TensorSpec) -> torch.Tensor:
        values = _values(symbols, spec)
        if factors.size:
            values = np.where(symbols.plane == 0, refill_values(factors, spec.shape), values)
        return emit(values, spec)


def _store(
    symbols: Symbols, spec: TensorSpec, options: ExcpSettings, context: Context
) -> tuple[dict[str, JSON], dict[str, bytes]]:
    previous = _previous_symbols(context.reference, spec, options.bits)
    coder = options.plane_coder()
    payload = encode_plane(symbols.plane, 1 << options.bits, coder, previous, columns=_columns(spec))
    sections = {"codebook": symbols.codebook.astype("<f4").tobytes(), "symbols": payload}
    return {"bits": options.bits}, sections


def _load(encoded: EncodedTensor, spec: TensorSpec, context: Context) -> UInt8s:
    bits = integer(encoded.params, spec, "bits", 1, 8)
    previous = _previous_symbols(context.reference, spec, bits) if encoded.uses_reference else None
    payload = section(encoded, spec, "symbols")
    return decode_plane(payload, spec.numel, 1 << bits, previous, columns=_columns(spec))


def _columns(spec: TensorSpec) -> int:
    return max(matrix_shape(spec.shape)[1], 1)


def _previous_symbols(reference: ReferenceState | None, spec: TensorSpec, bits: int) -> UInt8s | None:
    plane = plane_of(reference, SYMBOLS, spec)
    if reference is None or plane is None or reference.params.get("bits") != bits:
        return None
    return np.asarray(plane, np.uint8)


def _codebook(encoded: EncodedTensor, spec: TensorSpec) -> Float32s:
    data = section(encoded, spec, "codebook")
    if len(data) % 4 or len(data) > 4 * 255:
        raise FormatError(f"{spec.name}: a codebook of {len(data)} bytes is none")
    codebook = normal(np.frombuffer(data, dtype="<f4").astype(np.float32))
    if not np.isfinite(codebook).all():
        raise FormatError(f"{spec.name}: its codebook contains NaN or infinity")
    return codebook


def _values(symbols: Symbols, spec: TensorSpec) -> Float32s:
    if symbols.plane.size != spec.numel or (
        symbols.plane.size and symbols.plane.max() > symbols.codebook.size
    ):
        raise FormatError(f"{spec.name}: a symbol lies outside its codebook")
    return symbols.values()
