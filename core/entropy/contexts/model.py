"""What the context coder knows about a plane before its first symbol: the part of the model that stands in the payload.

Everything that decoding depends on is derived with integers from the bytes of a `PlaneModel` and from the side planes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, UInt8s
from shrinkpoint.entropy.contexts.sample import Side
from shrinkpoint.entropy.symbols import count_symbols
from shrinkpoint.entropy.wire import ByteReader
from shrinkpoint.errors import FormatError

__all__ = [
    "MAX_COLUMNS",
    "MAX_SIDES",
    "LevelMeaning",
    "PlaneModel",
    "SidePlane",
    "build_scene",
    "class_map",
    "level_counts",
    "side_levels",
]


MAX_SIDES = 3
"""Side planes that one payload may use."""

MAX_COLUMNS = 1 << 15
"""Columns of a plane that has low-rank prediction, which takes a few hundred bytes for each."""

_TYPICAL = 32  # root mean square of values
_VALUE_LIMIT = 511
_SCALE_LIMIT = 0xFFFF
_MEAN_LIMIT = 3 * 256
_SAMPLE_LOG2 = 16
_UNIT_LIMIT = 1 << 18  # predictions times this are within 32 bits
# Half an octave each, around 64 = as busy as the plane; 0 and the last reach to the ends.
_ACTIVITY_STARTS = (8, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362)
_AROUND_STARTS = (1, 2, 3, 4, 5, 7, 10)


@dataclass(frozen=True)
class LevelMeaning:
    """What the levels of a plane stand for, roughly: they ascend, with zero at ``pivot`` or at level 0.

    Attributes:
        zero_first: level 0 is zero, levels 1 to ``pivot - 1`` are negative, the others positive.
        pivot: the level of zero, or the first positive one.
        scale: units of a value per level, in 1/256; values then have a root mean square near 32.
    """

    zero_first: bool
    pivot: int
    scale: int

    @staticmethod
    def guess(counts: Int64s) -> "LevelMeaning":
        """Zero is the most frequent level; where that is level 0, all others are positive."""
        pivot = int(np.argmax(counts))
        return LevelMeaning(False, pivot, 0).scaled(counts)

    @staticmethod
    def guess_zero_first(counts: Int64s) -> "LevelMeaning | None":
        """The other reading, where it is possible: level 0 apart, and as many negative as positive ones."""
        if counts.size < 5 or counts[0] <= counts[1]:
            return None
        below = np.cumsum(counts[1:])
        pivot = int(np.searchsorted(2 * below, below[-1])) + 2
        return LevelMeaning(True, pivot, 0).scaled(counts) if 3 <= pivot < counts.size else None

    def scaled(self, counts: Int64s) -> "LevelMeaning":
        """The same with the scale that these counts ask for."""
        square = int((counts * self._raw()[: counts.size] ** 2).sum())
        rms = (square / max(int(counts.sum()), 1)) ** 0.5
        scale = min(int(256 * _TYPICAL / rms), _SCALE_LIMIT) if rms else 1
        return LevelMeaning(self.zero_first, self.pivot, max(scale, 1))

    def _raw(self) -> Int64s:
        levels = np.arange(256, dtype=np.int64)
        if not self.zero_first:
            return levels - self.pivot
        raw = np.where(levels < self.pivot, levels - self.pivot, levels - self.pivot + 1)
        raw[0] = 0
        return raw

    def values(self) -> Int32s:
        """int32 (256,), within 511."""
        values = np.clip((self._raw() * self.scale) >> 8, -_VALUE_LIMIT, _VALUE_LIMIT)
        return values.astype(np.int32)

    def magnitudes(self) -> UInt8s:
        """uint8 (256,), 0 for zero, then 1 to 3 in steps of one level, or of 3/4 of the root mean square."""
        unit = max(24 * 256 // self.scale, 1)
        return np.minimum((np.abs(self._raw()) + unit - 1) // unit, 3).astype(np.uint8)

    def write(self, out: bytearray) -> None:
        """Append 4 bytes."""
        out += bytes([self.zero_first, self.pivot]) + self.scale.to_bytes(2, "little")

    @staticmethod
    def read(reader: ByteReader) -> "LevelMeaning":
        """Inverse of :meth:`write`."""
        zero_first, pivot = reader.byte(), reader.byte()
        scale = int.from_bytes(reader.take(2), "little")
        if zero_first > 1 or scale == 0:
            raise FormatError("context payload: the meaning of the levels is malformed")
        return LevelMeaning(bool(zero_first), pivot, scale)


@dataclass(frozen=True)
class SidePlane:
    """A side plane that a payload uses: which of the caller's, and what its levels stand for."""

    index: int
    meaning: LevelMeaning


@dataclass(frozen=True, kw_only=True)
class PlaneModel:
    """The model of one plane.

    Attributes:
        meaning: what its levels stand for.
        sides: the side planes that are contexts, best first, at most `MAX_SIDES`.
        low_rank: whether values are predicted from the directions of the rows before.
        warm: the side plane from which those are learned first; None starts without.
        placed: whether predictions are added to the places that the first side knows.
        mirrored: whether symbols of which the first side says that they are rather negative are coded mirrored.
        scale: predictions (1/4) times this are coarse buckets in 1/65536.
        mean: mean magnitude in 1/256.
    """

    meaning: LevelMeaning
    sides: tuple[SidePlane, ...]
    low_rank: bool
    warm: SidePlane | None
    placed: bool
    mirrored: bool
    scale: int
    mean: int

    def write(self, out: bytearray) -> None:
        """Append the model: 1 byte of flags (bits 0-1 sides, 2 low rank, 3 warm, 4 placed, 5 mirrored), meanings, scale,
        mean."""
        flags = len(self.sides) | self.low_rank << 2 | (self.warm is not None) << 3
        flags |= self.placed << 4 | self.mirrored << 5
        out.append(flags)
        self.meaning.write(out)
        for side in (*self.sides, *([self.warm] if self.warm else [])):
            out.append(side.index)
            side.meaning.write(out)
        out += self.scale.to_bytes(2, "little") + self.mean.to_bytes(2, "little")

    @staticmethod
    def read(reader: ByteReader, given: Sequence[Side]) -> "PlaneModel":
        """Inverse of :meth:`write`, for a caller who has these side planes."""
        flags = reader.byte()
        if flags >> 6 or flags & 12 == 8 or flags & 20 == 16:
            raise FormatError(f"context payload: unknown flags {flags:#04x}")
        meaning = LevelMeaning.read(reader)
        planes = [
            SidePlane(reader.byte(), LevelMeaning.read(reader)) for _ in range((flags & 3) + (flags >> 3 & 1))
        ]
        for plane in planes:
            if plane.index >= len(given):
                raise FormatError(
                    f"context payload: it needs side plane {plane.index}, {len(given)} are given"
                )
        first = given[planes[0].index] if flags & 3 else None
        if flags & 16 and (first is None or first.places is None):
            raise FormatError("context payload: its first side plane knows no places")
        if flags & 32 and (first is None or not first.two_sided):
            raise FormatError("context payload: its first side plane is not two-sided")
        scale, mean = (int.from_bytes(reader.take(2), "little") for _ in range(2))
        if not 0 < mean <= _MEAN_LIMIT:
            raise FormatError(f"context payload: a mean magnitude of {mean}/256 is not possible")
        return PlaneModel(
            meaning=meaning,
            sides=tuple(planes[: flags & 3]),
            low_rank=bool(flags & 4),
            warm=planes[-1] if flags & 8 else None,
            placed=bool(flags & 16),
            mirrored=bool(flags & 32),
            scale=scale,
            mean=mean,
        )


def level_counts(plane: UInt8s) -> Int64s:
    """int64 (256,), how often each level occurs in a sample of a plane, the same for encoder and decoder."""
    step = (plane.size >> _SAMPLE_LOG2) | 1  # odd: columns are even
    return np.asarray(count_symbols(plane[::step], None, 256, 1)[0])


def class_map(counts: Int64s, limit: int) -> UInt8s:
    """Give each level one of at most ``limit`` ascending classes: rare neighbours share one.

    Args:
        counts: int64 (n,), how often each level occurs; absent ones get the class of the next lower present one.
        limit: 1..256.

    Returns:
        uint8 (256,).
    """
    starts = [int(level) for level in np.flatnonzero(counts)] or [0]
    sizes = [int(counts[level]) for level in starts]
    while len(starts) > limit:
        pairs = [a + b for a, b in pairwise(sizes)]
        least = pairs.index(min(pairs))
        sizes[least : least + 2] = [pairs[least]]
        del starts[least + 1]
    first = np.zeros(256, dtype=np.int64)
    first[starts[1:]] = 1
    return np.cumsum(first).astype(np.uint8)


def side_levels(model: PlaneModel, given: Sequence[Side], part: slice | Int64s) -> tuple[UInt8s, UInt8s]:
    """The levels of the model's sides, uint8 (sides, n), and which symbols are turned, uint8 (n,); empty if none may be."""
    from shrinkpoint.entropy.contexts.feature_kernels import turn  # numba

    found = [given[side.index] for side in model.sides]
    size = len(range(*part.indices(found[0].plane.size))) if found and isinstance(part, slice) else 0
    levels = np.empty((len(found), size if isinstance(part, slice) else part.size), dtype=np.uint8)
    for row, side in zip(levels, found, strict=True):
        row[:] = side.plane[part]
    turned = np.empty(levels.shape[1] if model.mirrored else 0, dtype=np.uint8)
    if model.mirrored:
        turn(levels, np.array([side.alphabet * side.two_sided for side in found], np.int64), turned)
    return levels, turned


def build_scene(
    model: PlaneModel,
    given: Sequence[Side],
    maps: tuple[UInt8s, UInt8s],
    shape: tuple[int, int],
    part: slice = slice(None),
) -> Any:
    """The ``Scene`` that the kernels read for one chunk.

    Args:
        model: the plane's model.
        given: the caller's side planes.
        maps: uint8 (sides, 256) each, the fine and the coarse classes of the model's sides.
        shape: rows and columns of the chunk.
        part: where in the planes the chunk is.
    """
    from shrinkpoint.entropy.contexts.feature_kernels import Scene  # numba

    rows, columns = shape
    sides, turned = side_levels(model, given, part)
    warm = np.empty((0, columns), dtype=np.uint8)
    if model.warm is not None:
        warm = np.array(given[model.warm.index].plane[part].reshape(shape))
    places = np.zeros(256, dtype=np.int32)
    known = given[model.sides[0].index].places if model.placed else None
    if known is not None:
        places[: len(known)] = known
    activities, around = _class_tables()
    first = model.sides[0].meaning if model.sides else model.meaning
    return Scene(
        values=model.meaning.values(),
        magnitudes=model.meaning.magnitudes(),
        sides=sides.reshape(-1, rows, columns),
        turned=turned.reshape(-1, columns),
        fine=maps[0],
        coarse=maps[1],
        side_magnitudes=first.magnitudes(),
        warm=warm,
        warm_values=(model.warm.meaning if model.warm else model.meaning).values(),
        low_rank=model.low_rank,
        scale=model.scale,
        places=places,
        unit=min((1 << 22) // model.meaning.scale, _UNIT_LIMIT) if model.placed else 0,
        mean=model.mean,
        activities=activities,
        around=around,
    )


@lru_cache(maxsize=1)
def _class_tables() -> tuple[UInt8s, UInt8s]:
    activities = np.searchsorted(_ACTIVITY_STARTS, np.arange(512), side="right")
    around = np.searchsorted(_AROUND_STARTS, np.arange(25), side="right")
    return activities.astype(np.uint8), around.astype(np.uint8)
