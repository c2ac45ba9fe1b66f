"""What a rank is to write, as `torch.distributed.checkpoint` says it, in this library's own terms."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.state.dtypes import dtype_name, empty_tensor
from shrinkpoint.state.roles import named_role
from shrinkpoint.state.specs import block_of
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON, encode_tree, join_path

FlatPath = tuple[str | int, ...]
"""Where a value stands in the nested state: keys of dicts and indices of lists."""

_MODELS = ("model", "state_dict")
"""Keys of a state under which the model's own is."""
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.(?P<parameter>.+)\.(?P<key>[^.]+)$")


def path_of(fqn: str, paths: object) -> FlatPath:
    """Return the place in the nested state of a name in the flat one.

    Args:
        fqn: the name.
        paths: a plan's ``planner_data``: places by name, if its planner flattens nested states.
    """
    found = paths.get(fqn) if isinstance(paths, Mapping) else None
    return tuple(found) if isinstance(found, (tuple, list)) else (fqn,)


def name_at(path: FlatPath) -> str:
    """Return the name of the tensor at a place in the nested state."""
    return join_path(tuple(map(str, path)))


def box_place(offset: Sequence[int]) -> str:
    """Return what the name of a box has behind that of its tensor."""
    return f"@{','.join(map(str, offset))}"


def take_items(
    items: Sequence[WriteItem], planner: DefaultSavePlanner, paths: object
) -> tuple[TrainingState, dict[str, JSON]]:
    """Copy what this rank is to write.

    Args:
        items: of its plan.
        planner: resolves them.
        paths: as of `path_of`.

    Returns:
        The tensors, without a tree, which is one of all ranks; and everything else, by name in the flat state.

    Raises:
        CannotRepresentError: a value cannot be stored without pickle, or two tensors have one name.
    """
    tensors: dict[str, torch.Tensor] = {}
    specs: dict[str, TensorSpec] = {}
    plain: dict[str, JSON] = {}
    flat = not any(_is_below_model(path_of(fqn, paths)) for fqn in planner.state_dict)

    def add(spec: TensorSpec, tensor: torch.Tensor) -> None:
        _check_dense(spec.name, tensor)
        if spec.name in tensors:
            raise CannotRepresentError(f"two tensors of the state would be called {spec.name!r}: rename one")
        # always a copy: training changes its own tensors, and torch reuses the memory that it stages them in
        tensors[spec.name] = empty_tensor(spec.shape, spec.dtype).copy_(tensor.detach())
        specs[spec.name] = spec

    def put(place: tuple[str, ...], tensor: torch.Tensor) -> str:
        name = join_path(place)
        add(TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)), tensor)
        return name

    for item in items:
        fqn = item.index.fqn
        path = path_of(fqn, paths)
        if item.type is WriteItemType.BYTE_IO:  # of which `resolve_data` would make a pickle
            plain[fqn] = encode_tree(planner.lookup_object(item.index), put, tuple(map(str, path)))
            continue
        value = planner.resolve_data(item)
        assert isinstance(value, torch.Tensor)
        assert item.tensor_data is not None
        if hasattr(value, "wait"):  # the result of a collective that has not arrived
            value = value.wait()
        whole, offset = tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets)
        if math.prod(whole) == 0 or value.numel() == 0:
            continue  # of a tensor without elements, its shape is all; an empty shard is nothing
        tag = _tag(fqn, path, value.dtype, flat=flat)
        spec = TensorSpec(name=name_at(path), dtype=value.dtype, shape=whole, tag=tag)
        shape = tuple(value.shape)
        add(spec if shape == whole else block_of(spec, box_place(offset), offset, shape), value)
    return TrainingState(None, tensors, specs), plain


def _check_dense(name: str, tensor: Any) -> None:
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or is_traceable_wrapper_subclass(tensor):
        raise CannotRepresentError(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__} of layout {tensor.layout}: only dense"
            " tensors can be stored; convert it in your state_dict()"
        )
    try:
        dtype_name(tensor.dtype)
    except CannotRepresentError as error:
        raise CannotRepresentError(f"tensor {name!r}: {error}") from None


# ---- roles, read off the names: a storage learns nothing else


def _is_below_model(path: FlatPath) -> bool:
    return len(path) > 1 and path[0] in _MODELS


def _tag(fqn: str, path: FlatPath, dtype: torch.dtype, *, flat: bool) -> Tag:
    """Return a tensor's tag, by its name alone, so that it is the same on all ranks.

    Args:
        fqn: name in the flat state.
        path: place in the nested one.
        dtype: its own.
        flat: whether the model's tensors are at the state's top, as torchtitan has them.
    """
    moment = _OPTIMIZER_STATE.search(fqn)
    if moment is not None and not _is_below_model(path):
        role = named_role(moment["key"])
        return Tag(role=role, parameter=moment["parameter"]) if role is not None else Tag()
    if _is_below_model(path) or (flat and len(path) == 1):
        parameter = ".".join(map(str, path[1:] if len(path) > 1 else path))
        return Tag(role=Role.WEIGHT if dtype.is_floating_point else Role.BUFFER, parameter=parameter)
    return Tag()
