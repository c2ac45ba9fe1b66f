"""What the meta of a manifest says of its checkpoint, read without torch: `ls` starts without it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shrinkpoint.store.manifest import Manifest

__all__ = [
    "ANCHORS",
    "KEY",
    "WEIGHTS_ONLY",
    "Adopted",
    "adopted_of",
    "anchors_of",
    "is_finite",
    "is_weights_only",
    "lineage_of",
    "monitor_of",
    "not_finite_text",
]

ANCHORS = "anchors"
"""Under which name a manifest's meta has the digests of the anchors that its chain begins with; None stands for its own."""
WEIGHTS_ONLY = "weights_only"
"""Under which name a manifest's meta says that the optimizer's state is not in the checkpoint."""


def lineage_of(meta: Mapping[str, object]) -> str | None:
    """Which training a checkpoint belongs to, by its manifest's meta; None where its writer did not note that.

    A training that was killed and resumed is the same one. Retention judges the checkpoints of its own training alone.
    """
    noted = meta.get("lineage")
    return noted if isinstance(noted, str) else None


def monitor_of(meta: Mapping[str, object]) -> tuple[str, Literal["min", "max"]] | None:
    """The metric by which a checkpoint's training ranks, and whether the least or the greatest is the best; None without one."""
    noted = meta.get("monitor")
    match noted if isinstance(noted, list) else None:
        case [str(name), ("min" | "max") as mode]:
            return name, mode
    return None


def anchors_of(manifest: Manifest) -> list[str]:
    """The digests of the anchors that a chain begins with, itself among them if it is one; empty where its writer did not note them.

    Between two anchors each checkpoint builds on the one before; an anchor builds on the anchor before, and a base is one.
    """
    if len(manifest.chain) == 1:
        return [manifest.digest]
    noted = manifest.meta.get(ANCHORS)
    if not isinstance(noted, list) or len(noted) > len(manifest.chain):
        return []
    return [manifest.digest if digest is None else str(digest) for digest in noted]


def is_weights_only(meta: Mapping[str, object]) -> bool:
    """Whether the optimizer's state was left out of a checkpoint, or taken out later, by its manifest's meta."""
    return meta.get(WEIGHTS_ONLY) is True


def not_finite_text(manifest: Manifest) -> str | None:
    """What was not finite of a stored checkpoint, as its writer noted it; None where all was, or nothing is noted."""
    save = manifest.meta.get("save")
    noted = save.get("not_finite") if isinstance(save, dict) else None
    return noted if isinstance(noted, str) and noted else None


def is_finite(manifest: Manifest) -> bool:
    """Whether nothing of a stored checkpoint is known to be NaN or infinite."""
    return not_finite_text(manifest) is None


KEY = "adoption"
"""Of a manifest's ``meta``."""


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """The last planned save up to a checkpoint."""

    planned: bool = False
    """Whether the checkpoint itself was planned and adopted; otherwise it is exact."""
    count: int = 0
    """Adoptions of the run so far."""
    step: int = 0
    """Of the last one."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """State of the search after it; stored as the checkpoint's own."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """See `shrinkpoint.engine.planned`."""
    since: int | None = None
    """Step of the weights that the next save's movement is counted from: the last planned save's, or the training's first. None
    where they are not known, in the undisturbed run either."""
    stand_ins: frozenset[str] = frozenset()
    """Tensors that were quantized then, but that its container holds exactly, or that are in no container."""

    def to_json(self) -> dict[str, Any]:
        """The entry of a manifest's ``meta``."""
        return {
            "planned": self.planned,
            "count": self.count,
            "step": self.step,
            "settings": dict(self.settings),
            "since": self.since,
            "stand_ins": sorted(self.stand_ins),
        }


def adopted_of(manifest: "Manifest") -> Adopted | None:
    """What a checkpoint's manifest says; None where its training did not adopt, or the entry is malformed."""
    entry, search = manifest.meta.get(KEY), manifest.meta.get("search")
    if not isinstance(entry, dict):
        return None
    planned, count, step = (entry.get(name) for name in ("planned", "count", "step"))
    settings, stand_ins, since = (entry.get(name) for name in ("settings", "stand_ins", "since"))
    right = (
        type(planned) is bool
        and type(count) is int
        and count >= 0
        and type(step) is int
        and step >= 0
        and (since is None or (type(since) is int and since >= 0))
        and isinstance(settings, dict)
        and isinstance(stand_ins, list)
        and all(type(name) is str for name in stand_ins)
    )
    if not right:
        return None
    return Adopted(
        planned=bool(planned),
        count=count or 0,
        step=step or 0,
        search=search if isinstance(search, dict) else {},
        settings=settings or {},
        since=since,
        stand_ins=frozenset(stand_ins or ()),
    )
