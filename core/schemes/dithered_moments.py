"""Moments at a fraction of a bit: a factored second moment, and first moments on dithered levels.

Of Adam's second moment a row and a column are kept, as in Adafactor (arXiv 1804.04235, section 3). What keeps Adam's
behaviour is that the product is right on average in the log domain: scaled to the matrix's mean instead, it is too
large where most elements are small, and steps after a restore are too short.

First moments are stored in steps of several root second moments, or, of optimizers that have none, of several root
means of their own. Nearly all levels are zero then, and the subtractive dither keeps every small component on average,
where rounding to nearest would set it to zero at every restore; for that, each checkpoint takes another seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shrinkpoint.entropy.context import Effort, Side, decode_plane, encode_plane
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Planes
from shrinkpoint.schemes.dither import EDGE_CLASSES, EDGE_PLACES, dither_edges
from shrinkpoint.schemes.factors import Factors, matrix_shape
from shrinkpoint.schemes.moment_units import MomentCodec, OwnUnits, RootUnits, check_dtype, fp32_values
from shrinkpoint.schemes.planes import F32, U8, check_sections, finite, integer, section
from shrinkpoint.schemes.recipe import check_choice
from shrinkpoint.state import TensorSpec

__all__ = ["DitheredFirstMomentCodec", "DitheredMomentumCodec", "FactoredSecondMomentCodec"]


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
class _DitheredCodec(MomentCodec):
    """Dithered levels of a moment."""

    PLANE: ClassVar[str] = "levels"
    REACH: ClassVar[int] = 126
    MAX_STEP: ClassVar[float] = 64

    effort: Effort = "default"
    """How much time the coder of the levels spends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "effort", Effort)

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
        encoded = EncodedTensor(self.id, params, {self.PLANE: payload, **sections})
        return Coded(encoded, {self.PLANE: plane}, self._value(plane, radius, units, spec))

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
        radius = int(
            dither_kernels.levels(values, units, np.float32(self.step), self.seed, self.REACH, plane)
        )
        plane -= np.uint8(self.REACH - radius)
        return plane, radius, units, sections

    def _value(self, plane: U8, radius: int, units: F32, spec: TensorSpec) -> torch.Tensor:
        return _restore(plane, units, np.float32(self.step), self.seed, radius, spec)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        if spec.numel == 0:
            raise FormatError(f"{spec.name}: codec {self.id!r} cannot hold an empty tensor")
        seed = self._stored_seed(encoded, spec)
        radius = integer(encoded.params, spec, "radius", 0, self.REACH)
        plane = decode_plane(
            section(encoded, spec, self.PLANE),
            spec.numel,
            2 * radius + 1,
            columns=matrix_shape(spec.shape)[1],
            sides=[_edges(seed, spec.numel)],
            threads=context.threads,
        )
        return {self.PLANE: plane}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        check_dtype(spec)
        step = self._stored_step(encoded, spec)
        seed = self._stored_seed(encoded, spec)
        radius = integer(encoded.params, spec, "radius", 0, self.REACH)
        units = self._units(encoded, spec, context)
        return _restore(np.asarray(planes[self.PLANE], np.uint8), units, step, seed, radius, spec)


@dataclass(frozen=True, kw_only=True)
class DitheredFirstMomentCodec(RootUnits, _DitheredCodec):
    """Dithered levels of Adam's ``m / sqrt(v)``, v being the second moment as restored.

    Guarantees: the error of m is uniform within half a step and independent of m, where the level is not clipped (126
    steps); m is restored as zero where v is zero.
    """

    id: ClassVar[str] = "dithered-root-units"


@dataclass(frozen=True, kw_only=True)
class DitheredMomentumCodec(OwnUnits, _DitheredCodec):
    """Dithered levels of a momentum in units of its own root mean square by row and column.

    For optimizers without a second moment, as SGD with momentum, Lion or Muon. Guarantees: the error is uniform within
    half a step and independent of the momentum, where the level is not clipped (126 steps).
    """

    id: ClassVar[str] = "dithered-own-units"


def _edges(seed: int, count: int) -> Side:
    return Side(dither_edges(seed, count), EDGE_CLASSES, EDGE_PLACES, two_sided=True)


def _restore(
    plane: U8, units: F32, step: np.float32, seed: int, radius: int, spec: TensorSpec
) -> torch.Tensor:
    from shrinkpoint.schemes import dither_kernels  # numba

    values = np.empty(plane.size, np.float32)
    dither_kernels.unlevel(plane, units, step, seed, radius, values)
    return torch.from_numpy(values).reshape(spec.shape)
