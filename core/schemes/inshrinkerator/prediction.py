"""Predicted sizes of a checkpoint under every configuration, from one histogram per weight and without coding any."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from shrinkpoint.arrays import Float64s
from shrinkpoint.quantize.clustering import optimal_codebooks, sample_weights
from shrinkpoint.quantize.sketch import Histogram, Sketch
from shrinkpoint.schemes.inshrinkerator.scheme import Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace
from shrinkpoint.state.training import LayerType

_PROTECTED_BITS = 16  # a protected weight is stored in two bytes
_CENTROID_BITS = 32
_Part: TypeAlias = tuple[bool, int, float, float]
"""Whether of embeddings, bins, prune, protect."""
_USUAL_BINS = (4, 6, 8, 12, 16, 32)  # one run of the dynamic programme gives them all


class SizePredictor:
    """Predicts the bytes of all weights under a configuration: entropy of the levels, protected values, codebooks.

    Pruning and protection are taken by magnitude within each tensor, and the levels as coded alone (of a delta, only
    the order among configurations with the same bins is predicted). The search needs the order, not the size.

    Args:
        weights: of one snapshot.
    """

    def __init__(self, weights: Weights) -> None:
        self._tensors = [
            (_Tensor(Sketch().add(weights.tensors[spec.name]).histogram()), spec.tag.layer_type)
            for spec in weights.specs
        ]
        self._known: dict[tuple[int, int, float, float], float] = {}

    def __call__(self, configuration: Configuration) -> float:
        """Return predicted bytes of all weights."""
        return sum(self._bytes(*part) for part in _parts(configuration))

    def table(self, space: ConfigurationSpace) -> list[float]:
        """Return predicted bytes for every configuration of a space, as `predicted_sizes` takes them; tables of several processes add up."""
        return [self._bytes(*part) for part in _all_parts(space)]

    def _bytes(self, embeddings: bool, bins: int, prune: float, protect: float) -> float:
        """Of the embeddings, or of the other weights."""
        bits = 0.0
        for index, (tensor, layer_type) in enumerate(self._tensors):
            if (layer_type is LayerType.EMBEDDING) != embeddings:
                continue
            key = (index, bins, prune, protect)
            if key not in self._known:
                self._known[key] = tensor.bits(bins, prune, protect)
            bits += self._known[key]
        return bits / 8


def predicted_sizes(space: ConfigurationSpace, table: Sequence[float]) -> Callable[[Configuration], float]:
    """Predict as `SizePredictor` does, for several processes that have some weights each.

    Args:
        space: the configurations.
        table: the sum of `SizePredictor.table` over all processes.
    """
    known = dict(zip(_all_parts(space), table, strict=True))
    return lambda configuration: sum(known[part] for part in _parts(configuration))


def _parts(configuration: Configuration) -> list[_Part]:
    """Return what the weights' size depends on, and what the embeddings' does."""
    settings = configuration.prune, configuration.protect
    return [(False, configuration.bins, *settings), (True, configuration.embedding_bins, *settings)]


def _all_parts(space: ConfigurationSpace) -> list[_Part]:
    """Return those of a whole space, each once, in an order that is the same in every process."""
    return list(
        dict.fromkeys(part for configuration in space.configurations for part in _parts(configuration))
    )


class _Tensor:
    """The histogram of one weight, ordered by magnitude."""

    def __init__(self, histogram: Histogram) -> None:
        self.values: Float64s = histogram.values
        self.counts: Float64s = histogram.counts.astype(np.float64)
        self.total = float(self.counts.sum())
        self._order = np.argsort(np.abs(self.values), kind="stable")
        self._cumulative = np.cumsum(self.counts[self._order])
        self._codebooks: dict[tuple[int, float], Float64s] = {}

    def bits(self, bins: int, prune: float, protect: float) -> float:
        """Return predicted bits of the tensor under one configuration."""
        if self.total == 0:
            return 0.0
        rest = self.counts.copy()
        protected = self._take(rest, protect * self.total, from_small=False)
        codebook = self._codebook(bins, protect, rest)
        pruned = self._take(rest, prune * self.total, from_small=True)
        boundaries = (codebook[1:] + codebook[:-1]) / 2
        cells = np.searchsorted(boundaries, self.values)
        centroids = np.bincount(cells, weights=rest, minlength=codebook.size)
        occupancy = np.concatenate([[pruned, protected], centroids])
        share = occupancy[occupancy > 0] / self.total
        entropy = float(-(share * np.log2(share)).sum())
        return entropy * self.total + _PROTECTED_BITS * protected + _CENTROID_BITS * codebook.size

    def _take(self, rest: Float64s, amount: float, *, from_small: bool) -> float:
        """Remove the `amount` smallest or largest magnitudes from `rest`; what was removed."""
        order, cumulative = self._order, self._cumulative
        if from_small:
            chosen = order[cumulative <= amount]
        else:
            chosen = order[self.total - cumulative + self.counts[order] <= amount]
        taken = float(rest[chosen].sum())
        rest[chosen] = 0
        return taken

    def _codebook(self, bins: int, protect: float, rest: Float64s) -> Float64s:
        """Return the centroids of the unprotected values; outliers left in would pull them outwards."""
        if (bins, protect) not in self._codebooks:
            kept = rest > 0
            histogram = Histogram(values=self.values[kept], counts=rest[kept].astype(np.int64))
            books = optimal_codebooks(
                histogram.values, sample_weights(histogram), sorted({*_USUAL_BINS, bins})
            )
            self._codebooks |= {(size, protect): book.double().numpy() for size, book in books.items()}
        return self._codebooks[bins, protect]
