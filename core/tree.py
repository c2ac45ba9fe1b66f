"""Plain data as JSON without loss and without pickle: the part of a training state that is not tensors.

JSON's own types stand for themselves. Everything else is an object with the single reserved key ``"$"`` that names
its type (docs/format.md, "The tree"). Tensors are pulled out and leave a reference behind.
"""

import base64
import math
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import torch

from shrinkpoint.dtypes import dtype_from_name, dtype_name
from shrinkpoint.errors import CannotRepresentError, FormatError

__all__ = ["JSON", "Path", "decode_tree", "encode_tree", "join_path"]

JSON: TypeAlias = Any
"""None, bool, int, float, str, or a list or str-keyed dict of these."""

Path: TypeAlias = tuple[str, ...]

_TAG = "$"
_MAX_DEPTH = 200


def join_path(path: Path) -> str:
    """A tensor's name: its place in the state, parts joined by ``/`` (escaped as in JSON pointers, RFC 6901)."""
    return "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)


def encode_tree(value: object, put: Callable[[Path, torch.Tensor], str], path: Path = ()) -> JSON:
    """Turn nested plain data into JSON.

    Args:
        value: dicts, lists, tuples, sets, numbers, strings, bytes, numpy arrays and scalars, torch tensors, dtypes,
            devices and sizes, enums' values, paths, timedeltas, namespaces.
        put: takes a tensor's path and the tensor, and returns the name by which `decode_tree` asks for it.
        path: where `value` stands; for error messages and names.

    Raises:
        CannotRepresentError: an object of another type; the message names its place and type.
    """
    if len(path) > _MAX_DEPTH:
        raise CannotRepresentError(f"{join_path(path[:4])}/...: nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, put, path)
    if isinstance(value, Mapping):
        return _encode_mapping(value, put, path)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _encode_sequence(value, put, path)
    return _encode_leaf(value, put, path)


def _encode_tensor(value: torch.Tensor, put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    if type(value).__name__ == "DTensor":
        raise CannotRepresentError(
            f"{join_path(path)} is a DTensor: sharded states are not supported yet; gather a full state dict first"
        )
    if value.is_meta or value.is_quantized or value.is_nested:
        raise CannotRepresentError(f"{join_path(path)}: meta, quantized and nested tensors cannot be stored")
    value = value.detach()
    if value.layout == torch.sparse_coo:
        parts = {"indices": value._indices(), "values": value._values()}
        kind, more = "sparse_coo", {"coalesced": value.is_coalesced()}
    elif value.layout == torch.sparse_csr:
        parts = {"crow": value.crow_indices(), "col": value.col_indices(), "values": value.values()}
        kind, more = "sparse_csr", {}
    elif value.layout == torch.strided:
        return {_TAG: "tensor", "name": put(path, value)}
    else:
        raise CannotRepresentError(f"{join_path(path)}: tensors of layout {value.layout} cannot be stored")
    names = {part: put((*path, part), tensor) for part, tensor in parts.items()}
    return {_TAG: kind, "size": list(value.shape), **names, **more}


def _encode_mapping(value: Mapping[Any, Any], put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    plain = all(type(key) is str for key in value) and _TAG not in value
    kind = "odict" if isinstance(value, OrderedDict) else "dict"
    if plain and kind == "dict":
        return {key: encode_tree(item, put, (*path, key)) for key, item in value.items()}
    items = [
        [encode_tree(key, put, (*path, "key")), encode_tree(item, put, (*path, str(key)))]
        for key, item in value.items()
    ]
    return {_TAG: kind, "items": items}


def _encode_sequence(value: Any, put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:
    if isinstance(value, torch.Size):
        return {_TAG: "size", "items": list(value)}
    ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    items = [encode_tree(item, put, (*path, str(index))) for index, item in enumerate(ordered)]
    if isinstance(value, list):
        return items
    kind = "tuple" if isinstance(value, tuple) else type(value).__name__
    return {_TAG: kind, "items": items}


def _encode_leaf(value: object, put: Callable[[Path, torch.Tensor], str], path: Path) -> JSON:  # noqa: PLR0911
    if value is None or isinstance(value, (bool, str)) and not isinstance(value, Enum):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, Enum):
        return encode_tree(value.value, put, path)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.kind not in "biufc":
            raise CannotRepresentError(f"{join_path(path)}: numpy arrays of dtype {value.dtype} cannot be stored")
        return {_TAG: "ndarray", "name": put(path, torch.from_numpy(np.array(value, order="C")))}
    if isinstance(value, np.generic):
        return {_TAG: "npscalar", "dtype": value.dtype.str, "data": _to_base64(value.tobytes())}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "hex": float(value).hex()}
    if isinstance(value, complex):
        return {_TAG: "complex", "hex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "data": _to_base64(bytes(value))}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "name": dtype_name(value)}
    if isinstance(value, torch.device):
        return {_TAG: "device", "name": str(value)}
    if isinstance(value, timedelta):
        return {_TAG: "timedelta", "parts": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Namespace):
        return {_TAG: "namespace", "items": _encode_mapping(vars(value), put, path)}
    raise CannotRepresentError(
        f"{join_path(path) or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}: it cannot be"
        " stored without pickle. Return numbers, strings, lists, dicts and tensors from your state_dict() instead"
    )


def decode_tree(node: JSON, get: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `encode_tree`.

    Args:
        node: JSON as `encode_tree` made it.
        get: gives the tensor of a name.

    Raises:
        FormatError: not such JSON.
    """
    try:
        return _decode(node, get, 0)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise FormatError(f"the tree of plain data is malformed: {error!r}") from error


def _decode(node: JSON, get: Callable[[str], torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH * 2:
        raise FormatError("the tree of plain data is nested too deeply")
    if isinstance(node, list):
        return [_decode(item, get, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if _TAG not in node:
        return {key: _decode(item, get, depth + 1) for key, item in node.items()}
    kind = node[_TAG]
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind]([_decode(item, get, depth + 1) for item in node["items"]])
    if kind == "namespace":
        return Namespace(**_decode(node["items"], get, depth + 1))
    if kind in _TENSORS:
        return _TENSORS[kind](node, get)
    if kind in _LEAVES:
        return _LEAVES[kind](node)
    raise FormatError(f"the tree of plain data holds the unknown type {kind!r}")


def _sparse_coo(node: Mapping[str, JSON], get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    tensor = torch.sparse_coo_tensor(
        get(node["indices"]), get(node["values"]), node["size"], check_invariants=True
    )
    return tensor._coalesced_(bool(node["coalesced"]))


def _sparse_csr(node: Mapping[str, JSON], get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    crow, col, values = get(node["crow"]), get(node["col"]), get(node["values"])
    return torch.sparse_csr_tensor(crow, col, values, node["size"], check_invariants=True)


def _npscalar(node: Mapping[str, JSON]) -> Any:
    dtype = np.dtype(node["dtype"])
    if dtype.hasobject or dtype.kind not in "biufcSUmM" or dtype.itemsize > 4096:
        raise FormatError(f"a numpy scalar of dtype {dtype} is not allowed")
    return np.frombuffer(_from_base64(node["data"]), dtype=dtype, count=1)[0]


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_COLLECTIONS: Mapping[str, Callable[[list[Any]], Any]] = {
    "dict": lambda items: dict((key, value) for key, value in items),
    "odict": lambda items: OrderedDict((key, value) for key, value in items),
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_TENSORS: Mapping[str, Callable[[Mapping[str, JSON], Callable[[str], torch.Tensor]], Any]] = {
    "tensor": lambda node, get: get(node["name"]),
    "ndarray": lambda node, get: get(node["name"]).numpy(),
    "sparse_coo": _sparse_coo,
    "sparse_csr": _sparse_csr,
}
_LEAVES: Mapping[str, Callable[[Mapping[str, JSON]], Any]] = {
    "npscalar": _npscalar,
    "float": lambda node: float.fromhex(node["hex"]),
    "complex": lambda node: complex(float.fromhex(node["hex"][0]), float.fromhex(node["hex"][1])),
    "bytes": lambda node: _from_base64(node["data"]),
    "dtype": lambda node: dtype_from_name(node["name"]),
    "device": lambda node: torch.device(node["name"]),
    "timedelta": lambda node: timedelta(*node["parts"]),
}
