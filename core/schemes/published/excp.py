"""ExCP (arXiv 2406.11257, ICML 2024): residuals and both moments pruned jointly and clustered to four bits.

Per parameter, as in its repository: the weights' residual to the reconstruction, pruned below a threshold that
follows from the second moment (section 3.3, equation 4); first and second moments pruned by one mask (equation 5), and
wherever the residual is; 15 clusters and zero for each of the three. The first checkpoint is stored in full. Where paper
and repository differ, the repository decides: thresholds on magnitudes, the median of the residual, the clamp at 2.5.

Two defects are corrected. The repository's fp16 codebook restores second moments below 3e-8 as zero, as they occur in
any language model: codebooks are fp32 here unless `ExcpOptions.codebook` says otherwise. And a pruned second moment is
zero, which with beta2 = 0.999 raises the loss some steps after a restore: `ExcpOptions.refill` restores it as a mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from shrinkpoint.arrays import Bools, Float32s
from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.schemes.base import Makers, ReferenceState, TensorCodec
from shrinkpoint.schemes.closed_loop import previous_value, residual_to
from shrinkpoint.schemes.codec_io import as_float32
from shrinkpoint.schemes.published.excp_codecs import (
    ExcpMomentCodec,
    ExcpOptions,
    ExcpSettings,
    ExcpWeightCodec,
)
from shrinkpoint.schemes.recipe import described, reference_value
from shrinkpoint.state.training import Role, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON


@dataclass(kw_only=True)
class _Joint:
    """One parameter while its tensors are coded: the threshold, and the mask that both moments share."""

    weight: TensorSpec
    state: TrainingState
    reference: ReferenceState
    options: ExcpSettings
    first: str | None
    second: str
    _mask: Bools | None = None

    def residual(self) -> Float32s:
        target = as_float32(self.state.tensors[self.weight.name], self.weight)
        previous = previous_value(self.reference, self.weight)
        if previous is None:
            raise CannotRepresentError(f"{self.weight.name} has no reference: stored exactly")
        return residual_to(target, previous, self.weight)

    def threshold(self, residual: Float32s) -> float:
        """Equation 4 as in the repository: min(clamp, alpha / root of the mean second moment) times the median magnitude."""
        spec, options = self.state.specs[self.second], self.options
        mean = float(as_float32(self.state.tensors[self.second], spec).mean(dtype=np.float64))
        if mean < 0:
            raise CannotRepresentError(f"{self.second} has a negative mean: stored exactly")
        root, middle = float(np.sqrt(mean)), (residual.size - 1) // 2  # the lower median, as torch takes it
        scale = min(options.clamp, options.alpha / root) if root > 0 else options.clamp
        return scale * float(np.partition(np.abs(residual), middle)[middle])

    def weight_codec(self) -> TensorCodec:
        self._mask = None
        threshold = self.threshold(self.residual())
        return ExcpWeightCodec(options=self.options, threshold=threshold)

    def moment_codec(self) -> TensorCodec:
        """Equation 5: both moments by one mask, of large first moments whose residual is not pruned."""
        if self._mask is None:
            residual = self.residual()
            self._mask = np.abs(residual) > np.float32(self.threshold(residual))
            self._mask &= residual != 0
            if self.first is not None:
                self._mask &= _large(self.state, self.first, self.options.beta)
        return ExcpMomentCodec(options=self.options, keep=self._mask)


def _large(state: TrainingState, first: str, beta: float) -> Bools:
    magnitudes = np.abs(as_float32(state.tensors[first], state.specs[first]))
    large: Bools = magnitudes > np.float32(beta * float(magnitudes.mean(dtype=np.float64)))
    return large


@dataclass(frozen=True, kw_only=True)
class ExCP:
    """The scheme.

    Args:
        options: its settings.
        reference: the decoder's state of the previous checkpoint, as for `encode_state`: moments are pruned where their
            weight's residual is, which depends on both. None makes a base.
    """

    name: ClassVar[str] = "excp"

    options: ExcpSettings = field(default_factory=ExcpOptions)
    reference: Mapping[str, ReferenceState] | None = None

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """See `Scheme.codecs`."""
        makers: dict[str, Callable[[], TensorCodec]] = {}
        left: dict[str, str] = {}
        moments = {(spec.tag.parameter, spec.tag.role): spec for spec in state.specs.values()}
        for spec in state.specs.values():
            if not self.options.takes(spec):
                continue
            first, second = (_moment(moments, spec, role) for role in (Role.EXP_AVG, Role.EXP_AVG_SQ))
            # Without it there is no threshold in any delta, and exact deltas are smaller than what is stored in full.
            if second is None:
                makers[spec.name] = partial(_refuse, spec)
                left |= {first: "momentum"} if first is not None else {}
                continue
            reference = reference_value(self.reference, spec, ExcpWeightCodec.id)
            if reference is None:
                makers[spec.name] = partial(ExcpWeightCodec, options=self.options)
                left |= {name: "base" for name in (first, second) if name is not None}
                if self.options.base_moments == "quantized" and first is not None:
                    maker = partial(self._alone, state, first)
                    makers |= {name: maker for name in (first, second) if name is not None}
                continue
            joint = _Joint(
                weight=spec,
                state=state,
                reference=reference,
                options=self.options,
                first=first,
                second=second,
            )
            makers[spec.name] = joint.weight_codec
            makers |= {name: joint.moment_codec for name in (first, second) if name is not None}
        return Makers(makers, left)

    def _alone(self, state: TrainingState, first: str) -> TensorCodec:
        keep = _large(state, first, self.options.beta)
        return ExcpMomentCodec(options=self.options, keep=keep)

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        return described(self.name, self.options)


def _refuse(weight: TensorSpec) -> TensorCodec:
    raise CannotRepresentError(
        f"{weight.name} has no second moment, from which ExCP's threshold follows: stored exactly"
    )


def _moment(
    moments: Mapping[tuple[str | None, Role], TensorSpec], weight: TensorSpec, role: Role
) -> str | None:
    spec = moments.get((weight.tag.parameter, role)) if weight.tag.parameter is not None else None
    return spec.name if spec is not None and spec.shape == weight.shape else None
