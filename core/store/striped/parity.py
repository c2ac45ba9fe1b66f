"""Parity over equal shards: XOR for one lost shard, P and Q as in RAID 6 for two.

P is the XOR of the data shards. Q is their sum with weights 1, g, g^2, ... in GF(2^8) with the polynomial 0x11d and g = 2
(H. P. Anvin, "The mathematics of RAID-6"). A single data shard is mirrored: P, Q and any further shard equal it.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from typing import TypeAlias

import numpy as np

from shrinkpoint.arrays import Bools, UInt8s
from shrinkpoint.errors import CorruptionError

Shard: TypeAlias = UInt8s

MAX_PARITY = 2
"""Parity shards that can be computed; more spare shards than that are mirrors."""

_POLYNOMIAL = 0x11D
_CHUNK = 1 << 18
"""Bytes that Q is computed of at a time: with its scratch space they stay in the second cache, and Python's share is small."""


def parity_of(data: Sequence[Shard], number: int) -> Shard:
    """Return one of the spare shards of `data`.

    Args:
        data: equal lengths; a multiple of 8 bytes where there are several.
        number: 0 (P), 1 (Q); any number where there is a single data shard, which is mirrored.
    """
    if len(data) == 1:
        return data[0]
    if number >= MAX_PARITY:
        raise ValueError(f"spare shard {number} of {len(data)} data shards: there are {MAX_PARITY} at most")
    return q_of(data) if number else p_of(data)


def p_of(shards: Sequence[Shard]) -> Shard:
    """Return the XOR of all."""
    result = shards[0].copy() if len(shards) == 1 else np.bitwise_xor(shards[0], shards[1])
    for shard in shards[2:]:
        np.bitwise_xor(result, shard, out=result)
    return result


def q_of(shards: Sequence[Shard]) -> Shard:
    """Return the sum of g^i times shard i, by Horner's rule: multiply by g, add the next, last shard first."""
    size = len(shards[0])
    result = np.empty(size, np.uint8)
    scratch = np.empty(min(size, _CHUNK), np.bool_)
    for start in range(0, size, _CHUNK):
        total = result[start : start + _CHUNK]
        overflow = scratch[: len(total)]
        total[...] = shards[-1][start : start + _CHUNK]
        for shard in shards[-2::-1]:
            _times_g(total, overflow)
            np.bitwise_xor(total, shard[start : start + _CHUNK], out=total)
    return result


_REDUCE = np.uint8(_POLYNOMIAL & 0xFF)
_ZERO = np.int8(0)


def _times_g(total: Shard, overflow: Bools) -> None:
    """Multiply each byte by g, in place: double it, and reduce it by the polynomial where its highest bit
    was set."""
    excess = overflow.view(np.uint8)
    np.less(total.view(np.int8), _ZERO, out=overflow)
    np.multiply(excess, _REDUCE, out=excess)
    np.add(total, total, out=total)
    np.bitwise_xor(total, excess, out=total)


def _multiply(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a, b = a << 1 ^ (_POLYNOMIAL if a & 0x80 else 0), b >> 1
    return product


def _inverse(a: int) -> int:
    return next(b for b in range(1, 256) if _multiply(a, b) == 1)


@lru_cache(maxsize=64)
def _times_table(factor: int) -> Shard:
    return np.array([_multiply(factor, value) for value in range(256)], np.uint8)


def _times(shard: Shard, factor: int) -> Shard:
    return _times_table(factor)[shard]


def _power(exponent: int) -> int:
    return reduce(_multiply, [2] * (exponent % 255), 1)


def rebuild(found: Mapping[int, Shard], k: int, spare: int) -> list[Shard]:
    """Return all `k` data shards, out of any `k` of the `k` + `spare`.

    Args:
        found: sound shards by their number: data from 0, then P, then Q. Must be sound: parity detects no damage.
        k: data shards.
        spare: further shards.

    Raises:
        CorruptionError: there are fewer than `k`.
    """
    if k == 1 and found:
        return [next(iter(found.values()))]
    missing = [i for i in range(k) if i not in found]
    p, q = found.get(k) if spare >= 1 else None, found.get(k + 1) if spare >= 2 else None
    if len(missing) > (p is not None) + (q is not None):
        raise CorruptionError(f"{len(found)} of the {k} shards that are needed are sound")
    data = {i: found[i] for i in range(k) if i in found}
    if len(missing) == 1 and p is not None:
        data[missing[0]] = p_of([p, *data.values()])
    elif len(missing) == 1:
        assert q is not None
        [x] = missing
        data[x] = _times(np.bitwise_xor(q, _q_without(data, k, q)), _power(-x))
    elif len(missing) == 2:
        assert p is not None
        assert q is not None
        x, y = missing
        # P' = d_x + d_y and Q' = g^x d_x + g^y d_y
        p_rest, q_rest = p_of([p, *data.values()]), np.bitwise_xor(q, _q_without(data, k, q))
        divisor = _inverse(_power(y - x) ^ 1)
        data[x] = np.bitwise_xor(
            _times(p_rest, _multiply(_power(y - x), divisor)), _times(q_rest, _multiply(_power(-x), divisor))
        )
        data[y] = np.bitwise_xor(p_rest, data[x])
    return [data[i] for i in range(k)]


def _q_without(data: Mapping[int, Shard], k: int, like: Shard) -> Shard:
    """Q with zeros in place of the missing data shards."""
    zeros = np.zeros_like(like)
    return q_of([data.get(i, zeros) for i in range(k)])
