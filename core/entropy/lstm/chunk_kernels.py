"""The compiled chunk coder over the LSTM: contexts, batches, and the arithmetic code.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. All arithmetic
is on integers, and every index is made from validated levels or clamped.

Symbols of one batch with the same neighbourhood have the same probabilities, and gradients are linear in the errors of
their probabilities: the network runs once for all of them, forward and backward. Planes that are nearly all zeros are
coded much faster for it.
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, Integer, UInt8s
from shrinkpoint.entropy.lstm.network_kernels import (
    BATCH,
    GATES,
    LAYERS,
    STEPS,
    Curves,
    Network,
    backward,
    forward,
    improve,
    shares,
)
from shrinkpoint.runtime.jit import jit, jit_allocating, jit_part

_SLOTS = 1024  # of the table of a batch's contexts
_TOTAL_BITS = 16
_LEAST_RANGE = 1 << 24


class Learner(NamedTuple):
    """A chunk's network while it learns.

    Attributes:
        net: weights.
        gradient: int64, of the same shapes.
        weights: the same as ``net``, flat.
        gradients: the same as ``gradient``, flat.
        squares: int64, flat.
        rate: learning rate in 2^-24.
    """

    net: Network
    gradient: Network
    weights: Int32s
    gradients: Int64s
    squares: Int64s
    rate: int


@jit_part
def _neighbourhood(previous: UInt8s, position: Integer, out: UInt8s) -> None:
    """The 3x3 symbols around a flat position of a plane (rows, columns), its centre last; zeros outside."""
    rows, columns = previous.shape
    out[:] = 0
    if rows == 0:
        return
    i, j = position // columns, position % columns
    at = 0
    for di in range(-1, 2):
        for dj in range(-1, 2):
            if di == 0 and dj == 0:
                continue
            if 0 <= i + di < rows and 0 <= j + dj < columns:
                out[at] = previous[i + di, j + dj]
            at += 1
    out[at] = previous[i, j]


@jit_part
def _same(a: UInt8s, b: UInt8s) -> bool:
    for k in range(a.size):  # noqa: SIM110 (all() of a generator does not compile)
        if a[k] != b[k]:
            return False
    return True


@jit_part
def _find_contexts(
    previous: UInt8s, start: Integer, count: Integer, contexts: UInt8s, slots: Int32s, which: Int32s
) -> Integer:
    """Number the different neighbourhoods of a batch in the order of their first occurrence; how many there are."""
    found = 0
    slots[:] = -1
    for n in range(count):
        candidate = contexts[found]
        _neighbourhood(previous, start + n, candidate)
        key = np.int64(0)
        for k in range(STEPS):
            key = (key * 2654435 + candidate[k] + 1) & 0xFFFFFFFFFFF
        slot = (key ^ key >> 17) & (_SLOTS - 1)
        while slots[slot] >= 0 and not _same(contexts[slots[slot]], candidate):
            slot = (slot + 1) & (_SLOTS - 1)
        if slots[slot] < 0:
            slots[slot] = found
            found += 1
        which[n] = slots[slot]
    return found


@jit_part
def _put(coder: Int64s, stream: UInt8s) -> None:
    """Write the low end's first byte."""
    if coder[3] < stream.size:
        stream[coder[3]] = coder[0] >> 24
    coder[3] += 1
    coder[0] = (coder[0] << 8) & 0xFFFFFFFF


@jit_part
def _carry(coder: Int64s, stream: UInt8s) -> None:
    if coder[0] >> 32:
        coder[0] &= 0xFFFFFFFF
        at = min(coder[3], stream.size) - 1
        while at >= 0 and stream[at] == 255:
            stream[at] = 0
            at -= 1
        if at >= 0:
            stream[at] += 1


@jit_part
def _encode(coder: Int64s, stream: UInt8s, ends: Int32s, symbol: Integer) -> None:
    unit = coder[1] >> _TOTAL_BITS
    coder[0] += unit * np.int64(ends[symbol])
    coder[1] = unit * np.int64(ends[symbol + 1] - ends[symbol])
    _carry(coder, stream)
    while coder[1] < _LEAST_RANGE:
        _put(coder, stream)
        coder[1] <<= 8


@jit_part
def _decode(coder: Int64s, stream: UInt8s, ends: Int32s) -> Integer:
    """Return the next symbol; past the end of the stream, zeros are read."""
    unit = coder[1] >> _TOTAL_BITS
    place = min(coder[2] // unit, (1 << _TOTAL_BITS) - 1)
    low, high = 0, ends.size - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if ends[middle] <= place:
            low = middle
        else:
            high = middle
    coder[2] -= unit * np.int64(ends[low])
    coder[1] = unit * np.int64(ends[low + 1] - ends[low])
    while coder[1] < _LEAST_RANGE:
        coder[2] = (coder[2] << 8) & 0xFFFFFFFF
        if coder[3] < stream.size:
            coder[2] |= np.int64(stream[coder[3]])
        coder[3] += 1
        coder[1] <<= 8
    return np.int64(low)


@jit
def finish(coder: Int64s, stream: UInt8s) -> None:
    """Write the one byte that identifies the interval if zeros follow."""
    coder[0] += _LEAST_RANGE - 1
    _carry(coder, stream)
    _put(coder, stream)


@jit_allocating
def code_span(
    learner: Learner,
    curves: Curves,
    previous: UInt8s,
    offset: Integer,
    symbols: UInt8s,
    start: Integer,
    stop: Integer,
    coder: Int64s,
    stream: UInt8s,
    decoding: bool,
) -> None:
    """Encode symbols ``start..stop`` of a chunk, or decode them, and learn from them.

    Args:
        learner: as the symbols before ``start`` left it.
        curves: tables.
        previous: uint8 (rows, columns), the previous plane, each symbol below the alphabet; no rows for none.
        offset: flat position of the chunk in the plane.
        symbols: the chunk's; when encoding, each is below the alphabet, which the caller has checked.
        start: a multiple of `BATCH`.
        stop: a multiple of `BATCH`, or the end.
        coder: the interval's low end, its width less 1 or its high end, the code, and the position in the stream, past whose end zeros
            are read.
        stream: what does not fit is dropped, but counted.
        decoding: whether symbols are filled in.
    """
    alphabet, width = learner.net.entry.shape[0], learner.net.entry.shape[1] // GATES
    activations = np.zeros((BATCH, STEPS + 1, LAYERS, 7, width), dtype=np.int32)
    contexts = np.zeros((BATCH + 1, STEPS), dtype=np.uint8)
    slots, which = np.empty(_SLOTS, dtype=np.int32), np.empty(BATCH, dtype=np.int32)
    ends, errors = (
        np.empty((BATCH, alphabet + 1), dtype=np.int32),
        np.empty((BATCH, alphabet), dtype=np.int32),
    )
    sums, logits = np.empty(GATES * width, dtype=np.int64), np.empty(alphabet, dtype=np.int64)
    by_output, by_cell = np.empty((LAYERS, width), dtype=np.int64), np.empty((LAYERS, width), dtype=np.int64)
    by_gates = np.empty(GATES * width, dtype=np.int32)
    for first in range(start, stop, BATCH):
        count = min(BATCH, stop - first)
        found = _find_contexts(previous, offset + first, count, contexts, slots, which)
        errors[:found] = 0
        for n in range(found):
            forward(learner.net, curves, contexts[n], activations[n], sums, logits)
            shares(curves.decay, logits, ends[n])
        for k in range(count):
            n = which[k]
            if decoding:
                symbols[first + k] = _decode(coder, stream, ends[n])
            else:
                _encode(coder, stream, ends[n], np.int64(symbols[first + k]))
            for a in range(alphabet):
                errors[n, a] += (ends[n, a + 1] - ends[n, a]) << 6
            errors[n, symbols[first + k]] -= 1 << 22
        if first + count == symbols.size:
            return
        for n in range(found):
            backward(
                learner.net,
                learner.gradient,
                contexts[n],
                activations[n],
                errors[n],
                by_output,
                by_cell,
                by_gates,
            )
        improve(learner.weights, learner.gradients, learner.squares, first // BATCH, learner.rate)
