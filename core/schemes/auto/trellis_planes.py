"""What a reader keeps of trellis-coded weights, in less than half of the memory that its planes take.

A value is made of its point again, an element's exponent of its row's and its column's: both are the very numbers that they
were, for every element's value is its own (`shrinkpoint.schemes.auto.trellis_points.Grid`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Float32s, Indices, Int8s, Int16s, UInt8s
from shrinkpoint.schemes.auto.row_and_column_steps import join_exponents, split_exponents
from shrinkpoint.schemes.auto.trellis_points import Grid
from shrinkpoint.schemes.base import PackedPlanes, Planes, bytes_in_memory
from shrinkpoint.schemes.codec_io import matrix_shape

__all__ = ["KeptRows", "TrellisPlanes"]


@dataclass(frozen=True)
class KeptRows:
    """Rows of a matrix that lie on the points of earlier checkpoints."""

    rows: Indices
    values: Float32s
    """(rows, columns)."""


class TrellisPlanes(PackedPlanes):
    """The planes ``value``, ``exponent`` and ``offset``, the first two of which are made anew whenever they are read.

    Args:
        grid: that the points are on.
        points: int16 (n,), in half steps from 0; of any number in rows that are kept.
        offsets: int8 (n,), as `TrellisReference.offsets`.
        shape: of the tensor.
        kept: rows that do not lie on this grid.
    """

    def __init__(
        self,
        grid: Grid,
        points: Int16s,
        offsets: Int8s,
        shape: tuple[int, ...],
        kept: KeptRows | None = None,
    ) -> None:
        self._matrix = matrix_shape(shape)
        self._step, self._seed = grid.step, grid.seed
        rows, columns = split_exponents(grid.exponents, self._matrix)
        self._size = points.size
        self._parts: Mapping[str, npt.NDArray[Any]] = {
            "points": _narrow(points),
            "offsets": offsets,
            "rows": rows,
            "columns": columns,
            **({"kept": kept.rows, "values": kept.values} if kept is not None else {}),
        }

    @property
    def size(self) -> int:
        """See `PackedPlanes.size`."""
        return self._size

    @property
    def nbytes(self) -> int:
        """See `PackedPlanes.nbytes`."""
        return bytes_in_memory(self._parts)

    def moved(self, move: Callable[[Planes], Planes]) -> "TrellisPlanes":
        """See `PackedPlanes.moved`."""
        made = copy.copy(self)
        made._parts = move(self._parts)
        return made

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return _MAKE[name](self)

    def __iter__(self) -> Iterator[str]:
        return iter(_MAKE)

    def __len__(self) -> int:
        return len(_MAKE)

    def exponents(self) -> UInt8s:
        """Of each element."""
        return join_exponents(self._parts["rows"], self._parts["columns"])

    def values_of_points(self) -> Float32s:
        """What was restored, before it was rounded to the tensor's dtype."""
        grid = Grid(step=self._step, exponents=self.exponents(), seed=self._seed)
        values = grid.values(self._parts["points"].astype(np.int16, copy=False))
        if "kept" in self._parts:
            values.reshape(self._matrix)[self._parts["kept"]] = self._parts["values"]
        return values

    def offsets(self) -> Int8s:
        """How far from its value each weight is expected, in 1/64 step."""
        offsets: Int8s = self._parts["offsets"]
        return offsets


_MAKE: Mapping[str, Callable[[TrellisPlanes], npt.NDArray[Any]]] = {
    "value": TrellisPlanes.values_of_points,
    "exponent": TrellisPlanes.exponents,
    "offset": TrellisPlanes.offsets,
}


def _narrow(points: Int16s) -> Int16s | Int8s:
    """The same numbers in one byte each, where that can hold them."""
    fits = int(points.min(initial=0)) >= -128 and int(points.max(initial=0)) <= 127
    return points.astype(np.int8) if fits else points
