"""What torch's planners say: a rank's items as tensors; a whole state as a tree and a table of boxes, made at a save and taken apart at a load."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shrinkpoint.coding.parts import PartsHeader
from shrinkpoint.container.reader import Header
from shrinkpoint.errors import CannotRepresentError, FormatError, StoreError
from shrinkpoint.state.dtypes import dtype_name, empty_tensor
from shrinkpoint.state.roles import named_role
from shrinkpoint.state.specs import Block, block_of
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON, decode_tree, encode_tree, join_path

FlatPath = tuple[str | int, ...]
"""The place of a value in the nested state: keys of dicts and indices of lists."""

_MODELS = ("model", "state_dict")
"""Keys of a state under which the model's own is."""
_OPTIMIZER_STATE = re.compile(r"(?:^|\.)state\.(?P<parameter>.+)\.(?P<key>[^.]+)$")
_KEY = "boxes"


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


# ---- the tree


def whole_state(metadata: Metadata, plain: Mapping[str, JSON]) -> TrainingState:
    """Return the tree of a whole checkpoint, and its tensors without elements, which no rank has stored.

    Args:
        metadata: as torch's planner made it of all ranks' plans.
        plain: what the ranks have stored that is no tensor, by name in the flat state.

    Raises:
        StoreError: no rank has stored one of the values.
        CannotRepresentError: the state is nested, and the planner has not flattened it.
    """
    nodes: dict[str, JSON] = {}
    empty: dict[str, torch.Tensor] = {}
    paths = {fqn: path_of(fqn, metadata.planner_data) for fqn in metadata.state_dict_metadata}
    for fqn, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            name = name_at(paths[fqn])
            nodes[fqn] = {"$": "tensor", "name": name}
            if found.size.numel() == 0:
                empty[name] = torch.empty(found.size, dtype=found.properties.dtype)
        elif fqn not in plain:
            raise StoreError(f"no rank has stored {fqn!r}")
        elif metadata.planner_data is None and isinstance(plain[fqn], dict) and "$" not in plain[fqn]:
            raise CannotRepresentError(
                f"{fqn!r} is a dict that the planner has not flattened: use DefaultSavePlanner(flatten_state_dict=True)"
            )
        else:
            nodes[fqn] = plain[fqn]
    stand_ins = {fqn: torch.empty(0) for fqn in nodes}
    known = {id(tensor): fqn for fqn, tensor in stand_ins.items()}
    tree = encode_tree(unflatten_state_dict(stand_ins, paths), lambda _, tensor: known[id(tensor)])
    specs = {name: TensorSpec(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in empty.items()}
    return TrainingState(_filled(tree, nodes), empty, specs)


def _filled(node: JSON, nodes: Mapping[str, JSON]) -> JSON:
    """Return a tree with other nodes in the places of its tensors."""
    if isinstance(node, list):
        return [_filled(item, nodes) for item in node]
    name = tensor_in(node)
    if name is not None:
        return nodes[name]
    return {key: _filled(item, nodes) for key, item in node.items()} if isinstance(node, dict) else node


def tensor_in(node: JSON) -> str | None:
    """Return the name of the tensor that a node of a tree stands for; None where it is no tensor."""
    if isinstance(node, dict) and node.get("$") == "tensor" and isinstance(node.get("name"), str):
        return str(node["name"])
    return None


@dataclass(frozen=True)
class _Leaf:
    """What torch is not to look into."""

    node: JSON


def flat_nodes(tree: JSON) -> tuple[dict[str, JSON], dict[str, FlatPath]]:
    """Return the values of a tree as torch flattens nested states.

    Args:
        tree: of a checkpoint.

    Returns:
        The tree of each value, and its place in the whole, by its name in the flat state.

    Raises:
        FormatError: it is malformed, or two values have one flat name.
    """
    state = _opened(tree)
    if not isinstance(state, dict):
        raise FormatError("the checkpoint's state is not a dict, as torch.distributed.checkpoint needs it")
    nodes: dict[str, JSON] = {}
    paths: dict[str, FlatPath] = {}

    def note(path: FlatPath, value: Any) -> None:
        fqn = ".".join(map(str, path))
        if fqn in nodes:
            raise FormatError(
                f"two values of the state have the flat name {fqn!r}, which torch.distributed.checkpoint cannot load"
            )
        nodes[fqn], paths[fqn] = _closed(value), path

    traverse_state_dict(
        state, note, lambda item: isinstance(item, _Leaf) and tensor_in(item.node) is not None
    )
    return nodes, paths


def _opened(node: JSON) -> Any:
    """Return a tree's dicts and lists, in which everything else is a leaf."""
    if isinstance(node, list):
        return [_opened(item) for item in node]
    if not isinstance(node, dict) or node.get("$", "dict") not in ("dict", "odict"):
        return _Leaf(node)
    if "$" not in node:
        return {key: _opened(item) for key, item in node.items()}
    try:
        return {str(decode_tree(key, _no_name)): _opened(item) for key, item in node["items"]}
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the tree of plain data is malformed: {error!r}") from error


def _no_name(name: str) -> torch.Tensor:
    raise FormatError(f"the tensor {name!r} as a key of a dict")


def _closed(value: Any) -> JSON:
    return [_closed(item) for item in value] if isinstance(value, list) else value.node


# ---- the table, by which few headers are read


def table_to_store(
    metadata: Metadata, stored: Sequence[Sequence[MetadataIndex]], more: Mapping[str, int]
) -> JSON:
    """Return which boxes of which tensors a checkpoint has in which parts, for the header of its first part (docs/format.md, "Boxes").

    Tensors that lie alike, as those of equal shape mostly do, share a row: its size hardly depends on their number.

    Args:
        metadata: as torch's planner made it of all ranks' plans.
        stored: what each rank has stored; part 0 is no rank's.
        more: the parts that have the tensors in plain data, by name.

    Raises:
        StoreError: no rank has stored one of the boxes.
    """
    parts = {(index.fqn, tuple(index.offset or ())): n for n, own in enumerate(stored, 1) for index in own}
    rows: dict[str, int] = {}
    layouts: list[JSON] = []
    tensors: dict[str, int] = {}
    for fqn, found in metadata.state_dict_metadata.items():
        if not isinstance(found, TensorStorageMetadata):
            continue
        layout: JSON = [dtype_name(found.properties.dtype), list(found.size), _boxes(fqn, found, parts)]
        if repr(layout) not in rows:
            rows[repr(layout)] = len(layouts)
            layouts.append(layout)
        tensors[name_at(path_of(fqn, metadata.planner_data))] = rows[repr(layout)]
    return {_KEY: {"layouts": layouts, "tensors": tensors, "more": dict(more)}}


def _boxes(
    fqn: str, found: TensorStorageMetadata, parts: Mapping[tuple[str, tuple[int, ...]], int]
) -> list[JSON]:
    if found.size.numel() == 0:
        return [[[0] * len(found.size), list(found.size), 0]]
    boxes: list[JSON] = []
    for chunk in found.chunks:
        if chunk.sizes.numel() == 0:
            continue
        part = parts.get((fqn, tuple(chunk.offsets)), parts.get((fqn, ())))
        if part is None:
            raise StoreError(f"no rank has stored {tuple(chunk.sizes)} at {tuple(chunk.offsets)} of {fqn!r}")
        boxes.append([list(chunk.offsets), list(chunk.sizes), part])
    return boxes


Table = tuple[Mapping[str, TensorSpec], Mapping[str, int]]
"""The specs of stored tensors without tags, and the part that has each, by name; of tensors in plain data only the part."""


def tables_of(headers: Sequence[Header], parts: Sequence[int]) -> list[Table] | None:
    """Return what the tables in the headers of the first parts of a chain's checkpoints say; None where one has none.

    Args:
        headers: of these parts.
        parts: how many each checkpoint has.

    Raises:
        FormatError: one is malformed.
    """
    tables: list[Table] = []
    before: JSON = None
    for header, count in zip(headers, parts, strict=True):
        own = header.own.get(0) if isinstance(header, PartsHeader) else None
        if not isinstance(own, dict) or _KEY not in own:
            return None
        # mostly that of the checkpoint before
        tables.append(tables[-1] if before == (own, count) else _table(own[_KEY], count))
        before = own, count
    return tables


def _table(node: JSON, parts: int) -> Table:
    specs: dict[str, TensorSpec] = {}
    try:
        places = {str(name): _number(part, parts) for name, part in node["more"].items()}
        layouts = [_layout(parts, *row) for row in node["layouts"]]
        for name, row in node["tensors"].items():
            for place, spec, part in layouts[_number(row, len(layouts))]:
                stored, block = name + place, spec.block
                if block is not None:  # there may be very many, and `replace` is slow
                    block = Block(of=name, offset=block.offset, shape=block.shape, parameter=None)
                specs[stored] = TensorSpec(
                    name=stored, dtype=spec.dtype, shape=spec.shape, tag=spec.tag, block=block
                )
                places[stored] = part
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(
            f"the table of boxes in the checkpoint's first part is malformed: {error!r}"
        ) from error
    return specs, places


def _layout(parts: int, dtype: str, shape: list[int], boxes: list[Any]) -> list[tuple[str, TensorSpec, int]]:
    """Of each box of tensors that lie alike: what its name ends with, its spec as if it had no other name, and its part."""
    found = {}
    for at, size, part in boxes:
        block = {} if size == shape else {"block": ["", at, shape, None]}
        tag = {"role": "other", "layer_type": "other", "parameter": None}
        spec = TensorSpec.from_json({"name": "", "dtype": dtype, "shape": size, **tag, **block})
        place = box_place(at) if block else ""
        found[place] = place, spec, _number(part, parts)
    if len(found) != len(boxes) or sum(spec.numel for _, spec, _ in found.values()) != math.prod(shape):
        raise ValueError(f"{boxes!r:.80} do not make up {shape!r:.80}")
    return list(found.values())


def _number(value: int, end: int) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"{value!r:.80} is no number below {end}")
    return value
