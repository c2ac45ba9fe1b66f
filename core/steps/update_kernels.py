"""The compiled loops of the log of weight updates.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. numba checks no
bounds: the callers have compared all sizes.
"""

import numpy as np

from shrinkpoint.arrays import Float32s, UInt8s
from shrinkpoint.runtime.jit import jit

__all__ = ["LARGEST", "advance", "pack", "quantize", "unpack"]

LARGEST = 127
"""The largest multiple of the quantization step in one record; what is beyond it follows in the next ones."""

_ROUND = np.float32(
    12582912.0
)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even
_FINITE = np.float32(3.0e38)


@jit
def quantize(
    weights: Float32s, read: Float32s, inverse: np.float32, step: np.float32, symbols: UInt8s
) -> tuple[int, int]:
    """Quantize the difference between the weights and what a reader has, and advance the reader's values, in one pass.

    Args:
        weights: of this step.
        read: the reader's values; advanced by the quantized difference.
        inverse: of `step`, in single precision.
        step: the quantization step, positive.
        symbols: gets 2k for a multiple k >= 0 of the step, and -2k - 1 for a negative one.

    Returns:
        The largest symbol, and the number of weights that are not finite, whose readers' values stay.
    """
    largest, strange = np.uint8(0), 0
    for i in range(weights.size):
        weight = weights[i]
        finite = abs(weight) <= _FINITE
        strange += not finite
        quotient = (weight - read[i]) * inverse if finite else np.float32(0.0)
        quotient = min(max(quotient, np.float32(-LARGEST)), np.float32(LARGEST))
        rounded = (quotient + _ROUND) - _ROUND
        read[i] += rounded * step
        multiple = np.int32(rounded)
        symbol = np.uint8((multiple << 1) ^ (multiple >> 31))
        symbols[i] = symbol
        largest = max(largest, symbol)
    return int(largest), int(strange)


@jit
def advance(read: Float32s, symbols: UInt8s, step: np.float32) -> None:
    """The reader's half of `quantize`."""
    for i in range(read.size):
        symbol = np.int32(symbols[i])
        multiple = (symbol >> 1) ^ -(symbol & 1)
        read[i] += np.float32(multiple) * step


@jit
def pack(symbols: UInt8s, alphabet: int, together: int, packed: UInt8s) -> None:
    """Combine neighbours: several symbols become the digits of one number below 256, the first one the lowest.

    Args:
        symbols: each below `alphabet`.
        alphabet: its power `together` is at most 256.
        together: how many are combined.
        packed: as many as there are groups; missing digits of the last one are zero.
    """
    whole = symbols.size // together
    for group in range(packed.size):
        value = 0
        end = together if group < whole else symbols.size - whole * together
        for digit in range(end - 1, -1, -1):
            value = value * alphabet + symbols[group * together + digit]
        packed[group] = value


@jit
def unpack(packed: UInt8s, alphabet: int, together: int, symbols: UInt8s) -> bool:
    """The inverse of `pack`; False if a number is not of that form."""
    sound = True
    for group in range(packed.size):
        value = int(packed[group])
        for digit in range(together):
            place = group * together + digit
            if place < symbols.size:
                symbols[place] = value % alphabet
            elif value % alphabet:
                sound = False
            value //= alphabet
        sound = sound and value == 0
    return sound
