"""Which weights are protected (stored in 16 bits), which are pruned (stored as zero), and which are quantized.

Source: Inshrinkerator (arXiv 2306.11800): outliers of either score are protected, the lowest share of one score is
pruned, with one threshold per layer type. Protection wins over pruning, which wins over quantization.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shrinkpoint.quantize.sketch import Sketch
from shrinkpoint.schemes.inshrinkerator.sensitivity import magnitude_score, sensitivity_score
from shrinkpoint.schemes.inshrinkerator.space import Metric

# A row that no batch of the averaging window touched has no gradient: by sensitivity it would be pruned first.
_ALWAYS_BY_MAGNITUDE = frozenset({"embedding"})
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The score thresholds of one layer type. All are float32 values; scores are compared in float32."""

    metric: Metric
    """The pruning score of weights with a gradient; without one it is always the magnitude."""
    prune_magnitude: float
    """Pruned: magnitude < this."""
    prune_sensitivity: float
    """Pruned: sensitivity < this."""
    protect_magnitude: float
    """Protected: magnitude >= this; infinity protects nothing."""
    protect_sensitivity: float
    """Protected: sensitivity >= this; infinity protects nothing."""


class ScoreSketches:
    """Quantile sketches of both scores by layer type: built once per save, used for every configuration."""

    def __init__(self) -> None:
        self._sketches: dict[str, dict[str, Sketch]] = {"magnitude": {}, "sensitivity": {}}

    def add(self, weight: torch.Tensor, gradient: torch.Tensor | None, layer_type: str) -> None:
        """Count one weight's scores under its layer type.

        Args:
            weight: float32, bfloat16 or float16, any shape and device. 1-D weights are better left out: norm gains
                lie near 1 and would take the whole protected share.
            gradient: averaged gradient of the same shape, or None to score by magnitude alone.
            layer_type: weights of one type share their thresholds.

        Raises:
            CannotRepresentError: a score is not finite, or the dtype cannot be sketched; earlier chunks were counted.
        """
        flat = weight.detach().reshape(-1)
        self._of("magnitude", layer_type).add(flat)
        if gradient is None:
            return
        slopes = torch.split(gradient.detach().reshape(-1), _CHUNK)
        for part, slope in zip(torch.split(flat, _CHUNK), slopes, strict=True):
            self._of("sensitivity", layer_type).add(sensitivity_score(part, slope))

    def _of(self, score: str, layer_type: str) -> Sketch:
        return self._sketches[score].setdefault(layer_type, Sketch())

    def to_json(self) -> dict[str, Any]:
        """Return the sketches by score and layer type, for a message to other ranks."""
        return {
            score: {layer_type: sketch.to_json() for layer_type, sketch in sketches.items()}
            for score, sketches in self._sketches.items()
        }

    def count_json(self, node: Mapping[str, Any]) -> None:
        """Add another rank's weights, as its `to_json` gave them.

        Raises:
            FormatError: they are sketched in another way.
        """
        for score, sketches in node.items():
            for layer_type, counts in sketches.items():
                self._of(score, layer_type).count_json(counts)

    def thresholds(self, metric: Metric, prune: float, protect: float) -> dict[str, Thresholds]:
        """Return the thresholds of one configuration, by layer type.

        Args:
            metric: the pruning score; embeddings are always pruned by magnitude.
            prune: share of each layer type to prune, in [0, 1]; never exceeded, ties at the threshold stay.
            protect: share to protect by each score, in [0, 1]; the union is at most twice as large.
        """
        found = {}
        for layer_type, magnitude in self._sketches["magnitude"].items():
            sensitivity = self._sketches["sensitivity"].get(layer_type)
            found[layer_type] = Thresholds(
                metric="magnitude" if layer_type in _ALWAYS_BY_MAGNITUDE or sensitivity is None else metric,
                prune_magnitude=magnitude.threshold_below(prune) if prune else 0.0,
                prune_sensitivity=sensitivity.threshold_below(prune) if sensitivity and prune else 0.0,
                protect_magnitude=magnitude.threshold_above(protect),
                protect_sensitivity=sensitivity.threshold_above(protect) if sensitivity else math.inf,
            )
        return found


def added_scores(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sketches of several ranks' weights, as messages and as a message: their counts are added.

    Raises:
        FormatError: they are sketched in another way.
    """
    total = ScoreSketches()
    for message in messages:
        total.count_json(message)
    return total.to_json()


def partition(
    weight: torch.Tensor, gradient: torch.Tensor | None, thresholds: Thresholds
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partition one weight by the thresholds of its layer type.

    Args:
        weight: any floating dtype, shape and device.
        gradient: the averaged gradient that was sketched, of the same shape, or None.
        thresholds: those of the weight's layer type.

    Returns:
        Boolean masks of the weight's shape, on its device: what is protected, what is pruned; no element is in both.
    """
    magnitude = magnitude_score(weight)
    protected = magnitude >= thresholds.protect_magnitude
    if gradient is None:
        pruned = magnitude < thresholds.prune_magnitude
    else:
        sensitivity = sensitivity_score(weight, gradient)
        protected |= sensitivity >= thresholds.protect_sensitivity
        if thresholds.metric == "sensitivity":
            pruned = sensitivity < thresholds.prune_sensitivity
        else:
            pruned = magnitude < thresholds.prune_magnitude
    return protected, pruned.logical_and_(~protected)
