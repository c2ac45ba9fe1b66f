"""The configurations that a search chooses between, and the order of mildness between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, TypeAlias

from shrinkpoint.errors import ConfigError

Metric: TypeAlias = Literal["magnitude", "sensitivity"]
Steps: TypeAlias = tuple[int, int, int, int]
"""Positions on the axes (bins, prune, protect, embedding_bins); a higher position is milder."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One setting of the Inshrinkerator scheme (arXiv 2306.11800, Tables 2 and 9).

    Args:
        bins: centroids in the codebook of a weight tensor.
        prune: fraction of the weights of a layer type that are set to zero.
        protect: fraction of the weights, per score, that are kept outside the codebook.
        metric: the score by which weights are pruned. Protection uses both, so that without pruning it has no effect.
        embedding_bins: centroids in the codebook of an embedding tensor.
    """

    bins: int
    prune: float
    protect: float
    metric: Metric
    embedding_bins: int

    def __str__(self) -> str:
        pruned = f"prune {self.prune:.3g} by {self.metric}" if self.prune else "no pruning"
        return f"{self.bins} bins, {pruned}, protect {self.protect:.3g}, {self.embedding_bins} embedding bins"

    def to_json(self) -> dict[str, int | float | str]:
        """Return the fields as JSON primitives."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, data: object) -> Configuration:
        """Return the configuration that :meth:`to_json` wrote; :class:`ConfigError` for anything else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            raise ConfigError(
                f"a configuration must be an object with the fields {sorted(names)}, not {data!r}"
            )
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class ConfigurationSpace:
    """The grid that a search looks through; the defaults are the paper's tables (arXiv 2306.11800, Tables 2 and 9).

    Every axis is ordered so that quality rises along it. Two configurations that differ only in the metric are one
    when nothing is pruned.

    Args:
        bins: codebook sizes, ascending.
        prune: pruned fractions, descending.
        protect: protected fractions, ascending.
        embedding_bins: codebook sizes of embeddings, ascending.
        metrics: the scores to prune by; the first one wins ties.
    """

    bins: tuple[int, ...] = (4, 6, 8, 12, 16, 32)
    prune: tuple[float, ...] = (0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
    protect: tuple[float, ...] = (0.0005, 0.005, 0.01)
    embedding_bins: tuple[int, ...] = (16, 32)
    metrics: tuple[Metric, ...] = ("sensitivity", "magnitude")

    @property
    def shape(self) -> Steps:
        """Lengths of the axes (bins, prune, protect, embedding_bins)."""
        return len(self.bins), len(self.prune), len(self.protect), len(self.embedding_bins)

    @property
    def mildest(self) -> Configuration:
        """The configuration with the best quality."""
        return self.at(self.metrics[0], [length - 1 for length in self.shape])

    @cached_property
    def configurations(self) -> tuple[Configuration, ...]:
        """Every distinct configuration; each one comes after all harsher ones of its metric."""
        grid = list(itertools.product(*(range(length) for length in self.shape)))
        return tuple(dict.fromkeys(self.at(metric, steps) for metric in self.metrics for steps in grid))

    def at(self, metric: Metric, steps: tuple[int, ...] | list[int]) -> Configuration:
        """Return the configuration at a position; one that prunes nothing always carries the first metric."""
        bins, prune, protect, embedding_bins = steps
        return Configuration(
            bins=self.bins[bins],
            prune=self.prune[prune],
            protect=self.protect[protect],
            metric=metric if self.prune[prune] else self.metrics[0],
            embedding_bins=self.embedding_bins[embedding_bins],
        )

    def steps(self, configuration: Configuration) -> Steps:
        """Return the position of a configuration of this space."""
        return (
            self.bins.index(configuration.bins),
            self.prune.index(configuration.prune),
            self.protect.index(configuration.protect),
            self.embedding_bins.index(configuration.embedding_bins),
        )

    def __contains__(self, configuration: object) -> bool:
        return (
            isinstance(configuration, Configuration)
            and configuration.bins in self.bins
            and configuration.prune in self.prune
            and configuration.protect in self.protect
            and configuration.embedding_bins in self.embedding_bins
            and configuration.metric in self.metrics
        )

    def canonical(self, configuration: Configuration) -> Configuration:
        """Return the same configuration under the metric by which :attr:`configurations` lists it."""
        return self.at(configuration.metric, self.steps(configuration))

    def twins(self, configuration: Configuration) -> tuple[Configuration, ...]:
        """Return the configuration under each other metric; none when it prunes nothing."""
        if not configuration.prune:
            return ()
        steps = self.steps(configuration)
        return tuple(self.at(metric, steps) for metric in self.metrics if metric != configuration.metric)

    def at_least_as_mild(self, mild: Configuration, harsh: Configuration) -> bool:
        """Return whether no setting of ``mild`` is harsher; different metrics compare only where ``mild`` prunes nothing."""
        if mild.prune and mild.metric != harsh.metric:
            return False
        return all(a >= b for a, b in zip(self.steps(mild), self.steps(harsh), strict=True))

    def around(
        self, centre: Configuration, moves: tuple[int, ...], *, embedding_moves: tuple[int, ...] = (0,)
    ) -> Iterator[Configuration]:
        """Configurations at ``centre + moves`` on each axis, ``centre`` among them if ``moves`` holds 0."""
        steps = self.steps(centre)
        for offsets in itertools.product(moves, moves, moves, embedding_moves):
            there = [step + offset for step, offset in zip(steps, offsets, strict=True)]
            if all(0 <= step < length for step, length in zip(there, self.shape, strict=True)):
                yield self.at(centre.metric, there)
