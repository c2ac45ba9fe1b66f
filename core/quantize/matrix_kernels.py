"""Kernels for row and column sums of weights and moments, from which encoders choose step sizes and factors.

Importing this module imports numba, so it is only ever imported from inside a function of its callers. Sums are
reassociated, so that they vectorise: their last bits depend on the machine. Nothing here is needed to decode.
"""

import numpy as np

from shrinkpoint.arrays import Float32s, Float64s, Int32s
from shrinkpoint.runtime.jit import jit_in_any_order

_BLOCK = 512  # mantissas whose product is within double precision's range
_MANTISSA, _ONE, _BIAS, _BITS = np.int32(0x7F_FFFF), np.int32(0x3F80_0000), np.int32(127), np.int32(23)
_LEAST = np.float32(2.0**-126)  # of normal numbers


@jit_in_any_order
def add_up(values: Float32s, rows: Float64s, columns: Float64s) -> None:
    """Fill the sums of the rows, and add to those of the columns, of a matrix."""
    for i in range(values.shape[0]):
        row, total = values[i], np.float64(0)
        for j in range(row.size):
            total += np.float64(row[j])
        rows[i] = total
        for j in range(row.size):
            columns[j] += np.float64(row[j])


@jit_in_any_order
def square_sum(values: Float32s) -> float:
    """Return the sum of all squares of a flat array."""
    total = np.float64(0)
    for i in range(values.size):
        total += np.float64(values[i]) * np.float64(values[i])
    return float(total)


@jit_in_any_order
def log_sum(bits: Int32s) -> tuple[float, int, int]:
    """The sum of log2 over the positive normal numbers, how many these are, and how many positive subnormals.

    Args:
        bits: a flat fp32 array, none of them negative, viewed as int32.
    """
    total, used, subnormal = np.float64(0), np.int64(0), np.int64(0)
    for first in range(0, bits.size, _BLOCK):
        block = bits[first : first + _BLOCK]
        product, octaves = np.float64(1), np.int32(0)
        normal, positive = np.int32(0), np.int32(0)
        for i in range(block.size):
            exponent = block[i] >> _BITS
            is_normal = exponent > 0
            mantissa = np.int32((block[i] & _MANTISSA if is_normal else np.int32(0)) | _ONE)
            product *= np.float64(mantissa.view(np.float32))
            octaves += exponent - _BIAS if is_normal else np.int32(0)
            normal += np.int32(is_normal)
            positive += np.int32(block[i] > 0)
        total += np.float64(octaves) + np.log2(product)
        used += normal
        subnormal += positive - normal
    return float(total), int(used), int(subnormal)


@jit_in_any_order
def square_lengths(first: Float32s, second: Float32s, rows: Float64s) -> None:
    """Fill the sums, by row, of ``first ** 2 / second`` where ``second`` is positive; both are matrices of one shape."""
    for i in range(first.shape[0]):
        m, v, total = first[i], second[i], np.float64(0)
        for j in range(m.size):
            if v[j] > 0:
                total += np.float64(m[j]) * np.float64(m[j]) / np.float64(v[j])
        rows[i] = total


@jit_in_any_order
def quotients(
    values: Float32s,
    of_rows: Float32s,
    of_columns: Float32s,
    rows: Float64s,
    numbers: Float64s,
    columns: Float64s,
) -> None:
    """Add up ``value / (row x column)`` by row and by column, and how many there are, where all are positive.

    Args:
        values: a matrix.
        of_rows: (rows,), the factor of each.
        of_columns: (columns,), the same.
        rows: (rows,), receives the sums.
        numbers: (rows,), receives how many these are.
        columns: (2, columns) of zeros, receives both.
    """
    for i in range(values.shape[0]):
        v, p, total, count = values[i], of_rows[i], np.float64(0), np.float64(0)
        for j in range(v.size):
            counts = (v[j] > 0) & (p > 0) & (of_columns[j] > 0)
            product = max(p * of_columns[j], _LEAST)
            quotient = np.float64(v[j]) / np.float64(product) if counts else np.float64(0)
            total += quotient
            count += np.float64(counts)
            columns[0, j] += quotient
            columns[1, j] += np.float64(counts)
        rows[i], numbers[i] = total, count


@jit_in_any_order
def row_squares(one: Float32s, other: Float32s, rows: Float64s) -> None:
    """Fill the sums, by row, of ``(one - other) ** 2``; both are matrices of one shape."""
    for i in range(one.shape[0]):
        a, b, total = one[i], other[i], np.float64(0)
        for j in range(a.size):
            away = np.float64(a[j]) - np.float64(b[j])
            total += away * away
        rows[i] = total
