"""Finds the tensors of a model's state at every step, without walking through its modules each time."""

from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["LiveTensors"]


class LiveTensors:
    """The live tensors of a model's ``state_dict``, by name.

    ``state_dict`` takes microseconds for each module and tensor, which counts at every step. So it is asked only when a module, a
    parameter or a buffer has been replaced, or has another shape, dtype or device; and each time for a model whose ``state_dict``
    makes tensors that are no parameters or buffers.

    Args:
        model: whose tensors they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: Mapping[str, torch.Tensor] = {}
        self._owners: list[tuple[Mapping[str, object], str, object]] | None = None
        self._kinds: list[tuple[torch.Tensor, torch.Size, torch.dtype, torch.device]] = []

    def current(self) -> Mapping[str, torch.Tensor]:
        """The tensors; the same object as before as long as they are the same tensors, of the same shapes and dtypes."""
        if not self._is_unchanged():
            self._find()
        return self._found

    def _is_unchanged(self) -> bool:
        return (
            self._owners is not None
            and all(owner.get(key) is member for owner, key, member in self._owners)
            and all(
                tensor.shape == shape and tensor.dtype is dtype and tensor.device == device
                for tensor, shape, dtype, device in self._kinds
            )
        )

    def _find(self) -> None:
        state = self._model.state_dict(keep_vars=True)
        found = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        wanted = {id(tensor) for tensor in found.values()}
        owners: list[tuple[Mapping[str, object], str, object]] = []
        owned = set()
        for module in self._model.modules():
            owners += [(module._modules, key, child) for key, child in module._modules.items()]
            for members in (module._parameters, module._buffers):
                for key, tensor in members.items():
                    if id(tensor) in wanted:
                        owners.append((members, key, tensor))
                        owned.add(id(tensor))
        self._found = found
        self._owners = owners if owned == wanted else None
        self._kinds = [(tensor, tensor.shape, tensor.dtype, tensor.device) for tensor in found.values()]
