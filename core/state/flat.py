"""Tensors that are made of others: subclasses with ``__tensor_flatten__``, as quantized weights and optimizer states are.

Stored are the inner tensors, plain data, and the class's name.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["class_name", "inner_tensors", "is_flat", "loaded_class"]

_ORDINARY = torch.Tensor, torch.nn.Parameter


def is_flat(value: object) -> bool:
    """Whether a tensor is made of others, and stored so; shards have a way of their own."""
    kind = type(value)
    return kind not in _ORDINARY and kind.__name__ != "DTensor" and is_traceable_wrapper_subclass(value)


def inner_tensors(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a tensor is made of, by names below its own; one that is made of no others itself."""
    if not is_flat(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from inner_tensors(f"{name}.{part}", getattr(tensor, part))


def class_name(kind: type) -> str:
    """Of a class, with its module."""
    return f"{kind.__module__}:{kind.__qualname__}"


def loaded_class(base: type, name: str) -> Any:
    """The newest subclass with a `class_name`; None where this process has none: nothing is imported because a file names it."""
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
