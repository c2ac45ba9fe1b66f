"""Aliases of the types of arrays and of kernels' integers, and conversion of tensors to such arrays."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # torch takes seconds to import, and the command line starts without it
    import torch

Bools = npt.NDArray[np.bool_]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int8s = npt.NDArray[np.int8]
Int16s = npt.NDArray[np.int16]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]
UInt16s = npt.NDArray[np.uint16]
UInt32s = npt.NDArray[np.uint32]
Indices = npt.NDArray[np.intp]
Signed = npt.NDArray[np.signedinteger[Any]]
Unsigned = npt.NDArray[np.unsignedinteger[Any]]

Integer = int | np.signedinteger[Any]
"""Of a kernel: numba does not distinguish Python's integers from numpy's."""


def widened(tensor: "torch.Tensor") -> Float32s:
    """Return the elements of a host tensor as flat fp32 in C order; dense fp32 is not copied, only float64 is rounded."""
    import torch

    if (
        type(tensor) is torch.Tensor
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
    ):  # no operation of torch, each of which gives Python's lock away and waits for it
        plain: Float32s = tensor.numpy().reshape(-1)
        return plain
    values: Float32s = tensor.detach().float().contiguous().reshape(-1).numpy()
    return values


def overwrite(memory: "torch.Tensor", value: "torch.Tensor") -> None:
    """Give a tensor of any layout other values, in place; of one that is expanded, whose values are alike, each place
    in memory once."""
    import torch

    strides = memory.stride() if memory.layout is torch.strided else ()
    for axis, (size, stride) in enumerate(zip(memory.shape, strides, strict=False)):
        if size > 1 and not stride:
            memory, value = memory.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    memory.copy_(value)
