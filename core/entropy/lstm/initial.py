"""What the LSTM coder's network starts from: the shapes of its weights, their first values, and the tables it reads."""

from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Int64s

if TYPE_CHECKING:
    from shrinkpoint.entropy.lstm.chunk_kernels import Learner
    from shrinkpoint.entropy.lstm.network_kernels import Curves

__all__ = ["MOST_RARE", "curves", "new_learner", "rarities"]


_ONE = 1 << 24
_SEED = 2506_12000
_PER_BIT = 8  # a rarity is in 1/8 bit
_LOG_2_PER_RARITY = 1453635  # ln(2) / 8 in 2^-24
MOST_RARE = 160
"""Highest rarity, 20 bits: the network's weights cannot say less."""


@lru_cache(maxsize=1)
def curves() -> "Curves":
    """The network's tables, by decimal arithmetic that is exact to the last digit everywhere."""
    from shrinkpoint.entropy.lstm.network_kernels import Curves  # numba

    with localcontext() as context:
        context.prec = 25
        powers = [(Decimal(-i) / 64).exp() for i in range(1025)]
        above = [int((32768 / (1 + power)).to_integral_value()) for power in powers[:513]]
        decay = [int((_ONE * power).to_integral_value()) for power in powers]
    sigmoid = [32768 - value for value in above[:0:-1]] + above
    return Curves(np.array(sigmoid, dtype=np.int32), np.array(decay, dtype=np.int32))


def rarities(counts: Int64s) -> bytes:
    """For each symbol how many bits it would take at its share of the plane, in 1/8, rounded down; at most 160."""
    total = int(counts.sum())
    return bytes(
        min(((total**_PER_BIT // int(count) ** _PER_BIT).bit_length() - 1), MOST_RARE) if count else MOST_RARE
        for count in counts
    )


def new_learner(rarity: bytes, width: int, rate: int) -> "Learner":
    """A network that has seen nothing but how rare each symbol is.

    Args:
        rarity: of each symbol, as :func:`rarities` gives it.
        width: units per layer, a multiple of 4.
        rate: learning rate in 2^-24.
    """
    from shrinkpoint.entropy.lstm.chunk_kernels import Learner  # numba
    from shrinkpoint.entropy.lstm.network_kernels import GATES, LAYERS, Network

    alphabet, gates = len(rarity), GATES * width
    shapes = (
        (alphabet, gates),
        (LAYERS, width, gates),
        (width, gates),
        (gates,),
        (width, alphabet),
        (alphabet,),
    )
    sizes = [int(np.prod(shape)) for shape in shapes]

    def views(flat: npt.NDArray[Any]) -> Network:
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return Network(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))

    weights = np.zeros(sum(sizes), dtype=np.int32)
    gradients, squares = np.zeros(weights.size, dtype=np.int64), np.zeros(weights.size, dtype=np.int64)
    net = views(weights)
    random = _uniform(weights.size)
    # about sqrt(6 / (5 width)): Glorot's range for a matrix from the width to four of it
    spread = int(np.sqrt(np.float64(6 * _ONE * _ONE // (5 * width))))
    weights[: sum(sizes[:3])] = random[: sum(sizes[:3])] * spread >> 24
    # a gate that forgets half of everything at every step has nothing to learn from at first
    net.entry[:, width : 2 * width] += _ONE
    net.bias[width : 2 * width] += _ONE
    net.prior[:] = -_LOG_2_PER_RARITY * np.frombuffer(rarity, dtype=np.uint8).astype(np.int32)
    return Learner(net, views(gradients), weights, gradients, squares, rate)


def _uniform(count: int) -> Int64s:
    """Numbers from -2^24 to 2^24 by SplitMix64, which is the same everywhere."""
    with np.errstate(over="ignore"):
        x = np.uint64(_SEED) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(39)).astype(np.int64) - _ONE
