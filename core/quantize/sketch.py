"""Sketches of weights and scores with a bound on the relative error, built in one pass on any device.

Source: Inshrinkerator (arXiv 2306.11800), Algorithm 1: a DDSketch with geometric buckets that never collapse. The
logarithm per element is replaced by integers: an element's leading float32 bits name a *cell*, cells are counted
where the tensor lives, and a table folds cells into buckets. Counting integers gives the same counts on every device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from shrinkpoint.arrays import Float64s, Int32s, Int64s
from shrinkpoint.errors import CannotRepresentError, FormatError

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

ALPHA = 0.01
"""The relative error of a bucket's value (Inshrinkerator: "a strict relative error bound of 1%")."""
LEAST = 1e-30
"""Smaller magnitudes count as zero."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# On a CPU the working set of a chunk has to stay in cache; elsewhere fewer launches win. Both bound the memory.
_CHUNK_CPU = 1 << 18
_CHUNK_DEVICE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Distinct values, float64 and strictly ascending, and how often each occurs, int64 and positive; equal lengths."""

    values: Float64s
    counts: Int64s


@dataclass(frozen=True, kw_only=True, eq=False)
class _Grid:
    """The buckets of one alpha. Bucket and cell 0 hold everything below the first edge, zero included."""

    shift: int
    """A magnitude's float32 bits, shifted right by this, are its absolute cell."""
    offset: int
    """Absolute cell of cell 0."""
    bucket_of_cell: Int32s
    edges: Float64s
    """Bucket b holds edges[b] <= x < edges[b + 1]; every edge but the last (2^128) is a float32."""
    values: Float64s
    """The representative of each bucket: 0, then the value whose relative error is least over the bucket."""


@lru_cache(maxsize=8)
def _grid(alpha: float) -> _Grid:
    """Lay out cells (2^bits to an octave) and group them into buckets no wider than (1 + alpha) / (1 - alpha)."""
    bits = math.ceil(-math.log2(alpha)) + 3
    shift = 23 - bits
    first = int(np.float32(LEAST).view(np.int32)) >> shift
    cells = np.arange(
        first, (255 << bits) + 1, dtype=np.int64
    )  # the last one is infinity, where finite cells end
    cell_edges = (cells << shift).astype(np.int32).view(np.float32).astype(np.float64)
    cell_edges[-1] = 2.0**128
    # A cell belongs to the bucket of its left edge and may reach over the bucket's right edge by a factor of at most
    # 1 + 2^-bits, so buckets are narrowed by that much; 1e-9 more absorbs the rounding of the logarithm.
    width = math.log((1 + alpha) / (1 - alpha)) - math.log1p(2.0**-bits) - 1e-9
    bucket = 1 + np.floor(np.log(cell_edges[:-1] / cell_edges[0]) / width).astype(np.int32)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(bucket)) + 1, [len(bucket)]))
    edges = np.concatenate(([0.0], cell_edges[starts]))
    lower, upper = edges[1:-1], edges[2:]
    return _Grid(
        shift=shift,
        offset=first - 1,
        bucket_of_cell=np.concatenate((np.zeros(1, np.int32), bucket)),
        edges=edges,
        values=np.concatenate(([0.0], lower * (2 * upper / (lower + upper)))),
    )


class Sketch:
    """Counts of weights, or of scores, in geometric buckets of either sign.

    Args:
        alpha: bound on the relative error, from 0.001 to 0.5.

    Source: Inshrinkerator (arXiv 2306.11800), Algorithms 1 and 2; DDSketch (VLDB 2019), section 2.
    """

    def __init__(self, alpha: float = ALPHA) -> None:
        self._grid = _grid(alpha)
        self.counts: Int64s = np.zeros((2, len(self._grid.values)), dtype=np.int64)
        """Elements per bucket, int64; of positive ones, and of negative ones."""

    def to_json(self) -> list[list[int]]:
        """Bucket and count of all that are not empty, for a message to other ranks."""
        flat = self.counts.reshape(-1)
        buckets = np.flatnonzero(flat)
        return [buckets.tolist(), flat[buckets].tolist()]

    def count_json(self, node: Sequence[Sequence[int]]) -> "Self":
        """Add the elements of another sketch, as its `to_json` gave them, and return this one.

        Raises:
            FormatError: there are no such buckets.
        """
        buckets, counts = (np.asarray(part, dtype=np.int64) for part in node)
        if buckets.shape != counts.shape or (
            buckets.size and not 0 <= buckets.min() <= buckets.max() < self.counts.size
        ):
            raise FormatError("a sketch's buckets are not those of its grid")
        np.add.at(self.counts.reshape(-1), buckets, counts)
        return self

    def add(self, tensor: torch.Tensor) -> "Self":
        """Count the elements of a tensor, and return this sketch.

        Args:
            tensor: float32, bfloat16 or float16, any shape and device. Temporary memory is bounded.

        Raises:
            CannotRepresentError: another dtype, or an element that is not finite; nothing is counted.
        """
        if tensor.dtype not in _FLOATS:
            raise CannotRepresentError(
                f"cannot sketch dtype {tensor.dtype}; float32, bfloat16 and float16 can be"
            )
        flat, grid = tensor.detach().reshape(-1), self._grid
        if flat.numel() == 0:
            return self
        cells = torch.zeros(2 * len(grid.bucket_of_cell), dtype=torch.int64, device=flat.device)
        for chunk in torch.split(flat, _CHUNK_CPU if flat.device.type == "cpu" else _CHUNK_DEVICE):
            found = torch.bincount(_signed_cells(chunk.float(), grid))
            cells[: found.numel()] += found
        per_cell = cells.cpu().numpy().reshape(-1, 2)
        cell, row = per_cell.nonzero()
        np.add.at(self.counts, (row, grid.bucket_of_cell[cell]), per_cell[cell, row])
        return self

    def histogram(self) -> Histogram:
        """Return the occupied buckets: negative ones, zero, positive ones."""
        positive, negative = self.counts
        zero = positive[:1] + negative[:1]
        counts = np.concatenate((negative[:0:-1], zero, positive[1:]))
        values = np.concatenate((-self._grid.values[:0:-1], self._grid.values))
        occupied = counts > 0
        return Histogram(values=values[occupied], counts=counts[occupied])

    def threshold_below(self, share: float) -> float:
        """Return the greatest threshold t with at most ``share * count`` magnitudes below it; `share` is in [0, 1].

        It is an edge of the bucket that holds the quantile, and a float32, so that the count is exact: ties (zeros,
        the few values of a bfloat16 grid) fall on one side together and never take more than the share.
        """
        below = np.concatenate(([0], np.cumsum(self.counts.sum(axis=0))))
        return self._edge(int(np.searchsorted(below, share * int(below[-1]), side="right")) - 1)

    def threshold_above(self, share: float) -> float:
        """Return the least threshold t with at most ``share * count`` magnitudes from it on; infinity where only none fits."""
        above = np.concatenate((np.cumsum(self.counts.sum(axis=0)[::-1])[::-1], [0]))
        return self._edge(int(np.searchsorted(-above, -share * int(above[0]), side="left")))

    def _edge(self, bucket: int) -> float:
        return float(self._grid.edges[bucket]) if bucket < len(self._grid.values) else math.inf


def _signed_cells(chunk: torch.Tensor, grid: _Grid) -> torch.Tensor:
    """Twice the cell of each element of a flat float32 chunk, and one more where it is negative, int32."""
    low, high = torch.stack(torch.aminmax(chunk)).tolist()
    if not (low > -math.inf and high < math.inf):  # also false for NaN, which aminmax propagates
        raise CannotRepresentError(f"cannot sketch values from {low} to {high}: they must be finite")
    bits = chunk.view(torch.int32)
    cells = (bits & 0x7FFF_FFFF).bitwise_right_shift_(grid.shift).sub_(grid.offset).clamp_(min=0)
    return cells.bitwise_left_shift_(1).sub_(bits >> 31)  # an arithmetic shift: -1 if negative
