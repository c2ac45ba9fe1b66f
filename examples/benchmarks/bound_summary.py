"""What the cells of the bench of the bound come to: for each training and setting, whether the promise was kept."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bound_trainings import KINDS, source_digest

from shrinkpoint.config import SaverConfig
from shrinkpoint.quality.restore_budget import NO_COST, RestoreCost, fall_of, reserve_of, restore_cost

__all__ = ["ABILITY_LIMIT", "LIMIT", "SAME", "Mean", "Reported", "Row", "reported_of", "rows_of"]

Cell = Mapping[str, Any]

LIMIT = 0.01
"""What ten restores may cost of the final loss."""
ABILITY_LIMIT = 0.002
"""What they may cost of an ability from before, which no probe measures."""
SAME = ("auto", "{}")
"""The setting that is the library's default."""


_FLOOR = SaverConfig().loss_floor


@dataclass(frozen=True)
class Reported:
    """What the library has reported that the restores cost together."""

    mean: float
    high: float
    unmeasured: int
    """Checkpoints of which nothing could be measured."""
    exact: int
    recomputed: int
    """Checkpoints whose cost was computed here, by the library's own functions from the other numbers of their reports, because a
    state of the library without `SaveReport.cost_delay` has written them."""


def reported_of(saves: Sequence[Cell], config: Mapping[str, Any]) -> Reported:
    """Sum up the reports.

    Args:
        saves: of the checkpoints that were restored.
        config: fields of `SaverConfig` that are not at their defaults.
    """
    default = SaverConfig()
    fields = {
        name: config.get(name, getattr(default, name))
        for name in ("max_degradation", "restore_budget", "adopt")
    }
    setting = replace(default, **fields)
    total, recomputed, before = NO_COST, 0, None
    for save in saves:
        now = save["step"], save.get("baseline")
        if save["configuration"] != "exact" and save["degradation"] is not None:
            known = before is not None and isinstance(now[1], float)
            total += _cost_of(save, fall_of(before, now, _FLOOR) if known else 0.0, setting)
            recomputed += "cost_delay" not in save
        before = now if isinstance(now[1], float) else before
    return Reported(
        total.mean,
        total.high,
        unmeasured=sum(save["degradation"] is None for save in saves),
        exact=sum(save["configuration"] == "exact" for save in saves),
        recomputed=recomputed,
    )


def _cost_of(save: Cell, fall: float, config: SaverConfig) -> RestoreCost:
    """The cost in a report; of one without `cost_delay`, from its other numbers.

    Args:
        save: the report of a checkpoint that is not exact.
        fall: of the loss in a step since the checkpoint before it.
        config: of the run.
    """
    reserve = reserve_of(config)
    delay = save.get("cost_delay")
    if isinstance(delay, (int, float)):
        return RestoreCost(save["cost"], save["cost_high"] - max(reserve, delay), delay, reserve)
    delay = fall * (save.get("lost_steps") or 0.0)
    if isinstance(save.get("cost_high"), (int, float)):  # with a restore's share of the reserve
        return RestoreCost(
            save["cost"], save["cost_high"] - max(reserve / config.restore_budget, delay), delay, reserve
        )
    high = save.get("degradation_high", save["degradation"])
    return restore_cost(save["degradation"], high, delay=delay, reserve=reserve)


@dataclass(frozen=True)
class Mean:
    """The mean of paired changes over the seeds."""

    value: float
    error: float
    """Its standard error; 0 where there is one seed."""
    seeds: int

    @property
    def low(self) -> float:
        """What the mean is at least, but for two standard errors."""
        return self.value - 2 * self.error

    @classmethod
    def of(cls, changes: Iterable[float]) -> Mean:
        """Of any number of changes, of which one at least."""
        found = list(changes)
        error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
        return cls(statistics.mean(found), error, len(found))


@dataclass
class Row:
    """One training, restored under one setting, by seed."""

    training: str
    part: str
    scheme: str
    options: str
    """Everything that is not at its default, as JSON."""
    cells: dict[int, Cell] = field(default_factory=dict)
    plain: dict[int, Cell] = field(default_factory=dict)
    """The undisturbed runs, of all seeds."""
    nudged: dict[int, Cell] = field(default_factory=dict)
    """Undisturbed runs with an error of a millionth in all weights where others are restored."""

    @property
    def ratio(self) -> float:
        """Bytes in memory over bytes stored of a whole chain, median over the seeds."""
        return statistics.median(
            sum(save["raw_bytes"] for save in cell["saves"]) / sum(save["bytes"] for save in cell["saves"])
            for cell in self.cells.values()
        )

    @property
    def spread(self) -> float | None:
        """Standard deviation of the undisturbed final losses, of their mean; None for a single seed."""
        finals = [cell["final"] for cell in self.plain.values()]
        return statistics.stdev(finals) / abs(statistics.mean(finals)) if len(finals) > 1 else None

    @property
    def truths(self) -> dict[int, float]:
        """Relative change of the final loss, of the seeds whose undisturbed run is there."""
        return {seed: _change(self.cells[seed], self.plain[seed]) for seed in self._seeds}

    @property
    def luck(self) -> dict[int, float]:
        """Relative change of the final loss by errors of a millionth, of the seeds that were tried."""
        return {
            seed: _change(cell, self.plain[seed]) for seed, cell in self.nudged.items() if seed in self.plain
        }

    @property
    def last(self) -> dict[int, float]:
        """Relative change of the loss by a restore of the last checkpoint alone."""
        return {seed: _change(cell["last"], cell) for seed, cell in self.cells.items()}

    @property
    def abilities(self) -> dict[str, list[float]]:
        """Relative changes of losses on what the model could do before, by name."""
        return self._by_name("abilities")

    @property
    def also(self) -> dict[str, list[float]]:
        """Relative changes of losses beside the final one."""
        return self._by_name("also")

    @property
    def frozen(self) -> dict[int, int]:
        """Elements that training does not change and restores did."""
        return {seed: cell["frozen_changes"] for seed, cell in self.cells.items()}

    @property
    def reports(self) -> dict[int, Reported]:
        """What was reported of the ten checkpoints that were restored."""
        options = json.loads(self.options)
        return {seed: reported_of(cell["saves"][:-1], options) for seed, cell in self.cells.items()}

    @property
    def mean(self) -> Mean:
        """Of the changes of the final loss."""
        return Mean.of(self.truths.values())

    @property
    def is_chaotic(self) -> bool:
        """Whether errors of a millionth change the final loss by more than restores do, and by more than the limit."""
        luck, truths = ([abs(change) for change in one.values()] for one in (self.luck, self.truths))
        return bool(luck) and statistics.mean(luck) > max(LIMIT, statistics.mean(truths or [0.0]))

    @property
    def covered(self) -> bool | None:
        """Whether the mean of the reported upper ends is no less than the mean change, but for two errors; None where something was
        not measured."""
        reports = [self.reports[seed] for seed in self.truths]
        if not reports or any(one.unmeasured for one in reports):
            return None
        return statistics.mean(one.high for one in reports) >= self.mean.low

    @property
    def within(self) -> dict[int, bool]:
        """Whether the change of the final loss is at most the limit, by seed."""
        return {seed: truth <= LIMIT for seed, truth in self.truths.items()}

    @property
    def kept(self) -> bool:
        """Whether the promise was kept: the mean changes over the seeds are within their limits, but for two standard errors."""
        losses = [self.mean, *(Mean.of(changes) for changes in self.also.values())]
        abilities = [Mean.of(changes) for changes in self.abilities.values()]
        near = all(mean.low <= LIMIT for mean in losses)
        return near and all(mean.low <= ABILITY_LIMIT for mean in abilities) and not any(self.frozen.values())

    def reported(self, name: str) -> dict[str, list[float]]:
        """A number of all reports that have it; where it is several by name, by that, else under the empty name."""
        found: dict[str, list[float]] = {}
        for cell in self.cells.values():
            for save in cell["saves"]:
                value = save.get(name)
                items = value.items() if isinstance(value, Mapping) else [("", value)]
                for key, number in items:
                    if isinstance(number, (int, float)):
                        found.setdefault(key, []).append(number)
        return found

    @property
    def _seeds(self) -> list[int]:
        return sorted(seed for seed in self.cells if seed in self.plain)

    def _by_name(self, kind: str) -> dict[str, list[float]]:
        changes: dict[str, list[float]] = {}
        for seed in self._seeds:
            for name, loss in self.plain[seed][kind].items():
                changes.setdefault(name, []).append(_relative(self.cells[seed][kind][name], loss))
        return changes


def _relative(loss: float, undisturbed: float) -> float:
    return (loss - undisturbed) / abs(undisturbed)


def _change(cell: Cell, other: Cell) -> float:
    return _relative(cell["final"], other["final"])


def rows_of(cells: Iterable[tuple[Cell, Cell]], *, quick: bool = False) -> list[Row]:
    """One row for each training, part and setting, in the order of the trainings.

    Args:
        cells: keys and results; those of trainings whose source has changed since are left out.
        quick: whether the quick forms are wanted.
    """
    rows: dict[tuple[str, str, str, str], Row] = {}
    undisturbed: dict[str, dict[str, dict[int, Cell]]] = {"plain": {}, "nudged": {}}
    digests = {name: source_digest(kind) for name, kind in KINDS.items()}
    for key, result in cells:
        name, seed, part = key["training"], key["seed"], key["part"]
        if key["quick"] != quick or key["source"] != digests.get(name):
            continue
        if part in undisturbed:
            undisturbed[part].setdefault(name, {})[seed] = result
            continue
        options = json.dumps({**key["options"], **key["config"]}, sort_keys=True)
        place = (name, part, key["scheme"], options)
        rows.setdefault(place, Row(*place)).cells[seed] = result
    for row in rows.values():
        row.plain = undisturbed["plain"].get(row.training, {})
        row.nudged = dict(sorted(undisturbed["nudged"].get(row.training, {}).items()))
        row.cells = dict(sorted(row.cells.items()))
    order = list(KINDS)
    return sorted(rows.values(), key=lambda row: (order.index(row.training), row.part != "spread"))
