"""What a rank is to write, as `torch.distributed.checkpoint` says it, in this library's own terms."""

import io
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.state.dtypes import dtype_name
from shrinkpoint.state.roles import named_role
from shrinkpoint.state.specs import Block
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON, encode_tree, join_path

__all__ = ["FlatPath", "OwnItems", "box_name", "path_of", "take_items"]

FlatPath = tuple[str | int, ...]
"""Where a value stands in the nested state: keys of dicts and indices of lists."""

_MODELS = ("model", "state_dict")
"""Keys of a state under which the model's own is."""
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.(?P<parameter>.+)\.(?P<key>[^.]+)$")


class OwnItems:
    """What one rank writes of a checkpoint.

    Attributes:
        tensors: host memory of their own, by name.
        specs: of these.
        plain: everything else, by name in the flat state.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.plain: dict[str, JSON] = {}

    @property
    def state(self) -> TrainingState:
        """The tensors, without a tree: that is one of all ranks."""
        return TrainingState(None, self.tensors, self.specs)

    def put(self, spec: TensorSpec, tensor: Any) -> None:
        """Add a tensor, copied.

        Raises:
            CannotRepresentError: it is of a kind that cannot be stored, or its name is there already.
        """
        plain = tensor.layout is torch.strided and not tensor.is_quantized
        if not plain or is_traceable_wrapper_subclass(tensor):
            raise CannotRepresentError(
                f"{spec.name} is a {type(tensor).__module__}.{type(tensor).__qualname__} of layout {tensor.layout}: only dense"
                " tensors can be stored; convert it in your state_dict()"
            )
        try:
            dtype_name(tensor.dtype)
        except CannotRepresentError as error:
            raise CannotRepresentError(f"tensor {spec.name!r}: {error}") from None
        if spec.name in self.tensors:
            raise CannotRepresentError(f"two tensors of the state would be called {spec.name!r}: rename one")
        # always a copy: training changes its own tensors, and torch reuses the memory that it stages them in
        self.tensors[spec.name] = torch.empty(spec.shape, dtype=spec.dtype).copy_(tensor.detach())
        self.specs[spec.name] = spec


def path_of(fqn: str, paths: object) -> FlatPath:
    """The place in the nested state of a name in the flat one.

    Args:
        fqn: the name.
        paths: a plan's ``planner_data``: places by name, if its planner flattens nested states.
    """
    found = paths.get(fqn) if isinstance(paths, Mapping) else None
    return tuple(found) if isinstance(found, (tuple, list)) else (fqn,)


def take_items(items: Sequence[WriteItem], planner: SavePlanner, paths: object) -> OwnItems:
    """Copy what this rank is to write.

    Args:
        items: of its plan.
        planner: resolves them.
        paths: as of `path_of`.

    Raises:
        CannotRepresentError: a value cannot be stored without pickle.
    """
    own = OwnItems()
    state = getattr(planner, "state_dict", None)
    known = state.keys() if isinstance(state, Mapping) else {item.index.fqn for item in items}
    flat = not any(_is_below_model(path_of(fqn, paths)) for fqn in known)
    for item in items:
        fqn = item.index.fqn
        path, value = path_of(fqn, paths), planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            assert isinstance(value, io.BytesIO)  # as the planner's interface says
            own.plain[fqn] = _plain(fqn, path, value, own)
            continue
        assert isinstance(value, torch.Tensor)
        if hasattr(value, "wait"):  # the result of a collective that has not arrived
            value = value.wait()
        assert item.tensor_data is not None
        whole = tuple(item.tensor_data.size)
        if math.prod(whole) == 0 or value.numel() == 0:
            continue  # of a tensor without elements, its shape is all; an empty shard is nothing
        tag = _tag(fqn, path, value.dtype, flat=flat)
        offset = tuple(item.tensor_data.chunk.offsets)
        own.put(_spec(join_path(tuple(map(str, path))), value, whole, offset, tag), value)
    return own


def _spec(
    name: str, value: torch.Tensor, whole: tuple[int, ...], offset: tuple[int, ...], tag: Tag
) -> TensorSpec:
    shape = tuple(value.shape)
    if shape == whole:
        return TensorSpec(name=name, dtype=value.dtype, shape=shape, tag=tag)
    place = box_name("", offset, shape, whole)
    block = Block(of=name, offset=offset, shape=whole, parameter=tag.parameter)
    own = Tag(role=tag.role, parameter=None if tag.parameter is None else tag.parameter + place)
    return TensorSpec(name=name + place, dtype=value.dtype, shape=shape, tag=own, block=block)


def box_name(name: str, offset: tuple[int, ...], size: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """The name under which a box of a tensor is stored; the tensor's own, if it is all of it."""
    return name if size == whole else f"{name}@{','.join(map(str, offset))}"


# ---- roles, read off the names: a storage learns nothing else


def _is_below_model(path: FlatPath) -> bool:
    return len(path) > 1 and path[0] in _MODELS


def _tag(fqn: str, path: FlatPath, dtype: torch.dtype, *, flat: bool) -> Tag:
    """A tensor's tag, by its name alone, so that it is the same on all ranks.

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


# ---- plain data


def _plain(fqn: str, path: FlatPath, data: io.BytesIO, own: OwnItems) -> JSON:
    """A value that is no tensor; tensors in it are added to `own`.

    The planner hands over a pickle that it has just made of it. It is read without running anything that it names.
    """
    data.seek(0)
    with torch.serialization.safe_globals(_plain_types()):
        try:
            value: Any = torch.load(data, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            data.seek(0)
            named = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(data)[:4])
            raise CannotRepresentError(
                f"{fqn} cannot be stored without pickle, for it holds {named or 'what torch does not load safely'}: return numbers,"
                " strings, lists, dicts and tensors from your state_dict() instead"
            ) from error

    def put(place: tuple[str, ...], tensor: torch.Tensor) -> str:
        name = join_path(place)
        own.put(TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)), tensor)
        return name

    return encode_tree(value, put, tuple(map(str, path)))


def _plain_types() -> list[Any]:
    """What a tree can hold in addition to what torch's own safe loader knows."""
    array = np.zeros(1)
    rebuilt = array.__reduce__()[0], np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(name)) for name in (*"?bhilqBHILQefdFD", "M8[s]", "m8[s]")}
    return [*rebuilt, np.ndarray, np.dtype, *dtypes, timedelta, PosixPath, io.BytesIO]
