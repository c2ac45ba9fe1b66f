"""The lossless codec for any dtype: the bit patterns of the tensor, or their difference to the previous checkpoint.

The difference to the previous checkpoint is taken between bit patterns in the order of their values, as FastCheck takes
its weights' (Engineering ITEE 27(2):250034): close values of any sign and exponent differ by few low bits. A tensor that has got more rows, or lost some, is a difference too.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.entropy.numbers import decode_numbers, delta_bits, encode_numbers, undelta_bits
from shrinkpoint.errors import FormatError
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Planes, ReferenceState
from shrinkpoint.schemes.codec_io import check_sections
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TensorSpec

__all__ = ["RESIZABLE", "ExactCodec", "fitted"]

RESIZABLE = frozenset({"exact"})
"""Ids of codecs whose references serve tensors of other sizes too; what they keep is the plane ``bits``."""

_SAMPLE = 1 << 16  # elements that decide between the tensor and its difference
# Fewer elements are coded alone unless they are unchanged: trying both costs more time than it could save bytes.
_LEAST = 1 << 12


@dataclass(frozen=True, kw_only=True)
class ExactCodec:
    """Stores a tensor's bytes losslessly, whatever its dtype; non-finite values included."""

    id: ClassVar[str] = "exact"
    needs: ClassVar[tuple[str, ...]] = ()

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """See `TensorCodec.encode`; accepts every tensor."""
        item = _item_size(spec.dtype)
        data = tensor_to_bytes(tensor)
        bits = (data if context.lasting else data.copy()).view(f"u{item}")
        previous = fitted(context.reference, bits.size, item)
        delta = previous is not None and (
            np.array_equal(bits, previous)
            if bits.size < _LEAST
            else self._pays(bits, previous, spec.dtype, _known(context.reference, bits.size))
        )
        stored = delta_bits(bits, previous, _floating(spec.dtype)) if delta and previous is not None else bits
        encoded = EncodedTensor(self.id, {}, {"bits": encode_numbers(stored, context.threads)}, delta)
        planes = {"bits": bits.reshape(-1)}
        return Coded(encoded, planes, self.reconstruct(encoded, planes, spec, context))

    def _pays(
        self, bits: npt.NDArray[Any], previous: npt.NDArray[Any], dtype: torch.dtype, known: int
    ) -> bool:
        """Whether the difference codes shorter, estimated on a sample from the middle of the `known` elements.

        New elements take about as much either way.
        """
        start = max(0, (known - _SAMPLE) // 2)
        part = slice(start, min(known, start + _SAMPLE))
        delta = delta_bits(bits[part], previous[part], _floating(dtype))
        return len(encode_numbers(delta)) < len(encode_numbers(bits[part]))

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        item = _item_size(spec.dtype)
        check_sections(encoded, spec, "bits")
        bits = decode_numbers(encoded.sections["bits"], spec.nbytes // item, f"u{item}", context.threads)
        if encoded.uses_reference:
            previous = fitted(context.reference, bits.size, item)
            if previous is None:
                raise FormatError(f"{spec.name}: its predecessor has another dtype or shape")
            bits = undelta_bits(bits, previous, _floating(spec.dtype))
        return {"bits": bits}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        data = np.ascontiguousarray(planes["bits"]).view(np.uint8)
        # else a copy, so that the caller may change the tensor without changing the reference of the next delta
        return tensor_from_bytes(data if context.lasting else data.copy(), spec.dtype, spec.shape)


def _item_size(dtype: torch.dtype) -> int:
    """Bytes per number: a complex element is two."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def fitted(reference: ReferenceState | None, size: int, item: int) -> npt.NDArray[Any] | None:
    """A reference's bit patterns for a tensor of another size: the first ones, then zeros.

    Args:
        reference: what the tensor has left in the previous checkpoint.
        size: how many numbers the tensor has.
        item: their bytes.

    Returns:
        `size` of them, flat; None where the tensor has more than twice as many as the reference, so that a damaged header
        takes no memory, or numbers of other bytes.
    """
    plane = reference.planes.get("bits") if reference is not None else None
    if plane is None or plane.dtype.itemsize != item or size > 2 * plane.size:
        return None
    flat = plane.reshape(-1)
    if flat.size < size:
        flat = np.concatenate((flat, np.zeros(size - flat.size, flat.dtype)))
    shortened: npt.NDArray[Any] = flat[:size]
    return shortened


def _known(reference: ReferenceState | None, size: int) -> int:
    return size if reference is None else min(size, reference.planes["bits"].size)
