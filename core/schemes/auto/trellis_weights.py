"""Weights on a dithered trellis whose steps follow the curvature.

As `shrinkpoint.schemes.auto.lattice`, but an element's points depend on those before it in its row (`shrinkpoint.entropy.trellis.states`),
and every checkpoint takes another dither. What is coded is how far the point lies from where the weight is expected: from
the mean of what was restored of it before, weighted as a Kalman filter does for a random walk that is seen through noise
(R. Kalman, 1960). The steps of that walk, of which one number per tensor is stored, are much alike for all weights of a tensor,
since Adam normalises them; the noise is known.

After a restore a weight was where the file said, and the filter begins anew there.

Rows that training has not moved are kept as they were restored before: nothing is written of them, and no noise is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from shrinkpoint.arrays import Bools, Float32s, Indices, Int8s, Int16s, Signed, widened
from shrinkpoint.entropy.trellis.coder import CodedPoints, Path
from shrinkpoint.entropy.trellis.states import States
from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError
from shrinkpoint.quantize.dither import SEEDS
from shrinkpoint.schemes.auto.lattice_points import join_exponents, split_exponents
from shrinkpoint.schemes.auto.lattice_steps import Steps
from shrinkpoint.schemes.auto.random_walk import (
    LAST_WALK,
    NO_WALK,
    Expectation,
    best_share,
    measure_walk,
)
from shrinkpoint.schemes.auto.trellis_planes import KeptRows, TrellisPlanes
from shrinkpoint.schemes.auto.trellis_points import (
    Grid,
    check_states,
    nearest_points,
    read_states,
)
from shrinkpoint.schemes.auto.trellis_prediction import (
    ERRORS,
    TrellisPrediction,
    TrellisReference,
    deviations,
    expected_points,
    read_carried,
    read_step_ratio,
    rows_of,
    with_noise,
)
from shrinkpoint.schemes.auto.trellis_sections import (
    FARTHEST,
    read_after_restore,
    read_grid,
    read_points,
    read_rows,
    read_seed,
    write_points,
    write_rows,
    write_steps,
)
from shrinkpoint.schemes.base import (
    Coded,
    Context,
    EncodedTensor,
    PackedPlanes,
    Planes,
    ReferenceState,
    Staged,
)
from shrinkpoint.schemes.codec_io import CODED_DTYPES, as_float32, finite, integer, matrix_shape
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

__all__ = ["TrellisWeightCodec"]

_NOTHING = np.zeros(0, np.float32)
_CHUNK = 1 << 18  # elements that are handled at a time where a plane of wide integers would take memory


@dataclass(frozen=True, kw_only=True)
class TrellisWeightCodec:
    """Codes each weight's point on a trellis, given where it is expected.

    Guarantees: the error of a weight is independent of it, of a mean square of 0.0663 square steps (0.0649 with 8 states), and
    less than two steps, but for a rounding to the tensor's dtype.

    Raises:
        ConfigError: an option is out of its range.
    """

    id: ClassVar[str] = "trellis-weight"
    needs: ClassVar[tuple[str, ...]] = ()

    step: float = 1e-3
    """Distance of two points of one state where the curvature is the tensor's mean one."""
    exponents: tuple[Int8s, Int8s] | None = None
    """What `lattice_steps.curvature_exponents` gives; None for equal steps."""
    seed: int = 0
    """Seed of the dither: another one for every checkpoint."""
    after_restore: bool = False
    """Whether the training went on from a restore of the previous checkpoint."""
    slack: float = 0.2
    """The previous checkpoint's steps are kept while the loss is at most this share larger than with the wanted ones."""
    states: States = 4
    """Of the trellis."""
    kept: Bools | None = None
    """(rows,): which ones stay as the previous checkpoint has them, if there is one; None for none."""

    def __post_init__(self) -> None:
        if not 1e-27 < float(np.float32(self.step)) < 1e30:
            raise ConfigError(f"step={self.step} must be a positive number of ordinary size")
        if type(self.seed) is not int or not 0 <= self.seed < SEEDS:
            raise ConfigError(f"seed={self.seed!r} must be an integer from 0 to {SEEDS - 1}")
        if not 0 <= self.slack <= 100:
            raise ConfigError(f"slack={self.slack} must be between 0 and 100")
        check_states(self.states)

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """See `TensorCodec.encode`; refuses NaN, infinity, other dtypes than floats, and steps too small by far."""
        found = self._quantize(tensor, spec, context)
        errors = self._errors(found, _checked(found.restored(spec), spec), spec)
        encoded, planes = self._coded(found, spec, context.threads)
        # made again: while the points are coded, they and their contexts take memory enough
        return Coded(encoded, planes, _tensor(found.restored(spec), spec), {ERRORS: errors})

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `Stages.stage`; refuses what `encode` refuses."""
        found = self._quantize(tensor, spec, context)
        restored = _checked(found.restored(spec), spec)
        errors, value = self._errors(found, restored, spec), _tensor(restored, spec)

        def coded(threads: int) -> Coded:
            return Coded(*self._coded(found, spec, threads), value, {ERRORS: errors})

        return Staged(value, coded)

    def _errors(self, found: "_Quantized", restored: Float32s, spec: TensorSpec) -> Int8s:
        errors = found.grid.errors(found.values, restored)
        if found.rows is not None and self.kept is not None:
            errors.reshape(matrix_shape(spec.shape))[self.kept] = 0
        return errors

    def _coded(
        self, found: "_Quantized", spec: TensorSpec, threads: int
    ) -> tuple[EncodedTensor, TrellisPlanes]:
        assert found.path is not None
        grid, is_delta = found.grid, found.offsets is not None
        params: dict[str, JSON] = {"step": float(grid.step), "seed": grid.seed, "states": self.states}
        params |= {
            "walk": found.walk,
            "carried": found.carried,
            "variance_code": found.expectation.variance_code,
        }
        if is_delta and self.after_restore:
            params["after_restore"] = True
        coded, sections = write_points(found.points, found.path, threads)
        if found.has_new_steps:
            sections["exponents"] = write_steps(grid, spec, threads)
        if found.rows is not None and self.kept is not None:
            sections["kept"] = write_rows(self.kept, threads)
        planes = _planes(
            found.reached,
            grid,
            coded,
            found.offsets,
            found.carried,
            found.expectation,
            found.rows,
            found.kept,
            spec,
        )
        return EncodedTensor(self.id, params, sections, is_delta), planes

    def restored(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> torch.Tensor:
        """See `Quantizer.restored`."""
        found = self._quantize(tensor, spec, context, coding=False)
        return _tensor(_checked(found.restored(spec), spec), spec)

    def _quantize(
        self, tensor: torch.Tensor, spec: TensorSpec, context: Context, *, coding: bool = True
    ) -> "_Quantized":
        values = as_float32(tensor, spec, CODED_DTYPES)
        reference = self._reference(context, spec)
        grid = self._grid(reference, spec)
        walk, carried, rows = NO_WALK, 0, None
        if reference is not None:
            if self.kept is not None and bool(self.kept.any()):
                rows = np.flatnonzero(~self.kept)
            squares, counts = deviations(values, grid, reference, matrix_shape(spec.shape)[1], rows)
            walk = measure_walk(squares, counts, reference.variance_code, self.states)
            if reference.errors is not None:
                carried = best_share(walk, counts, self.states)
        handed_over = [reference]
        del reference  # its memory is needed again before all is quantized
        try:
            return self._placed(values, handed_over, grid, walk, carried, rows, spec, context.threads, coding)
        except CannotRepresentError:
            if carried == 0:
                raise
        # with finer steps, there are too many of them to the farthest weights
        handed_over = [self._reference(context, spec)]
        return self._placed(values, handed_over, grid, walk, 0, rows, spec, context.threads, coding)

    def _placed(
        self,
        values: Float32s,
        handed_over: list[TrellisReference | None],
        grid: Grid,
        walk: int,
        carried: int,
        rows: Indices | None,
        spec: TensorSpec,
        threads: int,
        coding: bool,
    ) -> "_Quantized":
        columns, reference = matrix_shape(spec.shape)[1], handed_over.pop()
        variance_code = None if reference is None else reference.variance_code
        expectation = Expectation(variance_code, walk, carried, self.states)
        grid = replace(grid, step_ratio=expectation.step_ratio)
        path, wanted, own = None, values, None
        if coding or reference is None:
            prediction = TrellisPrediction.of(grid, reference, carried, self.states, spec, rows)
            even, path = prediction.even, prediction.path
            del prediction
        else:
            even = expected_points(grid, reference, carried)[0]
        has_new_steps, kept = not _has_steps_of(grid, reference), _kept_rows(reference, rows, spec)
        errors = None if reference is None else reference.errors
        if reference is not None and errors is not None and carried:
            reference = replace(reference, values=_NOTHING)
            wanted = own = with_noise(values, grid, reference, errors, carried)
        offsets = None if reference is None else reference.offsets
        del reference
        measured = rows_of(grid.measured(wanted, even, spec, own), rows, columns)
        del wanted, own
        points = nearest_points(measured, columns, self.states, threads)
        del measured
        reached = _reached(points, even, rows, columns)
        if reached is None:
            raise CannotRepresentError(f"{spec.name}: its steps are too small for its values")
        return _Quantized(
            values=values,
            grid=grid,
            path=path,
            points=points,
            reached=reached,
            walk=walk,
            carried=carried,
            expectation=expectation,
            rows=rows,
            kept=kept,
            offsets=offsets,
            has_new_steps=has_new_steps,
        )

    def rebase(
        self,
        encoded: EncodedTensor,
        reference: ReferenceState,
        spec: TensorSpec,
        sibling_planes: Mapping[str, ReferenceState],
    ) -> EncodedTensor | None:
        """See `Rebasable.rebase`; rows that were kept lie on the points of other checkpoints, and cannot be coded by these."""
        variance_code = TrellisReference.of(reference, spec)
        if variance_code is None:
            return None
        states = read_states(encoded, spec)
        grid = Grid(
            step=variance_code.step,
            exponents=variance_code.exponents,
            seed=read_seed(encoded, spec),
            step_ratio=read_step_ratio(encoded.params, spec),
        )
        points = grid.points(variance_code.values)
        if points is None:
            return None
        _, sections = write_points(points, TrellisPrediction.of(grid, None, 0, states, spec).path, 1)
        params = {name: encoded.params[name] for name in ("step", "seed", "states", "carried")}
        params |= {"walk": NO_WALK, "variance_code": LAST_WALK}
        return EncodedTensor(self.id, params, {**sections, "exponents": write_steps(grid, spec, 1)})

    def _reference(self, context: Context, spec: TensorSpec) -> TrellisReference | None:
        reference = TrellisReference.of(context.reference, spec)
        return reference.after_restore() if reference is not None and self.after_restore else reference

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
        if read_after_restore(encoded, spec) and reference is not None:
            reference = reference.after_restore()
        integer(
            encoded.params, spec, "variance_code", NO_WALK, LAST_WALK
        )  # the next delta's reader relies on it
        states = read_states(encoded, spec)
        grid = read_grid(encoded, reference, spec, context.threads)
        rows = read_rows(encoded, reference, spec, context.threads)
        carried = read_carried(encoded.params, spec)
        prediction = TrellisPrediction.of(grid, reference, carried, states, spec, rows)
        variance_code = None if reference is None else reference.variance_code
        offsets, kept = None if reference is None else reference.offsets, _kept_rows(reference, rows, spec)
        del reference  # its values take as much memory as the tensor
        coded, points = read_points(encoded, prediction.path, spec, context.threads)
        reached = _reached(points, prediction.even, rows, matrix_shape(spec.shape)[1])
        if reached is None:
            raise FormatError(f"{spec.name}: a point is beyond {FARTHEST} half steps")
        walk = integer(encoded.params, spec, "walk", NO_WALK, LAST_WALK)
        expectation = Expectation(variance_code, walk, carried, states)
        return _planes(reached, grid, coded, offsets, carried, expectation, rows, kept, spec)

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        is_new = isinstance(planes, PackedPlanes)  # made as it is read
        read = np.asarray if is_new or context.lasting else np.array
        return _tensor(read(planes["value"], np.float32), spec)


@dataclass(frozen=True, kw_only=True)
class _Quantized:
    """A tensor on its trellis, and how it came there."""

    values: Float32s
    grid: Grid
    path: Path | None
    """None where the points will not be coded."""
    points: Int16s
    """From the even points where they are expected, of the rows that are coded."""
    reached: Int16s
    """From 0, of all rows; of any number in those that are kept."""
    walk: int
    carried: int
    expectation: Expectation
    rows: Indices | None
    """That are coded; None for all."""
    kept: KeptRows | None
    """The others."""
    offsets: Int8s | None
    """Of the reference; None in a base."""
    has_new_steps: bool
    """Whether they are others than the reference's."""

    def restored(self, spec: TensorSpec) -> Float32s:
        """What a reader will have, before it is rounded to the tensor's dtype."""
        values = self.grid.values(self.reached)
        if self.kept is not None:
            values.reshape(matrix_shape(spec.shape))[self.kept.rows] = self.kept.values
        return values


def _reached(points: Signed, even: Int16s, rows: Indices | None, columns: int) -> Int16s | None:
    """Points from 0, of all rows, from those of the coded ones; None if one is too far from 0."""
    expected = rows_of(even, rows, columns)
    reached = np.empty(points.size, np.int16)
    for start in range(0, points.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        whole = expected[part].astype(np.int32)
        whole += points[part]
        if max(int(whole.max()), -int(whole.min())) > FARTHEST:
            return None
        reached[part] = whole
    if rows is None:
        return reached
    of_all = np.zeros(even.size, np.int16)
    of_all.reshape(-1, columns)[rows] = reached.reshape(-1, columns)
    return of_all


def _has_steps_of(grid: Grid, reference: TrellisReference | None) -> bool:
    return (
        reference is not None
        and reference.step == grid.step
        and np.array_equal(reference.exponents, grid.exponents)
    )


def _kept_rows(reference: TrellisReference | None, rows: Indices | None, spec: TensorSpec) -> KeptRows | None:
    """The rows that stay as the reference has them; None where all are coded."""
    if rows is None or reference is None:
        return None
    shape = matrix_shape(spec.shape)
    kept = np.setdiff1d(np.arange(shape[0]), rows, assume_unique=True)
    return KeptRows(kept, reference.values.reshape(shape)[kept])


def _planes(
    reached: Int16s,
    grid: Grid,
    coded: CodedPoints,
    before: Int8s | None,
    carried: int,
    expectation: Expectation,
    rows: Indices | None,
    kept: KeptRows | None,
    spec: TensorSpec,
) -> TrellisPlanes:
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    columns = matrix_shape(spec.shape)[1]
    before = np.zeros(reached.size, np.int8) if before is None else before
    expected = np.empty(coded.points.size, np.int8)
    trellis_dither_kernels.remember(
        coded.errors,
        expectation.gains,
        rows_of(grid.exponents, rows, columns),
        carried,
        rows_of(before, rows, columns),
        expected,
    )
    expected[coded.far] = 0
    offsets = expected
    if rows is not None:  # a row that is kept is expected where it is
        offsets = np.zeros(reached.size, np.int8)
        offsets.reshape(-1, columns)[rows] = expected.reshape(-1, columns)
    return TrellisPlanes(grid, reached, offsets, spec.shape, kept)


def _tensor(values: Float32s, spec: TensorSpec) -> torch.Tensor:
    """The values, which nobody else holds, as a tensor of the spec's dtype and shape."""
    if spec.dtype not in CODED_DTYPES or values.size != spec.numel:
        raise FormatError(f"{spec.name}: {values.size} points cannot become {spec.dtype} {spec.shape}")
    return torch.from_numpy(values).to(spec.dtype).reshape(spec.shape)


def _checked(values: Float32s, spec: TensorSpec) -> Float32s:
    """The same, if they are within the range of the tensor's dtype."""
    if not finite(widened(torch.from_numpy(values).to(spec.dtype))):
        raise CannotRepresentError(f"{spec.name} reaches the end of {spec.dtype}'s range: stored exactly")
    return values
