"""Swaps candidate weights into a live model for the time of an evaluation, then puts the model's own back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shrinkpoint.state.rng import capture_rng, restore_rng

__all__ = ["swapped_tensors", "swapped_weights"]


@contextmanager
def swapped_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Run a block with other weights, in eval mode and without gradients, and then put everything back.

    Weights are exchanged in place, so that optimizers' and wrappers' references stay valid. Afterwards all parameters
    and buffers (BatchNorm's statistics too), every module's train flag and all generators are as before.

    Args:
        module: the live model.
        weights: parameters and buffers by name, on any device; those that are not named keep their values.
    """
    live = dict(module.named_parameters()) | dict(module.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    modes = {name: child.training for name, child in module.named_modules()}
    rng = capture_rng()
    try:
        with torch.no_grad():
            for name, value in weights.items():
                live[name].data.copy_(value)
            module.eval()
            yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                live[name].data.copy_(value)
        for name, child in module.named_modules():
            child.training = modes[name]
        restore_rng(rng)


@contextmanager
def swapped_tensors(live: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Run a block with other values in tensors; they are exchanged in place and put back afterwards.

    Args:
        live: the tensors by name, on any device.
        values: of the same shapes, by the same names; what is not in `live` is passed over.
    """
    wanted = {name: tensor for name, tensor in live.items() if name in values}
    before = {name: tensor.detach().clone() for name, tensor in wanted.items()}
    try:
        for name, tensor in wanted.items():
            tensor.data.copy_(values[name])
        yield
    finally:
        for name, tensor in wanted.items():
            tensor.data.copy_(before[name])
