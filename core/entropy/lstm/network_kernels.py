"""The compiled LSTM of the ITMO coder: forward, backward and Adam, in integers alone.

Importing this module imports numba, so it is only ever imported from inside a function of its callers.

A decoder must reproduce every probability to the last bit, and hence every weight after any number of training steps.
Here nothing but integers of 32 and 64 bits is added, multiplied, divided and shifted, so that no order of summation, no
fused multiplication and no vector unit can make a difference: sums wrap, which has the same result in every order. Only
the square root starts from a floating-point guess, which is then corrected to the exact integer root.

Number formats, as bits behind the point: weights 24, activations 15, their products hence 39; gradients by an
activation 22; gradients by a weight 37; the mean of their squares 48.

Sources: arXiv 2506.12000 (two layers, a symbol's 9 neighbours as sequence, Adam with beta1 = 0, beta2 = 0.9999,
eps = 1e-5, batches of 256); S. Hochreiter, J. Schmidhuber, "Long short-term memory" (1997) with forget gates.
"""

import math
from typing import NamedTuple

import numpy as np

from shrinkpoint.arrays import Int32s, Int64s, Integer, UInt8s
from shrinkpoint.runtime.jit import jit, jit_part

BATCH = 256
"""Symbols whose probabilities come from the same weights."""
STEPS = 9
"""Length of the sequence: a 3x3 neighbourhood."""
LAYERS = 2
GATES = 4
"""Input, forget, candidate, output, in this order in every row of a matrix."""

_WEIGHT_LIMIT = 1 << 28  # 16
_GRADIENT_LIMIT = (1 << 31) - 1
_MEAN_LIMIT = 1 << 28
_EPSILON = 168  # 1e-5 in 2^-24
_MEMORY = 10_000  # batches: 1 / (1 - beta2)
_TOTAL = 1 << 16  # of the shares of all symbols
_CELL, _SQUASHED, _OUTPUT = 4, 5, 6  # rows of a layer's activations behind its gates


class Network(NamedTuple):
    """Weights, or their gradients: all arrays are views of one flat array.

    Attributes:
        entry: (alphabet, 4 width), the first layer's input: embedding, its product with the gates' weights, and bias.
        across: (2, width, 4 width), from a layer's previous output to its gates.
        upward: (width, 4 width), from the first layer's output to the second's gates.
        bias: (4 width,), of the second layer.
        out: (width, alphabet), from the last output to the logits.
        prior: (alphabet,), bias of the logits.
    """

    entry: Int32s
    across: Int32s
    upward: Int32s
    bias: Int32s
    out: Int32s
    prior: Int32s


class Curves(NamedTuple):
    """Tables with 64 entries per unit, between which is interpolated.

    Attributes:
        sigmoid: int32 (1025,), of -8..8 in 2^-15.
        decay: int32 (1025,), e^-x of 0..16 in 2^-24.
    """

    sigmoid: Int32s
    decay: Int32s


@jit_part
def clamp(value: Integer, low: int, high: int) -> Integer:
    """Return the nearest number between two others."""
    return np.int64(low) if value < low else np.int64(high) if value > high else np.int64(value)


@jit_part
def _sigmoid(table: Int32s, x: Integer) -> Integer:
    """Of ``x`` in 2^-12."""
    place = clamp(x, -32768, 32767) + 32768
    cell, part = place >> 6, place & 63
    low = np.int64(table[cell])
    value: Integer = low + ((np.int64(table[cell + 1]) - low) * part >> 6)
    return value


@jit_part
def _tanh(table: Int32s, x: Integer) -> Integer:
    value: Integer = 2 * _sigmoid(table, 2 * x) - 32768
    return value


@jit_part
def _add_product(total: Int64s, vector: Int32s, matrix: Int32s) -> None:
    """``total += vector @ matrix``, four rows at a time; the width is a multiple of 4."""
    for k in range(0, vector.size, 4):
        a, b = np.int64(vector[k]), np.int64(vector[k + 1])
        c, d = np.int64(vector[k + 2]), np.int64(vector[k + 3])
        first, second, third, fourth = matrix[k], matrix[k + 1], matrix[k + 2], matrix[k + 3]
        for j in range(total.size):
            total[j] += a * first[j] + b * second[j] + c * third[j] + d * fourth[j]


@jit_part
def _add_transposed(total: Int64s, matrix: Int32s, vector: Int32s) -> None:
    """``total += matrix @ vector``."""
    for k in range(total.size):
        row, part = matrix[k], np.int64(0)
        for j in range(vector.size):
            part += np.int64(row[j]) * np.int64(vector[j])
        total[k] += part


@jit_part
def _add_outer(total: Int64s, left: Int32s, right: Int32s) -> None:
    """``total += outer(left, right)``."""
    for k in range(left.size):
        row, factor = total[k], np.int64(left[k])
        for j in range(right.size):
            row[j] += factor * np.int64(right[j])


@jit_part
def _activate(curves: Curves, sums: Int64s, before: Int32s, now: Int32s) -> None:
    """One layer at one step: ``sums`` are its gates' inputs, ``before`` and ``now`` its activations (7, width)."""
    table, width = curves.sigmoid, now.shape[1]
    for k in range(width):
        i, f = _sigmoid(table, sums[k] >> 27), _sigmoid(table, sums[width + k] >> 27)
        g, o = _tanh(table, sums[2 * width + k] >> 27), _sigmoid(table, sums[3 * width + k] >> 27)
        cell = (f * np.int64(before[_CELL, k]) + i * g) >> 15
        squashed = _tanh(table, cell >> 3)
        now[0, k], now[1, k], now[2, k], now[3, k] = i, f, g, o
        now[_CELL, k], now[_SQUASHED, k] = cell, squashed
        now[_OUTPUT, k] = o * squashed >> 15


@jit
def forward(
    net: Network, curves: Curves, symbols: UInt8s, activations: Int32s, sums: Int64s, logits: Int64s
) -> None:
    """Run the network over one sequence.

    Args:
        net: weights.
        curves: tables.
        symbols: (9,), each below the alphabet.
        activations: int32 (10, 2, 7, width), filled from step 1 on; step 0 is the state before the first symbol: zeros.
        sums: int64 (4 width,), scratch.
        logits: int64 (alphabet,), filled, in 2^-39.
    """
    for t in range(1, STEPS + 1):
        for layer in range(LAYERS):
            start = net.entry[symbols[t - 1]] if layer == 0 else net.bias
            for j in range(sums.size):
                sums[j] = np.int64(start[j]) << 15
            if layer:
                _add_product(sums, activations[t, 0, _OUTPUT], net.upward)
            if t > 1:
                _add_product(sums, activations[t - 1, layer, _OUTPUT], net.across[layer])
            _activate(curves, sums, activations[t - 1, layer], activations[t, layer])
    for a in range(logits.size):
        logits[a] = np.int64(net.prior[a]) << 15
    _add_product(logits, activations[STEPS, LAYERS - 1, _OUTPUT], net.out)


@jit
def shares(decay: Int32s, logits: Int64s, ends: Int32s) -> None:
    """Softmax as shares of 2^16, at least 1 for every symbol: ``ends`` (alphabet + 1,) is filled with their sums."""
    top, best = logits[0], 0
    for a in range(1, logits.size):
        if logits[a] > top:
            top, best = logits[a], a
    total = np.int64(0)
    for a in range(logits.size):
        below = clamp((top - logits[a]) >> 27, 0, 65535)
        cell, part = below >> 6, below & 63
        low = np.int64(decay[cell])
        logits[a] = low + ((np.int64(decay[cell + 1]) - low) * part >> 6)
        total += logits[a]
    given = np.int64(0)
    for a in range(logits.size):
        logits[a] = 1 + logits[a] * (_TOTAL - logits.size) // total
        given += logits[a]
    logits[best] += _TOTAL - given
    ends[0] = 0
    for a in range(logits.size):
        ends[a + 1] = ends[a] + logits[a]


@jit_part
def _gate_gradients(
    before: Int32s, now: Int32s, by_output: Int64s, by_cell: Int64s, by_gates: Int32s
) -> None:
    """Through one layer at one step; ``by_cell`` becomes the gradient by the previous cell, ``by_output`` zero."""
    width = by_output.size
    for k in range(width):
        i, f, g, o = np.int64(now[0, k]), np.int64(now[1, k]), np.int64(now[2, k]), np.int64(now[3, k])
        squashed = np.int64(now[_SQUASHED, k])
        output = clamp(by_output[k] >> 24, -_GRADIENT_LIMIT, _GRADIENT_LIMIT)
        through = (output * o >> 15) * ((1 << 15) - (squashed * squashed >> 15)) >> 15
        cell = clamp(by_cell[k] + through, -_GRADIENT_LIMIT, _GRADIENT_LIMIT)
        by_i = (cell * g >> 15) * (i * (32768 - i) >> 15) >> 15
        by_f = (cell * np.int64(before[_CELL, k]) >> 15) * (f * (32768 - f) >> 15) >> 15
        by_g = (cell * i >> 15) * ((1 << 15) - (g * g >> 15)) >> 15
        by_o = (output * squashed >> 15) * (o * (32768 - o) >> 15) >> 15
        by_gates[k] = clamp(by_i, -_GRADIENT_LIMIT, _GRADIENT_LIMIT)
        by_gates[width + k] = clamp(by_f, -_GRADIENT_LIMIT, _GRADIENT_LIMIT)
        by_gates[2 * width + k] = clamp(by_g, -_GRADIENT_LIMIT, _GRADIENT_LIMIT)
        by_gates[3 * width + k] = clamp(by_o, -_GRADIENT_LIMIT, _GRADIENT_LIMIT)
        by_cell[k] = cell * f >> 15
        by_output[k] = 0


@jit
def backward(
    net: Network,
    gradient: Network,
    symbols: UInt8s,
    activations: Int32s,
    by_logits: Int32s,
    by_output: Int64s,
    by_cell: Int64s,
    by_gates: Int32s,
) -> None:
    """Add one sequence's gradient by every weight.

    Args:
        net: weights.
        gradient: int64, in 2^-37.
        symbols: as for :func:`forward`.
        activations: as :func:`forward` left them.
        by_logits: int32 (alphabet,), in 2^-22.
        by_output: int64 (2, width), scratch.
        by_cell: int64 (2, width), scratch.
        by_gates: int32 (4 width,), scratch.
    """
    by_output[:] = 0
    by_cell[:] = 0
    _add_outer(gradient.out, activations[STEPS, LAYERS - 1, _OUTPUT], by_logits)
    for a in range(by_logits.size):
        gradient.prior[a] += np.int64(by_logits[a]) << 15
    _add_transposed(by_output[LAYERS - 1], net.out, by_logits)
    for t in range(STEPS, 0, -1):
        for layer in range(LAYERS - 1, -1, -1):
            _gate_gradients(
                activations[t - 1, layer], activations[t, layer], by_output[layer], by_cell[layer], by_gates
            )
            target = gradient.bias if layer else gradient.entry[symbols[t - 1]]
            for j in range(by_gates.size):
                target[j] += np.int64(by_gates[j]) << 15
            if layer:
                _add_outer(gradient.upward, activations[t, 0, _OUTPUT], by_gates)
                _add_transposed(by_output[0], net.upward, by_gates)
            if t > 1:
                _add_outer(gradient.across[layer], activations[t - 1, layer, _OUTPUT], by_gates)
                _add_transposed(by_output[layer], net.across[layer], by_gates)


@jit_part
def _root(square: Integer) -> Integer:
    """Integer square root of 0..2^56: the guess may be off by what it likes, the result is exact."""
    root = np.int64(math.sqrt(float(square)))
    while root * root > square:
        root -= 1
    while (root + 1) * (root + 1) <= square:
        root += 1
    return root


@jit
def improve(weights: Int32s, gradient: Int64s, squares: Int64s, batches: Integer, rate: Integer) -> None:
    """Compute one step of Adam with beta1 = 0, whose bias-corrected mean of squares is a plain mean at first.

    Args:
        weights: flat, in 2^-24, changed.
        gradient: int64, flat, sum over a batch in 2^-37; zero afterwards.
        squares: int64, flat, mean squared gradients in 2^-48, changed.
        batches: how many have been seen before.
        rate: learning rate in 2^-24.
    """
    share = min(batches + 1, _MEMORY)
    for k in range(weights.size):
        if gradient[k] == 0 and squares[k] == 0:
            continue
        mean = clamp(gradient[k] >> 21, -_MEAN_LIMIT, _MEAN_LIMIT)
        gradient[k] = 0
        squares[k] += (mean * mean - squares[k]) // share
        step = mean * rate // (_root(squares[k]) + _EPSILON)
        weights[k] = clamp(np.int64(weights[k]) - step, -_WEIGHT_LIMIT, _WEIGHT_LIMIT)
