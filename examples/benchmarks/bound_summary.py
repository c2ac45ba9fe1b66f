"""What the cells of the bench of the bound come to: for each training and setting, whether the promise was kept."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bound_trainings import KINDS, source_digest

__all__ = ["ABILITY_LIMIT", "LIMIT", "SAME", "Row", "rows_of"]

Cell = Mapping[str, Any]

LIMIT = 0.01
"""What ten restores may cost of the final loss."""
ABILITY_LIMIT = 0.002
"""What they may cost of an ability from before, which no probe measures."""
SAME = ("auto", "{}")
"""The setting that is the library's default."""


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
    def held(self) -> dict[int, bool | None]:
        """Whether the truth is within the upper end of what was told; None where something was not measured."""
        slack = 2 * (self.spread or 0.0)
        return {
            seed: None
            if self.cells[seed]["told"]["unmeasured"]
            else self.cells[seed]["told"]["high"] + slack >= truth
            for seed, truth in self.truths.items()
        }

    def kept(self, seed: int) -> bool:
        """Whether the promise was kept in one run."""
        cell, plain = self.cells[seed], self.plain[seed]
        beside = [_relative(cell["also"][name], plain["also"][name]) for name in plain["also"]]
        abilities = [
            _relative(cell["abilities"][name], plain["abilities"][name]) for name in plain["abilities"]
        ]
        spreads = [self.spread or 0.0, *(self._spread_of(name) for name in plain["also"])]
        finals = zip([self.truths[seed], *beside], spreads, strict=True)
        near = all(change <= max(LIMIT, 2 * spread) for change, spread in finals)
        return near and all(change <= ABILITY_LIMIT for change in abilities) and not cell["frozen_changes"]

    @property
    def kept_on_average(self) -> bool:
        """Whether the mean change of the final loss over the seeds is within the limit, or within two spreads."""
        return statistics.mean(self.truths.values()) <= max(LIMIT, 2 * (self.spread or 0.0))

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

    def _spread_of(self, name: str) -> float:
        """As `spread`, of a loss beside the final one."""
        losses = [cell["also"][name] for cell in self.plain.values()]
        return statistics.stdev(losses) / abs(statistics.mean(losses)) if len(losses) > 1 else 0.0


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
