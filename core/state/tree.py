"""Plain data as JSON without loss and without pickle: the part of a training state that is not tensors.

JSON's own types represent themselves. Everything else is an object with the single reserved key ``"$"`` that names
its type (docs/format.md, "The tree"). Tensors are pulled out and leave a reference behind.
"""

import base64
import dataclasses
import math
import re
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from functools import cache
from io import SEEK_CUR, BytesIO
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import torch

from shrinkpoint.errors import CannotRepresentError, FormatError, StateMismatchError
from shrinkpoint.state.dtypes import (
    DTYPES,
    class_name,
    dtype_from_name,
    dtype_name,
    in_memory_order,
    is_flat,
    loaded_class,
    memory_order,
)

JSON: TypeAlias = Any
"""None, bool, int, float, str, or a list or str-keyed dict of these."""

Path: TypeAlias = tuple[str, ...]

_TAG = "$"
_LONG = 4096  # bytes, from which on they are stored as a tensor
_MAX_DEPTH = 100
"""Containers within containers; far below what Python's own recursion limit allows on both sides."""
_COMMON = frozenset({type(None), bool, int, float, str})
"""The commonest types that are no collections."""

_INT64 = range(-(2**63), 2**63)
_ARRAYS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
     "float16", "float32", "float64", "complex64", "complex128")
)  # fmt: skip
_SCALAR = re.compile(
    r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
"""numpy's array-protocol names of the scalars that have the same meaning on every machine."""
_UNQUANTIZED = "give the model as it is before torch.ao quantizes it, or quantize a copy of a frozen part, outside of the model"
_FACTORIES = frozenset((dict, list, set, tuple, str, bool, int, float, Counter, OrderedDict))
"""Of defaultdicts, which call them: of a file, no other class is taken but a dataclass that is loaded."""


def join_path(path: Path) -> str:
    """Return a tensor's name: its place in the state, parts joined by ``/`` (escaped as in JSON pointers, RFC 6901)."""
    name = "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)
    return name.encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates have no UTF-8


def encode_tree(value: object, put: Callable[[Path, torch.Tensor], str], path: Path = ()) -> JSON:
    """Turn nested plain data into JSON.

    Args:
        value: dicts, lists, tuples, sets, numbers, strings, bytes, BytesIO, numpy arrays and scalars, torch tensors, dtypes,
            devices and sizes, enums, dataclasses, OmegaConf's containers, paths, timedeltas, namespaces.
        put: takes a tensor's path and the tensor, and returns the name by which `decode_tree` asks for it.
        path: place of `value` in the whole; for error messages and names.

    Some types come back as a plainer type: subclasses of dict (but OrderedDict, Counter and defaultdict), list, tuple, set,
    str, int and float as these; defaultdicts with a function as dicts; bytearrays as bytes; paths as strings. Enums, dataclasses, named tuples
    and OmegaConf's containers come back as such where their classes are loaded, else as values, dicts and tuples.

    Raises:
        CannotRepresentError: an object of another type; the message names its place and type.
    """
    if len(path) > _MAX_DEPTH:
        raise CannotRepresentError(f"{join_path(path[:4])}/...: nested deeper than {_MAX_DEPTH} levels")
    if type(value) in _COMMON:
        return _encode_leaf(value, put, path)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, put, path)
    if type(value).__module__.startswith("omegaconf.") and hasattr(value, "_metadata"):
        return {_TAG: "omegaconf", "content": encode_tree(_omegaconf().to_container(value), put, path)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, put, path)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _encode_sequence(value, put, path)
    if isinstance(value, Enum):
        return {_TAG: "enum", "class": class_name(type(value)), "value": encode_tree(value.value, put, path)}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module)):
        members = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        if not getattr(value, "__dict__", {}).keys() - members.keys():
            node = encode_tree(members, put, path)
            return {_TAG: "dataclass", "class": class_name(type(value)), "value": node}
    return _encode_leaf(value, put, path)


def refusal(value: object) -> CannotRepresentError | None:
    """Return why `encode_tree` does not take a value; None where it does."""
    try:
        encode_tree(value, lambda path, tensor: "")
    except CannotRepresentError as error:
        return error
    return None


def _encode_tensor(value: torch.Tensor, put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    if value.is_meta:
        raise CannotRepresentError(
            f"{join_path(path)} is a meta tensor, which has no values: give the module, or the torch.nn.ParameterDict, that has them"
        )
    if value.is_quantized:
        raise CannotRepresentError(f"{join_path(path)} is a quantized tensor of torch.ao: {_UNQUANTIZED}")
    if value.is_nested:
        raise CannotRepresentError(f"{join_path(path)}: nested tensors cannot be stored")
    if value.requires_grad:  # else it would only take time, of which DTensors need much
        value = value.detach()
    if is_flat(value):
        return _encode_flat(value, put, path)
    if value.layout == torch.sparse_coo:
        parts = {"indices": value._indices(), "values": value._values()}
        kind, more = "sparse_coo", {"coalesced": value.is_coalesced()}
    elif value.layout == torch.sparse_csr:
        parts = {"crow": value.crow_indices(), "col": value.col_indices(), "values": value.values()}
        kind, more = "sparse_csr", {}
    elif value.layout == torch.strided:
        reference: dict[str, JSON] = {_TAG: "tensor", "name": put(path, value)}
        order = memory_order(value)
        return reference if order is None else {**reference, "order": list(order)}
    else:
        raise CannotRepresentError(f"{join_path(path)}: tensors of layout {value.layout} cannot be stored")
    names = {part: put((*path, part), tensor) for part, tensor in parts.items()}
    return {_TAG: kind, "size": list(value.shape), **names, **more}


def _encode_flat(value: Any, put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    names, context = value.__tensor_flatten__()
    node = encode_tree(context, _no_tensor, path)
    if repr(decode_tree(node, lambda _: torch.empty(0))) != repr(context):
        raise _refused(value, path)
    tensors = {name: _encode_tensor(getattr(value, name), put, (*path, name)) for name in names}
    sizes = {"size": list(value.shape), "stride": list(value.stride())}
    return {_TAG: "flat", "class": class_name(type(value)), "tensors": tensors, "context": node, **sizes}


def _no_tensor(path: Path, tensor: torch.Tensor) -> str:
    raise CannotRepresentError(f"{join_path(path)} is a tensor")


def _encode_mapping(value: Mapping[Any, Any], put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    if any(isinstance(key, torch.Tensor) for key in value):
        raise CannotRepresentError(
            f"{join_path(path) or 'the state'} is a dict whose keys are tensors, which are others after a resume, so that nothing would be found"
            " in it: return numbers or names in their place from your state_dict()"
        )
    plain = all(type(key) is str and _is_unicode(key) for key in value) and _TAG not in value
    kind = "odict" if isinstance(value, OrderedDict) else "dict"
    more: dict[str, JSON] = {}
    if isinstance(value, Counter):  # MultiStepLR has one, and asks it for its elements
        more = {"counter": True}
    elif isinstance(value, defaultdict) and isinstance(value.default_factory, type):
        more = {"default": class_name(value.default_factory)}
    if plain and kind == "dict" and not more:
        return {key: encode_tree(item, put, (*path, key)) for key, item in value.items()}
    items = [
        [encode_tree(key, put, (*path, "key")), encode_tree(item, put, (*path, str(key)))]
        for key, item in value.items()
    ]
    return {_TAG: kind, "items": items, **more}


def _encode_sequence(value: Any, put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    if isinstance(value, torch.Size):
        return {_TAG: "size", "items": list(value)}
    ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    items = [encode_tree(item, put, (*path, str(index))) for index, item in enumerate(ordered)]
    if isinstance(value, list):
        return items
    kind = "tuple" if isinstance(value, tuple) else "set" if isinstance(value, set) else "frozenset"
    if kind == "tuple" and hasattr(value, "_fields"):
        return {_TAG: kind, "items": items, "class": class_name(type(value)), "fields": list(value._fields)}
    return {_TAG: kind, "items": items}


def _omegaconf() -> Any:
    """OmegaConf's functions."""
    import omegaconf

    return omegaconf.OmegaConf


def _encode_leaf(value: object, put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)  # a subclass may override __str__
        return (
            text
            if _is_unicode(text)
            else {_TAG: "str", "data": _to_base64(text.encode("utf-8", "surrogatepass"))}
        )
    if isinstance(value, (bytes, bytearray)):
        return _encode_bytes(bytes(value), put, path)
    if isinstance(value, BytesIO):
        content = _encode_bytes(value.getvalue(), put, path)
        return {_TAG: "file", "content": content, "position": value.seek(0, SEEK_CUR)}
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_numpy(value, put, path)
    if isinstance(value, int):
        return int(value) if value in _INT64 else {_TAG: "int", "hex": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "hex": float(value).hex()}
    if isinstance(value, complex):
        return {_TAG: "complex", "hex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, torch.dtype):
        if value not in DTYPES.values():
            raise CannotRepresentError(
                f"{join_path(path)} is {value}, which torch.ao's modules have: {_UNQUANTIZED}"
            )
        return {_TAG: "dtype", "name": dtype_name(value)}
    if isinstance(value, torch.device):
        return {_TAG: "device", "name": str(value)}
    if isinstance(value, timedelta):
        return {_TAG: "timedelta", "parts": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Namespace):
        return {_TAG: "namespace", "items": _encode_mapping(vars(value), put, path)}
    raise _refused(value, path)


def _refused(value: object, path: Path) -> CannotRepresentError:
    return CannotRepresentError(
        f"{join_path(path) or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}: it cannot be"
        " stored without pickle. Return numbers, strings, lists, dicts and tensors from your state_dict() instead; an object"
        " that an optimizer keeps for a parameter may have a state_dict() and a load_state_dict()"
    )


def _encode_bytes(value: bytes, put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    if len(value) < _LONG:
        return {_TAG: "bytes", "data": _to_base64(value)}
    return {_TAG: "bytes", "name": put(path, torch.frombuffer(bytearray(value), dtype=torch.uint8))}


def _encode_numpy(value: Any, put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    dtype = value.dtype
    if isinstance(value, np.generic):
        if not _SCALAR.fullmatch(dtype.str):
            raise CannotRepresentError(f"{join_path(path)}: numpy scalars of dtype {dtype} cannot be stored")
        return {_TAG: "npscalar", "dtype": dtype.str, "data": _to_base64(value.tobytes())}
    if dtype.name not in _ARRAYS or isinstance(value, np.ma.MaskedArray):
        raise CannotRepresentError(
            f"{join_path(path)}: a numpy {type(value).__name__} of dtype {dtype} cannot be stored"
        )
    # In the machine's own byte order: the format's elements are little-endian, whatever the array's were.
    array = np.array(value, dtype=np.dtype(dtype.name), order="C")
    return {_TAG: "ndarray", "name": put(path, torch.from_numpy(array))}


def decode_tree(node: JSON, get: Callable[[str], torch.Tensor], *, as_given: bool = False) -> Any:
    """Return the inverse of `encode_tree`.

    Args:
        node: JSON as `encode_tree` made it.
        get: gives the tensor of a name.
        as_given: take the tensors that `get` gives, so that they can be recognised; else those whose dimensions had another
            order in memory are copied into that order, once each.

    Raises:
        FormatError: not such JSON.
        StateMismatchError: the class of a tensor that is made of others is not loaded.
    """
    try:
        return _decode(node, _Source(get, as_given), 0)
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise FormatError(f"the tree of plain data is malformed: {error!r}") from error


class _Source:
    """The tensors by name; one that is referred to twice is one tensor. And the classes, each looked for once."""

    def __init__(self, get: Callable[[str], torch.Tensor], as_given: bool) -> None:
        self._get = get
        self.as_given = as_given
        self._ordered: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.loaded = cache(loaded_class)

    def __call__(self, name: str) -> torch.Tensor:
        return self._get(name)

    def referred(self, node: Mapping[str, JSON]) -> torch.Tensor:
        name = node["name"]
        if "order" not in node or self.as_given:
            return self._get(name)
        key = name, tuple(node["order"])
        if key not in self._ordered:
            self._ordered[key] = in_memory_order(self._get(name), key[1])
        return self._ordered[key]


def _decode(node: JSON, get: _Source, depth: int) -> Any:
    if depth > 3 * (_MAX_DEPTH + 1):  # a namespace, its dict and a pair of it: three objects for one level
        raise FormatError("the tree of plain data is nested too deeply")
    if isinstance(node, list):
        return [_decode(item, get, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if _TAG not in node:
        members = ((key, _decode(item, get, depth + 1)) for key, item in node.items())
        return {key: item for key, item in members if item is not _ABSENT}
    kind = node[_TAG]
    if kind == "frozen":
        return _ABSENT
    if kind in _COLLECTIONS:
        if not isinstance(node["items"], list):
            raise FormatError(f"the items of a {kind} in the tree of plain data are not a list")
        made = _COLLECTIONS[kind]([_decode(item, get, depth + 1) for item in node["items"]])
        if kind == "dict" and "default" in node:
            return _defaultdict(made, get.loaded(object, node["default"]))
        if kind == "tuple" and "class" in node:
            return _named_tuple(made, node["fields"], get.loaded(tuple, node["class"]))
        return _counter(made) if kind == "dict" and node.get("counter") is True else made
    if kind == "flat":
        return _flat(node, get, depth)
    if kind == "file":
        file = BytesIO(_decode(node["content"], get, depth + 1))
        file.seek(node["position"])
        return file
    if kind == "omegaconf":
        content = _decode(node["content"], get, depth + 1)
        try:
            return _omegaconf().create(content)
        except ImportError:
            return content
    if kind in ("enum", "dataclass"):
        base = Enum if kind == "enum" else object
        return _object(kind, _decode(node["value"], get, depth + 1), get.loaded(base, node["class"]))
    if kind == "namespace":
        return _namespace(_decode(node["items"], get, depth + 1))
    if kind in _TENSORS:
        return _TENSORS[kind](node, get)
    if kind in _LEAVES:
        return _LEAVES[kind](node)
    raise FormatError(f"the tree of plain data contains the unknown type {kind!r}")


def replaced(node: JSON, put: Callable[[JSON], JSON], depth: int = 0) -> JSON:
    """Replace nodes of a tree that stand for what JSON has not.

    `put` gives another such node, or plain data, in the place of one; or the node itself. Of the latter two the
    members are replaced. A tree that is nested too deeply is a FormatError.
    """
    if depth > 3 * (_MAX_DEPTH + 1):
        raise FormatError("the tree of plain data is nested too deeply")
    if isinstance(node, dict) and _TAG in node:
        made = put(node)
        if made is not node and isinstance(made, dict) and _TAG in made:
            return made
        node = made
    if isinstance(node, list):
        return [replaced(item, put, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: replaced(item, put, depth + 1) for key, item in node.items()}


_ABSENT = object()
"""Stands for a frozen tensor that the state does not hold; a dict leaves such members out."""


def _flat(node: Mapping[str, JSON], get: _Source, depth: int) -> Any:
    tensors = {name: _decode(item, get, depth + 1) for name, item in node["tensors"].items()}
    if get.as_given:
        return tensors
    found, context = loaded_class(torch.Tensor, node["class"]), _decode(node["context"], get, depth + 1)
    if not hasattr(found, "__tensor_unflatten__"):
        raise StateMismatchError(
            f"the state has a tensor of the class {node['class']!r:.99}, which this process has not: import the library that has it, and build"
            " model and optimizer as the run did, before the state is read"
        )
    sizes = torch.Size(node["size"]), torch.Size(node["stride"])
    try:
        return found.__tensor_unflatten__(tensors, context, *sizes)
    except Exception as error:
        raise FormatError(f"no {node['class']} can be made of what is stored of it: {error!r}") from error


_PARTS: Mapping[str, tuple[str, ...]] = {
    "bytes": ("name",),
    "ndarray": ("name",),
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow", "col", "values"),
}


def dense_only(node: JSON) -> tuple[JSON, dict[str, str]]:
    """Return a tree with dense tensors alone, which can be decoded with meta tensors (a shape, but no elements), or
    raise a FormatError.

    Arrays, files, sparse tensors and those made of others are replaced by lists of their component tensors; these
    come with the kind replaced.
    """
    parts: dict[str, str] = {}

    def cleared(node: JSON) -> JSON:
        kind = node[_TAG]
        if kind in ("flat", "file"):
            return node.get("tensors") if kind == "flat" else [node.get("content")]
        if not isinstance(kind, str) or kind not in _PARTS or (kind == "bytes" and "data" in node):
            return node
        names = [name for part in _PARTS[kind] if isinstance(name := node.get(part), str)]
        if len(names) != len(_PARTS[kind]):
            raise FormatError(f"the tree of plain data is malformed: {kind} without its tensors")
        parts.update(dict.fromkeys(names, kind))
        return [{_TAG: "tensor", "name": name} for name in names]

    return replaced(node, cleared), parts


def tensor_names(node: JSON) -> set[str]:
    """Return the names of all tensors that a tree refers to, or raise a FormatError."""
    names: set[str] = set()

    def note(name: str) -> torch.Tensor:
        names.add(name)
        return torch.empty(0)

    decode_tree(dense_only(node)[0], note, as_given=True)
    return names


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    if any(not isinstance(item, list) or len(item) != 2 for item in items):
        raise FormatError("the items of a dict in the tree of plain data are not pairs")
    return [(key, value) for key, value in items if value is not _ABSENT]


def _counter(items: dict[Any, Any]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, items)  # its own constructor would count keys
    return counter


def _defaultdict(items: dict[Any, Any], found: Any) -> dict[Any, Any]:
    """Return the dict itself where its class of defaults is not loaded, or is none that a file may name."""
    allowed = found in _FACTORIES or dataclasses.is_dataclass(found)
    return defaultdict(found, items) if allowed else items


def _named_tuple(items: tuple[Any, ...], names: list[str], found: Any) -> tuple[Any, ...]:
    """Return an object of the class without running its code; the tuple itself where the class is not as it was."""
    same = getattr(found, "_fields", None) == tuple(names) and len(items) == len(names)
    made: tuple[Any, ...] = tuple.__new__(found, items) if same else items
    return made


def _namespace(members: Any) -> Namespace:
    if not isinstance(members, dict) or any(type(name) is not str for name in members):
        raise FormatError(
            "the items of a namespace in the tree of plain data are not a dict with names as keys"
        )
    namespace = Namespace()
    vars(namespace).update(members)  # as keyword arguments, a member named "self" would not pass
    return namespace


def _object(kind: str, value: Any, found: Any) -> Any:
    """Return an enum's member, or a dataclass's object without running its code; the value where the class is not as it was."""
    if kind == "enum":
        return found(value) if found is not None and value in [each.value for each in found] else value
    fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
    if found is None or value.keys() != {each.name for each in fields}:
        return value
    made: Any = object.__new__(found)
    for name, member in value.items():
        object.__setattr__(made, name, member)
    return made


def _sparse(node: Mapping[str, JSON], get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    *places, values = (get(node[part]) for part in _PARTS[node[_TAG]])
    size = node["size"]
    if node[_TAG] == "sparse_csr":
        return torch.sparse_csr_tensor(places[0], places[1], values, size, check_invariants=True)
    coalesced = bool(node["coalesced"])
    return torch.sparse_coo_tensor(places[0], values, size, check_invariants=True, is_coalesced=coalesced)


def _bytes(node: Mapping[str, JSON], get: Callable[[str], torch.Tensor]) -> bytes:
    return get(node["name"]).numpy().tobytes() if "name" in node else _from_base64(node["data"])


def _npscalar(node: Mapping[str, JSON]) -> Any:
    if not _SCALAR.fullmatch(node["dtype"]):
        raise FormatError(f"a numpy scalar of dtype {node['dtype'][:40]!r} is not allowed")
    (scalar,) = np.frombuffer(_from_base64(node["data"]), dtype=np.dtype(node["dtype"]))
    return scalar


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_COLLECTIONS: Mapping[str, Callable[[list[Any]], Any]] = {
    "dict": lambda items: dict(_pairs(items)),
    "odict": lambda items: OrderedDict(_pairs(items)),
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_TENSORS: Mapping[str, Callable[[Mapping[str, JSON], _Source], Any]] = {
    "tensor": lambda node, get: get.referred(node),
    "ndarray": lambda node, get: get(node["name"]).numpy(),
    "bytes": _bytes,
    "sparse_coo": _sparse,
    "sparse_csr": _sparse,
}
_LEAVES: Mapping[str, Callable[[Mapping[str, JSON]], Any]] = {
    "npscalar": _npscalar,
    "int": lambda node: int(node["hex"], 16),
    "float": lambda node: float.fromhex(node["hex"]),
    "complex": lambda node: complex(float.fromhex(node["hex"][0]), float.fromhex(node["hex"][1])),
    "str": lambda node: _from_base64(node["data"]).decode("utf-8", "surrogatepass"),
    "dtype": lambda node: dtype_from_name(node["name"]),
    "device": lambda node: torch.device(node["name"]),
    "timedelta": lambda node: timedelta(*node["parts"]),
}
