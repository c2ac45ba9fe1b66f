"""The lossless codec for any dtype, and the scheme of nothing else: the bit patterns of the tensor, or their difference to the previous checkpoint.

The difference to the previous checkpoint is taken between bit patterns in the order of their values, as FastCheck takes
its weights' (Engineering ITEE 27(2):250034): close values of any sign and exponent differ by few low bits. A tensor that has got more rows, or lost some, is a difference too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Unsigned
from shrinkpoint.entropy.numbers import decode_numbers, delta_bits, encode_numbers, undelta_bits
from shrinkpoint.errors import FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, ReferenceState, Staged, TensorCodec
from shrinkpoint.schemes.codec_io import check_sections, normal, number
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

RESIZABLE = frozenset({"exact"})
"""Ids of codecs whose references serve tensors of other sizes too; what they keep is the plane ``bits``."""

_SAMPLE = 1 << 14  # elements that decide between the tensor and its difference
# Fewer elements are coded alone unless they are unchanged: trying both costs more time than it could save bytes.
_LEAST = 1 << 12
_DECAYED = 0.05  # share of numbers that are the same multiple of what they were
_LEAST_DECAY = 2.0**-20
_PER_OCTAVE = 1 << 12


@dataclass(frozen=True, kw_only=True)
class ExactCodec:
    """Stores a tensor's bytes losslessly, whatever its dtype; non-finite values included.

    Attributes:
        raw: as they are, where a save has no time for more.
    """

    id: ClassVar[str] = "exact"
    needs: ClassVar[tuple[str, ...]] = ()
    raw: bool = False

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; accepts every tensor."""
        item = _item_size(spec.dtype)
        data = tensor_to_bytes(tensor)
        bits = (data if context.lasting else data.copy()).view(f"u{item}").reshape(-1)

        def emit() -> tuple[EncodedTensor, Planes]:
            previous = fitted(context.reference, bits.size, item)
            delta, scale = self._choose(bits, previous, spec.dtype, _known(context.reference, bits.size))
            stored = delta_bits(bits, _scaled(previous, scale), _floating(spec.dtype)) if delta else bits
            params: dict[str, JSON] = {} if scale is None else {"scale": scale}
            return EncodedTensor(self.id, params, {"bits": encode_numbers(stored, raw=self.raw)}, delta), {
                "bits": bits
            }

        return Staged(_tensor(bits, spec, context), emit)

    def _choose(
        self, bits: Unsigned, previous: Unsigned | None, dtype: torch.dtype, known: int
    ) -> tuple[bool, float | None]:
        """Return whether the difference codes shorter, and to what multiple of the previous tensor, by a sample from the middle of the
        `known` elements. New elements take about as much either way."""
        if previous is None or self.raw:
            return False, None
        if bits.size < _LEAST:
            return np.array_equal(bits, previous), None
        start = max(0, (known - _SAMPLE) // 2)
        part = slice(start, min(known, start + _SAMPLE))
        here, before = bits[part], previous[part]
        ways: list[tuple[bool, float | None]] = [(False, None), (True, None)]  # of equal ones the first
        if dtype is torch.float32 and (decay := _decay(here, before)) is not None:
            ways.append((True, decay))
        sizes = [
            len(encode_numbers(delta_bits(here, _scaled(before, scale), _floating(dtype)) if delta else here))
            for delta, scale in ways
        ]
        return ways[int(np.argmin(sizes))]

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        item = _item_size(spec.dtype)
        check_sections(encoded, spec, "bits")
        bits = decode_numbers(encoded.sections["bits"], spec.nbytes // item, f"u{item}")
        if "scale" in encoded.params and not encoded.uses_reference:
            raise FormatError(f"{spec.name}: it has a 'scale', and no predecessor to be scaled")
        if encoded.uses_reference:
            previous = fitted(context.reference, bits.size, item)
            if previous is None:
                raise FormatError(f"{spec.name}: its predecessor has another dtype or shape")
            scale = None
            if "scale" in encoded.params:
                scale = float(number(encoded.params, spec, "scale"))
                if spec.dtype is not torch.float32 or not _LEAST_DECAY <= scale <= 1:
                    raise FormatError(f"{spec.name}: its predecessor cannot be scaled by {scale}")
            bits = undelta_bits(bits, _scaled(previous, scale), _floating(spec.dtype))
        return {"bits": bits}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        return _tensor(planes["bits"], spec, context)


@dataclass(frozen=True)
class Lossless:
    """Stores every tensor bit-exactly by `ExactCodec`; the fallback when no lossy configuration keeps the bound.

    Follows FastCheck (Engineering ITEE 27(2):250034) in its differences of weights to the previous checkpoint; the coder is pcodec's.

    Args:
        raw: store bytes as they are.
    """

    name: ClassVar[str] = "lossless"
    raw: bool = False

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """Return none, since what no codec takes is stored exactly; for raw bytes the codec of each tensor."""
        return dict.fromkeys(state.specs, lambda: ExactCodec(raw=True)) if self.raw else {}

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        return {"name": self.name}


def _tensor(bits: npt.NDArray[Any], spec: TensorSpec, context: Context) -> torch.Tensor:
    data = np.ascontiguousarray(bits).view(np.uint8)
    # else a copy, so that the caller may change the tensor without changing the reference of the next delta
    return tensor_from_bytes(data if context.lasting else data.copy(), spec.dtype, spec.shape)


def _decay(here: Unsigned, before: Unsigned) -> float | None:
    """Return what many fp32 numbers are of what they were before; None if no multiple stands out.

    So do moments of elements that had no gradient, and weights that only decay.
    """
    with np.errstate(all="ignore"):
        ratios = here.view(np.float32).astype(np.float64) / before.view(np.float32)
    ratios = ratios[(ratios >= _LEAST_DECAY) & (ratios < 1)]
    if ratios.size < _DECAYED * here.size:
        return None
    bins = np.rint(np.log2(ratios) * _PER_OCTAVE).astype(np.int64)
    found, counts = np.unique(bins, return_counts=True)
    if counts.max() < _DECAYED * here.size:
        return None
    return float(np.float32(np.median(ratios[bins == found[counts.argmax()]])))


def _scaled(previous: Unsigned | None, scale: float | None) -> Unsigned:
    """Return the bit patterns of fp32 numbers times `scale`, rounded once; subnormals are zero, before and after."""
    assert previous is not None
    if scale is None:
        return previous
    with np.errstate(all="ignore"):
        product = normal(normal(previous.view(np.float32)) * np.float32(scale))
    return np.where(np.isnan(product), previous, product.view(np.uint32))


def _item_size(dtype: torch.dtype) -> int:
    """Return bytes per number: a complex element is two."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def fitted(reference: ReferenceState | None, size: int, item: int) -> npt.NDArray[Any] | None:
    """Return a reference's bit patterns for a tensor of another size: the first ones, then zeros.

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
