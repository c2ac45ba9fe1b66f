"""The interface of the searches: requests for measurements, the record of the answers, and the outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.inshrinkerator.space import Configuration

__all__ = [
    "Evaluation",
    "Predict",
    "Search",
    "SearchKind",
    "SearchOutcome",
    "Trail",
    "is_feasible",
    "predict_sizes",
    "significantly_lower",
]

SearchKind: TypeAlias = Literal["exhaustive", "neighbourhood", "reprobe"]

Predict: TypeAlias = Callable[[Configuration], float]
"""Predicted bytes of the checkpoint under a configuration: cheap, and not monotone along the axes."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One measurement: what a restore of this configuration costs.

    Args:
        configuration: what was measured.
        predicted_bytes: the size that was predicted for it.
        degradation: relative rise of the loss after a restore; ``inf`` when the measurement was not finite.
        feasible: whether the degradation is within the bound.
    """

    configuration: Configuration
    predicted_bytes: float
    degradation: float
    feasible: bool


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """The result of a search.

    Args:
        chosen: the configuration to use; None when no configuration is within the bound.
        degradation: the measured relative rise of the loss under ``chosen``.
        evaluations: every measurement that the search asked for, in order.
        reason: why it chose so, as a sentence.
        kind: which search it was.
    """

    chosen: Configuration | None
    degradation: float | None
    evaluations: tuple[Evaluation, ...]
    reason: str
    kind: SearchKind


Search: TypeAlias = Generator[Configuration, float, SearchOutcome]
"""Yields the configuration to measure, is sent its degradation, returns the outcome.

Between two measurements the caller may wait as long as it likes, so that a search can be spread over many saves.
"""


def is_feasible(degradation: float, max_degradation: float) -> bool:
    """Whether a measured degradation is within the bound; one that is not finite never is."""
    return math.isfinite(degradation) and degradation <= max_degradation


def significantly_lower(low: float, high: float, noise: float) -> bool:
    """Whether ``low`` is below ``high`` by more than 10 % of it and by more than twice the noise."""
    if not math.isfinite(high):
        return math.isfinite(low)
    return high - low > max(0.1 * abs(high), 2 * noise)


def predict_sizes(configurations: Iterable[Configuration], predict: Predict) -> dict[Configuration, float]:
    """The predicted size of each configuration, each asked for once; :class:`ConfigError` for NaN."""
    sizes = {configuration: float(predict(configuration)) for configuration in configurations}
    for configuration, size in sizes.items():
        if math.isnan(size):
            raise ConfigError(f"predict({configuration}) is NaN: it must be the predicted size in bytes")
    return sizes


class Trail:
    """The measurements of one search, in order, none made twice.

    Args:
        max_degradation: the bound.
        max_evaluations: how many measurements the search may ask for.
    """

    def __init__(self, max_degradation: float, max_evaluations: int) -> None:
        if max_evaluations < 1:
            raise ConfigError(f"max_evaluations={max_evaluations} must be at least 1")
        self._max_degradation = max_degradation
        self._max_evaluations = max_evaluations
        self._made: dict[Configuration, Evaluation] = {}

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The measurements so far."""
        return tuple(self._made.values())

    @property
    def left(self) -> int:
        """Number of measurements left."""
        return self._max_evaluations - len(self._made)

    def find(self, configuration: Configuration) -> Evaluation | None:
        """The measurement of a configuration, if it was made."""
        return self._made.get(configuration)

    def measure(
        self, configuration: Configuration, predicted_bytes: float
    ) -> Generator[Configuration, float, Evaluation]:
        """Ask for a measurement and record the answer."""
        answer = yield configuration
        evaluation = Evaluation(
            configuration=configuration,
            predicted_bytes=predicted_bytes,
            degradation=answer if math.isfinite(answer) else math.inf,
            feasible=is_feasible(answer, self._max_degradation),
        )
        self._made[configuration] = evaluation
        return evaluation

    def outcome(self, chosen: Evaluation | None, kind: SearchKind, reason: str) -> SearchOutcome:
        """Close the search."""
        return SearchOutcome(
            chosen=chosen.configuration if chosen else None,
            degradation=chosen.degradation if chosen else None,
            evaluations=self.evaluations,
            reason=reason,
            kind=kind,
        )
