"""Swaps candidate weights into a live model for the time of an evaluation, then puts the model's own back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shrinkpoint.arrays import overwrite
from shrinkpoint.quality.preserve import own_part, preserved_state
from shrinkpoint.state.averages import Candidate
from shrinkpoint.state.dtypes import PACKED, inner_tensors, is_flat
from shrinkpoint.state.stateful import named_buffers, named_parameters

_CHUNK = 1 << 18
"""Elements that are exchanged at a time."""


@contextmanager
def swapped_weights(
    module: nn.Module, weights: Mapping[str, torch.Tensor], *around: object
) -> Iterator[None]:
    """Run a block with other weights, in eval mode and without gradients, and then put everything back.

    Weights are exchanged in place, so that optimizers' and wrappers' references stay valid. Afterwards all parameters
    and buffers (BatchNorm's statistics too), every module's train flag, all generators, and whatever else `preserved_state` reaches from
    the module are as before. That holds, too, where the block
    gives parameters other memory (``p.data = ...``, ``module.to(...)``), or a module another tensor for a buffer
    (``self.count = self.count + 1``). Metrics of torchmetrics do not wait for other processes meanwhile.

    Args:
        module: the live model.
        weights: parameters and buffers by name, on any device; those that are not named keep their values. Of a `Candidate`, the
            tensors that it lends hold the model's own parameters meanwhile, where these are on the host.
        around: what else the block may change, as of `preserved_state`.

    Raises:
        TraceError: the block has changed something that cannot be put back.
    """
    buffers = dict(named_buffers(module))
    named = [*named_parameters(module), *buffers.items()]
    live = dict(
        part for name, tensor in named if not _is_packed(tensor) for part in inner_tensors(name, tensor)
    )
    if isinstance(weights, Candidate):  # evaluations may change buffers
        weights = Candidate(weights, weights.lent - buffers.keys())
    tensors = [*module.parameters(), *module.buffers()]
    with (
        swapped_tensors(live, weights),
        preserved_state(around=(module, *around), restored=tensors),
        torch.no_grad(),
    ):
        for part in module.modules():
            if "distributed_available_fn" in vars(part):
                vars(part)["distributed_available_fn"] = lambda: False
        module.eval()
        yield


@contextmanager
def swapped_tensors(live: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Run a block with other values in tensors; they are exchanged in place and put back afterwards.

    Args:
        live: the tensors by name, on any device.
        values: of the same shapes, by the same names; what is not in `live` is passed over.
    """
    lent = values.lent if isinstance(values, Candidate) else frozenset()
    lent = frozenset(name for name in lent & live.keys() if _fit(live[name], values[name]))
    before = {name: tensor.detach().clone() for name, tensor in live.items() if name not in lent}
    exchanges: list[_Exchange] = []
    try:
        with torch.no_grad():
            for name, value in values.items():
                if name in lent:
                    exchanges.append(_Exchange(live[name].data, value))
                    exchanges[-1].forth()
                elif name in live:
                    overwrite(live[name].data, value)
        yield
    finally:
        with torch.no_grad():
            for exchange in reversed(exchanges):
                exchange.back()
            for name, value in before.items():
                overwrite(live[name].data, value)


def _is_packed(tensor: torch.Tensor) -> bool:
    """Return whether nothing is to be swapped into a tensor: a frozen one of a library's class, or of a dtype that torch
    does not copy. An evaluation may pack it otherwise, which `preserved_state` undoes.
    """
    frozen = own_part(tensor) is None and not is_flat(tensor) and not tensor.requires_grad
    return frozen or tensor.dtype in PACKED


def _fit(live: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether two tensors can exchange their contents."""
    return (
        (live.dtype, live.shape) == (value.dtype, value.shape)
        and live.layout is value.layout is torch.strided
        and live.device.type == value.device.type == "cpu"
        and live.is_contiguous()
        and value.is_contiguous()
    )


class _Exchange:
    """Exchanges the contents of two tensors, and takes that back wherever it was interrupted."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self._one, self._other = one.view(-1), other.view(-1)
        self._done = 0
        self._under_way: tuple[slice, torch.Tensor, torch.Tensor] | None = None

    def forth(self) -> None:
        for start in range(0, self._one.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            one, other = self._one[part].clone(), self._other[part].clone()
            self._under_way = part, one, other  # a signal's handler may raise after any of these lines
            self._one[part], self._other[part] = other, one
            self._done, self._under_way = part.stop, None

    def back(self) -> None:
        if self._under_way is not None:
            part, self._one[part], self._other[part] = self._under_way
            self._done = part.start
        for start in range(0, min(self._done, self._one.numel()), _CHUNK):
            part = slice(start, start + _CHUNK)
            one, other = self._one[part].clone(), self._other[part].clone()
            self._one[part], self._other[part] = other, one
