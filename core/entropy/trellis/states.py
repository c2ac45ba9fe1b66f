"""The trellis of dependent quantization: which points an element may take, given those before it.

A scalar quantizer of step s wastes a quarter of a bit on every element, however small the element is: its cells are cubes,
and the best cells of many dimensions are balls. Trellis-coded quantization gets most of that back without tables of
points. The path of a row goes through a few states, and an element's state says whether its points are whole steps or
lie half a step away from them:

    point of index k in state s     (k + (s mod 2) / 2) steps
    next state                      (2 s mod S) + ((k mod 2) xor f(s)),   f(s) = bit 1 of s (S = 4), bits 1 xor 2 (S = 8)

Choosing the path that is nearest to a whole row (Viterbi) leaves 1.0 dB less noise than rounding with equally many points
does (S = 4; 1.1 dB with 8, 1.53 dB being the limit). With subtractive dither the noise stays independent of the values.

Places and points are integers here: a place is an int16 in `UNIT` parts of a step, a point its index in half steps.

Sources: M. W. Marcellin and T. R. Fischer, "Trellis coded quantization of memoryless and Gauss-Markov sources" (1990),
table I for the trellises; the same idea as the dependent quantization of H.266; R. Zamir and M. Feder, "On lattice
quantization noise" (1996) for dither on lattices.
"""

from typing import Literal

__all__ = ["MAX_WIDTH", "NOISE", "UNIT", "States", "path_width"]

States = Literal[4, 8]
"""How many states a trellis may have."""

UNIT = 256
"""Parts of a step in which places are expressed."""

NOISE: dict[int, float] = {4: 0.0663, 8: 0.0649}
"""Mean square of the error in square steps; 1/12 for rounding."""

MAX_WIDTH = 1 << 15
_MIN_WIDTH, _ROWS_FROM, _USUAL_WIDTH = 64, 8, 4096


def path_width(columns: int) -> int:
    """How many elements a path has before the next one begins in state 0.

    A row's, or those of as many rows as make 64, which is few enough and costs 2 % more noise than paths without an end; and
    4096 of a matrix with less than 8 columns, or more than 2^15.
    """
    if not _ROWS_FROM <= columns <= MAX_WIDTH:
        return _USUAL_WIDTH
    return columns * -(-_MIN_WIDTH // columns)
