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
from shrinkpoint.schemes.closed_loop import previous_value
from shrinkpoint.schemes.codec_io import as_float32
from shrinkpoint.schemes.published.excp_codecs import (
    SYMBOLS,
    ExcpMomentCodec,
    ExcpOptions,
    ExcpSettings,
    ExcpWeightCodec,
    residual_to,
)
from shrinkpoint.schemes.recipe import described, reference_value
from shrinkpoint.schemes.symbol_coders import PlaneCoder
from shrinkpoint.state.training import Role, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

__all__ = [
    "SYMBOLS",
    "ExCP",
    "ExcpMomentCodec",
    "ExcpOptions",
    "ExcpSettings",
    "ExcpWeightCodec",
    "derive_alpha",
]

_SAMPLE = 1 << 16  # residuals per tensor that alpha is derived from


@dataclass(kw_only=True)
class _Joint:
    """One parameter while its tensors are coded: the threshold, and the mask that both moments share."""

    weight: TensorSpec
    state: TrainingState
    reference: ReferenceState
    options: ExcpSettings
    coder: PlaneCoder
    first: str | None
    second: str
    alpha: float
    _mask: Bools | None = None

    def residual(self) -> Float32s:
        target = as_float32(self.state.tensors[self.weight.name], self.weight)
        previous = previous_value(self.reference, self.weight)
        if previous is None:
            raise CannotRepresentError(f"{self.weight.name} has no reference: stored exactly")
        return residual_to(target, previous, self.weight)

    def root(self) -> float:
        """Root of the mean second moment: the scale of the gradient."""
        spec = self.state.specs[self.second]
        mean = float(as_float32(self.state.tensors[self.second], spec).mean(dtype=np.float64))
        if mean < 0:
            raise CannotRepresentError(f"{self.second} has a negative mean: stored exactly")
        return float(np.sqrt(mean))

    def threshold(self, residual: Float32s) -> float:
        """Equation 4 as in the repository: min(clamp, alpha / root) times the median magnitude."""
        return _scale(self.alpha, self.root(), self.options.clamp) * _median(np.abs(residual))

    def weight_codec(self) -> TensorCodec:
        self._mask = None
        threshold = self.threshold(self.residual())
        return ExcpWeightCodec(options=self.options, threshold=threshold, coder=self.coder)

    def moment_codec(self) -> TensorCodec:
        """Equation 5: both moments by one mask, of large first moments whose residual is not pruned."""
        if self._mask is None:
            residual = self.residual()
            self._mask = np.abs(residual) > np.float32(self.threshold(residual))
            self._mask &= residual != 0
            if self.first is not None:
                self._mask &= _large(self.state, self.first, self.options.beta)
        return ExcpMomentCodec(options=self.options, keep=self._mask, coder=self.coder)


def _large(state: TrainingState, first: str, beta: float) -> Bools:
    magnitudes = np.abs(as_float32(state.tensors[first], state.specs[first]))
    large: Bools = magnitudes > np.float32(beta * float(magnitudes.mean(dtype=np.float64)))
    return large


def _scale(alpha: float, root: float, clamp: float) -> float:
    return min(clamp, alpha / root) if root > 0 else clamp


def _median(magnitudes: Float32s) -> float:
    """The lower median, as torch takes it."""
    middle = (magnitudes.size - 1) // 2
    return float(np.partition(magnitudes, middle)[middle])


def derive_alpha(
    residuals: list[Float32s], roots: list[float], sizes: list[int], target_sparsity: float, clamp: float
) -> float:
    """The alpha that prunes this share of all residuals.

    Args:
        residuals: of each weight, or a sample of it.
        roots: of each weight's mean second moment.
        sizes: elements of each weight.
        target_sparsity: the share, 0..1.
        clamp: most medians that a threshold may be.

    Returns:
        The least alpha that prunes so much, within a relative 1e-6; where the clamp keeps the share out of reach, the
        least one that prunes the most.
    """
    ratios = []
    for residual in residuals:
        magnitudes = np.sort(np.abs(residual)).astype(np.float64)
        median = magnitudes[(magnitudes.size - 1) // 2]
        ratios.append(magnitudes / median if median > 0 else np.where(magnitudes > 0, np.inf, 0.0))

    def pruned(alpha: float) -> float:
        shares = [
            np.searchsorted(ratio, _scale(alpha, root, clamp), side="right") / ratio.size
            for ratio, root in zip(ratios, roots, strict=True)
        ]
        return float(np.dot(shares, sizes))

    high = clamp * max(roots, default=0.0)
    if high <= 0:
        return 0.0
    low, goal = high * 1e-12, min(target_sparsity * sum(sizes), pruned(high))
    if pruned(low) >= goal:
        return low
    while high > low * (1 + 1e-6):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if pruned(middle) >= goal else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True)
class ExCP:
    """The scheme.

    Args:
        options: its settings.
        reference: the decoder's state of the previous checkpoint, as for `encode_state`: moments are pruned where their
            weight's residual is, which depends on both. None makes a base.
        coder: entropy coder of the symbols; None takes the one of the options.
    """

    name: ClassVar[str] = "excp"

    options: ExcpSettings = field(default_factory=ExcpOptions)
    reference: Mapping[str, ReferenceState] | None = None
    coder: PlaneCoder | None = None

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """See `Scheme.codecs`."""
        makers: dict[str, Callable[[], TensorCodec]] = {}
        left: dict[str, str] = {}
        joints: list[_Joint] = []
        coder = self.coder or self.options.plane_coder()
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
                    maker = partial(self._alone, state, first, coder)
                    makers |= {name: maker for name in (first, second) if name is not None}
                continue
            joint = _Joint(
                weight=spec, state=state, reference=reference, options=self.options, coder=coder, first=first,
                second=second, alpha=self.options.alpha,
            )  # fmt: skip
            joints.append(joint)
            makers[spec.name] = joint.weight_codec
            makers |= {name: joint.moment_codec for name in (first, second) if name is not None}
        if self.options.target_sparsity is not None:
            self._share_alpha(joints, self.options.target_sparsity)
        return Makers(makers, left)

    def _alone(self, state: TrainingState, first: str, coder: PlaneCoder) -> TensorCodec:
        keep = _large(state, first, self.options.beta)
        return ExcpMomentCodec(options=self.options, keep=keep, coder=coder)

    def _share_alpha(self, joints: list[_Joint], target_sparsity: float) -> None:
        residuals, roots, sizes = [], [], []
        for joint in joints:
            try:
                residual, root = joint.residual(), joint.root()
            except CannotRepresentError:  # raised again, and reported, when the tensor is encoded
                continue
            residuals.append(residual[:: max(1, residual.size // _SAMPLE)].copy())
            roots.append(root)
            sizes.append(residual.size)
        alpha = derive_alpha(residuals, roots, sizes, target_sparsity, self.options.clamp)
        for joint in joints:
            joint.alpha = alpha

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
