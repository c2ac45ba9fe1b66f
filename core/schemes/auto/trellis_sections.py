"""The sections and params of weights on a trellis, as they are written and read."""

import numpy as np

from shrinkpoint.arrays import Bools, Indices
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.errors import FormatError
from shrinkpoint.quantize.dither import SEEDS
from shrinkpoint.schemes.auto.row_and_column_steps import read_steps, split_exponents, write_exponents
from shrinkpoint.schemes.auto.trellis_points import Grid
from shrinkpoint.schemes.auto.trellis_prediction import TrellisReference
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.schemes.codec_io import integer, matrix_shape, section
from shrinkpoint.state.training import TensorSpec

__all__ = ["read_after_restore", "read_grid", "read_rows", "read_seed", "write_rows", "write_steps"]


def write_steps(grid: Grid, spec: TensorSpec) -> bytes:
    """The section ``exponents``."""
    return write_exponents(*split_exponents(grid.exponents, matrix_shape(spec.shape)))


def read_grid(encoded: EncodedTensor, reference: TrellisReference | None, spec: TensorSpec) -> Grid:
    """The grid of all elements, whose steps may be the reference's.

    Raises:
        FormatError: a section or a param is malformed.
    """
    known = None if reference is None else (reference.step, reference.exponents)
    step, exponents = read_steps(encoded, known, spec, "kept")
    return Grid(step=step, exponents=exponents, seed=read_seed(encoded, spec))


def read_seed(encoded: EncodedTensor, spec: TensorSpec) -> int:
    """The seed of the dither.

    Raises:
        FormatError: it is none.
    """
    return integer(encoded.params, spec, "seed", 0, SEEDS - 1)


def write_rows(kept: Bools) -> bytes:
    """The section ``kept``."""
    return encode_numbers(np.packbits(kept))


def read_rows(encoded: EncodedTensor, reference: TrellisReference | None, spec: TensorSpec) -> Indices | None:
    """The rows that are coded; None for all.

    Raises:
        FormatError: the section of those that are kept is malformed, or there is nothing to keep.
    """
    if "kept" not in encoded.sections:
        return None
    if reference is None:
        raise FormatError(f"{spec.name}: a base has no rows to keep")
    height = matrix_shape(spec.shape)[0]
    stored = decode_numbers(section(encoded, spec, "kept"), -(-height // 8), np.uint8)
    bits = np.unpackbits(stored)
    if bits[height:].any():
        raise FormatError(f"{spec.name}: section 'kept' has bits for rows that there are not")
    return np.flatnonzero(bits[:height] == 0)


def read_after_restore(encoded: EncodedTensor, spec: TensorSpec) -> bool:
    """Whether the training went on from a restore of the previous checkpoint.

    Raises:
        FormatError: it is neither true nor false.
    """
    value = encoded.params.get("after_restore", False)
    if type(value) is not bool:
        raise FormatError(f"{spec.name}: 'after_restore' must be true or false, not {value!r}")
    return value
