"""Checkpoints that are made again: a delta as a base that restores the same tensors, bit for bit, or any as its weights alone.

Never in place: what is made is a new container under a new commit, which takes the old one's place in the order of checkpoints.
It is written and verified before anything old is removed, by the ordinary collection, after its grace: killed at any moment, the
run holds the old checkpoint, or both.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from shrinkpoint.coding.decode import EXPANSION, Row, required, stands_alone
from shrinkpoint.coding.encode import standing_alone
from shrinkpoint.coding.grouping import groups_of, mapped, siblings_of
from shrinkpoint.coding.selective import decode_batches, decode_chain, in_memory, sources_of_run
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.container.reader import Header
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.reporting import by_role
from shrinkpoint.engine.retention import ANCHORS, WEIGHTS_ONLY, is_weights_only, lineage_of
from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    CorruptionError,
    FormatError,
    NoCheckpointError,
    ShrinkpointError,
)
from shrinkpoint.schemes.base import Context
from shrinkpoint.schemes.catalogue import codec_for_reading
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.exactness import exact_parts, pack_reasons, parts_json, unpack_reasons
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON, tensor_names
from shrinkpoint.store.gc import DEFAULT_GRACE_S
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter
from shrinkpoint.warn import warn

_PER_SAVE = 2
"""Checkpoints turned into weights at a save: more than one, to catch up with older ones; few, so that no save takes much longer."""


@dataclass(frozen=True, kw_only=True)
class Remade:
    """A checkpoint that is ready to be committed in the place of another one."""

    source: Manifest
    """The other one."""
    parent: Manifest | None
    """What it is a delta against, weights alone too; None for a base."""
    checkpoint: Checkpoint
    container: bytes
    stored_exactly: tuple[str, ...] = ()
    """Tensors whose codec needs a predecessor: stored exactly, with the same values, in more bytes."""


@dataclass(frozen=True, kw_only=True)
class Compacted:
    """The result of a compaction."""

    manifest: Manifest
    """The base."""
    pins: tuple[str, ...]
    """Pins that were moved to it from the delta, which is no longer listed."""


def rebase(store: RunStore, manifest: Manifest, *, threads: int = 1) -> Remade:
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
    return _as_base(store, manifest, threads)


def compact(store: RunStore, rebased: Remade, *, grace_s: float = DEFAULT_GRACE_S) -> Compacted:
    """Commit the base, move the delta's pins to it, and remove the delta's commit.

    A process that is training into this run is fenced off by this, as by any second writer.

    Args:
        store: the run.
        rebased: the result of `rebase`.
        grace_s: seconds for which the old chain's data is kept after its last reference is removed.

    Raises:
        NoCheckpointError: the delta is no longer in the run.
        StoreError: the store cannot be written.
    """
    with store.writer() as writer:
        _check_source(store, rebased.source)
        return _replace(store, writer, rebased, "compacted", grace_s=grace_s)


def _check_source(store: RunStore, manifest: Manifest) -> None:
    if manifest.kind == "base":
        raise ConfigError(
            f"checkpoint {manifest.seq} (step {manifest.step}) is a base already: nothing to compact"
        )
    if manifest.digest not in {other.digest for other in store.manifests()}:
        raise NoCheckpointError(
            f"checkpoint {manifest.seq} (step {manifest.step}) is not in {store.display} any more"
        )


def _replace(store: RunStore, writer: RunWriter, made: Remade, how: str, *, grace_s: float) -> Compacted:
    """Commit it, and let go of its source; the manifest's meta says `how` it was made of that."""
    kind: Literal["base", "delta"] = made.checkpoint.kind
    manifest = writer.commit(
        made.container,
        step=made.source.step,
        kind=kind,
        parent=made.parent,
        state_digest=made.checkpoint.state_digest,
        meta=_meta(made, how),
        replaces=made.source,
    )
    pins = _move_pins(store, writer, made.source, manifest)
    writer.collect((), seen=[made.source], grace_s=grace_s)
    return Compacted(manifest=manifest, pins=pins)


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


def _meta(made: Remade, how: str) -> dict[str, Any]:
    source, entries = made.source, made.checkpoint.entries
    meta = dict(source.meta)
    save = meta.get("save")
    if isinstance(save, dict):
        sections = by_role([(entry.spec, entry.encoded.nbytes) for entry in entries])
        size, raw = len(made.container), sum(entry.spec.nbytes for entry in entries)
        reasons = unpack_reasons(made.checkpoint.exact, [entry.spec.name for entry in entries])
        exact = exact_parts(((entry.spec, entry.encoded.nbytes) for entry in entries), reasons)
        raw_sections = save.get("raw_sections")
        meta["save"] = {
            **save,
            "kind": made.checkpoint.kind,
            "bytes": size,
            "raw_bytes": raw,
            "ratio": raw / size,
            "sections": sections,
            "raw_sections": {role: n for role, n in raw_sections.items() if role in sections}
            if isinstance(raw_sections, dict)
            else {},
            "exact": parts_json(exact, size),
        }
    if how == "slimmed":
        meta[WEIGHTS_ONLY] = True
        meta.pop(ANCHORS, None)  # it may have a shorter chain
    meta[how] = {"seq": source.seq, "epoch": source.epoch, "digest": source.digest}
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
    by_name = {row[0].spec.name: row for row in rows}

    def again(group: Sequence[TensorSpec]) -> list[tuple[Entry, bool]]:
        """Copy the stored bytes of one parameter's tensors, or rebase them by their codecs; those that need a predecessor become exact."""
        values: dict[str, torch.Tensor] = {}
        made: list[tuple[Entry, bool]] = []
        for spec in group:
            entry, now, value = by_name[spec.name]
            context = Context(siblings=siblings_of(values, spec, group))
            values[spec.name] = value
            codec = codec_for_reading(entry.encoded.codec)
            found = standing_alone(codec, entry.encoded, now, spec, context, entry.digest)
            if found is None or (stands_alone(found[0]) and spec.nbytes > EXPANSION * found[0].nbytes):
                encoded, _ = ExactCodec().stage(value, spec, context).emit()
                made.append((Entry(spec, encoded, entry.digest), True))
            else:
                made.append((Entry(spec, found[0], entry.digest), False))
        return made

    groups = groups_of(entry.spec for entry, _, _ in rows)
    made = [pair for pairs in mapped(again, groups, threads) for pair in pairs]
    names = [entry.spec.name for entry, _ in made]
    exactly = tuple(
        name
        for name, (_, exact) in zip(names, made, strict=True)
        if exact and header.tensors[name].codec != ExactCodec.id
    )
    reasons = unpack_reasons(header.exact, list(header.tensors))
    reasons |= {name: "refused:its codec needs a predecessor" for name in exactly if name not in reasons}
    checkpoint = Checkpoint(
        kind="base",
        step=header.step,
        tree=header.tree,
        entries=tuple(entry for entry, _ in made),
        scheme=header.scheme,
        parent=None,
        provenance=header.provenance,
        exact=pack_reasons(names, reasons),
    )
    return checkpoint, exactly


# ---- weights alone


def without_optimizer(state: TrainingState) -> TrainingState:
    """Return the same without the state of optimizers: their groups with rates and the like stay, so that fresh ones take them.

    An optimizer's state is known by its form, the one of ``torch.optim.Optimizer.state_dict()``: a dict with ``state`` and
    ``param_groups``.
    """
    tree = _cleared(state.tree)
    kept = tensor_names(tree)
    if len(kept) == len(state.tensors):
        return state
    return TrainingState(
        tree,
        {name: tensor for name, tensor in state.tensors.items() if name in kept},
        {name: spec for name, spec in state.specs.items() if name in kept},
    )


def _cleared(node: JSON) -> JSON:
    if isinstance(node, list):
        return [_cleared(item) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("param_groups"), list) and isinstance(node.get("state"), dict):
        return {**node, "state": {}}
    return {key: _cleared(item) for key, item in node.items()}


def make_weights(
    store: RunStore, manifest: Manifest, parent: Manifest | None, *, threads: int = 1
) -> Remade | None:
    """Make a checkpoint of the weights of another one; nothing is written. A delta stays one if its references are there as weights too.

    Args:
        store: the run.
        manifest: the checkpoint.
        parent: the weights of what it is a delta against, where these are there.
        threads: threads that decode.

    Returns:
        What to commit, in one container; None where it holds no optimizer state.

    Raises:
        CorruptionError: the new checkpoint would restore to other weights.
        FormatError, ChainError, StoreError: the old one cannot be read.
    """
    source = sources_of_run(store, manifest)[-1]()
    header = source.header
    every = tensor_names(header.tree)  # refuses a tree that is nested too deeply
    tree = _cleared(header.tree)
    kept = tensor_names(tree)
    if kept == every:
        return None
    if not manifest.has_parts and (manifest.kind == "base" or parent is not None):
        alone = required(kept, header.tensors.values()) == kept
        entries = tuple(source.entries(kept))
        names = [entry.spec.name for entry in entries]
        reasons = unpack_reasons(header.exact, list(header.tensors))
        parent = None if header.kind == "base" else parent
        checkpoint = Checkpoint(
            kind=header.kind,
            step=header.step,
            tree=tree,
            entries=entries,
            scheme=header.scheme,
            parent=None if parent is None else parent.state_digest,
            provenance=header.provenance,
            exact=pack_reasons(names, {name: reasons[name] for name in names if name in reasons}),
        )
        container = write_container(checkpoint)
        made = Remade(source=manifest, parent=parent, checkpoint=checkpoint, container=container)
        if alone and _is_sound(store, made, header, threads):
            return made
    return _as_base(store, manifest, threads, _cleared)


def _as_base(
    store: RunStore, manifest: Manifest, threads: int, cleared: Callable[[JSON], JSON] | None = None
) -> Remade:
    """Return a base of all tensors, or of those that a tree has once it is `cleared`."""

    def choose(header: Header) -> Collection[str]:
        if cleared is None:
            return header.tensors.keys()
        wanted = tensor_names(cleared(header.tree))
        return {name for name, record in header.tensors.items() if record.spec.whole in wanted}

    header, _, batches = decode_batches(sources_of_run(store, manifest), choose, threads=threads)
    kept = choose(header)
    rows = [row for batch in batches for row in batch if row[0].spec.name in kept]
    tree = header.tree if cleared is None else cleared(header.tree)
    checkpoint, exactly = rebase_checkpoint(replace(header, tree=tree), rows, threads=threads)
    container = write_container(checkpoint)
    made = Remade(
        source=manifest, parent=None, checkpoint=checkpoint, container=container, stored_exactly=exactly
    )
    if len(checkpoint.entries) != len(kept) or not _is_sound(store, made, header, threads):
        raise CorruptionError(
            f"what was made of {manifest.chain[-1].key} would restore to other values; nothing was written"
        )
    return made


def _is_sound(store: RunStore, made: Remade, old: Header, threads: int) -> bool:
    """Return whether it restores to the very values that the old checkpoint has, by its digests."""
    if any(entry.digest != old.tensors[entry.spec.name].digest for entry in made.checkpoint.entries):
        return False
    before = () if made.parent is None else sources_of_run(store, made.parent)
    try:
        decode_chain([*before, in_memory(made.container)], threads=threads)
    except ShrinkpointError:
        return False
    return True


class Slimmer:
    """Turns older checkpoints of one training into weights, a few at a time.

    Args:
        store: the run.
        config: its `keep_optimizer` is how many of the newest keep the optimizer's state.
        span: checkpoints that build on one base at most.
    """

    def __init__(self, store: RunStore, config: SaverConfig, *, span: int) -> None:
        self._store, self._config, self._span = store, config, span
        self._without: set[str] = set()

    def run(self, writer: RunWriter, lineage: str | None) -> list[Manifest]:
        """Turn the oldest of those into weights that nothing else needs.

        One that a newer checkpoint's chain needs waits: its containers stay in any case until that is over. So do those that build
        on it, which would become bases, larger than they are. A base that is stored once holds up no more than `span`. Pinned ones
        and those of other trainings are left alone, and so is, with a warning, what cannot be read.

        Args:
            writer: the run's.
            lineage: the training.

        Returns:
            The new checkpoints.

        Raises:
            FencedError: another writer has taken over.
            StoreError: the store cannot be read or written.
        """
        everything = self._store.manifests()
        own = [manifest for manifest in everything if lineage_of(manifest.meta) == lineage]
        order = sorted({manifest.position for manifest in own}, reverse=True)
        keep = self._config.keep_optimizer or 0
        newest, young = order[:keep], set(order[: keep + self._span])
        pinned = set(self._store.pins().values())

        def stays(manifest: Manifest) -> bool:
            other = lineage_of(manifest.meta) != lineage
            return other or manifest.position in newest or manifest.seq in pinned

        needed = {ref.key for manifest in everything if stays(manifest) for ref in manifest.chain}
        growing = {ref.key for manifest in own if manifest.position in newest for ref in manifest.chain}

        def waits(manifest: Manifest) -> bool:
            chain = manifest.chain if manifest.position in young else ()
            return manifest.chain[-1].key in needed or any(ref.key in growing for ref in chain)

        weights = {manifest.position: manifest for manifest in own if is_weights_only(manifest.meta)}
        made: list[Manifest] = []
        for manifest in reversed(own):
            if stays(manifest) or is_weights_only(manifest.meta) or manifest.digest in self._without:
                continue
            if manifest.position in weights:  # a collection was interrupted here
                writer.collect((), seen=[manifest], grace_s=self._config.grace_s)
                continue
            if len(made) == _PER_SAVE:
                break
            if waits(manifest):
                continue
            try:
                done = self._turn(writer, manifest, list(weights.values()))
            except (FormatError, ChainError) as error:  # it stays, damaged or not; the others do not wait
                self._without.add(manifest.digest)
                warn(
                    f"checkpoint {manifest.seq} (step {manifest.step}) keeps its optimizer state: {error}. This warning comes once"
                )
                continue
            if done is None:
                self._without.add(manifest.digest)
            else:
                weights[done.position] = done
                made.append(done)
        return made

    def _turn(self, writer: RunWriter, manifest: Manifest, weights: Sequence[Manifest]) -> Manifest | None:
        parent = next((w for w in weights if _source_digest(w) == manifest.parent_digest), None)
        if parent is not None and len(parent.chain) >= len(manifest.chain):
            parent = None  # what it needs of its predecessors is in their base
        made = make_weights(self._store, manifest, parent, threads=self._config.encoder_threads)
        if made is None:
            return None
        return _replace(self._store, writer, made, "slimmed", grace_s=self._config.grace_s).manifest


def _source_digest(manifest: Manifest) -> str | None:
    noted = manifest.meta.get("slimmed")
    return noted.get("digest") if isinstance(noted, dict) else None
