"""What the manifests of a run say of its checkpoints, and which of these to keep: read without torch, for `ls` starts without it.

Only manifests are chosen here. Each manifest names its whole chain, so that the containers which a kept delta needs outlive
the manifests of the checkpoints in between.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.store.manifest import Manifest

if TYPE_CHECKING:
    from shrinkpoint.config import SaverConfig

ADOPTION = "adoption"
"""Under which name a manifest's meta describes the last planned save (`Adopted`)."""
ANCHORS = "anchors"
"""Under which name a manifest's meta has the digests of the anchors that its chain begins with; None stands for its own."""
WEIGHTS_ONLY = "weights_only"
"""Under which name a manifest's meta says that the optimizer's state is not in the checkpoint."""


def lineage_of(meta: Mapping[str, object]) -> str | None:
    """Return which training a checkpoint belongs to, by its manifest's meta; None where its writer did not note that.

    A training that was killed and resumed is the same one. Retention judges the checkpoints of its own training alone.
    """
    noted = meta.get("lineage")
    return noted if isinstance(noted, str) else None


def monitor_of(meta: Mapping[str, object]) -> tuple[str, Literal["min", "max"]] | None:
    """Return the metric by which a checkpoint's training ranks, and whether the least or the greatest is the best; None without one."""
    noted = meta.get("monitor")
    match noted if isinstance(noted, list) else None:
        case [str(name), ("min" | "max") as mode]:
            return name, mode
    return None


def anchors_of(manifest: Manifest) -> list[str]:
    """Return the digests of the anchors that a chain begins with, itself among them if it is one; empty where its writer did not note them.

    Between two anchors each checkpoint builds on the one before; an anchor builds on the anchor before, and a base is one.
    """
    if len(manifest.chain) == 1:
        return [manifest.digest]
    noted = manifest.meta.get(ANCHORS)
    if not isinstance(noted, list) or len(noted) > len(manifest.chain):
        return []
    return [manifest.digest if digest is None else str(digest) for digest in noted]


def is_weights_only(meta: Mapping[str, object]) -> bool:
    """Return whether the optimizer's state was left out of a checkpoint, or taken out later, by its manifest's meta."""
    return meta.get(WEIGHTS_ONLY) is True


def not_finite_text(manifest: Manifest) -> str | None:
    """Return what was not finite of a stored checkpoint, as its writer noted it; None where all was, or nothing is noted."""
    noted = _save_of(manifest).get("not_finite")
    return noted if isinstance(noted, str) and noted else None


def metrics_of(manifest: Manifest) -> dict[str, Any]:
    """Return the metrics that were stored with a checkpoint."""
    metrics = _save_of(manifest).get("metrics")
    return dict(metrics) if isinstance(metrics, dict) else {}


def _save_of(manifest: Manifest) -> Mapping[str, Any]:
    save = manifest.meta.get("save")
    return save if isinstance(save, dict) else {}


def is_finite(manifest: Manifest) -> bool:
    """Return whether nothing of a stored checkpoint is known to be NaN or infinite."""
    return not_finite_text(manifest) is None


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
    """See `shrinkpoint.engine.adopt`."""
    since: int | None = None
    """Step of the weights that the next save's movement is counted from: the last planned save's, or the training's first. None
    where they are not known, in the undisturbed run either."""
    stand_ins: frozenset[str] = frozenset()
    """Tensors that were quantized then, but that its container holds exactly, or that are in no container."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a manifest's ``meta``."""
        noted = {name: value for name, value in vars(self).items() if name != "search"}
        return {**noted, "settings": dict(self.settings), "stand_ins": sorted(self.stand_ins)}


def adopted_of(manifest: Manifest) -> Adopted | None:
    """Return what a checkpoint's manifest says; None where its training did not adopt, or the entry is malformed."""
    search = manifest.meta.get("search")
    match manifest.meta.get(ADOPTION):
        case {
            "planned": bool(planned),
            "count": int(count),
            "step": int(step),
            "settings": dict(settings),
            "since": since,
            "stand_ins": list(names),
        } if all(
            type(number) is int and number >= 0 for number in (count, step, 0 if since is None else since)
        ) and all(type(name) is str for name in names):
            return Adopted(
                planned=planned,
                count=count,
                step=step,
                search=search if isinstance(search, dict) else {},
                settings=settings,
                since=since,
                stand_ins=frozenset(names),
            )
    return None


_NEWEST = 3

Mode: TypeAlias = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a decision may depend on.

    Attributes:
        seq: Number of the manifest.
        step: Training step.
        epoch: The writer's turn; the newest checkpoint has the highest (epoch, seq).
        replaces: (epoch, seq) of the checkpoint in whose place this one stands.
        metric: The monitored metric; None or not finite where it was not measured.
        finite: Whether nothing of its state is known to be NaN or infinite.
    """

    seq: int
    step: int
    epoch: int = 0
    replaces: tuple[int, int] | None = None
    metric: float | None = None
    finite: bool = True


def keep_last(records: Iterable[Record], count: int) -> set[int]:
    """Return the sequence numbers of the newest ``count``."""
    return {record.seq for record in _newest_first(records)[:count]}


def keep_every(records: Iterable[Record], steps: int) -> set[int]:
    """Return those of the first of every ``steps`` training steps: with 1000, the first from step 0, from 1000, from 2000, ...

    What it kept once it keeps as training goes on. A step that was saved twice, because the run was resumed before it,
    counts by its newest checkpoint.
    """
    first: dict[int, Record] = {}
    for record in _newest_first(records):
        window = record.step // steps
        if window not in first or record.step < first[window].step:
            first[window] = record
    return {record.seq for record in first.values()}


def keep_best(records: Iterable[Record], count: int, mode: Mode) -> set[int]:
    """Return those of the ``count`` with the lowest (``"min"``) or highest (``"max"``) metric; of equals, that of the earliest step.

    What is not finite comes after all that is: its metric may be one of before. As long as none has the metric, all are kept: the
    best one may be any of them.
    """
    sign, records = 1.0 if mode == "min" else -1.0, _newest_first(records)
    measured = [
        ((not record.finite, sign * record.metric, record.step), record.seq)
        for record in records
        if record.metric is not None and math.isfinite(record.metric)
    ]
    if all(record.metric is None for record in records):
        return {record.seq for record in records}
    # A stable sort: of a step that was saved twice, the newest stays first.
    return {seq for _, seq in sorted(measured, key=lambda pair: pair[0])[:count]}


def _keep_total(records: Iterable[Record], count: int, mode: Mode) -> set[int]:
    """So many in all, as Hugging Face's Trainer: the newest, among which the best takes the place of the oldest."""
    ordered = _newest_first(records)
    best = keep_best([record for record in ordered if record.metric is not None], 1, mode)
    newest = keep_last(ordered, count)
    return newest if best <= newest else best | keep_last(ordered, max(count - 1, 1))


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Everything that one of the rules keeps, and always the newest. With no rule, everything.

    A training that has diverged displaces none of the checkpoints to go back to: the newest finite ones stay too, as many as
    `keep_last` says, and one at least.

    Attributes:
        keep_last: Keep the newest so many.
        keep_every: Keep the first of every so many steps.
        keep_best: Keep so many with the best metric.
        keep_total: Keep so many in all.
        mode: Whether a good metric is low (``"min"``) or high (``"max"``).

    Raises:
        ConfigError: A number is not positive, or the mode is unknown.

    Examples:
        >>> records = [Record(seq=seq, step=10 * seq) for seq in range(6)]
        >>> sorted(RetentionPolicy(keep_last=2, keep_every=30).select(records))
        [0, 3, 4, 5]
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    keep_total: int | None = None
    mode: Mode = "min"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best", "keep_total"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(
                    f"RetentionPolicy.{name}={value!r}: use a whole number from 1, or leave it out"
                )
        if self.mode not in ("min", "max"):
            raise ConfigError(f"RetentionPolicy.mode={self.mode!r}: use 'min' or 'max'")

    def select(self, records: Iterable[Record], pinned: Collection[int] = ()) -> set[int]:
        """Sequence numbers to keep.

        Args:
            records: Every checkpoint of the run, in any order.
            pinned: Sequence numbers that are kept whatever the rules say.
        """
        ordered = _newest_first(records)
        rules: tuple[tuple[int | None, Callable[[Iterable[Record], int], set[int]]], ...] = (
            (self.keep_last, keep_last),
            (self.keep_every, keep_every),
            (self.keep_best, partial(keep_best, mode=self.mode)),
            (self.keep_total, partial(_keep_total, mode=self.mode)),
        )
        found = [keep(ordered, number) for number, keep in rules if number is not None]
        if not found:
            return {record.seq for record in ordered}
        kept = {record.seq for record in ordered[:1]} | set(pinned)
        kept |= keep_last((record for record in ordered if record.finite), self.keep_last or 1)
        return kept.union(*found)


def _newest_first(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=_position, reverse=True)


def _position(record: Record) -> tuple[int, int, int, int]:
    own = (record.epoch, record.seq)
    return (record.replaces or own) + own


def record_of(manifest: Manifest, monitor: str | None) -> Record:
    """Return what retention needs to know of a checkpoint."""
    known = {"step": manifest.step, **metrics_of(manifest)}
    metric = known.get(monitor) if monitor is not None else None
    measured = float(metric) if isinstance(metric, int | float) else None
    return Record(
        seq=manifest.seq,
        step=manifest.step,
        epoch=manifest.epoch,
        replaces=manifest.replaces,
        metric=measured,
        finite=is_finite(manifest),
    )


def policy_of(config: "SaverConfig") -> RetentionPolicy | None:
    """Return what a training's options keep; None where that is everything."""
    ranks = config.monitor is not None and config.save_top_k > 0
    if config.save_total_limit is not None:
        return RetentionPolicy(
            keep_total=config.save_total_limit, keep_every=config.keep_every, mode=config.mode
        )
    if config.save_top_k == -1 or not (ranks or config.keep_last or config.keep_every):
        return None
    return RetentionPolicy(
        keep_last=config.keep_last or _NEWEST,
        keep_every=config.keep_every,
        keep_best=config.save_top_k if ranks else None,
        mode=config.mode,
    )


def best_of(manifests: Sequence[Manifest]) -> Manifest:
    """Return the best checkpoint of the training that a run's newest one belongs to, by the monitor that its saves have noted.

    Args:
        manifests: the run's, newest first.

    Raises:
        NoCheckpointError: there is none, or which one it is is not known.
    """
    own = [each for each in manifests if lineage_of(each.meta) == lineage_of(manifests[0].meta)]
    monitor, mode = next((noted for each in own if (noted := monitor_of(each.meta))), (None, None))
    if monitor is None or mode is None:
        raise NoCheckpointError(
            f"which of its {len(own)} checkpoints is the best is not known: none was saved with a monitor="
        )
    measured = [each for each in own if record_of(each, monitor).metric is not None]
    best = keep_best((record_of(each, monitor) for each in measured), 1, mode)
    for manifest in measured:
        if manifest.seq in best:
            return manifest
    raise NoCheckpointError(f"none of its {len(own)} checkpoints was saved with the metric {monitor!r}")
