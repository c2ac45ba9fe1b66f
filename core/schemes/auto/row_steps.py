"""Step sizes of rows, limited by how far training has moved them (`shrinkpoint.quantize.movement`)."""

import math

import numpy as np

from shrinkpoint.arrays import Float64s, Int8s
from shrinkpoint.schemes.auto.lattice_points import MAX_EXPONENT

__all__ = ["narrowed"]


_PER_OCTAVE = 4
_NOISE = math.sqrt(1 / 12)  # of a uniform quantizer, in its steps
_ROWS = 256  # by which columns are judged


def narrowed(
    step: float, exponents: tuple[Int8s, Int8s], noise: Float64s
) -> tuple[float, tuple[Int8s, Int8s]]:
    """Step sizes of which no row makes more noise than it may.

    Where the curvature allows every element of a row more noise than that, elements have equal steps: none may have more.

    Args:
        step: the tensor's own step size, of a uniform quantizer.
        exponents: int8 (rows,) and (columns,): quarter octaves above it.
        noise: float64 (rows,): the greatest root mean square of a row's errors. Rows that may have none, or less than
            2 ** -8 of the noisiest row's, take the finest step sizes that there are.

    Returns:
        The same, with narrower steps where they must be.
    """
    rows, columns = (side.astype(np.float64) for side in exponents)
    with np.errstate(divide="ignore"):
        most = _PER_OCTAVE * np.log2(noise / (_NOISE * step))
    if float(rows.max() + columns.max()) <= float(most.min()):
        return step, exponents
    moved = np.flatnonzero(np.isfinite(most))
    if not moved.size:
        return step, exponents
    some = moved[:: max(1, moved.size // _ROWS)]
    wanted = np.minimum(rows[some, None] + columns[None], most[some, None])
    columns = np.rint(wanted.mean(axis=0) - wanted.mean())
    # of a row, over its columns: noise goes with the square of the step size
    spread = _PER_OCTAVE * math.log2(math.sqrt(float(np.exp2(columns / (_PER_OCTAVE / 2)).mean())))
    rows = np.floor(np.minimum(rows + exponents[1].mean(), most - spread))
    shift = float(
        rows.max()
    )  # the widest row takes the tensor's own step size, and the others are within reach below it
    lowered = np.clip(rows - shift, -MAX_EXPONENT, MAX_EXPONENT).astype(np.int8)
    sides = (lowered, np.clip(columns, -MAX_EXPONENT, MAX_EXPONENT).astype(np.int8))
    return step * 2.0 ** (shift / _PER_OCTAVE), sides
