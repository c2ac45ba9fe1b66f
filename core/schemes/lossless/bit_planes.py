"""The codec of ``scheme="lossless"``: predictive lossless coding of floating-point tensors.

Each prediction residual is split into a class, which is entropy-coded, and a raw suffix (see
entropy/static/residuals.py); the prediction is chosen for each tensor by a sample (see `bit_prediction`): the previous
checkpoint, a sibling such as the second moment, offsets of rows and columns. Tensors whose bytes repeat are stored as
byte planes, as `ExactCodec` does.

Follows FastCheck (Engineering ITEE 27(2):250034) in its two parts, differences of weights to the previous checkpoint and
indexes for the few prefixes that moments have, and differs in the predictions and in the coding of indexes: see there.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from shrinkpoint.arrays import UInt8s, Unsigned
from shrinkpoint.entropy.static.bytes import decode_bytes, delta_bits, encode_bytes, undelta_bits
from shrinkpoint.entropy.static.residuals import Layout, decode_residuals, encode_residuals
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Planes, ReferenceState
from shrinkpoint.schemes.codec_io import check_sections, integer, section
from shrinkpoint.schemes.exact import fitted
from shrinkpoint.schemes.lossless.bit_prediction import (
    SCALES,
    Format,
    Prediction,
    Problem,
    choose,
    contexts_of,
    format_of,
    sources_of,
)
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import Role, TensorSpec
from shrinkpoint.state.tree import JSON

__all__ = ["BitPlanesCodec"]

_PROBE = 1 << 14  # numbers that decide whether bytes repeat
_REPETITIVE = 0.85  # of the probe's size by a fast zstd, at most, for byte planes to get a try
_SIBLING = Role.EXP_AVG_SQ.value
_LAYOUT = ("cut", "previous", "sibling")
_FLAGS = ("magnitude", "aligned", "factored")


@dataclass(frozen=True, kw_only=True)
class BitPlanesCodec:
    """Stores a floating-point tensor bit-exactly: NaN payloads, signs of zero, infinities and subnormals included.

    Args:
        level: zstd's compression level where bytes repeat.
    """

    id: ClassVar[str] = "bit-planes"
    needs: ClassVar[tuple[str, ...]] = ()

    level: int = 3

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """See `TensorCodec.encode`; refuses only empty tensors and those that are not floating-point."""
        form = format_of(spec.dtype)
        if form is None or spec.numel == 0:
            raise CannotRepresentError(
                f"{spec.name}: {spec.dtype} of {spec.numel} elements is stored exactly"
            )
        data = tensor_to_bytes(tensor)
        bits = (data if context.lasting else data.copy()).view(f"<u{form.width // 8}")
        problem = _problem(bits, form, spec, context)
        encoded = self._encode(problem, context.threads)
        planes = {"bits": bits}
        return Coded(encoded, planes, self.reconstruct(encoded, planes, spec, context))

    def restored(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> torch.Tensor:
        """See `Quantizer.restored`: the tensor itself."""
        return tensor

    def rebase(
        self,
        encoded: EncodedTensor,
        reference: ReferenceState,
        spec: TensorSpec,
        sibling_planes: Mapping[str, ReferenceState],
    ) -> EncodedTensor | None:
        """See `Rebasable.rebase`."""
        form = _format(spec)
        problem = _problem(reference.planes["bits"], form, spec, Context(sibling_planes=sibling_planes))
        return self._encode(problem, 1)

    def _encode(self, problem: Problem, threads: int) -> EncodedTensor:
        prediction, rows, columns, bits_each = choose(problem)
        if _repeats(problem):
            sizes = {delta: self._bytes_each(problem, delta) for delta in _deltas(problem)}
            delta = min(sizes, key=sizes.__getitem__)
            if sizes[delta] < bits_each:
                return self._as_bytes(problem, delta, threads)
        sources = sources_of(problem, prediction, rows, columns)
        contexts = _contexts(problem, prediction)
        sections = encode_residuals(problem.bits, prediction.layout, sources, contexts, threads)
        if columns is not None:
            offsets = np.concatenate((rows, columns)).astype("<i2").view(np.uint8)
            sections["offsets"] = encode_bytes(offsets, 2, self.level)
        needs = prediction.layout.previous > 0 or prediction.context == "previous"
        return EncodedTensor(self.id, _params(prediction), sections, needs)

    def _bytes_each(self, problem: Problem, delta: bool) -> float:
        """Bits per number as byte planes, estimated on a part from the middle."""
        part = _middle(problem.bits.size)
        stored = _difference(problem, part) if delta else problem.bits[part]
        size = len(encode_bytes(stored.view(np.uint8), stored.itemsize, 1))
        return 8 * size / stored.size

    def _as_bytes(self, problem: Problem, delta: bool, threads: int) -> EncodedTensor:
        stored = _difference(problem, slice(None)) if delta else problem.bits
        payload = encode_bytes(stored.view(np.uint8), stored.itemsize, self.level, threads)
        return EncodedTensor(self.id, {}, {"bytes": payload}, delta)

    def reads(self, params: Mapping[str, JSON]) -> Collection[str]:
        """See `ReadsSiblingPlanes.reads`."""
        return (_SIBLING,) if params.get("sibling") or params.get("context") == "sibling" else ()

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        form = _format(spec)
        count = _numbers(spec)
        previous = _before(context.reference, count, form) if encoded.uses_reference else None
        if encoded.uses_reference and previous is None:
            raise FormatError(f"{spec.name}: its predecessor has another dtype or shape")
        if "bytes" in encoded.sections:
            check_sections(encoded, spec, "bytes")
            data = decode_bytes(encoded.sections["bytes"], spec.nbytes, form.width // 8, context.threads)
            bits = data.view(f"<u{form.width // 8}")
            return {"bits": bits if previous is None else undelta_bits(bits, previous)}
        return {"bits": _decode_classes(encoded, spec, previous, context)}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        data = np.ascontiguousarray(planes["bits"]).view(np.uint8)
        # else a copy, so that the caller may change the tensor without changing the reference of the next delta
        return tensor_from_bytes(data if context.lasting else data.copy(), spec.dtype, spec.shape)


def _format(spec: TensorSpec) -> Format:
    form = format_of(spec.dtype)
    if form is None or spec.numel == 0:
        raise FormatError(f"{spec.name}: {spec.dtype} {spec.shape} is no tensor of this codec")
    return form


def _numbers(spec: TensorSpec) -> int:
    return spec.numel * (2 if spec.dtype.is_complex else 1)


def _before(reference: ReferenceState | None, count: int, form: Format) -> Unsigned | None:
    found = fitted(reference, count, form.width // 8)
    return None if found is None else np.ascontiguousarray(found)


def _plane(reference: ReferenceState | None, count: int, form: Format) -> Unsigned | None:
    plane = reference.planes.get("bits") if reference is not None else None
    if plane is None or plane.size != count or plane.dtype != np.dtype(f"<u{form.width // 8}"):
        return None
    found: npt.NDArray[Any] = np.ascontiguousarray(plane).reshape(-1)
    return found


def _rows(spec: TensorSpec) -> int:
    return spec.shape[0] if len(spec.shape) > 1 else 1


def _problem(bits: npt.NDArray[Any], form: Format, spec: TensorSpec, context: Context) -> Problem:
    return Problem(
        format=form,
        bits=bits,
        rows=_rows(spec),
        previous=_before(context.reference, bits.size, form),
        sibling=_plane(context.sibling_planes.get(_SIBLING), bits.size, form),
    )


def _contexts(problem: Problem, prediction: Prediction) -> UInt8s | None:
    source = getattr(problem, prediction.context) if prediction.context else None
    return None if source is None else contexts_of(source, problem.format)


def _middle(count: int) -> slice:
    start = max(0, (count - _PROBE) // 2)
    return slice(start, start + _PROBE)


def _repeats(problem: Problem) -> bool:
    """Whether a fast zstd compresses a sample; it does not compress numbers that vary."""
    probe = problem.bits[_middle(problem.bits.size)].tobytes()
    return len(zstandard.ZstdCompressor(level=1).compress(probe)) < _REPETITIVE * len(probe)


def _deltas(problem: Problem) -> tuple[bool, ...]:
    return (False,) if problem.previous is None else (False, True)


def _difference(problem: Problem, part: slice) -> Unsigned:
    assert problem.previous is not None
    return delta_bits(problem.bits[part], problem.previous[part])


def _params(prediction: Prediction) -> dict[str, JSON]:
    """The prediction's fields that are not the default."""
    layout = prediction.layout
    params: dict[str, JSON] = {"cut": layout.cut}
    params |= {name: getattr(layout, name) for name in _LAYOUT[1:] if getattr(layout, name)}
    flags = {"magnitude": layout.magnitude, "aligned": layout.aligned, "factored": prediction.factored}
    params |= {name: True for name, value in flags.items() if value}
    if prediction.offset:
        params["offset"] = prediction.offset
    if prediction.context is not None:
        params["context"] = prediction.context
    if prediction.scale is not None:
        params["scale"] = prediction.scale
    return params


def _prediction(encoded: EncodedTensor, spec: TensorSpec, form: Format) -> Prediction:
    """Inverse of `_params`.

    Raises:
        FormatError: a param is missing, unknown or out of range.
    """
    params = encoded.params
    known = {*_LAYOUT, *_FLAGS, "offset", "context", "scale"}
    if not set(params) <= known or any(params.get(flag, True) is not True for flag in _FLAGS):
        raise FormatError(f"{spec.name}: params {dict(params)!r} are not of this codec")
    filled = {"previous": 0, "sibling": 0, "offset": 0} | dict(params)
    shares = {name: integer(filled, spec, name, 0, 64) for name in ("previous", "sibling")}
    context, scale = params.get("context"), params.get("scale")
    if context not in (None, "previous", "sibling"):
        raise FormatError(f"{spec.name}: no context {context!r}")
    if scale is not None and not (isinstance(scale, float) and SCALES[0] < scale < SCALES[1]):
        raise FormatError(f"{spec.name}: 'scale' must be between {SCALES[0]} and {SCALES[1]}, not {scale!r}")
    if scale is not None and form.width < 32:
        raise FormatError(f"{spec.name}: {spec.dtype} is not scaled")
    try:
        layout = Layout(
            width=form.width,
            cut=integer(params, spec, "cut", 0, form.width),
            magnitude="magnitude" in params,
            aligned="aligned" in params,
            **shares,
        )
    except ValueError as error:
        raise FormatError(f"{spec.name}: {error}") from None
    return Prediction(
        layout=layout,
        context=None if context is None else str(context),
        offset=integer(filled, spec, "offset", -(2**31), 2**31),
        factored="factored" in params,
        scale=None if scale is None else float(scale),
    )


def _decode_classes(
    encoded: EncodedTensor, spec: TensorSpec, previous: Unsigned | None, context: Context
) -> Unsigned:
    form = _format(spec)
    prediction = _prediction(encoded, spec, form)
    layout, count = prediction.layout, _numbers(spec)
    names = ("classes", "symbols", "suffixes", *(("offsets",) if prediction.factored else ()))
    check_sections(encoded, spec, *names)
    sibling = _plane(context.sibling_planes.get(_SIBLING), count, form)
    uses_previous = layout.previous or layout.aligned or prediction.context == "previous"
    uses_sibling = layout.sibling or prediction.context == "sibling"
    if (uses_previous and previous is None) or (uses_sibling and sibling is None):
        raise FormatError(f"{spec.name}: the tensor that it is predicted from is missing")
    rows, columns = np.array([prediction.offset], dtype=np.int64), None
    if prediction.factored:
        height = _rows(spec)
        width = count // height
        if width < 2:
            raise FormatError(f"{spec.name}: {spec.shape} has no rows and columns")
        data = decode_bytes(section(encoded, spec, "offsets"), 2 * (height + width), 2)
        offsets = data.view("<i2").astype(np.int64)
        rows, columns = offsets[:height], offsets[height:]
    problem = Problem(
        format=form, bits=np.zeros(0, f"<u{form.width // 8}"), rows=1, previous=previous, sibling=sibling
    )
    sections = {name: section(encoded, spec, name) for name in ("classes", "symbols", "suffixes")}
    sources = sources_of(problem, prediction, rows, columns)
    return decode_residuals(sections, count, layout, sources, _contexts(problem, prediction), context.threads)
