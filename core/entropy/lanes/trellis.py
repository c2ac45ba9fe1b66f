"""The trellis of dependent quantization: which points an element may take, given those before it.

A scalar quantizer of step s wastes a quarter of a bit on every element, however small the element is: its cells are cubes,
and the best cells of many dimensions are balls. Trellis-coded quantization gets most of that back without tables of
points. The path of a row goes through four states, and an element's state says whether its points are whole steps or
lie half a step away from them:

    point of index k in state s     (k + (s mod 2) / 2) steps
    next state                      (2 s mod 4) + ((k mod 2) xor bit 1 of s)

Choosing the path that is nearest to a whole row (Viterbi) leaves 1.0 dB less noise than rounding with equally many points
does, 1.53 dB being the limit. With subtractive dither the noise stays independent of the values.

Places and points are integers here: a place is an int16 in 1/256 of a step, a point its index in half steps.

Sources: M. W. Marcellin and T. R. Fischer, "Trellis coded quantization of memoryless and Gauss-Markov sources" (1990),
table I for the trellis; the same idea as the dependent quantization of H.266; R. Zamir and M. Feder, "On lattice
quantization noise" (1996) for dither on lattices.
"""

NOISE = 0.0663
"""Mean square of the error in square steps; 1/12 for rounding."""

MAX_WIDTH = 1 << 15
_LEAST_COLUMNS, _LEAST_WIDTH, _USUAL_WIDTH, _LANES = 8, 64, 4096, 16


def row_width(rows: int, columns: int) -> int:
    """How many elements of a matrix, flat in C order, are a row to the coder, and a path from state 0 to the quantizer.

    The columns; or those of as many rows as make 64 elements, as paths without an end have 2 % less noise than shorter ones; or, where
    there are too few rows for sixteen lanes, or they are very short or long, whatever fills the lanes.
    """
    together = -(-_LEAST_WIDTH // max(columns, 1))
    if _LEAST_COLUMNS <= columns <= MAX_WIDTH and rows >= _LANES * together:
        return columns * together
    return min(max(-(-rows * columns // _LANES), _LEAST_WIDTH), _USUAL_WIDTH)
