"""The compiled back end of effort ``max``: a plane symbol by symbol, its contexts mixed (entropy/contexts/mixer_kernels.py).

Importing this module imports numba, so it is only ever imported from inside a function of its callers.
"""

import numpy as np

from shrinkpoint.arrays import Int64s, Integer, UInt8s
from shrinkpoint.entropy.contexts.feature_kernels import (
    ACTIVITIES,
    AROUND,
    BLOCK_ROWS,
    COARSE,
    FINE,
    NEIGHBOURS,
    Scene,
    bucket,
    end_row,
    look,
    neighbour_activity,
    new_tracker,
    see,
    start_row,
)
from shrinkpoint.entropy.contexts.lowrank_kernels import correct, predict
from shrinkpoint.entropy.contexts.mixer_kernels import (
    BROAD,
    Decisions,
    Logits,
    code_symbol,
    finish,
    new_mixer,
)
from shrinkpoint.entropy.range_coder_kernels import new_coder
from shrinkpoint.runtime.jit import jit_allocating, jit_part

__all__ = ["COARSE_CLASSES", "FINE_CLASSES", "code_chunk"]

FINE_CLASSES, COARSE_CLASSES = 48, 16
"""Classes of a side's levels alone, and with another context."""


@jit_part
def _inputs(n_sides: int) -> int:
    return 5 + 2 * n_sides


@jit_part
def _context_count(n_sides: int) -> int:
    """How many contexts all inputs have together; the order is that of :func:`_set_contexts`."""
    coarse = 2 * COARSE + 1
    total = 2 + 2 * FINE + coarse * ACTIVITIES * 4 + NEIGHBOURS * AROUND + ACTIVITIES * ACTIVITIES
    total += n_sides * coarse * FINE_CLASSES
    if n_sides:
        total += ACTIVITIES * FINE_CLASSES + (n_sides - 1) * COARSE_CLASSES * COARSE_CLASSES
    return total


@jit_part
def _set_contexts(
    scene: Scene,
    near: Integer,
    around: Integer,
    activities: tuple[Integer, Integer, Integer],
    prediction: Integer,
    magnitude: Integer,
    row: int,
    j: int,
    bases: Int64s,
) -> None:
    """Point every input but the first, which has none, to the first slot of its context."""
    sides, fine, classes = scene.sides, scene.fine, scene.coarse
    coarse = bucket(prediction, scene.scale, COARSE)
    column, busy, both = activities
    bases[1] = 1 + bucket(prediction, 2 * scene.scale, FINE)
    at = 2 + 2 * FINE
    bases[2] = at + (coarse * ACTIVITIES + both) * 4 + magnitude
    at += (2 * COARSE + 1) * ACTIVITIES * 4
    bases[3] = at + near * AROUND + around
    at += NEIGHBOURS * AROUND
    bases[4] = at + column * ACTIVITIES + busy
    at += ACTIVITIES * ACTIVITIES
    for s in range(sides.shape[0]):
        level = sides[s, row, j]
        kind = np.int64(fine[s, level])
        bases[5 + 2 * s] = at + coarse * FINE_CLASSES + kind
        at += (2 * COARSE + 1) * FINE_CLASSES
        if s == 0:
            bases[6] = at + both * FINE_CLASSES + kind
            at += ACTIVITIES * FINE_CLASSES
        else:
            first = np.int64(classes[0, sides[0, row, j]])
            bases[6 + 2 * s] = at + first * COARSE_CLASSES + classes[s, level]
            at += COARSE_CLASSES * COARSE_CLASSES


@jit_allocating
def code_chunk(
    scene: Scene, tree: Decisions, logits: Logits, plane: UInt8s, stream: UInt8s, decoding: bool
) -> Integer:
    """Encode ``plane`` (rows, columns) into ``stream``, or fill it from there.

    Validated by the caller: when encoding, every symbol of the plane is one of the tree; at most 3 sides.

    Returns:
        Bytes used, which may be more than ``stream`` has: what was written is then incomplete.
    """
    rows, columns = plane.shape
    nodes, n_sides = tree.start.size, scene.sides.shape[0]
    t = new_tracker(scene, columns)
    u, by_column, gains, block, busy = t.u, t.by_column, t.gains, t.block, t.columns
    above, here, around, shares = t.magnitudes[0], t.magnitudes[1], t.around, t.shares
    values, magnitudes, activities = scene.values, scene.magnitudes, scene.activities
    low_rank = scene.low_rank
    kinds = max(FINE_CLASSES, 2 * COARSE + 1)
    mixer = new_mixer(tree, logits.squash, _context_count(n_sides), _inputs(n_sides), kinds)
    coder = new_coder(stream, decoding)
    prediction = np.int64(0)
    for i in range(rows):
        start_row(scene, t, i)
        so_far = np.int64(0)
        current = block[i % BLOCK_ROWS]
        for j in range(columns):
            if low_rank:
                prediction = predict(u, by_column, j)
            column, row, both = look(busy, shares, t.relative, scene.mean, j, so_far)
            found = np.int64(activities[column]), np.int64(activities[row]), np.int64(activities[both])
            kind, magnitude = bucket(prediction, scene.scale, COARSE), np.int64(here[j + 1])
            if n_sides:
                level = scene.sides[0, i, j]
                kind, magnitude = np.int64(scene.fine[0, level]), np.int64(scene.side_magnitudes[level])
            near = neighbour_activity(above, here, j)
            _set_contexts(scene, near, np.int64(around[j]), found, prediction, magnitude, i, j, mixer.bases)
            for k in range(mixer.bases.size):
                mixer.bases[k] *= nodes
            chosen = bucket(prediction, scene.scale >> 1, BROAD)
            symbol = np.int64(plane[i, j])
            symbol = code_symbol(mixer, tree, logits, kind, chosen, coder, stream, decoding, symbol)
            plane[i, j] = symbol
            magnitude = np.int64(magnitudes[plane[i, j]])
            see(here, busy, i, j, magnitude)
            so_far += magnitude
            if low_rank:
                current[j] = values[plane[i, j]]
                correct(u, gains, j, (np.int64(current[j]) << 2) - prediction)
        end_row(scene, t, i)
    if not decoding:
        finish(coder, stream)
    return np.int64(coder[3])
