"""Coding matrices of integers that are nearly predictable: points of weights on their trellis, levels of moments.

A matrix is walked through in batches of sixteen rows, column by column, each row on a lane of its own. Where a point is expected is
its place, if there is one, and what the directions of the rows before add to it (`shrinkpoint.entropy.lanes.lowrank_kernels`).
Its symbol is the distance from the point that is nearest to that. Its context is how far from that point it is expected, in nine
phases, and how far the points of its column and its row were from where they were expected, in seven activities. Contexts share
static tables.

Chunks of whole rows do not depend on each other, nor on the number of threads. Payload (integers are little-endian, "varint" is 7
bits per byte)::

    lengths     a varint for each chunk but the last
    chunks

    flags       bit 0: rows are predicted from the rows before; bit 1: no states follow, all are 2^15; others 0
    mean        fp32: mean square of what is expected to lie beyond predictions, about, in square steps
    tables      number of tables less 1; if it is not 0, the table of each context in 4 bits, low bits first; of each table the
                number of its symbols less 1, and as many counts of 8 bits
    states      u32 of each lane that has a row, 16 at most
    bits        a varint: how many bytes; then these, what symbols of large distances leave, low bits first
    words       u16, to the end

A chunk has as many rows as fit in 2^20 elements, in sixteens, but at least 512; the last one has fewer.
"""

import numpy as np

from shrinkpoint.arrays import Int16s, Int64s
from shrinkpoint.entropy.wire import ByteReader, Payload, parts_of, write_uvarint
from shrinkpoint.errors import CorruptionError, FormatError
from shrinkpoint.runtime.threads import map_in_threads

_LANES = 16
_CHUNK, _CHUNK_ROWS = 1 << 20, 512
_LEAST_ROWS = 2 * _LANES  # for a prediction from the rows before
_SEGMENT = 16
_LOW_RANK, _NO_STATES = 1, 2
_LEAST_MEAN, _MOST_MEAN = 1e-9, 1e10
_NO_PLACES = np.zeros(0, np.int16)


def encode_matrix(points: Int16s, places: Int16s | None, *, width: int, predictable: bool) -> bytes:
    """Code a matrix.

    Args:
        points: int16 (n,). With places: in half steps, from the even points that places are counted from, each row a path of the
            trellis (`shrinkpoint.entropy.lanes.trellis`). Without: of any kind.
        places: int16 (n,) in 1/256 of a step: where points are expected; None for 0.
        width: elements of a row, as of `shrinkpoint.entropy.lanes.trellis.row_width`.
        predictable: whether rows may be predictable from those before.

    Returns:
        The payload; empty without elements.

    Raises:
        ValueError: points are no paths.
    """
    chunks = map_in_threads(
        lambda part: _encode(points[part], _part(places, part), width, predictable),
        _spans(points.size, width),
    )
    out = bytearray()
    for chunk in chunks[:-1]:
        write_uvarint(out, len(chunk))
    return b"".join((bytes(out), *chunks))


def decode_matrix(payload: Payload, size: int, places: Int16s | None, *, width: int) -> Int16s:
    """Inverse of `encode_matrix`; int16 (size,).

    Raises:
        FormatError: the payload is malformed.
        CorruptionError: the payload is well-formed, but a chunk does not end where the encoder began.
    """
    reader = ByteReader(payload, "matrix payload")
    points = np.zeros(size, np.int16)
    spans = _spans(size, width)
    lengths = [reader.uvarint(reader.remaining, "chunk length") for _ in spans[:-1]]
    chunks = [reader.take(length) for length in lengths]
    if spans:
        chunks.append(reader.rest())
    reader.finish()

    def decode(work: tuple[slice, memoryview]) -> None:
        part, chunk = work
        _decode(chunk, points[part], _part(places, part), width)

    map_in_threads(decode, zip(spans, chunks, strict=True))
    return points


def _part(places: Int16s | None, part: slice) -> Int16s:
    return _NO_PLACES if places is None else np.ascontiguousarray(places[part])


def _spans(size: int, width: int) -> list[slice]:
    return parts_of(size, max(_CHUNK_ROWS, _CHUNK // width // _LANES * _LANES) * width)


def _bounds(width: int) -> Int64s:
    """Segments of a row, each half as long as what is before it."""
    found = [0]
    while found[-1] < width:
        found.append(min(width, found[-1] + max(_SEGMENT, found[-1] // 2 // _SEGMENT * _SEGMENT)))
    return np.array(found, np.int64)


def _walk(points: Int16s, places: Int16s, width: int, mean: float, low_rank: bool, stream: object) -> None:
    from shrinkpoint.entropy.lanes import lowrank_kernels, walk_kernels  # numba

    bounds = _bounds(width)
    sizes = (width, bounds.size - 1) if low_rank else (0, 0)
    directions = lowrank_kernels.new_low_rank(*sizes)
    flat = (
        np.empty(width * _LANES, np.int32),
        np.empty(width * _LANES, np.float32),
        np.empty(width * _LANES, np.float32),
        np.empty(width * _LANES, np.float32),
    )
    room = walk_kernels.Room(
        points=flat[0].reshape(width, _LANES),
        places=flat[1].reshape(width, _LANES),
        expected=flat[2].reshape(width, _LANES),
        moves=flat[3].reshape(width, _LANES),
        flat=flat,
        energies=np.empty(width, np.float32),
        activity=np.empty(width, np.int32),
        lanes=np.empty((8, _LANES), np.int32),
    )
    walk_kernels.walk(points, places, width, np.float32(mean), low_rank, bounds, directions, room, stream)


def _encode(points: Int16s, places: Int16s, width: int, predictable: bool) -> bytes:
    from shrinkpoint.entropy.lanes import rans_kernels, walk_kernels  # numba

    size, tables, alphabet = points.size, rans_kernels.CONTEXTS, walk_kernels.ALPHABET
    points = np.ascontiguousarray(points)
    low_rank = predictable and size >= _LEAST_ROWS * width
    mean = _mean(points, places)
    symbols, contexts = np.empty(size, np.uint8), np.empty(size, np.uint8)
    room = np.zeros(2 * size + walk_kernels.BIT_MARGIN, np.uint8)  # of bits, then of words
    stream = walk_kernels.Stream(
        symbols=symbols,
        contexts=contexts,
        lookup=np.zeros(0, np.uint32),
        entries=np.zeros(0, np.uint32),
        words=np.zeros(0, np.uint16),
        bits=room,
        states=np.zeros(_LANES, np.uint32),
        ends=np.zeros(3, np.int64),
    )
    _walk(points, places, width, mean, low_rank, stream)
    if stream.ends[2]:
        raise ValueError("the points of each row must be a path of the trellis")
    table_of, codes = np.zeros(tables, np.uint8), np.zeros((tables, alphabet), np.uint8)
    count = rans_kernels.fit(
        symbols,
        contexts,
        np.zeros((tables + 1, alphabet), np.int64),
        np.zeros(tables),
        np.full((tables, tables), -np.inf),
        table_of,
        codes,
    )
    entries = np.zeros((tables, alphabet + 1), np.uint32)
    rans_kernels.prepare(table_of, codes[:count], entries, np.zeros((0, 256), np.uint32))
    many = (int(stream.ends[1]) + 7) // 8
    bits, words = room[:many].tobytes(), room.view(np.uint16)
    first = rans_kernels.encode(symbols, contexts, size, width, entries, words, stream.states)
    has_states = bool((stream.states != rans_kernels.LOWER).any())
    out = bytearray([(_LOW_RANK if low_rank else 0) | (0 if has_states else _NO_STATES)])
    out += np.float32(mean).astype("<f4").tobytes()
    out.append(count - 1)
    if count > 1:
        even = np.append(table_of, np.zeros(tables % 2, np.uint8))
        out += (even[::2] | even[1::2] << np.uint8(4)).tobytes()
    for row in codes[:count]:
        used = int(np.flatnonzero(row)[-1]) + 1
        out.append(used - 1)
        out += row[:used].tobytes()
    if has_states:
        out += stream.states[: -(-size // width)].astype("<u4").tobytes()
    write_uvarint(out, many)
    return b"".join((bytes(out), bits, words[first:].astype("<u2", copy=False).tobytes()))


def _mean(points: Int16s, places: Int16s) -> float:
    """About half the mean square of moves: the low-rank prediction leaves less."""
    stride = max(points.size >> 16, 1) | 1
    moves = points[::stride].astype(np.float64)
    if places.size:
        moves = moves / 2 - places[::stride] / 256
    return float(np.float32(min(0.5 * float(np.square(moves).mean()) + _LEAST_MEAN, _MOST_MEAN)))


def _decode(chunk: memoryview, points: Int16s, places: Int16s, width: int) -> None:
    from shrinkpoint.entropy.lanes import rans_kernels, walk_kernels  # numba

    reader = ByteReader(chunk, "matrix chunk")
    tables, alphabet, margin = rans_kernels.CONTEXTS, walk_kernels.ALPHABET, walk_kernels.BIT_MARGIN
    flags = reader.byte()
    mean = float(np.frombuffer(reader.take(4), "<f4")[0])
    low_rank = bool(flags & _LOW_RANK)
    if flags > _LOW_RANK + _NO_STATES or not _LEAST_MEAN / 2 <= mean <= 2 * _MOST_MEAN:
        raise FormatError("matrix chunk: its model is malformed")
    count = reader.byte() + 1
    if count > rans_kernels.MAX_TABLES:
        raise FormatError(f"matrix chunk: {count} tables")
    table_of = np.zeros(tables + tables % 2, np.uint8)
    if count > 1:
        packed = np.frombuffer(reader.take(table_of.size // 2), np.uint8)
        table_of[::2], table_of[1::2] = packed & 15, packed >> 4
        if int(table_of.max()) >= count or table_of[tables:].any():
            raise FormatError("matrix chunk: a context has no table")
    codes = np.zeros((count, alphabet), np.uint8)
    for row in codes:
        used = reader.byte() + 1
        if used > alphabet:
            raise FormatError(f"matrix chunk: a table of {used} symbols")
        row[:used] = np.frombuffer(reader.take(used), np.uint8)
    states = np.full(_LANES, rans_kernels.LOWER, np.uint32)
    if not flags & _NO_STATES:
        stored = states[: -(-points.size // width)]
        stored[:] = np.frombuffer(reader.take(4 * stored.size), "<u4")
    many = reader.uvarint(reader.remaining, "number of bits' bytes")
    bits = np.zeros(many + margin, np.uint8)
    bits[:many] = np.frombuffer(reader.take(many), np.uint8)
    if reader.remaining % 2:
        raise FormatError(f"matrix chunk: {reader.remaining} bytes are not whole 16-bit words")
    rest = np.frombuffer(reader.rest(), "<u2")
    words = np.zeros(rest.size + 2 * margin, np.uint16)
    words[: rest.size] = rest
    entries, lookup = np.zeros((tables, alphabet + 1), np.uint32), np.zeros((tables, 256), np.uint32)
    if not rans_kernels.prepare(table_of, codes, entries, lookup):
        raise FormatError("matrix chunk: a table without counts")
    stream = walk_kernels.Stream(
        symbols=np.zeros(0, np.uint8),
        contexts=np.zeros(0, np.uint8),
        lookup=lookup.reshape(-1),
        entries=entries.reshape(-1),
        words=words,
        bits=bits,
        states=states,
        ends=np.zeros(3, np.int64),
    )
    _walk(points, places, width, mean, low_rank, stream)
    position, bit, wrong = (int(end) for end in stream.ends)
    if wrong or position != rest.size or (bit + 7) // 8 != many or not (states == rans_kernels.LOWER).all():
        raise CorruptionError("matrix chunk: the data do not end in the state from which the encoder began")
