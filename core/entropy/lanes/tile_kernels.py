"""Products of small fp32 matrices, sixteen columns wide.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. A row of sixteen numbers
is a tuple, which LLVM keeps in registers. Sums run in one fixed order, and no product is contracted with a sum: every machine
gets the same bits.
"""

from typing import TypeAlias

import numpy as np

from shrinkpoint.arrays import Float32s
from shrinkpoint.runtime.jit import jit_inlined, jit_part

LANES = 16

_Row: TypeAlias = tuple[np.float32, ...]
_ZERO, _ONE = np.float32(0), np.float32(1)


@jit_inlined
def _zeros() -> _Row:
    z = np.float32(0)
    return (z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z)


@jit_inlined
def _load(a: Float32s) -> _Row:
    first = (a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])
    return (*first, a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15])


@jit_inlined
def _store(a: Float32s, t: _Row) -> None:
    a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7] = t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]
    a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15] = (
        t[8],
        t[9],
        t[10],
        t[11],
        t[12],
        t[13],
        t[14],
        t[15],
    )


@jit_inlined
def _plus(t: _Row, v: np.float32, a: Float32s) -> _Row:
    """``t + v a``."""
    low = (
        t[0] + v * a[0],
        t[1] + v * a[1],
        t[2] + v * a[2],
        t[3] + v * a[3],
        t[4] + v * a[4],
        t[5] + v * a[5],
    )
    middle = (t[6] + v * a[6], t[7] + v * a[7], t[8] + v * a[8], t[9] + v * a[9], t[10] + v * a[10])
    high = (
        t[11] + v * a[11],
        t[12] + v * a[12],
        t[13] + v * a[13],
        t[14] + v * a[14],
        t[15] + v * a[15],
    )
    return low + middle + high


@jit_part
def add_product(v: Float32s, u: Float32s, y: Float32s, out: Float32s) -> None:
    """``out = y + v u``, of ``u`` (16, 16) and others (n, 16)."""
    for j in range(v.shape[0]):
        row, found = v[j], _load(y[j])
        for a in range(u.shape[0]):
            found = _plus(found, row[a], u[a])
        _store(out[j], found)


@jit_part
def project(v: Float32s, x: Float32s, out: Float32s) -> None:
    """``out = v' x``, of ``v`` and ``x`` (n, 16)."""
    for a in range(out.shape[0]):
        found = _zeros()
        for j in range(v.shape[0]):
            found = _plus(found, v[j, a], x[j])
        _store(out[a], found)


@jit_part
def invert(m: Float32s) -> None:
    """Invert a positive definite matrix (16, 16) in place (Gauss and Jordan, without pivots)."""
    for k in range(m.shape[0]):
        pivot = _ONE / m[k, k]
        m[k, k] = _ONE
        for i in range(LANES):
            m[k, i] *= pivot
        for i in range(m.shape[0]):
            if i != k:
                factor = m[i, k]
                m[i, k] = _ZERO
                _store(m[i], _plus(_load(m[i]), -factor, m[k]))
