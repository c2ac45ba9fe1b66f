"""From the cells of the bench to what is said of them: rows of the table, and who is smallest under a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemes_cache import Key

__all__ = ["Advantage", "Best", "Row", "Spread", "advantage", "best_under", "ratio", "rows_of", "share"]

Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """One number from several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return sum(self.values) / len(self.values)

    @property
    def half(self) -> float:
        """Half of the way from the least to the greatest."""
        return (max(self.values) - min(self.values)) / 2


def ratio(cell: Cell, kind: str | None = None, *, weights: bool = False) -> float:
    """Raw bytes over stored ones of a chain's checkpoints of one kind; None counts all kinds."""
    raw, stored = ("raw_weights", "weights") if weights else ("raw", "stored")
    sizes = [size for size in cell["sizes"] if kind is None or size["kind"] == kind]
    return sum(size[raw] for size in sizes) / max(1, sum(size[stored] for size in sizes))


def share(value: float) -> str:
    """A share of 1 in percent, with as many digits as it needs."""
    return f"{100 * value:g} %"


@dataclass
class Row:
    """One setting on one training, by seed."""

    model: str
    every: int
    scheme: str
    setting: str
    chain: dict[int, Cell] = field(default_factory=dict)
    restores: dict[int, Cell] = field(default_factory=dict)
    speed: dict[int, Cell] = field(default_factory=dict)
    slice: dict[int, Cell] = field(default_factory=dict)

    def of(self, part: str, number: Callable[[Cell], float]) -> Spread | None:
        """A number of every seed's cell; None if there is none."""
        cells: dict[int, Cell] = getattr(self, part)
        return Spread(tuple(number(cells[seed]) for seed in sorted(cells))) if cells else None

    def rise(self, mark: int) -> Spread | None:
        """Of the loss, so many steps after a restore."""
        return self.of("chain", lambda cell: cell["rises"][str(mark)])


def rows_of(cells: Iterable[tuple[Key, Cell]]) -> list[Row]:
    """One row for each setting and training, in the order in which they come."""
    rows: dict[tuple[str, int, str, str], Row] = {}
    for key, cell in cells:
        place = (key.model, key.every, key.scheme, key.setting)
        row = rows.setdefault(place, Row(*place))
        getattr(row, key.part)[key.seed] = cell
    return list(rows.values())


@dataclass(frozen=True)
class Best:
    """The smallest setting of a scheme under a bound, found for every seed by itself."""

    ratios: Mapping[int, float]
    settings: Mapping[int, str]

    @property
    def spread(self) -> Spread:
        """Of the ratios."""
        return Spread(tuple(self.ratios[seed] for seed in sorted(self.ratios)))


def best_under(
    rows: Iterable[Row],
    part: str,
    rise: Callable[[Cell], float],
    bound: float,
    size: Callable[[Cell], float],
) -> Best | None:
    """The smallest setting among rows of one scheme and training whose loss rises by at most `bound`.

    Args:
        rows: the settings.
        part: the kind of cell that tells.
        rise: of the loss, from a cell.
        bound: such a rise, as a share.
        size: a ratio, the more the smaller the files, from a cell.

    Returns:
        None if for some seed no setting holds the bound.
    """
    ratios: dict[int, float] = {}
    settings: dict[int, str] = {}
    seeds: set[int] = set()
    for row in rows:
        cells: dict[int, Cell] = getattr(row, part)
        seeds |= set(cells)
        for seed, cell in cells.items():
            if rise(cell) <= bound and size(cell) > ratios.get(seed, 0.0):
                ratios[seed], settings[seed] = size(cell), row.setting
    return Best(ratios, settings) if seeds and seeds == set(ratios) else None


@dataclass(frozen=True)
class Advantage:
    """How many times smaller one scheme is than another, each at its best under the same bound."""

    ours: Best
    theirs: Best

    @property
    def spread(self) -> Spread | None:
        """Quotients of the seeds that both were measured with; None if there is no such seed."""
        seeds = sorted(set(self.ours.ratios) & set(self.theirs.ratios))
        values = tuple(self.ours.ratios[seed] / self.theirs.ratios[seed] for seed in seeds)
        return Spread(values) if values else None


def advantage(ours: Best | None, theirs: Best | None) -> Advantage | None:
    """None unless both hold the bound."""
    return Advantage(ours, theirs) if ours is not None and theirs is not None else None
