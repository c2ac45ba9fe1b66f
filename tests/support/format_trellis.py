"""A reader of the trellis coder by docs/format.md alone and without a thought for speed."""

from types import SimpleNamespace

import numpy as np
from support.format_models import SEGMENT, Leaves, Predictor, clamp, octaves, read_leaf_tables, wrap
from support.format_reader import Bits, Cursor, classes, read_lengths

BEYOND = 16  # columns behind a segment that are looked at


def path_width(columns):
    return columns * -(-64 // columns) if 8 <= columns <= 2**15 else 4096


def behind(state, parity, states):
    """The state of the element behind one of an even or odd index."""
    flip = state >> 1 & 1 if states == 4 else (state >> 1 ^ state >> 2) & 1
    return 2 * state % states + (parity ^ flip)


def costs(y, state):
    """Of the even and of the odd index."""
    x = y - 128 * (state % 2)
    z = x - 512 * ((x + 256) // 512)
    return z * z >> 6, (256 - abs(z)) ** 2 >> 6


def look_ahead(places, width, states, discount):
    """V of each state in the column behind each element, (states, rows, columns)."""
    rows, segments = -(-places.size // width), -(-width // SEGMENT)
    columns = SEGMENT * segments + BEYOND
    at = np.arange(rows)[:, None] * width + np.arange(columns)
    inside = (np.arange(columns) < width) & (at < places.size)
    y = np.where(inside, places[np.minimum(at, places.size - 1)], 0)
    own = [[np.where(inside, cost, 0) for cost in costs(y, state)] for state in range(2)]
    found = np.zeros((states, rows, columns), np.int64)
    v = np.zeros((states, rows, segments), np.int64)
    for i in range(SEGMENT + BEYOND - 1, 0, -1):
        here, before = SEGMENT * np.arange(segments) + i, v
        v = np.empty_like(before)
        for s in range(states):
            even, odd = (
                own[s % 2][parity][:, here] + before[behind(s, parity, states)] for parity in range(2)
            )
            v[s] = np.minimum(even, odd) * discount >> 4
            if i <= SEGMENT:
                found[s][:, here - 1] = v[s]
    return found


class TrellisReader:
    def __init__(self, data, places, columns, states, sides):
        cursor = Cursor(data)
        flags, self.discount, self.radius = cursor.byte(), cursor.byte(), cursor.byte()
        self.scale, self.mean = (int.from_bytes(cursor.take(2), "little") for _ in range(2))
        self.sides = [sides[cursor.byte()] for _ in range(flags & 3)]
        self.low_rank = bool(flags & 4)
        log2 = cursor.byte()
        assert flags < 8
        assert self.discount <= 16
        assert self.radius <= 126
        assert self.scale >= 128
        assert 1 <= self.mean <= 8184
        assert 18 <= log2 <= 23
        self.states, self.places, self.width = states, places, path_width(columns)
        self.classes = [classes(side, 48) for side in self.sides]
        bits, alphabet = Bits(cursor), 2 * self.radius + 1
        levels = [44, 12, *(max(table) + 1 for table in self.classes), 1, 1, 1]
        self.tree = Leaves(bits, levels[:5])
        self.coder = read_leaf_tables(bits, self.tree.number, alphabet)
        bits.end()
        self.points, self.errors, self.ranks = (np.zeros(places.size, np.int64) for _ in range(3))
        self.after = look_ahead(places, self.width, states, self.discount)
        size = 2**log2 // self.width * self.width
        starts = range(0, places.size, size)
        for start, chunk in zip(starts, read_lengths(cursor, len(starts)), strict=True):
            self.read_chunk(chunk, start, min(start + size, places.size))

    def read_chunk(self, chunk, first, end):
        take, finish = self.coder.open(chunk)
        mean, width = self.mean, self.width
        v, predictor = [mean] * width, None
        if self.low_rank:
            # a model without a warm plane, whose symbols are values
            model = SimpleNamespace(warm=None, own=SimpleNamespace(values=Themselves()))
            predictor = Predictor(model, 0, 0, width, -(-width // SEGMENT))
        for i, start in enumerate(range(first, end, width)):
            energies, values, state = [], [], 0
            busy = [energy_octaves(x) for x in v]
            if predictor:
                predictor.start_row()
            stop = min(start + width, end)
            for part, place in enumerate(range(start, stop, SEGMENT)):
                u, moves = SEGMENT * part, [0] * SEGMENT
                if predictor:
                    predictor.predict(part)
                    moves = [clamp(int(p) * (2**18 // self.scale) >> 8, 1024) for p in predictor.p]
                base = energy_octaves((8 * sum(energies) + 32 * mean) // (u + 32)) - 2 * energy_octaves(mean)
                for j, at in enumerate(range(place, min(place + SEGMENT, stop))):
                    activity = min(max((busy[u + j] + base + 13) >> 1, 0), 11)
                    state = self.read_element(take, at, start, state, moves[j], activity)
                errors = self.errors[place : min(place + SEGMENT, stop)]
                energies += [min(int(x * x) >> 8, 1023) for x in errors]
                if predictor:
                    found = np.clip(wrap(errors * self.scale) >> 12, -511, 511).tolist()
                    predictor.see(part, found)
                    values += found
            e = 1 if i < 2 else 2 if i < 6 else 3 if i < 14 else 4 if i < 30 else 5
            for j, energy in enumerate(energies):
                v[j] += (8 * energy - v[j]) >> e
            if predictor:
                predictor.end_row(i, values)
        finish()

    def read_element(self, take, at, start, state, move, activity):
        """Returns the next state."""
        y = int(self.places[at]) + move
        after = self.after[:, start // self.width, at - start]
        a, b = (
            cost + int(after[behind(state, parity, self.states)])
            for parity, cost in enumerate(costs(y, state))
        )
        features = [min(abs(a - b) >> 5, 43), activity]
        features += [table[side[at]] for table, side in zip(self.classes, self.sides, strict=True)]
        rank = take(self.tree.leaf(features)) - self.radius
        x = y - 128 * (state % 2)
        even = 2 * ((x + 256) // 512)
        d = 1 if x >= 256 * even else -1
        index = even + d - rank * d if a > b else even + rank * d
        self.points[at] = 2 * index + state % 2
        self.errors[at] = 128 * self.points[at] - self.places[at]
        self.ranks[at] = rank
        return behind(state, index % 2, self.states)


class Themselves:
    """A table of values in which each one stands for itself."""

    def __getitem__(self, values):
        return values


def energy_octaves(k):
    return octaves(max(k - 128, 1))


def read_trellis_plane(data, places, columns, states, sides):
    """Points, errors, and which elements are far; `sides` are lists of levels."""
    if not places.size:
        assert not data
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool)
    reader = TrellisReader(data, places.astype(np.int64), columns, states, sides)
    return reader.points, reader.errors, np.abs(reader.ranks) >= 125


def offset_gains(exponents, states, carried, known, walk, g):
    """G of each element's exponent."""
    table = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)
    noise, s = {4: 0.0663, 8: 0.0649}[states], carried / 16
    fresh = noise * (1 - s * s)
    gains = {}
    for e in set(exponents.tolist()):
        of_known, of_walk = (
            table[k % 4] * 2.0 ** (k // 4) if x else 0.0
            for x, k in ((known, known - 80 - 2 * e), (walk, walk - 80 - 2 * e))
        )
        root = float(np.sqrt(of_known * of_known + 4 * noise * of_known))
        before = 2 * noise * of_known / (root + of_known + 1e-300)
        both, innovation = fresh - s * (1 - s) * before, (1 - s) * (1 - s) * before + of_walk + fresh
        gains[e] = round(256 * float(g) * (both / innovation))
    return np.array([gains[e] for e in exponents.tolist()], int)
