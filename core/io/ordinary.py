"""Reads checkpoints that other programs wrote, without executing anything: files of torch.save (Lightning's and Composer's among
them) and safetensors, folders of Hugging Face's Trainer and of torch.distributed.checkpoint.

Pickles are read by torch's loader of plain values, with numpy's arrays and a few more plain types; others are refused.
"""

import errno
import json
import pickle
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.torch_version import TorchVersion

from shrinkpoint.errors import FormatError, NoCheckpointError, StoreError
from shrinkpoint.state.dtypes import TRAINED
from shrinkpoint.state.roles import named_role
from shrinkpoint.state.training import Describe, LayerType, Role, Tag
from shrinkpoint.state.tree import Path as Place

_TENSORS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)[^/]*\.(safetensors|bin)")
_PROGRESS = "trainer_state.json"
_MODELS = ("state_dict", "model", "model_state_dict", "module")
_STEPS = ("global_step", "step", "global_steps", "iteration", "iter", "num_steps")
_NAMED = re.compile(r"(?:step|checkpoint|ckpt|iter|ba|batch)[-_=]?(\d+)")
_BUFFERS = ("running_mean", "running_var", "inv_freq")
_LAYERS = {
    "embed|wte|wpe": LayerType.EMBEDDING,
    "attn|attention": LayerType.ATTENTION,
    "norm|ln": LayerType.NORM,
}
# Entries of the groups of Adam and its kin, and of SGD: of others the file does not say how they use their state.
_KNOWN = {"amsgrad", "bias_correction", "correct_bias", "dampening"}
_UNKNOWN = "the file does not say which optimizer this is; a training that is saved by shrinkpoint is asked"

_RUNS = {
    "posix",
    "nt",
    "os",
    "subprocess",
    "builtins",
    "sys",
    "shutil",
    "socket",
    "runpy",
    "pty",
    "webbrowser",
}
"""Modules of functions that no checkpoint calls."""

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
    try:
        if not path.exists():
            raise NoCheckpointError(f"there is no file and no folder {path}")
        if path.is_dir():
            kind, state, step = _folder(path)
        else:
            state = _file(path)
            kind, step = _kind(path, state), _own_step(state)
        size = sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file())
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    step = _step_named(path) if step is None else step
    return Ordinary(path=path, kind=kind, state=state, step=step, bytes=size)


def _file(path: Path) -> Any:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise FormatError(
                f"{path} is damaged, or no safetensors file: {error}. Take another copy"
            ) from error
    return _unpickled(path, str(path))


def _unpickled(file: Any, shown: str) -> Any:
    """Return what torch's loader of plain values gives.

    Raises:
        FormatError: it refuses.
    """
    try:
        with torch.serialization.safe_globals(_SAFE), warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            mapped = isinstance(file, Path) and zipfile.is_zipfile(file)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a cut or foreign file makes torch raise anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        refused = re.search(r"(?:GLOBAL|class) ([\w.]*\w)", str(error))
        if any("pickle protocol" in str(each.message) for each in noted):
            text = f"{shown} is a pickle that torch.save has not written, and may execute code: not read. If you trust it, save it by torch.save"
            raise FormatError(text) from error
        if refused is None or not isinstance(error, pickle.UnpicklingError):
            text = f"{shown} is damaged, cut short, or not a file of torch.save: {_first_line(error)}"
            raise FormatError(text) from error
        if refused[1].partition(".")[0] in _RUNS:
            raise FormatError(
                f"{shown} is a pickle that calls {refused[1]} when it is loaded: not read. Do not load it"
            ) from error
        raise FormatError(
            f"{shown} is a pickle that needs {refused[1]}, which is no plain value and may execute code: not read. If you trust it, let the"
            " program that wrote it save plain values instead; or allow a class, in Python: torch.serialization.add_safe_globals([...]),"
            " then shrinkpoint.cli.app.app([...]) with this command's words"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _kind(path: Path, state: Any) -> str:
    if path.suffix == ".safetensors":
        return "safetensors"
    if isinstance(state, Mapping) and "pytorch-lightning_version" in state:
        return "Lightning"
    return "Composer" if is_composers(state) else "torch.save"


def is_composers(state: Any) -> bool:
    """Return whether a state is one of Composer's own files: it has durations, which only ``weights_only=False`` reads."""
    return (
        isinstance(state, Mapping)
        and {"state", "rng"} == state.keys()
        and isinstance(state["state"], Mapping)
    )


# ---- the step


def _own_step(state: Any) -> int | None:
    if not isinstance(state, Mapping):
        return None
    if is_composers(state):
        return _whole(state["state"].get("timestamp", {}).get("Timestamp", {}).get("batch"))
    return next((step for name in _STEPS if (step := _whole(state.get(name))) is not None), None)


def _whole(value: Any) -> int | None:
    if isinstance(value, torch.Tensor | np.generic) and list(value.shape) in ([], [1]):
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
            f" Trainer or of torch.distributed.checkpoint, or, to import, a pattern in quotes, as '{path}/*{Path(names[0]).suffix if names else '.ckpt'}' or '{path}/checkpoint-*'"
        )
    files = {name: _contents(path / name) for name in names}
    try:
        progress = json.loads(files.get(_PROGRESS, "{}"))
    except ValueError as error:
        raise FormatError(f"{path / _PROGRESS} is damaged: {error!r}") from error
    return "Hugging Face", files, _own_step(progress)


def _contents(file: Path) -> Any:
    """Return the tensors of a file; the bytes of one without, such as the Trainer's arguments, which are a pickle of its classes."""
    if file.name != "training_args.bin" and file.suffix in _TENSORS:
        return _file(file)
    return file.read_bytes()


def is_folder(keys: Any) -> bool:
    """Return whether these are the keys of an `Ordinary.state` that was a folder."""
    return any(key in (_PROGRESS, "optimizer.pt") or _WEIGHTS.fullmatch(str(key)) for key in keys or ())


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}  # fmt: skip


class _Metadata(pickle.Unpickler):
    """Reads the table of a distributed checkpoint, and no class that is not in it."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
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
    model = _model([each for each in dicts if not any(each[0][: len(of)] == of for of, _ in optimizers)])
    tags: dict[Place, Tag] = {}
    trained: set[str] = set()
    for number, (path, optimizer) in enumerate(optimizers):
        for key, name, group in _parameters(optimizer, model, f"optimizers[{number}]"):
            trained.add(name)
            for entry, tensor in _entries(optimizer, key).items():
                place = *path, "state", str(key), str(entry)
                tags[place] = _moment(str(entry), tensor, group, name)
    whole = trained.isdisjoint(path[-1] for path in model)  # nothing shows which are trained
    for path, tensor in model.items():
        name = path[-1]
        is_weight = name in trained or (whole and not name.endswith(_BUFFERS))
        role = Role.WEIGHT if is_weight and tensor.dtype in TRAINED else Role.BUFFER
        usual = LayerType.CONV if tensor.dim() > 2 else LayerType.LINEAR
        layer = next((layer for words, layer in _LAYERS.items() if re.search(words, name.lower())), usual)
        tags[path] = Tag(role=role, layer_type=layer, parameter=name)
    return lambda path, tensor: tags.get(path, Tag())


def _dicts(value: Any, path: Place) -> Iterator[tuple[Place, Mapping[Any, Any]]]:
    if isinstance(value, Mapping):
        yield path, value
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    else:
        return
    for key, item in value.items():
        yield from _dicts(item, (*path, str(key)))


def _is_optimizer(value: Mapping[Any, Any]) -> bool:
    return isinstance(value.get("param_groups"), list) and isinstance(value.get("state"), Mapping)


def _model(dicts: Sequence[tuple[Place, Mapping[Any, Any]]]) -> dict[Place, torch.Tensor]:
    """Return the model's tensors: of files of weights, else of the dict that has a usual name, or the most elements."""
    known = {
        path: {(*path, str(key)): v for key, v in found.items() if torch.is_tensor(v)}
        for path, found in dicts
    }
    files = {name: known[path] for path in known if len(path) == 1 and _WEIGHTS.fullmatch(name := path[0])}
    if files:  # a safetensors file sorts names as text: the order of the numbers in them is the model's
        found = {path: tensor for tensors in files.values() for path, tensor in tensors.items()}
        return dict(sorted(found.items(), key=lambda item: _numbers(*item[0])))

    def rank(path: Place) -> tuple[bool, int]:
        usual = path[-1:] and path[-1] in _MODELS and len(path) <= 2 and known[path]
        return bool(usual), sum(tensor.numel() for tensor in known[path].values())

    return known[max(known, key=rank)] if known else {}


def _numbers(file: str, name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name) if file.endswith(".safetensors") else []
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _parameters(
    optimizer: Mapping[str, Any], model: Mapping[Place, torch.Tensor], outside: str
) -> Iterator[tuple[Any, str, Mapping[str, Any]]]:
    """Yield each parameter of an optimizer's groups, its name, and its group: named by the optimizer, or the model's next one of its shape, else any."""
    left = {path[-1]: tensor.shape for path, tensor in model.items()}
    for group in optimizer["param_groups"]:
        own = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        following = iter([*left])
        for key in group["params"]:
            name = own.get(key, key)
            shape = next(
                (v.shape for v in _entries(optimizer, key).values() if torch.is_tensor(v) and v.dim()), None
            )
            if not isinstance(name, str) and shape is not None:
                name = next((each for each in chain(following, left) if left.get(each) == shape), None)
            if left.pop(name, None) is None:
                name = f"{outside}[{key}]"
            yield key, name, group


def _entries(optimizer: Mapping[str, Any], key: Any) -> Mapping[Any, Any]:
    found = optimizer["state"].get(key)
    return found if isinstance(found, Mapping) else {}


def _moment(key: str, tensor: Any, group: Mapping[str, Any], name: str) -> Tag:
    if not torch.is_tensor(tensor) or not tensor.dim() or tensor.dtype not in TRAINED:
        return Tag()
    role = named_role(key)
    if role is None or not _KNOWN & group.keys():
        return Tag(parameter=name, why=_UNKNOWN)
    return Tag(role=role, layer_type=LayerType.LINEAR, parameter=name)
