"""Half-precision weights that are their fp32 masters, rounded: one of the two is stored, the other derived.

Mixed-precision optimizers update a master copy in fp32 and round it to the model's weight after every step. The weight
then takes no space at all: a reader rounds the master that it has restored, as the optimizer did.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, Staged
from shrinkpoint.schemes.codec_io import check_sections
from shrinkpoint.state.training import Role, TensorSpec

__all__ = ["RoundedCodec"]

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class RoundedCodec:
    """Stores nothing; the weight is its restored master, rounded to nearest even.

    Guarantees: where the master is restored exactly, so is the weight, bit for bit.

    Args:
        master: the fp32 master as the training has it, of the weight's shape; only encoding needs it.
    """

    id: ClassVar[str] = "rounded-weight"
    needs: ClassVar[tuple[str, ...]] = (Role.MASTER.value,)

    master: torch.Tensor | None = None

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses a weight of which one bit is not that of its master, rounded."""
        if self.master is None or spec.dtype not in _HALVES or self.master.dtype is not torch.float32:
            raise CannotRepresentError(f"{spec.name} is no rounded master: stored exactly")
        if self.master.shape != tensor.shape or not _same_bits(self.master.to(spec.dtype), tensor):
            raise CannotRepresentError(f"{spec.name} is not its master, rounded: stored exactly")
        value = _rounded(spec, context)
        if value is None:
            raise CannotRepresentError(f"{spec.name}: its master is not stored before it: stored exactly")
        if not bool(torch.isfinite(value).all()):
            raise CannotRepresentError(
                f"{spec.name} is not finite where its master is rounded: stored exactly"
            )
        return Staged(value, lambda: (EncodedTensor(self.id, {}, {}), {}))

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`; the next checkpoint's weight follows from its own master."""
        check_sections(encoded, spec)
        return {}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        value = _rounded(spec, context)
        if value is None:
            raise FormatError(f"{spec.name}: the master that it is rounded from is missing")
        return value


def _rounded(spec: TensorSpec, context: Context) -> torch.Tensor | None:
    master = context.siblings.get(Role.MASTER.value)
    if master is None or master.dtype is not torch.float32 or tuple(master.shape) != spec.shape:
        return None
    return master.to(spec.dtype) if spec.dtype in _HALVES else None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.view(torch.int16), other.detach().view(torch.int16))
