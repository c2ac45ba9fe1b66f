"""What is told about each save: to the user's logger, the manifest and the command line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from shrinkpoint.schemes.exactness import ExactPart, parts_json
from shrinkpoint.state.tree import JSON

__all__ = ["Accepted", "Measured", "SaveReport"]

Measured = Literal["measured", "exact", "unmeasured", "blind"]
"""How a checkpoint's degradation is known: measured; 0, for all is exact; not at all; not at all, for the evaluation was
found not to see the weights."""

_NAMED = 100  # a manifest is small; thousands of tensors kept exactly are told by their number


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A save that has begun: its snapshot is taken, the rest happens in the background.

    Examples:
        >>> checkpointer = shrinkpoint.Checkpointer("runs/8", model, optimizer, scheme="lossless")
        >>> accepted = checkpointer.save(500)
        >>> accepted.step
        500
        >>> accepted.blocked_s < 60
        True
    """

    step: int
    """The training step of the state."""
    blocked_s: float
    """Seconds that training waited for the snapshot."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """A save that was committed.

    Examples:
        >>> checkpointer = shrinkpoint.Checkpointer("runs/8", model, optimizer, scheme="lossless")
        >>> accepted = checkpointer.save(500)
        >>> checkpointer.close()
        >>> report = checkpointer.saver.reports()[-1]
        >>> report.step, report.kind, report.measured
        (500, 'base', 'exact')
        >>> report.ratio > 1
        True
    """

    step: int
    """The training step of the state."""
    seq: int
    """The commit's number."""
    kind: str
    """``base`` or ``delta``."""
    scheme: str
    """The scheme's name."""
    configuration: str
    """What the search chose, in short; why, in `reason`."""
    reason: str
    """Why this configuration, in words."""
    bytes: int
    """Size of the container."""
    raw_bytes: int
    """Size of the state's tensors in memory."""
    sections: Mapping[str, int]
    """Bytes of the coded tensors by role."""
    raw_sections: Mapping[str, int]
    """Bytes of the tensors in memory by role."""
    degradation: float | None
    """Relative rise of the held-out loss at a restore, without the luck of its first-order part; None where it could not be
    measured, 0.0 where all is exact."""
    degradation_low: float | None = None
    """Lower end of its interval."""
    degradation_high: float | None = None
    """Upper end of its interval, which is within what a restore may cost."""
    degradation_luck: float | None = None
    """What the loss right at the restore rises by beyond `degradation`: of the first order, so of either sign by chance, and
    trained away."""
    measured: Measured = "measured"
    """How `degradation` is known."""
    allowed: float | None = None
    """What a restore may cost for good; with steps tried from a restored state, `degradation` may be more."""
    resumed: Mapping[str, float]
    """The same after so many optimizer steps from the restore, where it was measured at this save."""
    resumed_high: Mapping[str, float] = field(default_factory=dict)
    """Upper ends of `resumed`."""
    baseline: float | None
    """Held-out loss of the true weights."""
    update_error: float | None = None
    """How far the next update of the training's own optimizer would be from the true one, relative to its length."""
    update_length: float | None = None
    """How long it would be, relative to the true one."""
    lost_steps: float | None = None
    """Training steps that are done in vain because the restored optimizer state has lost some of what it remembered."""
    overhead: float = 0.0
    """Share of the time of this process that evaluations and steps from restored states have taken so far."""
    evaluations: int
    """Evaluations made for this save."""
    blocked_s: float
    """Seconds that training waited for the snapshot."""
    search_s: float
    """Seconds that training spent in evaluations for this save."""
    encode_s: float
    """Seconds of the background thread from snapshot to container."""
    write_s: float
    """Seconds of the background thread from container to commit."""
    redundancy: int | None = None
    """How many of several stores may still be lost and all that was saved is there, as far as this process knows; None where
    there is one store."""
    parity: int | None = None
    """How many of several stores may be lost where all are well, as the run began; None where there is one store."""
    metrics: Mapping[str, float]
    """What was given to the save."""
    not_finite: str | None = None
    """What of the state or its held-out loss is NaN or infinite; None where nothing is."""
    kept_exactly: Mapping[str, str]
    """Tensors that the scheme could not represent, or that must not be coded (`Tag.why`), with the reason."""
    exact: Sequence[ExactPart] = ()
    """What a lossy scheme has stored bit-exactly, by role and reason, the most bytes first."""

    @property
    def ratio(self) -> float:
        """How many times smaller than the tensors in memory."""
        return self.raw_bytes / self.bytes

    def to_json(self) -> dict[str, JSON]:
        """The report as it stands in a manifest's ``meta``; what is not finite is null, for JSON has no word for it."""
        kept = list(self.kept_exactly.items())
        more = {"...": f"and {len(kept) - _NAMED} more tensors"} if len(kept) > _NAMED else {}
        report = asdict(self) | {"kept_exactly": dict(kept[:_NAMED]) | more, "ratio": self.ratio}
        report["exact"] = parts_json(self.exact, self.bytes)
        for name in (
            "seq",
            "write_s",
            "redundancy",
            "parity",
        ):  # known only once the manifest that holds this is stored
            del report[name]
        report["metrics"] = {name: _finite(value) for name, value in self.metrics.items()}
        for name in ("resumed", "resumed_high"):
            report[name] = {steps: _finite(rise) for steps, rise in getattr(self, name).items()}
        return {name: _finite(value) for name, value in report.items()}


def _finite(value: JSON) -> JSON:
    return None if isinstance(value, float) and not math.isfinite(value) else value
