"""Tensors that take no bytes: what a reader has restored of another one of the same parameter gives them.

Half-precision weights are their fp32 masters, which mixed-precision optimizers round after every step. Averages may still be their
weights: ASGD's before it begins to average, Lookahead's slow weights right after they were met.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, Staged
from shrinkpoint.schemes.codec_io import check_sections
from shrinkpoint.state.training import Role, TensorSpec


@dataclass(frozen=True, kw_only=True)
class _FollowingCodec:
    """Stores nothing; the tensor is what follows from its leader as restored.

    Guarantees: where the leader is restored exactly, so is the tensor, bit for bit.

    Args:
        leader: as the training has it, of the tensor's shape; only encoding needs it.
    """

    id: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]

    leader: torch.Tensor | None = None

    @staticmethod
    def _of(leader: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor | None:
        """Return a new tensor of the spec's dtype; None if the leader has another shape, or a dtype that is not rounded to that one."""
        if leader is None or tuple(leader.shape) != spec.shape:
            return None
        rounded = leader.dtype is torch.float32 and spec.dtype in (torch.float16, torch.bfloat16)
        return leader.to(spec.dtype, copy=True) if rounded or leader.dtype is spec.dtype else None

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses a tensor of which one bit is not what follows from its leader."""
        [role] = self.needs
        true = self._of(self.leader, spec)
        if true is None or not _same_bits(true, tensor):
            raise CannotRepresentError(f"{spec.name} does not follow from its {role}: stored exactly")
        value = self._of(context.siblings.get(role), spec)
        if value is None:
            raise CannotRepresentError(f"{spec.name}: its {role} is not stored before it: stored exactly")
        if not bool(torch.isfinite(value).all()):
            raise CannotRepresentError(f"{spec.name} is not finite as its {role} is restored: stored exactly")
        return Staged(value, lambda: (EncodedTensor(self.id, {}, {}), {}))

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`; the next checkpoint's tensor follows from its own leader."""
        check_sections(encoded, spec)
        return {}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        [role] = self.needs
        value = self._of(context.siblings.get(role), spec)
        if value is None:
            raise FormatError(f"{spec.name}: the {role} that it follows from is missing")
        return value


@dataclass(frozen=True, kw_only=True)
class RoundedCodec(_FollowingCodec):
    """A weight of half precision: its fp32 master, rounded to nearest even."""

    id: ClassVar[str] = "rounded-weight"
    needs: ClassVar[tuple[str, ...]] = (Role.MASTER.value,)


@dataclass(frozen=True, kw_only=True)
class CopiedCodec(_FollowingCodec):
    """An average that is its weight."""

    id: ClassVar[str] = "copied-average"
    needs: ClassVar[tuple[str, ...]] = (Role.WEIGHT.value,)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.dtype is other.dtype and torch.equal(*flat)
