"""`StorageReader`: loads of `torch.distributed.checkpoint` from a run, in any layout."""

import io
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from shrinkpoint.coding.parts import PartsHeader
from shrinkpoint.coding.selective import decode_rows, header_of, sources_of_run
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.reader import Header
from shrinkpoint.dcp.contents import flat_nodes
from shrinkpoint.dcp.items import FlatPath
from shrinkpoint.dcp.run import note_read
from shrinkpoint.dcp.writer import step_of
from shrinkpoint.errors import ChainError, ConfigError, CorruptionError, FormatError, NoCheckpointError
from shrinkpoint.saving.address import Address
from shrinkpoint.state.blocks import whole_specs
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON, decode_tree, tensor_names
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl, url_text

__all__ = ["StorageReader"]

Offset = tuple[int, ...]


@dataclass(frozen=True)
class _Opened:
    """What is known of a checkpoint before any of its tensors is read."""

    manifest: Manifest
    nodes: Mapping[str, JSON]
    """The tree of each value, by name in the flat state."""
    paths: Mapping[str, FlatPath]
    specs: Mapping[str, TensorSpec]
    """Of the tensors as they are stored, by name."""
    chunks: Mapping[str, Mapping[Offset, str]]
    """By name of a whole tensor: the names of those that it is stored as, by where they begin."""
    places: tuple[Mapping[str, int], ...]
    """For each checkpoint of the chain, the part that has each tensor."""


class StorageReader(TorchStorageReader):
    """Where ``torch.distributed.checkpoint.load`` gets a checkpoint from: a run of this library.

    Each rank reads and decodes what its own shards overlap. The run may have been written by `StorageWriter` on other ranks
    or another mesh, or by a `Checkpointer`, whose state has the model under ``"model"``.

    Args:
        url: the run, of which the newest checkpoint is taken; or one checkpoint, such as ``<run>#step=100``.
        storage_options: passed to fsspec.
        threads: that decode; None takes half of the processors.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from shrinkpoint.dcp import StorageReader
        >>> state = {"model": model.state_dict(), "step": 0}
        >>> dcp.load(state, storage_reader=StorageReader("runs/dcp#step=100"))
        >>> state["step"]
        100
    """

    def __init__(
        self, url: RunUrl, *, storage_options: StorageOptions = None, threads: int | None = None
    ) -> None:
        text = url_text(url)
        self._address = Address.parse(text) or Address(url=text)
        self._store = RunStore(self._address.url, storage_options=storage_options)
        self._threads = SaverConfig(threads=threads).encoder_threads
        self._step: int | None = None
        self._found: _Opened | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load; called by torch.

        Args:
            checkpoint_id: as of `StorageWriter.reset`; None takes what the URL names.

        Raises:
            ConfigError: it names no step, or another one than the URL.
        """
        self._found = None
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)
        named = self._address.step
        if self._step is not None and (self._address.seq is not None or named not in (None, self._step)):
            raise ConfigError(f"checkpoint_id={checkpoint_id!r} and {self._address} name different checkpoints")

    def read_metadata(self, *args: Any) -> Metadata:
        """Which tensors the checkpoint has, and which boxes of them lie where; called by torch on every rank.

        Raises:
            NoCheckpointError: there is no such checkpoint. ChainError, FormatError: it is damaged.
        """
        opened = self._opened()
        described: dict[str, Any] = {}
        whole = whole_specs(opened.specs.values())
        for fqn, node in opened.nodes.items():
            name = _tensor_name(node)
            if name is None:
                described[fqn] = BytesStorageMetadata()
            elif name not in whole:
                raise FormatError(f"the tree refers to the tensor {name!r}, which is not in the checkpoint")
            else:
                described[fqn] = self._described(opened, whole[name])
        return Metadata(described, planner_data=dict(opened.paths))

    def _described(self, opened: _Opened, spec: TensorSpec) -> TensorStorageMetadata:
        chunks = [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(opened.specs[name].shape))
            for offset, name in opened.chunks[spec.name].items()
        ]
        return TensorStorageMetadata(TensorProperties(dtype=spec.dtype), torch.Size(spec.shape), chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """Nothing; called by torch."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which checkpoint this rank has found; called by torch."""
        manifest = self._opened().manifest
        plan.storage_data = (manifest.seq, manifest.step, manifest.state_digest)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make sure that all ranks read the same checkpoint; called by torch on the coordinator.

        Raises:
            ChainError: one was committed meanwhile.
        """
        found = [plan.storage_data for plan in plans]
        if len(set(found)) > 1:
            steps = sorted({step for _, step, _ in found})
            raise ChainError(
                f"the ranks have found different newest checkpoints in {self._store.display}, of steps {steps}: something still"
                f" saves to this run. Name one: {self._address.url}#step={steps[0]}"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Decode what this rank needs, and fill its tensors; called by torch on every rank.

        Raises:
            FormatError, ChainError: what is needed is damaged or missing; the message names the file.
        """
        opened = self._opened()
        wanted = {name for item in plan.items for name in _names_of(item, opened)}
        values = self._decoded(opened, wanted)
        for item in plan.items:
            fqn = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(decode_tree(opened.nodes[fqn], values.__getitem__), data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            [name] = _names_of(item, opened)
            source = values[name]
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(axis, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        note_read(self._store, opened.manifest)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint's name can be one of this storage."""
        return True

    def _opened(self) -> _Opened:
        if self._found is None:
            self._found = _open(self._store, self._manifest())
        return self._found

    def _manifest(self) -> Manifest:
        address = self._address
        if self._step is not None:
            address = Address(url=address.url, step=self._step)
        found = self._store.manifests()
        if not found and not self._store.exists():
            raise NoCheckpointError(f"there is no run at {self._store.display}: {self._store.what_is_there()}")
        return address.find(found)

    def _decoded(self, opened: _Opened, wanted: Collection[str]) -> Mapping[str, torch.Tensor]:
        if not wanted:
            return {}

        def parts(at: int) -> Collection[int]:
            return {opened.places[at][name] for name in wanted if name in opened.places[at]}

        chain = sources_of_run(self._store, opened.manifest, parts)
        header, _, rows = decode_rows(
            chain, lambda header: header.tensors.keys() & set(wanted), threads=self._threads
        )
        if header.state_digest != opened.manifest.state_digest:
            raise CorruptionError(f"{opened.manifest.chain[-1].key} is not what its manifest says")
        values = {entry.spec.name: value for entry, _, value in rows}
        missing = wanted - values.keys()
        if missing:
            raise FormatError(f"the checkpoint of step {header.step} lacks {min(missing)!r}")
        return values


def _names_of(item: ReadItem, opened: _Opened) -> Collection[str]:
    """What is stored that a value needs."""
    node = opened.nodes[item.storage_index.fqn]
    if item.type is LoadItemType.BYTE_IO:
        return tensor_names(node)
    name = _tensor_name(node)
    assert name is not None
    return [opened.chunks[name][tuple(item.storage_index.offset or ())]]


def _tensor_name(node: JSON) -> str | None:
    if isinstance(node, dict) and node.get("$") == "tensor" and isinstance(node.get("name"), str):
        return str(node["name"])
    return None


def _open(store: RunStore, manifest: Manifest) -> _Opened:
    headers = [header_of(store, ref) for ref in manifest.chain]
    newest = headers[-1]
    if (newest.state_digest, newest.step) != (manifest.state_digest, manifest.step):
        raise CorruptionError(
            f"{manifest.chain[-1].key} contains another state than its manifest (commit {manifest.seq}) states"
        )
    specs = {name: record.spec for name, record in newest.tensors.items()}
    chunks: dict[str, dict[Offset, str]] = {}
    for name, spec in specs.items():
        of, offset = (
            (spec.block.of, spec.block.offset) if spec.block else (name, (0,) * len(spec.shape))
        )
        chunks.setdefault(of, {})[offset] = name
    flat = [(".".join(map(str, path)), path, node) for path, node in flat_nodes(newest.tree)]
    nodes = {fqn: node for fqn, _, node in flat}
    if len(nodes) != len(flat):
        raise FormatError("two values of the state have the same flat name, which torch.distributed.checkpoint cannot load")
    return _Opened(
        manifest, nodes, {fqn: path for fqn, path, _ in flat}, specs, chunks, tuple(map(_places, headers))
    )


def _places(header: Header) -> Mapping[str, int]:
    return header.places if isinstance(header, PartsHeader) else dict.fromkeys(header.tensors, 0)
