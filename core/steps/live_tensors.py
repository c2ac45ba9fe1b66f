"""Finds the tensors of a model's state at every step, without walking through its modules each time."""

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import nn

from shrinkpoint.state.wrappers import plain_names

__all__ = ["LiveTensors"]

_DICTS = dict, OrderedDict


class LiveTensors:
    """The live tensors of a model's ``state_dict``, by name.

    ``state_dict`` takes microseconds for each module and tensor, which counts at every step. So it is asked only when a module, a
    parameter or a buffer has been added or replaced, or has another shape, dtype or device. A model whose modules have a
    ``state_dict`` of their own, or hooks of it, is asked each time: such a state may contain anything.

    Args:
        model: whose tensors they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_plain = True
        self.forget()

    @property
    def lasting(self) -> bool:
        """Whether what `current` returned last is kept, and returned again while nothing is replaced."""
        return bool(self._counts)

    def current(self) -> Mapping[str, torch.Tensor]:
        """The tensors; the same object as before as long as they are the same tensors, of the same shapes and dtypes."""
        if self.lasting:
            if self._is_unchanged():
                return self._found
            self.forget()
        with plain_names(self._model) as inner:
            state = inner.state_dict(keep_vars=True)
        found = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        self._is_plain = self._is_plain and all(map(_is_plain, self._model.modules()))
        if self._is_plain:
            self._watch(found)
        return found

    def forget(self) -> None:
        """Keep no tensor."""
        self._found: Mapping[str, torch.Tensor] = {}
        self._counts: list[tuple[Mapping[str, object], int]] = []
        self._members: list[tuple[Mapping[str, object], str, object]] = []
        self._kinds: list[tuple[torch.Tensor, torch.Size, torch.dtype, torch.device]] = []

    def _watch(self, found: Mapping[str, torch.Tensor]) -> None:
        wanted = {id(tensor) for tensor in found.values()}
        for module in self._model.modules():
            registers: tuple[Mapping[str, object], ...] = module._modules, module._parameters, module._buffers
            for members in registers:
                self._counts.append((members, len(members)))
                self._members += [
                    (members, name, member)
                    for name, member in members.items()
                    if members is module._modules or id(member) in wanted
                ]
        self._kinds = [(tensor, tensor.shape, tensor.dtype, tensor.device) for tensor in found.values()]
        self._found = found

    def _is_unchanged(self) -> bool:
        return (
            all(len(members) == count for members, count in self._counts)
            and all(members.get(name) is member for members, name, member in self._members)
            and all(
                tensor.shape == shape and tensor.dtype is dtype and tensor.device == device
                for tensor, shape, dtype, device in self._kinds
            )
        )


def _is_plain(module: nn.Module) -> bool:
    """Whether its part of the state is its parameters and buffers, and these can be watched."""
    return (
        type(module).state_dict is nn.Module.state_dict
        and type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        and type(module).get_extra_state is nn.Module.get_extra_state
        and "state_dict" not in vars(module)
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
        and all(type(members) in _DICTS for members in (module._modules, module._parameters, module._buffers))
    )
