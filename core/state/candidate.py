"""Weights that are to be evaluated in the model's place, and whose memory may be used meanwhile."""

from collections.abc import Iterable, Mapping

import torch

__all__ = ["Candidate"]


class Candidate(dict[str, torch.Tensor]):
    """Weights and buffers by name, some of which may hold the model's own while they are evaluated: so these need no copy.

    Args:
        weights: as an evaluation gets them.
        lent: names of those that nobody reads until the evaluation is over. One that itself changes weights, which none should,
            changes them too.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], lent: Iterable[str]) -> None:
        super().__init__(weights)
        self.lent = frozenset(lent)
        """Their names."""
