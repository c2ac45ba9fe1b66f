"""Weights on a dithered lattice whose steps follow the curvature.

A weight stands for the nearest point of ``(k - d) s``: k the integer that is coded, d a dither of its own, s a step. The
lattice stays through a chain, so that a delta codes how far each weight has moved in whole steps, mostly not at all; the
reconstruction's error is bounded by half a step at every checkpoint and never adds up. After a restore the weights lie
exactly on the lattice, and small updates would be rounded away: the next checkpoint takes another dither (`seed`).

Steps follow the curvature (`shrinkpoint.schemes.auto.lattice_steps`). They are powers of ``2 ** (1/4)`` times the tensor's own, so
that every machine computes the same ones.

A weight's place in its cell predicts better than anything else whether it will leave the cell. One that has
just crossed a border is still near it, and may return; where the lattice was exchanged, the old point's place in the new
cell is known. Both are kept as the weight's history, and are the coder's context, in addition to the value itself: small weights
move otherwise than large ones. The first moment is no context: of moves over fifty steps it explains a hundredth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shrinkpoint.arrays import Float32s, Int8s, Int16s, widened
from shrinkpoint.entropy.contexts.coder import Effort, decode_plane, encode_plane
from shrinkpoint.entropy.static.bytes import decode_bytes, encode_bytes
from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError
from shrinkpoint.quantize.dither import SEEDS
from shrinkpoint.schemes.auto.lattice_points import (
    FARTHEST,
    Lattice,
    LatticePrediction,
    LatticeReference,
    join_exponents,
    split_exponents,
)
from shrinkpoint.schemes.auto.lattice_steps import Steps, read_step, read_steps, write_exponents
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Planes, ReferenceState, Staged
from shrinkpoint.schemes.codec_io import CODED_DTYPES, as_float32, finite, integer, matrix_shape, section
from shrinkpoint.schemes.recipe import check_choice
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

__all__ = ["LatticeCodec"]


_RADIUS = 126  # moves farther than this are stored apart


@dataclass(frozen=True, kw_only=True)
class LatticeCodec:
    """Codes the index of each weight's lattice point, given where the same weight was one checkpoint before.

    Guarantees: the error of a weight is at most half its step, and a rounding to the tensor's dtype.

    Raises:
        ConfigError: an option is out of its range.
    """

    id: ClassVar[str] = "lattice-weight"
    needs: ClassVar[tuple[str, ...]] = ()

    step: float = 1e-3
    """Distance of two lattice points where the curvature is the tensor's mean one."""
    exponents: tuple[Int8s, Int8s] | None = None
    """What `lattice_steps.curvature_exponents` gives; None for equal steps."""
    seed: int | None = None
    """Seed of the dither; None goes on with the previous checkpoint's, or starts with 0."""
    slack: float = 0.2
    """The previous checkpoint's steps are kept while the loss is at most this share larger than with the wanted ones."""
    effort: Effort = "default"
    """How much time the coder of the moves spends."""

    def __post_init__(self) -> None:
        if not 1e-27 < float(np.float32(self.step)) < 1e30:
            raise ConfigError(f"step={self.step} must be a positive number of ordinary size")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < SEEDS):
            raise ConfigError(f"seed={self.seed!r} must be an integer from 0 to {SEEDS - 1}, or None")
        if not 0 <= self.slack <= 100:
            raise ConfigError(f"slack={self.slack} must be between 0 and 100")
        check_choice(self, "effort", Effort)

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """See `TensorCodec.encode`; refuses NaN, infinity, other dtypes than floats, and steps too small by far."""
        return self.stage(tensor, spec, context).coded(context.threads)

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `Stages.stage`; refuses what `encode` refuses."""
        values = as_float32(tensor, spec, CODED_DTYPES)
        reference = LatticeReference.of(context.reference, spec)
        lattice = self._lattice(reference, spec)
        index = lattice.nearest(values, spec)
        value = _value(lattice, index, spec)

        def coded(threads: int) -> Coded:
            prediction = lattice.prediction(reference)
            sections, radius = self._code(index, prediction, spec, threads)
            if reference is None or not lattice.has_steps_of(reference):
                rows, columns = split_exponents(lattice.exponents, matrix_shape(spec.shape))
                sections["exponents"] = write_exponents(rows, columns, threads)
            encoded = EncodedTensor(self.id, _params(lattice, radius), sections, reference is not None)
            return Coded(encoded, _planes(lattice, index, prediction), value)

        return Staged(value, coded)

    def restored(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> torch.Tensor:
        """See `Quantizer.restored`."""
        values = as_float32(tensor, spec, CODED_DTYPES)
        lattice = self._lattice(LatticeReference.of(context.reference, spec), spec)
        return _value(lattice, lattice.nearest(values, spec), spec)

    def rebase(
        self,
        encoded: EncodedTensor,
        reference: ReferenceState,
        spec: TensorSpec,
        sibling_planes: Mapping[str, ReferenceState],
    ) -> EncodedTensor | None:
        """See `Rebasable.rebase`."""
        lattice = LatticeReference.of(reference, spec)
        if lattice is None:
            return None
        sections, radius = self._code(lattice.index, lattice.prediction(None), spec, 1)
        shared = split_exponents(lattice.exponents, matrix_shape(spec.shape))
        return EncodedTensor(
            self.id, _params(lattice, radius), {**sections, "exponents": write_exponents(*shared, 1)}
        )

    def _lattice(self, reference: LatticeReference | None, spec: TensorSpec) -> Lattice:
        """The lattice to be used."""
        wanted = self._wanted(spec)
        if reference is None or self.seed is not None:  # under another dither, other steps cost nothing more
            return _lattice(wanted, self.seed or 0)
        rows, columns = split_exponents(reference.exponents, matrix_shape(spec.shape))
        kept = Steps(step=reference.step, rows=rows, columns=columns)
        followed = kept.followed(wanted, self.slack)
        if followed is kept:
            return Lattice(step=reference.step, exponents=reference.exponents, seed=reference.seed)
        return _lattice(followed, reference.seed)

    def _wanted(self, spec: TensorSpec) -> Steps:
        height, width = matrix_shape(spec.shape)
        rows, columns = self.exponents or (np.zeros(height, np.int8), np.zeros(width, np.int8))
        return Steps(step=np.float32(self.step), rows=rows, columns=columns)

    def _code(
        self, index: Int16s, prediction: LatticePrediction, spec: TensorSpec, threads: int
    ) -> tuple[dict[str, bytes], int]:
        from shrinkpoint.quantize import dither_kernels  # numba

        largest = int(dither_kernels.largest_move(index, prediction.predicted))
        radius = min(_RADIUS, largest)
        symbols, far = np.empty(index.size, np.uint8), np.zeros(0, np.int32)
        count = dither_kernels.moves(index, prediction.predicted, radius, symbols, far)
        if count:
            far = np.empty(count, np.int32)
            dither_kernels.moves(index, prediction.predicted, radius, symbols, far)
        payload = encode_plane(
            symbols,
            2 * radius + 2,
            columns=matrix_shape(spec.shape)[1],
            sides=prediction.sides,
            effort=self.effort,
            threads=threads,
        )
        apart = encode_bytes(far.astype("<i4").view(np.uint8), 4, threads=threads)
        return {"levels": payload, "far": apart}, radius

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        if spec.dtype not in CODED_DTYPES or spec.numel == 0:
            raise FormatError(f"{spec.name}: codec {self.id!r} cannot hold {spec.dtype} {spec.shape}")
        reference = LatticeReference.of(context.reference, spec) if encoded.uses_reference else None
        if encoded.uses_reference and reference is None:
            raise FormatError(f"{spec.name}: its reference planes are missing")
        lattice = _read_lattice(encoded, reference, spec, context.threads)
        prediction = lattice.prediction(reference)
        return _planes(lattice, _read_index(encoded, prediction, spec, context.threads), prediction)

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        seed = integer(encoded.params, spec, "seed", 0, SEEDS - 1)
        exponents = np.asarray(planes["exponent"], np.uint8)
        lattice = Lattice(step=read_step(encoded, spec), exponents=exponents, seed=seed)
        return _tensor(lattice.points(np.asarray(planes["index"], np.int16)), spec)


def _value(lattice: Lattice, index: Int16s, spec: TensorSpec) -> torch.Tensor:
    value = _tensor(lattice.points(index), spec)
    if not finite(widened(value)):
        raise CannotRepresentError(f"{spec.name} reaches the end of {spec.dtype}'s range: stored exactly")
    return value


def _tensor(points: Float32s, spec: TensorSpec) -> torch.Tensor:
    """The points, which nobody else holds, as a tensor of the spec's dtype and shape."""
    if spec.dtype not in CODED_DTYPES or points.size != spec.numel:
        raise FormatError(
            f"{spec.name}: {points.size} lattice points cannot become {spec.dtype} {spec.shape}"
        )
    return torch.from_numpy(points).to(spec.dtype).reshape(spec.shape)


def _params(lattice: Lattice, radius: int) -> dict[str, JSON]:
    return {"step": float(lattice.step), "seed": lattice.seed, "radius": radius}


def _planes(lattice: Lattice, index: Int16s, prediction: LatticePrediction) -> Planes:
    return {"index": index, "exponent": lattice.exponents, "history": prediction.history(index)}


def _lattice(steps: Steps, seed: int) -> Lattice:
    return Lattice(step=steps.step, exponents=join_exponents(steps.rows, steps.columns), seed=seed)


def _read_lattice(
    encoded: EncodedTensor, reference: LatticeReference | None, spec: TensorSpec, threads: int
) -> Lattice:
    known = None if reference is None else (reference.step, reference.exponents)
    step, exponents = read_steps(encoded, known, spec, threads, "levels")
    return Lattice(step=step, exponents=exponents, seed=integer(encoded.params, spec, "seed", 0, SEEDS - 1))


def _read_index(
    encoded: EncodedTensor, prediction: LatticePrediction, spec: TensorSpec, threads: int
) -> Int16s:
    from shrinkpoint.quantize import dither_kernels  # numba

    radius = integer(encoded.params, spec, "radius", 0, _RADIUS)
    symbols = decode_plane(
        section(encoded, spec, "levels"),
        spec.numel,
        2 * radius + 2,
        columns=matrix_shape(spec.shape)[1],
        sides=prediction.sides,
        threads=threads,
    )
    count = int(np.count_nonzero(symbols == 2 * radius + 1))
    stored = decode_bytes(section(encoded, spec, "far"), 4 * count, 4, threads=threads)
    far = stored.view("<i4").astype(np.int32)
    index = np.empty(spec.numel, np.int16)
    if not dither_kernels.unmove(symbols, prediction.predicted, radius, far, FARTHEST, index):
        raise FormatError(f"{spec.name}: a lattice index is beyond {FARTHEST}")
    return index
