"""The checkpoints that a training commits to its run: what the next one builds on, and which older ones go."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from shrinkpoint.coding.encode import EncodedState
from shrinkpoint.coding.selective import decode_batches, header_of, sources_of_run
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.layout import PartOf
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.compaction import Slimmer
from shrinkpoint.engine.reporting import LOSS_ALONE, merged
from shrinkpoint.engine.retention import ANCHORS, anchors_of, lineage_of, policy_of, record_of
from shrinkpoint.errors import ChainError, FencedError, FormatError, ShrinkpointError, StoreError
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.exactness import large_share
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.keys import data_key, new_nonce
from shrinkpoint.store.manifest import Anchor, BlobRef, Head, Manifest, Part
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter
from shrinkpoint.warn import some, warn

_OF_VALUES = (ExactCodec.id,)  # which leave the values alone as the reference of the next delta
_UNCHANGED = 0.25  # least share of a base's bytes that has not changed, for a later base to do without it
_ANCHORS = 4  # of a chain, its base among them


@dataclass(frozen=True)
class Link:
    """What the next delta builds on."""

    digest: str
    """State digest of the whole checkpoint."""
    reference: dict[str, ReferenceState]
    """What a reader of it holds; coding uses it up."""
    number: int = 0
    """Of the save, by which ranks make sure that they all have the same; 0 is a restore."""
    restored: bool = False
    """Whether the training went on from a restore of it."""
    exact: bool = False
    """Whether nothing of it was quantized, so that its weights stand for themselves, as after a restore."""
    anchor: Anchor | None = None
    """The earlier checkpoint of this chain that the delta builds on, whose digest `digest` is then. None: the last checkpoint."""


class Chain:
    """Commits checkpoints to one run, removes old ones, and knows what the next delta builds on; on the first of several ranks.

    Args:
        store: where to.
        config: how.
    """

    def __init__(self, store: RunStore, config: SaverConfig) -> None:
        self._store = store
        self._config = config
        self._writer: RunWriter | None = None
        self._restored = False  # whether the training was, since the chain's last anchor
        self._diverged = False
        self._warned_exact: set[str] = set()
        self._slimmer = Slimmer(store, config, span=_ANCHORS * config.key_every)
        self.parent: Manifest | None = None
        """The checkpoint that a delta builds on."""
        self.committed: Manifest | None = None
        """The last one that this process has committed."""
        self.lineage: str | None = None
        """The training that the next checkpoint belongs to, also when it is killed and resumed; None until the first one."""

    def open(self) -> RunWriter:
        """Return the run's writer; taking it makes this process the run's only one.

        Raises:
            StoreError: the store cannot be written, or holds something foreign.
        """
        if self._writer is None:
            self._writer = self._store.writer()
        return self._writer

    def close(self) -> None:
        """Let go of the store."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def follow(self, manifest: Manifest) -> None:
        """Belong to the training of this checkpoint, whatever is built on."""
        self.lineage = lineage_of(manifest.meta) or new_nonce()

    def continue_from(self, manifest: Manifest) -> None:
        """Continue the training of a restored checkpoint, and its chain."""
        self.follow(manifest)
        self.parent, self._restored = manifest, True

    # ---- what the next one builds on

    @property
    def base_is_due(self) -> bool:
        """Whether the next checkpoint of several ranks, whose chains have no anchors, is to be a base."""
        return self.parent is None or len(self.parent.chain) >= self._config.period

    def next(self, link: Link, move: Callable[[ReferenceState], ReferenceState] | None) -> Link | None:
        """Return what one process builds on: the last checkpoint, every so often an anchor, or nothing.

        An anchor builds on the one before, so that a restore reads few of the checkpoints in between.

        Args:
            link: to the last checkpoint.
            move: what puts the planes of an anchor away; None keeps them in memory.

        Raises:
            ChainError: the anchor is damaged or gone.
        """
        parent = self.parent
        if parent is None or self._config.key_every == 1:
            return None
        anchors = anchors_of(parent)
        if len(parent.chain) - len(anchors) + 1 < self._config.key_every:
            return link
        if not anchors:
            return None
        last = Anchor(len(anchors), anchors[-1])
        try:
            if len(anchors) < _ANCHORS:
                return self._on_anchor(parent, link, last, move)
            return self._on_base(parent, link, anchors[0])
        except FormatError as error:
            raise ChainError(str(error)) from error
        except StoreError as error:  # whether it can be written is seen next
            warn(f"{error}. The checkpoint is stored as a base, which takes more bytes")
            return None

    def _on_anchor(
        self,
        parent: Manifest,
        link: Link,
        anchor: Anchor,
        move: Callable[[ReferenceState], ReferenceState] | None,
    ) -> Link:
        """Return a link to an anchor, which is read from the run."""
        names = {name for name, known in link.reference.items() if known.sizes}
        link.reference.clear()
        header, _, batches = decode_batches(
            sources_of_run(self._store, parent)[: anchor.containers],
            lambda header: names & header.tensors.keys(),
            threads=self._config.encoder_threads,
            lasting=True,
        )
        reference = {
            entry.spec.name: known if move is None else move(known)
            for rows in batches
            for entry, known, _ in rows
        }
        return Link(header.state_digest, reference, restored=self._restored, anchor=anchor)

    def _on_base(self, parent: Manifest, link: Link, digest: str) -> Link | None:
        """Return a link to the chain's base, where much of that has not changed since, as frozen weights: a later base does without it."""
        base, last = (header_of(self._store, parent.chain[at]) for at in (0, -1))
        same = {
            name
            for name, record in base.tensors.items()
            if record.codec in _OF_VALUES
            and name in link.reference
            and (other := last.tensors.get(name)) is not None
            and (other.digest, other.codec) == (record.digest, record.codec)
        }
        if sum(base.tensors[name].nbytes for name in same) < _UNCHANGED * parent.chain[0].size:
            return None
        self._store.fetch_blob(parent.chain[0], parent)  # of which nothing else would find damage
        reference = {name: link.reference[name] for name in same}
        return Link(base.state_digest, reference, anchor=Anchor(1, digest))

    # ---- committing

    def commit(
        self,
        stored: bytes | Head,
        report: SaveReport,
        link: Link | None,
        meta: Mapping[str, JSON],
        *,
        state_digest: str = "",
        began: float | None = None,
        advances: bool = True,
        explained: bool = True,
    ) -> SaveReport:
        """Commit a checkpoint, and apply retention; on return it survives a crash.

        Args:
            stored: its container; or the head of the parts that several ranks have put.
            report: of the save.
            link: what it builds on; None for a base.
            meta: what the manifest has in addition.
            state_digest: of a container's state.
            began: the writer's clock before any of several parts was put; None of one container.
            advances: whether the next delta builds on it.
            explained: whether the user knows why tensors are stored exactly.

        Returns:
            The report, with the commit's number.

        Raises:
            ShrinkpointError: see `RunWriter.commit`.
        """
        started = time.perf_counter()
        parent, anchor = (self.parent, link.anchor) if link is not None else (None, None)
        anchors: list[JSON] = [] if parent is None else [*anchors_of(parent)]
        if anchor is not None:
            anchors[anchor.containers :] = [None]
        noted = {"save": report.to_json(), "lineage": self._lineage_of_this(), ANCHORS: anchors, **meta}
        if self._config.monitor is not None:
            noted["monitor"] = [self._config.monitor, self._config.mode]
        kind: Literal["base", "delta"] = "base" if link is None else "delta"
        manifest = self.open().commit(
            stored,
            step=report.step,
            kind=kind,
            parent=parent,
            anchor=anchor,
            state_digest=stored.state_digest if isinstance(stored, Head) else state_digest,
            meta=noted,
            began=began,
        )
        if isinstance(stored, bytes):
            report = replace(report, write_s=time.perf_counter() - started)
            self._store.copy_near(manifest, {manifest.chain[-1].key: stored})
        self.committed = manifest
        if advances:
            self.parent, self._restored = manifest, self._restored and link is not None and anchor is None
        if not explained:
            self._warn_exact(report)
        self._warn_diverged(report)
        for failing, action in (
            ("could not be removed", self._collect),
            ("keep their optimizer state", self._slim),
        ):
            try:
                action()
            except FencedError:
                raise
            except ShrinkpointError as error:  # older ones are as they were, as where nothing may be deleted
                warn(
                    f"the checkpoint is stored, but older ones {failing}: {error}. The next save tries again"
                )
        return replace(report, seq=manifest.seq, redundancy=self._store.redundancy, parity=self._store.parity)

    def _lineage_of_this(self) -> str:
        if self.lineage is None:
            others = self._store.manifests()
            if others:
                warn(
                    f"{self._store.display} holds {len(others)} checkpoints, the newest of step {others[0].step}, that this"
                    " training does not continue. They stay: retention leaves them alone (`shrinkpoint prune` removes them), and"
                    " a resume goes on from the newest one, which is this training's from now on. To go on from them, stop and"
                    " start with resume='must' (a Checkpointer's resume() must be called, on every rank; of"
                    " torch.distributed.checkpoint, a load by StorageReader); to keep the two apart, give another URL"
                )
            self.lineage = new_nonce()
        return self.lineage

    def _warn_diverged(self, report: SaveReport) -> None:
        """Once, until a checkpoint is finite again."""
        found = report.not_finite
        # of a loss alone, the planner has warned
        warned, self._diverged = self._diverged, found is not None and not found.startswith(LOSS_ALONE)
        if self._diverged and not warned:
            warn(
                f"the checkpoint of step {report.step} is not finite: {report.not_finite}. Has the training diverged? The newest"
                " finite checkpoints are kept in addition to those that follow, and `shrinkpoint ls` marks these"
            )

    def _warn_exact(self, report: SaveReport) -> None:
        """Once for each way in which a substantial share of a lossy scheme's bytes is exact, and need not be."""
        share = large_share(report.exact, report.bytes, f"step {report.step}'s checkpoint")
        if share is not None and share[0] not in self._warned_exact:
            self._warned_exact.add(share[0])
            warn(f"{share[1]}. This warning comes once")

    def _collect(self) -> None:
        policy = policy_of(self._config)
        if policy is None:
            return
        # A training that this one does not continue is not its to judge, whatever was forgotten.
        seen = [m for m in self._store.manifests() if lineage_of(m.meta) == self.lineage]
        records = [record_of(manifest, self._config.monitor) for manifest in seen]
        self.open().collect(policy.select(records), seen=seen, grace_s=self._config.grace_s)

    def _slim(self) -> None:
        """Turn older checkpoints into weights, where `keep_optimizer` says so."""
        if self._config.keep_optimizer:
            self._slimmer.run(self.open(), self.lineage)


@dataclass(frozen=True)
class StoredPart:
    """A part that is stored, and not committed yet."""

    part: Part
    reference: Mapping[str, ReferenceState]
    report: SaveReport
    """Of this part alone."""
    copied: Mapping[str, bytes] = field(default_factory=dict)
    """Its container, by the key, where it is copied to this node once it is committed."""

    def message(self) -> dict[str, Any]:
        """Give the message to the first rank, in JSON primitives."""
        return {
            "ref": self.part.ref.to_json(),
            "state_digest": self.part.state_digest,
            "report": asdict(self.report),
        }


def store_part(
    store: RunStore,
    encoded: EncodedState,
    report: SaveReport,
    part: PartOf,
    *,
    session: str,
    tree: JSON,
) -> StoredPart:
    """Put a rank's tensors into the run.

    Args:
        store: the run.
        encoded: the tensors.
        report: of this part; bytes and times of writing are added.
        part: whose it is.
        session: of the writer.
        tree: the whole state's plain data, of the first rank; None of others.

    Raises:
        StoreError: the store failed.
    """
    started = time.perf_counter()
    checkpoint = replace(encoded.checkpoint, tree=tree, part=part)
    container = write_container(checkpoint)
    encoded_at = time.perf_counter()
    ref = store.put_part(data_key(report.step, session), container)
    report = replace(
        report,
        bytes=ref.size,
        redundancy=store.redundancy,
        encode_s=report.encode_s + encoded_at - started,
        write_s=time.perf_counter() - encoded_at,
    )
    made = Part(ref=ref, state_digest=checkpoint.state_digest)
    copied = {ref.key: container} if store.copies_near else {}
    return StoredPart(made, encoded.reference, report, copied)


def commit_parts(
    chain: Chain,
    posts: Sequence[Mapping[str, Any]],
    link: Link | None,
    *,
    began: float,
    meta: Mapping[str, JSON] | None = None,
    advances: bool = True,
) -> SaveReport:
    """Commit the parts that the ranks have stored; on the first one.

    Args:
        chain: of the run.
        posts: of each rank, as `StoredPart.message`; ``untried`` is why it is not known what a restore does to its next updates.
        link: what they build on; None for a base.
        began: the writer's clock before any part was put.
        meta: as of `Chain.commit`.
        advances: as of `Chain.commit`.

    Raises:
        StoreError: a rank has failed.
        ShrinkpointError: see `RunWriter.commit`.
    """
    failed = [f"rank {rank}: {post['error']}" for rank, post in enumerate(posts) if "error" in post]
    if failed:
        raise StoreError(some(failed, 4, "; "))
    own = [SaveReport.of_message(post["report"]) for post in posts]
    report = merged(own, [post.get("untried") for post in posts])
    parts = [Part(ref=BlobRef.from_json(post["ref"]), state_digest=post["state_digest"]) for post in posts]
    head = Head(step=report.step, parts=tuple(parts))
    noted = {"ranks": len(posts), **(meta or {})}
    report = chain.commit(head, report, link, noted, began=began, advances=advances)
    # to some ranks more of several stores fail than to others
    spare = [one.redundancy for one in (report, *own) if one.redundancy is not None]
    return replace(report, redundancy=min(spare, default=None))
