"""Scalar quantizers of Adam's moments; a nonzero second moment is never restored as zero.

The second moment is the denominator of Adam's update: restored as zero it does not change the loss at the restore, but
raises it 10 to 40 steps later. It is therefore quantized in the log domain, as Adafactor's rank-one factorization (row
mean x column mean / mean; arXiv 1804.04235, section 3) times a level; only exact zeros are restored as zero. The first
moment is coded in units of the restored root of the second, in which it is of order one whatever the gradient's scale.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Float32s, UInt8s
from shrinkpoint.entropy.static.rans import decode_symbols, encode_given, encode_symbols
from shrinkpoint.entropy.static.tables import count_symbols
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, ReferenceState, Staged
from shrinkpoint.schemes.codec_io import (
    as_float32,
    floats,
    matrix_shape,
    normal,
    number,
    plane_of,
    second_root,
    section,
)
from shrinkpoint.state.training import Role, TensorSpec

Array = npt.NDArray[Any]

_TINY = np.float32(np.finfo(np.float32).tiny)  # the least a nonzero second moment may be restored as
_V_CLIP_STEPS = 60  # levels on each side of the factor
_M_CLIP_STEPS = 31  # levels on each side of zero; Adam bounds |m| / sqrt(v) by about 7.3 for (0.9, 0.999)
_M_STEP = np.float32(0.5)  # of two levels, in roots of the second moment
_M_BEYOND = np.float32(15.5)  # |m| / sqrt(v) that moments of one gradient hardly exceed
_M_STRANGERS = 1e-3  # share of such elements above which the two are not moments of one gradient


class _LevelsCodec:
    """A codec of one plane of levels, each coded given the previous checkpoint's at its place, where that is shorter."""

    id: ClassVar[str]
    alphabet: ClassVar[int]

    def _encoded(self, plane: UInt8s, spec: TensorSpec, context: Context) -> tuple[bytes, bool]:
        """Return the levels' section, and whether a reader needs those of before."""
        return encode_given(plane, _previous(spec, context), self.alphabet)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        previous = _previous(spec, context) if encoded.uses_reference else None
        if encoded.uses_reference and previous is None:
            raise FormatError(f"{spec.name}: its reference plane 'levels' is missing")
        contexts = self.alphabet if previous is not None else 1
        payload = section(encoded, spec, "levels")
        return {"levels": decode_symbols(payload, previous, spec.numel, self.alphabet, contexts)}

    def rebase(
        self, encoded: EncodedTensor, reference: ReferenceState, spec: TensorSpec
    ) -> EncodedTensor | None:
        """See `Rebasable.rebase`."""
        plane = np.ascontiguousarray(reference.planes["levels"], dtype=np.uint8)
        sections = {**encoded.sections, "levels": encode_symbols(plane, None, self.alphabet, 1)}
        return replace(encoded, sections=sections, uses_reference=False)


def _previous(spec: TensorSpec, context: Context) -> UInt8s | None:
    plane = plane_of(context.reference, "levels", spec)
    return np.asarray(plane, np.uint8) if plane is not None else None


@dataclass(frozen=True, kw_only=True)
class SecondMomentCodec(_LevelsCodec):
    """Uniform quantizer of ``log2(v / f)``, with Adafactor's factorization f = row mean x column mean / mean.

    Guarantees: a restored v is zero if and only if v was; where the level is not clipped (60 steps from the factor),
    it is within a factor of ``2 ** (1 / 2)`` of v, but never below the least normal fp32. The decoder multiplies
    fp32 numbers that are stored, so that every machine restores the same bits.
    """

    id: ClassVar[str] = "log-second-moment"
    alphabet: ClassVar[int] = 2 * _V_CLIP_STEPS + 2
    needs: ClassVar[tuple[str, ...]] = ()

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; second moments that are negative, not fp32 or not finite are refused."""
        values = as_float32(tensor, spec, (torch.float32,))
        if values.min() < 0:
            raise CannotRepresentError(f"{spec.name} has negative second moments: stored exactly")
        rows, columns = self._factors(values.reshape(matrix_shape(spec.shape)))
        factor = self._factor(rows, columns)
        with np.errstate(divide="ignore"):
            level = np.rint(np.log2(values / factor))
        plane = np.where(
            values > 0, np.clip(level, -_V_CLIP_STEPS, _V_CLIP_STEPS) + (_V_CLIP_STEPS + 1), 0
        ).astype(np.uint8)
        lowest, highest = _level_range(plane)
        codebook = np.exp2(np.arange(lowest, highest + 1) - (_V_CLIP_STEPS + 1.0)).astype("<f4")
        compact = np.where(plane > 0, plane - (lowest - 1), 0).astype(np.uint8)
        payload, uses_reference = self._encoded(plane, spec, context)
        sections = {
            "rows": rows.astype("<f4").tobytes(),
            "columns": columns.astype("<f4").tobytes(),
            "codebook": codebook.tobytes(),
            "levels": payload,
        }
        params = {"lowest": lowest, "count": len(codebook)}
        value = self._restore(compact, codebook.astype(np.float32), factor)
        if not np.isfinite(value).all():
            raise CannotRepresentError(f"{spec.name} reaches the end of fp32's range: stored exactly")
        encoded = EncodedTensor(self.id, params, sections, uses_reference)
        return Staged(torch.from_numpy(value).reshape(spec.shape), lambda: (encoded, {"levels": plane}))

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        height, width = matrix_shape(spec.shape)
        rows = floats(encoded, spec, "rows", height)
        columns = floats(encoded, spec, "columns", width)
        lowest, count = encoded.params.get("lowest"), encoded.params.get("count")
        highest = 2 * _V_CLIP_STEPS + 1
        if (
            type(lowest) is not int
            or type(count) is not int
            or not 1 <= lowest <= highest - count + 1 <= highest + 1
        ):
            raise FormatError(f"{spec.name}: the range of levels is malformed")
        codebook = floats(encoded, spec, "codebook", count)
        plane = np.asarray(planes["levels"], dtype=np.int64)
        compact = np.where(plane > 0, plane - (lowest - 1), 0)
        if compact.size and (compact.max() > count or compact.min() < 0):
            raise FormatError(f"{spec.name}: a level lies outside its codebook")
        value = self._restore(compact, codebook, self._factor(rows, columns))
        return torch.from_numpy(value).reshape(spec.shape)

    @staticmethod
    def _factors(matrix: Float32s) -> tuple[Float32s, Float32s]:
        wide = matrix.astype(np.float64)
        mean = wide.mean()
        if mean == 0:
            return np.zeros(matrix.shape[0], np.float32), np.zeros(matrix.shape[1], np.float32)
        # divided by the mean here, so that no product of two means can underflow
        return normal((wide.mean(axis=1) / mean).astype(np.float32)), normal(
            wide.mean(axis=0).astype(np.float32)
        )

    @staticmethod
    def _factor(rows: Float32s, columns: Float32s) -> Float32s:
        factor: Float32s = np.maximum(np.multiply.outer(rows, columns), _TINY).reshape(-1)
        return factor

    @staticmethod
    def _restore(compact: Array, codebook: Float32s, factor: Float32s) -> Float32s:
        table = np.concatenate([np.zeros(1, np.float32), codebook])
        with np.errstate(over="ignore"):  # refused when encoding; in a hostile file, digests detect it
            value: Float32s = np.maximum(factor * table[compact], _TINY)
        value[compact == 0] = 0
        return value


def _level_range(plane: UInt8s) -> tuple[int, int]:
    used = np.flatnonzero(count_symbols(plane, None, 256, 1)[0, 1:]) + 1
    return (int(used[0]), int(used[-1])) if used.size else (1, 0)


@dataclass(frozen=True, kw_only=True)
class FirstMomentCodec(_LevelsCodec):
    """Uniform quantizer of ``m / sqrt(v)``, v being the second moment as restored.

    Guarantees: the error of m is at most ``sqrt(v) / 4`` where the level is not clipped (31 steps of a half root); m is
    restored as zero where v is zero.
    """

    id: ClassVar[str] = "uniform-first-moment"
    alphabet: ClassVar[int] = 2 * _M_CLIP_STEPS + 1
    needs: ClassVar[tuple[str, ...]] = (Role.EXP_AVG_SQ.value,)

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; first moments without a second moment of their gradient are refused."""
        values = as_float32(tensor, spec, (torch.float32,))
        root = second_root(spec, context, (torch.float32,))
        if root is None:
            raise CannotRepresentError(f"{spec.name} has no second moment to scale it by: stored exactly")
        unit = _M_STEP * root
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            level = np.where(unit > 0, np.rint(values / unit), 0)
        if np.count_nonzero((np.abs(values) > _M_BEYOND * root) & (root > 0)) > _M_STRANGERS * values.size:
            raise CannotRepresentError(f"{spec.name} is too large for its second moment: stored exactly")
        plane = (np.clip(level, -_M_CLIP_STEPS, _M_CLIP_STEPS) + _M_CLIP_STEPS).astype(np.uint8)
        payload, uses_reference = self._encoded(plane, spec, context)
        encoded = EncodedTensor(self.id, {"step": float(_M_STEP)}, {"levels": payload}, uses_reference)
        return Staged(self._restore(plane, unit, spec), lambda: (encoded, {"levels": plane}))

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        root = second_root(spec, context, (torch.float32,))
        if root is None:
            raise FormatError(f"{spec.name}: the second moment that scales it is missing")
        return self._restore(planes["levels"], number(encoded.params, spec, "step") * root, spec)

    @staticmethod
    def _restore(plane: Array, unit: Float32s, spec: TensorSpec) -> torch.Tensor:
        value = (plane.astype(np.float32) - np.float32(_M_CLIP_STEPS)) * unit
        return torch.from_numpy(value).reshape(spec.shape)
