"""Exports a restored state as an ordinary file: ``.ckpt``/``.pt`` for ``torch.load(weights_only=True)``, or safetensors.

A ``.ckpt`` contains the nested state as it was given to the saver, which the framework that wrote it can read. The few types that
torch's safe loader refuses become plain types, and every such change is reported.

Safetensors files are written some tensors at a time, so that a model larger than memory can be exported: the package takes all tensors
of a file at once. The format is https://github.com/huggingface/safetensors#format: eight bytes of length, a JSON header, the bytes.
"""

import json
import os
import re
import secrets
import shutil
import struct
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from shrinkpoint.coding.selective import decode_batches, decode_selected
from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError, StoreError
from shrinkpoint.io.loading import Chain, model_names, model_places, read_chain
from shrinkpoint.io.ordinary import is_composers, is_folder
from shrinkpoint.state.dtypes import PACKED, tensor_to_bytes
from shrinkpoint.state.frozen import ADAPTERS
from shrinkpoint.state.specs import whole_specs
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import Path as Place
from shrinkpoint.state.tree import join_path

if TYPE_CHECKING:
    from shrinkpoint.container.reader import Header
    from shrinkpoint.store.connect import StorageOptions
    from shrinkpoint.store.urls import RunUrl

SUFFIXES = (".ckpt", ".pt", ".safetensors")
"""What `export` writes, by the file's suffix."""

_COMPOSERS = "as Composer wrote it, with durations and arrays, which torch.load(weights_only=True) refuses"
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
        size = _write_tensors(target, tensors, aliases, force=force)
        return Exported(path=target, bytes=size, tensors=len(tensors), notes=_ties(aliases))
    value = state.to_object()
    own = is_composers(
        value
    )  # which no loader of plain values reads, and Composer would miss what was converted
    value, notes = (value, (_COMPOSERS,)) if own else to_loadable(value)
    size = write_whole(target, partial(_write_torch, value, not own), force=force)
    return Exported(path=target, bytes=size, tensors=len(state.tensors), notes=notes)


def check_target(path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Refuse, before any work is done, a target that `export` could not write.

    Raises:
        ConfigError: see `export`.
    """
    target = check_place(path)
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"{target} must end in one of {', '.join(SUFFIXES)}, which chooses the format")
    if target.exists() and not force:
        raise _exists(target)
    return target


def check_place(path: str | os.PathLike[str]) -> Path:
    """Return where a file may be written.

    Raises:
        ConfigError: it is a URL, a folder, or in a folder that does not exist.
    """
    target = Path(path).expanduser()
    if "://" in os.fspath(path):
        raise ConfigError(f"{path} is a URL: name a local file, and copy it from there")
    if not target.parent.is_dir():
        raise ConfigError(f"the folder {target.parent} does not exist: create it first")
    if target.is_dir():
        raise ConfigError(f"{target} is a folder: name a file")
    return target


# ---- .ckpt and .pt


def to_loadable(state: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a nested state in the types that ``torch.load(weights_only=True)`` accepts, and the changes made.

    numpy scalars become Python numbers, numpy arrays tensors, namespaces dicts, frozensets sets. Durations (timedeltas)
    are left out of dicts, so that whoever reads the file takes its own default, and are seconds elsewhere.

    Raises:
        CannotRepresentError: an object without a plain equivalent (numpy dates); the message names its place.
    """
    changes: dict[str, list[str]] = {}

    def note(path: Place, what: str) -> None:
        changes.setdefault(what, []).append(join_path(path) or "the state")

    value = _convert(state, (), note)
    return value, tuple(f"{what}: {_listed(places)}" for what, places in changes.items())


_SAFE = (bool, int, float, complex, str, bytes, torch.Size, torch.Tensor, torch.dtype, torch.device)
_PLAIN: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (Enum, "enums are written as their values", lambda value: value.value),
    (BytesIO, "files are written as bytes", BytesIO.getvalue),
    (Namespace, "namespaces are written as dicts", vars),
    (np.ndarray, "numpy arrays are written as tensors", torch.from_numpy),
    (np.generic, "numpy scalars are written as Python numbers", np.generic.item),
    (timedelta, "timedeltas are written as seconds", timedelta.total_seconds),
)


def _convert(value: Any, path: Place, note: Callable[[Place, str], None]) -> Any:
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
        kept = {key: item for key, item in value.items() if not isinstance(item, timedelta)}
        for key in value.keys() - kept.keys():
            note(
                (*path, str(key)), "timedeltas are left out of dicts, for a number could not take their place"
            )
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        convert = partial(_convert, note=note)
        return kind(
            (_convert_key(key, path, note), convert(item, (*path, str(key)))) for key, item in kept.items()
        )
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        kind = list if isinstance(value, list) else tuple
        return kind(_convert(item, (*path, str(index)), note) for index, item in enumerate(value))
    if isinstance(value, set | frozenset):
        if isinstance(value, frozenset):
            note(path, "frozensets are written as sets")
        return {_convert_key(item, path, note) for item in value}
    if isinstance(value, bytes) and not value:
        note(path, "empty bytes are written as an empty bytearray")
        return bytearray()
    fits = (
        value.bit_length() <= _MAX_INT_BITS
        if isinstance(value, int)
        else getattr(value, "dtype", None) not in PACKED
    )
    if fits and (value is None or isinstance(value, _SAFE)):
        return value
    raise _refuse(value, path)


def _convert_key(value: Any, path: Place, note: Callable[[Place, str], None]) -> Any:
    """Keys and members of sets stay hashable."""
    if isinstance(value, frozenset) or (
        isinstance(value, bytes) and not value
    ):  # their plain equivalents, a set and a bytearray, are not
        raise _refuse(value, path)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_convert_key(item, path, note) for item in value)
    return _convert(value, path, note)


def _refuse(value: object, path: Place) -> CannotRepresentError:
    return CannotRepresentError(
        f"{join_path(path) or 'the state'} contains a {type(value).__module__}.{type(value).__qualname__}, which"
        " torch.load(weights_only=True) refuses: export to .safetensors for the weights alone, or keep numbers and"
        " strings in the state"
    )


def _listed(places: list[str]) -> str:
    return ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")


def _write_torch(value: Any, plain: bool, path: Path) -> None:
    torch.save(value, path)
    if not plain:
        return
    try:  # verify that this torch's safe loader accepts the file, as promised
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CannotRepresentError(
            f"torch {torch.__version__} does not load this state with weights_only=True ({error}): export to"
            " .safetensors for the weights alone"
        ) from error


# ---- safetensors


def model_tensors(state: TrainingState) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the model's weights and buffers by their names in the model, as `model_places`, in memory of their own.

    Raises:
        CannotRepresentError: see `model_places`; or one of them is sparse.
    """
    tensors, aliases = model_places(state)
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise CannotRepresentError(f"{name} is sparse, which safetensors does not know: export to .ckpt")
    return tensors, aliases


def _ties(aliases: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{alias} is tied to {kept}, which contains the tensor" for alias, kept in aliases.items())


def _write_tensors(
    target: Path, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], *, force: bool
) -> int:
    specs = {
        name: TensorSpec(name=name, dtype=of.dtype, shape=tuple(of.shape)) for name, of in tensors.items()
    }
    with _writing(target, [_Shard(target.name, specs, dict(aliases))], force=force) as writers:
        for name, tensor in tensors.items():
            writers[name].put(name, tensor)
    return target.stat().st_size


# ---- the file


def write_whole(target: Path, write: Callable[[Path], object], *, force: bool) -> int:
    """Write to a temporary file next to the target, sync, rename; returns the size in bytes."""
    temporary = target.parent / f".{target.name}.tmp-{secrets.token_hex(8)}"
    try:
        write(temporary)
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


# ---- the weights of a stored checkpoint, piece by piece

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class SafetensorsWriter:
    """One file, of which the tensors' names and sizes are known beforehand.

    Args:
        path: a new file.
        specs: by the tensors' names in the file; dtypes and shapes count.
        metadata: text by name.

    Raises:
        CannotRepresentError: the format has no such dtype.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._specs, self._at = specs, {}
        at = 0
        # as the package does: the largest elements first, so that each tensor is aligned
        for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
            spec = specs[name]
            if spec.dtype not in _NAMES:
                raise CannotRepresentError(
                    f"{name} is of {spec.dtype}, which safetensors does not know: export to .ckpt"
                )
            self._at[name], end = at, at + spec.nbytes
            header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._path, self._start = path, 8 + len(text)
        with path.open("xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            # here a full disk is an error, and in `put` a signal
            os.posix_fallocate(file.fileno(), 0, self._start + at)

    def put(self, name: str, tensor: torch.Tensor, offset: Sequence[int] | None = None) -> None:
        """Write a tensor, or a box of it.

        Args:
            name: of the whole tensor.
            tensor: the whole one, or the box; on the host.
            offset: first index of the box in each dimension; None for a whole tensor.

        Raises:
            OSError: the file cannot be written.
        """
        if not tensor.numel():
            return
        spec, size = self._specs[name], tensor.dtype.itemsize
        shape, at = (*spec.shape, size), self._start + self._at[name]
        place = np.memmap(self._path, np.uint8, "r+", at, shape)
        low = offset or [0] * tensor.dim()
        box = tuple(slice(first, first + count) for first, count in zip(low, tensor.shape, strict=True))
        place[box] = tensor_to_bytes(tensor).reshape(*tensor.shape, size)


_BATCH = 2**26
"""Bytes of tensors in memory, about: a batch that is decoded, and the next one, which is read meanwhile."""
_UNITS = {"": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}


@dataclass(frozen=True)
class _Shard:
    """One file of an export."""

    name: str
    specs: dict[str, TensorSpec]
    """By the tensors' names in the model."""
    aliases: dict[str, str]


def export_weights(
    url: "RunUrl",
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | None = None,
    force: bool = False,
    storage_options: "StorageOptions" = None,
) -> Exported:
    """Write the weights and buffers of a checkpoint; memory is bounded by the largest tensor and some buffers.

    Args:
        url: as of `shrinkpoint.load_weights`.
        path: ``*.safetensors``.
        max_shard_size: bytes of tensors from which on several files are written in the place of `path`,
            ``model-00001-of-00002.safetensors`` ..., with an index ``model.safetensors.index.json``; a larger tensor has a file of
            its own. None: one file.
        force: replace existing files.
        storage_options: as of `shrinkpoint.load_weights`.

    Raises:
        ConfigError: the path cannot be written, or exists and `force` is not given.
        CannotRepresentError: the state does not show which tensors are the model's, or safetensors has no such tensors.
        NoCheckpointError, FormatError, ChainError, StoreError: as `shrinkpoint.load_weights`; or a file cannot be written.

    Examples:
        >>> from shrinkpoint.io.export import export_weights
        >>> export_weights("runs/7#step=2000", "weights.safetensors").tensors
        4
    """
    target = check_target(path, force=force)
    if target.suffix != ".safetensors":
        raise ConfigError(f"{target} must end in .safetensors: other formats are written whole")
    if max_shard_size is not None and max_shard_size < 1:
        raise ConfigError(f"max_shard_size={max_shard_size} must be a number of bytes, at least 1")

    def read(chain: Chain) -> "tuple[Header, Exported]":
        stored: dict[str, str] = {}

        def choose(header: "Header") -> set[str]:
            stored.update(model_names(header))
            return set(stored.values())

        header, wanted, batches = decode_batches(
            chain, choose, threads=SaverConfig().encoder_threads, batch=_BATCH // 2, lasting=True
        )
        shards = _shards(target, header, stored, max_shard_size)
        places = {place: name for name, place in reversed(stored.items())}
        with _writing(target, shards, force=force) as writers:
            for rows in batches:
                for entry, planes, value in rows:
                    spec = entry.spec
                    if spec.name in wanted:
                        name = places[spec.whole]
                        writers[name].put(name, value, spec.block.offset if spec.block is not None else None)
                    del entry, planes, value  # before the next ones are decoded
        files = tuple(target.parent / shard.name for shard in shards)
        return header, Exported(
            path=target if len(files) == 1 else _index_of(target),
            bytes=sum(file.stat().st_size for file in files),
            tensors=sum(len(shard.specs) for shard in shards),
            notes=_ties({alias: kept for shard in shards for alias, kept in shard.aliases.items()}),
            step=header.step,
            files=files,
        )

    _, exported, manifest = read_chain(url, storage_options, read)
    return replace(exported, seq=None if manifest is None else manifest.seq)


def export_adapters(
    url: "RunUrl",
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    storage_options: "StorageOptions" = None,
) -> Exported:
    """Write a checkpoint's adapters as PEFT does, for ``PeftModel.from_pretrained(base, folder)``; of an imported folder its files.

    Args:
        url: as of `shrinkpoint.load_weights`.
        folder: gets ``adapter_config.json`` and ``adapter_model.safetensors``; adapters of another name than "default" have
            folders of that name in it.
        force: replace existing files.
        storage_options: as of `shrinkpoint.load_weights`.

    Raises:
        ConfigError: the checkpoint has no adapters, or files exist and `force` is not given.
        CannotRepresentError: PEFT computes what it writes of such adapters.
        NoCheckpointError, FormatError, ChainError, StoreError: as `shrinkpoint.load_weights`; or a file cannot be written.
    """
    root = Path(folder).expanduser()
    adapters: dict[Path, tuple[Any, dict[str, str]]] = {}

    def read(chain: Chain) -> "tuple[Header, dict[str, torch.Tensor]]":
        def choose(header: "Header") -> set[str]:
            adapters.clear()
            if is_folder(header.tree):
                return set(header.tensors)
            adapters.update(_adapters_of(header, root))
            return {place for _, tensors in adapters.values() for place in tensors.values()}

        return decode_selected(chain, choose, threads=SaverConfig().encoder_threads)

    header, found, manifest = read_chain(url, storage_options, read)
    files = []
    if is_folder(header.tree):
        if root.exists() and not force:
            raise ConfigError(f"{root} exists: give --force to write into it, or name another folder")
        files = _write_folder(TrainingState(header.tree, found, {}).to_object(), root)
    for inner, (config, tensors) in adapters.items():
        inner.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, indent=2, sort_keys=True)
        values = {name: found[place] for name, place in tensors.items()}
        files += [
            check_target(inner / "adapter_model.safetensors", force=force),
            inner / "adapter_config.json",
        ]
        _write_tensors(files[-2], values, {}, force=force)
        write_whole(files[-1], partial(Path.write_text, data=text), force=force)
    size, seq = sum(file.stat().st_size for file in files), None if manifest is None else manifest.seq
    return Exported(
        path=root, bytes=size, tensors=len(found), notes=(), step=header.step, seq=seq, files=tuple(files)
    )


def _write_folder(state: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the files of a folder that was imported."""
    for name, value in state.items():
        target = folder / name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise FormatError(f"the checkpoint has a file {name!r}, which would lie outside of {folder}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, bytes):
            write_whole(target, partial(Path.write_bytes, data=value), force=True)
        elif target.suffix == ".safetensors":
            _write_tensors(target, value, {}, force=True)
        else:
            write_whole(target, partial(torch.save, value), force=True)
    return [folder / name for name in state]


def _adapters_of(header: "Header", root: Path) -> dict[Path, tuple[Any, dict[str, str]]]:
    """By its folder, each adapter's configuration and the stored tensors by their names in its file."""
    described = header.tree.get(ADAPTERS, {}).get("adapters", {}) if isinstance(header.tree, dict) else {}
    if not described:
        raise ConfigError(
            f"the checkpoint has no adapters of PEFT, and was no folder: name {root}.pt for all of it, or {root}.safetensors for its weights"
        )
    names, found = model_names(header), {}
    for prefix, adapters in described.items():
        for adapter, entry in adapters.items():
            if entry["tensors"] is None:
                raise CannotRepresentError(
                    f"what PEFT writes of the adapter {adapter!r} is computed: load the checkpoint's weights into the model"
                    " (shrinkpoint.load_weights, strict=False), and call its save_pretrained"
                )
            parts = [prefix.strip(".") if len(described) > 1 else "", "" if adapter == "default" else adapter]
            if any(part != Path(part).name for part in parts):
                raise FormatError(f"the adapter {adapter!r} of {prefix!r} has a name that no folder may have")
            tensors = {name: names[here] for name, here in entry["tensors"].items()}
            found[root.joinpath(*parts)] = entry["config"], tensors
    return found


def bytes_of(text: str) -> int:
    """Return a size such as ``5GB``, ``500MiB`` or ``1000000``, in bytes.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is no size: write it as 5GB, 500MiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _index_of(target: Path) -> Path:
    return target.with_name(target.name + ".index.json")


def _shards(target: Path, header: "Header", stored: Mapping[str, str], limit: int | None) -> list[_Shard]:
    """Return which tensors are in which file, in the model's order."""
    whole = whole_specs(record.spec for record in header.tensors.values())
    kept: dict[str, str] = {}
    files: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, place in stored.items():
        if kept.setdefault(place, name) != name:
            continue
        spec = whole[place]
        if limit is not None and files[-1] and size + spec.nbytes > limit:
            files.append({})
            size = 0
        files[-1][name] = spec
        size += spec.nbytes
    shards = []
    for number, specs in enumerate(files, 1):
        name = f"{target.stem}-{number:05}-of-{len(files):05}{target.suffix}" if files[1:] else target.name
        tied = {alias: kept[place] for alias, place in stored.items() if kept[place] in specs}
        shards.append(_Shard(name, specs, {alias: own for alias, own in tied.items() if alias != own}))
    return shards


@contextmanager
def _writing(
    target: Path, shards: Sequence[_Shard], *, force: bool
) -> Iterator[Mapping[str, SafetensorsWriter]]:
    """Writers by tensor, to files next to the target that get their names when all are written, the index last."""
    nonce = secrets.token_hex(8)
    temporary = [target.parent / f".{shard.name}.tmp-{nonce}" for shard in shards]
    index = target.parent / f".{target.name}.index.tmp-{nonce}"
    try:
        writers: dict[str, SafetensorsWriter] = {}
        for file, shard in zip(temporary, shards, strict=True):
            # tied names are metadata, as safetensors.torch.save_model writes and load_model resolves them
            writer = SafetensorsWriter(file, shard.specs, {"format": "pt", **shard.aliases})
            writers.update(dict.fromkeys(shard.specs, writer))
        yield writers
        for file in temporary:
            with safe_open(file, framework="pt"):  # the package accepts it
                pass
        for file, shard in zip(temporary, shards, strict=True):
            put_in_place(file, target.parent / shard.name, force=force)
        if len(shards) > 1:
            index.write_text(_index(shards))
            put_in_place(index, _index_of(target), force=force)
            with suppress(FileNotFoundError):
                target.unlink()  # an older export in one file, which readers would prefer
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror or error}") from error
    except SafetensorError as error:
        text = f"safetensors does not accept this model ({error}): export to .ckpt"
        raise CannotRepresentError(text) from error
    finally:
        for file in (*temporary, index):
            with suppress(OSError):  # the original error is the one to show
                file.unlink()


def _index(shards: Sequence[_Shard]) -> str:
    """As Hugging Face's libraries write and read it."""
    size = sum(spec.nbytes for shard in shards for spec in shard.specs.values())
    files = {name: shard.name for shard in shards for name in shard.specs}
    return json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2)
