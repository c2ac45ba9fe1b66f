"""Prediction of a matrix's rows by sixteen directions that are learned from the rows before, sixteen rows at once.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. All is fp32 in a fixed order:
every machine gets the same bits.

A batch of sixteen rows X' (its transpose X is handled: 16 columns) is modelled as V U, V having sixteen directions as columns. U
is found while the batch is walked through, segment by segment: recursive least squares with the priors that the directions'
former powers give. After a batch the directions follow it by one step of a block power iteration.

Sources: recursive least squares as in S. Haykin, "Adaptive Filter Theory" (1996), chapter 13; the power iteration as in
I. Mitliagkas et al., "Memory Limited, Streaming PCA" (2013).
"""

from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Float32s, Int64s
from shrinkpoint.entropy.lanes.tile_kernels import LANES, add_product, invert, project
from shrinkpoint.runtime.jit import jit_part

_LEAST_POWER = np.float32(1e-6)
_LEAST = np.float32(1e-4)  # of a direction's square that is not of those before it
_NOTHING = np.float32(2e-12)  # of a direction's square: less is mostly what was added to it
_LEAST_NOISE = np.float32(0.0625)  # of a batch's mean square
_RIDGE = np.float32(1e-5)
_FIRST_SIZE = np.float32(1e-3)
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)


class LowRank(NamedTuple):
    """What is known of the directions, and room to work in; k is 16, n the columns of the matrix, s the segments.

    Attributes:
        v: fp32 (n, k), the directions, of mean square 1.
        sizes: fp32 (k,), of the directions in the running covariance: half the mean squares of rows' coefficients, about.
        noise: fp32 (1,), mean square of what the directions leave.
        gains: fp32 (s, k, k), inverse covariances of the coefficients after each segment, with the other sign.
        grams: fp32 (s, k, k), of the directions in each segment.
        u: fp32 (k, 16), the batch's coefficients so far.
        sums: fp32 (k, 16), its products with the directions.
        room: fp32 (4, k, k).
        next: fp32 (n, k).
    """

    v: Float32s
    sizes: Float32s
    noise: Float32s
    gains: Float32s
    grams: Float32s
    u: Float32s
    sums: Float32s
    room: Float32s
    next: Float32s


def new_low_rank(columns: int, segments: int) -> LowRank:
    """Room for a matrix of so many columns, in so many segments."""
    k = LANES
    return LowRank(
        v=np.empty((columns, k), np.float32),
        sizes=np.empty(k, np.float32),
        noise=np.empty(1, np.float32),
        gains=np.empty((segments, k, k), np.float32),
        grams=np.empty((segments, k, k), np.float32),
        u=np.empty((k, k), np.float32),
        sums=np.empty((k, k), np.float32),
        room=np.empty((4, k, k), np.float32),
        next=np.empty((columns, k), np.float32),
    )


@jit_part
def _sign(at: int) -> np.float32:
    """1 or -1 without structure: a bit of the finaliser of A. Appleby's MurmurHash3."""
    h = np.uint32(at)
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.float32(-1) if h & np.uint32(1 << 16) else np.float32(1)


@jit_part
def begin(state: LowRank, mean: np.float32) -> None:
    """Set all that is known of a matrix before its first batch; ``mean`` is its mean square, about."""
    for a in range(LANES):
        state.sizes[a] = _FIRST_SIZE
        for j in range(state.v.shape[0]):
            state.v[j, a] = _sign(j * LANES + a)
    state.noise[0] = mean


@jit_part
def corrected(state: LowRank, x: Float32s, segment: int, first: int, last: int, follows: bool) -> None:
    """Note a segment's values ``x`` (n, 16); where ``follows``, correct the coefficients by them."""
    b = state.room[0]
    project(state.v[first:last], x[first:last], b)
    for a in range(LANES):
        for lane in range(LANES):
            state.sums[a, lane] += b[a, lane]
            b[a, lane] = -b[a, lane]
    if follows:
        add_product(state.grams[segment], state.u, b, b)
        add_product(state.gains[segment], b, state.u, state.u)


@jit_part
def learn(state: LowRank, x: Float32s, rate: np.float32) -> None:
    """Let the directions follow a batch ``x`` (n, 16), which counts as so large a share of all."""
    columns = x.shape[0]
    of_column, of_row = _ONE / np.float32(columns), np.float32(1 / LANES)
    s0, s1, s2, s3 = _ZERO, _ZERO, _ZERO, _ZERO
    flat = x.reshape(-1)
    for i in range(0, flat.size, 4):
        s0 += flat[i] * flat[i]
        s1 += flat[i + 1] * flat[i + 1]
        s2 += flat[i + 2] * flat[i + 2]
        s3 += flat[i + 3] * flat[i + 3]
    mean = ((s0 + s1) + (s2 + s3)) / np.float32(LANES * columns)
    left, share = mean, rate * of_row
    of_x, gram, z = state.room[1], state.room[2], state.room[3]
    for a in range(LANES):
        power = _ZERO
        for lane in range(LANES):
            coefficient = state.sums[a, lane] * of_column
            power += coefficient * coefficient
            of_x[lane, a] = coefficient * share
        left -= power * of_row
        state.sizes[a] *= _ONE - rate
    state.noise[0] += (max(left, mean * _LEAST_NOISE) - state.noise[0]) * rate
    for j in range(columns):
        for a in range(LANES):
            state.next[j, a] = state.v[j, a] * state.sizes[a]
            state.v[j, a] = _ZERO
    add_product(x, of_x, state.next, state.next)
    project(state.next, state.next, gram)
    # Cholesky's factor R of the directions' products, and with its inverse directions that are orthogonal
    for a in range(LANES):
        gram[a, a] += np.float32(1e-12) + gram[a, a] * _RIDGE
    for a in range(LANES):
        for b in range(a):
            t = gram[a, b]
            for i in range(b):
                t -= gram[a, i] * gram[b, i]
            gram[a, b] = t / gram[b, b] if state.sizes[b] > _ZERO else _ZERO
        t = gram[a, a]
        for i in range(a):
            t -= gram[a, i] * gram[a, i]
        # what is left of a direction may be nothing but the roundings of sums: it begins anew
        found = t >= max(_NOTHING, gram[a, a] * _LEAST)
        gram[a, a] = np.sqrt(t) if found else _ONE
        state.sizes[a] = gram[a, a] * np.sqrt(of_column) if found else _ZERO
        if not found:
            for b in range(a):
                gram[a, b] = _ZERO
    root = np.sqrt(np.float32(columns))
    for a in range(LANES):
        for b in range(LANES):
            z[a, b] = _ZERO
    for a in range(LANES):
        z[a, a] = root / gram[a, a] if state.sizes[a] > _ZERO else _ZERO
        for b in range(a):
            t = _ZERO
            for i in range(b, a):
                t += gram[a, i] * z[b, i]
            z[b, a] = -t / gram[a, a]
    add_product(state.next, z, state.v, state.v)
    for a in range(LANES):
        if state.sizes[a] == _ZERO:
            for j in range(columns):
                state.v[j, a] = _sign(j * LANES + a)


@jit_part
def follow(state: LowRank, bounds: Int64s) -> None:
    """Make the gains anew after `learn`."""
    sums = state.room[0]
    for a in range(LANES):
        for b in range(LANES):
            sums[a, b] = _ZERO
        sums[a, a] = state.noise[0] / max(_LEAST_POWER, _TWO * state.sizes[a])
    for segment in range(bounds.size - 2):
        gram, gain = state.grams[segment], state.gains[segment]
        part = state.v[bounds[segment] : bounds[segment + 1]]
        project(part, part, gram)
        for a in range(LANES):
            for b in range(LANES):
                sums[a, b] += gram[a, b]
                gain[a, b] = -sums[a, b]
        invert(gain)
