"""Weights on a trellis: where points lie, where weights are expected, the nearest paths, and what a reader keeps of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Float32s, Float64s, Indices, Int8s, Int16s, UInt8s
from shrinkpoint.entropy.lanes.trellis import NOISE, row_width
from shrinkpoint.runtime.threads import FIRST, in_parts, map_in_parts, map_in_threads
from shrinkpoint.schemes.auto.factors import QUARTERS
from shrinkpoint.schemes.auto.random_walk import EXPONENTS, LAST_WALK, NO_WALK
from shrinkpoint.schemes.auto.row_and_column_steps import join_exponents, split_exponents
from shrinkpoint.schemes.base import PackedPlanes, Planes, ReferenceState
from shrinkpoint.schemes.codec_io import integer, matrix_shape, number, plane_of
from shrinkpoint.state.training import TensorSpec

if TYPE_CHECKING:
    from shrinkpoint.quantize.trellis_dither_kernels import Known

WIDER = (1 / 12 / NOISE) ** 0.5
"""By how much steps may be wider than those of a scalar quantizer for the same noise."""

_ALL = np.zeros(0, np.int64)
_BATCHES = 4  # of sixteen paths that a thread takes at a time, at least

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where the points of one tensor's weights lie."""

    step: np.float32
    exponents: UInt8s
    """Quarter octaves of each element's step above ``step / 2 ** 16``."""
    seed: int

    def values(self, points: Int16s) -> Float32s:
        """Return the values that points stand for: two IEEE operations each."""
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        out = np.empty(points.size, np.float32)
        in_parts(trellis_dither_kernels.values, points, self.exponents, self.quarters, self.seed, FIRST, out)
        return out

    def points(self, values: Float32s) -> Int16s | None:
        """Return the points, in half steps, that stand for these values; None where some are not the values of any."""
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        out = np.empty(values.size, np.int16)
        found = trellis_dither_kernels.points(values, self.exponents, self.quarters, self.seed, out)
        return out if found else None

    @property
    def quarters(self) -> tuple[np.float32, ...]:
        """The steps of exponents 64 to 67."""
        return tuple(self.step * QUARTERS)


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
        """Return the same for a training that went on from it: its weights were what was restored."""
        return replace(self, offsets=np.zeros_like(self.offsets), variance_code=NO_WALK)

    def known(self, rows: Indices | None = None, columns: int = 1) -> "Known":
        """Return what kernels need of it; of some rows, or of all."""
        from shrinkpoint.quantize.trellis_dither_kernels import Known  # numba

        return Known(
            rows_of(self.values, rows, columns),
            rows_of(self.offsets, rows, columns),
            rows_of(self.exponents, rows, columns),
            tuple(self.step * QUARTERS),
        )


_NOTHING = TrellisReference(
    step=np.float32(1),
    exponents=np.zeros(0, np.uint8),
    values=np.zeros(0, np.float32),
    offsets=np.zeros(0, np.int8),
    variance_code=LAST_WALK,
)


def _part_of(known: "Known", part: slice) -> "Known":
    return known._replace(
        values=known.values[part], offsets=known.offsets[part], exponents=known.exponents[part]
    )


def zero_places(seed: int, count: int) -> Int16s:
    """Compute where zeros are expected, int16 (n,) in 1/256 of a step."""
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    out = np.empty(count, np.int16)
    in_parts(trellis_dither_kernels.places, seed, FIRST, out)
    return out


def expected_points(grid: Grid, reference: TrellisReference | None) -> tuple[Int16s, Int16s]:
    """Compute where weights are expected: around zero without a reference.

    Returns:
        The even point nearest to where each is expected, int16 (n,) in half steps, and its place from there, int16 (n,) in 1/256
        of a step.
    """
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    size = grid.exponents.size
    if reference is None:
        return np.zeros(size, np.int16), zero_places(grid.seed, size)
    even, places = np.empty(size, np.int16), np.empty(size, np.int16)
    known = reference.known()

    def expect(part: slice) -> None:
        given = _part_of(known, part), grid.exponents[part], grid.quarters, grid.seed, part.start
        trellis_dither_kernels.expect(*given, even[part], places[part])

    map_in_parts(expect, size)
    return even, places


def nearest_points(
    values: Float32s, grid: Grid, reference: TrellisReference | None, rows: Indices | None, columns: int
) -> tuple[Int16s, Int16s, Int16s] | None:
    """Put weights on their nearest paths.

    Args:
        values: of all weights.
        grid: of all weights.
        reference: where they are expected; None for around zero.
        rows: the only ones that are coded; None for all.
        columns: of the matrix.

    Returns:
        Of the rows that are coded the points, int16 in half steps from the even ones nearest to where they are expected; and these
        even ones and the places, as `expected_points` gives them. None where one is too far from zero.
    """
    from shrinkpoint.quantize import trellis_dither_kernels, viterbi_kernels  # numba

    size = values.size if rows is None else rows.size * columns
    width = row_width(size // columns, columns)
    points, even, places = (np.empty(size, np.int16) for _ in range(3))
    known = (_NOTHING if reference is None else reference).known()
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
                even,
            )
        )

    found = map_in_threads(quantize, range(0, paths, step))
    return (points, even, places) if all(found) else None


def rows_of(plane: npt.NDArray[T], rows: Indices | None, columns: int) -> npt.NDArray[T]:
    """Return the elements of some rows of a matrix, flat as it is; None takes all."""
    return plane if rows is None else np.ascontiguousarray(plane.reshape(-1, columns)[rows]).reshape(-1)


def in_rows(part: npt.NDArray[T], rows: Indices | None, shape: tuple[int, int]) -> npt.NDArray[T]:
    """Return a matrix, flat, with such rows and others of zeros; None takes all."""
    if rows is None:
        return part
    whole = np.zeros(shape, part.dtype)
    whole[rows] = part.reshape(-1, shape[1])
    return whole.reshape(-1)


def deviations(
    values: Float32s, grid: Grid, reference: TrellisReference, columns: int, rows: Indices | None = None
) -> tuple[Float64s, Float64s]:
    """Return sums of squares of how far weights are from where they were expected to have been, and their numbers, by exponent; of
    some rows, or of all."""
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    values, exponents = rows_of(values, rows, columns), rows_of(grid.exponents, rows, columns)
    known = reference.known(rows, columns)

    def add(part: slice) -> Float64s:
        sums = np.zeros((2, EXPONENTS))
        given = values[part], _part_of(known, part), exponents[part], grid.quarters
        trellis_dither_kernels.sum_squares(*given, *sums)
        return sums

    squares, counts = sum(map_in_parts(add, values.size), np.zeros((2, EXPONENTS)))
    return squares, counts


@dataclass(frozen=True)
class KeptRows:
    """Rows of a matrix that lie on the points of earlier checkpoints."""

    rows: Indices
    values: Float32s
    """(rows, columns)."""


def packed_planes(
    grid: Grid, points: Int16s, offsets: Int8s, shape: tuple[int, ...], kept: KeptRows | None = None
) -> PackedPlanes:
    """Return the planes ``value``, ``exponent`` and ``offset`` in less than half of the memory that they take.

    A value is made of its point again, an element's exponent of its row's and its column's: both are the very numbers that they
    were, for every element's value is its own.

    Args:
        grid: that the points are on.
        points: int16 (n,), in half steps from 0; of any number in rows that are kept.
        offsets: int8 (n,), as `TrellisReference.offsets`.
        shape: of the tensor.
        kept: rows that do not lie on this grid.
    """
    matrix = matrix_shape(shape)
    rows, columns = split_exponents(grid.exponents, matrix)
    fits = int(points.min(initial=0)) >= -128 and int(points.max(initial=0)) <= 127
    parts = {
        "points": points.astype(np.int8) if fits else points,
        "offsets": offsets,
        "rows": rows,
        "columns": columns,
        **({"kept": kept.rows, "values": kept.values} if kept is not None else {}),
    }
    made: dict[str, Callable[[Planes], npt.NDArray[Any]]] = {
        "value": partial(_values, step=grid.step, seed=grid.seed),
        "exponent": _exponents,
        "offset": itemgetter("offsets"),
    }
    return PackedPlanes(points.size, parts, made)


def _exponents(parts: Planes) -> UInt8s:
    return join_exponents(np.asarray(parts["rows"], np.int8), np.asarray(parts["columns"], np.int8))


def _values(parts: Planes, step: np.float32, seed: int) -> Float32s:
    grid = Grid(step=step, exponents=_exponents(parts), seed=seed)
    values = grid.values(parts["points"].astype(np.int16, copy=False))
    if "kept" in parts:
        values.reshape(parts["rows"].size, -1)[parts["kept"]] = parts["values"]
    return values
