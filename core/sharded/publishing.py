"""The background half of the first rank: commits a checkpoint when all parts are stored, and applies retention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import StoreError
from shrinkpoint.reports import SaveReport
from shrinkpoint.saving.committer import RunCommits
from shrinkpoint.saving.meta import KEY as ADOPTION
from shrinkpoint.saving.meta import Adopted
from shrinkpoint.saving.reporting import merged
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.manifest import BlobRef, Manifest
from shrinkpoint.store.parts import Part
from shrinkpoint.store.run import RunStore

__all__ = ["AdoptedPart", "Publisher"]


@dataclass(frozen=True, kw_only=True)
class AdoptedPart:
    """What the first rank knows of the adoption at a save."""

    last: Adopted
    """The last planned save up to here, this one included."""
    adopt_s: float | None = None
    """As in the report."""
    waited_s: float | None = None
    """As in the report."""

    def last_with(self, posts: Sequence[Mapping[str, Any]]) -> Adopted:
        """The same, with the tensors of all ranks that no container has as they were quantized."""
        if not self.last.planned:
            return self.last
        return replace(self.last, stand_ins=frozenset(name for post in posts for name in post["stand_ins"]))


class Publisher(RunCommits):
    """Commits to one run, and keeps the chain of the checkpoints that it committed.

    Args:
        store: the run.
        config: how to save.
    """

    def __init__(self, store: RunStore, config: SaverConfig) -> None:
        super().__init__(store, config)
        self.parent: Manifest | None = None
        """What the next delta builds on."""
        self.digest = ""
        """State digest of the checkpoint that was committed last."""

    @property
    def base_is_due(self) -> bool:
        """Whether the next checkpoint is to be a base."""
        return self.parent is None or len(self.parent.chain) >= self._config.period

    def adopt(self, manifest: Manifest) -> None:
        """Continue the training of a restored checkpoint, and its chain."""
        self.parent = manifest
        self.follow(manifest)

    def publish(
        self,
        posts: Sequence[Mapping[str, Any]],
        *,
        step: int,
        delta: bool,
        metrics: Mapping[str, float],
        blocked_s: float,
        began: float,
        adoption: AdoptedPart | None = None,
        search: JSON = None,
        search_s: float = 0.0,
    ) -> SaveReport:
        """Commit the parts that the ranks have stored.

        Args:
            posts: of each rank, as `StoredPart.message`.
            step: the training step.
            delta: whether they build on `parent`.
            metrics: stored with the checkpoint.
            blocked_s: seconds that training waited.
            began: the writer's clock before any part was put.
            adoption: where the training adopts its checkpoints. One that was not planned is a branch: the next builds on the last
                planned one.
            search: the state of the search for settings, where it measures.
            search_s: seconds that training spent in evaluations for this save.

        Raises:
            ShrinkpointError: see `RunWriter.commit_parts`; or a rank has failed.
        """
        failed = [f"rank {rank}: {post['error']}" for rank, post in enumerate(posts) if "error" in post]
        if failed:
            raise StoreError(
                "; ".join(failed[:4]) + (f" and {len(failed) - 4} more" if len(failed) > 4 else "")
            )
        own = [SaveReport.of_message(post["report"]) for post in posts]
        report = merged(own, [post["untried"] for post in posts])
        report = replace(report, blocked_s=blocked_s, metrics=dict(metrics), search_s=search_s)
        meta = {"lineage": self._lineage_of_this(), "ranks": len(posts)}
        if search is not None:
            meta["search"] = search
        if self._config.monitor is not None:
            meta["monitor"] = [self._config.monitor, self._config.mode]
        if adoption is not None:
            meta[ADOPTION] = adoption.last_with(posts).to_json()
            report = replace(report, adopt_s=adoption.adopt_s, waited_s=adoption.waited_s)
        kind: Literal["base", "delta"] = "delta" if delta else "base"
        parts = [
            Part(ref=BlobRef.from_json(post["ref"]), state_digest=post["state_digest"]) for post in posts
        ]
        manifest = self.open().commit_parts(
            parts,
            step=step,
            kind=kind,
            parent=self.parent if delta else None,
            meta={"save": report.to_json(), **meta},
            began=began,
        )
        self.digest = manifest.state_digest
        if adoption is None or adoption.last.planned:
            self.parent = manifest
        self._collect()
        return replace(report, seq=manifest.seq, redundancy=self._redundancy(own), parity=self._store.parity)

    def _redundancy(self, reports: Sequence[SaveReport]) -> int | None:
        """By the rank to which the most of several stores fail: its part has the fewest shards to spare."""
        own = self._store.redundancy
        return (
            None if own is None else min([own, *(r.redundancy for r in reports if r.redundancy is not None)])
        )
