"""Coding the points of a trellis-coded plane, given where each is expected.

The contexts are those of entropy/trellis/context_kernels.py, under a decision tree that is grown on a sample
(entropy/contexts/cells.py): leads, activity, and the levels of side planes. Payload (integers are little-endian, "varint"
is 7 bits per byte)::

    flags       bits 0-1 number of side planes, bit 2 low rank, others 0
    discount    1 byte, 0..16: what a further element's cost counts, in 1/16
    radius      1 byte: symbols are ranks from -radius on
    scale       u16, units of a value in a part of a step, in 2^-12
    mean        u16, mean energy of points about their places, in 1/2048 square steps
    sides       index of each side plane, 1 byte each
    chunk byte  log2 of the elements per chunk, which has as many whole paths
    tree, tables, lengths, chunks    as of entropy/contexts/coder.py's effort default

Chunks do not depend on each other nor on the number of threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shrinkpoint.arrays import Bools, Int8s, Int16s, Int32s, Int64s, UInt8s, UInt16s
from shrinkpoint.entropy.contexts.cells import Cells
from shrinkpoint.entropy.contexts.leaves import (
    Span,
    grow_tree,
    own_cells,
    read_leaves,
    sample_places,
    write_leaves,
)
from shrinkpoint.entropy.contexts.model import class_map, level_counts
from shrinkpoint.entropy.contexts.run_tables import (
    check_end,
    open_chunk,
    split_chunks,
)
from shrinkpoint.entropy.contexts.sample import PlaneSample, Side
from shrinkpoint.entropy.static.rans import map_in_threads
from shrinkpoint.entropy.symbols import check_array
from shrinkpoint.entropy.trellis.states import NOISE, UNIT, States, path_width
from shrinkpoint.entropy.wire import ByteReader, Payload
from shrinkpoint.errors import FormatError

__all__ = ["FAR_RADIUS", "CodedPoints", "Path", "decode_points", "encode_points"]

FAR_RADIUS = 126
"""With this radius, the two last points on either side stand for all beyond of their parity."""

_MAX_SIDES = 3
_FEATURES = 2 + _MAX_SIDES
_CLASSES = 48
_ACTIVITIES = 12
_MIN_CHUNK_LOG2, _MAX_CHUNK_LOG2 = 18, 23
_CHUNK_ROWS = 256
_TRIAL = 1 << 14
_MIN_ROWS, _MIN_COLUMNS = 24, 24
_MIN_EXPLAINED = 0.002
_TYPICAL = 32  # root mean square of values
_LEAST_SCALE = 128
_MEAN_LIMIT = 8 * 1023
# the greatest spread of points about their places, less the noise, in steps, up to which so many 1/16 suit best
_DISCOUNTS = ((0.05, 16), (0.13, 14), (0.24, 11), (0.4, 6), (1e9, 3))


@dataclass(frozen=True)
class Path:
    """Where points are expected, which trellis they are on, and what else both sides have.

    Attributes:
        places: int16 (n,), in 1/256 of a step, -256 to 255: from the even point nearest to the expected value, which
            indices are counted from.
        columns: of the matrix; divides n.
        states: of the trellis.
        sides: planes of n levels each.
    """

    places: Int16s
    columns: int
    states: States
    sides: Sequence[Side] = ()

    @property
    def width(self) -> int:
        """Elements of one path."""
        return path_width(self.columns)

    def check(self) -> None:
        """Raise ValueError unless the parts fit each other."""
        size = self.places.size
        if self.states not in NOISE:
            raise ValueError(f"states must be 4 or 8, got {self.states}")
        if self.places.dtype != np.int16 or self.places.ndim != 1:
            raise ValueError("places must be a 1-D int16 array")
        if self.columns < 1 or size % self.columns:
            raise ValueError(f"columns must divide the number of places, got {self.columns} and {size}")
        if size and not -UNIT <= int(self.places.min()) <= int(self.places.max()) < UNIT:
            raise ValueError(f"places must be from -{UNIT} to {UNIT - 1}")
        for index, side in enumerate(self.sides):
            check_array(side.plane, f"sides[{index}].plane", size)


@dataclass(frozen=True)
class CodedPoints:
    """What was coded, as a reader will know it.

    Attributes:
        payload: the bytes; empty without elements.
        points: int16 (n,), in half steps.
        places: int16 (n,), as `Path.places`.
        ranks: int8 (n,), how many points each lies beyond the best one; with `FAR_RADIUS`, those of 125 and 126 to either
            side are nearer than the true ones.
    """

    payload: bytes
    points: Int16s
    places: Int16s
    ranks: Int8s

    @property
    def errors(self) -> Int32s:
        """int32 (n,): points less places in 1/256 of a step."""
        errors = self.points.astype(np.int32)
        errors *= UNIT // 2
        errors -= self.places
        return errors

    @cached_property
    def far(self) -> Bools:
        """bool (n,): which elements may lie beyond what their points say."""
        if self.ranks.size == 0 or max(int(self.ranks.max()), -int(self.ranks.min())) < FAR_RADIUS - 1:
            return np.zeros(self.ranks.size, np.bool_)
        return np.abs(self.ranks) >= FAR_RADIUS - 1


@dataclass(frozen=True)
class _Model:
    discount: int
    radius: int
    low_rank: bool
    scale: int
    mean: int
    sides: tuple[int, ...]
    chunk_log2: int

    def write(self, out: bytearray) -> None:
        out += bytes([len(self.sides) | self.low_rank << 2, self.discount, self.radius])
        out += self.scale.to_bytes(2, "little") + self.mean.to_bytes(2, "little")
        out += bytes([*self.sides, self.chunk_log2])

    @staticmethod
    def read(reader: ByteReader, path: Path) -> "_Model":
        flags, discount, radius = reader.byte(), reader.byte(), reader.byte()
        scale, mean = (int.from_bytes(reader.take(2), "little") for _ in range(2))
        sides = tuple(reader.byte() for _ in range(flags & 3))
        chunk_log2 = reader.byte()
        if flags >> 3 or discount > 16 or radius > FAR_RADIUS or scale < _LEAST_SCALE:
            raise FormatError("trellis payload: its model is malformed")
        if not 0 < mean <= _MEAN_LIMIT or not _MIN_CHUNK_LOG2 <= chunk_log2 <= _MAX_CHUNK_LOG2:
            raise FormatError("trellis payload: its model is malformed")
        if any(index >= len(path.sides) for index in sides):
            raise FormatError(f"trellis payload: it needs side planes that are not given, {sides}")
        return _Model(discount, radius, bool(flags & 4), scale, mean, sides, chunk_log2)

    def maps(self, path: Path) -> list[UInt8s]:
        return [class_map(level_counts(path.sides[index].plane), _CLASSES) for index in self.sides]

    def scene(self, path: Path, span: Span) -> Any:
        from shrinkpoint.entropy.trellis.margin_kernels import Scene  # numba

        sides = np.empty((len(self.sides), span[1] - span[0]), dtype=np.uint8)
        for row, index in zip(sides, self.sides, strict=True):
            row[:] = path.sides[index].plane[slice(*span)]
        return Scene(
            width=path.width,
            states=path.states,
            places=np.array(path.places[slice(*span)]),
            sides=sides,
            discount=self.discount,
            low_rank=self.low_rank,
            scale=self.scale,
            mean=self.mean,
        )

    def spans(self, path: Path) -> list[Span]:
        step = max((1 << self.chunk_log2) // path.width, 1) * path.width
        return [(start, min(start + step, path.places.size)) for start in range(0, path.places.size, step)]


def encode_points(points: Int16s, path: Path, threads: int = 1) -> CodedPoints:
    """Code points.

    Args:
        points: int16 (n,), in half steps from each element's even point; each row's are a path of the trellis.
        path: what a reader has.
        threads: how many threads share the chunks; the bytes do not depend on it.

    Raises:
        ValueError: the arguments do not fit each other, or the points are no paths.
    """
    path.check()
    if points.dtype != np.int16 or points.shape != path.places.shape:
        raise ValueError("points must be int16, one for each place")
    if points.size == 0:
        return CodedPoints(b"", points, path.places, np.zeros(0, np.int8))
    model = _choose(points, path)
    ranks, found, known = _features(points, path, model, threads)
    farthest = max(int(ranks.max()), -int(ranks.min()))
    radius = FAR_RADIUS if farthest >= FAR_RADIUS - 1 else farthest
    model = _with_sides(replace(model, radius=radius), path, ranks)
    # in eight bits: what wraps there is back in range with the sum
    symbols = ranks.view(np.uint8) + np.uint8(radius)
    payload = _write(model, path, symbols, found, threads)
    return CodedPoints(payload, known if radius == FAR_RADIUS else points, path.places, ranks)


def _features(points: Int16s, path: Path, model: _Model, threads: int) -> tuple[Int8s, UInt16s, Int16s]:
    """Of each point its rank and its features, and where a reader will have it that knows the rank alone.

    Raises:
        ValueError: the points are no paths.
    """
    from shrinkpoint.entropy.trellis import context_kernels  # numba
    from shrinkpoint.entropy.trellis.chunk_arrays import new_work
    from shrinkpoint.entropy.trellis.margin_kernels import MARGINS

    size = points.size
    ranks, errors = np.zeros(size, np.int8), np.zeros(size, np.int32)
    found = np.zeros(size, np.uint16)
    strides, classes = np.array([0, MARGINS], np.int64), np.zeros((0, 256), np.int32)

    def find(span: Span) -> None:
        part = slice(*span)
        scene = model.scene(path, span)
        arguments = new_work(scene), strides, classes, np.array(points[part])
        context_kernels.find_features(scene, *arguments, ranks[part], found[part], errors[part])

    map_in_threads(find, model.spans(path), threads)
    if not context_kernels.are_given(points, path.places, ranks, errors):
        raise ValueError("the points of each row must be a path of the trellis")
    errors += path.places
    errors >>= 7
    return ranks, found, errors.astype(np.int16)


def _choose(points: Int16s, path: Path) -> _Model:
    """Everything but the sides and the radius."""
    from shrinkpoint.entropy.trellis import context_kernels  # numba

    energies, squares = context_kernels.sum_energies(points, path.places)
    mean = min(max(8 * int(energies) // points.size, 1), _MEAN_LIMIT)
    spread = max(mean / 2048 - NOISE[path.states], 0.0) ** 0.5
    discount = next(discount for limit, discount in _DISCOUNTS if spread <= limit)
    rms = (squares / points.size) ** 0.5
    scale = min(max(int(4096 * _TYPICAL / max(rms, 1.0)), _LEAST_SCALE), 0xFFFF)
    width = path.width
    wanted = (width * _CHUNK_ROWS - 1).bit_length()
    chunk_log2 = min(max(wanted, _MIN_CHUNK_LOG2), _MAX_CHUNK_LOG2)
    model = _Model(discount, 0, False, scale, mean, (), chunk_log2)
    return replace(model, low_rank=_is_predictable(points, path, scale))


def _is_predictable(points: Int16s, path: Path, scale: int) -> bool:
    from shrinkpoint.entropy.contexts.chunk_arrays import new_low_rank_state
    from shrinkpoint.entropy.trellis import context_kernels  # numba

    rows = points.size // path.columns
    if rows < _MIN_ROWS or path.columns < _MIN_COLUMNS or path.width != path.columns:
        return False
    first = min(max(_TRIAL // path.columns, _MIN_ROWS, rows // 32), rows)
    part = slice(first * path.columns)
    errors = points[part].astype(np.int32) * (UNIT // 2) - path.places[part]
    power, left = context_kernels.measure(errors, new_low_rank_state(path.columns, True), path.columns, scale)
    return bool(left < (1 - _MIN_EXPLAINED) * power)


def _with_sides(model: _Model, path: Path, ranks: Int8s) -> _Model:
    """Those that reduce the entropy by themselves, the best ones first."""
    if not path.sides:
        return model
    size = np.minimum(np.abs(ranks), np.int8(15)).view(np.uint8)
    sample = PlaneSample.of(size, 16, path.sides)
    order = sorted(
        (i for i in range(len(path.sides)) if sample.given[i] < 0.999 * sample.alone),
        key=lambda i: sample.given[i],
    )
    return replace(model, sides=tuple(order[:_MAX_SIDES]))


def _levels(maps: Sequence[UInt8s]) -> tuple[int, ...]:
    from shrinkpoint.entropy.trellis.margin_kernels import MARGINS  # numba

    known = (MARGINS, _ACTIVITIES, *(int(row[-1]) + 1 for row in maps))
    return known + (1,) * (_FEATURES - len(known))


def _side_cells(maps: Sequence[UInt8s], strides: Int64s) -> Int32s:
    """int32 (sides, 256): what a level of each side plane adds to a cell."""
    cells = np.zeros((len(maps), 256), np.int32)
    for row, classes, stride in zip(cells, maps, strides[2:], strict=False):
        row[:] = classes.astype(np.int64) * stride
    return cells


def _write(model: _Model, path: Path, symbols: UInt8s, found: UInt16s, threads: int) -> bytes:
    from shrinkpoint.entropy.contexts import growth_kernels  # numba

    maps, alphabet = model.maps(path), 2 * model.radius + 1
    cells = _grow(model, path, maps, symbols, found)
    leaves, own = cells.leaves(), own_cells(cells)
    classes = _side_cells(maps, cells.strides)
    contexts = np.empty(symbols.size, np.uint8)

    def name(span: Span) -> None:
        part, scene = slice(*span), model.scene(path, span)
        growth_kernels.name_leaves(leaves, own, found[part], classes, scene.sides, contexts[part])

    map_in_threads(name, model.spans(path), threads)
    out = bytearray()
    model.write(out)
    return write_leaves(out, cells, contexts, symbols, alphabet, model.spans(path), threads)


def _grow(model: _Model, path: Path, maps: Sequence[UInt8s], symbols: UInt8s, found: UInt16s) -> Cells:
    """Grow the tree on symbols from all over the plane."""
    from shrinkpoint.entropy.trellis.margin_kernels import MARGINS  # numba

    places = sample_places(symbols.size)
    features = np.zeros((_FEATURES, places.size), np.uint8)
    features[1], features[0] = np.divmod(found[places], np.uint16(MARGINS))
    for row, classes, index in zip(features[2:], maps, model.sides, strict=False):
        row[:] = classes[path.sides[index].plane[places]]
    return grow_tree(features, symbols[places], _levels(maps), symbols.size, droppable=False)


def decode_points(payload: Payload, path: Path, threads: int = 1) -> CodedPoints:
    """Inverse of `encode_points`.

    Args:
        payload: the bytes, all of them and nothing else.
        path: as given to the encoder.
        threads: how many threads share the chunks.

    Raises:
        FormatError: the payload is malformed, or needs a side plane that is not given.
        CorruptionError: the payload is well-formed, but a chunk does not end where the encoder began.
        ValueError: the path's parts do not fit each other.
    """
    from shrinkpoint.entropy.trellis import context_kernels  # numba
    from shrinkpoint.entropy.trellis.chunk_arrays import new_work

    path.check()
    size = path.places.size
    points, errors, ranks = np.zeros(size, np.int16), np.zeros(size, np.int32), np.zeros(size, np.int8)
    reader = ByteReader(payload, "trellis payload")
    if size == 0:
        reader.finish()
        return CodedPoints(b"", points, path.places, ranks)
    model = _Model.read(reader, path)
    maps, spans = model.maps(path), model.spans(path)
    leaves = read_leaves(reader, _levels(maps), 2 * model.radius + 1)
    classes = _side_cells(maps, leaves.strides)
    chunks = split_chunks(reader, len(spans))

    def decode(work: tuple[Span, memoryview]) -> None:
        span, chunk = work
        part = slice(*span)
        words, cursor = open_chunk(chunk)
        scene = model.scene(path, span)
        room = new_work(scene, leaves.coder.runs.size, int(leaves.strides[0]))
        arguments = model.radius, leaves.strides, classes, leaves.rows, leaves.coder, words, cursor
        context_kernels.decode_chunk(scene, room, *arguments, ranks[part], points[part], errors[part])
        check_end(words, cursor)

    map_in_threads(decode, zip(spans, chunks, strict=True), threads)
    return CodedPoints(bytes(payload), points, path.places, ranks)
