"""Tensors as the container format has them: the dtypes' names in a header, exact views as bytes, dimensions in memory, tensors made of others."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shrinkpoint.arrays import UInt8s
from shrinkpoint.errors import CannotRepresentError, FormatError

_PACKED = (
    "float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
)  # fmt: skip
_NAMES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", *_PACKED,
)  # fmt: skip

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
)
"""Every storable dtype by its name in a header; the names are part of the format. Releases of torch add some."""

TRAINED = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
"""Dtypes of numbers to which noise can be added; tensors of others are exact."""

PACKED: frozenset[torch.dtype] = frozenset(DTYPES[name] for name in _PACKED if name in DTYPES)
"""Dtypes with which torch neither calculates nor compares; some it cannot even copy."""

_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_NUMPY = {
    DTYPES[name]: np.dtype(name)
    for name in _NAMES
    if name not in ("complex32", *_PACKED) and not name.startswith(("bfloat", "float8"))
}
_ORDINARY = torch.Tensor, torch.nn.Parameter


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as whole numbers, which torch can copy, if its dtype is one of `PACKED`; else the tensor itself."""
    if tensor.dtype not in PACKED:
        return tensor
    return tensor.detach().view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the format's name of a dtype, or raise a CannotRepresentError for quantized and packed types."""
    try:
        return _NAME_OF[dtype]
    except KeyError:
        raise CannotRepresentError(
            f"dtype {dtype} has no place in the format; store it in another dtype"
        ) from None


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a name read from a header, or raise a FormatError."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        newer = ": it needs a newer torch" if name in _NAMES else ""
        raise FormatError(f"unknown dtype {name!r} in the header{newer}") from None


def tensor_to_bytes(tensor: torch.Tensor) -> UInt8s:
    """Return the elements of a host tensor in C order as little-endian bytes, shape (numel * itemsize,).

    The result shares memory with the tensor where it is contiguous already.
    """
    if _is_plain(tensor):
        # What follows takes seven operations of torch, each of which gives Python's lock away and waits for it.
        array = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return np.frombuffer(array, np.uint8) if array.size else np.empty(0, dtype=np.uint8)
    dense = as_bits(tensor).detach().resolve_conj().resolve_neg().contiguous()
    if dense.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    # Not reshape(-1): it keeps the odd strides that dimensions of size one may have, and view() refuses those.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()


def empty_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Allocate a tensor without values; by bytes, since torch refuses rare dtypes where `use_deterministic_algorithms` fills memory."""
    size = math.prod(shape) * dtype.itemsize
    return torch.empty(size, dtype=torch.uint8, device=device).view(dtype).reshape(tuple(shape))


def tensor_from_bytes(data: UInt8s, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the inverse of `tensor_to_bytes`; the tensor uses `data` without a copy if that is writable.

    Raises:
        FormatError: the number of bytes is not that of the dtype and shape.
    """
    expected = math.prod(shape) * dtype.itemsize
    if data.size != expected:
        raise FormatError(f"a tensor of {dtype} {shape} has {expected} bytes, not {data.size}")
    if expected == 0:
        return empty_tensor(shape, dtype)
    owned = data if data.flags.writeable and data.flags.c_contiguous else np.array(data, copy=True)
    if owned.ctypes.data % dtype.itemsize:  # torch refuses to view misaligned storage as a wider type
        owned = np.array(owned, copy=True)
    if dtype in _NUMPY:
        return torch.from_numpy(owned.view(_NUMPY[dtype]).reshape(shape))
    return torch.from_numpy(owned).view(dtype).reshape(shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _ORDINARY
        and tensor.dtype in _NUMPY
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


# Files have every tensor in the order of its dimensions. A fused optimizer passes over parameter, gradient and moments as they lie in
# memory, without looking at their strides: a moment that comes back in another order than its parameter's is applied to the wrong
# elements. So the order is noted, and put back as ``torch.load`` does.
def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor without holes, from the slowest to the fastest; None where that is their own
    order.

    It is None, too, of a tensor that overlaps itself or has holes, whose copy may be in any order.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= tensor.shape[dim]
    return tuple(order)


def in_memory_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the same elements with the dimensions in that `memory_order`; the tensor itself where they are already.

    Raises:
        ValueError: `order` does not name each of the tensor's dimensions once.
    """
    if sorted(order) != list(range(tensor.dim())):
        raise ValueError(f"{list(order)[:9]} is no order of {tensor.dim()} dimensions")
    back = sorted(range(len(order)), key=order.__getitem__)
    sorted_dimensions = as_bits(tensor).permute(list(order))
    if sorted_dimensions.is_contiguous():
        return tensor
    ordered = sorted_dimensions.contiguous().permute(back)
    return ordered.view(tensor.dtype) if tensor.dtype in PACKED else ordered


# ---- Tensors that are made of others: subclasses with ``__tensor_flatten__``, as quantized weights and optimizer states are.
#
# Stored are the inner tensors, plain data, and the class's name.


def is_flat(value: object) -> bool:
    """Return whether a tensor is made of others, and stored so; shards have a way of their own."""
    kind = type(value)
    return kind not in _ORDINARY and kind.__name__ != "DTensor" and is_traceable_wrapper_subclass(value)


def inner_tensors(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a tensor is made of, by names below its own; one that is made of no others itself."""
    if not is_flat(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from inner_tensors(f"{name}.{part}", getattr(tensor, part))


def class_name(kind: type) -> str:
    """Return the name of a class, with its module."""
    return f"{kind.__module__}:{kind.__qualname__}"


def loaded_class(base: type, name: str) -> Any:
    """Return the newest subclass with a `class_name`; None where this process has none: nothing is imported because a file names it."""
    waiting, seen = [base], {base}
    while waiting:
        kind = waiting.pop()
        if class_name(kind) == name:
            return kind
        below: list[type] = type.__subclasses__(kind)
        more = [found for found in below if found not in seen]
        waiting += more
        seen.update(more)
    return None
