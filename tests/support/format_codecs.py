"""A reader of chains by docs/format.md and core/schemes/PUBLISHED.md alone, without a thought for speed.

Only the LSTM's network is the library's.
"""

from math import prod

import numpy as np
import torch
from support.containers import take_apart
from support.format_matrix import read_matrix
from support.format_reader import (
    Cursor,
    read_huffman,
    read_numbers,
    read_ranked,
    read_rans,
    read_runs,
    read_symbol_plane,
)

from shrinkpoint.entropy.lstm import coder as lstm

F32 = np.float32
DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")
}  # what codecs round to
SIXTEENTHS = (
    *(1, 1.04427373, 1.09050775, 1.13878858, 1.18920708, 1.24185777, 1.29683959, 1.35425556),
    *(1.41421354, 1.47682619, 1.54221082, 1.61049032, 1.68179286, 1.75625217, 1.83400810, 1.91520655),
)
FLOATS = {*DTYPES, "float8_e4m3fn"}
ITEM_SIZES = {
    "complex64": 8,
    "int64": 8,
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
}


def flushed(values):
    bits = np.asarray(values, F32).view(np.uint32)
    return np.where(bits & 0x7F80_0000, bits, 0).astype(np.uint32).view(F32)


def mixed_bits(seed, count, width=16):
    mask, found = 2**64 - 1, []
    for i in range(count):
        x = (i + 1 + 2**32 * seed) * 0x9E3779B97F4A7C15 & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        found.append((x ^ x >> 31) >> (64 - width))
    return found


def dither(seed, count):
    return np.array([(t + 0.5) / 2**16 - 0.5 for t in mixed_bits(seed, count)], F32)


def wide_dither(seed, count):
    """The dither, and its places."""
    bits = np.array(mixed_bits(seed, count, 17))
    return ((bits + 0.5) / 2**16 - 1).astype(F32), (bits >> 8) - 256


def quarters(exponents):
    table = (1, F32(1.1892071), F32(1.4142135), F32(1.6817929))
    return np.array([float(table[e % 4]) * 2.0 ** (e // 4) for e in exponents], F32)


CLOSED_LOOP = {"lc-checkpoint-weight", "excp-weight"}


class Tensor:
    """One tensor of a header, with its sections, its predecessor and its siblings."""

    def __init__(self, entry, sections, before, siblings):
        self.entry, self.sections, self.siblings = entry, sections, siblings
        self.params, self.shape = entry["params"], entry["shape"]
        self.count = prod(self.shape)
        self.rows = self.shape[0] if len(self.shape) > 1 else 1
        self.columns = self.count // self.rows
        self.item = ITEM_SIZES[entry["dtype"]]
        if before is not None and before["codec"] == "exact" and entry["codec"] in CLOSED_LOOP:
            before = {"codec": entry["codec"], "count": before["count"], "value": self.widen(before["bytes"])}
        if before is not None and before["codec"] == "exact":
            before = self.resized(before)
        same = before is not None and before["codec"] == entry["codec"] and before["count"] == self.count
        self.before = before if same and entry["uses_reference"] else None
        assert self.before is not None or not entry["uses_reference"]

    def resized(self, before):
        if self.count > 2 * before["count"]:
            return None
        size = self.count * self.item
        return {**before, "count": self.count, "bytes": before["bytes"][:size].ljust(size, b"\0")}

    def floats(self, name):
        return flushed(np.frombuffer(self.sections[name], "<f4"))

    def number(self, name):
        return flushed([self.params[name]])[0]

    def sibling(self, role):
        data, dtype = self.siblings[role]
        return self.widen(data, dtype)

    def widen(self, data, dtype=None):
        dtype = DTYPES[dtype or self.entry["dtype"]]
        raw = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0)
        return raw.to(torch.float32).numpy()

    def rounded(self, values):
        dtype = DTYPES[self.entry["dtype"]]
        return torch.from_numpy(np.array(values, F32)).to(dtype).view(torch.uint8).numpy().tobytes()

    def symbol_plane(self, name, alphabet, previous=None, count=None):
        def network(body):
            plane = None if previous is None else np.array(previous, np.uint8)
            return lstm.decode_plane(
                body, self.count, alphabet, columns=self.columns, previous=plane
            ).tolist()

        count = self.count if count is None else count
        return read_symbol_plane(self.sections[name], count, alphabet, previous, network)

    def matrix(self, name):
        return read_matrix(self.sections[name], self.count, self.rows, self.columns)

    def marks(self, name, count):
        """As many bits."""
        packed = np.frombuffer(read_numbers(self.sections[name], -(-count // 8), 1), np.uint8)
        bits = np.unpackbits(packed) > 0
        assert not bits[count:].any()
        return bits[:count]

    def factor_exponents(self):
        """Of rows and columns, -32768 for none."""
        cursor = Cursor(self.sections["factors"])
        rows, columns = cursor.take(cursor.varint()), cursor.rest()
        data = read_numbers(rows, self.rows, 2) + read_numbers(columns, self.columns, 2)
        return [number - 32768 for number in numbers(data, 2)]

    def factors(self):
        exponents = self.factor_exponents()
        values = quarters([e if e != -32768 else 0 for e in exponents])
        product = np.maximum(np.multiply.outer(values[: self.rows], values[self.rows :]), F32(2.0**-126))
        none = np.array(exponents) == -32768
        product[none[: self.rows]] = 0
        product[:, none[self.rows :]] = 0
        return product.reshape(-1)


def factored(t):
    return t.rounded(t.factors()), {}


def centroids(t, unit):
    radius, away = t.params["radius"], t.params["centroids"]
    assert len(away) == min(radius, 16)
    assert all(-128 <= part <= 127 for part in away)
    sizes = [size + (away[size - 1] / 256 if 1 <= size <= 16 else 0) for size in range(radius + 1)]
    level = t.matrix("levels")
    assert np.abs(level).max(initial=0) <= radius
    value = (t.number("step") * np.array(sizes, F32))[np.abs(level)] * unit
    value[value < F32(2.0**-125)] = 0
    return t.rounded(np.where(level < 0, -value, value)), {}


def centroids_root(t):
    return centroids(t, np.sqrt(flushed(t.sibling("exp_avg_sq"))))


def centroids_own(t):
    return centroids(t, t.factors())


def exponents(t):
    if "exponents" not in t.sections:
        assert t.before["step"] == t.number("step")
        return t.before["e"]
    data = read_numbers(t.sections["exponents"], t.rows + t.columns, 1)
    both = np.frombuffer(data, np.int8).astype(int)
    return (both[: t.rows, None] + both[None, t.rows :]).reshape(-1)


def coded_elements(t):
    """Which elements are of rows that are coded, not kept."""
    if "kept" not in t.sections:
        return np.ones(t.count, bool)
    assert t.before is not None
    return np.repeat(~t.marks("kept", t.rows), t.columns)


def trellis_weight(t):
    step, e, before = t.number("step"), exponents(t), t.before
    d, places = wide_dither(t.params["seed"], t.count)
    w, even, here = step * quarters(e), np.zeros(t.count, int), coded_elements(t)
    if before is not None:
        restored = t.params.get("after_restore", False)
        known = 0 if restored else before["variance_code"]
        z = before["offsets"].astype(F32) * before["w"] * F32(not restored)
        z[np.abs(z) < F32(2.0**-118)] = 0
        x = (before["value"] + z / F32(64)) / w + d
        x = np.clip(x, F32(-14000), F32(14000))
        k = F32(2) * np.floor(x / F32(2) + F32(0.5))
        places = np.clip(np.floor(F32(256) * (x - k)), -256, 255).astype(int)
        even = 2 * k.astype(int)
    count = int(here.sum())
    points = read_matrix(t.sections["points"], count, count // t.columns, t.columns, places[here])
    h = even[here] + points
    assert np.abs(h).max(initial=0) <= 30000
    value = np.zeros(t.count, F32) if before is None else before["value"].copy()
    value[here] = (h.astype(F32) / F32(2) - d[here]) * w[here]
    offsets = np.zeros(t.count, int)
    if before is not None:
        gains = offset_gains(e[here], known, t.params["walk"])
        offsets[here] = np.clip((512 - (128 * points - places[here]) * gains) >> 10, -127, 127)
    left = {
        "step": step,
        "e": e,
        "w": w,
        "value": value,
        "offsets": offsets,
        "variance_code": t.params["variance_code"],
    }
    return t.rounded(value), left


def offset_gains(exponents, known, walk):
    """G of each element's exponent."""
    table, noise = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429), 0.0663

    def variance(code, e):
        k = code - 80 - 2 * e
        return table[k % 4] * 2.0 ** (k // 4) if code else 0.0

    gains = {}
    for e in set(exponents.tolist()):
        k = variance(known, e)
        b = 2 * noise * k / (float(np.sqrt(k * k + 4 * noise * k)) + k + 1e-300)
        gains[e] = round(256 * (noise / (b + variance(walk, e) + noise)))
    return np.array([gains[e] for e in exponents.tolist()], int)


def closed_loop(decode):
    def read(t):
        if t.before is None:
            value, more = t.widen(read_numbers(t.sections["base"], t.count, t.item)), {}
        else:
            value, more = decode(t)
        return t.rounded(value), {"value": value, **more}

    return read


def step_by(value, x):
    return flushed(flushed(value) + x)


def lc_delta(t):
    ranks = np.array(read_ranked(t.sections["ranks"], t.count, t.params["lengths"]))
    return step_by(t.before["value"], t.floats("representatives")[ranks]), {}


def excp_symbols(t):
    bits, previous = t.params["bits"], None
    if t.before is not None and t.before.get("bits") == bits:
        previous = t.before["symbols"]
    return t.symbol_plane("symbols", 2**bits, previous)


def excp_residual(t):
    symbols = excp_symbols(t)
    table = np.concatenate([np.zeros(1, F32), t.floats("codebook")])
    return step_by(t.before["value"], table[symbols]), {"symbols": symbols, "bits": t.params["bits"]}


def excp_moment(t):
    symbols = excp_symbols(t)
    table = np.concatenate([np.zeros(1, F32), t.floats("codebook")])
    value, refill = table[symbols], t.floats("refill")
    if refill.size == 1:
        refill = np.repeat(refill, t.count)
    elif refill.size:
        refill = flushed(np.multiply.outer(refill[: t.rows], refill[t.rows :])).reshape(-1)
    if refill.size:
        value = np.where(np.array(symbols) == 0, refill, value)
    return t.rounded(value), {"symbols": symbols, "bits": t.params["bits"]}


def inshrinkerator(t):
    number, data = t.params["levels"], t.sections["levels"]
    flags, body, size = data[0], data[1:], number
    assert flags < 4
    previous = [0] * t.count
    if flags & 1:
        previous, size = t.before["levels"], max(number, t.before["number"])
    if not flags & 2:
        symbols = read_rans(body, previous, size)
    else:
        groups = t.before["number"] if flags & 1 else 1
        lists = [read_runs(read_huffman(part)) for part in read_groups(Cursor(body), groups)]
        assert [len(group) for group in lists] == [previous.count(level) for level in range(groups)]
        parts = [iter(group) for group in lists]
        symbols = [next(parts[level]) for level in previous]
    levels = [(s + p) % size for s, p in zip(symbols, previous, strict=True)] if flags & 1 else symbols
    assert max(levels) < number
    value = np.concatenate([np.zeros(2, F32), np.frombuffer(t.sections["codebook"], "<f4")])
    assert value.size == number
    value, protected = value[levels], np.array(levels) == 1
    narrow = "bfloat16" if t.entry["dtype"] == "float32" else t.entry["dtype"]
    value[protected] = t.widen(t.sections["protected"], narrow)
    return t.rounded(value), {"levels": levels, "number": number}


def read_groups(cursor, count):
    for _ in range(count - 1):
        yield cursor.take(cursor.varint())
    yield cursor.rest()


def levels_given_those_before(t, alphabet):
    before = [0] * t.count if t.before is None else t.before["levels"]
    return read_rans(t.sections["levels"], before, alphabet)


def log_second_moment(t):
    rows, columns, least = t.floats("rows"), t.floats("columns"), F32(2.0**-126)
    assert (rows.size, columns.size) == (t.rows, t.columns)
    table, lowest = t.floats("codebook"), t.params["lowest"]
    assert table.size == t.params["count"]
    levels = levels_given_those_before(t, 122)
    at = np.array(levels)
    value = np.maximum(np.multiply.outer(rows, columns).reshape(-1), least)
    value[at > 0] = np.maximum(value[at > 0] * table[at[at > 0] - lowest], least)
    value[at == 0] = 0
    return t.rounded(value), {"levels": levels}


def uniform_first_moment(t):
    levels = levels_given_those_before(t, 63)
    unit = t.number("step") * np.sqrt(flushed(t.sibling("exp_avg_sq")))
    return t.rounded((np.array(levels) - 31).astype(F32) * unit), {"levels": levels}


def numbers(data, size):
    return np.frombuffer(data, f"<u{size}").tolist()


def exact(t):
    dtype, item, count = t.entry["dtype"], t.item, t.count
    if dtype == "complex64":
        dtype, item, count = "float32", item // 2, 2 * count
    data = read_numbers(t.sections["bits"], count, item)
    if t.before is not None:
        before = t.before["bytes"]
        if "scale" in t.params:
            before = scaled(before, F32(t.params["scale"]))
        pairs = zip(numbers(data, item), numbers(before, item), strict=True)
        found = [undone(z, x, 8 * item, floating=dtype in FLOATS) for z, x in pairs]
        data = np.array(found, f"<u{item}").tobytes()
    return data, {"bytes": data}


def scaled(data, scale):
    values = np.frombuffer(data, "<f4")
    with np.errstate(all="ignore"):
        product = flushed(flushed(values) * scale)
    bits = np.where(np.isnan(product), values.view("<u4"), product.view("<u4"))
    return bits.astype("<u4").tobytes()


def undone(zigzag, before, width, *, floating):
    """`before` moved by a zigzagged difference, in the order of the values."""
    half = 2 ** (width - 1)
    difference = zigzag // 2 if zigzag % 2 == 0 else ~(zigzag // 2)
    if not floating:
        return (before + difference) % (2 * half)
    turned = before + half if before < half else 2 * half - 1 - before
    moved = (turned + difference) % (2 * half)
    return moved - half if moved >= half else 2 * half - 1 - moved


def rounded(t):
    return t.rounded(t.sibling("master")), {}


def copied(t):
    data, dtype = t.siblings["weight"]
    assert dtype == t.entry["dtype"]
    return data, {}


def log_levels(t):
    step = t.params["step"]
    assert 1 <= step <= 32
    offsets = np.floor((dither(t.params["seed"], t.count) + F32(0.5)) * F32(step)).astype(int)
    if t.before is None:
        sides = [0 if e == -32768 else e for e in t.factor_exponents()]
        predicted = 4 * np.add.outer(sides[: t.rows], sides[t.rows :]).reshape(-1)
    else:
        before, none = t.before["exponents"].copy(), t.before["zeros"]
        others = before[~none].tolist()
        before[none] = sum(others) // len(others) if others else 0
        predicted = before + t.params["shift"]
    zeros = t.marks("zeros", t.count) if "zeros" in t.sections else np.zeros(t.count, bool)
    distances = t.matrix("levels")
    assert not distances[zeros].any()
    levels = (predicted - offsets + step // 2) // step + distances
    found = np.clip(step * levels + offsets, -2016, 2047)
    sizes = np.array([float(F32(SIXTEENTHS[e % 16])) * 2.0 ** (e // 16) for e in found.tolist()], F32)
    sizes[zeros] = 0
    if t.params["signed"]:
        sizes[t.marks("signs", t.count)] *= -1
    return t.rounded(sizes), {"exponents": found, "zeros": zeros}


CODECS = {
    "exact": exact,
    "factored-second-moment": factored,
    "centroid-first-moment": centroids_root,
    "centroid-momentum": centroids_own,
    "trellis-weight": trellis_weight,
    "rounded-weight": rounded,
    "log-levels": log_levels,
    "copied-average": copied,
    "lc-checkpoint-weight": closed_loop(lc_delta),
    "excp-weight": closed_loop(excp_residual),
    "excp-moment": excp_moment,
    "inshrinkerator-weight": inshrinkerator,
    "log-second-moment": log_second_moment,
    "uniform-first-moment": uniform_first_moment,
}


def read_chain(files):
    """The bytes of every tensor by name, for each checkpoint of a chain."""
    reference = {}
    for data in files:
        header, _, rest = take_apart(data)
        now, values, weights = {}, {}, {}
        for entry in header["tensors"]:
            sections = {}
            for name, size in entry["sections"].items():
                sections[name], rest = rest[:size], rest[size:]
            folder, _, _ = entry["name"].rpartition("/")
            siblings = values.setdefault((entry["parameter"], folder), {})
            t = Tensor(entry, sections, reference.get(entry["name"]), siblings)
            if entry["role"] == "average" and (entry["parameter"], tuple(entry["shape"])) in weights:
                siblings.setdefault("weight", weights[entry["parameter"], tuple(entry["shape"])])
            value, kept = CODECS[entry["codec"]](t)
            siblings[entry["role"]] = value, entry["dtype"]
            if entry["role"] == "weight":
                weights.setdefault((entry["parameter"], tuple(entry["shape"])), siblings["weight"])
            now[entry["name"]] = {"codec": entry["codec"], "count": t.count, "bytes": value, **kept}
        reference = now
        yield {name: kept["bytes"] for name, kept in now.items()}
