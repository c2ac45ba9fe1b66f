"""Moments at a fraction of a bit: a factored second moment, and first moments on dithered levels.

Of Adam's second moment a row and a column are kept, as in Adafactor (arXiv 1804.04235, section 3). What keeps Adam's
behaviour is that the product is right on average in the log domain: scaled to the matrix's mean instead, it is too
large where most elements are small, and steps after a restore are too short.

First moments are stored in steps of several root second moments, or, of optimizers that have none, of several root
means of their own. Nearly all levels are zero then, and the subtractive dither keeps every small component on average,
where rounding to nearest would set it to zero at every restore; for that, each checkpoint takes another seed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shrinkpoint.entropy.context import Effort, Side, decode_plane, encode_plane
from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Planes
from shrinkpoint.schemes.dither import EDGE_CLASSES, EDGE_PLACES, SEEDS, dither_edges
from shrinkpoint.schemes.factors import Factors, matrix_shape
from shrinkpoint.schemes.planes import F32, U8, check_sections, finite, integer, number, section
from shrinkpoint.schemes.recipe import check_choice
from shrinkpoint.state import Role, TensorSpec

__all__ = [
    "DitheredFirstMomentCodec",
    "DitheredMomentumCodec",
    "FactoredSecondMomentCodec",
    "check_dtype",
    "fp32_values",
    "known_roots",
    "measured_own",
    "measured_roots",
]

_REACH = 126  # levels to each side of zero
_STRANGE_STEPS, _STRANGE_ROOTS = 15, 15.5  # first moments of one gradient hardly exceed either
_STRANGERS = 1e-3  # share of elements beyond that shows the two not to be moments of one gradient


@dataclass(frozen=True, kw_only=True)
class FactoredSecondMomentCodec:
    """``v = row x column``, each a power of ``2 ** (1/4)``, scaled so that the mean of ``log2 v`` is right.

    Guarantees: a second moment that is not zero is never restored as zero.
    """

    id: ClassVar[str] = "factored"
    needs: ClassVar[tuple[str, ...]] = ()

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """See `TensorCodec.encode`; second moments that are negative, not fp32 or not finite are refused."""
        factors, value = self._factored(tensor, spec)
        encoded = EncodedTensor(self.id, {}, {"factors": factors.encode(context.threads)})
        return Coded(encoded, {}, value)

    def restored(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> torch.Tensor:
        """See `Quantizer.restored`."""
        return self._factored(tensor, spec)[1]

    def _factored(self, tensor: torch.Tensor, spec: TensorSpec) -> tuple[Factors, torch.Tensor]:
        values = fp32_values(tensor, spec)
        if values.min() < 0:
            raise CannotRepresentError(f"{spec.name} has negative second moments: stored exactly")
        factors = Factors.of_second_moment(values.reshape(matrix_shape(spec.shape)))
        product = factors.product()
        if not finite(product):
            raise CannotRepresentError(f"{spec.name} reaches the end of fp32's range: stored exactly")
        return factors, torch.from_numpy(product).reshape(spec.shape)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`; nothing of it helps to decode the next checkpoint."""
        return {}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        check_sections(encoded, spec, "factors")
        check_dtype(spec)
        product = Factors.read(encoded, spec, context.threads).product()
        return torch.from_numpy(product).reshape(spec.shape)


@dataclass(frozen=True, kw_only=True)
class _DitheredCodec(ABC):
    """Dithered levels of a tensor in a unit of each element's own, which both sides know."""

    id: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    step: float
    seed: int = 0
    """Seed of the dither: another one for every checkpoint that may be restored."""
    effort: Effort = "default"
    """How much time the coder of the levels spends."""

    def __post_init__(self) -> None:
        if not 0.001 <= self.step <= 64:
            raise ConfigError(f"step must be between 0.001 and 64 units, not {self.step}")
        if type(self.seed) is not int or not 0 <= self.seed < SEEDS:
            raise ConfigError(f"seed={self.seed!r} must be an integer from 0 to {SEEDS - 1}")
        check_choice(self, "effort", Effort)

    @abstractmethod
    def _measure(self, values: F32, spec: TensorSpec, context: Context) -> tuple[F32, dict[str, bytes]]:
        """Each element's unit, and what has to be stored for it; refuses what it does not suit."""

    @abstractmethod
    def _units(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> F32:
        """The units again, from what is stored.

        Raises:
            FormatError: it is malformed.
        """

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """See `TensorCodec.encode`; what has no unit, or is not fp32 or not finite, is refused."""
        plane, radius, units, sections = self._quantize(tensor, spec, context)
        payload = encode_plane(
            plane,
            2 * radius + 1,
            columns=matrix_shape(spec.shape)[1],
            sides=[_edges(self.seed, plane.size)],
            effort=self.effort,
            threads=context.threads,
        )
        params = {"step": float(np.float32(self.step)), "seed": self.seed, "radius": radius}
        encoded = EncodedTensor(self.id, params, {"levels": payload, **sections})
        return Coded(encoded, {"levels": plane}, self._value(plane, radius, units, spec))

    def restored(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> torch.Tensor:
        """See `Quantizer.restored`."""
        plane, radius, units, _ = self._quantize(tensor, spec, context)
        return self._value(plane, radius, units, spec)

    def _quantize(
        self, tensor: torch.Tensor, spec: TensorSpec, context: Context
    ) -> tuple[U8, int, F32, Mapping[str, bytes]]:
        from shrinkpoint.schemes import dither_kernels  # numba

        values = fp32_values(tensor, spec)
        units, sections = self._measure(values, spec, context)
        plane = np.empty(values.size, np.uint8)
        radius = int(dither_kernels.levels(values, units, np.float32(self.step), self.seed, _REACH, plane))
        plane -= np.uint8(_REACH - radius)
        return plane, radius, units, sections

    def _value(self, plane: U8, radius: int, units: F32, spec: TensorSpec) -> torch.Tensor:
        return _restore(plane, units, np.float32(self.step), self.seed, radius, spec)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        if spec.numel == 0:
            raise FormatError(f"{spec.name}: codec {self.id!r} cannot hold an empty tensor")
        seed = integer(encoded.params, spec, "seed", 0, SEEDS - 1)
        radius = integer(encoded.params, spec, "radius", 0, _REACH)
        plane = decode_plane(
            section(encoded, spec, "levels"),
            spec.numel,
            2 * radius + 1,
            columns=matrix_shape(spec.shape)[1],
            sides=[_edges(seed, spec.numel)],
            threads=context.threads,
        )
        return {"levels": plane}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        check_dtype(spec)
        step = number(encoded.params, spec, "step")
        if step <= 0:
            raise FormatError(f"{spec.name}: the step {step} is not positive")
        seed = integer(encoded.params, spec, "seed", 0, SEEDS - 1)
        radius = integer(encoded.params, spec, "radius", 0, _REACH)
        units = self._units(encoded, spec, context)
        return _restore(np.asarray(planes["levels"], np.uint8), units, step, seed, radius, spec)


@dataclass(frozen=True, kw_only=True)
class DitheredFirstMomentCodec(_DitheredCodec):
    """Dithered levels of Adam's ``m / sqrt(v)``, v being the second moment as restored.

    Guarantees: the error of m is uniform within half a step and independent of m, where the level is not clipped (126
    steps); m is restored as zero where v is zero.
    """

    id: ClassVar[str] = "dithered-root-units"
    needs: ClassVar[tuple[str, ...]] = (Role.EXP_AVG_SQ.value,)

    step: float = 4.0
    """Distance of two levels in units of sqrt(v)."""

    def _measure(self, values: F32, spec: TensorSpec, context: Context) -> tuple[F32, dict[str, bytes]]:
        return measured_roots(values, self.step, spec, context), {}

    def _units(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> F32:
        check_sections(encoded, spec, "levels")
        return known_roots(spec, context)


@dataclass(frozen=True, kw_only=True)
class DitheredMomentumCodec(_DitheredCodec):
    """Dithered levels of a momentum in units of its own root mean square by row and column.

    For optimizers without a second moment, as SGD with momentum, Lion or Muon. Guarantees: the error is uniform within
    half a step and independent of the momentum, where the level is not clipped (126 steps).
    """

    id: ClassVar[str] = "dithered-own-units"

    step: float = 4.0
    """Distance of two levels in root mean squares."""

    def _measure(self, values: F32, spec: TensorSpec, context: Context) -> tuple[F32, dict[str, bytes]]:
        return measured_own(values, self.step, spec, context)

    def _units(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> F32:
        check_sections(encoded, spec, "levels", "factors")
        return Factors.read(encoded, spec, context.threads).product()


def _edges(seed: int, count: int) -> Side:
    return Side(dither_edges(seed, count), EDGE_CLASSES, EDGE_PLACES, two_sided=True)


def _restore(
    plane: U8, units: F32, step: np.float32, seed: int, radius: int, spec: TensorSpec
) -> torch.Tensor:
    from shrinkpoint.schemes import dither_kernels  # numba

    values = np.empty(plane.size, np.float32)
    dither_kernels.unlevel(plane, units, step, seed, radius, values)
    return torch.from_numpy(values).reshape(spec.shape)


def check_dtype(spec: TensorSpec) -> None:
    """Raise FormatError unless a codec of moments may have stored the tensor."""
    if spec.dtype is not torch.float32 or spec.numel == 0:
        raise FormatError(f"{spec.name}: a moment of {spec.dtype} and shape {spec.shape} is stored exactly")


def fp32_values(tensor: torch.Tensor, spec: TensorSpec) -> F32:
    """A moment's elements, flat in C order.

    Raises:
        CannotRepresentError: it is empty, of another dtype, or not finite.
    """
    if tensor.dtype is not torch.float32:
        raise CannotRepresentError(f"{spec.name}: moments of dtype {tensor.dtype} are stored exactly")
    if tensor.numel() == 0:
        raise CannotRepresentError(f"{spec.name} is empty: stored exactly")
    values: F32 = tensor.detach().contiguous().reshape(-1).numpy()
    if not finite(values):
        raise CannotRepresentError(f"{spec.name} holds NaN or infinity and is stored exactly")
    return values


def measured_roots(values: F32, step: float, spec: TensorSpec, context: Context) -> F32:
    """The root of the second moment at every element, in which first moments are measured in so wide steps.

    Raises:
        CannotRepresentError: there is none, or the two are not moments of one gradient.
    """
    from shrinkpoint.schemes import dither_kernels  # numba

    roots = _roots(spec, context)
    if roots is None:
        raise CannotRepresentError(f"{spec.name} has no second moment to be measured by: stored exactly")
    usual = min(max(_STRANGE_STEPS * step, _STRANGE_ROOTS), _REACH * step)
    if dither_kernels.count_beyond(values, roots, np.float32(usual)) > _STRANGERS * values.size:
        raise CannotRepresentError(f"{spec.name} is too large for its second moment: stored exactly")
    return roots


def known_roots(spec: TensorSpec, context: Context) -> F32:
    """The same for a reader.

    Raises:
        FormatError: there is no second moment.
    """
    roots = _roots(spec, context)
    if roots is None:
        raise FormatError(f"{spec.name}: the second moment that it is measured by is missing")
    return roots


def measured_own(
    values: F32, step: float, spec: TensorSpec, context: Context
) -> tuple[F32, dict[str, bytes]]:
    """A momentum's root mean squares by row and column, and the section that tells them.

    Raises:
        CannotRepresentError: they reach the end of fp32's range.
    """
    factors = Factors.of_roots(values.reshape(matrix_shape(spec.shape)))
    units = factors.product()
    with np.errstate(over="ignore"):
        reached = units * np.float32(_REACH * step)
    if not np.isfinite(reached).all():
        raise CannotRepresentError(f"{spec.name} reaches the end of fp32's range: stored exactly")
    return units, {"factors": factors.encode(context.threads)}


def _roots(spec: TensorSpec, context: Context) -> F32 | None:
    """The root of the second moment at every element, or None without one beside this tensor."""
    second = context.siblings.get(Role.EXP_AVG_SQ.value)
    if second is None or second.numel() != spec.numel or second.dtype is not torch.float32:
        return None
    values = second.reshape(-1).numpy()
    if values.size and not (values.min() >= 0 and values.max() < np.inf):  # also false for NaN
        return None
    roots: F32 = np.sqrt(values)  # IEEE 754 rounds the root correctly: the same everywhere
    return roots
