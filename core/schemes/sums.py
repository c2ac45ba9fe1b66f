"""Sums over all weights of a model, from which schemes take sizes and means; those of several ranks are added."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class WeightSums:
    """Of some weights."""

    squares: float = 0.0
    """Of all elements."""
    count: int = 0
    levels: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """By the kind of curvature: the tensors' levels, each times its elements; and these elements' number."""

    def __add__(self, other: "WeightSums") -> "WeightSums":
        levels = dict(self.levels)
        for kind, (total, count) in other.levels.items():
            known, before = levels.get(kind, (0.0, 0))
            levels[kind] = known + total, before + count
        return WeightSums(squares=self.squares + other.squares, count=self.count + other.count, levels=levels)

    @property
    def size(self) -> float:
        """Root of the mean square."""
        return math.sqrt(self.squares / max(1, self.count))

    @property
    def means(self) -> dict[str, float]:
        """The mean level over all elements, for each kind: kinds are not measured in the same unit."""
        return {kind: total / count for kind, (total, count) in self.levels.items()}

    def to_json(self) -> dict[str, Any]:
        """For a message to other ranks."""
        levels = {kind: list(pair) for kind, pair in self.levels.items()}
        return {"squares": self.squares, "count": self.count, "levels": levels}

    @classmethod
    def from_json(cls, node: Mapping[str, Any]) -> "WeightSums":
        """Read what `to_json` gave."""
        levels = {kind: (float(total), int(count)) for kind, (total, count) in node["levels"].items()}
        return cls(squares=float(node["squares"]), count=int(node["count"]), levels=levels)


def added_sums(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of several ranks' weights, as messages and as a message."""
    return sum(map(WeightSums.from_json, messages), WeightSums()).to_json()
