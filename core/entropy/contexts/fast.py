"""Effort ``fast`` of the context coder: static tables under the levels of the one or two most informative side planes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.entropy.contexts.model import class_map, level_counts
from shrinkpoint.entropy.contexts.run_tables import (
    check_end,
    join_chunks,
    new_counters,
    open_chunk,
    put_chunk,
    read_run_tables,
    run_tables,
    split_chunks,
)
from shrinkpoint.entropy.contexts.sample import PlaneSample, Side
from shrinkpoint.entropy.static.rans import decode_symbols, encode_symbols, map_in_threads, predict_bytes
from shrinkpoint.entropy.symbols import count_symbols, frozen
from shrinkpoint.entropy.tables import plan_tables, write_tables
from shrinkpoint.entropy.wire import ByteReader
from shrinkpoint.errors import FormatError

__all__ = ["FastPlan", "decode_plain", "decode_runs"]


_HEAD_BYTES = 16  # what the prediction may be wrong by in a small plane
_WORTH_TRYING = 0.998  # of another payload, below which a predicted one is coded to be compared
_MIN_SYMBOLS = 256  # below, two sides are not worth a table
_PAIR_CLASSES = 16
_MIN_CHUNK_LOG2, _MAX_CHUNK_LOG2 = 18, 23
_CHUNK_BYTES = 4096  # what a chunk should be expected to have
_RUNS_SYMBOLS = 1 << 13  # below, four states would show
_RUNS_SHARE = 0.7  # of the most frequent symbol, from which on coding gaps is faster


class FastPlan(NamedTuple):
    """What effort ``fast`` would do.

    Attributes:
        chosen: indices of the side planes.
        size: bytes of the payload, within a percent or two.
    """

    chosen: tuple[int, ...]
    size: float

    @staticmethod
    def of(sample: PlaneSample) -> "FastPlan":
        """Take the best side plane, or the best two if that is shorter, or none."""
        plans = [FastPlan((), sample.alone)]
        found = sorted((size, index) for index, size in enumerate(sample.given))
        if found:
            plans.append(FastPlan((found[0][1],), found[0][0]))
        if len(found) > 1 and sample.symbols.size >= _MIN_SYMBOLS:
            both = (found[0][1], found[1][1])
            joint, n_contexts = _contexts(sample.sides, both)
            counts = sample.step * count_symbols(sample.symbols, joint, sample.counts.size, n_contexts)
            plans.append(FastPlan(both, predict_bytes(counts)))
        return min(plans, key=lambda plan: plan.size)

    def least(self, step: int) -> float:
        """What :meth:`encode` will take at least if the plan was made on every ``step``-th symbol."""
        return (0.995 if step == 1 else 0.98) * self.size - _HEAD_BYTES

    def encode(
        self,
        symbols: UInt8s,
        alphabet: int,
        sides: Sequence[Side],
        totals: Int64s,
        threads: int,
        bound: int | None = None,
    ) -> tuple[bool, bytes] | None:
        """Whether gaps are coded, and the payload.

        Args:
            symbols: the plane.
            alphabet: how many levels there are.
            sides: the planes of the plan's sample.
            totals: how often each symbol occurs.
            threads: how many threads share the chunks.
            bound: bytes from which on the payload is not wanted: None is returned where counting shows that already.
        """
        contexts, n_contexts = _contexts(sides, self.chosen)
        head = bytes([len(self.chosen), *self.chosen])
        runs = symbols.size >= _RUNS_SYMBOLS and _RUNS_SHARE * symbols.size <= totals.max() < symbols.size
        if not runs and bound is None:
            return False, b"".join((head, encode_symbols(symbols, contexts, alphabet, n_contexts, threads)))
        counts = count_symbols(symbols, contexts, alphabet, n_contexts)
        if bound is not None and predict_bytes(counts) > _WORTH_TRYING * bound:
            return None
        if not runs:
            return False, b"".join((head, encode_symbols(symbols, contexts, alphabet, n_contexts, threads)))
        zero = int(np.argmax(totals))
        return True, b"".join((head, self._runs(symbols, contexts, counts, zero, threads)))

    def _runs(
        self, symbols: UInt8s, contexts: UInt8s | None, counts: Int64s, zero: int, threads: int
    ) -> bytes:
        chunk_log2 = _MIN_CHUNK_LOG2
        while chunk_log2 < _MAX_CHUNK_LOG2 and self.size * (1 << chunk_log2) < _CHUNK_BYTES * symbols.size:
            chunk_log2 += 1
        tables = plan_tables(counts)
        used = counts.any(axis=1)
        coder, rows = run_tables(tables.entries(), zero), tables.rows.astype(np.uint8)

        def encode(span: slice) -> bytes:
            return put_chunk(coder, _rows(rows, contexts, span, symbols.size), symbols[span])

        out = bytearray([chunk_log2, zero]) + np.packbits(used).tobytes()
        write_tables(out, tables, used)
        return join_chunks(out, map_in_threads(encode, _spans(symbols.size, chunk_log2), threads))


def decode_plain(reader: ByteReader, size: int, alphabet: int, sides: Sequence[Side], threads: int) -> UInt8s:
    """Inverse of :meth:`FastPlan.encode` without gaps."""
    contexts, n_contexts = _contexts(sides, _read_chosen(reader, sides))
    return decode_symbols(reader.rest(), contexts, size, alphabet, n_contexts, threads)


def decode_runs(reader: ByteReader, size: int, alphabet: int, sides: Sequence[Side], threads: int) -> UInt8s:
    """Inverse of :meth:`FastPlan.encode` with gaps."""
    contexts, n_contexts = _contexts(sides, _read_chosen(reader, sides))
    chunk_log2 = reader.byte()
    if not _MIN_CHUNK_LOG2 <= chunk_log2 <= _MAX_CHUNK_LOG2:
        raise FormatError(f"context payload: chunks of 2^{chunk_log2} symbols are not in this format")
    tables, coder = read_run_tables(reader, n_contexts, alphabet)
    rows = tables.rows.astype(np.uint8)
    spans = _spans(size, chunk_log2)
    out = np.full(size, coder.zero, dtype=np.uint8)

    def decode(work: tuple[slice, memoryview]) -> None:
        from shrinkpoint.entropy.contexts import run_kernels  # numba

        span, chunk = work
        words, cursor = open_chunk(chunk)
        part = out[span]
        run_kernels.take_runs(
            coder,
            new_counters(coder),
            _rows(rows, contexts, span, size),
            part,
            0,
            part.size,
            words,
            cursor,
        )
        check_end(words, cursor)

    map_in_threads(decode, zip(spans, split_chunks(reader, len(spans)), strict=True), threads)
    return out


def _spans(size: int, chunk_log2: int) -> list[slice]:
    step = 1 << chunk_log2
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _rows(rows: UInt8s, contexts: UInt8s | None, span: slice, size: int) -> UInt8s:
    """The table of every symbol of a chunk."""
    from shrinkpoint.entropy.contexts import growth_kernels  # numba

    found = np.zeros(len(range(*span.indices(size))), dtype=np.uint8)
    if contexts is not None:
        growth_kernels.rename(rows, frozen(contexts[span]), found)
    return found


def _read_chosen(reader: ByteReader, sides: Sequence[Side]) -> tuple[int, ...]:
    chosen = tuple(reader.take(reader.byte()))
    if len(chosen) > 2 or any(index >= len(sides) for index in chosen):
        raise FormatError(f"context payload: it needs side planes {list(chosen)}, {len(sides)} are given")
    return chosen


def _contexts(sides: Sequence[Side], chosen: Sequence[int]) -> tuple[UInt8s | None, int]:
    """What the chosen planes say together, and how many contexts that are."""
    from shrinkpoint.entropy.contexts import run_kernels  # numba

    if not chosen:
        return None, 1
    if len(chosen) == 1:
        side = sides[chosen[0]]
        return side.plane, side.alphabet
    first, second = (sides[index] for index in chosen)
    coarse = [class_map(level_counts(side.plane), _PAIR_CLASSES) for side in (first, second)]
    joint = np.empty(first.plane.size, dtype=np.uint8)
    planes = frozen(first.plane), frozen(second.plane)
    run_kernels.pair_classes(*planes, coarse[0] * np.uint8(_PAIR_CLASSES), coarse[1], joint)
    return joint, 256
