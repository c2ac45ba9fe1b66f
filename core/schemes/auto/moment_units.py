"""What first moments are measured in, and what every quantizer of them does alike.

A first moment's unit is the root of Adam's second moment, as restored; or, of optimizers that have none, as SGD with momentum,
Lion or Muon, the moment's own root mean square by row and column.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch

from shrinkpoint.arrays import Float32s, widened
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.auto.factors import Factors
from shrinkpoint.schemes.base import Context, EncodedTensor
from shrinkpoint.schemes.codec_io import CODED_DTYPES, check_sections, emit, finite, matrix_shape, normal
from shrinkpoint.state.training import Role, TensorSpec

__all__ = ["STRANGE", "MomentCodec", "OwnUnits", "RootUnits", "check_dtype", "emitted"]

STRANGE = 31.0
"""Roots of a second moment that a first one of the same gradient is large at most: it hardly exceeds ten of the true one, and
twice that of a factored one."""
_STRANGERS = 1e-3  # share of elements beyond that shows the two not to be moments of one gradient


class MomentCodec(ABC):
    """A moment in levels of a unit of each element's own, which both sides know."""

    id: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    PLANE: ClassVar[str] = "levels"
    """The section of what an element is restored from."""
    CLIP_STEPS: ClassVar[int] = 126
    """How many steps an element may be from zero; what is farther is clipped."""

    @abstractmethod
    def _measure(
        self, values: Float32s, spec: TensorSpec, context: Context
    ) -> tuple[Float32s, dict[str, bytes]]:
        """Each element's unit, and what has to be stored for it; refuses what it does not suit."""

    @abstractmethod
    def _units(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Float32s:
        """The units again, from what is stored.

        Raises:
            FormatError: it is malformed.
        """


class RootUnits(MomentCodec):
    """``m / sqrt(v)``, v being Adam's second moment as restored; m is restored as zero where v is zero or subnormal."""

    needs: ClassVar[tuple[str, ...]] = (Role.EXP_AVG_SQ.value,)

    def _measure(
        self, values: Float32s, spec: TensorSpec, context: Context
    ) -> tuple[Float32s, dict[str, bytes]]:
        """Refuses moments without a second one, or that are not moments of one gradient."""
        from shrinkpoint.schemes.auto import moment_kernels  # numba

        roots = _roots(spec, context)
        if roots is None:
            raise CannotRepresentError(f"{spec.name} has no second moment to be measured by: stored exactly")
        if moment_kernels.count_beyond(values, roots, np.float32(STRANGE)) > _STRANGERS * values.size:
            raise CannotRepresentError(f"{spec.name} is too large for its second moment: stored exactly")
        return roots, {}

    def _units(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Float32s:
        check_sections(encoded, spec, self.PLANE)
        roots = _roots(spec, context)
        if roots is None:
            raise FormatError(f"{spec.name}: the second moment that it is measured by is missing")
        return roots


class OwnUnits(MomentCodec):
    """A momentum in units of its own root mean square by row and column, for optimizers without a second moment."""

    def _measure(
        self, values: Float32s, spec: TensorSpec, context: Context
    ) -> tuple[Float32s, dict[str, bytes]]:
        """Refuses what reaches the end of fp32's range."""
        factors = Factors.of_roots(values.reshape(matrix_shape(spec.shape)))
        units = factors.product()
        if not finite(units):
            raise CannotRepresentError(f"{spec.name} reaches the end of fp32's range: stored exactly")
        return units, {"factors": factors.encode()}

    def _units(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Float32s:
        check_sections(encoded, spec, self.PLANE, "factors")
        return Factors.read(encoded, spec).product()


def check_dtype(spec: TensorSpec) -> None:
    """Raise FormatError unless a codec of moments may have stored the tensor."""
    if spec.dtype not in CODED_DTYPES or spec.numel == 0:
        raise FormatError(f"{spec.name}: a moment of {spec.dtype} and shape {spec.shape} is stored exactly")


def emitted(restored: Float32s, spec: TensorSpec, *, nonzero: Float32s | None = None) -> torch.Tensor:
    """What a reader will have of restored values, in the spec's dtype.

    Args:
        restored: flat, finite; nobody else holds them.
        spec: the tensor.
        nonzero: the true values, of which none may become zero that is not; None where that does no harm.

    Raises:
        CannotRepresentError: the dtype has too small a range for them.
    """
    value = emit(restored, spec, own=True)
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return value
    narrow = widened(value)
    if not finite(narrow) or (nonzero is not None and bool(((narrow == 0) & (nonzero != 0)).any())):
        raise CannotRepresentError(f"{spec.name} reaches the end of {spec.dtype}'s range: stored exactly")
    return value


def _roots(spec: TensorSpec, context: Context) -> Float32s | None:
    """The root of the second moment at every element, or None if the parameter has none."""
    second = context.siblings.get(Role.EXP_AVG_SQ.value)
    if second is None or second.numel() != spec.numel or second.dtype not in CODED_DTYPES:
        return None
    values = widened(second)
    if values.size and not (values.min() >= 0 and values.max() < np.inf):  # also false for NaN
        return None
    roots = normal(values)
    np.sqrt(roots, out=roots)  # IEEE 754 rounds the root correctly: the same everywhere
    return roots
