"""Checkpoints without the optimizer's state: weights alone from the start, or as soon as newer ones hold that state.

What is turned into weights is never changed in place. As in a compaction, a new container is made and verified, committed in
the place of the old checkpoint, and only then is the old one let go, by the ordinary collection with its grace: killed at any
moment, the run holds the old checkpoint, or both. A delta stays one if its references are there as weights too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shrinkpoint.coding.decode import required
from shrinkpoint.coding.selective import AnySource, decode_batches, decode_chain, in_memory, sources_of_run
from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.container.reader import Header
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.compaction import rebase_checkpoint
from shrinkpoint.engine.meta import ANCHORS, WEIGHTS_ONLY, is_weights_only, lineage_of
from shrinkpoint.errors import ChainError, CorruptionError, FormatError, ShrinkpointError
from shrinkpoint.schemes.exactness import pack_reasons, unpack_reasons
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON, tensor_names
from shrinkpoint.store.gc import DEFAULT_GRACE_S
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore, RunWriter
from shrinkpoint.warn import warn

__all__ = ["Slimmed", "Slimmer", "make_weights", "without_optimizer"]

_PER_SAVE = 2
"""Checkpoints turned into weights at a save: more than one, to catch up with older ones; few, so that no save takes much longer."""


@dataclass(frozen=True, kw_only=True)
class Slimmed:
    """A checkpoint's weights, ready to be committed in its place."""

    source: Manifest
    parent: Manifest | None
    """What it is a delta against, as weights too; None for a base."""
    checkpoint: Checkpoint
    container: bytes


def without_optimizer(state: TrainingState) -> TrainingState:
    """The same without the state of optimizers: their groups with rates and the like stay, so that fresh ones take them.

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
) -> Slimmed | None:
    """Make a checkpoint of the weights of another one; nothing is written.

    Args:
        store: the run.
        manifest: the checkpoint.
        parent: the weights of what it is a delta against, where these are there.
        threads: threads that decode.

    Returns:
        What to commit; None where it holds no optimizer state.

    Raises:
        CorruptionError: the new checkpoint would restore to other weights.
        FormatError, ChainError, StoreError: the old one cannot be read.
    """
    chain = sources_of_run(store, manifest)
    source = chain[-1]()
    header = source.header
    tensor_names(header.tree)  # refuses a tree that is nested too deeply
    tree = _cleared(header.tree)
    kept = tensor_names(tree)
    if kept >= header.tensors.keys():
        return None
    before = None if parent is None else sources_of_run(store, parent)
    if manifest.kind == "base" or before is not None:
        alone = required(kept, header.tensors.values()) == kept
        entries = tuple(source.entries(kept))
        checkpoint = Checkpoint(
            kind=header.kind,
            step=header.step,
            tree=tree,
            entries=entries,
            scheme=header.scheme,
            parent=None if parent is None or header.kind == "base" else parent.state_digest,
            provenance=header.provenance,
            exact=_reasons_of(entries, header.exact, header.tensors),
        )
        made = Slimmed(
            source=manifest,
            parent=None if header.kind == "base" else parent,
            checkpoint=checkpoint,
            container=write_container(checkpoint),
        )
        if alone and _is_sound(made, header, () if made.parent is None else before or (), threads):
            return made
    made = _as_base(store, manifest, tree, threads)
    if not _is_sound(made, header, (), threads):
        raise CorruptionError(
            f"the weights made of {manifest.chain[-1].key} would restore to other values; nothing was written"
        )
    return made


def _as_base(store: RunStore, manifest: Manifest, tree: JSON, threads: int) -> Slimmed:
    kept = tensor_names(tree)
    header, _, batches = decode_batches(sources_of_run(store, manifest), lambda _: kept, threads=threads)
    weights = [row for rows in batches for row in rows if row[0].spec.name in kept]
    checkpoint, _ = rebase_checkpoint(replace(header, tree=tree), weights, threads=threads)
    return Slimmed(source=manifest, parent=None, checkpoint=checkpoint, container=write_container(checkpoint))


def _reasons_of(entries: Sequence[Entry], exact: JSON, names: Iterable[str]) -> JSON:
    """Why those that are kept are stored exactly, of a checkpoint with tensors of these names."""
    reasons, kept = unpack_reasons(exact, list(names)), [entry.spec.name for entry in entries]
    return pack_reasons(kept, {name: reasons[name] for name in kept if name in reasons})


def _is_sound(made: Slimmed, old: Header, before: Sequence[Callable[[], AnySource]], threads: int) -> bool:
    """Whether it restores to the very weights that the old checkpoint has, by its digests."""
    if any(entry.digest != old.tensors[entry.spec.name].digest for entry in made.checkpoint.entries):
        return False
    try:
        decode_chain([*before, in_memory(made.container)], threads=threads)
    except ShrinkpointError:
        return False
    return True


class Slimmer:
    """Turns older checkpoints of one training into weights, a few at a time.

    Args:
        store: the run.
        keep: how many of the newest keep the optimizer's state.
        span: checkpoints that build on one base at most.
        grace_s: seconds for which the old containers outlive their last name.
        threads: threads that decode.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        keep: int,
        span: int = 0,
        grace_s: float = DEFAULT_GRACE_S,
        threads: int = 1,
    ) -> None:
        self._store, self._keep, self._span = store, keep, span
        self._grace_s, self._threads = grace_s, threads
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
        newest, young = order[: self._keep], set(order[: self._keep + self._span])
        pinned = set(self._store.pins().values())

        def stays(manifest: Manifest) -> bool:
            own_one = lineage_of(manifest.meta) == lineage
            return not own_one or manifest.position in newest or manifest.seq in pinned

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
            if manifest.has_parts:
                self._without.add(manifest.digest)
                warn(
                    f"checkpoint {manifest.seq} (step {manifest.step}), which several ranks wrote, keeps its optimizer state"
                )
                continue
            if manifest.position in weights:  # a collection was interrupted here
                writer.collect((), seen=[manifest], grace_s=self._grace_s)
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
        slimmed = make_weights(self._store, manifest, parent, threads=self._threads)
        if slimmed is None:
            return None
        kind: Literal["base", "delta"] = slimmed.checkpoint.kind
        done = writer.commit(
            slimmed.container,
            step=manifest.step,
            kind=kind,
            parent=slimmed.parent,
            state_digest=slimmed.checkpoint.state_digest,
            meta=_meta(slimmed),
            replaces=manifest,
        )
        writer.collect((), seen=[manifest], grace_s=self._grace_s)
        return done


def _source_digest(manifest: Manifest) -> str | None:
    noted = manifest.meta.get("slimmed")
    return noted.get("digest") if isinstance(noted, dict) else None


def _meta(slimmed: Slimmed) -> dict[str, Any]:
    source, entries = slimmed.source, slimmed.checkpoint.entries
    meta = dict(source.meta)
    save = meta.get("save")
    if isinstance(save, dict):
        sections: dict[str, int] = {}
        for entry in entries:
            role = entry.spec.tag.role.value
            sections[role] = sections.get(role, 0) + entry.encoded.nbytes
        size, raw = len(slimmed.container), sum(entry.spec.nbytes for entry in entries)
        changed: dict[str, Any] = {
            "kind": slimmed.checkpoint.kind,
            "bytes": size,
            "raw_bytes": raw,
            "ratio": raw / size,
        }
        raw_sections = save.get("raw_sections")
        if isinstance(raw_sections, dict):
            changed["raw_sections"] = {role: size for role, size in raw_sections.items() if role in sections}
        meta["save"] = {**save, **changed, "sections": sections}
    meta[WEIGHTS_ONLY] = True
    meta.pop(ANCHORS, None)  # it may have a shorter chain
    meta["slimmed"] = {"seq": source.seq, "epoch": source.epoch, "digest": source.digest}
    return meta
