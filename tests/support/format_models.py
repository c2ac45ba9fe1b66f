"""A reader of the context coder's modes 1 and 2 by docs/format.md alone and without a thought for speed."""

from decimal import Decimal, getcontext
from math import isqrt, prod

import numpy as np
from support.format_reader import Bits, Runs, classes, frequencies_of, read_lengths, read_tables

getcontext().prec = 40
SEGMENT = 16
ENDS = (2, 4, 6, 8, 12, 16, 23, 32, 45, 64)


def clamp(x, k):
    return max(-k, min(x, k))


def wrap(x):
    """|32| of an integer or of an array."""
    return (x + 2**31) % 2**32 - 2**31


class Meaning:
    def __init__(self, cursor):
        zero_first, p = cursor.byte(), cursor.byte()
        q = int.from_bytes(cursor.take(2), "little")
        assert zero_first < 2
        self.scale = q
        raw = [level - p + (zero_first and level >= p) for level in range(256)]
        if zero_first:
            raw[0] = 0
        unit = max(6144 // q, 1)
        self.values = np.array([clamp(x * q >> 8, 511) for x in raw])
        self.magnitudes = [min(-(-abs(x) // unit), 3) for x in raw]


class Model:
    def __init__(self, mode, cursor, given):
        flags = cursor.byte()
        assert flags < (64 if mode == 1 else 16)
        number, self.low_rank, warm = flags & 3, bool(flags & 4), flags >> 3 & 1
        self.placed, self.mirrored = bool(flags & 16), bool(flags & 32)
        self.own = Meaning(cursor)
        sides = [(given[cursor.byte()], Meaning(cursor)) for _ in range(number + warm)]
        self.sides = sides[:number]
        self.warm = sides[-1] if warm else None
        assert self.low_rank or not (warm or self.placed)
        assert not self.placed or self.sides[0][0].places is not None
        assert not self.mirrored or self.sides[0][0].two_sided
        self.scale, self.mean = (int.from_bytes(cursor.take(2), "little") for _ in range(2))
        assert 1 <= self.mean <= 768


def dot(a, b):
    return sum(int(wrap(int((a[i : i + 128] * b[i : i + 128]).sum()))) for i in range(0, a.size, 128))


class Directions:
    def __init__(self, number, m, used):
        self.d = np.zeros((number, m), np.int64)
        self.s, self.w = [16] * number, [0] * number + [2**18]
        x = 12345
        for a in range(number):
            for j in range(m):
                x = (1103515245 * x + 12345) % 2**31
                self.d[a, j] = (256 if x >> 20 & 1 else -256) if j < used else 0

    def advance(self, rows):
        n, m = rows.shape
        number, grown, shifts = len(self.s), [], []
        t = 2**8 * sum(dot(row, row) for row in rows) // (n * m)
        b = t >> 4
        for a in range(number):
            c = np.array([(dot(row, self.d[a]) >> 2) // m for row in rows])
            y = min((int((c * c).sum()) // n) >> 4, 2**26)
            t -= y
            self.w[a] += (y - self.w[a]) >> 3
            g = 15 * self.s[a] * self.d[a] + 64 // n * wrap((c[:, None] * rows).sum(axis=0))
            h = 0
            while int(np.abs(g).max()) >> h >= 2**11:
                h += 1
            grown.append(g >> h)
            shifts.append(h)
        self.w[number] += (min(max(t, b, 0), 2**26) - self.w[number]) >> 3
        for a in range(number):
            for b in range(a):
                f = wrap((dot(grown[a], self.d[b]) >> 2) // m)
                grown[a] = wrap(grown[a] - (wrap(f * self.d[b]) >> 14))
            y = isqrt(16 * dot(grown[a], grown[a]) // m)
            self.s[a] = 0
            if y >= 16:
                self.s[a] = (y << shifts[a]) >> 14
                self.d[a] = np.clip(wrap(grown[a] * (2**22 // y)) >> 12, -2047, 2047)

    def warm_up(self, model, start, rows, columns, most):
        if model.warm is None:
            return
        side, meaning = model.warm
        levels = np.array(side.levels[start : start + rows * columns])
        used = meaning.values[levels].reshape(rows, columns)[:most]
        for i in range(0, len(used), 8):
            block = np.zeros((len(used[i : i + 8]), self.d.shape[1]), np.int64)
            block[:, :columns] = used[i : i + 8]
            self.advance(block)


def read_model_plane(mode, cursor, count, alphabet, columns, sides):
    model = Model(mode, cursor, sides)
    size, width = 2 ** cursor.byte(), columns
    if 8 <= columns <= 2**15:
        size = size // columns * columns
    else:
        width = None
    if mode == 1:
        reader = StaticReader(model, cursor, alphabet)
    else:
        reader = MixedReader(model, read_tables(cursor, [0], alphabet)[1][0])
    starts, symbols = range(0, count, size), []
    for start, chunk in zip(starts, read_lengths(cursor, len(starts)), strict=True):
        length = min(size, count - start)
        shape = (length // width, width) if width else (1, length)
        symbols += reader.read(chunk, start, shape)
    return symbols


class Leaves:
    """The tree of mode 1. A node is the number of a leaf, or a feature, a threshold and two nodes."""

    def __init__(self, bits, levels):
        self.bits, self.levels, self.number, self.used = bits, levels, 1, set()
        self.first = self.node(0)
        assert self.number <= 64
        assert prod(levels[feature] for feature in self.used) <= 2**16

    def node(self, lowest):
        if not self.bits.take(1):
            return lowest
        upper = self.number
        self.number += 1
        feature = self.bits.take(3)
        self.used.add(feature)
        assert self.levels[feature] > 1
        threshold = 1 + self.bits.take((self.levels[feature] - 2).bit_length())
        below = self.node(lowest)
        return feature, threshold, below, self.node(upper)

    def leaf(self, features):
        node = self.first
        while not isinstance(node, int):
            feature, threshold, below, others = node
            node = others if features[feature] >= threshold else below
        return node


def unfold(x):
    return x // 2 if x % 2 == 0 else -(x + 1) // 2


def read_leaf_tables(bits, leaves, alphabet):
    zero = bits.take((alphabet - 1).bit_length())
    code_of_zero = bits.take(8)
    numbers, count = {}, 0
    for leaf in range(leaves):
        numbers[leaf] = bits.take(count.bit_length())
        assert numbers[leaf] <= count
        count = max(count, numbers[leaf] + 1)
    of_ranges, of_first, of_others = (bits.take(3) for _ in range(3))
    tables, codes, ends = [], [0] * alphabet, [0, alphabet - 1]
    for number in range(count):
        ends = [end + unfold(bits.rice(of_ranges)) for end in ends]
        assert min(ends) >= 0
        assert max(ends) < alphabet
        before, codes = codes, [0] * alphabet
        codes[zero] = code_of_zero if bits.take(1) else 0
        for s in range(ends[0], ends[1] + 1):
            if s != zero:
                near = before[s] or (codes[s - 1] if s else 0)
                codes[s] = near + unfold(bits.rice(of_others if number else of_first))
        assert min(codes) >= 0
        assert 0 < max(codes) < 256
        tables.append(frequencies_of({s: c for s, c in enumerate(codes) if c}))
    return Runs(zero, numbers, tables)


class StaticReader:
    def __init__(self, model, cursor, alphabet):
        self.model, self.middle = model, (alphabet - 1) // 2
        self.classes = [classes(side.levels, 48) for side, _ in model.sides]
        levels = [44, 12, *(max(table) + 1 for table in self.classes), 1, 1, 1]
        bits = Bits(cursor)
        self.tree = Leaves(bits, levels[:5])
        self.coder = read_leaf_tables(bits, self.tree.number, alphabet)
        bits.end()

    def turned(self, place):
        if not self.model.mirrored:
            return False
        side = self.model.sides[0][0]
        return 2 * side.levels[place] < side.alphabet - 1

    def side_levels(self, place):
        """The levels that a symbol has in the model sides."""
        found = []
        for side, _ in self.model.sides:
            level = side.levels[place]
            found.append(side.alphabet - 1 - level if self.turned(place) and side.two_sided else level)
        return found

    def symbol(self, coded, place):
        if self.turned(place) and coded <= 2 * self.middle:
            return 2 * self.middle - coded
        return coded

    def read(self, chunk, start, shape):
        model, (rows, columns) = self.model, shape
        take, end = self.coder.open(chunk)
        segments = -(-columns // SEGMENT)
        v, predictor = [4 * model.mean] * columns, None
        if model.low_rank:
            predictor = Predictor(model, start, rows, columns, segments)
        out = []
        for i in range(rows):
            q, row = 0, []
            busy = [octaves(x) for x in v]
            if predictor:
                predictor.start_row()
            for part in range(segments):
                u = SEGMENT * part
                if predictor:
                    predictor.predict(part)
                base = octaves((1024 * q + 32 * model.mean) // (u + 8)) - 2 * octaves(4 * model.mean) + 13
                for j in range(u, min(u + SEGMENT, columns)):
                    place = start + i * columns + j
                    sides = self.side_levels(place)
                    level = predictor.level(j - u, self.turned(place), sides) if predictor else 0
                    features = [level, min(max((busy[j] + base) >> 1, 0), 11)]
                    features += [table[x] for table, x in zip(self.classes, sides, strict=True)]
                    row.append(self.symbol(take(self.tree.leaf(features)), place))
                q += sum(model.own.magnitudes[s] for s in row[u:])
                if predictor:
                    predictor.see(part, row[u:])
            e = 1 if i < 2 else 2 if i < 6 else 3 if i < 14 else 4
            for j in range(columns):
                v[j] += (1024 * model.own.magnitudes[row[j]] - v[j]) >> e
            if predictor:
                predictor.end_row(i, row)
            out += row
        end()
        return out


def octaves(k):
    return (k**4).bit_length() - 1 if k else 0


def centred(x):
    """e(x) of a placed prediction."""
    x = min(max(x, -256), 255)
    if x < 0:
        return 43 - centred(-1 - x)
    if x < 128:
        return 32 - sum(end <= 127 - x for end in ENDS)
    return 33 + sum(end <= x - 128 for end in ENDS)


class Predictor:
    """The prediction of mode 1."""

    def __init__(self, model, start, rows, columns, segments):
        self.model, self.segments = model, segments
        self.directions = Directions(8, SEGMENT * segments, columns)
        self.directions.warm_up(model, start, rows, columns, 128)
        self.block = np.zeros((8, SEGMENT * segments), np.int64)
        self.refresh()

    def refresh(self):
        d, w = self.directions.d, self.directions.w
        z = np.float64(max(w[8], 64))
        p, self.trust = np.diag([z / np.float64(max(x, 1)) for x in w[:8]]), []
        for part in range(self.segments):
            fan = d[:, SEGMENT * part : SEGMENT * part + SEGMENT]
            p = p + wrap(fan @ fan.T) / 65536
            t = p.copy()
            for k in range(8):
                y = 1 / t[k, k]
                t[k, k] = 1
                t[k] = t[k] * y
                for i in range(8):
                    if i != k:
                        y = t[i, k]
                        t[i, k] = 0
                        t[i] = t[i] - y * t[k]
            self.trust.append(t)

    def start_row(self):
        self.u, self.r = np.zeros(8), np.zeros(8, np.int64)

    def predict(self, part):
        fan = self.directions.d[:, SEGMENT * part : SEGMENT * part + SEGMENT]
        self.p = np.clip(wrap(self.r @ fan) >> 16, -4092, 4092)

    def level(self, j, turned, sides):
        """Of the j-th symbol of the segment, which has these levels in the model sides."""
        model, p = self.model, int(self.p[j])
        if turned:
            p = -p
        if model.placed:
            x = p * min(2**22 // model.own.scale, 2**18) >> 8
            return centred(x + model.sides[0][0].places[sides[0]])
        return clamp(wrap(2 * model.scale * p + 32768) >> 16, 20) + 20

    def see(self, part, symbols):
        x = np.zeros(SEGMENT, np.int64)
        x[: len(symbols)] = self.model.own.values[symbols]
        fan = self.directions.d[:, SEGMENT * part : SEGMENT * part + SEGMENT]
        told = wrap(fan @ (4 * x - self.p))
        for b in range(8):
            self.u = self.u + self.trust[part][b] * np.float64(told[b])
        self.r = np.clip(self.u, -(2**19), 2**19).astype(np.int64)

    def end_row(self, i, row):
        self.block[i % 8, : len(row)] = self.model.own.values[row]
        if i % 8 == 7:
            self.directions.advance(self.block)
            if i < 64 or i // 8 % 2 == 0:
                self.refresh()


def logistic():
    s = {x: int((65536 / (1 + (-Decimal(x) / 256).exp())).to_integral_value()) for x in range(2049)}
    s |= {-x: 65536 - s[x] for x in range(1, 2049)}
    middles = [(s[x] + s[x + 1]) // 2 for x in range(-2048, 2047)]
    stretch = [clamp(int(np.searchsorted(middles, 16 * y + 8)) - 2048, 2047) for y in range(4096)]
    return {x: min(max(y, 1), 65535) for x, y in s.items()}, stretch


class Tree:
    def __init__(self, f):
        self.f, self.children, self.starts = f, [], []
        self._add(list(f), True)

    def _add(self, symbols, root):
        """The number of a node, or of a symbol as -1 - symbol."""
        if len(symbols) == 1:
            return -1 - symbols[0]
        f, total = self.f, sum(self.f[s] for s in symbols)
        most = max(symbols, key=lambda s: (f[s], -s))
        if root and 5 * f[most] >= 2 * total:
            parts = [[most], [s for s in symbols if s != most]]
        else:
            cuts = range(1, len(symbols))
            cut = min(cuts, key=lambda k: abs(2 * sum(f[s] for s in symbols[:k]) - total))
            parts = [symbols[:cut], symbols[cut:]]
        number = len(self.children)
        start = 2**22 * sum(f[s] for s in parts[1]) // total
        self.starts.append(min(max(start, 64), 2**22 - 64))
        self.children.append(None)
        self.children[number] = [self._add(part, False) for part in parts]
        return number


class MixedReader:
    def __init__(self, model, frequencies):
        self.model, self.tree = model, Tree(frequencies)
        self.squash, self.stretch = logistic()
        self.fine = [classes(side.levels, 48) for side, _ in model.sides]
        self.coarse = [classes(side.levels, 16) for side, _ in model.sides]

    def read(self, chunk, start, shape):
        model, (rows, columns) = self.model, shape
        self.slots, self.sets, self.maps = {}, {}, {}
        self.code = Code(chunk)
        m = np.zeros((rows + 1, columns + 4), int)  # one row before, two columns before
        v, out, p = [model.mean] * columns, [], 0
        directions = Directions(16, columns, columns) if model.low_rank else None
        block = np.zeros((8, columns), np.int64)
        if directions:
            directions.warm_up(model, start, rows, columns, rows)
            gains, d = kalman(directions), directions.d.copy()
        for i in range(rows):
            q, u = 0, np.zeros(16, np.int64)
            for j in range(columns):
                place = start + i * columns + j
                if directions:
                    p = clamp(int(wrap(int(u @ d[:, j]))) >> 16, 4092)
                contexts, kind = self.contexts(place, (i, j), shape, p, (m, v, q))
                symbol = self.symbol(contexts, kind, bucket(p, model.scale >> 1, 3))
                out.append(symbol)
                magnitude = model.own.magnitudes[symbol]
                m[i + 1, j + 2] = magnitude
                v[j] += (256 * magnitude - v[j]) // min(i + 2, 16)
                q += magnitude
                if directions:
                    x = block[i % 8, j] = int(model.own.values[symbol])
                    u = wrap(u + (wrap(gains[j] * (4 * x - p)) >> 6))
            if directions and i % 8 == 7:
                directions.advance(block)
                gains, d = kalman(directions), directions.d.copy()
        assert len(chunk) <= self.code.at
        return out

    def contexts(self, place, at, shape, p, seen):
        (i, j), model, (m, v, q) = at, self.model, seen
        column = min(v[j] * (2**22 // model.mean) >> 16, 511)
        row = min(((256 * q + 8 * model.mean) * (2**28 // ((j + 8) * model.mean))) >> 22, 511)
        both = min((column * row) >> 6, 511)
        near = 2 * (m[i + 1, j + 1] + m[i, j + 2]) + m[i + 1, j] + m[i, j + 1] + m[i, j + 3]
        around, level, kind = 0, m[i + 1, j + 1], bucket(p, model.scale, 8)
        coarse, fine, contexts = kind, [], []
        if model.sides:
            plane, meaning = model.sides[0][0].levels, model.sides[0][1]
            total = 0
            for di in (-1, 0, 1):
                for dj in (-1, 0, 1):
                    if (di or dj) and 0 <= i + di < shape[0] and 0 <= j + dj < shape[1]:
                        total += meaning.magnitudes[plane[place + di * shape[1] + dj]]
            around = sum(x <= total for x in (1, 2, 3, 4, 5, 7, 10))
            level = meaning.magnitudes[plane[place]]
            kind = self.fine[0][plane[place]]
        contexts = [
            (0, 0),
            (1, bucket(p, 2 * model.scale, 20)),
            (2, (coarse * 12 + activity(both)) * 4 + level),
            (3, near * 8 + around),
            (4, activity(column) * 12 + activity(row)),
        ]
        for s, (side, _) in enumerate(model.sides):
            fine, rough = self.fine[s][side.levels[place]], self.coarse[s][side.levels[place]]
            contexts.append((5 + 2 * s, coarse * 48 + fine))
            first = self.coarse[0][model.sides[0][0].levels[place]]
            contexts.append((6 + 2 * s, activity(both) * 48 + fine if s == 0 else first * 16 + rough))
        return contexts, kind

    def symbol(self, contexts, kind, chosen):
        node = 0
        while node >= 0:
            node = self.tree.children[node][self.decide(node, contexts, kind, chosen)]
        return -1 - node

    def decide(self, node, contexts, kind, chosen):
        slots = [self.slots.setdefault((c, node), [self.tree.starts[node], 0]) for c in contexts]
        inputs = [self.stretch[q >> 10] * (512 * n // (2 * n + 3)) >> 8 for q, n in slots]
        inputs[0] = self.stretch[slots[0][0] >> 10]
        fresh = [18000] * len(inputs)
        sets = [self.sets.setdefault((number, node), [list(fresh), 0]) for number in (chosen, 7)]
        logits = [clamp(sum(a * b for a, b in zip(inputs, w, strict=True)) >> 16, 2047) for w, _ in sets]
        logit = (logits[0] + logits[1]) >> 1
        cells = self.maps.setdefault(
            (kind, node), [self.squash[clamp(128 * (k - 16), 2047)] for k in range(33)]
        )
        place = 32 * (logit + 2048)
        c, e = place >> 12, place % 4096
        mapped = (cells[c] * (4096 - e) + cells[c + 1] * e) >> 12
        x = self.code.decide(min(max((self.squash[logit] + mapped) >> 1, 16), 65520))
        cells[c] += ((65535 * x - cells[c]) * (4096 - e)) >> 18
        cells[c + 1] += ((65535 * x - cells[c + 1]) * e) >> 18
        for one, own in zip(sets, logits, strict=True):
            y = ((65535 * x - self.squash[own]) * (3 + 2048 // (one[1] + 32))) >> 4
            one[0] = [w + ((a * y + 2**13) >> 14) for a, w in zip(inputs, one[0], strict=True)]
            one[1] = min(one[1] + 1, 2047)
        for slot in slots:
            slot[0] += ((4194303 * x - slot[0]) * (131072 // (2 * slot[1] + 3))) >> 16
            slot[1] = min(slot[1] + 1, 400)
        return x


def bucket(p, y, k):
    return clamp((p * y + 32768) >> 16, k) + k


def activity(x):
    return sum(start <= x for start in (8, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362))


def kalman(directions):
    """The gains of every column."""
    d, w = directions.d, directions.w
    y, z = np.array(w[:16]), max(w[16], 64)
    gains = np.zeros((d.shape[1], 16), np.int64)
    for j in range(d.shape[1]):
        v = d[:, j]
        t = z + int(((y * v >> 8) * v >> 8).sum())
        k = np.clip((y * v >> 8) * (2**40 // t) >> 26, -(2**16), 2**16)
        y = np.maximum(y - ((k * v >> 8) * y >> 14), 0)
        gains[j] = k
    return gains


class Code:
    """The arithmetic code of a chunk."""

    def __init__(self, data):
        self.data, self.low, self.high, self.at = data, 0, 2**32 - 1, 4
        self.code = int.from_bytes(bytes(data[:4]).ljust(4, b"\0"), "big")

    def decide(self, probability):
        span = self.high - self.low
        middle = self.low + (span >> 16) * probability + (span % 2**16 * probability >> 16)
        part = int(self.code <= middle)
        self.low, self.high = (self.low, middle) if part else (middle + 1, self.high)
        while self.low >> 24 == self.high >> 24:
            byte = self.data[self.at] if self.at < len(self.data) else 0
            self.at += 1
            self.low, self.high, self.code = (
                x << 8 & 0xFFFFFFFF | y for x, y in ((self.low, 0), (self.high, 255), (self.code, byte))
            )
        return part
