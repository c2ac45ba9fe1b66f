"""A reader of the baselines' codecs by their README.md alone, as `support.format_codecs` is one of docs/format.md."""

import lzma

import numpy as np
from support.format_codecs import CLOSED_LOOP, CODECS, F32, closed_loop, flushed, step_by
from support.format_reader import read_numbers, read_rans


def uniform(t):
    number = 2 ** t.params["bits"]
    previous = [level % number for level in t.before["levels"]] if t.before else None
    levels = t.symbol_plane("levels", number, previous)
    value = flushed(flushed(np.array(levels, F32) * t.number("step")) + t.number("low"))
    return t.rounded(value), {"levels": levels}


def adaptive(t):
    chosen = np.array(read_rans(t.sections["rows"], [0] * t.shape[0], 2)) > 0
    width = t.count // t.shape[0]
    count = int(chosen.sum())
    low, scale = t.floats("bounds").reshape(2, count)
    levels = t.symbol_plane("levels", 2 ** t.params["bits"], count=count * width)
    fresh = flushed(flushed(np.array(levels, F32).reshape(count, width) * scale[:, None]) + low[:, None])
    value = t.before["value"].reshape(-1, width).copy() if t.before else np.zeros((t.shape[0], width), F32)
    assert t.before or chosen.all()
    value[chosen] = fresh
    return t.rounded(value.reshape(-1)), {"value": value.reshape(-1)}


def gobo(t):
    number = t.params["levels"]
    previous = t.before["levels"] if t.before and t.before["number"] == number else None
    levels = np.array(t.symbol_plane("levels", number, previous))
    value = np.concatenate([np.zeros(1, F32), t.floats("centroids")])[levels]
    value[levels == 0] = t.widen(read_numbers(t.sections["outliers"], int((levels == 0).sum()), t.item))
    return t.rounded(value), {"levels": levels.tolist(), "number": number}


def delta_dnn(t):
    size, body = t.params["size"], t.sections["steps"][1:]
    if t.sections["steps"][0]:
        filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**23}]
        data = lzma.decompress(body, format=lzma.FORMAT_RAW, filters=filters)
    else:
        data = read_numbers(body, t.count, size)
    steps = [int(z) >> 1 if z % 2 == 0 else ~(int(z) >> 1) for z in np.frombuffer(data, f"<u{size}")]
    return step_by(t.before["value"], flushed(np.array(steps, F32) * t.number("step"))), {}


def partial(t):
    count = t.shape[0] if t.params["rows"] else t.count
    chosen = np.repeat(np.array(read_rans(t.sections["chosen"], [0] * count, 2)) > 0, t.count // count)
    value = t.before["value"].copy()
    value[chosen] = t.widen(read_numbers(t.sections["values"], int(chosen.sum()), t.item))
    return value, {}


_PREFIX = "shrinkpoint-baselines:"
CLOSED_LOOP |= {f"{_PREFIX}delta-dnn-weight", f"{_PREFIX}partial-weight"}
CODECS |= {
    f"{_PREFIX}qd-compressor-weight": uniform,
    f"{_PREFIX}check-n-run-weight": adaptive,
    f"{_PREFIX}gobo-weight": gobo,
    f"{_PREFIX}delta-dnn-weight": closed_loop(delta_dnn),
    f"{_PREFIX}partial-weight": closed_loop(partial),
}
