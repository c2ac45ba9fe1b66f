"""Coding a plane chunk by chunk under a `PlaneModel`: what efforts ``default`` and ``max`` write after their first byte."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s, UInt16s
from shrinkpoint.entropy.contexts.cells import Cells
from shrinkpoint.entropy.contexts.leaves import (
    Span,
    grow_tree,
    own_cells,
    read_leaves,
    sample_places,
    write_leaves,
)
from shrinkpoint.entropy.contexts.model import (
    MAX_COLUMNS,
    PlaneModel,
    build_scene,
    class_map,
    level_counts,
    side_levels,
)
from shrinkpoint.entropy.contexts.run_tables import (
    check_end,
    join_chunks,
    new_counters,
    open_chunk,
    split_chunks,
)
from shrinkpoint.entropy.contexts.sample import Side
from shrinkpoint.entropy.static.rans import map_in_threads
from shrinkpoint.entropy.tables import TableSet, plan_tables, read_tables, write_tables
from shrinkpoint.entropy.wire import ByteReader
from shrinkpoint.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from shrinkpoint.entropy.contexts.mixer_kernels import Decisions, Logits
__all__ = ["Plan", "decode_mixed", "decode_static", "encode_mixed", "encode_static"]


_MIN_CHUNK_LOG2, _MAX_CHUNK_LOG2 = 18, 23
_CHUNK_ROWS = 256  # below, the directions of the rows are relearned too often
_MIN_WIDTH = 8
_ONE_CONTEXT = np.ones(1, dtype=np.bool_)


@dataclass(frozen=True)
class Plan:
    """A plane's model, its side planes, and how it is cut into chunks.

    Attributes:
        model: what stands in the payload.
        given: the caller's side planes.
        maps: uint8 (sides of the model, 256) each, fine and coarse classes of their levels.
        size: number of symbols.
        columns: divides ``size``.
        chunk_log2: a chunk has at most so many symbols.
    """

    model: PlaneModel
    given: Sequence[Side]
    maps: tuple[UInt8s, UInt8s]
    size: int
    columns: int
    chunk_log2: int

    @staticmethod
    def of(
        model: PlaneModel, given: Sequence[Side], size: int, columns: int, chunk_log2: int | None = None
    ) -> "Plan":
        """Derive the classes of levels, and the chunks unless they are given."""
        from shrinkpoint.entropy.contexts.mixing_kernels import COARSE_CLASSES, FINE_CLASSES  # numba

        counts = [level_counts(given[side.index].plane) for side in model.sides]
        fine, coarse = (
            np.array([class_map(c, limit) for c in counts], dtype=np.uint8).reshape(-1, 256)
            for limit in (FINE_CLASSES, COARSE_CLASSES)
        )
        if chunk_log2 is None:
            wanted = (columns * _CHUNK_ROWS - 1).bit_length() if columns <= MAX_COLUMNS else 0
            chunk_log2 = max(wanted, _MIN_CHUNK_LOG2)
        return Plan(model, given, (fine, coarse), size, columns, chunk_log2)

    @staticmethod
    def read(reader: ByteReader, given: Sequence[Side], size: int, columns: int) -> "Plan":
        """Inverse of :meth:`write`."""
        model = PlaneModel.read(reader, given)
        chunk_log2 = reader.byte()
        if not _MIN_CHUNK_LOG2 <= chunk_log2 <= _MAX_CHUNK_LOG2:
            raise FormatError(f"context payload: chunks of 2^{chunk_log2} symbols are not in this format")
        if model.low_rank and not _MIN_WIDTH <= columns <= MAX_COLUMNS:
            raise FormatError(
                f"context payload: low-rank prediction of {columns} columns is not in this format"
            )
        return Plan.of(model, given, size, columns, chunk_log2)

    def write(self, out: bytearray) -> None:
        """Append the model and the chunk byte."""
        self.model.write(out)
        out.append(self.chunk_log2)

    def spans(self) -> list[Span]:
        """(start, stop) of every chunk."""
        step = 1 << self.chunk_log2
        if self._has_rows():
            step = step // self.columns * self.columns
        return [(start, min(start + step, self.size)) for start in range(0, self.size, step)]

    def shape(self, span: Span) -> tuple[int, int]:
        """Rows and columns of a chunk."""
        length = span[1] - span[0]
        return (length // self.columns, self.columns) if self._has_rows() else (1, length)

    def scene(self, span: Span) -> Any:
        """What the kernels read for a chunk."""
        return build_scene(self.model, self.given, self.maps, self.shape(span), slice(*span))

    def levels(self) -> tuple[int, ...]:
        """Levels of each feature of the static contexts."""
        from shrinkpoint.entropy.contexts.segment_kernels import FEATURES, LEVELS  # numba

        known = (*LEVELS, *(int(row[-1]) + 1 for row in self.maps[0]))
        return known + (1,) * (FEATURES - len(known))

    def _has_rows(self) -> bool:
        return _MIN_WIDTH <= self.columns <= MAX_COLUMNS


def encode_static(plan: Plan, symbols: UInt8s, alphabet: int, threads: int) -> bytes:
    """Code all symbols under the contexts of a tree that is grown on a sample.

    Args:
        plan: the model.
        symbols: uint8 (n,), at least two different ones below ``alphabet``.
        alphabet: 2..256.
        threads: how many threads share the chunks.
    """
    from shrinkpoint.entropy.contexts import (
        chunk_arrays,
        feature_kernels,
        growth_kernels,
        segment_kernels,  # numba
    )

    found = np.empty(symbols.size, dtype=np.uint16)
    contexts = np.empty(symbols.size, dtype=np.uint8)
    coded = symbols.copy() if plan.model.mirrored else symbols
    strides = np.zeros(segment_kernels.FEATURES, dtype=np.int64)
    strides[:2] = 1, segment_kernels.LEVELS[0]

    def find(span: Span) -> None:
        shape, scene = plan.shape(span), plan.scene(span)
        out = found[slice(*span)].reshape(shape)
        rows = chunk_arrays.new_rows(scene, shape[1], scene.low_rank)
        classes = chunk_arrays.side_cells(scene, strides)
        segment_kernels.find_features(scene, rows, strides, classes, _cut(symbols, span, shape), out)
        if plan.model.mirrored:
            part = coded[slice(*span)]
            feature_kernels.turn_symbols(part, scene.turned.reshape(-1), 0, part.size, _last(alphabet))

    map_in_threads(find, plan.spans(), threads)
    cells = _grow(plan, coded, found)
    leaves, own = cells.leaves(), own_cells(cells)

    def name(span: Span) -> None:
        part, scene = slice(*span), plan.scene(span)
        sides = scene.sides.reshape(scene.sides.shape[0], span[1] - span[0])
        classes = chunk_arrays.side_cells(scene, cells.strides)
        arguments = leaves, own, found[part], classes, sides, contexts[part]
        growth_kernels.name_leaves(*arguments)

    map_in_threads(name, plan.spans(), threads)
    out = bytearray()
    plan.write(out)
    return write_leaves(out, cells, contexts, coded, alphabet, plan.spans(), threads)


def decode_static(reader: ByteReader, plan: Plan, alphabet: int, threads: int) -> UInt8s:
    """Inverse of :func:`encode_static`, for what follows the plan."""
    from shrinkpoint.entropy.contexts import chunk_arrays, segment_kernels
    from shrinkpoint.entropy.contexts.segment_lowrank_kernels import SEGMENT  # numba

    leaves = read_leaves(reader, plan.levels(), alphabet)
    strides, rows, coder = leaves.strides, leaves.rows, leaves.coder

    def decode(chunk: memoryview, scene: Any, plane: UInt8s) -> None:
        words, cursor = open_chunk(chunk)
        plane.fill(coder.zero)
        work = chunk_arrays.new_rows(scene, plane.shape[1], bool(scene.low_rank and strides[0]))
        classes = chunk_arrays.side_cells(scene, strides)
        arguments = (
            strides,
            classes,
            rows,
            coder,
            new_counters(coder),
            np.empty(SEGMENT, np.uint8),
        )
        segment_kernels.decode_chunk(scene, work, plane, _last(alphabet), *arguments, words, cursor)
        check_end(words, cursor)

    return _decode_chunks(reader, plan, decode, threads)


def _grow(plan: Plan, symbols: UInt8s, found: UInt16s) -> Cells:
    """Grow the tree on symbols from all over the plane, whose own features are ``found``."""
    from shrinkpoint.entropy.contexts.segment_kernels import FEATURES, LEVELS  # numba

    places = sample_places(symbols.size)
    features = np.zeros((FEATURES, places.size), dtype=np.uint8)
    features[1], features[0] = np.divmod(found[places], np.uint16(LEVELS[0]))
    sides, _ = side_levels(plan.model, plan.given, places)
    for row, classes, levels in zip(features[len(LEVELS) :], plan.maps[0], sides, strict=False):
        row[:] = classes[levels]
    return grow_tree(features, symbols[places], plan.levels(), symbols.size)


def encode_mixed(plan: Plan, symbols: UInt8s, counts: Int64s, threads: int) -> bytes:
    """Code all symbols as mixed binary decisions.

    Args:
        plan: the model.
        symbols: uint8 (n,).
        counts: int64 (alphabet,), theirs; at least two are positive.
        threads: how many threads share the chunks.
    """
    from shrinkpoint.entropy.contexts import mixing_kernels  # numba

    tables = plan_tables(counts[None])
    tree = build_decisions(_weights(tables))

    def encode(span: Span) -> bytes:
        shape = plan.shape(span)
        plane = _cut(symbols, span, shape)
        size = plane.size + 64
        while True:
            stream = np.empty(size, dtype=np.uint8)
            used = mixing_kernels.code_chunk(plan.scene(span), tree, logits(), plane, stream, False)
            if used <= size:
                return stream[:used].tobytes().rstrip(b"\0")
            size = used

    out = bytearray()
    plan.write(out)
    write_tables(out, tables, _ONE_CONTEXT)
    return join_chunks(out, map_in_threads(encode, plan.spans(), threads))


def decode_mixed(reader: ByteReader, plan: Plan, alphabet: int, threads: int) -> UInt8s:
    """Inverse of :func:`encode_mixed`, for what follows the plan."""
    from shrinkpoint.entropy.contexts import mixing_kernels  # numba

    weights = _weights(read_tables(reader, _ONE_CONTEXT, alphabet))
    if np.count_nonzero(weights) < 2:
        raise FormatError("context payload: a tree of fewer than two symbols")
    tree = build_decisions(weights)

    def decode(chunk: memoryview, scene: Any, plane: UInt8s) -> None:
        stream = np.frombuffer(bytes(chunk), dtype=np.uint8).copy()
        if mixing_kernels.code_chunk(scene, tree, logits(), plane, stream, True) < stream.size:
            raise CorruptionError("context chunk: bytes follow the end of the code")

    return _decode_chunks(reader, plan, decode, threads)


def _last(alphabet: int) -> int:
    """The symbol that 0 is mirrored to."""
    return (alphabet - 1) // 2 * 2


def _weights(tables: TableSet) -> Int64s:
    return np.asarray(tables.entries()[0] >> 32, dtype=np.int64)


def _cut(symbols: UInt8s, span: Span, shape: tuple[int, int]) -> UInt8s:
    """A writable copy: one array type for the kernels, which decode into the same argument."""
    return np.array(symbols[slice(*span)], dtype=np.uint8).reshape(shape)


def _decode_chunks(
    reader: ByteReader, plan: Plan, decode: Callable[[memoryview, Any, UInt8s], None], threads: int
) -> UInt8s:
    spans = plan.spans()
    chunks = split_chunks(reader, len(spans))
    out = np.empty(plan.size, dtype=np.uint8)

    def run(work: tuple[Span, memoryview]) -> None:
        span, chunk = work
        plane = np.empty(plan.shape(span), dtype=np.uint8)
        decode(chunk, plan.scene(span), plane)
        out[slice(*span)] = plane.reshape(-1)

    map_in_threads(run, zip(spans, chunks, strict=True), threads)
    return out


_START_LIMIT = 64  # of 2^22, the least share that either outcome starts with


def build_decisions(weights: Int64s) -> "Decisions":
    """Make the tree: first whether it is the most frequent symbol if 2 in 5 are, then halves of equal weight.

    Symbols keep their order, so that a decision means "how far" and contexts can predict it.

    Args:
        weights: int64 (alphabet,), at least two of them positive; only those symbols are in the tree.
    """
    from shrinkpoint.entropy.contexts.mixer_kernels import Decisions  # numba

    paths: dict[int, list[int]] = {int(symbol): [] for symbol in np.flatnonzero(weights)}
    children: list[list[int]] = []
    start: list[int] = []
    todo: list[tuple[list[int], int | None, int]] = [(list(paths), None, 0)]
    while todo:
        symbols, parent, side = todo.pop()
        if parent is not None:
            children[parent][side] = len(children) if len(symbols) > 1 else -1 - symbols[0]
        if len(symbols) < 2:
            continue
        parts = _split(symbols, weights, first=parent is None)
        share = int(weights[parts[1]].sum() << 22) // int(weights[symbols].sum())
        start.append(min(max(share, _START_LIMIT), (1 << 22) - _START_LIMIT))
        for outcome in (1, 0):
            todo.append((parts[outcome], len(children), outcome))
            for symbol in parts[outcome]:
                paths[symbol].append(outcome)
        children.append([0, 0])
    outcomes = np.zeros((256, max(map(len, paths.values()))), dtype=np.uint8)
    for symbol, path in paths.items():
        outcomes[symbol, : len(path)] = path
    return Decisions(np.array(children, dtype=np.int32), outcomes, np.array(start, dtype=np.int64))


def _split(symbols: list[int], weights: Int64s, first: bool) -> tuple[list[int], list[int]]:
    total = int(weights[symbols].sum())
    if first:
        most = max(symbols, key=lambda symbol: int(weights[symbol]))
        if 5 * int(weights[most]) >= 2 * total:
            return [most], [symbol for symbol in symbols if symbol != most]
    below = np.cumsum(weights[symbols])[:-1]
    cut = int(np.argmin(np.abs(2 * below - total))) + 1
    return symbols[:cut], symbols[cut:]


@lru_cache(maxsize=1)
def logits() -> "Logits":
    """The logistic function and its inverse, by decimal arithmetic that is exact to the last digit everywhere."""
    from shrinkpoint.entropy.contexts.mixer_kernels import Logits  # numba

    with localcontext() as context:
        context.prec = 25
        odds = [Decimal(1)]  # e^(i / 256)
        step = (Decimal(1) / 256).exp()
        for _ in range(2048):
            odds.append(odds[-1] * step)
        above = [int((65536 * x / (1 + x)).to_integral_value()) for x in odds]
    squash = np.empty(4096, dtype=np.int32)
    squash[2048:] = above[:2048]
    squash[:2048] = 65536 - np.array(above[2048:0:-1])
    # the logit whose probability is nearest to the middle of each 1/4096
    middles = 16 * np.arange(4096) + 8
    stretch = np.searchsorted((squash[1:] + squash[:-1]) // 2, middles) - 2048
    return Logits(np.clip(stretch, -2047, 2047).astype(np.int32), np.clip(squash, 1, 65535).astype(np.int32))
