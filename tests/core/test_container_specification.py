"""A second reader of the entropy coders, by docs/format.md alone and without a thought for speed, reads what ours wrote."""

import numpy as np
import pytest
import zstandard

from shrinkpoint.entropy.bytes import delta_bits, encode_bytes
from shrinkpoint.entropy.huffman import encode_huffman
from shrinkpoint.entropy.rans import encode_symbols
from shrinkpoint.entropy.rle import encode_runs


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


def read_frequencies(cursor, alphabet):
    """Intervals of slots, (start, end, symbol), of one table."""
    present, listed = cursor.byte() + 1, -(-alphabet // 8)
    if present == alphabet:
        symbols = list(range(alphabet))
    elif present <= listed:
        symbols = list(cursor.take(present))
    else:
        bitmap = cursor.take(listed)
        symbols = [s for s in range(alphabet) if bitmap[s // 8] >> (7 - s % 8) & 1]
    codes = dict(zip(symbols, cursor.take(present), strict=True))
    weights = {s: c if c < 8 else (8 + c % 8) * 2 ** max(c // 8 - 1, 0) for s, c in codes.items()}
    total = sum(weights.values())
    frequencies = {s: max(w * 2**20 // total, 1) for s, w in weights.items()}
    missing = 2**20 - sum(frequencies.values())
    if missing > 0:
        for symbol in sorted(weights, key=lambda s: (-(weights[s] * 2**20 % total), s))[:missing]:
            frequencies[symbol] += 1
    elif missing < 0:
        frequencies[min(frequencies, key=lambda s: (-frequencies[s], s))] += missing
    start, intervals = 0, []
    for symbol in sorted(frequencies):
        intervals.append((start, start + frequencies[symbol], symbol))
        start += frequencies[symbol]
    assert start == 2**20
    return intervals


def read_tables(cursor, contexts, alphabet):
    occurring = sorted(set(contexts))
    count = cursor.byte() + 1
    if count == len(occurring):
        which = range(count)
    elif count > 1:
        which = cursor.take(len(occurring))
    else:
        which = [0] * len(occurring)
    tables = [read_frequencies(cursor, alphabet) for _ in range(count)]
    return {context: tables[index] for context, index in zip(occurring, which, strict=True)}


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
    tables = read_tables(cursor, contexts, alphabet)
    chunks = [contexts[start : start + size] for start in range(0, count, size)]
    lengths = [cursor.varint() for _ in chunks[:-1]]
    parts = [cursor.take(length) for length in lengths] + [cursor.rest()]
    lanes = 4 if head & 0x80 else 1
    return [
        s for data, part in zip(parts, chunks, strict=True) for s in read_chunk(data, part, tables, lanes)
    ]


def read_planes(data, count, item_size):
    cursor = Cursor(data)
    starts = [(plane, start) for plane in range(item_size) for start in range(0, count, 2**20)]
    heads = [(cursor.byte(), cursor.varint()) for _ in starts]
    elements = np.zeros((count, item_size), np.uint8)
    for (plane, start), (method, length) in zip(starts, heads, strict=True):
        chunk, size = cursor.take(length), min(2**20, count - start)
        if method == 1:
            chunk = zstandard.ZstdDecompressor().decompress(chunk)
        elif method == 2:
            chunk = bytes(read_rans(chunk, [0] * size, 256))
        elements[start : start + size, plane] = np.frombuffer(chunk, np.uint8)
    assert not cursor.rest()
    return elements.tobytes()


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


@pytest.mark.parametrize("skew", [0.0, 0.3, 2.0])
@pytest.mark.parametrize(
    ("count", "alphabet", "n_contexts"),
    [(0, 5, 1), (1, 5, 1), (50, 2, 1), (3000, 17, 17), (20_001, 32, 32), (40_003, 200, 3), (270_001, 3, 1)],
)
def test_rans(count, alphabet, n_contexts, skew):
    rng = np.random.default_rng(count)
    weights = np.exp(-skew * np.arange(alphabet))
    contexts = rng.integers(0, n_contexts, count).astype(np.uint8)
    symbols = rng.choice(alphabet, count, p=weights / weights.sum()).astype(np.uint8)
    symbols = ((symbols.astype(int) + contexts) % alphabet).astype(np.uint8)
    data = encode_symbols(symbols, contexts if n_contexts > 1 else None, alphabet, n_contexts)
    assert read_rans(data, contexts.tolist(), alphabet) == symbols.tolist()


@pytest.mark.parametrize("item_size", [1, 2, 4, 8, 16])
def test_byte_planes(item_size):
    rng = np.random.default_rng(item_size)
    values = rng.normal(size=5000).astype(np.float32).view(np.uint8)
    values = values[: values.size // item_size * item_size]
    data = encode_bytes(values, item_size)
    assert read_planes(data, values.size // item_size, item_size) == values.tobytes()


@pytest.mark.parametrize("floating", [False, True])
def test_difference_of_bit_patterns(floating):
    rng = np.random.default_rng(0)
    current, predecessor = rng.integers(0, 2**16, (2, 500)).astype(np.uint16)
    stored = delta_bits(current, predecessor, floating)

    def ordered(x):
        return x if not floating else x ^ 0xFFFF if x >> 15 else x | 0x8000

    for x, y, z in zip(current.tolist(), predecessor.tolist(), stored.tolist(), strict=True):
        difference = (z >> 1) ^ (0xFFFF if z % 2 else 0)
        assert difference == (ordered(x) - ordered(y)) % 2**16


@pytest.mark.parametrize("values", [[], [7] * 9, [3, -1, 3, 3, 2**31 - 1, -5], list(range(-90, 90)) * 3])
def test_huffman(values):
    assert read_huffman(encode_huffman(np.array(values, np.int64))) == values


def test_run_lengths():
    values = np.repeat(np.array([3, 0, 9, 3], np.uint8), [1, 70_000, 2, 65_536])
    runs = encode_runs(values).tolist()
    assert runs == [-3, 0, 65_535, 0, 4465, -9, 2, -3, 65_535, -3]
