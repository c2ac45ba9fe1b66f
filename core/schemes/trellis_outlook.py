"""Where weights on a trellis were, and where they are expected: what is held of them, and what the coder is told from it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shrinkpoint.entropy.context_sample import Side
from shrinkpoint.entropy.trellis import States
from shrinkpoint.entropy.trellis_planes import Path
from shrinkpoint.schemes.base import Held
from shrinkpoint.schemes.dither import SEEDS
from shrinkpoint.schemes.factors import matrix_shape
from shrinkpoint.schemes.planes import F32, integer, number, plane_of
from shrinkpoint.schemes.trellis_points import Grid, zero_places
from shrinkpoint.schemes.trellis_walk import CARRIED, EXPONENTS, LAST_WALK, NO_WALK, grain_of
from shrinkpoint.state import TensorSpec
from shrinkpoint.tree import JSON

__all__ = ["ERRORS", "HeldWeights", "Outlook", "deviations", "read_carried", "read_grain", "with_noise"]

F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]
I16 = npt.NDArray[np.int16]

ERRORS = "errors"
"""Name of the plane that only the writer has (`Held.unseen`)."""

_HALVES = 12  # half steps up to which sizes are told apart


@dataclass(frozen=True)
class HeldWeights:
    """What is held of a predecessor."""

    grid: Grid
    points: I16
    offsets: I8
    """How far from its point each weight is expected, in 1/64 step."""
    known: int
    """How well is known that they are there (`Expectation.known`)."""
    errors: I8 | None
    """The noise of each point in 1/64 step, which only its encoder knows."""

    @staticmethod
    def of(reference: Held | None, spec: TensorSpec) -> "HeldWeights | None":
        """None where nothing is held of a tensor of this size."""
        planes = [plane_of(reference, name, spec) for name in ("points", "exponent", "offset")]
        if reference is None or any(plane is None for plane in planes):
            return None
        points, exponents, offsets = planes
        grid = Grid(
            step=number(reference.params, spec, "step"),
            exponents=np.asarray(exponents, np.uint8),
            seed=integer(reference.params, spec, "seed", 0, SEEDS - 1),
            grain=read_grain(reference.params, spec),
        )
        known = integer(reference.params, spec, "known", NO_WALK, LAST_WALK)
        errors = reference.unseen.get(ERRORS)
        return HeldWeights(
            grid,
            np.asarray(points, np.int16),
            np.asarray(offsets, np.int8),
            known,
            None if errors is None else np.asarray(errors, np.int8),
        )

    def as_restored(self) -> "HeldWeights":
        """The same for a training that went on from it: its weights were at their points."""
        return HeldWeights(self.grid, self.points, np.zeros_like(self.offsets), NO_WALK, None)


@dataclass(frozen=True)
class Outlook:
    """Where weights are expected: the nearest even point, in half steps, and what the coder is told from there."""

    even: I16
    path: Path

    @staticmethod
    def of(grid: Grid, held: HeldWeights | None, carried: int, states: States, spec: TensorSpec) -> "Outlook":
        """From what is held, or around zero."""
        from shrinkpoint.schemes import trellis_dither  # numba

        size, columns = grid.exponents.size, matrix_shape(spec.shape)[1]
        steps = Side(grid.exponents, EXPONENTS)
        if held is None:
            path = Path(zero_places(grid.seed, size), columns, states, (steps,))
            return Outlook(np.zeros(size, np.int16), path)
        even, places, sizes = np.empty(size, np.int16), np.empty(size, np.int16), np.empty(size, np.uint8)
        old = held.grid
        trellis_dither.expect(
            held.points,
            held.offsets,
            old.exponents,
            old.fine,
            old.quarters,
            old.seed,
            np.float32(1 - carried / CARRIED),
            grid.exponents,
            grid.fine,
            grid.seed,
            even,
            places,
        )
        trellis_dither.halves(even, places, grid.seed, _HALVES, sizes)
        return Outlook(even, Path(places, columns, states, (steps, Side(sizes, _HALVES + 1))))


def deviations(values: F32, grid: Grid, held: HeldWeights) -> tuple[F64, F64]:
    """Sums of squares of how far weights are from where they were expected to have been, and their numbers, by exponent."""
    from shrinkpoint.schemes import trellis_dither  # numba

    squares, counts, old = np.zeros(EXPONENTS), np.zeros(EXPONENTS), held.grid
    trellis_dither.sum_squares(
        values,
        held.points,
        held.offsets,
        old.exponents,
        old.fine,
        old.quarters,
        old.seed,
        grid.exponents,
        grid.quarters,
        squares,
        counts,
    )
    return squares, counts


def with_noise(values: F32, grid: Grid, held: HeldWeights, errors: I8, carried: int) -> F32:
    """Weights with a share of their former noise, in 1/16."""
    from shrinkpoint.schemes import trellis_dither  # numba

    out, old = np.empty(values.size, np.float32), held.grid
    share = np.float32(carried / CARRIED)
    trellis_dither.carry(
        values, errors, old.exponents, old.quarters, grid.exponents, grid.quarters, share, out
    )
    return out


def read_carried(params: Mapping[str, JSON], spec: TensorSpec) -> int:
    """The share of noise that was carried over, in 1/16.

    Raises:
        FormatError: it is malformed.
    """
    return integer(params, spec, "carried", 0, CARRIED - 1)


def read_grain(params: Mapping[str, JSON], spec: TensorSpec) -> np.float32:
    """`Grid.grain` of stored weights; raises as `read_carried`."""
    return grain_of(read_carried(params, spec))
