"""Readers of the entropy coders by docs/format.md alone and without a thought for speed; pcodec files are read by its library."""

import lzma

import numpy as np
import zstandard
from pcodec import standalone


class Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        self.at += count
        assert self.at <= len(self.data)
        return self.data[self.at - count : self.at]

    def byte(self):
        return self.take(1)[0]

    def varint(self):
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def rest(self):
        return self.take(len(self.data) - self.at)


class Bits:
    """Numbers from the bits of a cursor, the first ones in a byte's low bits."""

    def __init__(self, cursor):
        self.cursor, self.reference, self.left = cursor, 0, 0

    def take(self, count):
        value = 0
        for k in range(count):
            if not self.left:
                self.reference, self.left = self.cursor.byte(), 8
            value |= (self.reference & 1) << k
            self.reference, self.left = self.reference >> 1, self.left - 1
        return value


def read_frequencies(cursor, alphabet):
    """Frequency of each present symbol of one table, ascending."""
    present, listed = cursor.byte() + 1, -(-alphabet // 8)
    if present == alphabet:
        symbols = list(range(alphabet))
    elif present <= listed:
        symbols = list(cursor.take(present))
    else:
        bitmap = cursor.take(listed)
        symbols = [s for s in range(alphabet) if bitmap[s // 8] >> (7 - s % 8) & 1]
    return frequencies_of(dict(zip(symbols, cursor.take(present), strict=True)))


def weight_of(code):
    return code if code < 8 else (8 + code % 8) * 2 ** max(code // 8 - 1, 0)


def frequencies_of(codes):
    weights = {s: weight_of(c) for s, c in codes.items()}
    total = sum(weights.values())
    frequencies = {s: max(w * 2**20 // total, 1) for s, w in weights.items()}
    missing = 2**20 - sum(frequencies.values())
    if missing > 0:
        for symbol in sorted(weights, key=lambda s: (-(weights[s] * 2**20 % total), s))[:missing]:
            frequencies[symbol] += 1
    elif missing < 0:
        frequencies[min(frequencies, key=lambda s: (-frequencies[s], s))] += missing
    return {symbol: frequencies[symbol] for symbol in sorted(frequencies)}


def intervals(frequencies):
    """(start, end, symbol) of each symbol of a table."""
    start, parts = 0, []
    for symbol, frequency in frequencies.items():
        parts.append((start, start + frequency, symbol))
        start += frequency
    assert start == 2**20
    return parts


def read_tables(cursor, occurring, alphabet):
    """For each of the contexts that occur, ascending, the number of its table; and the tables."""
    count = cursor.byte() + 1
    if count == len(occurring):
        which = range(count)
    elif count > 1:
        which = cursor.take(len(occurring))
    else:
        which = [0] * len(occurring)
    tables = [read_frequencies(cursor, alphabet) for _ in range(count)]
    return dict(zip(occurring, which, strict=True)), tables


def read_chunk(data, contexts, tables, lanes):
    cursor = Cursor(data)
    states = [int.from_bytes(cursor.take(6), "little") for _ in range(4)] if lanes == 4 else [cursor.varint()]
    words = list(np.frombuffer(cursor.rest(), "<u2"))[::-1]
    symbols = []
    for i, context in enumerate(contexts):
        x = states[i % lanes]
        slot = x % 2**20
        start, end, symbol = next(part for part in tables[context] if part[0] <= slot < part[1])
        x = (end - start) * (x // 2**20) + slot - start
        taken = 0
        while x < 2**32 and words and (lanes == 1 or taken < 2):
            x = x * 2**16 + int(words.pop())
            taken += 1
        states[i % lanes] = x
        symbols.append(symbol)
    assert not words
    assert set(states) == {2**32 if lanes == 4 else 0}
    return symbols


def read_rans(data, contexts, alphabet):
    """`contexts` has one entry per symbol; all 0 where there are none."""
    cursor, count = Cursor(data), len(contexts)
    if not count:
        assert not data
        return []
    mode = cursor.byte()
    if mode == 0:
        return [cursor.byte()] * count
    if mode == 1:
        width = next(width for width in (1, 2, 4, 8) if alphabet <= 2**width)
        packed = cursor.rest()
        return [packed[i * width // 8] >> (i * width % 8) & (2**width - 1) for i in range(count)]
    assert mode == 2
    head = cursor.byte()
    assert head & 0x60 == 0
    size = 2 ** (head & 31)
    numbers, tables = read_tables(cursor, sorted(set(contexts)), alphabet)
    tables = {context: intervals(tables[number]) for context, number in numbers.items()}
    chunks = [contexts[start : start + size] for start in range(0, count, size)]
    lengths = [cursor.varint() for _ in chunks[:-1]]
    parts = [cursor.take(length) for length in lengths] + [cursor.rest()]
    lanes = 4 if head & 0x80 else 1
    return [
        s for data, part in zip(parts, chunks, strict=True) for s in read_chunk(data, part, tables, lanes)
    ]


def read_numbers(data, count, item_size):
    """Little-endian."""
    cursor, found = Cursor(data), []
    sizes = [min(2**20, count - start) for start in range(0, count, 2**20)]
    heads = [(cursor.byte(), cursor.varint()) for _ in sizes]
    for size, (method, length) in zip(sizes, heads, strict=True):
        chunk = cursor.take(length)
        assert method < 3
        if method == 1:
            chunk = zstandard.ZstdDecompressor().decompress(chunk)
        elif method == 2:
            array = standalone.simple_decompress(chunk)
            assert array.dtype == np.dtype(f"u{item_size}")
            chunk = array.astype(f"<u{item_size}").tobytes()
        assert len(chunk) == size * item_size
        found.append(chunk)
    assert not cursor.rest()
    return b"".join(found)


def read_huffman(data):
    cursor = Cursor(data)
    count = cursor.varint()
    if not count:
        return []
    distinct = cursor.varint()
    first = cursor.varint()
    values = [first // 2 if first % 2 == 0 else -(first + 1) // 2]
    for _ in range(distinct - 1):
        values.append(values[-1] + cursor.varint())
    lengths = cursor.take(distinct)
    if distinct == 1:
        return values * count
    return read_codes(cursor, count, values, lengths)


def read_runs(integers):
    values, previous = [], None
    for integer in integers:
        if integer <= 0:
            values.append(-integer)
        else:
            assert previous is not None
            assert previous <= 0
            assert 2 <= integer <= 65535
            values += [values[-1]] * (integer - 1)
        previous = integer
    return values


def read_codes(cursor, count, values, lengths):
    """Canonical codes, to the end."""
    codes, code, previous = {}, 0, 0
    for length, value in sorted(zip(lengths, values, strict=True)):
        code <<= length - previous
        codes[length, code] = value
        code, previous = code + 1, length
    bits = iter("".join(f"{byte:08b}" for byte in cursor.rest()))
    symbols = []
    for _ in range(count):
        word = ""
        while (len(word), int(word or "0", 2)) not in codes:
            word += next(bits)
        symbols.append(codes[len(word), int(word, 2)])
    rest = list(bits)
    assert len(rest) < 8
    assert "1" not in rest
    return symbols


def read_ranked(data, count, lengths):
    if len(lengths) == 1:
        assert not data
        return [0] * count
    return read_codes(Cursor(data), count, range(len(lengths)), lengths)


def read_symbol_plane(data, count, alphabet, previous=None, lstm=None):
    """`lstm` reads what method 6 has."""
    method, body = data[0], data[1:]
    width = max(1, (alphabet - 1).bit_length())
    if method == 1:
        filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**23}]
        body = lzma.decompress(body, format=lzma.FORMAT_RAW, filters=filters)
    if method in (0, 1):
        assert len(body) == -(-count * width // 8)
        bits = "".join(f"{byte:08b}" for byte in body)
        return [int(bits[i * width : (i + 1) * width], 2) for i in range(count)]
    if method == 2:
        return read_huffman(body)
    if method == 3:
        return [(d + p) % alphabet for d, p in zip(read_huffman(body), previous, strict=True)]
    if method in (4, 5):
        return read_rans(body, list(previous) if method == 5 else [0] * count, alphabet)
    assert method == 6
    return lstm(body)


def read_lengths(cursor, count):
    lengths = [cursor.varint() for _ in range(count - 1)]
    return [cursor.take(length) for length in lengths] + [cursor.rest()]
