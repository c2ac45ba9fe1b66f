"""The lossless scheme: every tensor bit-exact, with deltas of bit patterns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shrinkpoint.schemes.base import TensorCodec
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON

__all__ = ["Lossless"]


@dataclass(frozen=True)
class Lossless:
    """Stores every tensor bit-exactly by `shrinkpoint.schemes.exact.ExactCodec`; the fallback when no lossy configuration keeps the bound.

    Follows FastCheck (Engineering ITEE 27(2):250034) in its differences of weights to the previous checkpoint; the coder is pcodec's.
    """

    name: ClassVar[str] = "lossless"

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """None: what no codec takes is stored exactly."""
        return {}

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        return {"name": self.name}
