"""Weights on a dithered trellis whose steps follow the curvature.

An element's points depend on those before it in its row (`shrinkpoint.entropy.lanes.trellis`), and every checkpoint takes another
dither, so that what a restore has moved a weight by is independent of the weight. What is coded is how far the point lies from where the weight is expected: from
the mean of what was restored of it before, weighted as a Kalman filter does for a random walk that is seen through noise
(R. Kalman, 1960). The steps of that walk, of which one number per tensor is stored, are much alike for all weights of a tensor,
since Adam normalises them; the noise is known.

After a restore a weight was where the file said, and the filter begins anew there.

Rows that training has not moved are kept as they were restored before: nothing is written of them, and no noise is added.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shrinkpoint.arrays import Bools, Float32s, Indices, Int8s, Int16s
from shrinkpoint.entropy.lanes.coder import decode_matrix, encode_matrix
from shrinkpoint.entropy.lanes.trellis import row_width
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.runtime.threads import in_parts
from shrinkpoint.schemes.auto.random_walk import LAST_WALK, NO_WALK, Expectation, measure_walk
from shrinkpoint.schemes.auto.row_and_column_steps import (
    Steps,
    join_exponents,
    read_steps,
    split_exponents,
    write_exponents,
)
from shrinkpoint.schemes.auto.trellis import (
    Grid,
    KeptRows,
    TrellisReference,
    deviations,
    expected_points,
    in_rows,
    nearest_points,
    packed_planes,
    rows_of,
    zero_places,
)
from shrinkpoint.schemes.base import Context, EncodedTensor, PackedPlanes, Planes, ReferenceState, Staged
from shrinkpoint.schemes.codec_io import (
    CODED_DTYPES,
    SEEDS,
    as_float32,
    emit,
    emitted,
    flag,
    integer,
    matrix_shape,
    section,
)
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

_FARTHEST = 30_000  # half steps from 0 that a point lies at most


@dataclass(frozen=True, kw_only=True)
class TrellisWeightCodec:
    """Codes each weight's point on a trellis, given where it is expected.

    Guarantees: the error of a weight is independent of it, of a mean square of 0.0663 square steps, and less than two steps, but for a
    rounding to the tensor's dtype.
    """

    id: ClassVar[str] = "trellis-weight"
    needs: ClassVar[tuple[str, ...]] = ()

    step: float = 1e-3
    """Distance of two points of one state where the curvature is the tensor's mean one."""
    exponents: tuple[Int8s, Int8s] | None = None
    """What `row_and_column_steps.curvature_exponents` gives; None for equal steps."""
    seed: int = 0
    """Seed of the dither: another one for every checkpoint."""
    after_restore: bool = False
    """Whether the training went on from a restore of the previous checkpoint."""
    slack: float = 0.2
    """The previous checkpoint's steps are kept while the loss is at most this share larger than with the wanted ones."""
    kept: Bools | None = None
    """(rows,): which ones stay as the previous checkpoint has them, if there is one; None for none."""

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses NaN, infinity, other dtypes than floats, and steps too small by far."""
        values, columns = as_float32(tensor, spec, CODED_DTYPES), matrix_shape(spec.shape)[1]
        reference = TrellisReference.of(context.reference, spec)
        if reference is not None and self.after_restore:
            reference = reference.after_restore()
        grid = self._grid(reference, spec)
        if not 1e-27 < float(grid.step) < 1e30:  # no reader takes others
            raise CannotRepresentError(
                f"{spec.name}: the step {grid.step} is not of ordinary size: stored exactly"
            )
        walk, rows, variance_code = NO_WALK, None, None
        has_new_steps = True
        if reference is not None:
            if self.kept is not None and bool(self.kept.any()):
                rows = np.flatnonzero(~self.kept)
            squares, counts = deviations(values, grid, reference, columns, rows)
            variance_code = reference.variance_code
            walk = measure_walk(squares, counts, variance_code)
            has_new_steps = reference.step != grid.step or not np.array_equal(
                reference.exponents, grid.exponents
            )
        kept = _kept_rows(reference, rows, spec)
        found = nearest_points(values, grid, reference, rows, columns)
        if found is None:
            raise CannotRepresentError(f"{spec.name}: the step {grid.step} is too small for its values")
        points, even, places = found
        reached = _reached(points, even, rows, spec)
        quantized = _Quantized(grid, points, places, reached, Expectation(variance_code, walk), rows, kept)
        params: dict[str, JSON] = {"step": float(grid.step), "seed": grid.seed, "walk": walk}
        params["variance_code"] = quantized.expectation.variance_code
        is_delta = reference is not None
        if is_delta and self.after_restore:
            params["after_restore"] = True

        def emit() -> tuple[EncodedTensor, Planes]:
            sections = {"points": _write_points(points, places, spec, predictable=is_delta)}
            if has_new_steps:
                sections["exponents"] = write_exponents(grid.exponents, matrix_shape(spec.shape))
            if rows is not None and self.kept is not None:
                sections["kept"] = encode_numbers(np.packbits(self.kept))
            return EncodedTensor(self.id, params, sections, is_delta), quantized.planes(spec)

        return Staged(emitted(quantized.restored(spec), spec), emit)

    def rebase(
        self, encoded: EncodedTensor, reference: ReferenceState, spec: TensorSpec
    ) -> EncodedTensor | None:
        """See `Rebasable.rebase`; rows that were kept lie on the points of other checkpoints, and cannot be coded by these."""
        known = TrellisReference.of(reference, spec)
        if known is None:
            return None
        grid = Grid(
            step=known.step,
            exponents=known.exponents,
            seed=integer(encoded.params, spec, "seed", 0, SEEDS - 1),
        )
        points = grid.points(known.values)
        if points is None:
            return None
        places = zero_places(grid.seed, points.size)
        sections = {"points": _write_points(points, places, spec, predictable=False)}
        params: dict[str, JSON] = {name: encoded.params[name] for name in ("step", "seed")}
        params |= {"walk": NO_WALK, "variance_code": LAST_WALK}
        sections["exponents"] = write_exponents(grid.exponents, matrix_shape(spec.shape))
        return EncodedTensor(self.id, params, sections)

    def _grid(self, reference: TrellisReference | None, spec: TensorSpec) -> Grid:
        """With the steps that are wanted, or those of before while they do."""
        height, width = matrix_shape(spec.shape)
        rows, columns = self.exponents or (np.zeros(height, np.int8), np.zeros(width, np.int8))
        wanted = Steps(step=np.float32(self.step), rows=rows, columns=columns)
        if reference is not None and not self.after_restore:
            before = split_exponents(reference.exponents, (height, width))
            wanted = Steps(step=reference.step, rows=before[0], columns=before[1]).followed(
                wanted, self.slack
            )
        return Grid(step=wanted.step, exponents=join_exponents(wanted.rows, wanted.columns), seed=self.seed)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        if spec.dtype not in CODED_DTYPES or spec.numel == 0:
            raise FormatError(f"{spec.name}: codec {self.id!r} cannot hold {spec.dtype} {spec.shape}")
        reference = TrellisReference.of(context.reference, spec) if encoded.uses_reference else None
        if encoded.uses_reference and reference is None:
            raise FormatError(f"{spec.name}: its reference planes are missing")
        restored = "after_restore" in encoded.params and flag(encoded.params, spec, "after_restore")
        if restored and reference is not None:
            reference = reference.after_restore()
        # the next delta's reader relies on it
        integer(encoded.params, spec, "variance_code", NO_WALK, LAST_WALK)
        before = None if reference is None else (reference.step, reference.exponents)
        step, exponents = read_steps(encoded, before, spec)
        grid = Grid(step=step, exponents=exponents, seed=integer(encoded.params, spec, "seed", 0, SEEDS - 1))
        rows, columns = _read_rows(encoded, reference, spec), matrix_shape(spec.shape)[1]
        even, places = (rows_of(found, rows, columns) for found in expected_points(grid, reference))
        expectation = Expectation(
            None if reference is None else reference.variance_code,
            integer(encoded.params, spec, "walk", NO_WALK, LAST_WALK),
        )
        kept = _kept_rows(reference, rows, spec)
        del reference  # its values take as much memory as the tensor
        points = decode_matrix(
            section(encoded, spec, "points"),
            places.size,
            places,
            width=row_width(places.size // columns, columns),
        )
        reached = _reached(points, even, rows, spec)
        return _Quantized(grid, points, places, reached, expectation, rows, kept).planes(spec)

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        is_new = isinstance(planes, PackedPlanes)  # made as it is read
        read = np.asarray if is_new or context.lasting else np.array
        return emit(read(planes["value"], np.float32), spec, own=True)


@dataclass(frozen=True)
class _Quantized:
    """A tensor on its trellis, and how it came there."""

    grid: Grid
    points: Int16s
    """From the even points where they are expected, of the rows that are coded."""
    places: Int16s
    """Where they are expected, in 1/256 of a step."""
    reached: Int16s
    """From 0, of all rows; of any number in those that are kept."""
    expectation: Expectation
    rows: Indices | None
    """That are coded; None for all."""
    kept: KeptRows | None
    """The others."""

    def restored(self, spec: TensorSpec) -> Float32s:
        """Return what a reader will have, before it is rounded to the tensor's dtype."""
        values = self.grid.values(self.reached)
        if self.kept is not None:
            values.reshape(matrix_shape(spec.shape))[self.kept.rows] = self.kept.values
        return values

    def planes(self, spec: TensorSpec) -> PackedPlanes:
        """Return what a reader keeps."""
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        shape = matrix_shape(spec.shape)
        expected = np.empty(self.points.size, np.int8)
        exponents = rows_of(self.grid.exponents, self.rows, shape[1])
        known = self.points, self.places, self.expectation.gains, exponents
        in_parts(trellis_dither_kernels.remember, *known, expected)
        offsets = in_rows(expected, self.rows, shape)  # a row that is kept is expected where it is
        return packed_planes(self.grid, self.reached, offsets, spec.shape, self.kept)


def _write_points(points: Int16s, places: Int16s, spec: TensorSpec, *, predictable: bool) -> bytes:
    columns = matrix_shape(spec.shape)[1]
    width = row_width(points.size // columns, columns)
    return encode_matrix(points, places, width=width, predictable=predictable)


def _read_rows(
    encoded: EncodedTensor, reference: TrellisReference | None, spec: TensorSpec
) -> Indices | None:
    """Return the rows that are coded; None for all."""
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


def _reached(points: Int16s, even: Int16s, rows: Indices | None, spec: TensorSpec) -> Int16s:
    """Return the points from 0 of all rows, in the memory of the even ones; zeros in those that are not coded.

    Raises:
        FormatError: one lies too far from 0.
    """
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    if not all(in_parts(trellis_dither_kernels.reach, points, even, _FARTHEST)):
        raise FormatError(f"{spec.name}: a point is beyond {_FARTHEST} half steps")
    return in_rows(even, rows, matrix_shape(spec.shape))


def _kept_rows(reference: TrellisReference | None, rows: Indices | None, spec: TensorSpec) -> KeptRows | None:
    """Return the rows that stay as the reference has them; None where all are coded."""
    if rows is None or reference is None:
        return None
    shape = matrix_shape(spec.shape)
    kept = np.setdiff1d(np.arange(shape[0]), rows, assume_unique=True)
    return KeptRows(kept, reference.values.reshape(shape)[kept])
