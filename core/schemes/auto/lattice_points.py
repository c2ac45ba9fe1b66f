"""The lattice of one tensor: its points, and what is known of where a weight will be on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shrinkpoint.arrays import Float32s, Int8s, Int16s, UInt8s
from shrinkpoint.entropy.contexts.coder import Side
from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.quantize.dither import EDGE_CLASSES, EDGE_PLACES, SEEDS, dither_edges, edge_table
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.schemes.codec_io import integer, number, plane_of
from shrinkpoint.state.training import TensorSpec

__all__ = [
    "FARTHEST",
    "MAX_EXPONENT",
    "QUARTERS",
    "Lattice",
    "LatticePrediction",
    "LatticeReference",
    "join_exponents",
    "split_exponents",
]


MAX_EXPONENT = 32
"""Quarter octaves that a row or a column may change the step by, each way."""

FARTHEST = 30_000
"""Indices beyond this one show a step that is far too small for the tensor."""

_EXPONENTS = 4 * MAX_EXPONENT + 1
_HALVES = 12  # half steps to each side of zero that are distinguished
# 2 ** (k / 4), written out: a library's power function may differ by a rounding from one machine to another
QUARTERS = np.array([1.0, 1.1892071, 1.4142135, 1.6817929], np.float32)

_AGES = 8  # that histories distinguish
_UNKNOWN, _DOWN, _UP = (
    _AGES,
    0,
    2 * _AGES,
)  # 16: has just moved up, 9: did long ago, 8: not known; 7 to 0 for down
_AGE_OF_EDGE = (
    1,
    1,
    1,
    1,
    1,
    2,
    2,
    3,
    4,
    7,
)  # as near to the border as after so many checkpoints since crossing it


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """All points that one tensor's elements may be restored to."""

    step: np.float32
    exponents: UInt8s
    """Quarter octaves of each element's step above ``step / 2 ** 16``."""
    seed: int

    def nearest(self, values: Float32s, spec: TensorSpec) -> Int16s:
        """The index of the point nearest to each value.

        Raises:
            CannotRepresentError: one is beyond `FARTHEST`.
        """
        from shrinkpoint.quantize import dither_kernels  # numba

        index = np.empty(values.size, np.int16)
        if not dither_kernels.nearest(values, self.exponents, self._quarters(), self.seed, FARTHEST, index):
            raise CannotRepresentError(f"{spec.name}: the step {self.step} is too small for its values")
        return index

    def points(self, index: Int16s) -> Float32s:
        """The values that indices stand for: two IEEE operations each."""
        from shrinkpoint.quantize import dither_kernels  # numba

        values = np.empty(index.size, np.float32)
        dither_kernels.points(index, self.exponents, self._quarters(), self.seed, values)
        return values

    def prediction(self, reference: "LatticeReference | None") -> "LatticePrediction":
        """What is known of each index before it is read."""
        from shrinkpoint.quantize import dither_kernels  # numba

        size = self.exponents.size
        if reference is None:
            classes = dither_edges(self.seed, size)
            sides = (Side(classes, EDGE_CLASSES, two_sided=True), Side(self.exponents, _EXPONENTS))
            return LatticePrediction(np.zeros(size, np.int16), classes, _all_unknown(), sides)
        if self._is(reference):
            predicted, known, table = reference.index, reference.history, _aged()
            first = Side(known, 2 * _AGES + 1, two_sided=True)
        else:
            predicted, known, table = np.empty(size, np.int16), np.empty(size, np.uint8), _from_edges()
            before = reference.points(reference.index)
            dither_kernels.carry(
                before, self.exponents, self._quarters(), self.seed, FARTHEST, edge_table(), predicted, known
            )
            first = Side(known, EDGE_CLASSES, EDGE_PLACES, two_sided=True)
        values = np.empty(size, np.uint8)
        dither_kernels.halves(predicted, self.seed, _HALVES, values)
        return LatticePrediction(
            predicted, known, table, (first, Side(values, 2 * _HALVES + 1, two_sided=True))
        )

    def has_steps_of(self, other: "Lattice") -> bool:
        """Whether every element's step is the same in both."""
        return self.step == other.step and np.array_equal(self.exponents, other.exponents)

    def _is(self, other: "Lattice") -> bool:
        return self.seed == other.seed and self.has_steps_of(other)

    def _quarters(self) -> Float32s:
        steps: Float32s = self.step * QUARTERS
        return steps


@dataclass(frozen=True, kw_only=True)
class LatticeReference(Lattice):
    """A checkpoint's lattice, and where on it the weights are."""

    index: Int16s
    history: UInt8s
    """How each weight came there, 0 to 16; 8 where that is not known."""

    @classmethod
    def of(cls, reference: ReferenceState | None, spec: TensorSpec) -> "LatticeReference | None":
        """A tensor's reference, or None if that is not of its size."""
        planes = [plane_of(reference, name, spec) for name in ("index", "exponent", "history")]
        if reference is None or any(plane is None for plane in planes):
            return None
        return cls(
            step=number(reference.params, spec, "step"),
            seed=integer(reference.params, spec, "seed", 0, SEEDS - 1),
            index=np.asarray(planes[0], np.int16),
            exponents=np.asarray(planes[1], np.uint8),
            history=np.asarray(planes[2], np.uint8),
        )


@dataclass(frozen=True)
class LatticePrediction:
    """What encoder and decoder know of the indices before these are coded."""

    predicted: Int16s
    """Where each weight is if it has not moved."""
    known: UInt8s
    """Its history, or the class of its place where the lattice is another one."""
    table: UInt8s
    """uint8 (256,): the history of a weight that has not moved, by what was known."""
    sides: Sequence[Side]
    """The coder's side planes."""

    def history(self, index: Int16s) -> UInt8s:
        """Each weight's history after it is seen at its index."""
        from shrinkpoint.quantize import dither_kernels  # numba

        if self.table is _all_unknown():
            return np.full(index.size, _UNKNOWN, np.uint8)
        out = np.empty(index.size, np.uint8)
        dither_kernels.remember(index, self.predicted, self.known, self.table, _DOWN, _UP, out)
        return out


def join_exponents(rows: Int8s, columns: Int8s) -> UInt8s:
    """`Lattice.exponents` from those of rows and columns, each from -`MAX_EXPONENT` to `MAX_EXPONENT`."""
    shifted = (rows.astype(np.int16) + 2 * MAX_EXPONENT).astype(np.uint8)
    # in eight bits: what wraps there is back in range with the sum
    total: UInt8s = np.add(shifted[:, None], columns.view(np.uint8)[None, :])
    return total.reshape(-1)


def split_exponents(exponents: UInt8s, shape: tuple[int, int]) -> tuple[Int8s, Int8s]:
    """Exponents of rows and columns that `join_exponents` makes these of."""
    matrix = exponents.reshape(shape)
    first, columns = matrix[:, 0].astype(np.int64), matrix[0].astype(np.int64) - 2 * MAX_EXPONENT
    rows = first - first[0]
    # any number may be moved from the columns to the rows, as long as both stay within reach
    moved = max(-MAX_EXPONENT - int(rows.min()), int(columns.max()) - MAX_EXPONENT)
    return (rows + moved).astype(np.int8), (columns - moved).astype(np.int8)


@lru_cache(maxsize=1)
def _all_unknown() -> UInt8s:
    return np.full(256, _UNKNOWN, np.uint8)


@lru_cache(maxsize=1)
def _aged() -> UInt8s:
    """Histories one checkpoint later; the oldest stay."""
    table = np.full(256, _UNKNOWN, np.int64)
    for age in range(1, _AGES + 1):
        older = min(age + 1, _AGES)
        table[_UP + 1 - age], table[_DOWN - 1 + age] = _UP + 1 - older, _DOWN - 1 + older
    return table.astype(np.uint8)


@lru_cache(maxsize=1)
def _from_edges() -> UInt8s:
    """The history of what is near a border: as if it had crossed that one from without."""
    table = np.full(256, _UNKNOWN, np.int64)
    for near, age in enumerate(_AGE_OF_EDGE):
        table[near], table[EDGE_CLASSES - 1 - near] = _UP + 1 - age, _DOWN - 1 + age
    return table.astype(np.uint8)
