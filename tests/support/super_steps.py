"""LC-Checkpoint's super-steps, which this library reads and does not write."""

from collections.abc import Sequence

import numpy as np

from shrinkpoint.entropy.static.huffman import encode_huffman
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.schemes.published.lc_checkpoint import LCCheckpointWeightCodec, _counts, _steps
from shrinkpoint.state.training import TensorSpec


def merge_super_step(deltas: Sequence[EncodedTensor], spec: TensorSpec) -> EncodedTensor:
    """Consecutive deltas of one weight, oldest first, as a single one against the first one's predecessor.

    Symbols are merged, not values: a sum of differences would round differently from adding them one after another.
    """
    counts = [count for delta in deltas for count in _counts(delta, spec)]
    steps = [step for delta in deltas for step in _steps(delta, spec)]
    if len(steps) == 1:
        return deltas[0]
    joint = np.ravel_multi_index([ranks for ranks, _ in steps], counts).astype(np.int64)
    tables = np.concatenate([table for _, table in steps]).astype("<f4").tobytes()
    sections = {"representatives": tables, "ranks": encode_huffman(joint)}
    return EncodedTensor(LCCheckpointWeightCodec.id, {"symbols": counts}, sections, uses_reference=True)
