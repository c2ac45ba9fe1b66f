"""The reference of trellis-coded weights, and where it lets them be expected."""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Float32s, Float64s, Indices, Int8s, Int16s, UInt8s
from shrinkpoint.entropy.lanes.trellis import row_width
from shrinkpoint.runtime.team import map_in_threads
from shrinkpoint.schemes.auto.random_walk import EXPONENTS, LAST_WALK, NO_WALK
from shrinkpoint.schemes.auto.row_and_column_steps import QUARTERS
from shrinkpoint.schemes.auto.trellis_points import Grid, zero_places
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.schemes.codec_io import integer, number, plane_of
from shrinkpoint.state.training import TensorSpec

__all__ = ["TrellisReference", "deviations", "expected_points", "nearest_points", "rows_of"]

_NO_VALUES, _NO_OFFSETS, _NO_EXPONENTS = np.zeros(0, np.float32), np.zeros(0, np.int8), np.zeros(0, np.uint8)
_ALL = np.zeros(0, np.int64)
_BATCHES = 4  # of sixteen paths that a thread takes at a time, at least

T = TypeVar("T", bound=np.generic)


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

    @staticmethod
    def of(reference: ReferenceState | None, spec: TensorSpec) -> "TrellisReference | None":
        """None if the reference has no tensor of this size."""
        planes = [plane_of(reference, name, spec) for name in ("value", "exponent", "offset")]
        if reference is None or any(plane is None for plane in planes):
            return None
        values, exponents, offsets = planes
        return TrellisReference(
            step=number(reference.params, spec, "step"),
            exponents=np.asarray(exponents, np.uint8),
            values=np.asarray(values, np.float32),
            offsets=np.asarray(offsets, np.int8),
            variance_code=integer(reference.params, spec, "variance_code", NO_WALK, LAST_WALK),
        )

    def after_restore(self) -> "TrellisReference":
        """The same for a training that went on from it: its weights were what was restored."""
        return replace(self, offsets=np.zeros_like(self.offsets), variance_code=NO_WALK)

    @property
    def quarters(self) -> Float32s:
        """fp32 (4,): as `Grid.quarters`."""
        steps: Float32s = self.step * QUARTERS
        return steps


def expected_points(grid: Grid, reference: TrellisReference | None) -> tuple[Int16s, Int16s]:
    """Where weights are expected: around zero without a reference.

    Returns:
        The even point nearest to where each is expected, int16 (n,) in half steps, and its place from there, int16 (n,) in 1/256
        of a step.
    """
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    size = grid.exponents.size
    if reference is None:
        return np.zeros(size, np.int16), zero_places(grid.seed, size)
    even, places = np.empty(size, np.int16), np.empty(size, np.int16)
    trellis_dither_kernels.expect(
        reference.values,
        reference.offsets,
        reference.exponents,
        reference.quarters,
        grid.exponents,
        grid.quarters,
        grid.seed,
        even,
        places,
    )
    return even, places


def nearest_points(
    values: Float32s,
    grid: Grid,
    reference: TrellisReference | None,
    rows: Indices | None,
    columns: int,
) -> tuple[Int16s, Int16s, Int16s] | None:
    """Put weights on their nearest paths.

    Args:
        values: of all weights.
        grid: of all weights.
        reference: where they are expected; None for around zero.
        rows: the only ones that are coded; None for all.
        columns: of the matrix.

    Returns:
        Of the rows that are coded the points, int16 in half steps from the even ones nearest to where they are expected, and the
        places of these as in `expected_points`; of all weights the points from zero. None where one is too far from zero.
    """
    from shrinkpoint.quantize import trellis_dither_kernels, viterbi_kernels  # numba

    size = values.size if rows is None else rows.size * columns
    width = row_width(size // max(columns, 1), columns)
    points, places = np.empty(size, np.int16), np.empty(size, np.int16)
    reached = np.empty(size, np.int16) if rows is None else np.zeros(values.size, np.int16)
    known = trellis_dither_kernels.Known(
        values=_NO_VALUES if reference is None else reference.values,
        offsets=_NO_OFFSETS if reference is None else reference.offsets,
        exponents=_NO_EXPONENTS if reference is None else reference.exponents,
        quarters=grid.quarters if reference is None else reference.quarters,
    )
    paths = -(-size // width)
    step = 16 * max(_BATCHES, -(-paths // 256))

    def quantize(first: int) -> bool:
        return bool(
            trellis_dither_kernels.quantize(
                values,
                known,
                grid.exponents,
                grid.quarters,
                grid.seed,
                _ALL if rows is None else rows,
                columns,
                width,
                (first, min(first + step, paths)),
                viterbi_kernels.new_search(width),
                points,
                places,
                reached,
            )
        )

    found = map_in_threads(quantize, range(0, paths, step))
    return (points, places, reached) if all(found) else None


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
