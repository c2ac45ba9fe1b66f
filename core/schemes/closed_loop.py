"""Base class of closed-loop delta codecs (DPCM): they code a weight's difference to the reader's reconstruction.

The difference is taken to the reconstruction, never to the previous weight itself, so that a quantization error is part
of the next difference, and errors do not add up along a chain (LC-Checkpoint, Algorithm 1; ExCP by its scripts).

A base stores the weight exactly. The reconstruction is kept in fp32 also where the weight has two bytes: in those,
small differences would round to nothing.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Float32s, widened
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, ReferenceState, Staged
from shrinkpoint.schemes.codec_io import (
    WEIGHT_DTYPES,
    as_float32,
    check_sections,
    emit,
    emitted,
    finite,
    normal,
    plane_of,
    section,
)
from shrinkpoint.schemes.exact import RESIZABLE
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

VALUE = "value"
"""The plane that holds the reconstruction, fp32."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """One encoded difference."""

    params: dict[str, JSON]
    sections: dict[str, bytes]
    value: Float32s
    """The new reconstruction, by the decoder's own arithmetic."""
    planes: dict[str, npt.NDArray[np.generic]]
    """Further planes, as the decoder will find them."""


def as_reference(reference: ReferenceState | None, codec: str, spec: TensorSpec) -> ReferenceState | None:
    """Return the reference of a closed-loop codec: its own planes, or the values of a tensor that was stored exactly.

    With the latter the checkpoint after an exact one is a delta instead of another base.

    Args:
        reference: of the tensor, in the previous checkpoint.
        codec: the codec's id.
        spec: the tensor.
    """
    if reference is None or reference.codec == codec:
        return reference
    bits = reference.planes.get("bits")
    if (
        reference.codec not in RESIZABLE
        or bits is None
        or spec.dtype not in WEIGHT_DTYPES
        or bits.size != spec.numel
    ):
        return None
    data = np.ascontiguousarray(bits).view(np.uint8)
    if data.size != spec.nbytes or spec.numel == 0:
        return None
    value = widened(tensor_from_bytes(data, spec.dtype, spec.shape))
    return ReferenceState(codec, {}, {VALUE: value}) if finite(value) else None


def previous_value(reference: ReferenceState | None, spec: TensorSpec) -> Float32s | None:
    """Return the reconstruction in the reference; None if the previous checkpoint has none of this size."""
    plane = plane_of(reference, VALUE, spec)
    return np.asarray(plane, np.float32) if plane is not None else None


def residual_to(target: Float32s, previous: Float32s, spec: TensorSpec) -> Float32s:
    """Return the weight's difference to the reader's reconstruction.

    Raises:
        CannotRepresentError: it is beyond fp32.
    """
    with np.errstate(over="ignore"):
        residual: Float32s = target - normal(previous)
    if not np.isfinite(residual).all():
        raise CannotRepresentError(f"{spec.name} changed by more than fp32 can represent: stored exactly")
    return residual


def add(previous: Float32s, step: Float32s) -> Float32s:
    """``previous + step``: one fp32 addition, the same bits in every process (see `planes.normal`)."""
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # refused when encoding; when decoding, digests detect it
        return normal(normal(previous) + step)


class ClosedLoopCodec(ABC):
    """Base class of closed-loop codecs; a subclass codes one difference.

    Planes: ``value``, and those of the subclass. Guarantees: a base is exact; after a delta the tensor is what
    `decode_delta` makes of the stored bytes and the previous reconstruction, rounded once to the tensor's dtype.
    """

    id: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def encode_delta(self, target: Float32s, previous: Float32s, spec: TensorSpec, context: Context) -> Delta:
        """Code a weight given the reader's reconstruction.

        Raises:
            CannotRepresentError: the tensor is then stored exactly instead.
        """

    @abstractmethod
    def decode_delta(
        self, encoded: EncodedTensor, previous: Float32s, spec: TensorSpec, context: Context
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Return all planes, the new ``value`` among them.

        Raises:
            FormatError: the sections or params are malformed.
        """

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`."""
        target = as_float32(tensor, spec)
        previous = previous_value(context.reference, spec)
        if previous is None:
            bits = tensor_to_bytes(tensor).view(f"u{spec.dtype.itemsize}")
            base = EncodedTensor(self.id, {}, {"base": encode_numbers(bits)})
            return Staged(tensor.detach().clone(), lambda: (base, {VALUE: target.copy()}))
        delta = self.encode_delta(target, previous, spec, context)
        value = emitted(delta.value.copy(), spec)  # what the next delta refers to is not given away
        encoded = EncodedTensor(self.id, delta.params, delta.sections, uses_reference=True)
        return Staged(value, lambda: (encoded, {VALUE: delta.value, **delta.planes}))

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        if spec.dtype not in WEIGHT_DTYPES or spec.numel == 0:
            raise FormatError(f"{spec.name}: codec {self.id!r} cannot hold {spec.dtype} {spec.shape}")
        if not encoded.uses_reference:
            check_sections(encoded, spec, "base")
            payload = section(encoded, spec, "base")
            bits = decode_numbers(payload, spec.numel, f"u{spec.dtype.itemsize}")
            return {VALUE: widened(tensor_from_bytes(bits.view(np.uint8), spec.dtype, spec.shape))}
        previous = previous_value(context.reference, spec)
        if previous is None:
            raise FormatError(f"{spec.name}: its predecessor contains no value of its size")
        return self.decode_delta(encoded, previous, spec, context)

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        return emit(np.asarray(planes[VALUE], np.float32), spec, own=context.lasting)
