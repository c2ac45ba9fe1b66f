"""The reference of trellis-coded weights, and the prediction that the coder gets from it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Float32s, Float64s, Indices, Int8s, Int16s, UInt8s
from shrinkpoint.entropy.contexts.sample import Side
from shrinkpoint.entropy.trellis.coder import Path
from shrinkpoint.entropy.trellis.states import States
from shrinkpoint.schemes.auto.lattice_points import QUARTERS
from shrinkpoint.schemes.auto.random_walk import CARRIED, EXPONENTS, LAST_WALK, NO_WALK, step_ratio_of
from shrinkpoint.schemes.auto.trellis_points import Grid, zero_places
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.schemes.codec_io import integer, matrix_shape, number, plane_of
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

__all__ = [
    "ERRORS",
    "TrellisPrediction",
    "TrellisReference",
    "deviations",
    "expected_points",
    "read_carried",
    "read_step_ratio",
    "rows_of",
    "with_noise",
]

T = TypeVar("T", bound=np.generic)

ERRORS = "errors"
"""Name of the plane that only the writer has (`ReferenceState.encoder_only`)."""

_HALVES = 12  # half steps up to which sizes are distinguished


@dataclass(frozen=True)
class TrellisReference:
    """The reference of one weight: what its reader has of the previous checkpoint."""

    step: np.float32
    """That the noise is of."""
    exponents: UInt8s
    """Quarter octaves of each element's step, as `Grid.exponents`."""
    values: Float32s
    """What was restored, before it was rounded to the tensor's dtype."""
    offsets: Int8s
    """How far from its value each weight is expected, in 1/64 step."""
    variance_code: int
    """How well is known that they are there (`Expectation.variance_code`)."""
    errors: Int8s | None
    """The noise of each value in 1/64 step, which only its encoder knows."""

    @staticmethod
    def of(reference: ReferenceState | None, spec: TensorSpec) -> "TrellisReference | None":
        """None if the reference has no tensor of this size."""
        planes = [plane_of(reference, name, spec) for name in ("value", "exponent", "offset")]
        if reference is None or any(plane is None for plane in planes):
            return None
        values, exponents, offsets = planes
        errors = reference.encoder_only.get(ERRORS)
        return TrellisReference(
            step=number(reference.params, spec, "step"),
            exponents=np.asarray(exponents, np.uint8),
            values=np.asarray(values, np.float32),
            offsets=np.asarray(offsets, np.int8),
            variance_code=integer(reference.params, spec, "variance_code", NO_WALK, LAST_WALK),
            errors=None if errors is None else np.asarray(errors, np.int8),
        )

    def after_restore(self) -> "TrellisReference":
        """The same for a training that went on from it: its weights were what was restored."""
        return replace(self, offsets=np.zeros_like(self.offsets), variance_code=NO_WALK, errors=None)

    @property
    def quarters(self) -> Float32s:
        """fp32 (4,): as `Grid.quarters`."""
        steps: Float32s = self.step * QUARTERS
        return steps


@dataclass(frozen=True)
class TrellisPrediction:
    """Where weights are expected: the nearest even point, in half steps, and the coder's side planes from there."""

    even: Int16s
    path: Path

    @staticmethod
    def of(
        grid: Grid,
        reference: TrellisReference | None,
        carried: int,
        states: States,
        spec: TensorSpec,
        rows: Indices | None = None,
    ) -> "TrellisPrediction":
        """From the reference, or around zero.

        Args:
            grid: of all elements.
            reference: of all elements; None makes a base.
            carried: share of noise that is carried over, in 1/16.
            states: of the trellis.
            spec: of the tensor.
            rows: the only ones that are coded; None takes all.
        """
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        size, columns = grid.exponents.size, matrix_shape(spec.shape)[1]
        if reference is None:
            path = Path(zero_places(grid.seed, size), columns, states, (Side(grid.exponents, EXPONENTS),))
            return TrellisPrediction(np.zeros(size, np.int16), path)
        even, places = expected_points(grid, reference, carried)
        sizes = np.empty(size, np.uint8)
        trellis_dither_kernels.halves(even, places, grid.seed, _HALVES, sizes)
        steps = Side(rows_of(grid.exponents, rows, columns), EXPONENTS)
        sides = (steps, Side(rows_of(sizes, rows, columns), _HALVES + 1))
        return TrellisPrediction(even, Path(rows_of(places, rows, columns), columns, states, sides))


def expected_points(grid: Grid, reference: TrellisReference, carried: int) -> tuple[Int16s, Int16s]:
    """The even point nearest to where each weight is expected, int16 (n,) in half steps, and its place from there, as `Path.places`."""
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    size = grid.exponents.size
    even, places = np.empty(size, np.int16), np.empty(size, np.int16)
    trellis_dither_kernels.expect(
        reference.values,
        reference.offsets,
        reference.exponents,
        reference.quarters,
        np.float32(1 - carried / CARRIED),
        grid.exponents,
        grid.fine,
        grid.seed,
        even,
        places,
    )
    return even, places


def rows_of(plane: npt.NDArray[T], rows: Indices | None, columns: int) -> npt.NDArray[T]:
    """The elements of some rows of a matrix, flat as it is; None takes all."""
    return plane if rows is None else np.ascontiguousarray(plane.reshape(-1, columns)[rows]).reshape(-1)


def deviations(
    values: Float32s, grid: Grid, reference: TrellisReference, columns: int, rows: Indices | None = None
) -> tuple[Float64s, Float64s]:
    """Sums of squares of how far weights are from where they were expected to have been, and their numbers, by exponent; of
    some rows, or of all."""
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    squares, counts = np.zeros(EXPONENTS), np.zeros(EXPONENTS)
    trellis_dither_kernels.sum_squares(
        rows_of(values, rows, columns),
        rows_of(reference.values, rows, columns),
        rows_of(reference.offsets, rows, columns),
        rows_of(reference.exponents, rows, columns),
        reference.quarters,
        rows_of(grid.exponents, rows, columns),
        grid.quarters,
        squares,
        counts,
    )
    return squares, counts


def with_noise(
    values: Float32s, grid: Grid, reference: TrellisReference, errors: Int8s, carried: int
) -> Float32s:
    """Weights with a share of their former noise, in 1/16."""
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    out = np.empty(values.size, np.float32)
    share = np.float32(carried / CARRIED)
    trellis_dither_kernels.carry(
        values, errors, reference.exponents, reference.quarters, grid.exponents, grid.quarters, share, out
    )
    return out


def read_carried(params: Mapping[str, JSON], spec: TensorSpec) -> int:
    """The share of noise that was carried over, in 1/16.

    Raises:
        FormatError: it is malformed.
    """
    return integer(params, spec, "carried", 0, CARRIED - 1)


def read_step_ratio(params: Mapping[str, JSON], spec: TensorSpec) -> np.float32:
    """`Grid.step_ratio` of stored weights; raises as `read_carried`."""
    return step_ratio_of(read_carried(params, spec))
