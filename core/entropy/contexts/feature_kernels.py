"""The compiled part of the context coder that says what contexts are made of, and those of effort ``max``.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. All arithmetic
is on integers, and every index is clamped or below what a validated level can make it.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, Integer, UInt8s
from shrinkpoint.entropy.contexts.lowrank_kernels import (
    RANK,
    Room,
    advance,
    clamp,
    correct,
    predict,
    refresh,
    start_directions,
)
from shrinkpoint.runtime.jit import jit, jit_allocating, jit_part

__all__ = [
    "ACTIVITIES",
    "AROUND",
    "BLOCK_ROWS",
    "COARSE",
    "FINE",
    "NEIGHBOURS",
    "Scene",
    "Tracker",
    "bucket",
    "end_row",
    "look",
    "measure",
    "neighbour_activity",
    "new_tracker",
    "see",
    "start_row",
    "turn",
    "turn_symbols",
]

BLOCK_ROWS = 8
"""Rows between two updates of the directions."""

COARSE, FINE = 8, 20
"""Buckets of a prediction to each side of zero."""

ACTIVITIES = 12
"""Classes of how busy a row, a column or both are, relative to the plane; half an octave each."""

AROUND = 8
"""Classes of how busy the neighbourhood in a side plane is."""

NEIGHBOURS = 22
"""Values of how busy the coded neighbours are."""


class Scene(NamedTuple):
    """What contexts are made of, but for the plane itself. Levels are validated: below 256 and of the right shapes.

    Attributes:
        values: int32 (256,), what a level of the plane stands for; the root mean square is near 32.
        magnitudes: uint8 (256,), its class, 0..3.
        sides: uint8 (n, rows, columns), planes that the decoder has; two-sided ones mirrored where ``turned``.
        turned: uint8 (rows, columns), 1 for symbols that are coded mirrored; no rows if none are.
        fine: uint8 (n, 256), classes of a side's levels, below `FINE_CLASSES`.
        coarse: uint8 (n, 256), fewer of them, below `COARSE_CLASSES`.
        side_magnitudes: uint8 (256,), those of the first side.
        warm: uint8 (rows or 0, columns), the plane from which the directions are learned first.
        warm_values: int32 (256,), what its levels stand for.
        low_rank: whether values are predicted at all.
        scale: predictions (1/4) times this are coarse buckets in 1/65536.
        places: int32 (256,), where in its level's cell, in 1/256, a value is by the first side.
        unit: predictions (1/4) times this are levels in 1/65536; 0 where they are not added to places.
        mean: mean magnitude of the plane in 1/256, at least 1.
        activities: uint8 (512,), class of an activity in 1/64.
        around: uint8 (25,), class of a sum of 8 magnitudes.
    """

    values: Int32s
    magnitudes: UInt8s
    sides: UInt8s
    turned: UInt8s
    fine: UInt8s
    coarse: UInt8s
    side_magnitudes: UInt8s
    warm: UInt8s
    warm_values: Int32s
    low_rank: bool
    scale: int
    places: Int32s
    unit: int
    mean: int
    activities: UInt8s
    around: UInt8s


class Tracker(NamedTuple):
    """The moving part of a chunk's contexts: directions of the low-rank prediction, and activity so far."""

    directions: Int32s
    by_column: Int32s
    gains: Int32s
    strengths: Int64s
    powers: Int64s
    block: Int32s
    u: Int32s
    magnitudes: UInt8s
    """(2, columns + 3): the row above and the current one, two columns of zeros before and one behind."""
    columns: Int32s
    """(columns,), decayed mean magnitude of each column in 1/256."""
    around: UInt8s
    """(columns,), classes of the first side's neighbourhood in this row."""
    shares: Int64s
    """(columns,), 2^28 / ((column + 8) * mean)."""
    relative: Integer
    """2^22 / mean."""
    room: Room
    """That of `advance`."""


@jit_part
def new_tracker(scene: Scene, columns: int) -> Tracker:
    """The state before the first row."""
    width = columns if scene.low_rank else 0
    t = Tracker(
        np.empty((RANK, width), dtype=np.int32),
        np.empty((width, RANK), dtype=np.int32),
        np.empty((width, RANK), dtype=np.int32),
        np.empty(RANK, dtype=np.int64),
        np.empty(RANK + 1, dtype=np.int64),
        np.empty((BLOCK_ROWS, width), dtype=np.int32),
        np.zeros(RANK, dtype=np.int32),
        np.zeros((2, columns + 3), dtype=np.uint8),
        np.full(columns, scene.mean, dtype=np.int32),
        np.zeros(columns, dtype=np.uint8),
        (np.int64(1) << 28) // ((np.arange(columns) + 8) * scene.mean),
        (np.int64(1) << 22) // scene.mean,
        Room(
            np.empty((RANK, width), dtype=np.int32),
            np.empty(BLOCK_ROWS, dtype=np.int32),
            np.empty(RANK, dtype=np.int64),
            np.empty(width, dtype=np.int32),
            np.empty(width, dtype=np.int64),
        ),
    )
    if scene.low_rank:
        _warm(scene, t)
    return t


@jit_part
def _warm(scene: Scene, t: Tracker) -> None:
    """Learn directions from every row of the plane that the scene names."""
    start_directions(t.directions, t.strengths, t.powers)
    for start in range(0, scene.warm.shape[0], BLOCK_ROWS):
        n = min(BLOCK_ROWS, scene.warm.shape[0] - start)
        for i in range(n):
            for j in range(t.directions.shape[1]):
                t.block[i, j] = scene.warm_values[scene.warm[start + i, j]]
        advance(t.block[:n], t.directions, t.strengths, t.powers, t.room)
    refresh(t.directions, t.powers, t.by_column, t.gains)


@jit_part
def start_row(scene: Scene, t: Tracker, row: int) -> None:
    """Prepare for a row: every symbol before it has been seen."""
    t.u[:] = 0
    t.magnitudes[0] = t.magnitudes[1]
    t.magnitudes[1] = 0
    if scene.sides.shape[0]:
        neighbourhood(scene.side_magnitudes, scene.sides[0], row, scene.around, t.around)


@jit_part
def look(
    columns: Int32s, shares: Int64s, relative: Integer, mean: int, j: int, so_far: Integer
) -> tuple[Integer, Integer, Integer]:
    """Activity, in 1/64 and below 512, of column ``j``, of the row, whose magnitudes sum to ``so_far``, and of both."""
    column = clamp(np.int64(columns[j]) * relative >> 16, 0, 511)
    row = clamp(((so_far << 8) + 8 * mean) * shares[j] >> 22, 0, 511)
    return column, row, clamp(column * row >> 6, 0, 511)


@jit_part
def neighbour_activity(above: UInt8s, here: UInt8s, j: int) -> Integer:
    """How busy the coded neighbours are, below `NEIGHBOURS`."""
    near = np.int64(here[j + 1]) + np.int64(above[j + 2])
    return 2 * near + np.int64(here[j]) + np.int64(above[j + 1]) + np.int64(above[j + 3])


@jit_part
def see(here: UInt8s, columns: Int32s, row: int, j: int, magnitude: Integer) -> None:
    """Take in a magnitude of the current row."""
    here[j + 2] = magnitude
    if row >= 14:
        columns[j] += ((magnitude << 8) - columns[j]) >> 4
    else:
        columns[j] += ((magnitude << 8) - columns[j]) // (row + 2)


@jit_part
def end_row(scene: Scene, t: Tracker, row: int) -> None:
    """Learn directions from every `BLOCK_ROWS` rows."""
    if scene.low_rank and row % BLOCK_ROWS == BLOCK_ROWS - 1:
        advance(t.block, t.directions, t.strengths, t.powers, t.room)
        refresh(t.directions, t.powers, t.by_column, t.gains)


@jit_part
def bucket(prediction: Integer, scale: int, limit: int) -> Integer:
    """Bucket 0 to 2 * limit of a prediction."""
    found: Integer = clamp((prediction * scale + 32768) >> 16, -limit, limit) + limit
    return found


@jit_allocating
def measure(scene: Scene, plane: UInt8s) -> tuple[Integer, Integer]:
    """Mean squares of predictions and of their errors over a plane (rows, columns), in 1/16."""
    rows, columns = plane.shape
    t = new_tracker(scene, columns)
    u, by_column, gains, block, values = t.u, t.by_column, t.gains, t.block, scene.values
    of_predictions = of_errors = np.int64(0)
    for i in range(rows):
        u[:] = 0
        current = block[i % BLOCK_ROWS]
        for j in range(columns):
            p = predict(u, by_column, j)
            current[j] = values[plane[i, j]]
            x = np.int64(current[j]) << 2
            correct(u, gains, j, x - p)
            of_predictions += p * p
            of_errors += (x - p) * (x - p)
        end_row(scene, t, i)
    count = max(rows * columns, 1)
    return of_predictions // count, of_errors // count


@jit_part
def neighbourhood(magnitudes: UInt8s, plane: UInt8s, row: int, levels: UInt8s, out: UInt8s) -> None:
    """For each column the class of the sum of magnitudes of the 8 neighbours at ``row`` of a plane (rows, columns).

    Validated by the caller: levels of ``plane`` index ``magnitudes``, sums up to 24 index ``levels``.
    """
    rows, columns = plane.shape
    left = centre = np.int64(0)
    for j in range(-1, columns):
        right = np.int64(0)
        if j + 1 < columns:
            for i in range(max(row - 1, 0), min(row + 2, rows)):
                right += magnitudes[plane[i, j + 1]]
        if j >= 0:
            out[j] = levels[left + centre + right - magnitudes[plane[row, j]]]
        left, centre = centre, right


@jit
def turn(levels: UInt8s, alphabets: Int64s, turned: UInt8s) -> None:
    """Mirror the levels of sides (n, symbols) wherever the first one's is in the lower half, and note where in ``turned``.

    Validated by the caller: levels are below ``alphabets``, which are 0 for sides that are not two-sided, but never the first.
    """
    last = np.uint8(alphabets[0] - 1)
    first = levels[0]
    for i in range(first.size):
        other = np.uint8(last - first[i])
        turned[i] = first[i] < other
        first[i] = max(first[i], other)
    for s in range(1, levels.shape[0]):
        if alphabets[s]:
            side, last = levels[s], np.uint8(alphabets[s] - 1)
            for i in range(side.size):
                side[i] = np.uint8(last - side[i]) if turned[i] else side[i]


@jit
def turn_symbols(symbols: UInt8s, turned: UInt8s, start: int, stop: int, last: int) -> None:
    """Mirror those symbols from ``start`` to ``stop`` that are turned, 0 to ``last`` among themselves; its own inverse."""
    for i in range(start, stop):
        mirrored = np.uint8(last - symbols[i])
        symbols[i] = mirrored if turned[i] and symbols[i] <= last else symbols[i]
