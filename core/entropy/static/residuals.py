"""Bit patterns as classes of their residuals, which are entropy-coded, and suffixes, which are noise and stand raw.

A number's pattern is read as an integer in the order of the values (or as a magnitude, its sign apart) and predicted
from those of other numbers. The difference, modulo 2^width, splits into a class and a suffix: within 2^cut of 0 the class
is sign and length in bits, elsewhere it is what stands above the cut; the suffix is what the class leaves open. A positive
zero is a class of its own. The classes that occur are listed in a table, and each number has an index into it.

    prediction  share * previous + share * sibling + row's offset + column's offset
    classes     number of classes - 1, keys ascending (varints: the first, then differences less 1)
    symbols     method byte; 0: rANS under the contexts, 1: `entropy.bytes`
    suffixes    length of each chunk of 2^18 elements but the last (varints); the chunks, low bits first: where magnitudes
                are predicted the sign of each number but positive zeros, then its suffix

Sources: prefixes replaced by indexes into a table, suffixes stored raw: FastCheck (Engineering ITEE 27(2):250034), index
compression. Its prefixes are the high bits of the values themselves, its indexes of fixed width, and its operator for
differences is not published; predictions, classes by length, contexts and the range coder of the indexes are ours.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Int64s, UInt8s, UInt16s, Unsigned
from shrinkpoint.entropy.static.bytes import decode_bytes, encode_bytes
from shrinkpoint.entropy.static.rans import decode_symbols, encode_symbols, map_in_threads
from shrinkpoint.entropy.symbols import count_symbols
from shrinkpoint.entropy.wire import ByteReader, Payload, write_uvarint
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.runtime.unlocked import to_bytes

if TYPE_CHECKING:
    from shrinkpoint.entropy.static.residual_kernels import Given

__all__ = [
    "ClassTable",
    "Layout",
    "Sources",
    "class_widths",
    "classes_of",
    "decode_residuals",
    "encode_residuals",
]

WHOLE = 64
"""Shares are multiples of 1 / WHOLE."""

_CHUNK = 1 << 18
_ZERO, _ESCAPE, _FIRST = 0, 1, 2
_COUNTED = 1 << 16  # of each chunk: classes that do not occur there are too rare for a symbol
_MOST = 256  # symbols are bytes
_RANS, _BYTES = 0, 1
_PROBE = 1 << 14  # symbols that decide whether zstd gets a try
_NOTHING = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How numbers of one width are predicted and split.

    Raises:
        ValueError: a field is out of range.
    """

    width: int
    """Bits of a number: 8, 16, 32 or 64."""
    cut: int
    """Bits of the widest suffix; from ``width - 15`` to ``width - 2`` and at most 51."""
    magnitude: bool = False
    """Whether magnitudes are predicted and the sign stands raw, not values in their order."""
    previous: int = 0
    """Share of the same tensor in the previous checkpoint, in 64ths."""
    sibling: int = 0
    """Share of another tensor in the same checkpoint, in 64ths."""
    aligned: bool = False
    """Whether a residual is negated where the previous number is negative: it then points away from zero or to it."""

    def __post_init__(self) -> None:
        if self.width not in (8, 16, 32, 64):
            raise ValueError(f"width must be 8, 16, 32 or 64, got {self.width}")
        low, high = max(self.width - 15, 0), min(self.width - 2, 51)
        if not low <= self.cut <= high:
            raise ValueError(f"cut must be {low}..{high} where width is {self.width}, got {self.cut}")
        for name in ("previous", "sibling"):
            share = getattr(self, name)
            if not 0 <= share <= WHOLE:
                raise ValueError(f"{name} must be 0..{WHOLE}, got {share}")

    @property
    def keys(self) -> int:
        """How many keys of classes there are."""
        return _FIRST + 2 * self.cut + 2 + (1 << (self.width - self.cut))

    @property
    def plan(self) -> tuple[int, int, int, int, int, int]:
        """What the kernels read."""
        return self.width, self.cut, int(self.magnitude), self.previous, self.sibling, int(self.aligned)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What numbers are predicted from, known to encoder and decoder; all arrays flat in C order."""

    previous: Unsigned | None = None
    """Bit patterns, of the numbers' size and width."""
    sibling: Unsigned | None = None
    rows: Int64s = field(default_factory=lambda: _NOTHING)
    """Offset of each row; one number without ``columns`` is that of all numbers."""
    columns: Int64s | None = None
    """Offset of each column."""

    def given(self, layout: Layout, start: int, part: slice) -> "Given":
        """The same for the kernels: of a part of the numbers, the first of which stands at ``start``."""
        from shrinkpoint.entropy.static.residual_kernels import Given  # numba

        dtype = np.dtype(f"i{layout.width // 8}")
        nothing = _fixed(np.zeros(1, dtype=dtype))
        before, near = (
            nothing if source is None else _fixed(source[part].view(dtype))
            for source in (self.previous, self.sibling)
        )
        columns = _NOTHING if self.columns is None else self.columns
        return Given(before, near, _fixed(self.rows), _fixed(columns), start)

    def check(self, layout: Layout, count: int) -> None:
        """Raise ValueError unless the arrays fit ``count`` numbers of the layout."""
        for name, share in (("previous", layout.previous or layout.aligned), ("sibling", layout.sibling)):
            source = getattr(self, name)
            if source is None and share:
                raise ValueError(f"{name} is predicted from, but not given")
            if source is not None and (source.size, source.dtype.itemsize * 8) != (count, layout.width):
                raise ValueError(f"{name} must have {count} numbers of {layout.width} bits")
        covered = self.rows.size * (0 if self.columns is None else self.columns.size)
        single = self.rows.size == 1 and self.columns is None
        if not single and (covered != count or self.columns is None or self.columns.size < 2):
            raise ValueError(f"rows and columns must cover {count} numbers, in rows of 2 or more")


@dataclass(frozen=True)
class ClassTable:
    """The classes that have a symbol: FastCheck's table of prefixes.

    Attributes:
        layout: what the keys mean.
        keys: int64 (n,), ascending, 1 <= n <= 256.
    """

    layout: Layout
    keys: Int64s

    @classmethod
    def of(cls, layout: Layout, counts: Int64s) -> "ClassTable":
        """The table for these counts of every key, with the escape; if there are too many, the rarest are left to that."""
        present = np.flatnonzero(counts)
        if present.size >= _MOST:
            present = present[np.argsort(-counts[present], kind="stable")[: _MOST - 1]]
        return cls(layout, np.union1d(present, _ESCAPE).astype(np.int64))

    def index(self) -> UInt8s:
        """The symbol of every key, uint8 (layout.keys,); the others have that of the escape."""
        escape = np.flatnonzero(self.keys == _ESCAPE)
        index = np.full(self.layout.keys, escape[0] if escape.size else 0, dtype=np.uint8)
        index[self.keys] = np.arange(self.keys.size)
        return index

    def tables(self) -> tuple[Int64s, Int64s, Int64s]:
        """Base, suffix width and sign of every symbol: a residual is sign * (base + suffix)."""
        width, cut = self.layout.width, self.layout.cut
        steps = self.keys - _FIRST
        near = steps < 2 * cut + 2
        lengths = np.clip(steps >> 1, 0, 63)
        bases = np.where(lengths > 0, np.int64(1) << np.maximum(lengths - 1, 0), 0)
        far = (steps - (2 * cut + 2) - (1 << (width - 1 - cut))) << cut
        bases = np.where(near, bases, far)
        widths = np.where(near, np.maximum(lengths - 1, 0), cut)
        signs = np.where(near & (steps & 1 == 1), -1, 1)
        special = self.keys < _FIRST
        bases[special] = 0
        widths[special] = np.where(self.keys[special] == _ESCAPE, width, 0)
        signs[self.keys == _ZERO] = 0
        return bases, widths, signs

    def write(self) -> bytes:
        """The table as bytes."""
        out = bytearray([self.keys.size - 1])
        for gap in np.diff(self.keys, prepend=-1) - 1:
            write_uvarint(out, int(gap))
        return bytes(out)

    @classmethod
    def read(cls, payload: Payload, layout: Layout) -> "ClassTable":
        """Inverse of `write`.

        Raises:
            FormatError: the bytes are no table of this layout.
        """
        reader = ByteReader(payload, "class table")
        keys, last = [], -1
        for _ in range(reader.byte() + 1):
            last += 1 + reader.uvarint(layout.keys, "gap between classes")
            keys.append(last)
        reader.finish()
        if last >= layout.keys:
            raise FormatError(f"class table: class {last} of {layout.keys}")
        return cls(layout, np.array(keys, dtype=np.int64))


def classes_of(bits: Unsigned, layout: Layout, sources: Sources) -> UInt16s:
    """The key of each number's class, uint16 (n,).

    Raises:
        ValueError: the sources do not fit.
    """
    sources.check(layout, bits.size)
    keys = np.empty(bits.size, dtype=np.uint16)
    for start, part in _chunks(bits.size):
        _classify(bits, layout, sources, start, part, keys[part])
    return keys


def class_widths(layout: Layout, keys: Int64s) -> Int64s:
    """Bits of the suffix of each class, a sign that stands raw included."""
    _, widths, signs = ClassTable(layout, keys).tables()
    return widths + np.abs(signs) * int(layout.magnitude)


def encode_residuals(
    bits: Unsigned, layout: Layout, sources: Sources, contexts: UInt8s | None, threads: int = 1
) -> dict[str, bytes]:
    """Code numbers exactly, whatever their bits.

    Args:
        bits: patterns (n,), n > 0, of ``layout.width`` bits, little-endian in memory.
        layout: the prediction and the split.
        sources: what the decoder will have too.
        contexts: uint8 (n,) under which the classes are coded, to be passed to the decoder again; None for none.
        threads: how many threads share the chunks; the bytes do not depend on it.

    Returns:
        The sections ``classes``, ``symbols`` and ``suffixes``.

    Raises:
        ValueError: the sources or contexts do not fit.
    """
    sources.check(layout, bits.size)

    def count(item: tuple[int, slice]) -> Int64s:
        start, part = item
        part = slice(start, min(start + _COUNTED, part.stop))
        keys = np.empty(part.stop - part.start, dtype=np.uint16)
        _classify(bits, layout, sources, start, part, keys)
        return np.bincount(keys, minlength=layout.keys)

    counted = map_in_threads(count, _chunks(bits.size), threads)
    table = ClassTable.of(layout, np.sum(counted, axis=0))
    symbols = np.empty(bits.size, dtype=np.uint8)
    suffixes = map_in_threads(_packer(bits, table, sources, symbols), _chunks(bits.size), threads)
    lengths = bytearray()
    for chunk in suffixes[:-1]:
        write_uvarint(lengths, len(chunk))
    return {
        "classes": table.write(),
        "symbols": _encode_symbols(symbols, contexts, table.keys.size, threads),
        "suffixes": b"".join((bytes(lengths), *suffixes)),
    }


def decode_residuals(
    sections: Mapping[str, Payload],
    count: int,
    layout: Layout,
    sources: Sources,
    contexts: UInt8s | None,
    threads: int = 1,
) -> Unsigned:
    """Inverse of :func:`encode_residuals`: the patterns, (count,).

    Raises:
        FormatError: the sections are malformed.
        CorruptionError: they are well-formed, but do not decode.
        ValueError: the sources or contexts do not fit.
    """
    from shrinkpoint.entropy.static import residual_kernels  # numba

    sources.check(layout, count)
    table = ClassTable.read(sections["classes"], layout)
    reader = ByteReader(sections["suffixes"], "suffixes")
    if reader.remaining < -(-count // _CHUNK) - 1:  # before memory is taken for a count that a header states
        raise FormatError(f"suffixes: {reader.remaining} bytes cannot hold {count} numbers")
    symbols = _decode_symbols(sections["symbols"], contexts, count, table.keys.size, threads)
    classes = residual_kernels.Classes(*map(_fixed, table.tables()))
    wide = bool(classes.widths.max() > 32)
    chunks = list(_chunks(count))
    lengths = [reader.uvarint(reader.remaining, "chunk length") for _ in chunks[:-1]]
    suffixes = [reader.take(length) for length in lengths] + [reader.rest()]
    out = np.empty(count, dtype=f"i{layout.width // 8}")

    def decode(item: tuple[tuple[int, slice], memoryview]) -> None:
        (start, part), suffix = item
        given = sources.given(layout, start, part)
        words = _fixed(
            np.frombuffer(bytes(suffix) + bytes(-len(suffix) % 4 + 4), dtype="<u4").astype(np.uint32)
        )
        arguments = given, layout.plan, classes, wide, residual_kernels.new_blocks()
        used = residual_kernels.unpack(_fixed(symbols[part]), words, *arguments, out[part])
        if -(-used // 8) != len(suffix):
            raise CorruptionError(
                f"suffixes: a chunk has {len(suffix)} bytes where its classes name {-(-used // 8)}"
            )

    map_in_threads(decode, zip(chunks, suffixes, strict=True), threads)
    return out.view(f"u{layout.width // 8}")


def _chunks(count: int) -> Iterator[tuple[int, slice]]:
    for start in range(0, count, _CHUNK):
        yield start, slice(start, min(start + _CHUNK, count))


def _fixed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A contiguous read-only view: one array type for the kernels, hence one compilation for all callers."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _classify(
    bits: Unsigned, layout: Layout, sources: Sources, start: int, part: slice, keys: UInt16s
) -> None:
    from shrinkpoint.entropy.static import residual_kernels  # numba

    signed = _fixed(bits[part].view(f"i{layout.width // 8}"))
    given = sources.given(layout, start, part)
    residual_kernels.classify(signed, given, layout.plan, residual_kernels.new_blocks(), keys)


def _packer(
    bits: Unsigned, table: ClassTable, sources: Sources, symbols: UInt8s
) -> Callable[[tuple[int, slice]], bytes]:
    from shrinkpoint.entropy.static import residual_kernels  # numba

    layout = table.layout
    index, classes = _fixed(table.index()), residual_kernels.Classes(*map(_fixed, table.tables()))
    widest = int(classes.widths.max()) + int(layout.magnitude)
    wide = widest > 31

    def pack(item: tuple[int, slice]) -> bytes:
        start, part = item
        given = sources.given(layout, start, part)
        signed = _fixed(bits[part].view(f"i{layout.width // 8}"))
        words = np.empty(signed.size * widest // 32 + 2, dtype=np.uint32)
        arguments = given, layout.plan, index, classes, wide, residual_kernels.new_blocks()
        used = residual_kernels.pack(signed, *arguments, symbols[part], words)
        return to_bytes(words.astype("<u4", copy=False).view(np.uint8)[: -(-used // 8)])

    return pack


def _encode_symbols(symbols: UInt8s, contexts: UInt8s | None, alphabet: int, threads: int) -> bytes:
    """By rANS under the contexts, or by zstd where a part from the middle shows repetitions that rANS does not see."""
    n_contexts = 1 if contexts is None else int(contexts.max()) + 1
    coded = encode_symbols(symbols, contexts, alphabet, n_contexts, threads)
    start = max(0, (symbols.size - _PROBE) // 2)
    probe = symbols[start : start + _PROBE]
    counts = count_symbols(probe, None, alphabet, 1)[0]
    share = len(coded) * probe.size / symbols.size
    if np.count_nonzero(counts) > 1 and len(encode_bytes(probe, 1, 1)) < share:
        packed = encode_bytes(symbols, 1, threads=threads)
        if len(packed) < len(coded):
            return b"".join((bytes([_BYTES]), packed))
    return b"".join((bytes([_RANS]), coded))


def _decode_symbols(
    payload: Payload, contexts: UInt8s | None, count: int, alphabet: int, threads: int
) -> UInt8s:
    reader = ByteReader(payload, "symbols")
    method = reader.byte()
    if method == _RANS:
        n_contexts = 1 if contexts is None else int(contexts.max()) + 1
        return decode_symbols(reader.rest(), contexts, count, alphabet, n_contexts, threads)
    if method != _BYTES:
        raise FormatError(f"symbols: unknown method {method}")
    symbols = decode_bytes(reader.rest(), count, 1, threads)
    if int(symbols.max()) >= alphabet:
        raise FormatError(f"symbols: symbol {int(symbols.max())} in an alphabet of {alphabet}")
    return symbols
