"""Notices that tensors were changed while another thread read them."""

from collections.abc import Iterable

import torch

__all__ = ["Unchanged"]

_SAMPLED = 32


class Unchanged:
    """What tensors were when this was made, as far as it can be compared quickly.

    Torch counts the changes of a tensor, but not those through ``data``, by which some trainings swap weights. So one element
    each of some tensors is compared too.

    Args:
        tensors: whose changes are counted.
        sampled: of some of which one element each is compared: those on the host.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], sampled: Iterable[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = self._counted()
        found = [t for t in sampled if t.is_cpu and t.layout == torch.strided and t.numel()]
        self._some = found[:: -(-len(found) // _SAMPLED) or 1]
        self._sample = self._sampled()

    def by_sample(self) -> bool:
        """Whether the sampled elements are what they were: also after a change that was undone."""
        return self._sampled() == self._sample

    def at_all(self) -> bool:
        """Whether nothing was changed, as far as is counted or sampled."""
        return self._counted() == self._versions and self.by_sample()

    def _counted(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    def _sampled(self) -> list[str]:
        # as text, in which a NaN equals itself
        return [repr(value[tuple(size // 2 for size in value.shape)].item()) for value in self._some]
