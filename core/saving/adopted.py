"""What a manifest says of adoption: which planned save of a run the training has last gone on from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shrinkpoint.store.manifest import Manifest

__all__ = ["KEY", "Adopted", "adopted_of"]

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
    """See `shrinkpoint.saving.fingerprint`."""
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
