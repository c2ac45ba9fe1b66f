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

from shrinkpoint.coding.selective import decode_batches, header_of, sources_of_run
from shrinkpoint.config import SaverConfig
from shrinkpoint.dcp.contents import flat_nodes
from shrinkpoint.dcp.items import FlatPath
from shrinkpoint.dcp.run import note_read
from shrinkpoint.dcp.table import Offset, Table, Whole, place_of, table_of, table_of_headers
from shrinkpoint.dcp.writer import step_of
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ChainError, ConfigError, CorruptionError, FormatError, NoCheckpointError
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON, decode_tree, tensor_names
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl, url_text

__all__ = ["StorageReader"]


_Key = tuple[str, Offset | None]
"""A tensor, and where the box of it begins; None for one in plain data."""


@dataclass(frozen=True)
class _Opened:
    """What is known of a checkpoint before any of its tensors is read."""

    manifest: Manifest
    nodes: Mapping[str, JSON]
    """The tree of each value, by name in the flat state."""
    paths: Mapping[str, FlatPath]
    tables: tuple[Table, ...]
    """Of each checkpoint of the chain."""

    @property
    def table(self) -> Table:
        """Of the checkpoint itself."""
        return self.tables[-1]


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
        >>> dcp.load(state, storage_reader=StorageReader("runs/7#step=2000"))
        >>> state["step"]
        2000
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
        other = self._address.seq is not None or self._address.best
        if self._step is not None and (other or named not in (None, self._step)):
            raise ConfigError(
                f"checkpoint_id={checkpoint_id!r} and {self._address} name different checkpoints"
            )

    def read_metadata(self, *args: Any) -> Metadata:
        """Which tensors the checkpoint has, and which boxes of them lie where; called by torch on every rank.

        Raises:
            NoCheckpointError: there is no such checkpoint. ChainError, FormatError: it is damaged.
        """
        opened = self._opened()
        described: dict[str, Any] = {}
        for fqn, node in opened.nodes.items():
            name = _tensor_name(node)
            if name is None:
                described[fqn] = BytesStorageMetadata()
            elif name not in opened.table.tensors:
                raise FormatError(f"the tree refers to the tensor {name!r}, which is not in the checkpoint")
            else:
                described[fqn] = _described(opened.table.tensors[name])
        return Metadata(described, planner_data=dict(opened.paths))

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
        needs = [_needs_of(item, opened) for item in plan.items]
        values = self._decoded(opened, {key for keys in needs for key in keys})
        for item, keys in zip(plan.items, needs, strict=True):
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(opened.nodes[item.storage_index.fqn], values))
                continue
            source = values[keys[0]]
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
            raise NoCheckpointError(
                f"there is no run at {self._store.display}: {self._store.what_is_there()}"
            )
        return address.find(found)

    def _decoded(self, opened: _Opened, wanted: Collection[_Key]) -> dict[_Key, torch.Tensor]:
        if not wanted:
            return {}

        def parts(at: int) -> Collection[int]:
            found = {opened.tables[at].part_of(*key) for key in wanted}
            return [part for part in found if part is not None]

        names = {key: opened.table.name_of(*key) for key in wanted}
        chain = sources_of_run(self._store, opened.manifest, parts)
        header, _, batches = decode_batches(
            chain, lambda header: header.tensors.keys() & set(names.values()), threads=self._threads
        )
        found = {entry.spec.name: (entry.spec, value) for rows in batches for entry, _, value in rows}
        values = {}
        for (of, at), name in names.items():
            if name not in found:
                raise FormatError(f"the checkpoint of step {header.step} lacks {name!r}")
            spec, value = found[name]
            if at is not None and not _lies(spec, of, at, opened.table.tensors[of]):
                raise FormatError(f"{name!r} is not the box of {of!r} that the checkpoint's table says")
            values[of, at] = value
        return values


def _lies(spec: TensorSpec, of: str, at: Offset, whole: Whole) -> bool:
    """Whether a stored tensor is the box that it should be."""
    return place_of(spec) == (of, at) and (spec.dtype, spec.shape) == (whole.dtype, whole.boxes[at][0])


def _pickled(node: JSON, values: Mapping[_Key, torch.Tensor]) -> io.BytesIO:
    """A value that is no tensor, in the form in which torch's planner takes it: in memory alone, and made here."""
    data = io.BytesIO()
    torch.save(decode_tree(node, lambda name: values[name, None]), data)
    data.seek(0)
    return data


def _needs_of(item: ReadItem, opened: _Opened) -> list[_Key]:
    """What is stored that a value needs."""
    node = opened.nodes[item.storage_index.fqn]
    if item.type is LoadItemType.BYTE_IO:
        return [(name, None) for name in tensor_names(node)]
    name = _tensor_name(node)
    if name is None:
        raise FormatError(f"{item.storage_index.fqn!r} is no tensor in the checkpoint")
    boxes = opened.table.tensors[name].boxes
    return [(name, tuple(item.storage_index.offset or ()) or next(iter(boxes)))]


def _tensor_name(node: JSON) -> str | None:
    if isinstance(node, dict) and node.get("$") == "tensor" and isinstance(node.get("name"), str):
        return str(node["name"])
    return None


def _described(whole: Whole) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        for offset, (size, _) in whole.boxes.items()
    ]
    return TensorStorageMetadata(TensorProperties(dtype=whole.dtype), torch.Size(whole.shape), chunks)


def _open(store: RunStore, manifest: Manifest) -> _Opened:
    headers, tables = [], []
    for ref in manifest.chain:
        header = header_of(store, ref, (0,) if ref.parts else None)
        table = table_of(header)
        if table is None:
            header = header_of(store, ref)
            table = table_of_headers(header)
        table.check(max(ref.parts, 1))
        headers.append(header)
        tables.append(table)
    newest = headers[-1]
    if (newest.state_digest, newest.step) != (manifest.state_digest, manifest.step):
        raise CorruptionError(
            f"{manifest.chain[-1].key} contains another state than its manifest (commit {manifest.seq}) states"
        )
    flat = [(".".join(map(str, path)), path, node) for path, node in flat_nodes(newest.tree)]
    nodes = {fqn: node for fqn, _, node in flat}
    if len(nodes) != len(flat):
        raise FormatError(
            "two values of the state have the same flat name, which torch.distributed.checkpoint cannot load"
        )
    return _Opened(manifest, nodes, {fqn: path for fqn, path, _ in flat}, tuple(tables))
