"""Swaps other values into the shards of a live model for the time of an evaluation, then puts its own back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.sharded.targets import reshard

__all__ = ["swapped_shards"]


@contextmanager
def swapped_shards(module: nn.Module, weights: Mapping[str, torch.Tensor], *around: object) -> Iterator[None]:
    """As `swapped_weights`, for a model of which this rank has shards; no collective itself, but its block mostly is.

    Args:
        module: the live model.
        weights: DTensors with the layout of the model's own, and plain tensors, by name.
        around: as of `swapped_weights`.
    """
    reshard(module)  # after a forward pass without a backward one the model would not see other shards
    with swapped_weights(module, weights, *around):
        try:
            yield
        finally:
            reshard(module)  # nor, after this one, its own
