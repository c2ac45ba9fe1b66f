"""Swaps candidate weights into a live model for the time of an evaluation, then puts the model's own back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shrinkpoint.state.candidate import Candidate
from shrinkpoint.state.rng import capture_rng, restore_rng

__all__ = ["swapped_tensors", "swapped_weights"]

_CHUNK = 1 << 18
"""Elements that are exchanged at a time."""


@contextmanager
def swapped_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Run a block with other weights, in eval mode and without gradients, and then put everything back.

    Weights are exchanged in place, so that optimizers' and wrappers' references stay valid. Afterwards all parameters
    and buffers (BatchNorm's statistics too), every module's train flag and all generators are as before.

    Args:
        module: the live model.
        weights: parameters and buffers by name, on any device; those that are not named keep their values. Of a `Candidate`, the
            tensors that it lends hold the model's own parameters meanwhile, where these are on the host.
    """
    live = dict(module.named_parameters()) | dict(module.named_buffers())
    buffers = {name for name, _ in module.named_buffers()}  # evaluations may change these
    lent = {
        name: weights[name]
        for name in (weights.lent if isinstance(weights, Candidate) else ())
        if name in live and name not in buffers and _fit(live[name], weights[name])
    }
    before = {name: tensor.detach().clone() for name, tensor in live.items() if name not in lent}
    modes = {name: child.training for name, child in module.named_modules()}
    rng = capture_rng()
    exchanged: list[str] = []
    try:
        with torch.no_grad():
            for name, value in weights.items():
                if name in lent:
                    _exchange(live[name].data, value)
                    exchanged.append(name)
                else:
                    live[name].data.copy_(value)
            module.eval()
            yield
    finally:
        with torch.no_grad():
            for name in exchanged:
                _exchange(live[name].data, lent[name])
            for name, value in before.items():
                live[name].data.copy_(value)
        for name, child in module.named_modules():
            child.training = modes[name]
        restore_rng(rng)


def _fit(live: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors can exchange their contents."""
    return (
        (live.dtype, live.shape) == (value.dtype, value.shape)
        and live.layout is value.layout is torch.strided
        and live.device.type == value.device.type == "cpu"
        and live.is_contiguous()
        and value.is_contiguous()
    )


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    first, second = one.view(-1), other.view(-1)
    for start in range(0, first.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        kept = first[part].clone()
        first[part] = second[part]
        second[part] = kept


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
