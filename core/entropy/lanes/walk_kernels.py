"""The walk through a chunk of a matrix, sixteen rows at a time: where each point is expected, its context and its symbol.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Encoder and decoder make the
same operations on fp32 and on integers in the same order: every machine gets the same bits. numba checks no bounds: whatever
depends on a payload is clamped, and the ends of words and bits are checked at every column.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Float32s, Int16s, Int32s, Int64s, Integer, UInt8s, UInt16s, UInt32s
from shrinkpoint.entropy.lanes.lowrank_kernels import LowRank, begin, corrected, follow, learn
from shrinkpoint.entropy.lanes.tile_kernels import LANES, add_product
from shrinkpoint.runtime.jit import jit_inlined, jit_part, jit_tiles

PHASES, ACTIVITIES = 9, 7
_EXACT = 8
ALPHABET = 2 * _EXACT - 1 + 4 * 13
"""Symbols: distances below 8 from the nearest point, then quarters of octaves of larger ones up to 2^16."""
FIRST_BIT, FREQUENCY_BIT = np.uint32(7), np.uint32(19)
"""Where a symbol's first of 4096 slots and its frequency are in an entry."""
BIT_MARGIN = 40
"""Bytes of zeros behind the bits of a stream, and twice as many words behind its words: no column takes more."""

_BUCKETS = 2 * _EXACT - 1
_FIRST_BUCKET = (127 + 3) << 2
_FARTHEST = np.float32(30_000)
_ROUND = np.float32(1.5 * 2**23)  # added and taken away, it rounds to the nearest even integer
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1), np.float32(0)
_PART = np.float32(2.0**-8)
_OF_PHASE = np.float32(2 * (PHASES - 1))
_BLOCK = 64  # columns whose points are in the first cache together
_DENSE, _EVERY = 8, 2  # batches after each of which directions are learned at first, and then
_ROW_PRIOR = np.float32(16)  # columns that the mean counts as, when a row's activity is found
_OF_COLUMNS = np.float32(0.03)  # squares that each column adds to a row's, in square steps: those of noise
_LEAST_RATE, _LEAST_ENERGY = np.float32(0.2), np.float32(1e-12)
_MOST_SQUARE, _MOST_ENERGY = 1 << 20, 1 << 28


class Room(NamedTuple):
    """Room for a batch of sixteen rows of n columns.

    Attributes:
        points: int32 (n, 16), in half steps on a trellis, in steps otherwise.
        places: fp32 (n, 16), in steps.
        expected: fp32 (n, 16): places with the low-rank prediction; then squares of errors.
        moves: fp32 (n, 16): points less places, in steps.
        flat: these four as 1-D arrays, whose loops LLVM turns into vectors.
        energies: fp32 (n,), mean square error of each column so far.
        activity: int32 (n,), half octaves of that.
        lanes: int32 (8, 16), of a column: nearest points, contexts, sides, states of the trellis, sums of squares so far,
            distances from the nearest points, half octaves of rows' squares, symbols.
    """

    points: Int32s
    places: Float32s
    expected: Float32s
    moves: Float32s
    flat: tuple[Int32s, Float32s, Float32s, Float32s]
    energies: Float32s
    activity: Int32s
    lanes: Int32s


class Stream(NamedTuple):
    """What an encoder fills or a decoder reads.

    Attributes:
        symbols: uint8 (n,) in the order of the walk; empty for a decoder.
        contexts: uint8 (n,).
        lookup: uint32 (256 contexts,), of a decoder: the entry of the first symbol that reaches into each 16 slots.
        entries: uint32 ((alphabet + 1) contexts,), of a decoder: a symbol, its first slot from `FIRST_BIT` on, and its frequency
            from `FREQUENCY_BIT` on.
        words: uint16, of a decoder, with 2 `BIT_MARGIN` zeros behind.
        bits: uint8, what symbols of large distances leave, with `BIT_MARGIN` bytes behind.
        states: uint32 (16,), of the lanes of a decoder.
        ends: int64 (3,): receives the numbers of words and bits, and whether a point was out of range or on no path.
    """

    symbols: UInt8s
    contexts: UInt8s
    lookup: UInt32s
    entries: UInt32s
    words: UInt16s
    bits: UInt8s
    states: UInt32s
    ends: Int64s


@jit_inlined
def _half_octaves(x: np.float32) -> np.int32:
    """``2 log2 x`` of a positive number, about."""
    return (np.float32(x).view(np.int32) - np.int32(127 << 23)) >> np.int32(22)


@jit_inlined
def _expect(expected: Float32s, activity: np.int32, odd: np.int32, lanes: Int32s) -> None:
    """The nearest point of each lane's state, its context, and on which side of it the value is expected."""
    near, contexts, sides, states, rows = lanes[0], lanes[1], lanes[2], lanes[3], lanes[6]
    for lane in range(LANES):
        y = expected[lane] - _HALF * np.float32(states[lane] & odd)
        whole = (y + _ROUND) - _ROUND
        rest = y - whole
        phase = np.int32((abs(rest) * _OF_PHASE + _ROUND) - _ROUND)
        busy = np.int32(activity + rows[lane]) >> np.int32(1)
        busy = min(max(busy, np.int32(0)), np.int32(ACTIVITIES - 1))
        near[lane] = np.int32(whole)
        contexts[lane] = np.int32(np.int32(busy * np.int32(PHASES)) + phase)
        sides[lane] = np.int32(1) if rest >= _ZERO else np.int32(-1)


@jit_inlined
def _settle(points: Int32s, odd: np.int32, lanes: Int32s) -> None:
    """Points and next states of a column, from the distances."""
    near, states, energies, distances = lanes[0], lanes[3], lanes[4], lanes[5]
    for lane in range(LANES):
        d = distances[lane]
        k = np.int32(near[lane] + d)
        s = states[lane]
        square = np.int32(min(abs(d), np.int32(1024)))
        energies[lane] = min(np.int32(energies[lane] + np.int32(square * square)), np.int32(_MOST_ENERGY))
        points[lane] = (k << odd) + (s & odd)
        states[lane] = ((np.int32(2) * s) & np.int32(2)) | ((k ^ (s >> np.int32(1))) & odd)


@jit_part
def _moved(
    flat: tuple[Int32s, Float32s, Float32s, Float32s], first: int, last: int, step: np.float32
) -> None:
    """Moves and squares of errors of a segment."""
    points, places, expected, moves = (
        flat[0][first:last],
        flat[1][first:last],
        flat[2][first:last],
        flat[3][first:last],
    )
    for i in range(moves.size):
        moves[i] = np.float32(points[i]) * step - places[i]
    for i in range(moves.size):
        error = np.float32(points[i]) * step - expected[i]
        expected[i] = error * error


@jit_part
def _copy(given: Float32s, out: Float32s) -> None:
    for i in range(out.size):
        out[i] = given[i]


@jit_part
def _clamp(expected: Float32s) -> None:
    for i in range(expected.size):
        expected[i] = max(-_FARTHEST, min(_FARTHEST, expected[i]))  # also of NaN


@jit_part
def _load(
    points: Int16s, places: Int16s, at: int, some: int, size: int, columns: int, encoding: bool, room: Room
) -> None:
    """Fill the room with the rows from element ``at`` on; with zeros where there are none, or no places."""
    if at == 0 or at + LANES * columns > size:
        for i in range(LANES * columns):
            room.flat[0][i] = 0
            room.flat[1][i] = _ZERO
    for block in range(0, columns, _BLOCK):
        for lane in range(some):
            start = at + lane * columns
            end = min(block + _BLOCK, columns, size - start)
            if places.size:
                for j in range(block, end):
                    room.places[j, lane] = np.float32(places[start + j]) * _PART
            if encoding:
                for j in range(block, end):
                    room.points[j, lane] = np.int32(points[start + j])


@jit_part
def _store(points: Int16s, at: int, some: int, size: int, columns: int, room: Room) -> bool:
    """Put the rows from the room to element ``at``; False if one is out of range."""
    if at + LANES * columns > size:
        for j in range(columns):
            for lane in range(LANES):
                if at + lane * columns + j >= size:
                    room.points[j, lane] = 0
    largest = np.int32(0)
    flat = room.flat[0]
    for i in range(flat.size):
        k = flat[i]
        largest = max(largest, k ^ (k >> np.int32(31)))  # -1 - k of negative ones
    for block in range(0, columns, _BLOCK):
        for lane in range(some):
            start = at + lane * columns
            row = points[start + block : start + min(block + _BLOCK, columns, size - start)]
            of_block = room.points[block : block + row.size]
            for j in range(row.size):
                row[j] = np.int16(of_block[j, lane])
    return bool(largest <= np.int32(32767))


@jit_inlined
def _put(some: int, at: Integer, bit: Integer, lanes: Int32s, stream: Stream) -> Integer:
    """Note the symbols of a column; the number of bits then."""
    contexts, sides, distances = lanes[1], lanes[2], lanes[5]
    largest = np.int32(0)
    for lane in range(LANES):
        largest = max(largest, abs(distances[lane]))
    if largest < _EXACT:
        for lane in range(some):
            d = np.int32(distances[lane] * sides[lane])
            stream.symbols[at + lane] = np.uint8(
                np.int32(2) * abs(d) - (np.int32(1) if d > 0 else np.int32(0))
            )
            stream.contexts[at + lane] = np.uint8(contexts[lane])
        return bit
    for lane in range(some):
        d = np.int32(distances[lane] * sides[lane])
        size, sign = abs(d), np.int32(1) if d > 0 else np.int32(0)
        stream.contexts[at + lane] = np.uint8(contexts[lane])
        if size < _EXACT:
            stream.symbols[at + lane] = np.uint8(np.int32(2) * size - sign)
            continue
        # the exponent of a float and its two first bits: quarters of octaves
        bits = np.float32(size).view(np.int32) >> np.int32(21)
        width = (bits >> np.int32(2)) - np.int32(127 + 2)
        rest = (size & ((np.int32(1) << width) - np.int32(1))) << np.int32(1) | sign
        stream.symbols[at + lane] = np.uint8(np.int32(_BUCKETS) + bits - np.int32(_FIRST_BUCKET))
        rest <<= np.int32(bit & 7)
        byte = bit >> 3
        stream.bits[byte] |= np.uint8(rest & 255)
        stream.bits[byte + 1] |= np.uint8((rest >> 8) & 255)
        stream.bits[byte + 2] |= np.uint8((rest >> 16) & 255)
        bit += np.int64(width) + 1
    return bit


@jit_inlined
def _take(
    some: int, position: Integer, bit: Integer, lanes: Int32s, stream: Stream
) -> tuple[Integer, Integer]:
    """Decode the distances of a column; the numbers of words and bits then."""
    contexts, sides, distances, numbers = lanes[1], lanes[2], lanes[5], lanes[7]
    # The states do not depend on where the words are that they take: these are another loop.
    for lane in range(some):
        # unsigned indices, for numba would look for negative ones
        context, x = np.uint64(contexts[lane]), stream.states[lane]
        slot = x & np.uint32(4095)
        entry = stream.lookup[context << np.uint64(8) | np.uint64(slot >> np.uint32(4))]
        beyond = np.uint32(slot - (entry >> FIRST_BIT & np.uint32(4095)))
        while beyond >= entry >> FREQUENCY_BIT:
            at = context * np.uint64(ALPHABET + 1) + np.uint64(entry & np.uint32(127)) + np.uint64(1)
            entry = stream.entries[at]
            beyond = np.uint32(slot - (entry >> FIRST_BIT & np.uint32(4095)))
        stream.states[lane] = (entry >> FREQUENCY_BIT) * (x >> np.uint32(12)) + beyond
        numbers[lane] = np.int32(entry & np.uint32(127))
    for lane in range(some):
        x = stream.states[lane]
        short = x < np.uint32(32768)
        word = np.uint32(stream.words[np.uint64(position)])
        stream.states[lane] = ((x << np.uint32(16)) | word) if short else x
        position += np.int64(short)
    largest = np.int32(0)
    for lane in range(LANES):
        number = numbers[lane]
        size = (number + np.int32(1)) >> np.int32(1)
        distances[lane] = np.int32((size if number & np.int32(1) else -size) * sides[lane])
        largest = max(largest, number)
    if largest < _BUCKETS:
        return position, bit
    for lane in range(some):
        if numbers[lane] >= _BUCKETS:
            bucket = numbers[lane] - np.int32(_BUCKETS)
            width = (bucket >> np.int32(2)) + np.int32(1)
            byte = bit >> 3
            rest = np.int32(stream.bits[byte]) | np.int32(stream.bits[byte + 1]) << np.int32(8)
            rest = (rest | np.int32(stream.bits[byte + 2]) << np.int32(16)) >> np.int32(bit & 7)
            size = (np.int32(4) | (bucket & np.int32(3))) << width
            size |= (rest >> np.int32(1)) & ((np.int32(1) << width) - np.int32(1))
            distances[lane] = (size if rest & np.int32(1) else -size) * sides[lane]
            bit += np.int64(width) + 1
    return position, bit


@jit_tiles
def walk(
    points: Int16s,
    places: Int16s,
    columns: int,
    mean: np.float32,
    low_rank: bool,
    bounds: Int64s,
    directions: LowRank,
    room: Room,
    stream: Stream,
) -> None:
    """Walk through a chunk, as an encoder where there is room for symbols, else as a decoder.

    Args:
        points: int16 (n,): read, or filled. In half steps, on a trellis of four states, if there are places.
        places: int16 (n,), in 1/256 step; or empty.
        columns: of a row; the last row may be shorter.
        mean: mean square of points less places, about, in square steps.
        low_rank: whether to predict from the rows before.
        bounds: (s + 1,), the segments of a row.
        directions: room for them.
        room: see there.
        stream: see there.
    """
    encoding = stream.symbols.size > 0
    odd = np.int32(1) if places.size else np.int32(0)  # on a trellis, the bit of a state that points share
    size = points.size
    # numba compiles a part that is called with a constant once more for that
    at, position, bit = np.int64(0), np.int64(0), np.int64(0)
    step = _HALF if places.size else _ONE
    of_mean = _ONE / mean
    lanes = room.lanes
    word_limit, bit_limit = stream.words.size - 2 * BIT_MARGIN, 8 * (stream.bits.size - BIT_MARGIN)
    known, sound = False, True
    begin(directions, mean)
    for j in range(columns):
        room.energies[j] = mean
    for start in range(0, size, LANES * columns):
        number = start // (LANES * columns)
        rows = min(LANES, (size - start + columns - 1) // columns)
        tail = min(columns, size - start - (rows - 1) * columns)  # columns of the last of these rows
        _load(points, places, start, rows, size, columns, encoding, room)
        for lane in range(LANES):
            lanes[3, lane] = 0
            lanes[4, lane] = 0
        for a in range(LANES):
            for lane in range(LANES):
                directions.u[a, lane] = _ZERO
                directions.sums[a, lane] = _ZERO
        for j in range(columns):
            room.activity[j] = _half_octaves(room.energies[j] * of_mean) + np.int32(ACTIVITIES)
        usual = _ROW_PRIOR * mean
        for segment in range(bounds.size - 1):
            first, last = bounds[segment], bounds[segment + 1]
            if known:
                add_product(
                    directions.v[first:last], directions.u, room.places[first:last], room.expected[first:last]
                )
            else:
                _copy(room.flat[1][LANES * first : LANES * last], room.flat[2][LANES * first : LANES * last])
            _clamp(room.flat[2][LANES * first : LANES * last])
            seen = _OF_COLUMNS * np.float32(first) + _ROW_PRIOR * mean
            weight = _ONE / usual
            for lane in range(LANES):
                lanes[6, lane] = _half_octaves((np.float32(lanes[4, lane]) + seen) * weight)
            for j in range(first, last):
                usual += room.energies[j]
                _expect(room.expected[j], room.activity[j], odd, lanes)
                some = rows if j < tail else rows - 1
                if encoding:
                    of_column = room.points[j]
                    strange = np.int32(0)
                    for lane in range(LANES):
                        k = of_column[lane]
                        strange |= (k ^ lanes[3, lane]) & odd if lane < some else np.int32(0)
                        k = (k - (lanes[3, lane] & odd)) >> odd
                        lanes[5, lane] = k - lanes[0, lane] if lane < some else np.int32(0)
                    sound &= strange == 0
                    bit = _put(some, at, bit, lanes, stream)
                    at += some
                else:
                    if position > word_limit or bit > bit_limit:
                        stream.ends[2] = 1
                        return
                    for lane in range(some, LANES):
                        lanes[7, lane] = 0
                    position, bit = _take(some, position, bit, lanes, stream)
                _settle(room.points[j], odd, lanes)
            _moved(room.flat, LANES * first, LANES * last, step)
            if low_rank:
                corrected(directions, room.moves, segment, first, last, known and segment + 2 < bounds.size)
        if not encoding:
            sound &= _store(points, start, rows, size, columns, room)
        if start + LANES * columns < size:
            rate = max(_ONE / np.float32(number + 1), _LEAST_RATE)
            for j in range(columns):
                e = room.expected[j]
                total = ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]))
                total += ((e[8] + e[9]) + (e[10] + e[11])) + ((e[12] + e[13]) + (e[14] + e[15]))
                energy = room.energies[j] + (total * np.float32(1 / LANES) - room.energies[j]) * rate
                room.energies[j] = max(_LEAST_ENERGY, energy)
            if low_rank and (number < _DENSE or number % _EVERY == 0):
                learn(directions, room.moves, rate)
                follow(directions, bounds)
                known = True
    stream.ends[0], stream.ends[1], stream.ends[2] = position, bit, 0 if sound else 1
