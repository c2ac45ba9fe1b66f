"""The scheme that changes nothing: every tensor exactly, deltas in the space of bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from shrinkpoint.schemes.base import TensorCodec
from shrinkpoint.state import TrainingState
from shrinkpoint.tree import JSON

__all__ = ["Lossless"]


@dataclass(frozen=True)
class Lossless:
    """Stores every tensor bit-exactly; the fall-back when no lossy configuration keeps the bound."""

    name: ClassVar[str] = "lossless"

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """None: what no codec claims is stored exactly."""
        return {}

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        return {"name": self.name}
