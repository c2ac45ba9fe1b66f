"""Reads checkpoints that other programs wrote, without executing anything: files of torch.save (Lightning's and Composer's among
them) and safetensors, folders of Hugging Face's Trainer and of torch.distributed.checkpoint.

Pickles are read by torch's loader of plain values, with numpy's arrays and a few more plain types; others are refused.
"""

import errno
import json
import math
import pickle
import re
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.torch_version import TorchVersion

from shrinkpoint.errors import FormatError, NoCheckpointError, StoreError
from shrinkpoint.state.dtypes import TRAINED, tensor_to_bytes
from shrinkpoint.state.roles import named_role
from shrinkpoint.state.training import Describe, LayerType, Role, Tag
from shrinkpoint.state.tree import Path as Place
from shrinkpoint.state.tree import join_path

_TORCH, _SAFETENSORS = (".pt", ".pth", ".bin", ".ckpt"), (".safetensors",)
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)[^/]*\.(safetensors|bin)")
_PROGRESS = "trainer_state.json"
_MODELS = ("state_dict", "model", "model_state_dict", "module")
_STEPS = ("global_step", "step", "global_steps", "iteration", "iter", "num_steps")
_NAMED = re.compile(r"(?:step|checkpoint|ckpt|iter|ba|batch)[-_=]?(\d+)")
_BUFFERS = ("running_mean", "running_var", "inv_freq")
# Entries of the groups of Adam and its kin, and of SGD: of others the file does not say how they use their state.
_KNOWN = {"amsgrad", "bias_correction", "correct_bias", "dampening"}
_UNKNOWN = "the file does not say which optimizer this is; a training that is saved by shrinkpoint is asked"

_arrays = cast("Any", np.zeros(0).__reduce__()[0])
_scalars = cast("Any", np.float64(0).__reduce__()[0])
_SAFE: list[Any] = [
    *((function, f"numpy.{core}.multiarray.{function.__name__}") for function in (_arrays, _scalars) for core in ("core", "_core")),
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"},
    timedelta,
    Namespace,
    TorchVersion,
]  # fmt: skip
"""What `torch.load(weights_only=True)` refuses, and `shrinkpoint.state.tree` stores; none of it executes anything."""


@dataclass(frozen=True, kw_only=True)
class Ordinary:
    """A checkpoint that another program wrote."""

    path: Path
    kind: str
    """What wrote it, in a few words."""
    state: Any
    """Its contents; of a Hugging Face folder, those of each file by its name, or the bytes of a file without tensors."""
    step: int | None
    """None where neither the contents nor the name has one."""
    bytes: int
    """On disk."""


def read_ordinary(path: Path) -> Ordinary:
    """Read a checkpoint; its tensors are mapped from the files where possible.

    Raises:
        NoCheckpointError: there is none, or nothing that is known.
        FormatError: it is damaged, or a pickle of more than plain values.
        StoreError: it cannot be read.
    """
    if not path.exists():
        raise NoCheckpointError(f"there is no file and no folder {path}")
    try:
        if path.is_dir():
            kind, state, own = _folder(path)
        else:
            state = _file(path)
            kind, own = _kind(path, state), _own_step(state)
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        size = sum(each.stat().st_size for each in files)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    return Ordinary(
        path=path, kind=kind, state=state, step=_step_named(path) if own is None else own, bytes=size
    )


def _file(path: Path) -> Any:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise FormatError(
                f"{path} is damaged, or no safetensors file: {error}. Take another copy of it"
            ) from error
    return _unpickled(path, str(path))


def _unpickled(file: Any, shown: str) -> Any:
    """Return what torch's loader of plain values gives.

    Raises:
        FormatError: it refuses.
    """
    try:
        with torch.serialization.safe_globals(_SAFE):
            mapped = isinstance(file, Path) and zipfile.is_zipfile(file)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class) ([\w.]*\w)", str(error))
        if found is None:
            raise FormatError(
                f"{shown} is damaged, or not a file of torch.save: {_first_line(error)}"
            ) from error
        raise FormatError(
            f"{shown} is a pickle that needs {found[1]}, which is no plain value and may execute code: not read. If you trust it, let the"
            " program that wrote it save plain values instead; or allow a class, in Python: torch.serialization.add_safe_globals([...]),"
            " then shrinkpoint.cli.app.app([...]) with this command's words"
        ) from error
    except Exception as error:  # a cut or foreign file makes torch raise anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise FormatError(
            f"{shown} is damaged, cut short, or not a file of torch.save: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _kind(path: Path, state: Any) -> str:
    if isinstance(state, Mapping) and "pytorch-lightning_version" in state:
        return "Lightning"
    return (
        "Composer" if is_composers(state) else "safetensors" if path.suffix in _SAFETENSORS else "torch.save"
    )


def is_composers(state: Any) -> bool:
    """Return whether a state is one of Composer's own files: it has durations, which only ``weights_only=False`` reads."""
    return isinstance(state, Mapping) and {"state", "rng"} == state.keys()


# ---- the step


def _own_step(state: Any) -> int | None:
    if not isinstance(state, Mapping):
        return None
    if is_composers(state):
        return _whole(state["state"].get("timestamp", {}).get("Timestamp", {}).get("batch"))
    found = (_whole(state.get(name)) for name in _STEPS)
    return next((step for step in found if step is not None), None)


def _whole(value: Any) -> int | None:
    if isinstance(value, torch.Tensor | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    return value if type(value) is int and value >= 0 else None


def _step_named(path: Path) -> int | None:
    numbers = _NAMED.findall(path.stem.lower()) or re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else None


# ---- folders


def _folder(path: Path) -> tuple[str, Any, int | None]:
    if (path / ".metadata").is_file():
        state = _distributed(path)
        return "torch.distributed.checkpoint", state, _own_step(state)
    names = sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file())
    if not is_folder(names) or any(name.endswith(f"/{_PROGRESS}") for name in names):
        raise NoCheckpointError(
            f"{path} is a folder of none or several checkpoints ({', '.join(names[:3]) or 'empty'}): name files, folders of Hugging Face's"
            f" Trainer or of torch.distributed.checkpoint, or a pattern in quotes, as '{path}/*.ckpt' or '{path}/checkpoint-*'"
        )
    files = {name: _contents(path / name) for name in names}
    step = None
    if _PROGRESS in names:
        try:
            step = _whole(json.loads(files[_PROGRESS])["global_step"])
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path / _PROGRESS} is damaged: {error!r}") from error
    return "Hugging Face", files, step


def _contents(file: Path) -> Any:
    """The tensors of a file; the bytes of one without, such as the Trainer's arguments, which are a pickle of its classes."""
    if file.name != "training_args.bin" and file.suffix in _TORCH + _SAFETENSORS:
        return _file(file)
    return file.read_bytes()


def is_folder(keys: Any) -> bool:
    """Return whether these are the keys of an `Ordinary.state` that was a folder."""
    return any(key in (_PROGRESS, "optimizer.pt") or _WEIGHTS.fullmatch(str(key)) for key in keys or ())


def write_folder(state: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the files of a folder that was imported; the folder is new."""
    written = []
    for name, value in state.items():
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise FormatError(f"the checkpoint has a file {name!r}, which would lie outside of {folder}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, bytes):
            target.write_bytes(value)
        elif target.suffix == ".safetensors":
            save_file(
                {key: tensor.clone() for key, tensor in value.items()}, target, metadata={"format": "pt"}
            )
        else:
            torch.save(value, target)
        written.append(target)
    return written


_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                 "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}  # fmt: skip


class _Metadata(pickle.Unpickler):
    """Reads the table of a distributed checkpoint, and no class that is not in it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise FormatError(f"it is a pickle that needs {module}.{name}, which may execute code: not read")


def _distributed(path: Path) -> Any:
    """Read a folder of torch.distributed.checkpoint, whose own reader would execute what its pickles say."""
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            found: Metadata = _Metadata(BytesIO((path / ".metadata").read_bytes())).load()
            found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    class Planner(_EmptyStateDictLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
            name = read_item.dest_index.fqn
            set_element(self.original_state_dict, self.mappings[name], _unpickled(value, f"{name} in {path}"))

    state: dict[str, Any] = {}
    planner: Callable[[], Any] = Planner  # untyped in torch
    try:
        _load_state_dict(state, storage_reader=Reader(path), planner=planner(), no_dist=True)
    except (Exception, CheckpointException) as error:
        failures = [*error.failures.values()] if isinstance(error, CheckpointException) else []
        cause = failures[0][0] if failures else error
        if isinstance(cause, FormatError):
            raise FormatError(f"{path}: {cause}") from error
        raise FormatError(
            f"{path} is damaged, or more than tensors and plain values: {_first_line(cause)}"
        ) from error
    return state


# ---- roles


def describe_state(state: Any) -> Describe:
    """Return the roles of a checkpoint's tensors as far as its names and shapes show them: of the model's, and of the optimizers' known to do what
    Adam and SGD do. Parameters that an optimizer numbers are found by the order of their shapes.

    Args:
        state: as `read_ordinary` gives it.
    """
    dicts = list(_dicts(state, ()))
    optimizers = [(path, found) for path, found in dicts if _is_optimizer(found)]
    rest = [(path, found) for path, found in dicts if not any(path[: len(of)] == of for of, _ in optimizers)]
    model = {
        (*path, str(key)): value
        for path in _model_paths(rest)
        for key, value in dict(rest).get(path, {}).items()
        if isinstance(value, torch.Tensor)
    }
    tags: dict[Place, Tag] = {}
    trained: set[str] = set()
    for number, (path, optimizer) in enumerate(optimizers):
        names = _parameters(optimizer, model, number)
        trained |= set(names.values())
        for group in optimizer["param_groups"]:
            for key in group["params"]:
                entries = optimizer["state"].get(key, {})
                for name, tensor in entries.items() if isinstance(entries, Mapping) else ():
                    place = (*path, "state", str(key), str(name))
                    tags[place] = _moment(str(name), tensor, group, names[key])
    whole = not any(path[-1] in trained for path in model)  # nothing shows which are trained
    for path, tensor in model.items():
        is_weight = path[-1] in trained or (whole and not path[-1].endswith(_BUFFERS))
        role = Role.WEIGHT if is_weight and tensor.dtype in TRAINED else Role.BUFFER
        tags[path] = Tag(role=role, layer_type=_layer(path[-1], tensor), parameter=path[-1])
    return lambda path, tensor: tags.get(path, Tag())


def _dicts(value: Any, path: Place) -> Iterator[tuple[Place, Mapping[Any, Any]]]:
    if isinstance(value, Mapping):
        yield path, value
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for key, item in items:
        yield from _dicts(item, (*path, str(key)))


def _is_optimizer(value: Mapping[Any, Any]) -> bool:
    return isinstance(value.get("param_groups"), list) and isinstance(value.get("state"), Mapping)


def _model_paths(dicts: Sequence[tuple[Place, Mapping[Any, Any]]]) -> list[Place]:
    """Return where the model's tensors are: in files of weights, under a usual name, or in the dict with the most elements."""
    sizes = {
        path: sum(v.numel() for v in found.values() if isinstance(v, torch.Tensor)) for path, found in dicts
    }
    files: list[Place] = [path for path in sizes if len(path) == 1 and _WEIGHTS.fullmatch(path[0])]
    usual = [path for path in sizes if path and path[-1] in _MODELS and sizes[path] and len(path) <= 2]
    return files or usual[:1] or sorted(sizes, key=lambda path: -sizes[path])[:1]


def _parameters(
    optimizer: Mapping[str, Any], model: Mapping[Place, torch.Tensor], number: int
) -> dict[Any, str]:
    """Return the name of each parameter of an optimizer's groups: its own, that which the group has, or the next one of its shape."""
    left = {path[-1]: tuple(tensor.shape) for path, tensor in sorted(model.items(), key=_order)}
    names: dict[Any, str] = {}
    for group in optimizer["param_groups"]:
        own = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        place = iter([*left])
        for key in group["params"]:
            shape = _shape(optimizer["state"].get(key))
            near = own.get(key, key) if isinstance(own.get(key, key), str) else None
            if near is None and shape is not None:
                near = next((name for name in place if name in left and left[name] == shape), None)
            names[key] = near if near in left else f"optimizers[{number}][{key}]"
            left.pop(names[key], None)
    return names


def _order(item: tuple[Place, torch.Tensor]) -> list[Any]:
    """A model's own order; of a safetensors file, which sorts names, that of the numbers in them."""
    if not item[0][0].endswith(".safetensors"):
        return []
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", item[0][-1])]


def _shape(entries: Any) -> tuple[int, ...] | None:
    values = entries.values() if isinstance(entries, Mapping) else ()
    return next((tuple(v.shape) for v in values if isinstance(v, torch.Tensor) and v.dim()), None)


def _moment(key: str, tensor: Any, group: Mapping[str, Any], name: str) -> Tag:
    if not isinstance(tensor, torch.Tensor) or not tensor.dim() or tensor.dtype not in TRAINED:
        return Tag()
    role = named_role(key)
    if role is None or not _KNOWN & group.keys():
        return Tag(parameter=name, why=_UNKNOWN)
    return Tag(role=role, layer_type=LayerType.LINEAR, parameter=name)


def _layer(name: str, tensor: torch.Tensor) -> LayerType:
    words = name.lower()
    if any(word in words for word in ("embed", "wte", "wpe")):
        return LayerType.EMBEDDING
    if "attn" in words or "attention" in words:
        return LayerType.ATTENTION
    if tensor.dim() == 1:
        return LayerType.NORM if "norm" in words or "ln" in words else LayerType.OTHER
    return LayerType.CONV if tensor.dim() > 2 else LayerType.LINEAR


# ---- comparing


def difference(
    one: Any,
    other: Any,
    note: Callable[[str], object],
    rounded: Callable[[Place, torch.Tensor], bool] = lambda *_: False,
    path: Place = (),
) -> str | None:
    """Return where two states differ, bit by bit; None where they are the same.

    Args:
        one: the original.
        other: what was read back.
        note: called with each kind of value that has come back as a plainer one.
        rounded: whether the values of a tensor may differ.
        path: of both, in the whole.
    """
    inner: list[tuple[str, Any, Any]] = []
    if type(one) is not type(other) and not isinstance(one, (type(other), bytearray)):
        same = False
    elif isinstance(one, torch.Tensor):
        same = (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        same = same and (rounded(path, one) or all(map(_same_bits, _parts(one), _parts(other))))
    elif isinstance(one, np.ndarray | np.generic):
        same = (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, Mapping):
        same, inner = [*one] == [*other], [(str(key), one[key], other.get(key)) for key in one]
    elif isinstance(one, list | tuple):
        same = len(one) == len(other)
        inner = [(str(index), *pair) for index, pair in enumerate(zip(one, other, strict=False))]
    elif isinstance(one, float):
        same = struct.pack("d", one) == struct.pack("d", other)
    else:
        same = one == other
    if not same:
        return f"{join_path(path) or 'the state'} was read back as another {type(other).__name__}"
    if type(one) is not type(other):
        note(f"{type(one).__name__} as {type(other).__name__}")
    found = (difference(first, second, note, rounded, (*path, key)) for key, first, second in inner)
    return next((text for text in found if text is not None), None)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return np.array_equal(tensor_to_bytes(one), tensor_to_bytes(other))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.detach()]
