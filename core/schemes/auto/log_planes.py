"""What a reader keeps of `shrinkpoint.schemes.auto.log_levels`, in half of the memory that its plane takes."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Int8s, Int16s, Int32s
from shrinkpoint.schemes.auto.log_residuals import NONE, offsets_in, parts_of
from shrinkpoint.schemes.base import PackedPlanes, Planes, bytes_in_memory

__all__ = ["LogPlanes"]

_PLANE = "exponent"
_LEVELS = "levels"
_ZERO, _FARTHEST = np.int8(-128), 127


class LogPlanes(PackedPlanes):
    """The plane ``exponent``, made anew whenever it is read: of levels in one byte each, and their dither.

    Where levels are too far apart for a byte, or exponents do not lie on them, as where they are clipped, it is kept as it is.

    Args:
        exponents: int16 (n,), in sixteenths of an octave, `NONE` for zeros.
        step: distance of two levels.
        seed: of the dither.
    """

    def __init__(self, exponents: Int16s, step: int, seed: int) -> None:
        self._step, self._seed, self._middle = step, seed, 0
        self._size = exponents.size
        levels = self._packed(exponents)
        self._parts: Mapping[str, npt.NDArray[Any]] = (
            {_PLANE: exponents} if levels is None else {_LEVELS: levels}
        )

    def _packed(self, exponents: Int16s) -> Int8s | None:
        lowest, highest = 2**15, -(2**15)
        for part in parts_of(exponents.size):
            levels = self._levels_of(exponents, part)[exponents[part] != NONE]
            if levels.size:
                lowest, highest = min(lowest, int(levels.min())), max(highest, int(levels.max()))
        if highest - lowest > 2 * _FARTHEST:
            return None
        self._middle = (lowest + highest) // 2 if lowest <= highest else 0
        packed = np.empty(exponents.size, np.int8)
        for part in parts_of(exponents.size):
            levels = self._levels_of(exponents, part) - self._middle
            packed[part] = np.where(exponents[part] == NONE, _ZERO, levels)
            if not np.array_equal(self._exponents_of(packed, part), exponents[part]):
                return None
        return packed

    def _levels_of(self, exponents: Int16s, part: slice) -> Int32s:
        offsets = offsets_in(self._seed, part, self._step)
        levels: Int32s = (exponents[part].astype(np.int32) - offsets) // self._step
        return levels

    def _exponents_of(self, levels: Int8s, part: slice) -> Int16s:
        offsets = offsets_in(self._seed, part, self._step)
        exponents = (levels[part].astype(np.int32) + self._middle) * self._step + offsets
        return np.where(levels[part] == _ZERO, NONE, exponents).astype(np.int16)

    def _unpacked(self, levels: Int8s) -> Int16s:
        found = np.empty(levels.size, np.int16)
        for part in parts_of(levels.size):
            found[part] = self._exponents_of(levels, part)
        return found

    @property
    def size(self) -> int:
        """See `PackedPlanes.size`."""
        return self._size

    @property
    def nbytes(self) -> int:
        """See `PackedPlanes.nbytes`."""
        return bytes_in_memory(self._parts)

    def moved(self, move: Callable[[Planes], Planes]) -> "LogPlanes":
        """See `PackedPlanes.moved`."""
        made = copy.copy(self)
        made._parts = move(self._parts)
        return made

    def __getitem__(self, name: str) -> Int16s:
        if name != _PLANE:
            raise KeyError(name)
        if _LEVELS in self._parts:
            return self._unpacked(self._parts[_LEVELS])
        exponents: Int16s = self._parts[_PLANE]
        return exponents

    def __iter__(self) -> Iterator[str]:
        return iter((_PLANE,))

    def __len__(self) -> int:
        return 1
