"""Swaps candidate weights into a live model for the time of an evaluation, then puts the model's own back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from shrinkpoint.arrays import overwrite
from shrinkpoint.quality.preserve import is_plain_tensor, own_part, preserved_state
from shrinkpoint.state.averages import Candidate
from shrinkpoint.state.dtypes import PACKED, inner_tensors, is_flat
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.wrappers import named_buffers, named_parameters

__all__ = ["swapped_tensors", "swapped_weights"]

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
    tensors = chain(module.parameters(), module.buffers())
    with preserved_state(around=(module, *around), restored=list(tensors)):
        for part in module.modules():
            if "distributed_available_fn" in vars(part):
                vars(part)["distributed_available_fn"] = _not_distributed
        with _swapped(module, weights):
            yield


@contextmanager
def _swapped(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    buffers = dict(named_buffers(module))  # evaluations may change these
    named = [*named_parameters(module), *buffers.items()]
    # A weight that a library has packed for itself is frozen, and may be packed otherwise for an evaluation.
    packed = [tensor for _, tensor in named if _is_packed(tensor)]
    live = dict(
        part for name, tensor in named if not _is_packed(tensor) for part in inner_tensors(name, tensor)
    )
    lent = {
        name: weights[name]
        for name in (weights.lent if isinstance(weights, Candidate) else ())
        if name in live and name not in buffers and _fit(live[name], weights[name])
    }
    before = {name: tensor.detach().clone() for name, tensor in live.items() if name not in lent}
    memory = [(tensor, tensor.detach()) for tensor in live.values() if is_plain_tensor(tensor)]
    packed_state = [(tensor, tensor.data, _members(tensor)) for tensor in packed]
    rng = capture_rng()
    exchanges: list[_Exchange] = []
    try:
        with torch.no_grad():
            for name, value in weights.items():
                if name in lent:
                    exchanges.append(_Exchange(live[name].data, value))
                    exchanges[-1].forth()
                elif name in live:
                    overwrite(live[name].data, value)
            module.eval()
            yield
    finally:
        with torch.no_grad():
            for tensor, alias in memory:
                if _layout(tensor) != _layout(alias):
                    tensor.data = alias
            for tensor, data, members in packed_state:
                if _layout(tensor) != _layout(data):
                    tensor.data = data
                for owner, values in members:
                    vars(owner).clear()
                    vars(owner).update(values)
            for exchange in reversed(exchanges):
                exchange.back()
            for name, value in before.items():
                overwrite(live[name].data, value)
        restore_rng(rng)


def _is_packed(tensor: torch.Tensor) -> bool:
    """Whether nothing is to be swapped into a tensor: a frozen one of a library's class, or one of a dtype that torch does not copy."""
    frozen = own_part(tensor) is None and not is_flat(tensor) and not tensor.requires_grad
    return frozen or tensor.dtype in PACKED


def _members(tensor: torch.Tensor) -> list[tuple[object, dict[str, object]]]:
    """What a tensor of a library's class keeps in attributes, and in those of these objects."""
    owners = [tensor, *vars(tensor).values()] if type(tensor) not in (torch.Tensor, nn.Parameter) else []
    others = (torch.Tensor, nn.Module, type)
    return [
        (owner, dict(vars(owner)))
        for owner in owners
        if owner is tensor or (hasattr(owner, "__dict__") and not isinstance(owner, others))
    ]


def _not_distributed() -> bool:
    return False


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()


def _fit(live: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors can exchange their contents."""
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
            overwrite(tensor.data, values[name])
        yield
    finally:
        for name, tensor in wanted.items():
            overwrite(tensor.data, before[name])
