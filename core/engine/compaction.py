"""Turns a delta into a base that restores the same tensors, bit for bit, so that its chain can be removed.

Never in place: the base is a new container under a new commit, which takes the delta's place in the order of
checkpoints; it is written and verified before
anything old is removed, and the old chain is removed by the ordinary garbage collection, after its grace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from shrinkpoint.coding.encode import encode_state, standing_alone
from shrinkpoint.coding.selective import Row, decode_batches, decode_chain, in_memory, sources_of_run
from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.container.reader import Header
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import (
    CannotRepresentError,
    ConfigError,
    CorruptionError,
    NoCheckpointError,
)
from shrinkpoint.schemes.base import (
    Context,
    EncodedTensor,
    Planes,
    ReferenceState,
    Staged,
    TensorCodec,
)
from shrinkpoint.schemes.catalogue import codec_for_reading
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.exactness import ExactPart, exact_parts, pack_reasons, parts_json, unpack_reasons
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.gc import DEFAULT_GRACE_S
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore, RunWriter

__all__ = ["Compacted", "Rebased", "compact", "rebase", "rebase_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Rebased:
    """A base that is ready to be committed in place of a delta."""

    source: Manifest
    """The delta."""
    container: bytes
    state_digest: str
    """The delta's, unless several ranks wrote that: then it is over their parts."""
    sections: Mapping[str, int]
    """Bytes of the coded tensors by role."""
    stored_exactly: tuple[str, ...]
    """Tensors whose codec needs a predecessor: stored exactly, with the same values, in more bytes."""
    exact: tuple[ExactPart, ...] = ()
    """See `SaveReport.exact`."""


@dataclass(frozen=True, kw_only=True)
class Compacted:
    """The result of a compaction."""

    manifest: Manifest
    """The base."""
    source: Manifest
    """The delta that it replaces; no longer listed."""
    pins: tuple[str, ...]
    """Pins that were moved from the one to the other."""


def rebase(store: RunStore, manifest: Manifest, *, threads: int = 1) -> Rebased:
    """Read a delta with its chain, and code the same state as a base; nothing is written.

    Args:
        store: the run.
        manifest: the delta.
        threads: threads that decode.

    Raises:
        ConfigError: the checkpoint is a base already.
        NoCheckpointError: it is no longer in the run.
        FormatError, ChainError: it is damaged.
        StoreError: the store cannot be read.
    """
    _check_source(store, manifest)
    header, _, batches = decode_batches(
        sources_of_run(store, manifest), lambda header: header.tensors.keys(), threads=threads
    )
    rows = [row for rows in batches for row in rows]
    checkpoint, exactly = rebase_checkpoint(header, rows, threads=threads)
    container = write_container(checkpoint)
    again = decode_chain([in_memory(container)], threads=threads).header
    if _digests(again) != _digests(header):
        raise CorruptionError(
            f"the base made of {manifest.chain[-1].key} contains another state; nothing was written"
        )
    sections: dict[str, int] = {}
    for entry in checkpoint.entries:
        role = entry.spec.tag.role.value
        sections[role] = sections.get(role, 0) + entry.encoded.nbytes
    reasons = unpack_reasons(checkpoint.exact, [entry.spec.name for entry in checkpoint.entries])
    return Rebased(
        source=manifest,
        container=container,
        state_digest=again.state_digest,
        sections=sections,
        stored_exactly=exactly,
        exact=exact_parts(((entry.spec, entry.encoded.nbytes) for entry in checkpoint.entries), reasons),
    )


def compact(store: RunStore, rebased: Rebased, *, grace_s: float = DEFAULT_GRACE_S) -> Compacted:
    """Commit the base, move the delta's pins to it, and remove the delta's commit.

    A process that is training into this run is fenced off by this, as by any second writer. If interrupted anywhere,
    the run contains the delta, or both, and restores the same state.

    Args:
        store: the run.
        rebased: the result of `rebase`.
        grace_s: seconds for which the old chain's data is kept after its last reference is removed.

    Raises:
        NoCheckpointError: the delta is no longer in the run.
        StoreError: the store cannot be written.
    """
    source = rebased.source
    with store.writer() as writer:
        _check_source(store, source)
        manifest = writer.commit(
            rebased.container,
            step=source.step,
            kind="base",
            parent=None,
            state_digest=rebased.state_digest,
            meta=_meta(rebased),
            replaces=source,
        )
        pins = _move_pins(store, writer, source, manifest)
        writer.collect((), seen=[source], grace_s=grace_s)
    return Compacted(manifest=manifest, source=source, pins=pins)


def _digests(header: Header) -> dict[str, str]:
    return {name: record.digest for name, record in header.tensors.items()}


def _check_source(store: RunStore, manifest: Manifest) -> None:
    if manifest.kind == "base":
        raise ConfigError(
            f"checkpoint {manifest.seq} (step {manifest.step}) is a base already: nothing to compact"
        )
    if manifest.digest not in {other.digest for other in store.manifests()}:
        raise NoCheckpointError(
            f"checkpoint {manifest.seq} (step {manifest.step}) is not in {store.display} any more"
        )


def _move_pins(store: RunStore, writer: RunWriter, old: Manifest, new: Manifest) -> tuple[str, ...]:
    names = tuple(sorted(name for name, seq in store.pins().items() if seq == old.seq))
    if not names:
        return names
    # A name holds one checkpoint at a time. Where this process ends in between, this pin is left, and nothing is collected.
    meanwhile = f"compacted-{new.seq}"
    writer.pin(meanwhile, new)
    for name in names:
        writer.unpin(name)
        writer.pin(name, new)
    writer.unpin(meanwhile)
    return names


def _meta(rebased: Rebased) -> dict[str, Any]:
    source = rebased.source
    meta = dict(source.meta)
    save = meta.get("save")
    if isinstance(save, dict):
        size, raw = len(rebased.container), save.get("raw_bytes")
        ratio = {"ratio": raw / size} if isinstance(raw, int) else {}
        entry = {"kind": "base", "bytes": size, "sections": dict(rebased.sections), **ratio}
        entry["exact"] = parts_json(rebased.exact, size)
        meta["save"] = {**save, **entry}
    meta["compacted"] = {"seq": source.seq, "epoch": source.epoch, "digest": source.digest}
    return meta


# ---- one checkpoint


def rebase_checkpoint(
    header: Header, rows: Sequence[Row], *, threads: int = 1
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Code a decoded checkpoint, or some of its tensors, without references.

    Args:
        header: of the checkpoint; its tree has these tensors alone.
        rows: the tensors.
        threads: parameters handled side by side.

    Returns:
        The base, with the same tensor digests; and the tensors that had to be stored exactly to get there.
    """
    coded = encode_state(
        TrainingState(
            header.tree,
            {entry.spec.name: value for entry, _, value in rows},
            {entry.spec.name: entry.spec for entry, _, _ in rows},
        ),
        _Again(header.scheme, rows),
        step=header.step,
        reference=None,
        parent=None,
        provenance=header.provenance,
        threads=threads,
    )
    exactly = tuple(name for name in coded.kept_exactly if header.tensors[name].codec != ExactCodec.id)
    reasons = unpack_reasons(header.exact, list(header.tensors))
    reasons |= {name: "refused:its codec needs a predecessor" for name in exactly if name not in reasons}
    order = (entry.spec.name for entry in coded.checkpoint.entries)
    return replace(coded.checkpoint, exact=pack_reasons(order, reasons)), exactly


class _Again:
    """The scheme that stores a checkpoint's tensors by their present codecs, without references."""

    name: ClassVar[str] = "again"

    def __init__(self, described: JSON, rows: Sequence[Row]) -> None:
        self._described, self._rows = described, rows

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """See `Scheme.codecs`."""
        return {entry.spec.name: partial(_AgainCodec, entry, now) for entry, now, _ in self._rows}

    def describe(self) -> JSON:
        """See `Scheme.describe`: the checkpoint's own."""
        return self._described


class _AgainCodec:
    """Copies one tensor's stored bytes, or rebases them by its codec."""

    id: ClassVar[str] = "again"
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, entry: Entry, reference: ReferenceState) -> None:
        self._entry, self._reference = entry, reference
        self._codec = codec_for_reading(entry.encoded.codec)

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`; refuses what needs a predecessor."""
        found = standing_alone(
            self._codec, self._entry.encoded, self._reference, spec, context, self._entry.digest
        )
        if found is None:
            raise CannotRepresentError(f"{spec.name}: codec {self._codec.id!r} needs a predecessor")
        encoded, planes, value = found
        return Staged(value, lambda: (encoded, planes))

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        return self._codec.decode(encoded, spec, context)

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        return self._codec.reconstruct(encoded, planes, spec, context)
