"""Inshrinkerator (arXiv 2306.11800): weights partitioned and clustered within a measured bound on quality.

The paper compresses weights only. Adam's moments are coded by `shrinkpoint.schemes.moments`; everything
else is stored exactly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.schemes.base import SaveContext, TensorCodec
from shrinkpoint.schemes.inshrinkerator.codec import InshrinkeratorWeightCodec
from shrinkpoint.schemes.inshrinkerator.level_deltas import LevelCoder
from shrinkpoint.schemes.inshrinkerator.partition import ScoreSketches
from shrinkpoint.schemes.inshrinkerator.sensitivity import sensitivity_score
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.schemes.recipe import check_choice, check_number, is_weight, moment_codecs
from shrinkpoint.state.training import LayerType, Role, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.warn import refuses_unknown_options


@refuses_unknown_options
@dataclass(frozen=True, kw_only=True)
class InshrinkeratorOptions:
    """Settings that the paper leaves open, apart from the configuration that is searched.

    Examples:
        >>> from shrinkpoint.schemes.catalogue import InshrinkeratorOptions
        >>> config = shrinkpoint.SaverConfig(scheme=InshrinkeratorOptions(min_elements=500))
    """

    coder: LevelCoder = "rans"
    """Entropy coder of the levels: conditional rANS, or the paper's run lengths and Huffman codes (Algorithm 5)."""
    min_elements: int = 2000
    """Tensors with fewer elements are stored exactly."""

    def __post_init__(self) -> None:
        check_choice(self, "coder", LevelCoder)
        check_number(self, "min_elements", 1, 2**48, whole=True)

    def takes(self, spec: TensorSpec) -> bool:
        """Return whether the tensor is coded as a weight."""
        # one-dimensional tensors (norm gains near 1, biases) would fill the protected quantile
        return is_weight(spec, self.min_elements)


class Weights:
    """The weights of one snapshot that the scheme may code, with their scores sketched once for all configurations.

    Args:
        state: the snapshot.
        options: the scheme's settings.
        gradients: their EMA by parameter name, where they were collected.
        scores: of all weights of the model, as `ScoreSketches.to_json` gives them, where `state` has only some; None takes those of
            `state`.
    """

    def __init__(
        self,
        state: TrainingState,
        options: InshrinkeratorOptions,
        gradients: Mapping[str, torch.Tensor] | None = None,
        scores: Mapping[str, Any] | None = None,
    ) -> None:
        # no codebook can represent NaN or infinity: such weights are stored exactly
        taken = (spec for spec in state.specs.values() if options.takes(spec))
        self.specs = [spec for spec in taken if bool(torch.isfinite(state.tensors[spec.name]).all())]
        self.tensors = {spec.name: state.tensors[spec.name] for spec in self.specs}
        # Exactly stored tensors are evaluated from the snapshot too: the live model changes between two evaluations.
        self._rest = {
            _parameter(spec): state.tensors[spec.name]
            for spec in state.specs.values()
            if spec.tag.role in (Role.WEIGHT, Role.BUFFER)
            and spec.tag.parameter is not None
            and spec.name not in self.tensors
        }
        self.gradients = _gradients(state, self.specs, gradients)
        self._options = options
        self.sketches = ScoreSketches()
        if scores is not None:
            self.sketches.count_json(scores)
            return
        for spec in self.specs:
            tensor, gradient = self.tensors[spec.name], self.gradients.get(spec.name)
            self.sketches.add(tensor, gradient, spec.tag.layer_type.value)

    def codec(self, spec: TensorSpec, configuration: Configuration) -> InshrinkeratorWeightCodec:
        """Return the codec of one weight under a configuration."""
        thresholds = self.sketches.thresholds(
            configuration.metric, prune=configuration.prune, protect=configuration.protect
        )
        embedding = spec.tag.layer_type is LayerType.EMBEDDING
        return InshrinkeratorWeightCodec(
            bins=configuration.embedding_bins if embedding else configuration.bins,
            thresholds=thresholds[spec.tag.layer_type.value],
            gradient=self.gradients.get(spec.name),
            coder=self._options.coder,
        )

    def restored(self, configuration: Configuration) -> dict[str, torch.Tensor]:
        """Return the model that a reader would restore under a configuration, by the names of its parameters and buffers."""
        return self._rest | {
            _parameter(spec): self.codec(spec, configuration).quantize(tensor).value(tensor.dtype)
            for spec, tensor in zip(self.specs, self.tensors.values(), strict=True)
        }


def weights_of(save_context: SaveContext, options: InshrinkeratorOptions) -> Weights:
    """Return the weights of a save, sketched."""
    scores = save_context.scores
    return Weights(
        save_context.state, options, save_context.gradients, scores if isinstance(scores, Mapping) else None
    )


@dataclass(frozen=True)
class Inshrinkerator:
    """The scheme under one configuration.

    Args:
        options: the scheme's settings.
        weights: the snapshot's weights, sketched.
        configuration: bins, prune and protect fractions, metric.
    """

    name: ClassVar[str] = "inshrinkerator"

    options: InshrinkeratorOptions
    weights: Weights
    configuration: Configuration

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """See `Scheme.codecs`."""
        makers = moment_codecs(state, self.options.min_elements)
        sketched = {spec.name for spec in self.weights.specs}
        for name, spec in state.specs.items():
            if name in sketched:
                makers[name] = partial(self.weights.codec, spec, self.configuration)
            elif self.options.takes(spec):
                makers[name] = partial(_refuse, name)
        return makers

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        return {"name": self.name, "configuration": self.configuration.to_json()}


def _refuse(name: str) -> TensorCodec:
    raise CannotRepresentError(f"{name} contains NaN or infinity and is stored exactly")


def _parameter(spec: TensorSpec) -> str:
    return spec.tag.parameter or spec.name


def _gradients(
    state: TrainingState, specs: list[TensorSpec], collected: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Return the gradients' EMA of each weight: as collected, or else Adam's first moment, which is one (beta1 = 0.9)."""
    moments = {
        spec.tag.parameter: state.tensors[name]
        for name, spec in state.specs.items()
        if spec.tag.role is Role.EXP_AVG
        and spec.tag.parameter is not None
        and spec.key != "momentum_buffer"  # SGD's is not an average but a sum over many steps
    }
    chosen = {}
    for spec in specs:
        gradient = (collected or {}).get(_parameter(spec), moments.get(spec.tag.parameter or ""))
        if gradient is not None and _scores(state.tensors[spec.name], gradient):
            chosen[spec.name] = gradient
    return chosen


def _scores(weight: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether the sensitivities of a finite weight are finite too; of some gradients only the product overflows."""
    if gradient.shape != weight.shape or gradient.is_complex():
        return False
    if weight.numel() == 0:
        return True
    largest = weight.abs().max().float() * gradient.abs().max().float()  # NaN where the gradient contains one
    return bool(torch.isfinite(largest)) or bool(torch.isfinite(sensitivity_score(weight, gradient)).all())
