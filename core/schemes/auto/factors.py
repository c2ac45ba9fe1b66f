"""A matrix of squares as the product of a row and a column: what Adafactor keeps of a second moment.

Source: Adafactor (arXiv 1804.04235), section 3. Factors are powers of ``2 ** (1/4)``, which every machine computes alike.

Payload of a section ``factors``: the length of what follows for rows (varint), then the exponents of rows and those of columns, each as
16-bit numbers of `shrinkpoint.entropy.numbers`: 32768 more than the exponent, 0 for a factor that is zero.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Float32s, Float64s, Int16s, UInt16s
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.entropy.wire import ByteReader, write_uvarint
from shrinkpoint.errors import FormatError
from shrinkpoint.runtime.threads import map_in_parts
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.schemes.codec_io import matrix_shape, section
from shrinkpoint.state.training import TensorSpec

_PER_OCTAVE = 4
# 2 ** (k / 4), written out: a library's power function may differ by a rounding from one machine to another
QUARTERS = np.array([1.0, 1.1892071, 1.4142135, 1.6817929], np.float32)
EMPTY = -(2**15)
"""The exponent of zero."""
_LOW, _HIGH = -126 * _PER_OCTAVE, 127 * _PER_OCTAVE  # of normal numbers
_POWERS = np.append(np.float32(0), np.ldexp(np.tile(QUARTERS, 254), np.repeat(np.arange(-126, 128), 4)))
"""Of zero's exponent, then of those from the lowest."""
_TINY = np.float32(np.finfo(np.float32).tiny)
_SAMPLE = 1 << 16  # elements by which the misfit is measured


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Exponents of each row and of each column, in quarter octaves."""

    rows: Int16s
    columns: Int16s

    @classmethod
    def of_second_moment(cls, values: Float32s) -> "Factors":
        """Return factors of a matrix, the mean logarithm of whose product over its positive elements is the matrix's.

        Args:
            values: fp32 (rows, columns), finite and not negative.
        """
        rows, columns = _means(*row_and_column_means(values))
        total, count = _log_sum(values)
        if not count:
            return cls._rounded(rows, columns)
        used = values > 0 if count < values.size else None
        for octaves, axis in ((rows, 1), (columns, 0)):
            every = np.full(octaves.size, values.shape[axis])
            each = np.count_nonzero(used, axis=axis) if used is not None else every
            total -= float((octaves[each > 0] * each[each > 0]).sum())
        return cls._rounded(rows + total / count, columns)

    @classmethod
    def of_roots(cls, values: Float32s) -> "Factors":
        """Return factors whose product is about each element's root mean square, zero only where all of a row or column is.

        Args:
            values: fp32 (rows, columns), finite.
        """
        largest = np.abs(values).max(initial=0)
        shift = int(np.frexp(largest)[1])
        squares = np.square(np.ldexp(values.astype(np.float64), -shift))
        rows, columns = _means(squares.mean(axis=1), squares.mean(axis=0))
        return cls._rounded(rows / 2 + shift, columns / 2)

    def balanced(self, values: Float32s) -> "Factors":
        """Return factors by whose product the values divided are 1 on average, in each row, and nearly so in each column.

        That is one round of what finds the most likely product where values are its elements times noise of one distribution (C.
        Fevotte, N. Bertin, J.-L. Durrieu, "Nonnegative matrix factorization with the Itakura-Saito divergence", 2009): means of
        quotients are not ruled by the largest elements, as means of the values are. Elements that are zero count for nothing.

        Args:
            values: fp32 (rows, columns), as those that these factors are of.
        """
        factors = self
        for axis in (0, 1, 0):
            sides = [factors.rows, factors.columns]
            sides[axis] = _raised(sides[axis], factors._quotients(values)[axis])
            factors = Factors(rows=sides[0], columns=sides[1])
        return factors

    def misfit(self, values: Float32s) -> float:
        """Root mean square of ``log2(value / product)``, in octaves, over a sample of the elements where both are positive.

        Args:
            values: fp32 (rows, columns), as those that these factors are of.
        """
        # odd: it takes all columns of a matrix that has a power of two of them
        stride = values.size // _SAMPLE | 1
        sample = values.reshape(-1)[::stride].astype(np.float64)
        row, column = np.divmod(np.arange(0, values.size, stride), values.shape[1])
        by_row, by_column = _power(self.rows)[row], _power(self.columns)[column]
        used = (sample > 0) & (by_row > 0) & (by_column > 0)
        with np.errstate(over="ignore", under="ignore"):
            product = np.maximum(by_row[used] * by_column[used], _TINY)
        octaves = np.log2(sample[used]) - np.log2(product.astype(np.float64))
        return float(np.sqrt(np.square(octaves).mean())) if octaves.size else 0.0

    def _quotients(self, values: Float32s) -> tuple[Float64s, Float64s]:
        """Return the means by row and by column of values over the product."""
        from shrinkpoint.quantize import matrix_kernels  # numba

        of_rows, of_columns = _power(self.rows), _power(self.columns)
        rows = np.zeros((2, values.shape[0]))

        def add(part: slice) -> Float64s:
            columns = np.zeros((2, values.shape[1]))
            matrix_kernels.quotients(
                values[part], of_rows[part], of_columns, rows[0, part], rows[1, part], columns
            )
            return columns

        sums = rows, sum(map_in_parts(add, *values.shape), np.zeros((2, values.shape[1])))
        by_row, by_column = (total / np.maximum(count, 1) for total, count in sums)
        return by_row, by_column

    def lengthened(self, octaves: Float64s) -> "Factors":
        """With each row's factor larger by so many octaves, to the nearest quarter."""
        rows = _within(self.rows + np.rint(octaves * _PER_OCTAVE))
        return Factors(rows=np.where(self.rows == EMPTY, EMPTY, rows).astype(np.int16), columns=self.columns)

    @classmethod
    def _rounded(cls, rows: Float64s, columns: Float64s) -> "Factors":
        return cls(rows=_exponents(rows), columns=_exponents(columns))

    def product(self) -> Float32s:
        """fp32 (rows * columns,): at least the least normal number, or zero where a factor is."""
        rows, columns = _power(self.rows)[:, None], _power(self.columns)
        product = np.empty((rows.size, columns.size), np.float32)
        zeros = not (rows.all() and columns.all())
        tiny = zeros or rows.min(initial=1) * columns.min(initial=1) < _TINY  # rounding keeps order

        def fill(part: slice) -> None:
            some, row = product[part], rows[part]
            with np.errstate(over="ignore", under="ignore"):
                np.multiply(row, columns, out=some)
            if tiny:
                np.maximum(some, _TINY, out=some, where=(row > 0) & (columns > 0) if zeros else True)

        map_in_parts(fill, *product.shape)
        return product.reshape(-1)

    def encode(self) -> bytes:
        """Return the section."""
        rows, columns = (encode_numbers(_unsigned(side)) for side in (self.rows, self.columns))
        head = bytearray()
        write_uvarint(head, len(rows))
        return b"".join((bytes(head), rows, columns))

    @classmethod
    def read(cls, encoded: EncodedTensor, spec: TensorSpec) -> "Factors":
        """Return the factors of a tensor of the spec's shape.

        Raises:
            FormatError: the section is missing or malformed.
        """
        height, width = matrix_shape(spec.shape)
        reader = ByteReader(section(encoded, spec, "factors"), f"{spec.name}: section 'factors'")
        rows = reader.take(reader.uvarint(reader.remaining, "length of rows"))
        sides = [
            _unsigned(decode_numbers(part, size, np.uint16)).view(np.int16)
            for part, size in ((rows, height), (reader.rest(), width))
        ]
        given = np.concatenate([side[side != EMPTY] for side in sides])
        if given.size and not _LOW <= given.min() <= given.max() <= _HIGH:
            raise FormatError(f"{spec.name}: a factor is beyond the range of fp32")
        return cls(rows=sides[0], columns=sides[1])


def row_and_column_means(values: Float32s) -> tuple[Float64s, Float64s]:
    """float64 (rows,) and (columns,), the means of an fp32 matrix."""
    from shrinkpoint.quantize import matrix_kernels  # numba

    rows = np.empty(values.shape[0])

    def add(part: slice) -> Float64s:
        columns = np.zeros(values.shape[1])
        matrix_kernels.add_up(values[part], rows[part], columns)
        return columns

    columns = sum(map_in_parts(add, *values.shape), np.zeros(values.shape[1]))
    return rows / values.shape[1], columns / values.shape[0]


def _means(rows: Float64s, columns: Float64s) -> tuple[Float64s, Float64s]:
    """log2 of rows' means, and of columns' means over the mean of all; minus infinity for those without any."""
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = rows.mean()
        return np.log2(rows), np.log2(columns / mean) if mean else np.full_like(columns, -np.inf)


def _log_sum(values: Float32s) -> tuple[float, int]:
    """Return the sum of log2 over the positive elements, and how many these are."""
    from shrinkpoint.quantize import matrix_kernels  # numba

    total, count, subnormal = matrix_kernels.log_sum(values.reshape(-1).view(np.int32))
    if not subnormal:
        return total, count
    used = values > 0
    octaves = np.log2(values, where=used, out=np.zeros_like(values))
    return float(octaves.sum(dtype=np.float64)), int(np.count_nonzero(used))


def _exponents(octaves: Float64s) -> Int16s:
    """In quarter octaves."""
    with np.errstate(invalid="ignore"):
        rounded = _within(octaves * _PER_OCTAVE)
    return np.where(np.isfinite(octaves), rounded, EMPTY).astype(np.int16)


def _raised(exponents: Int16s, by: Float64s) -> Int16s:
    """Times so much, to the nearest quarter octave; as they are where that is nothing, or they are of zeros."""
    known = (exponents != EMPTY) & (by > 0) & np.isfinite(by)
    more = np.log2(by, where=known, out=np.zeros_like(by)) * _PER_OCTAVE
    return np.where(known, _within(exponents + more), exponents).astype(np.int16)


def _within(exponents: Float64s) -> Float64s:
    """Return whole numbers, those of normal fp32 numbers."""
    whole: Float64s = np.minimum(np.maximum(np.rint(exponents), _LOW), _HIGH)
    return whole


def _power(exponents: Int16s) -> Float32s:
    powers: Float32s = _POWERS[np.maximum(exponents, _LOW - 1) - (_LOW - 1)]
    return powers


def _unsigned(side: npt.NDArray[Any]) -> UInt16s:
    """int16 as uint16 of the same order, or back."""
    return side.view(np.uint16) ^ np.uint16(1 << 15)
