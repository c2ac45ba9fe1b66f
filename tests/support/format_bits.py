"""The codec bit-planes by docs/format.md alone, in Python's integers."""

import numpy as np
from support.format_reader import Cursor, read_planes, read_rans

FIELDS = {
    "float64": (64, 52), "float32": (32, 23), "float16": (16, 10), "bfloat16": (16, 7),
    "float8_e4m3fn": (8, 3), "float8_e5m2": (8, 2),
}  # fmt: skip
CHUNK = 2**18


def numbers(data, width):
    return np.frombuffer(data, f"<u{width // 8}").tolist()


def scaled(patterns, width, mantissa, factor):
    kind, top = f"<f{width // 8}", 2 ** (width - 1 - mantissa) - 1

    def normal(values):
        return [x if 0 < (x >> mantissa) % (top + 1) < top else 0 for x in values]

    product = np.array(normal(patterns), f"<u{width // 8}").view(kind) * np.array(factor, kind)
    return normal(numbers(product.tobytes(), width))


def ranks(patterns, width, mantissa):
    exponents = [(x >> mantissa) % 2 ** (width - 1 - mantissa) for x in patterns]
    low = max(max(exponents) - 255, 0)
    fields = [max(e - low, 0) for e in exponents]
    order = {field: rank for rank, field in enumerate(sorted(set(fields)))}
    return [order[field] for field in fields]


def key_range(key, width, cut):
    """Sign, base and length of the suffix of a class."""
    if key == 1:
        return 1, 0, width
    key -= 2
    if key >= 2 * cut + 2:
        return 1, (key - 2 * cut - 2 - 2 ** (width - 1 - cut)) * 2**cut, cut
    length = key // 2
    return -1 if key % 2 else 1, 2 ** (length - 1) if length else 0, max(length - 1, 0)


class Stream:
    def __init__(self, data):
        self._bits = int.from_bytes(data, "little")

    def take(self, count):
        value, self._bits = self._bits % 2**count, self._bits >> count
        return value


def bit_planes(t):
    width, mantissa = FIELDS[t.entry["dtype"]]
    before = None if t.before is None else numbers(t.before["bytes"], width)
    if "bytes" in t.sections:
        patterns = numbers(read_planes(t.sections["bytes"], t.count, width // 8), width)
        if before is not None:
            patterns = [undone(z, x, width) for z, x in zip(patterns, before, strict=True)]
    else:
        sibling = t.siblings.get("exp_avg_sq")
        known = {"previous": before, "sibling": None if sibling is None else numbers(sibling[0], width)}
        patterns = by_classes(t, width, mantissa, known)
    return np.array(patterns, f"<u{width // 8}").tobytes(), {}


def undone(zigzag, before, width, order="floating"):
    """`before` moved by a zigzagged difference, in the order of the values."""
    half = 2 ** (width - 1)
    if order == "integers":
        return (before + (zigzag // 2 if zigzag % 2 == 0 else ~(zigzag // 2))) % (2 * half)

    def turned(x):
        return x + half if x < half else 2 * half - 1 - x

    moved = (turned(before) + (zigzag // 2 if zigzag % 2 == 0 else ~(zigzag // 2))) % (2 * half)
    return moved - half if moved >= half else 2 * half - 1 - moved


def by_classes(t, width, mantissa, known):
    cut, magnitude = t.params["cut"], t.params.get("magnitude", False)
    half = 2 ** (width - 1)

    def integer(x):
        return x % half if magnitude else x if x < half else -1 - x % half

    def offset(i):
        if not t.params.get("factored"):
            return t.params.get("offset", 0)
        return offsets[i // t.columns] + offsets[t.rows + i % t.columns]

    if t.params.get("factored"):
        data = read_planes(t.sections["offsets"], t.rows + t.columns, 2)
        offsets = np.frombuffer(data, "<i2").tolist()
    context = t.params.get("context")
    contexts = [0] * t.count if context is None else ranks(known[context], width, mantissa)
    sources = dict(known)
    if "scale" in t.params:
        sources["previous"] = scaled(known["previous"], width, mantissa, t.params["scale"])
    keys, symbols = read_classes(t, contexts)
    patterns = []
    for i, (key, stream) in enumerate(zip([keys[s] for s in symbols], streams(t), strict=True)):
        if key == 0:
            patterns.append(0)
            continue
        prediction = 2 ** max(mantissa - 2, 0) * offset(i)
        for name in ("previous", "sibling"):
            share = t.params.get(name, 0)
            if share:
                x = integer(sources[name][i])
                prediction += x if share == 64 else x // 64 * share
        negative = stream.take(1) if magnitude else 0
        sign, base, length = key_range(key, width, cut)
        residual = sign * (base + stream.take(length))
        if t.params.get("aligned") and sources["previous"][i] >= half:
            residual = -residual
        value = (prediction + residual) % (2 * half)
        if magnitude:
            patterns.append(value % half + half * negative)
        else:
            patterns.append(value if value < half else half + (2 * half - 1 - value))
    return patterns


def read_classes(t, contexts):
    cursor = Cursor(t.sections["classes"])
    keys, last = [], -1
    for _ in range(cursor.byte() + 1):
        last += 1 + cursor.varint()
        keys.append(last)
    body = t.sections["symbols"]
    if body[0] == 0:
        return keys, read_rans(body[1:], contexts, len(keys))
    return keys, list(read_planes(body[1:], t.count, 1))


def streams(t):
    """For each number, the stream that holds its suffix."""
    cursor = Cursor(t.sections["suffixes"])
    chunks = -(-t.count // CHUNK)
    lengths = [cursor.varint() for _ in range(chunks - 1)]
    parts = [*(cursor.take(length) for length in lengths), cursor.rest()]
    for index, part in enumerate(parts):
        stream = Stream(part)
        for _ in range(min(CHUNK, t.count - index * CHUNK)):
            yield stream
