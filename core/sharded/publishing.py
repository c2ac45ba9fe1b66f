"""The background half of the first rank: commits a checkpoint when all parts are stored, and applies retention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import StoreError
from shrinkpoint.reports import Measured, SaveReport
from shrinkpoint.saving.committer import RunCommits
from shrinkpoint.saving.meta import KEY as ADOPTION
from shrinkpoint.saving.meta import Adopted
from shrinkpoint.schemes.exactness import ExactPart
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.manifest import BlobRef, Manifest
from shrinkpoint.store.parts import Part
from shrinkpoint.store.run import RunStore

__all__ = ["AdoptedPart", "Publisher", "posted"]


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
        return replace(
            self.last, stand_ins=frozenset(name for post in posts for name in post["report"]["stand_ins"])
        )


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
            posts: of each rank, as `posted`.
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
        report = _report([post["report"] for post in posts], step, metrics, blocked_s)
        report = replace(report, search_s=search_s)
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
        return replace(
            report, seq=manifest.seq, redundancy=self._redundancy(posts), parity=self._store.parity
        )

    def _redundancy(self, posts: Sequence[Mapping[str, Any]]) -> int | None:
        """By the rank to which the most of several stores fail: its part has the fewest shards to spare."""
        known = [post["report"]["redundancy"] for post in posts]
        own = self._store.redundancy
        return None if own is None else min([own, *(number for number in known if number is not None)])


def posted(part: Part, report: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a rank that has stored its part."""
    return {"ref": part.ref.to_json(), "state_digest": part.state_digest, "report": dict(report)}


def _report(
    parts: Sequence[Mapping[str, Any]], step: int, metrics: Mapping[str, float], blocked_s: float
) -> SaveReport:
    lossy = [part for part in parts if not part["is_exact"]] or list(parts)
    measured: Measured = "exact" if all(part["is_exact"] for part in parts) else "unmeasured"
    known: Mapping[str, Any] | None = parts[0][
        "measured"
    ]  # only the first rank plans where losses are measured
    bad = [f"rank {rank}: {part['not_finite']}" for rank, part in enumerate(parts) if part["not_finite"]]
    report = SaveReport(
        step=step,
        seq=-1,
        kind=str(parts[0]["kind"]),
        scheme=str(lossy[0]["scheme"]),
        configuration=str(lossy[0]["configuration"]),
        reason=str(lossy[0]["reason"]),
        bytes=sum(part["bytes"] for part in parts),
        raw_bytes=sum(part["raw_bytes"] for part in parts),
        sections=_added([part["sections"] for part in parts]),
        raw_sections=_added([part["raw_sections"] for part in parts]),
        degradation=0.0 if measured == "exact" else None,
        measured=measured,
        resumed={},
        baseline=None,
        evaluations=0,
        blocked_s=blocked_s,
        search_s=0.0,
        encode_s=max(part["encode_s"] for part in parts),
        write_s=max(part["write_s"] for part in parts),
        metrics=dict(metrics),
        not_finite="; ".join(bad) or None,
        kept_exactly={name: why for part in parts for name, why in part["kept_exactly"].items()},
        exact=_exact([tuple(row) for part in parts for row in part["exact"]]),
    )
    report = _with_updates(report, parts)
    return report if known is None else replace(report, **known)


def _with_updates(report: SaveReport, parts: Sequence[Mapping[str, Any]]) -> SaveReport:
    """With what a restore does to the next updates of the rank where that is most, and on which ranks it is not known."""
    untried = [(rank, part["untried"]) for rank, part in enumerate(parts) if part.get("untried")]
    if untried:
        ranks = "all ranks" if len(untried) == len(parts) else f"rank {', '.join(str(r) for r, _ in untried)}"
        warned = f"what a restore does to the next updates was not tried on {ranks}: {untried[0][1]}"
        report = replace(report, reason=f"{report.reason}; {warned}")
    tried = [part["updates"] for part in parts if part.get("updates")]
    if not tried:
        return report
    error, length, _ = max(tried)
    lost = max(steps for *_, steps in tried)
    return replace(report, update_error=error, update_length=length, lost_steps=lost)


def _added(sizes: Sequence[Mapping[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for own in sizes:
        for role, size in own.items():
            totals[role] = totals.get(role, 0) + size
    return totals


def _exact(rows: Sequence[Sequence[Any]]) -> tuple[ExactPart, ...]:
    totals: dict[tuple[str, str], list[int]] = {}
    for role, code, *numbers in rows:
        known = totals.setdefault((role, code), [0, 0, 0])
        totals[role, code] = [a + b for a, b in zip(known, numbers, strict=True)]
    parts = (
        ExactPart(role=role, code=code, tensors=count, bytes=size, raw_bytes=raw)
        for (role, code), (count, size, raw) in totals.items()
    )
    return tuple(sorted(parts, key=lambda part: -part.bytes))
