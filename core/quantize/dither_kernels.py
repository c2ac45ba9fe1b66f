"""Kernels of uniform quantization with subtractive dither.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Kernels release
the GIL and keep no state. Decoding uses integers and single IEEE 754 operations on fp32 in a fixed order,
none of which is a product followed by a sum that a compiler might contract: every machine gets the same bits.

``quarters`` (4,) are the steps of exponents 64 to 67.
"""

import numpy as np

from shrinkpoint.arrays import Float32s
from shrinkpoint.runtime.jit import jit, jit_part

__all__ = ["offsets", "random_bits", "step_of"]


_WEYL = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(48), np.uint64(32)
_ONE = np.uint64(1)
_HALF, _DOWN = np.float32(0.5), np.float32(2.0**-16)
_OCTAVE_ZERO, _MANTISSA_BITS = 127 - 16, 23


@jit_part
def random_bits(start: np.uint64, i: int) -> np.uint64:
    """64 bits of an element's own (SplitMix64 as a counter-based generator); ``start`` is the seed, shifted by 32."""
    bits = (np.uint64(i) + _ONE + start) * _WEYL
    bits = (bits ^ (bits >> _SHIFTS[0])) * _MIX_1
    bits = (bits ^ (bits >> _SHIFTS[1])) * _MIX_2
    return bits ^ (bits >> _SHIFTS[2])


@jit_part
def _bits(start: np.uint64, i: int) -> np.uint64:
    """The 16 bits of an element's dither."""
    bits: np.uint64 = random_bits(start, i) >> _SHIFTS[3]
    return bits


@jit_part
def _offset(start: np.uint64, i: int) -> np.float32:
    """16 bits and a half are exact in fp32, and so is every difference to a small integer."""
    return (np.float32(np.int32(_bits(start, i))) + _HALF) * _DOWN - _HALF


@jit_part
def step_of(q0: np.float32, q1: np.float32, q2: np.float32, q3: np.float32, exponent: np.uint8) -> np.float32:
    """``quarters[e % 4] * 2 ** (e // 4 - 16)``, of which the product is exact."""
    k = np.int32(exponent)
    low = q1 if k & 1 else q0
    high = q3 if k & 1 else q2
    octave = np.int32(((k >> 2) + _OCTAVE_ZERO) << _MANTISSA_BITS)
    return (high if k & 2 else low) * octave.view(np.float32)


@jit
def offsets(seed: int, first: int, out: Float32s) -> None:
    """The dither of each element from the one of this number on."""
    start = (np.uint64(seed) << _SHIFTS[4]) + np.uint64(first)
    for i in range(out.size):
        out[i] = _offset(start, i)
