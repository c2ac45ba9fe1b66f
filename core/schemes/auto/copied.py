"""Averages that are still their weights: ASGD's before it begins to average, Lookahead's slow weights right after they were met.

Such a copy takes no space at all: a reader has the weight that it has restored.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, Staged
from shrinkpoint.schemes.codec_io import check_sections
from shrinkpoint.state.training import Role, TensorSpec

__all__ = ["CopiedCodec"]


@dataclass(frozen=True, kw_only=True)
class CopiedCodec:
    """Stores nothing; the tensor is its weight as restored.

    Guarantees: where the weight is restored exactly, so is its copy.

    Args:
        weight: as the training has it, of the copy's dtype and shape; only encoding needs it.
    """

    id: ClassVar[str] = "copied-average"
    needs: ClassVar[tuple[str, ...]] = (Role.WEIGHT.value,)

    weight: torch.Tensor | None = None

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses what differs from the weight."""
        weight = self.weight
        if weight is None or weight.dtype != tensor.dtype or not torch.equal(weight, tensor):
            raise CannotRepresentError(f"{spec.name} is no copy of its weight: stored exactly")
        value = _copied(spec, context)
        if value is None:
            raise CannotRepresentError(f"{spec.name}: its weight is not stored before it: stored exactly")
        return Staged(value, lambda: (EncodedTensor(self.id, {}, {}), {}))

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`; the next checkpoint's copy follows from its own weight."""
        check_sections(encoded, spec)
        return {}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        value = _copied(spec, context)
        if value is None:
            raise FormatError(f"{spec.name}: the weight that it is a copy of is missing")
        return value


def _copied(spec: TensorSpec, context: Context) -> torch.Tensor | None:
    weight = context.siblings.get(Role.WEIGHT.value)
    if weight is None or weight.dtype != spec.dtype or tuple(weight.shape) != spec.shape:
        return None
    return weight.clone()
