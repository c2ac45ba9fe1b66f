"""First moments on a dithered trellis: those of `shrinkpoint.schemes.dithered_moments` at two thirds of the bits.

A first moment is small beside its step, and what a scalar quantizer with dither writes of it is mostly its own quarter of
a bit. The trellis (`shrinkpoint.entropy.trellis`) leaves a third of that.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.entropy.trellis import States
from shrinkpoint.entropy.trellis_planes import Path, decode_points, encode_points
from shrinkpoint.errors import FormatError
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Planes
from shrinkpoint.schemes.factors import matrix_shape
from shrinkpoint.schemes.moment_units import MomentCodec, OwnUnits, RootUnits, check_dtype, fp32_values
from shrinkpoint.schemes.planes import F32, section
from shrinkpoint.schemes.trellis_points import check_states, nearest_points, read_states, zero_places
from shrinkpoint.state import TensorSpec

__all__ = ["TrellisFirstMomentCodec", "TrellisMomentumCodec"]


I16 = npt.NDArray[np.int16]


@dataclass(frozen=True, kw_only=True)
class _TrellisCodec(MomentCodec):
    """A moment on a trellis."""

    PLANE: ClassVar[str] = "points"
    REACH: ClassVar[int] = 110  # so few that every point can be told
    MAX_STEP: ClassVar[float] = 128

    states: States = 4
    """Of the trellis."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_states(self.states)

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """See `TensorCodec.encode`; what has no unit, or is not fp32 or not finite, is refused."""
        points, units, sections = self._quantize(tensor, spec, context)
        coded = encode_points(points, _path(spec, self.seed, self.states), context.threads)
        params = {"step": float(np.float32(self.step)), "seed": self.seed, "states": self.states}
        encoded = EncodedTensor(self.id, params, {self.PLANE: coded.payload, **sections})
        return Coded(encoded, {self.PLANE: coded.points}, self._value(coded.points, units, spec))

    def restored(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> torch.Tensor:
        """See `Quantizer.restored`."""
        points, units, _ = self._quantize(tensor, spec, context)
        return self._value(points, units, spec)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        if spec.numel == 0:
            raise FormatError(f"{spec.name}: codec {self.id!r} cannot hold an empty tensor")
        path = _path(spec, self._stored_seed(encoded, spec), read_states(encoded, spec))
        return {self.PLANE: decode_points(section(encoded, spec, self.PLANE), path, context.threads).points}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        check_dtype(spec)
        step, seed = self._stored_step(encoded, spec), self._stored_seed(encoded, spec)
        units = self._units(encoded, spec, context)
        return _restore(np.asarray(planes[self.PLANE], np.int16), units, step, seed, spec)

    def _quantize(
        self, tensor: torch.Tensor, spec: TensorSpec, context: Context
    ) -> tuple[I16, F32, dict[str, bytes]]:
        from shrinkpoint.schemes import trellis_dither  # numba

        values = fp32_values(tensor, spec)
        units, sections = self._measure(values, spec, context)
        measured = np.empty(values.size, np.float32)
        trellis_dither.measured(values, units, np.float32(self.step), self.seed, self.REACH, measured)
        points = nearest_points(measured, matrix_shape(spec.shape)[1], self.states, context.threads)
        return points, units, sections

    def _value(self, points: I16, units: F32, spec: TensorSpec) -> torch.Tensor:
        return _restore(points, units, np.float32(self.step), self.seed, spec)


@dataclass(frozen=True, kw_only=True)
class TrellisFirstMomentCodec(RootUnits, _TrellisCodec):
    """Adam's ``m / sqrt(v)``, v being the second moment as restored.

    Guarantees: the error of m is independent of m, of a mean square of 0.0663 square steps (0.0649 with 8 states) where m is
    not clipped (110 steps); m is restored as zero where v is zero.

    Raises:
        ConfigError: an option is out of its range.
    """

    id: ClassVar[str] = "trellis-root-units"


@dataclass(frozen=True, kw_only=True)
class TrellisMomentumCodec(OwnUnits, _TrellisCodec):
    """A momentum in units of its own root mean square by row and column, for optimizers without a second moment.

    Guarantees and raises as `TrellisFirstMomentCodec`.
    """

    id: ClassVar[str] = "trellis-own-units"


def _path(spec: TensorSpec, seed: int, states: States) -> Path:
    return Path(zero_places(seed, spec.numel), matrix_shape(spec.shape)[1], states)


def _restore(points: I16, units: F32, step: np.float32, seed: int, spec: TensorSpec) -> torch.Tensor:
    from shrinkpoint.schemes import trellis_dither  # numba

    values = np.empty(points.size, np.float32)
    trellis_dither.unmeasured(points, units, step, seed, values)
    return torch.from_numpy(values).reshape(spec.shape)
