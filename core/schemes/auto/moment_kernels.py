"""The compiled loops that put first moments on levels and take them off again.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. What readers depend
on is single IEEE 754 operations on fp32: every machine gets the same bits. All arrays are flat and of one length n where
nothing else is said.
"""

import numpy as np

from shrinkpoint.arrays import Float32s, Float64s, UInt8s
from shrinkpoint.runtime.jit import jit

_ROUND = np.float32(
    1.5 * 2**23
)  # added and taken away, it rounds what is below 2**22 to the nearest even integer
# Products below count as zero. Half of it is the least normal number, to which a product may be rounded that a process
# without subnormals takes for zero.
_LEAST = np.float32(2.0**-125)
_ZERO = np.float32(0)


@jit
def levels(
    values: Float32s,
    units: Float32s,
    step: np.float32,
    clip_steps: int,
    weighted: bool,
    out: UInt8s,
    sums: Float64s,
    counts: Float64s,
) -> int:
    """Levels ``rint(value / (step * unit))`` within ``clip_steps``, moved to begin at 0; the largest of all.

    Args:
        values: moments.
        units: what each is measured in; where that is zero or about to be subnormal, the level is 0.
        step: distance of two levels, in units.
        clip_steps: the farthest level, below 128.
        weighted: whether an element counts as much as the square of its unit, or all elements count the same.
        out: receives levels plus ``clip_steps``.
        sums: (128,), by the level's size: the sizes of its elements are added, in steps, each as often as it counts.
        counts: (128,), how much these count together.
    """
    bound = np.float32(clip_steps)
    largest = np.int32(0)
    for i in range(out.size):
        unit = step * units[i]
        size = abs(values[i]) / max(unit, _LEAST) if unit >= _LEAST else _ZERO
        level = np.int32((min(size, bound) + _ROUND) - _ROUND)
        counted = np.float64(units[i]) * np.float64(units[i]) if weighted else 1.0
        sums[level] += counted * np.float64(size)
        counts[level] += counted
        largest = max(largest, level)
        out[i] = np.uint8(clip_steps - level if values[i] < _ZERO else clip_steps + level)
    return int(largest)


@jit
def explained(sizes: Float64s, weights: Float64s, step: float, clip_steps: int, room: Float64s) -> float:
    """What the means of levels explain of the weighted sum of the squares of sizes; level 0 stands for zero.

    Args:
        sizes: not negative.
        weights: how often each counts.
        step: distance of two levels.
        clip_steps: the farthest level.
        room: (2, clip_steps + 1).
    """
    for level in range(clip_steps + 1):
        room[0, level] = 0.0
        room[1, level] = 0.0
    for i in range(sizes.size):
        level = int(min(np.rint(sizes[i] / step), np.float64(clip_steps)))
        room[0, level] += weights[i]
        room[1, level] += weights[i] * sizes[i]
    total = 0.0
    for level in range(1, clip_steps + 1):
        if room[0, level] > 0.0:
            total += room[1, level] * room[1, level] / room[0, level]
    return float(total)


@jit
def unlevel(symbols: UInt8s, units: Float32s, sizes: Float32s, radius: int, out: Float32s) -> None:
    """What levels stand for: ``sizes`` (radius + 1,) of a unit; products that are about to be subnormal are zero."""
    for i in range(out.size):
        level = np.int32(symbols[i]) - np.int32(radius)
        value = sizes[abs(level)] * units[i]
        value = value if value >= _LEAST else _ZERO
        out[i] = -value if level < 0 else value


@jit
def in_other_units(
    values: Float32s, seconds: Float32s, units: Float32s, epsilon: float, limit: float, out: Float32s
) -> None:
    """Scale each moment so that divided by the restored root it is what it was, divided by the true one; only encoders need it.

    Args:
        values: moments.
        seconds: second moments, not negative; where they are zero, nothing is known of the quotient, and values stay.
        units: the roots as restored.
        epsilon: added to both roots.
        limit: how many restored roots large a moment becomes at most.
        out: receives the moments.
    """
    for i in range(out.size):
        unit, value = np.float64(units[i]), np.float64(values[i])
        if seconds[i] > _ZERO:
            value *= (unit + epsilon) / (np.sqrt(np.float64(seconds[i])) + epsilon)
        out[i] = np.float32(max(-limit * unit, min(limit * unit, value)))


@jit
def count_beyond(values: Float32s, units: Float32s, limit: np.float32) -> int:
    """Return how many values are more than ``limit`` units large, where the unit is not zero."""
    count = np.int32(0)
    for i in range(values.size):
        count += np.int32((abs(values[i]) > limit * units[i]) & (units[i] > _ZERO))
    return int(count)


@jit
def square_sum(values: Float32s, units: Float32s, weighted: bool) -> float:
    """The sum of the squares of values in their units, where these are not zero; of the values themselves if `weighted`."""
    total = np.float64(0)
    for i in range(values.size):
        if units[i] >= _LEAST:
            size = np.float64(values[i]) / (1.0 if weighted else np.float64(units[i]))
            total += size * size
    return float(total)
