"""Tensors and arrays that are in a scratch file: whoever uses one gets its values, in memory of their own, for that moment.

A `DiskTensor` has its dtype and shape at hand. Every operation of torch on it, and every view of it as an array, reads the file, and works on
what was read; nothing is kept. So all that reads a snapshot works on one whose moments are on the disk. What is in a file is not
written to.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map_only

from shrinkpoint.errors import ScratchError
from shrinkpoint.runtime.scratch import Place, ScratchFile
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.training import TrainingState

__all__ = ["DiskArrays", "DiskTensor", "PlanesLostError", "in_memory", "put_arrays", "put_tensor"]

_LEAST = 1 << 16
"""Bytes from which on a tensor or an array is written; smaller ones stay in memory."""

_ATTRIBUTES = "shape dtype device layout requires_grad ndim nbytes itemsize is_cpu is_cuda is_meta"
_METHODS = "numel dim size stride element_size is_complex is_contiguous is_floating_point"
_KNOWN: frozenset[Any] = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    )
)
"""What is known of a tensor without its values."""
_CHANGES: frozenset[Any] = frozenset(
    (torch.Tensor.data.__set__, torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_)  # type: ignore[attr-defined]
)
"""What would change a tensor, and leaves its version as it is."""


class PlanesLostError(ScratchError):
    """Arrays cannot be read back: what was built on them is built on nothing now."""


class DiskTensor(torch.Tensor):
    """A tensor whose values are in a file.

    Args:
        place: of its bytes, in C order.
        like: with its dtype and shape.
    """

    _place: Place

    @staticmethod
    def __new__(cls, place: Place, like: torch.Tensor) -> "DiskTensor":
        """The tensor, without values."""
        make: Callable[..., DiskTensor] = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made = make(cls, like.shape, dtype=like.dtype, device="cpu")
        made._place = place
        return made

    def read(self) -> torch.Tensor:
        """An ordinary tensor, read anew.

        Raises:
            ScratchError: it cannot be read, or is not what was written.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(mode=False):
            made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self._place.read(tensor_to_bytes(made))
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is known, and read for all else."""
        if function in _CHANGES:
            raise TypeError(f"{function} would change a tensor that is on the disk, which is not written to")
        if function in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return _on_values(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The same for what comes from within torch."""
        return _on_values(function, args, kwargs)


def _on_values(function: Any, args: Any, kwargs: Mapping[str, Any] | None) -> Any:
    values: list[torch.Tensor] = []

    def read(tensor: DiskTensor) -> torch.Tensor:
        values.append(tensor.read())
        return values[-1]

    args, kwargs = tree_map_only(DiskTensor, read, (args, dict(kwargs or {})))
    found = function(*args, **kwargs)
    if any(tensor._version for tensor in values):
        raise TypeError(f"{function} would change a tensor that is on the disk, which is not written to")
    return found


class DiskArrays(Mapping[str, npt.NDArray[Any]]):
    """Arrays by name, each of which is read anew whenever it is asked for, unless it is small.

    Args:
        arrays: where each is, with its dtype and shape; or itself.
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any] | tuple[Place, np.dtype[Any], tuple[int, ...]]],
    ) -> None:
        self._arrays = dict(arrays)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        found = self._arrays[name]
        if isinstance(found, np.ndarray):
            return found
        place, dtype, shape = found
        made = np.empty(shape, dtype)
        try:
            place.read(made.reshape(-1).view(np.uint8))
        except ScratchError as error:
            raise PlanesLostError(str(error)) from error
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def sizes(self) -> set[int]:
        """Numbers of elements of the arrays."""
        return {
            found.size if isinstance(found, np.ndarray) else int(np.prod(found[2]))
            for found in self._arrays.values()
        }

    @property
    def nbytes(self) -> int:
        """Bytes that they take in memory."""
        return sum(found.nbytes for found in self._arrays.values() if isinstance(found, np.ndarray))


def put_tensor(file: ScratchFile, tensor: torch.Tensor) -> torch.Tensor:
    """Write a tensor.

    Args:
        file: to this one.
        tensor: on the host.

    Returns:
        What stands for it; itself where it is small, on the disk already, or cannot be written.
    """
    if isinstance(tensor, DiskTensor) or tensor.nbytes < _LEAST:
        return tensor
    place = file.put(tensor_to_bytes(tensor))
    return tensor if place is None else DiskTensor(place, tensor)


def put_arrays(file: ScratchFile, arrays: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
    """Write arrays.

    Args:
        file: to this one.
        arrays: by name.

    Returns:
        What stands for them, in the same order: those that are small, or cannot be written, themselves.
    """
    if isinstance(arrays, DiskArrays) or all(array.nbytes < _LEAST for array in arrays.values()):
        return arrays
    found: dict[str, npt.NDArray[Any] | tuple[Place, np.dtype[Any], tuple[int, ...]]] = {}
    for name, array in arrays.items():
        place = None
        if array.nbytes >= _LEAST:
            place = file.put(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        found[name] = array if place is None else (place, array.dtype, array.shape)
    return DiskArrays(found)


def in_memory(state: TrainingState) -> TrainingState:
    """The same state with all of its tensors in memory.

    Raises:
        ScratchError: one cannot be read.
    """
    if not any(isinstance(tensor, DiskTensor) for tensor in state.tensors.values()):
        return state
    tensors = {
        name: tensor.read() if isinstance(tensor, DiskTensor) else tensor
        for name, tensor in state.tensors.items()
    }
    return TrainingState(state.tree, tensors, state.specs)
