"""Exports a restored state as an ordinary file: ``.ckpt``/``.pt`` for ``torch.load(weights_only=True)``, or
safetensors.

It is independent of frameworks: a ``.ckpt`` contains the nested state as it was given to the saver, which the framework
that wrote it can read. The few types that torch's safe loader refuses become plain types, and every such change is
reported.
"""

import os
import secrets
import shutil
import stat
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shrinkpoint.errors import CannotRepresentError, ConfigError, StoreError
from shrinkpoint.state.dtypes import PACKED
from shrinkpoint.state.training import Role, TrainingState
from shrinkpoint.state.tree import join_path

__all__ = ["SUFFIXES", "Exported", "export", "model_places", "model_tensors", "put_in_place", "to_loadable"]

SUFFIXES = (".ckpt", ".pt", ".safetensors")
"""What `export` writes, by the file's suffix."""

_Path = tuple[str, ...]
_AVERAGED: _Path = ("state_dict",)

_MAX_INT_BITS = 255 * 8 - 1  # capacity of pickle's LONG1, the only long integer that the safe loader reads


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The written file; of weights in several files, their index.

    Examples:
        >>> from shrinkpoint.io.export import export
        >>> exported = export(shrinkpoint.Saver("runs/7").restore().state, "model.safetensors")
        >>> exported.tensors, exported.notes
        (4, ())
    """

    path: Path
    """The file."""
    bytes: int
    """Its size."""
    tensors: int
    """Different tensors in the file; tied ones count once."""
    notes: tuple[str, ...]
    """Messages about values that had to change."""
    step: int | None = None
    """Of the checkpoint, where the weights of a stored one were written."""
    seq: int | None = None
    """Number of its commit; None of a single file."""
    files: tuple[Path, ...] = ()
    """With the tensors, where several files may be written."""


def export(state: TrainingState, path: str | os.PathLike[str], *, force: bool = False) -> Exported:
    """Write a state to one local file, which appears whole or not at all.

    Args:
        state: as restored; its tensors are on the host.
        path: ``*.ckpt`` or ``*.pt``: everything, for ``torch.load(weights_only=True)``; ``*.safetensors``: the
            model's weights and buffers.
        force: replace an existing file.

    Raises:
        ConfigError: the suffix is another one, or the file exists and `force` is not given.
        CannotRepresentError: the state contains a value that such a file cannot; the message names it.
        StoreError: the file cannot be written.

    Examples:
        >>> from shrinkpoint.io.export import export
        >>> restored = shrinkpoint.Saver("runs/7").restore(2000)
        >>> exported = export(restored.state, "step-2000.ckpt")
        >>> torch.load("step-2000.ckpt", weights_only=True)["step"]
        2000
    """
    target, state = check_target(path, force=force), state.whole()
    if target.suffix == ".safetensors":
        tensors, aliases = model_tensors(state)
        notes = tuple(
            f"{alias} is tied to {kept}, which contains the tensor" for alias, kept in aliases.items()
        )
        write, count = _safetensors_writer(tensors, aliases), len(tensors)
    else:
        value, notes = to_loadable(state.to_object())
        write, count = _torch_writer(value), len(state.tensors)
    size = write_whole(target, write, force=force)
    return Exported(path=target, bytes=size, tensors=count, notes=notes)


def check_target(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Refuse, before any work is done, a target that `export` could not write.

    Raises:
        ConfigError: see `export`.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(f"{text} is a URL: an export is a local file, copy it from there")
    target = Path(text).expanduser()
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"{text} must end in one of {', '.join(SUFFIXES)}, which chooses the format")
    if not target.parent.is_dir():
        raise ConfigError(f"the folder {target.parent} does not exist: create it first")
    if target.is_dir():
        raise ConfigError(f"{target} is a folder: name a file")
    if target.exists() and not force:
        raise _exists(target)
    return target


# ---- .ckpt and .pt


def to_loadable(state: Any) -> tuple[Any, tuple[str, ...]]:
    """A nested state in the types that ``torch.load(weights_only=True)`` accepts, and the changes made.

    numpy scalars become Python numbers, numpy arrays tensors, namespaces dicts, frozensets sets. Durations (timedeltas)
    are left out of dicts, so that whoever reads the file takes its own default, and are seconds elsewhere.

    Raises:
        CannotRepresentError: an object without a plain equivalent (numpy dates); the message names its place.
    """
    changes: dict[str, list[str]] = {}

    def note(path: _Path, what: str) -> None:
        changes.setdefault(what, []).append(join_path(path) or "the state")

    value = _convert(state, (), note)
    return value, tuple(f"{what}: {_listed(places)}" for what, places in changes.items())


_PLAIN: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (Enum, "enums are written as their values", lambda value: value.value),
    (BytesIO, "files are written as bytes", BytesIO.getvalue),
    (Namespace, "namespaces are written as dicts", vars),
    (np.ndarray, "numpy arrays are written as tensors", torch.from_numpy),
    (np.generic, "numpy scalars are written as Python numbers", np.generic.item),
    (timedelta, "timedeltas are written as seconds", timedelta.total_seconds),
)


def _convert(value: Any, path: _Path, note: Callable[[_Path, str], None]) -> Any:
    if isinstance(value, np.datetime64 | np.timedelta64):
        raise _refuse(value, path)
    for kind, what, plain in _PLAIN:
        if isinstance(value, kind):
            note(path, what)
            return _convert(plain(value), path, note)
    if is_dataclass(value) and not isinstance(value, type):
        note(path, "dataclasses are written as dicts")
        return _convert({each.name: getattr(value, each.name) for each in fields(value)}, path, note)
    if type(value).__module__.startswith("omegaconf."):
        note(path, "OmegaConf's containers are written as dicts and lists")
        return _convert(sys.modules["omegaconf"].OmegaConf.to_container(value), path, note)
    if isinstance(value, Mapping):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        kept = {key: item for key, item in value.items() if not isinstance(item, timedelta)}
        for key in value.keys() - kept.keys():
            note(
                (*path, str(key)), "timedeltas are left out of dicts, for a number could not take their place"
            )
        return kind(
            (_convert_key(key, path, note), _convert(item, (*path, str(key)), note))
            for key, item in kept.items()
        )
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        return kind(_convert(item, (*path, str(index)), note) for index, item in enumerate(value))
    if isinstance(value, (set, frozenset)):
        if isinstance(value, frozenset):
            note(path, "frozensets are written as sets")
        return {_convert_key(item, path, note) for item in value}
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise _refuse(value, path)
    if isinstance(value, bytes) and not value:
        note(path, "empty bytes are written as an empty bytearray")
        return bytearray()
    if isinstance(value, torch.Tensor) and value.dtype in PACKED:
        raise _refuse(value, path)
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device)
    ):
        return value
    raise _refuse(value, path)


def _convert_key(value: Any, path: _Path, note: Callable[[_Path, str], None]) -> Any:
    """Keys and members of sets stay hashable."""
    if isinstance(value, frozenset) or (
        isinstance(value, bytes) and not value
    ):  # their plain equivalents, a set and a bytearray, cannot be hashed
        raise _refuse(value, path)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_convert_key(item, path, note) for item in value)
    return _convert(value, path, note)


def _refuse(value: object, path: _Path) -> CannotRepresentError:
    return CannotRepresentError(
        f"{join_path(path) or 'the state'} contains a {type(value).__module__}.{type(value).__qualname__}, which"
        " torch.load(weights_only=True) refuses: export to .safetensors for the weights alone, or keep numbers and"
        " strings in the state"
    )


def _listed(places: list[str]) -> str:
    return ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")


def _torch_writer(value: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        torch.save(value, path)
        try:  # verify that this torch's safe loader accepts the file, as promised
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise CannotRepresentError(
                f"torch {torch.__version__} does not load this state with weights_only=True ({error}): export to"
                " .safetensors for the weights alone"
            ) from error

    return write


# ---- safetensors


def model_tensors(state: TrainingState) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The model's weights and buffers by their names in the model, as `model_places`, in memory of their own.

    Raises:
        CannotRepresentError: see `model_places`; or one of them is sparse.
    """
    tensors, aliases = model_places(state)
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise CannotRepresentError(f"{name} is sparse, which safetensors does not know: export to .ckpt")
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, aliases


def model_places(state: TrainingState) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The model's weights and buffers by their names in the model, and tied names by the name that has the tensor.

    The tensors are the state's own, which may be meta tensors. The model's part is found by the tensors' roles; an
    average stored in its place is taken instead. In a state that was
    saved without roles, it is the dict ``state_dict`` or ``model``, or the state itself where that is a flat dict of tensors.

    Raises:
        CannotRepresentError: no weights are found, or two have the same name.
    """
    places = list(_tensor_places(state.to_object(own_tensors=True), ()))
    names = {id(tensor): name for name, tensor in state.tensors.items()}
    wanted = {name for name, spec in state.specs.items() if spec.tag.role in (Role.WEIGHT, Role.BUFFER)}
    if any(spec.tag.role is Role.WEIGHT for spec in state.specs.values()):
        first: dict[str, _Path] = {}
        for path, tensor in places:
            if names.get(id(tensor)) in wanted:
                first.setdefault(names[id(tensor)], path)
        folder = _common_folder(list(first.values()))
        chosen = [(path, tensor) for path, tensor in places if names.get(id(tensor)) in wanted]
        if _is_averaged(state):
            folder, chosen = _AVERAGED, places
    else:
        folder = _folder_without_roles(state.to_object(own_tensors=True))
        chosen = places
    return _named([(path[len(folder) :], t) for path, t in chosen if path[: len(folder)] == folder])


def _is_averaged(state: TrainingState) -> bool:
    """Return whether an average is stored in the model's place (Lightning's ``WeightAveraging``)."""
    start = "/".join(_AVERAGED) + "/"
    specs = state.specs.items()
    return any(spec.tag.role is Role.AVERAGE and name.startswith(start) for name, spec in specs)


def _tensor_places(value: Any, path: _Path) -> Iterator[tuple[_Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensor_places(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensor_places(item, (*path, str(index)))


def _common_folder(paths: list[_Path]) -> _Path:
    folder = paths[0][:-1]
    for path in paths[1:]:
        same = [a == b for a, b in zip(folder, path[:-1], strict=False)]
        folder = folder[: same.index(False) if False in same else len(same)]
    return folder


def _folder_without_roles(state: Any) -> _Path:
    if isinstance(state, Mapping):
        for key in ("state_dict", "model"):
            part = state.get(key)
            if isinstance(part, Mapping) and any(isinstance(item, torch.Tensor) for item in part.values()):
                return (key,)
        if state and all(isinstance(item, torch.Tensor) for item in state.values()):
            return ()
    raise CannotRepresentError(
        "the state does not show which of its tensors are the model's weights (it was saved without roles, and has no"
        " state_dict): export to .ckpt, which contains everything"
    )


def _named(chosen: list[tuple[_Path, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    kept: dict[int, str] = {}
    for path, tensor in chosen:
        name = ".".join(path)
        if name in tensors or name in aliases:
            raise CannotRepresentError(f"two tensors of the model would be called {name!r}")
        if id(tensor) in kept:
            aliases[name] = kept[id(tensor)]
        else:
            kept[id(tensor)] = name
            tensors[name] = tensor
    return tensors, aliases


def _safetensors_writer(
    tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        # Tied names are stored in the metadata, as safetensors.torch.save_model writes and load_model resolves them.
        try:
            save_file(dict(tensors), path, metadata={"format": "pt", **aliases})
        except (SafetensorError, KeyError, ValueError) as error:
            if "I/O error" in str(error):
                raise OSError(str(error)) from error
            raise CannotRepresentError(
                f"safetensors cannot store this model ({error}): export to .ckpt"
            ) from error

    return write


# ---- the file


def write_whole(target: Path, write: Callable[[Path], object], *, force: bool) -> int:
    """Write to a temporary file next to the target, sync, rename; returns the size in bytes."""
    temporary = target.parent / f".{target.name}.tmp-{secrets.token_hex(8)}"
    try:
        with temporary.open("xb"):
            mode = stat.S_IMODE(temporary.stat().st_mode)
        write(temporary)
        temporary.chmod(mode)  # safetensors renames a file over it that only its owner may read
        size = temporary.stat().st_size
        put_in_place(temporary, target, force=force)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror or error}") from error
    except RuntimeError as error:  # torch.save's writer turns a full disk into one
        free = shutil.disk_usage(target.parent).free
        raise StoreError(
            f"cannot write {target}: torch.save failed, as it does on a full disk ({free} bytes are free there): {error}"
        ) from error
    finally:
        with suppress(OSError):  # the original error is the one to show
            temporary.unlink()
    return size


def put_in_place(temporary: Path, target: Path, *, force: bool) -> None:
    """Give a written file its name, once it is on the disk.

    Raises:
        ConfigError: the target exists, and `force` is not given.
        OSError: it cannot be done.
    """
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    if not force:
        try:
            os.link(temporary, target)  # unlike a rename, never replaces a file that appeared meanwhile
            return
        except FileExistsError:
            raise _exists(target) from None
        except OSError:  # a file system without hard links
            if target.exists():
                raise _exists(target) from None
    os.replace(temporary, target)


def _exists(target: Path) -> ConfigError:
    return ConfigError(
        f"{target} exists already: choose another name, or give --force (force=True) to replace it"
    )
