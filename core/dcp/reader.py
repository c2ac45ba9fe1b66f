"""`StorageReader`: loads of `torch.distributed.checkpoint` from a run, in any layout."""

import io
import os
from collections.abc import Mapping
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

from shrinkpoint.coding.selective import header_of
from shrinkpoint.config import SaverConfig
from shrinkpoint.dcp.contents import FlatPath, flat_nodes, tables_of, tensor_in
from shrinkpoint.dcp.writer import note_loaded, step_of
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ChainError, ConfigError, FormatError, NoCheckpointError
from shrinkpoint.sharded.layout import block_box
from shrinkpoint.sharded.restoring import ReadPlan, plan_of, rows_of
from shrinkpoint.state.specs import whole_specs
from shrinkpoint.state.tree import JSON, decode_tree, tensor_names
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl, url_text


@dataclass(frozen=True)
class _Opened:
    """What is known of a checkpoint before any of its tensors is read, as torch has it."""

    plan: ReadPlan
    nodes: Mapping[str, JSON]
    """The tree of each value, by name in the flat state."""
    paths: Mapping[str, FlatPath]
    boxes: Mapping[str, Mapping[tuple[int, ...], str]]
    """Of each whole tensor, the names of the boxes that are stored, by their first indices."""


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
        """Return which tensors the checkpoint has, and which boxes of them lie where; called by torch on every rank.

        Raises:
            NoCheckpointError: there is no such checkpoint. ChainError, FormatError: it is damaged.
        """
        opened = self._opened()
        described: dict[str, Any] = {}
        for fqn, node in opened.nodes.items():
            name = tensor_in(node)
            if name is None:
                described[fqn] = BytesStorageMetadata()
                continue
            if name not in opened.boxes:
                raise FormatError(f"the tree refers to the tensor {name!r}, which is not in the checkpoint")
            specs = {at: opened.plan.specs[stored] for at, stored in opened.boxes[name].items()}
            chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(s.shape)) for at, s in specs.items()]
            spec = next(iter(specs.values()))
            shape = torch.Size(spec.shape if spec.block is None else spec.block.shape)
            described[fqn] = TensorStorageMetadata(TensorProperties(dtype=spec.dtype), shape, chunks)
        return Metadata(described, planner_data=dict(opened.paths))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """Nothing; called by torch."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which checkpoint this rank has found; called by torch."""
        manifest = self._opened().plan.manifest
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
        values = self._decoded(opened.plan, {name for names in needs for name in names})
        for item, names in zip(plan.items, needs, strict=True):
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(opened.nodes[item.storage_index.fqn], values))
                continue
            [name] = names
            source = values[name]
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(axis, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        note_loaded(self._store, opened.plan.manifest)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint's name can be one of this storage."""
        return True

    def _opened(self) -> _Opened:
        if self._found is not None:
            return self._found
        address = self._address
        if self._step is not None:
            address = Address(url=address.url, step=self._step)
        found = self._store.manifests()
        if not found and not self._store.exists():
            raise NoCheckpointError(
                f"there is no run at {self._store.display}: {self._store.what_is_there()}"
            )
        self._found = _open(self._store, address.find(found))
        return self._found

    def _decoded(self, plan: ReadPlan, wanted: set[str]) -> dict[str, torch.Tensor]:
        values = {}
        for entry, _, value in rows_of(self._store, plan, wanted, self._threads):
            spec = entry.spec
            said = plan.specs.get(spec.name, spec)
            if (said.dtype, *block_box(said)) != (spec.dtype, *block_box(spec)):
                raise FormatError(f"{spec.name!r} is not what the checkpoint's table of boxes says")
            values[spec.name] = value
        return values


def _pickled(node: JSON, values: Mapping[str, torch.Tensor]) -> io.BytesIO:
    """Return a value that is no tensor, in the form in which torch's planner takes it: in memory alone, and made here."""
    data = io.BytesIO()
    torch.save(decode_tree(node, values.__getitem__), data)
    data.seek(0)
    return data


def _needs_of(item: ReadItem, opened: _Opened) -> set[str]:
    """Return the names of what is stored that a value needs."""
    node = opened.nodes[item.storage_index.fqn]
    if item.type is LoadItemType.BYTE_IO:
        return tensor_names(node)
    name = tensor_in(node)
    if name is None:
        raise FormatError(f"{item.storage_index.fqn!r} is no tensor in the checkpoint")
    boxes = opened.boxes[name]
    return {boxes[tuple(item.storage_index.offset or ()) or next(iter(boxes))]}


def _open(store: RunStore, manifest: Manifest) -> _Opened:
    headers = [header_of(store, ref, (0,) if ref.parts else None) for ref in manifest.chain]
    tables = tables_of(headers, [ref.parts for ref in manifest.chain])
    if tables is None:  # of another writer
        headers = [header_of(store, ref) for ref in manifest.chain]
    plan = plan_of(manifest, headers, tables or ())
    if tables is None:
        whole_specs(plan.specs.values())  # refuses blocks that contradict each other
    boxes: dict[str, dict[tuple[int, ...], str]] = {}
    for stored, spec in plan.specs.items():
        of, box = block_box(spec)
        boxes.setdefault(of, {})[box.offset] = stored
    nodes, paths = flat_nodes(plan.tree)
    return _Opened(plan, nodes, paths, boxes)
