"""The arrays on which the kernels of entropy/trellis/context_kernels.py work, one set for each chunk.

See `shrinkpoint.entropy.contexts.chunk_arrays`. Importing this module imports numba, so it is only ever imported from inside a
function of its callers.
"""

import numpy as np

from shrinkpoint.entropy.contexts.chunk_arrays import new_low_rank_state
from shrinkpoint.entropy.contexts.segment_lowrank_kernels import SEGMENT
from shrinkpoint.entropy.trellis.context_kernels import OCTAVES, Row, Work
from shrinkpoint.entropy.trellis.margin_kernels import MARGINS, Margins, Scene

__all__ = ["new_work"]


def new_work(scene: Scene, tables: int = 0, stride: int = 1) -> Work:
    """Before the first row of a chunk.

    Args:
        scene: the chunk.
        tables: under how many its symbols are coded; encoders need none.
        stride: what a class of margins adds to a cell.
    """
    segments = -(-scene.width // SEGMENT)
    columns, states = segments * SEGMENT, scene.states
    classes = np.minimum(np.arange(256) & 127, MARGINS - 1)
    return Work(
        margins=Margins(
            y=np.zeros(columns, np.int32),
            squares=np.zeros((4, SEGMENT, segments + 1), np.int32),
            paths=np.zeros((2, states, segments), np.int32),
            ahead=np.zeros((states, columns if scene.low_rank else 0), np.int32),
            packed=np.zeros((states // 4, segments), np.int32),
            found=np.zeros((states // 4, columns), np.int32),
            shift=np.zeros(SEGMENT, np.int32),
        ),
        row=Row(
            cells=np.zeros(columns, np.int32),
            busy=np.full(columns, scene.mean, np.int32),
            activity=np.zeros(columns, np.int32),
            energies=np.zeros(columns, np.int32),
        ),
        low_rank=new_low_rank_state(scene.width, scene.low_rank),
        counters=np.zeros((2, tables), np.int32),
        by_margin=(classes * stride).astype(np.int32),
        path=np.zeros(SEGMENT, np.int32),
        ranked=np.zeros(SEGMENT, np.int32),
        reached=np.zeros(SEGMENT, np.int16),
        octaves=OCTAVES,
    )
