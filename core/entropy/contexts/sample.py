"""The planes that the context coder is given, and a sample of them from which its encoder decides."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shrinkpoint.arrays import Int64s, UInt8s
from shrinkpoint.entropy.static.rans import predict_bytes
from shrinkpoint.entropy.symbols import count_symbols, frozen

__all__ = ["PlaneSample", "Side"]


_SAMPLE_LOG2 = 17


@dataclass(frozen=True)
class Side:
    """A plane that encoder and decoder both have.

    Attributes:
        plane: uint8 (n,), one level per symbol, each below ``alphabet``.
        alphabet: 1..256.
        places: of each level an integer of -128..128, to which predictions are added: where a value lies in the cell of the
            level that it is expected at, in 1/256 of the distance of two levels from the middle. None where nobody knows.
        two_sided: whether a level says of a value what ``alphabet - 1 - level`` says of its negative, which the symbol
            mirrored in the middle of the plane's own alphabet stands for. Tables are then shared by the two.
    """

    plane: UInt8s
    alphabet: int
    places: tuple[int, ...] | None = None
    two_sided: bool = False


class PlaneSample(NamedTuple):
    """Every so many symbols of a plane and its sides, and how often they occur together.

    Attributes:
        step: how many symbols one of the sample stands for.
        symbols: uint8 (m,).
        sides: of m levels each.
        counts: int64 (alphabet,), ``step`` times how often each symbol occurs.
        pairs: int64 (side's alphabet, alphabet) each, the same for each level of each side.
        alone: bytes that the plane takes without a side.
        given: bytes that it takes given each side.
    """

    step: int
    symbols: UInt8s
    sides: list[Side]
    counts: Int64s
    pairs: list[Int64s]
    alone: float
    given: list[float]

    @staticmethod
    def of(symbols: UInt8s, alphabet: int, sides: Sequence[Side]) -> "PlaneSample":
        """Take all of a small plane."""
        step = (symbols.size >> _SAMPLE_LOG2) | 1  # odd: columns are even
        few = frozen(symbols[::step])
        sampled = [replace(side, plane=frozen(side.plane[::step])) for side in sides]
        pairs = [step * count_symbols(few, side.plane, alphabet, side.alphabet) for side in sampled]
        counts = step * count_symbols(few, None, alphabet, 1)[0]
        given = [predict_bytes(pair) for pair in pairs]
        return PlaneSample(step, few, sampled, counts, pairs, predict_bytes(counts[None]), given)
