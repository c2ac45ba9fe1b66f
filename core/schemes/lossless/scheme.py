"""The lossless scheme: every tensor bit-exact, with deltas of bit patterns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shrinkpoint.schemes.base import TensorCodec
from shrinkpoint.schemes.lossless.bit_planes import BitPlanesCodec
from shrinkpoint.schemes.lossless.bit_prediction import format_of
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON

__all__ = ["Lossless"]

_LEAST = 4096  # elements; fewer do not pay for their tables


@dataclass(frozen=True)
class Lossless:
    """Stores every tensor bit-exactly; the fallback when no lossy configuration keeps the bound.

    Floating-point tensors of at least `_LEAST` elements are coded by `BitPlanesCodec`, all others by `ExactCodec`.
    """

    name: ClassVar[str] = "lossless"

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """`BitPlanesCodec` for floating-point tensors of at least 4096 elements; none for others."""
        return {
            name: BitPlanesCodec
            for name, spec in state.specs.items()
            if format_of(spec.dtype) is not None and spec.numel >= _LEAST
        }

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        return {"name": self.name}
