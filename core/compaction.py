"""Turns a delta into a base that restores the same tensors, bit for bit, so that the chain behind it can go.

Never in place: the base is a new container under a new commit, which takes the delta's place in the order of
checkpoints; it is made and verified before anything old is let go, and the old chain leaves by the ordinary collection, with its grace.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from shrinkpoint.coding import Decoded, decode_chain
from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.entropy.rans import encode_symbols
from shrinkpoint.errors import ConfigError, CorruptionError, FormatError, NoCheckpointError
from shrinkpoint.levels import encode_levels
from shrinkpoint.saver import decode_checkpoint
from shrinkpoint.schemes.base import Context, EncodedTensor, Held, Planes
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.levels import LevelsCodec
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.schemes.registry import codec_for_reading
from shrinkpoint.store.gc import DEFAULT_GRACE_S
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore, RunWriter

__all__ = ["Compacted", "Rebased", "compact", "rebase", "rebase_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Rebased:
    """A base that is ready to be committed in a delta's place."""

    source: Manifest
    """The delta."""
    container: bytes
    sections: Mapping[str, int]
    """Bytes of the coded tensors by role."""
    stored_exactly: tuple[str, ...]
    """Tensors whose codec could not do without its predecessor: the same values, in more bytes."""


@dataclass(frozen=True, kw_only=True)
class Compacted:
    """What a compaction did."""

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
    decoded = decode_checkpoint(manifest, store.fetch(manifest), threads=threads)
    checkpoint, exactly = rebase_checkpoint(decoded)
    container = write_container(checkpoint)
    again = decode_chain([read_container(container)], threads=threads)
    if again.checkpoint.state_digest != manifest.state_digest:
        raise CorruptionError(
            f"the base made of {manifest.chain[-1].key} holds another state; nothing was written"
        )
    sections: dict[str, int] = {}
    for entry in checkpoint.entries:
        role = entry.spec.tag.role.value
        sections[role] = sections.get(role, 0) + entry.encoded.nbytes
    return Rebased(source=manifest, container=container, sections=sections, stored_exactly=exactly)


def compact(store: RunStore, rebased: Rebased, *, grace_s: float = DEFAULT_GRACE_S) -> Compacted:
    """Commit the base, move the delta's pins to it, and let go of the delta.

    A process that is training into this run is fenced off by this, as by any second writer. Interrupted anywhere, the
    run holds the delta, or both, and restores the same state.

    Args:
        store: the run.
        rebased: what `rebase` made.
        grace_s: seconds for which the old chain's data outlives its last name.

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
            state_digest=source.state_digest,
            meta=_meta(rebased),
            replaces=source,
        )
        pins = _move_pins(store, writer, source, manifest)
        writer.collect((), seen=[source], grace_s=grace_s)
    return Compacted(manifest=manifest, source=source, pins=pins)


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
    for name in names:  # nothing can be collected in between: this is the run's only writer
        writer.unpin(name)
        writer.pin(name, new)
    return names


def _meta(rebased: Rebased) -> dict[str, Any]:
    source = rebased.source
    meta = dict(source.meta)
    save = meta.get("save")
    if isinstance(save, dict):
        size, raw = len(rebased.container), save.get("raw_bytes")
        ratio = {"ratio": raw / size} if isinstance(raw, int) else {}
        told = {"kind": "base", "bytes": size, "sections": dict(rebased.sections), **ratio}
        meta["save"] = {**save, **told}
    meta["compacted"] = {"seq": source.seq, "epoch": source.epoch, "digest": source.digest}
    return meta


# ---- one checkpoint


def rebase_checkpoint(decoded: Decoded) -> tuple[Checkpoint, tuple[str, ...]]:
    """Code a decoded checkpoint without references.

    Args:
        decoded: the checkpoint with what its reader holds.

    Returns:
        The base, with the same tensor digests; and the tensors that had to be stored exactly to get there.
    """
    entries: list[Entry] = []
    exactly: list[str] = []
    for entry in decoded.checkpoint.entries:
        encoded = _alone(entry, decoded)
        if encoded.codec != entry.encoded.codec:
            exactly.append(entry.spec.name)
        entries.append(replace(entry, encoded=encoded))
    checkpoint = replace(decoded.checkpoint, kind="base", parent=None, entries=tuple(entries))
    return checkpoint, tuple(exactly)


def _alone(entry: Entry, decoded: Decoded) -> EncodedTensor:
    """The same tensor, decodable without a predecessor."""
    encoded = entry.encoded
    if not encoded.uses_reference:
        return encoded
    held = decoded.held[entry.spec.name]
    recode = _RECODE.get(encoded.codec)
    if recode is not None:
        candidate = replace(encoded, sections=dict(encoded.sections) | recode(held), uses_reference=False)
        if _decodes_to(candidate, entry, held.planes):
            return candidate
    return ExactCodec().encode(decoded.state.tensors[entry.spec.name], entry.spec, Context()).encoded


def _decodes_to(encoded: EncodedTensor, entry: Entry, planes: Planes) -> bool:
    try:
        decoded = codec_for_reading(encoded.codec).decode(encoded, entry.spec, Context())
    except FormatError:
        return False
    return decoded.keys() == planes.keys() and all(
        np.array_equal(decoded[name], planes[name]) for name in planes
    )


def _plain_symbols(alphabet: int) -> Callable[[Held], dict[str, bytes]]:
    return lambda held: {"levels": encode_symbols(_plane(held), None, alphabet, 1)}


def _levels(held: Held) -> dict[str, bytes]:
    return {"levels": encode_levels(_plane(held), held.params["levels"], None, None)}


def _plane(held: Held) -> Any:
    return np.ascontiguousarray(held.planes["levels"], dtype=np.uint8)


# The one section of each codec that may depend on the predecessor, coded without it. Alphabets are the format's.
_RECODE: Mapping[str, Callable[[Held], dict[str, bytes]]] = MappingProxyType(
    {
        LevelsCodec.id: _levels,
        SecondMomentCodec.id: _plain_symbols(122),
        FirstMomentCodec.id: _plain_symbols(63),
    }
)
