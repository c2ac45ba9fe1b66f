"""The report of each save, for the user's logger, the manifest and the command line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shrinkpoint.schemes.exactness import ExactPart, parts_json
from shrinkpoint.state.tree import JSON

Measured = Literal["measured", "exact", "unmeasured", "blind"]
"""How a checkpoint's degradation is known: measured; 0 because all is exact; unknown; unknown because the evaluation
was found not to depend on the weights."""

_NAMED = 100  # keeps a manifest small: of more tensors kept exactly only the number is reported


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A save whose snapshot is taken; encoding and writing continue in the background.

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
    """The chosen settings, in short."""
    reason: str
    """Why these settings were chosen."""
    bytes: int
    """Size of the container."""
    raw_bytes: int
    """Size of the state's tensors in memory."""
    sections: Mapping[str, int]
    """Bytes of the coded tensors by role."""
    raw_sections: Mapping[str, int]
    """Bytes of the tensors in memory by role."""
    degradation: float | None
    """Relative rise of the held-out loss at a restore, without its first-order part; None where it could not be
    measured, 0.0 where all is exact."""
    degradation_low: float | None = None
    """Lower end of its interval."""
    degradation_high: float | None = None
    """Upper end of its interval, which is within the allowed cost of a restore."""
    cost: float | None = None
    """Expected cost of a restore to the run, relative: `degradation`, or what lasts of it where that may be more, and half of what
    the loss falls by in the steps that the restored moments lose. None where the degradation could not be measured."""
    cost_high: float | None = None
    """Its upper end, with `max(reserve, cost_delay)`: the reserve is the half of `max_degradation` that is for what no measurement at a
    save sees (with `adopt`, three quarters). Of several checkpoints that were restored these parts count together, as the reserve
    or the sum of their delays, whichever is more; the rest of each upper end adds up."""
    cost_delay: float | None = None
    """Upper end of what lost progress costs: the fall of the loss over the steps that a restore loses."""
    degradation_noise: float | None = None
    """Rise of the loss right at the restore less `degradation`: the first-order part, of either sign by chance, which
    is trained away."""
    measured: Measured = "measured"
    """Whether `degradation` was measured, is 0 because all is exact, or is unknown."""
    allowed: float | None = None
    """The allowed lasting cost of a restore; where a probe is made, `degradation` may be more."""
    resumed: Mapping[str, float]
    """The rise by number of optimizer steps after the restore, where this save was probed."""
    resumed_high: Mapping[str, float] = field(default_factory=dict)
    """Upper ends of `resumed`."""
    baseline: float | None
    """Held-out loss of the true weights."""
    update_error: float | None = None
    """Error of the next update of the training's own optimizer, relative to the true update's length."""
    update_length: float | None = None
    """Length of that update, relative to the true one's."""
    lost_steps: float | None = None
    """Training steps of progress lost: of restored optimizer state that has lost some of its memory, and of weights that lag behind."""
    overhead: float = 0.0
    """Share of the time of this process that evaluations and steps from restored states have taken so far."""
    evaluations: int
    """Evaluations made for this save."""
    blocked_s: float
    """Seconds that training waited for the snapshot."""
    adopt_s: float | None = None
    """Seconds that training then waited until it had taken over what is restored of this save, without evaluations; None where it
    went on from its own state."""
    waited_s: float | None = None
    """With ``adopt=True``, seconds that training waited before for the last save to be written."""
    search_s: float
    """Seconds that training spent in evaluations for this save."""
    encode_s: float
    """Seconds of the background thread from snapshot to container."""
    write_s: float
    """Seconds of the background thread from container to commit."""
    redundancy: int | None = None
    """How many of several stores may still be lost without losing a checkpoint, as far as this process knows; None for
    one store."""
    parity: int | None = None
    """How many of several stores may be lost when all of them are well, as the run began; None for one store."""
    metrics: Mapping[str, float]
    """The metrics that were given to the save."""
    not_finite: str | None = None
    """Which part of the state or its held-out loss is NaN or infinite; None if all are finite."""
    kept_exactly: Mapping[str, str]
    """Tensors that the scheme could not represent, or that must not be coded (`Tag.why`), with the reason."""
    exact: Sequence[ExactPart] = ()
    """The tensors that a lossy scheme has stored bit-exactly, by role and reason, the most bytes first."""

    @property
    def ratio(self) -> float:
        """Compression ratio: bytes of the tensors in memory over the container's."""
        return self.raw_bytes / self.bytes

    @staticmethod
    def of_message(fields: Mapping[str, Any]) -> "SaveReport":
        """Make a report of what ``asdict`` gave of one, after its way through JSON."""
        return SaveReport(**{**fields, "exact": tuple(ExactPart(**part) for part in fields["exact"])})

    def to_json(self) -> dict[str, JSON]:
        """Return the report in the form of a manifest's ``meta``; numbers that are not finite are null, since JSON cannot
        express them."""
        kept = list(self.kept_exactly.items())
        more = {"...": f"and {len(kept) - _NAMED} more tensors"} if len(kept) > _NAMED else {}
        report = asdict(self) | {"kept_exactly": dict(kept[:_NAMED]) | more, "ratio": self.ratio}
        report["exact"] = parts_json(self.exact, self.bytes)
        for name in ("adopt_s", "waited_s"):  # of trainings that adopt only
            if report[name] is None:
                del report[name]
        # known only once the manifest that contains this is stored
        for name in ("seq", "write_s", "redundancy", "parity"):
            del report[name]
        report["metrics"] = {name: finite_or_none(value) for name, value in self.metrics.items()}
        for name in ("resumed", "resumed_high"):
            report[name] = {steps: finite_or_none(rise) for steps, rise in getattr(self, name).items()}
        return {name: finite_or_none(value) for name, value in report.items()}


def finite_or_none(value: JSON) -> JSON:
    """Return the value, or None for a float that JSON has no number for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
