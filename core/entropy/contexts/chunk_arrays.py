"""The arrays on which the kernels of entropy/contexts/segment_kernels.py work, one set for each chunk.

They are made here, since kernels that make arrays take several times as long to compile. Importing this module imports
numba, so it is only ever imported from inside a function of its callers.
"""

from typing import Any

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, UInt8s
from shrinkpoint.entropy.contexts import segment_kernels
from shrinkpoint.entropy.contexts.feature_kernels import BLOCK_ROWS
from shrinkpoint.entropy.contexts.lowrank_kernels import Room, start_directions
from shrinkpoint.entropy.contexts.segment_kernels import LEVELS, Rows
from shrinkpoint.entropy.contexts.segment_lowrank_kernels import SEGMENT, SEGMENT_RANK, LowRankState

__all__ = ["new_low_rank_state", "new_rows", "side_cells"]


def new_rows(scene: Any, columns: int, low_rank: bool) -> Rows:
    """Before the first row of a plane of so many columns; ``scene`` is a `feature_kernels.Scene`."""
    padded = -(-columns // SEGMENT) * SEGMENT
    return Rows(
        low_rank=new_low_rank_state(columns, low_rank, scene.warm, scene.warm_values),
        cells=np.zeros(padded, np.int32),
        busy=np.full(padded, 4 * scene.mean, np.int32),
        activity=np.zeros(padded, np.int32),
        magnitudes=np.zeros(padded, np.int32),
        places=np.zeros(padded, np.int32),
        signs=np.ones(padded, np.int32),
        octaves=segment_kernels.OCTAVES,
        kinds=segment_kernels.PLACES,
    )


def side_cells(scene: Any, strides: Int64s) -> Int32s:
    """int32 (sides, 256): what a level of each side plane of a `feature_kernels.Scene` adds to a cell."""
    of_sides = strides[len(LEVELS) : len(LEVELS) + scene.sides.shape[0]]
    cells: Int32s = (scene.fine[: of_sides.size].astype(np.int64) * of_sides[:, None]).astype(np.int32)
    return cells


def new_low_rank_state(
    width: int, low_rank: bool, warm: UInt8s | None = None, warm_values: Int32s | None = None
) -> LowRankState:
    """Before the first row of so many columns; empty without low-rank prediction."""
    tracked = -(-width // SEGMENT) if low_rank else 0
    directions, strengths, powers = _directions(width, tracked)
    return LowRankState(
        directions=directions,
        parts=directions.reshape(SEGMENT_RANK, tracked, SEGMENT),
        strengths=strengths,
        powers=powers,
        block=np.zeros((BLOCK_ROWS, tracked * SEGMENT), np.int32),
        trust=np.zeros((tracked, SEGMENT_RANK, SEGMENT_RANK)),
        precision=np.zeros((SEGMENT_RANK, SEGMENT_RANK)),
        room=_room(tracked),
        u=np.zeros(SEGMENT_RANK),
        rounded=np.zeros(SEGMENT_RANK, np.int32),
        prediction=np.zeros(SEGMENT, np.int32),
        values=np.zeros(SEGMENT, np.int32),
        warm=np.zeros((0, width), np.uint8) if warm is None else warm,
        warm_values=np.zeros(0, np.int32) if warm_values is None else warm_values,
    )


def _directions(columns: int, tracked: int) -> tuple[Int32s, Int64s, Int64s]:
    """Directions of so many segments, zero behind the columns, their strengths and powers."""
    directions = np.zeros((SEGMENT_RANK, tracked * SEGMENT), np.int32)
    strengths, powers = np.zeros(SEGMENT_RANK, np.int64), np.zeros(SEGMENT_RANK + 1, np.int64)
    if tracked:
        start_directions(directions, strengths, powers)
        directions[:, columns:] = 0
    return directions, strengths, powers


def _room(tracked: int) -> Room:
    return Room(
        grown=np.empty((SEGMENT_RANK, tracked * SEGMENT), np.int32),
        coefficients=np.empty(BLOCK_ROWS, np.int32),
        shifts=np.empty(SEGMENT_RANK, np.int64),
        total=np.empty(tracked * SEGMENT, np.int32),
        sums=np.empty(tracked * SEGMENT, np.int64),
    )
