"""A reader of the matrix coder by its page alone and without a thought for speed; arrays of 16 are lanes."""

import numpy as np
from support.format_reader import Bits, Cursor, read_lengths, weight_of

F32 = np.float32
LANES = 16
DIRECTIONS = 16


def total(terms):
    """The sum over the first axis, one after another."""
    return np.add.accumulate(terms, axis=0, dtype=F32)[-1]


def plus(start, factors, values):
    """`start` and the product of each factor and its value, one after another."""
    for factor, value in zip(factors, values, strict=True):
        start = start + factor * value
    return start


def half_octaves(x):
    return (np.asarray(x, F32).view(np.int32) - (127 << 23)) >> 22


def coder_width(rows, columns):
    g = -(-64 // columns)
    if 8 <= columns <= 2**15 and rows >= 16 * g:
        return columns * g
    return min(max(-(-rows * columns // 16), 64), 4096)


def segments_of(width):
    """(first, end) of each segment."""
    found, u = [], 0
    while u < width:
        end = min(u + max(16, u // 2 // 16 * 16), width)
        found.append((u, end))
        u = end
    return found


def read_table(cursor):
    """Symbol, frequency and start of each slot."""
    codes = list(cursor.take(cursor.byte() + 1))
    assert len(codes) <= 67
    assert any(codes)
    weights = [weight_of(code) for code in codes]
    frequencies = [max(w * 2**12 // sum(weights), 1) if w else 0 for w in weights]
    frequencies[codes.index(max(codes))] += 2**12 - sum(frequencies)
    assert min(frequencies) >= 0
    starts = np.cumsum([0, *frequencies[:-1]])
    symbols = np.repeat(np.arange(len(codes)), frequencies)
    return symbols, np.array(frequencies)[symbols], starts[symbols]


class Code:
    """The head and the codes of a chunk."""

    def __init__(self, data, rows):
        cursor = Cursor(data)
        flags = cursor.byte()
        assert flags < 4
        self.low_rank = bool(flags & 1)
        self.mean = np.frombuffer(cursor.take(4), "<f4")[0]
        assert 1e-9 / 2 <= self.mean <= 2e10
        count = cursor.byte() + 1
        assert count <= 16
        self.tables = np.zeros(63, int)
        if count > 1:
            packed = np.frombuffer(cursor.take(32), np.uint8)
            self.tables = np.stack([packed & 15, packed >> 4], 1).reshape(-1)
            assert self.tables[63] == 0
            assert self.tables.max() < count
        tables = [read_table(cursor) for _ in range(count)]
        self.symbols, self.frequencies, self.starts = (np.array(part) for part in zip(*tables, strict=True))
        self.states = np.full(LANES, 2**15, np.int64)
        if not flags & 2:
            self.states[:rows] = np.frombuffer(cursor.take(4 * min(rows, LANES)), "<u4")
        self.bit_bytes = Cursor(cursor.take(cursor.varint()))
        self.bits = Bits(self.bit_bytes)
        self.words, self.at = np.frombuffer(cursor.rest(), "<u2"), 0

    def distances(self, contexts, here):
        """Of the lanes that are here, 0 for others."""
        table, x = self.tables[contexts[here]], self.states[here]
        slot = x % 2**12
        x = self.frequencies[table, slot] * (x // 2**12) + slot - self.starts[table, slot]
        low = x < 2**15
        more = self.words[self.at : self.at + int(low.sum())]
        x[low] = x[low] * 2**16 + more
        self.at += more.size
        self.states[here] = x
        found = np.zeros(LANES, np.int64)
        found[here] = [self.distance(s) for s in self.symbols[table, slot].tolist()]
        return found

    def distance(self, symbol):
        if symbol < 15:
            return (symbol + 1) // 2 * (1 if symbol % 2 else -1)
        b = symbol - 15
        n = b // 4 + 1
        sign = 1 if self.bits.take(1) else -1
        return sign * (((4 + b % 4) << n) + self.bits.take(n))

    def end(self):
        assert set(self.states.tolist()) == {2**15}
        assert self.at == self.words.size
        assert not self.bit_bytes.rest()


def first_directions(width):
    t = np.arange(16 * width, dtype=np.uint32).reshape(width, DIRECTIONS)
    t = (t ^ t >> 16) * np.uint32(0x85EBCA6B)
    t = (t ^ t >> 13) * np.uint32(0xC2B2AE35)
    return F32(1) - F32(2) * (t >> 16 & 1).astype(F32)


class Directions:
    def __init__(self, width, mean):
        self.width, self.known, self.noise = width, False, mean
        self.v = first_directions(width)
        self.size = np.full(DIRECTIONS, 0.001, F32)
        self.segments = segments_of(width)

    def start_batch(self):
        self.u, self.c = np.zeros((2, DIRECTIONS, LANES), F32)

    def predicted(self, y, u, end):
        if not self.known:
            return y
        return np.array([plus(at, self.v[u + j], self.u) for j, at in enumerate(y)])

    def see(self, number, told):
        """`told` is X of the segment of this number, (columns, lanes)."""
        u, end = self.segments[number]
        b = total(self.v[u:end, :, None] * told[:, None, :])
        self.c = self.c + b
        if self.known and number < len(self.segments) - 1:
            g, t = self.g[number], self.t[number]
            b = np.array([plus(b[a], -g[a], self.u) for a in range(DIRECTIONS)])
            self.u = np.array([plus(self.u[a], t[a], b) for a in range(DIRECTIONS)])

    def learn(self, told, rate):
        """`told` is X of the batch."""
        m, d = self.take_powers(told, rate)
        grown = plus(self.v * self.size, told.T[:, :, None], d[:, None, :])
        assert m >= 0
        self.orthogonalize(grown)
        self.find_gains()
        self.known = True

    def take_powers(self, told, rate):
        w = F32(self.width)
        s = total((told * told).reshape(-1, 4))
        m = ((s[0] + s[1]) + (s[2] + s[3])) / (F32(16) * w)
        left, d = m, np.zeros((LANES, DIRECTIONS), F32)
        for a in range(DIRECTIONS):
            c = self.c[a] * (F32(1) / w)
            g = total(c * c) / F32(16)
            d[:, a] = c * (rate / F32(16))
            left = left - g
            self.size[a] *= F32(1) - rate
        self.noise = self.noise + (max(left, m / F32(16)) - self.noise) * rate
        return m, d

    def orthogonalize(self, grown):
        m = total(grown[:, :, None] * grown[:, None, :])
        w, z = F32(self.width), np.zeros((DIRECTIONS, DIRECTIONS), F32)
        for a in range(DIRECTIONS):
            m[a, a] += F32(1e-12) + m[a, a] * F32(1e-5)
        for a in range(DIRECTIONS):
            for b in range(a):
                t = plus(m[a, b], -m[a, :b], m[b, :b]) / m[b, b]
                m[a, b] = t if self.size[b] else 0
            t = plus(m[a, a], -m[a, :a], m[a, :a])
            if t >= max(F32(2e-12), m[a, a] * F32(1e-4)):
                m[a, a] = np.sqrt(t)
                self.size[a] = m[a, a] * np.sqrt(F32(1) / w)
            else:
                m[a, :a], m[a, a], self.size[a] = 0, 1, 0
        for a in range(DIRECTIONS):
            z[a, a] = np.sqrt(w) / m[a, a] if self.size[a] else 0
            for b in range(a):
                z[b, a] = -plus(F32(0), m[a, b:a], z[b, b:a]) / m[a, a]
        self.v = plus(F32(0), grown.T[:, :, None], z[:, None, :])
        self.v[:, self.size == 0] = first_directions(self.width)[:, self.size == 0]

    def find_gains(self):
        p = np.diag(self.noise / np.maximum(F32(1e-6), F32(2) * self.size))
        self.g, self.t = [], []
        for u, end in self.segments[:-1]:
            v = self.v[u:end]
            self.g.append(total(v[:, :, None] * v[:, None, :]))
            p = p + self.g[-1]
            self.t.append(inverse(p))


def inverse(p):
    t = p.copy()
    for k in range(DIRECTIONS):
        v = F32(1) / t[k, k]
        t[k, k] = 1
        t[k] = t[k] * v
        for i in range(DIRECTIONS):
            if i != k:
                f = t[i, k]
                t[i, k] = 0
                t[i] = t[i] + -f * t[k]
    return t


class Walk:
    """The walk over one chunk. Without places points are not on a trellis."""

    def __init__(self, data, size, places, width):
        rows = -(-size // width)
        self.code, self.places, self.width = Code(data, rows), places, width
        self.points, self.mean = np.zeros(size, np.int64), self.code.mean
        self.inverse_mean = F32(1) / self.mean
        self.energies = np.full(width, self.mean, F32)
        self.directions = Directions(width, self.mean)
        batches = range(0, rows, LANES)
        for n, row in enumerate(batches):
            errors, told = self.batch(row)
            if n < len(batches) - 1:
                rate = max(F32(1) / F32(n + 1), F32(0.2))
                self.energies = self.improved(errors, rate)
                if self.code.low_rank and (n < 8 or n % 2 == 0):
                    self.directions.learn(told, rate)
        self.code.end()

    def batch(self, row):
        """Errors, and X, of the columns and lanes of the batch that begins with this row."""
        starts = (row + np.arange(LANES)) * self.width
        self.directions.start_batch()
        self.state, self.q = np.zeros((2, LANES), np.int64)
        busy = half_octaves(self.energies * self.inverse_mean) + 7
        told, errors = np.zeros((2, self.width, LANES), F32)
        usual = F32(16) * self.mean
        for number, (u, end) in enumerate(self.directions.segments):
            about = F32(0.03) * F32(u) + F32(16) * self.mean
            level = half_octaves((self.q.astype(F32) + about) * (F32(1) / usual))
            usual = total(np.concatenate([[usual], self.energies[u:end]]))
            at = starts + np.arange(u, end)[:, None]
            here = at < self.points.size
            at = np.minimum(at, self.points.size - 1)
            y = np.zeros(at.shape, F32)
            if self.places is not None:
                y[here] = self.places[at[here]].astype(F32) / F32(256)
            predicted = self.directions.predicted(y, u, end)
            predicted = np.clip(predicted, F32(-30000), F32(30000))
            for j in range(end - u):
                values = self.column(predicted[j], busy[u + j] + level, at[j], here[j])
                told[u + j], errors[u + j] = values - y[j], values - predicted[j]
            if self.code.low_rank:
                self.directions.see(number, told[u:end])
        return errors, told

    def column(self, p, activity, at, here):
        """The values of one column, whose elements that are here have these places in C order."""
        trellis = self.places is not None
        odd = self.state % 2
        z = p - odd.astype(F32) / F32(2)
        k = np.rint(z)
        e = z - k
        ninths = np.rint(np.abs(e) * F32(16)).astype(np.int64)
        contexts = 9 * np.clip(activity >> 1, 0, 6) + ninths
        d = self.code.distances(contexts, here)
        k = k.astype(np.int64) + np.where(e < 0, -d, d)
        self.q = np.minimum(self.q + np.minimum(np.abs(d), 1024) ** 2, 2**28)
        points = 2 * k + odd if trellis else k
        if trellis:
            self.state = 2 * self.state % 4 + (k % 2 ^ self.state >> 1)
        found = points[here]
        assert np.abs(found + 0.5).max(initial=0) < 2**15
        self.points[at[here]] = found
        return points.astype(F32) / F32(2 if trellis else 1)

    def improved(self, errors, rate):
        """E after a batch."""
        sums = errors * errors
        while sums.shape[1] > 1:
            sums = sums[:, ::2] + sums[:, 1::2]
        moved = self.energies + (sums[:, 0] / F32(16) - self.energies) * rate
        return np.maximum(F32(1e-12), moved)


def read_matrix(data, count, rows, columns, places=None):
    """The points of `count` elements in C order; `places` are integers, or None."""
    if not count:
        assert not data
        return np.zeros(0, np.int64)
    width = coder_width(rows, columns)
    size = width * max(512, 2**20 // width // 16 * 16)
    starts, found = range(0, count, size), []
    for start, chunk in zip(starts, read_lengths(Cursor(data), len(starts)), strict=True):
        part = None if places is None else np.asarray(places)[start : start + size]
        found.append(Walk(chunk, min(size, count - start), part, width).points)
    return np.concatenate(found)
