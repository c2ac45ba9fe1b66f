"""What the meta of a manifest says of its checkpoint, read without torch: `ls` starts without it."""

from collections.abc import Mapping
from typing import Literal

from shrinkpoint.store.manifest import Manifest

__all__ = ["WEIGHTS_ONLY", "is_finite", "is_weights_only", "lineage_of", "monitor_of", "not_finite_text"]

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
