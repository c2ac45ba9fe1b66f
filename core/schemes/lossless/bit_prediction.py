"""Chooses the predictor of a losslessly coded tensor: the candidate of least estimated size on a sample.

A candidate predicts numbers (see entropy/static/residuals.py) from the previous checkpoint, unchanged, by a share, or
scaled by a moment's decay without gradients; another tensor of the same parameter; offsets of rows and columns, as
Adafactor factors the second moment (arXiv 1804.04235), here of its exponents. All estimates use at most 2^14
elements, with rows and columns thinned alike, so the time does not depend on the size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Float64s, Int64s, UInt8s, Unsigned
from shrinkpoint.entropy.static.residuals import WHOLE, Layout, Sources, class_widths, classes_of

__all__ = [
    "SCALES",
    "Format",
    "Prediction",
    "Problem",
    "choose",
    "contexts_of",
    "format_of",
    "scaled",
    "sources_of",
]

SCALES = (2.0**-20, 1.0)
"""The range of `Prediction.scale`."""

_SAMPLE = 1 << 14  # elements, at most
_LEAST = 1 << 12  # elements, at least, where the tensor has them
_FITTED = 64  # numbers from which the offset of a row or column is estimated
_FEW = 8  # rows or columns for which offsets are not worth their bytes
_CELL_BITS = 10.0  # estimated bits of a class in a context's table
_OFFSET_BITS = 6.0  # estimated bits of an offset
_CHUNK = 1 << 18  # numbers whose exponents are in memory at once
_DECAYED = 0.05  # share of numbers with the same ratio to the previous ones that makes it a scale


@dataclass(frozen=True)
class Format:
    """The bit layout of a floating-point format."""

    width: int
    """Bits of a number; of one part of a complex one."""
    mantissa: int
    """Bits below the exponent."""

    @property
    def unit(self) -> int:
        """The quantum of offsets: a quarter of an octave."""
        return 1 << max(self.mantissa - 2, 0)

    @property
    def has_byte_exponents(self) -> bool:
        """Whether an exponent is a byte."""
        return self.width - 1 - self.mantissa == 8

    def exponents(self, bits: Unsigned) -> npt.NDArray[Any]:
        """The exponents' fields."""
        exponent_mask = (1 << (self.width - 1 - self.mantissa)) - 1
        return (bits >> bits.dtype.type(self.mantissa)) & bits.dtype.type(exponent_mask)


_FORMATS = {
    torch.float64: Format(64, 52),
    torch.float32: Format(32, 23),
    torch.float16: Format(16, 10),
    torch.bfloat16: Format(16, 7),
    torch.float8_e4m3fn: Format(8, 3),
    torch.float8_e4m3fnuz: Format(8, 3),
    torch.float8_e5m2: Format(8, 2),
    torch.float8_e5m2fnuz: Format(8, 2),
    torch.complex128: Format(64, 52),
    torch.complex64: Format(32, 23),
    torch.complex32: Format(16, 10),
}


def format_of(dtype: torch.dtype) -> Format | None:
    """The format of a dtype's numbers; None for those that are not floating-point."""
    return _FORMATS.get(dtype)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predictor of a tensor; with offsets and tables it is all that a decoder needs."""

    layout: Layout
    context: str | None = None
    """Which exponents select the contexts of the classes: those of the 'previous' checkpoint, of the sibling
    ('sibling'), none."""
    offset: int = 0
    """Added to every prediction, in units."""
    factored: bool = False
    """Whether rows and columns have offsets, instead of ``offset``."""
    scale: float | None = None
    """Factor that the previous numbers are multiplied by first."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A tensor's numbers and those that may predict them, all of one size and flat in C order."""

    format: Format
    bits: Unsigned
    rows: int
    """The first dimension; 1 for vectors."""
    previous: Unsigned | None = None
    sibling: Unsigned | None = None


def contexts_of(source: Unsigned, form: Format) -> UInt8s:
    """Contexts by a source's exponents, uint8 (n,): those that occur, numbered; of more than 256 the lowest share one."""
    chunks = [slice(start, start + _CHUNK) for start in range(0, source.size, _CHUNK)]
    fields, present = np.empty(source.size, dtype=np.uint8), np.zeros(256, dtype=bool)
    bytewise, shift = form.has_byte_exponents, source.dtype.type(form.mantissa)
    top = 255 if bytewise else max(int(form.exponents(source[part]).max()) for part in chunks)
    low = source.dtype.type(max(top - 255, 0))
    for part in chunks:
        if bytewise:
            fields[part] = source[part] >> shift  # the sign is beyond a byte, and is left out
        else:
            fields[part] = np.maximum(form.exponents(source[part]), low) - low
        present |= np.bincount(fields[part], minlength=256) > 0
    numbers = (np.cumsum(present) - 1).astype(np.uint8)
    for part in chunks:
        fields[part] = numbers[fields[part]]
    return fields


def scaled(bits: Unsigned, form: Format, factor: float) -> Unsigned:
    """The patterns of the numbers times a factor, one IEEE multiplication each; subnormals count and come as zero.

    Not all processes have subnormals (`torch.set_flush_denormal`), and decoders must agree.
    """
    kind = np.dtype(f"f{form.width // 8}").type
    product = _normal(bits, form).view(kind) * kind(factor)
    return _normal(product.view(bits.dtype), form)


def _normal(bits: Unsigned, form: Format) -> Unsigned:
    exponents = form.exponents(bits)
    special = (exponents == 0) | (
        exponents == exponents.dtype.type((1 << (form.width - 1 - form.mantissa)) - 1)
    )
    return np.where(special, bits.dtype.type(0), bits)


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """A problem of some rows and columns of another, and their indexes."""

    problem: Problem
    row_at: Int64s
    column_at: Int64s


def choose(problem: Problem) -> tuple[Prediction, Int64s, Int64s | None, float]:
    """The best prediction for a tensor.

    Returns:
        The prediction; the offsets of rows and columns in units (one zero and None where there are none); and the
        estimated bits per element.
    """
    sample = _sample(problem)
    best: tuple[float, Prediction] | None = None
    for candidate in _candidates(sample.problem):
        cost = _cost(sample.problem, candidate, problem.bits.size, problem.rows)
        if best is None or cost < best[0]:
            best = cost, candidate
    assert best is not None
    cost, prediction = best
    rows, columns = np.array([prediction.offset], dtype=np.int64), None
    if prediction.factored:
        rows, columns = _offsets(problem, prediction)
    return prediction, rows, columns, cost / problem.bits.size


def _thin(count: int, most: int) -> Int64s:
    """At most ``most`` of ``count`` indexes, evenly spread."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


def _sample(problem: Problem) -> _Sample:
    rows, columns = problem.rows, problem.bits.size // problem.rows
    wanted = int(np.clip(problem.bits.size // 16, _LEAST, _SAMPLE))
    side = int(np.sqrt(wanted))
    row_at = _thin(rows, max(side, wanted // columns))
    column_at = _thin(columns, max(side, wanted // row_at.size))
    if (row_at.size, column_at.size) == (rows, columns):
        return _Sample(problem=problem, row_at=row_at, column_at=column_at)
    where = (row_at[:, None] * columns + column_at).reshape(-1)

    def some(source: Unsigned | None) -> Unsigned | None:
        return None if source is None else source[where]

    taken = Problem(
        format=problem.format,
        bits=problem.bits[where],
        rows=row_at.size,
        previous=some(problem.previous),
        sibling=some(problem.sibling),
    )
    return _Sample(problem=taken, row_at=row_at, column_at=column_at)


def _candidates(sample: Problem) -> Iterator[Prediction]:
    form = sample.format
    coarse, fine = max(form.mantissa - 1, 0), max(form.mantissa - 2, 0)
    signed = bool((sample.bits >> sample.bits.dtype.type(form.width - 1)).any())
    plain = Layout(width=form.width, cut=fine)
    yield Prediction(layout=plain)
    yield from _with_offsets(sample, Prediction(layout=replace(plain, magnitude=signed)))
    if sample.sibling is not None:
        halved = replace(plain, magnitude=signed, sibling=WHOLE // 2)
        yield from _with_offsets(sample, Prediction(layout=halved))
    if sample.previous is not None:
        delta = Layout(width=form.width, cut=coarse, previous=WHOLE, aligned=True)
        yield Prediction(layout=delta)
        yield Prediction(layout=delta, context="previous")
        share = _share(sample, signed)
        if share:
            blended = Prediction(layout=replace(plain, magnitude=signed, previous=share))
            yield from _with_offsets(sample, blended)
        factor = _decay(sample)
        if factor is not None:
            yield Prediction(layout=delta, context="previous", scale=factor)


def _with_offsets(sample: Problem, prediction: Prediction) -> Iterator[Prediction]:
    """The prediction with one offset, which is the median, and with one for every row and column."""
    middle = int(np.median(_linear(sample, prediction.layout))) // sample.format.unit
    yield replace(prediction, offset=middle)
    if min(sample.rows, sample.bits.size // sample.rows) >= _FEW:
        yield replace(prediction, factored=True)


def _cost(sample: Problem, candidate: Prediction, count: int, rows: int) -> float:
    """Bits for a tensor of ``count`` numbers in ``rows`` rows."""
    units = _offsets(sample, candidate) if candidate.factored else (np.array([candidate.offset]), None)
    layout = candidate.layout
    keys = classes_of(sample.bits, layout, sources_of(sample, candidate, *units)).astype(np.int64)
    source = getattr(sample, candidate.context) if candidate.context else None
    joint = keys if source is None else keys | contexts_of(source, sample.format).astype(np.int64) << 16
    found, counts = np.unique(joint, return_counts=True)
    totals = np.bincount(found >> 16, weights=counts)
    entropy = float((counts * np.log2(totals[found >> 16] / counts)).sum())
    stored = float((counts * class_widths(layout, found & 0xFFFF)).sum())
    offsets = _OFFSET_BITS * (rows + count // rows) if candidate.factored else 0.0
    return float((entropy + stored) * count / sample.bits.size + _CELL_BITS * found.size + offsets)


def sources_of(problem: Problem, prediction: Prediction, rows: Int64s, columns: Int64s | None) -> Sources:
    """The inputs of the residual coder's prediction, given offsets in units."""
    unit, previous = problem.format.unit, problem.previous
    if prediction.scale is not None and previous is not None:
        previous = scaled(previous, problem.format, prediction.scale)
    layout = prediction.layout
    return Sources(
        previous=previous if layout.previous or layout.aligned else None,
        sibling=problem.sibling if layout.sibling else None,
        rows=rows * unit,
        columns=None if columns is None else columns * unit,
    )


def _integers(bits: Unsigned, layout: Layout) -> Int64s:
    """Bit patterns as integers in the order of the values, or magnitudes, as in the kernels."""
    signed = bits.view(f"i{layout.width // 8}").astype(np.int64)
    mask = np.int64((1 << (layout.width - 1)) - 1)
    return signed & mask if layout.magnitude else signed ^ ((signed >> np.int64(63)) & mask)


def _linear(problem: Problem, layout: Layout) -> Int64s:
    """The residuals without offsets, to which offsets are fitted."""
    found = _integers(problem.bits, layout)
    for source, share in ((problem.previous, layout.previous), (problem.sibling, layout.sibling)):
        if share and source is not None:
            found = found - (_integers(source, layout) >> 6) * share
    return found


def _offsets(problem: Problem, prediction: Prediction) -> tuple[Int64s, Int64s]:
    """Offsets of rows and columns in units: medians of a few columns, then of a few rows, then rows again."""
    rows, columns = problem.rows, problem.bits.size // problem.rows
    row_at, column_at = _thin(rows, _FITTED), _thin(columns, _FITTED)

    def part(some_rows: Int64s, some_columns: Int64s) -> Int64s:
        where = (some_rows[:, None] * columns + some_columns).reshape(-1)
        taken = Problem(
            format=problem.format,
            bits=problem.bits[where],
            rows=some_rows.size,
            previous=None if problem.previous is None else problem.previous[where],
            sibling=None if problem.sibling is None else problem.sibling[where],
        )
        return _linear(taken, prediction.layout).reshape(some_rows.size, -1)

    every_row, every_column = np.arange(rows), np.arange(columns)
    first = np.median(part(row_at, column_at), axis=1)
    of_columns = np.median(part(row_at, every_column) - first[:, None], axis=0)
    of_rows = np.median(part(every_row, column_at) - of_columns[column_at], axis=1)
    low, high = np.iinfo(np.int16).min, np.iinfo(np.int16).max

    def units(found: Float64s) -> Int64s:
        return np.asarray(np.clip(np.rint(found / problem.format.unit), low, high), dtype=np.int64)

    return units(of_rows), units(of_columns)


def _share(sample: Problem, magnitude: bool) -> int:
    """Regression coefficient of the numbers on the previous ones after removing row and column offsets, in 64ths."""
    layout = Layout(width=sample.format.width, cut=max(sample.format.mantissa - 2, 0), magnitude=magnitude)
    assert sample.previous is not None
    both = (sample.bits, sample.previous)
    now, before = (_integers(bits, layout).astype(np.float64).reshape(sample.rows, -1) for bits in both)
    used = (now != 0) & (before != 0)
    if not used.any():
        return 0
    limit = 4.0 * (1 << sample.format.mantissa)
    now, before = (np.clip(_centred(values), -limit, limit) * used for values in (now, before))
    variance = float((before * before).sum())
    if variance == 0.0:
        return 0
    return int(np.clip(round(WHOLE * float((now * before).sum()) / variance), 0, WHOLE - 1))


def _centred(values: Float64s) -> Float64s:
    values = values - np.median(values, axis=1, keepdims=True)
    return np.asarray(values - np.median(values, axis=0), dtype=np.float64)


def _decay(sample: Problem) -> float | None:
    """The most frequent ratio of numbers to the previous ones, if frequent: moments without gradients decay alike."""
    form = sample.format
    if form.width < 32 or sample.previous is None:
        return None
    kind = f"f{form.width // 8}"
    now, before = _normal(sample.bits, form).view(kind), _normal(sample.previous, form).view(kind)
    used = (now != 0) & (before != 0)
    with np.errstate(all="ignore"):  # doubles may be too far apart
        ratios = now[used].astype(np.float64) / before[used]
    ratios = ratios[(ratios > SCALES[0]) & (ratios < SCALES[1])]
    if ratios.size < _DECAYED * now.size:
        return None
    steps = np.rint(np.log2(ratios) * 2**12)
    found, counts = np.unique(steps, return_counts=True)
    common = int(np.argmax(counts))
    if counts[common] < _DECAYED * now.size:
        return None
    return float(np.dtype(kind).type(np.median(ratios[steps == found[common]])))
