"""Step sizes of a matrix's rows and columns: what the curvature wants, and how much of it a chain follows.

Steps are proportional to ``v ** -1/4``: reverse water-filling with the curvature taken as the root of Adam's second moment
v (for which ``sqrt(v)`` stands in Adam's own update), of which the mean of each row and of each column is kept, as in
Adafactor (arXiv 1804.04235, section 3).

The place of a weight whose step size changes must be coded anew, which costs most of a bit; one whose step is too wide costs loss,
with the square of what it is too wide by. While training has only begun, second moments change by octaves, and grids
that stayed as they were would cost several times the loss. So a tensor keeps its steps until too much is lost, and then
only rows and columns that are off take others.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from shrinkpoint.arrays import Float64s, Int8s, UInt8s, widened
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.errors import FormatError
from shrinkpoint.runtime.threads import map_in_parts
from shrinkpoint.schemes.auto.factors import row_and_column_means
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.schemes.codec_io import check_sections, matrix_shape, number, section
from shrinkpoint.state.training import TensorSpec

MAX_EXPONENT = 32
"""Quarter octaves that a row or a column may change the step by, each way."""

_PER_OCTAVE = 4
_CURVATURE = 12  # quarter octaves that the curvature of a row or a column may change its steps by, each way
_NARROWER, _WIDER = 2, 4  # quarter octaves that a row or column must be off to take another step
_IDLE = 2.0  # quarter octaves that steps may on average be narrower than wanted: half a bit


def curvature_exponents(second: torch.Tensor, shape: tuple[int, ...]) -> tuple[Int8s, Int8s]:
    """Return how many quarter octaves the steps of each row and of each column lie above the tensor's own.

    Args:
        second: Adam's second moment, of `shape`; finite and not negative.
        shape: rows are the first axis, columns all others.

    Returns:
        int8 (rows,) and int8 (columns,), each -12 to 12: minus the octaves of the row's mean above the tensor's, and the
        same for columns. A row without any second moment gets the largest step.
    """
    rows, columns = row_and_column_means(widened(second).reshape(matrix_shape(shape)))
    return _exponents(rows), _exponents(columns)


def _exponents(means: Float64s) -> Int8s:
    used = means > 0
    if not used.any():
        return np.zeros(means.size, np.int8)
    octaves = np.log2(means, where=used, out=np.zeros_like(means))
    below = np.where(used, np.log2(means.mean()) - octaves, _CURVATURE)
    return within(np.rint(below), _CURVATURE)


def within(exponents: Float64s, most: int) -> Int8s:
    """Return whole numbers, those beyond `most` as that."""
    found: Int8s = np.minimum(np.maximum(exponents, -most), most).astype(
        np.int8
    )  # in a third of np.clip's time
    return found


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Of all rows and columns of one tensor: ``step * 2 ** ((row + column) / 4)``."""

    step: np.float32
    rows: Int8s
    columns: Int8s

    def followed(self, wanted: "Steps", slack: float) -> "Steps":
        """Return the steps to go on with where `wanted` are asked for: these, these with some rows and columns changed, or those.

        Args:
            wanted: of the same shape.
            slack: share by which the loss may be larger than with the wanted steps; no row's may be an octave wider.
        """
        octaves = math.log2(float(wanted.step) / float(self.step))
        off_columns = wanted.columns - self.columns.astype(np.float64)
        shared = _PER_OCTAVE * octaves + float(off_columns.mean())
        off_rows = wanted.rows - self.rows.astype(np.float64) + shared
        off_columns -= off_columns.mean()
        lost = float(np.exp2(-off_rows / 2).mean() * np.exp2(-off_columns / 2).mean()) - 1
        if lost <= slack and float(off_rows.mean()) <= _IDLE and float(off_rows.min()) > -_PER_OCTAVE:
            return self
        changed = [_changed(*pair) for pair in ((self.rows, off_rows), (self.columns, off_columns))]
        if any(np.abs(side).max(initial=0) > MAX_EXPONENT for side in changed):
            return wanted
        new_rows, new_columns = (side.astype(np.int8) for side in changed)
        return Steps(step=self.step, rows=new_rows, columns=new_columns)


def _changed(exponents: Int8s, off: Float64s) -> Float64s:
    """Return exponents, with those that are off put right."""
    far = (off <= -_NARROWER) | (off >= _WIDER)
    changed: Float64s = exponents + np.where(far, np.rint(off), 0.0)
    return changed


def join_exponents(rows: Int8s, columns: Int8s) -> UInt8s:
    """Return every element's exponent, in quarter octaves above 1/65536 of the step, from those of rows and columns, each from -`MAX_EXPONENT` to `MAX_EXPONENT`."""
    shifted = (rows.astype(np.int16) + 2 * MAX_EXPONENT).astype(np.uint8)
    total = np.empty((rows.size, columns.size), np.uint8)

    def fill(part: slice) -> None:
        # in eight bits: what wraps there is back in range with the sum
        np.add(shifted[part, None], columns.view(np.uint8)[None, :], out=total[part])

    map_in_parts(fill, *total.shape)
    return total.reshape(-1)


def split_exponents(exponents: UInt8s, shape: tuple[int, int]) -> tuple[Int8s, Int8s]:
    """Return exponents of rows and columns from which `join_exponents` makes these; not always the original ones."""
    matrix = exponents.reshape(shape)
    first, columns = matrix[:, 0].astype(np.int64), matrix[0].astype(np.int64) - 2 * MAX_EXPONENT
    rows = first - first[0]
    # any number may be moved from the columns to the rows, as long as both stay within reach
    moved = max(-MAX_EXPONENT - int(rows.min()), int(columns.max()) - MAX_EXPONENT)
    return (rows + moved).astype(np.int8), (columns - moved).astype(np.int8)


def write_exponents(exponents: UInt8s, shape: tuple[int, int]) -> bytes:
    """Return the section ``exponents``."""
    return encode_numbers(np.concatenate(split_exponents(exponents, shape)).view(np.uint8))


def read_steps(
    encoded: EncodedTensor, known: tuple[np.float32, UInt8s] | None, spec: TensorSpec
) -> tuple[np.float32, UInt8s]:
    """Return the tensor's step, and every element's exponent as of `join_exponents`.

    Args:
        encoded: of sections ``points``, perhaps ``kept``, and ``exponents``, unless they are the predecessor's.
        known: the same of the predecessor, if the reader has one.
        spec: of the tensor.

    Raises:
        FormatError: they are malformed, or the predecessor's and there is none.
    """
    step = number(encoded.params, spec, "step")
    if not 1e-27 < float(step) < 1e30:
        raise FormatError(f"{spec.name}: the step {step} is not of ordinary size")
    check_sections(encoded, spec, "points", *({"exponents", "kept"} & encoded.sections.keys()))
    if "exponents" not in encoded.sections:
        if known is None or step != known[0]:
            raise FormatError(f"{spec.name}: section 'exponents' is missing")
        return known
    height, width = matrix_shape(spec.shape)
    data = decode_numbers(section(encoded, spec, "exponents"), height + width, np.uint8)
    stored = data.view(np.int8)
    if max(int(stored.max()), -int(stored.min())) > MAX_EXPONENT:
        raise FormatError(f"{spec.name}: an exponent lies beyond {MAX_EXPONENT}")
    return step, join_exponents(stored[:height], stored[height:])
