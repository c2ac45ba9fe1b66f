"""The scheme of our own: weights on a dithered trellis, moments in units of their second one, planes that explain each other.

The step of a weight is ``scale * size * (v / V) ** -1/4``: `size` the root mean square of all matrices, v the row's and
column's second moment, V the geometric mean of all matrices' own; one scale for the whole model, which the search chooses.
A matrix's own is its arithmetic mean: in an embedding, most rows may hardly be used, and the others must not pay for them.
Biases, norms and other small tensors take an eighth of it: they cost few bytes.
The curvature is Adam's second moment, or what an optimizer keeps that grows with it: the square of its momentum, or of the
gradients' mean that was collected. Where there is nothing of the kind, steps are a share of the tensor's own size.

What is known of each optimizer's state:

* Adam and its kin: the second moment as a row times a column, the first in units of its root;
* SGD with momentum, Lion: the momentum in units of its own root mean square by rows and columns;
* masters of half-precision weights: on the lattice, and the weights rounded from them;
* any other state, and whatever is small: exactly.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch

from shrinkpoint.entropy.context import Effort
from shrinkpoint.entropy.trellis import States
from shrinkpoint.schemes.base import Occasion, TensorCodec
from shrinkpoint.schemes.dithered_moments import (
    DitheredFirstMomentCodec,
    DitheredMomentumCodec,
    FactoredSecondMomentCodec,
)
from shrinkpoint.schemes.lattice import LatticeCodec
from shrinkpoint.schemes.lattice_steps import curvature_exponents
from shrinkpoint.schemes.learning_rates import reach_of_first_moments
from shrinkpoint.schemes.planes import WEIGHT_DTYPES, widened
from shrinkpoint.schemes.recipe import check_choice, check_number, described
from shrinkpoint.schemes.rounded import RoundedCodec
from shrinkpoint.schemes.trellis_lattice import TrellisLatticeCodec
from shrinkpoint.schemes.trellis_moments import TrellisFirstMomentCodec, TrellisMomentumCodec
from shrinkpoint.schemes.trellis_points import WIDER
from shrinkpoint.state import LayerType, Role, TensorSpec, TrainingState
from shrinkpoint.tree import JSON

__all__ = ["MILD_SCALE", "Auto", "AutoOptions"]

MILD_SCALE = 0.25
"""Without a way to measure; a restore then costs the bench's convolutional network 0.2 % of the loss, its GPT much less."""

_FARTHEST = 64.0  # no tensor's curvature changes its steps by more
_LEAST = 1e-30
_FINER = 8  # biases and norms: few elements, each of which counts for many
_FEW = 2000  # so do those of small tensors
# Of a running mean over ten steps, Adam's unit is 1 / 0.23 root mean squares: the same noise for the weights.
_OWN_UNITS = 4.3
_NARROWEST, _WIDEST = 1 / 64, 64.0
# The noise of a weight for which its first moment may answer, in the weight's own: where bytes and noise balance.
_MOMENTS_SHARE = 0.7
_MOMENT_STEPS = 1.0, 12.0  # of moments that are corrected for their bias, as those of long trainings are
_MOMENT_STEP = 3.0  # where nothing is known of the learning rate


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Settings of the scheme.

    Raises:
        ConfigError: a field has a value that cannot work.
    """

    weight_scale: float | None = None
    """Steps of the weights' trellis, in root mean squares of all weights; None leaves it to the search."""
    first_moment_step: float | None = None
    """Distance of two levels of Adam's first moment, in roots of the second; None follows the learning rate."""
    effort: Effort = "default"
    """How much time coding may take: ``fast`` has scalar quantizers, ``default`` and ``max`` a trellis of 4 and of 8 states."""
    min_elements: int = 64
    """Tensors with fewer elements are stored exactly."""

    def __post_init__(self) -> None:
        if self.weight_scale is not None:
            check_number(self, "weight_scale", 1e-4, 64)
        if self.first_moment_step is not None:
            check_number(self, "first_moment_step", 0.001, 64)
        check_number(self, "min_elements", 1, 2**48, whole=True)
        check_choice(self, "effort", Effort)

    def takes(self, spec: TensorSpec) -> bool:
        """Whether the tensor is coded as a weight."""
        of_a_kind = spec.tag.role in (Role.WEIGHT, Role.MASTER) and spec.dtype in WEIGHT_DTYPES
        return of_a_kind and spec.numel >= self.min_elements


def _by_parameter(state: TrainingState, role: Role) -> dict[str | None, str]:
    """Names of the tensors of a role, by their parameter."""
    specs = state.specs.items()
    return {spec.tag.parameter: name for name, spec in specs if spec.tag.role is role and spec.tag.parameter}


def _master(state: TrainingState, spec: TensorSpec, masters: Mapping[str | None, str]) -> torch.Tensor | None:
    """The fp32 weight that this half of it is rounded from, if it is."""
    if spec.tag.role is not Role.WEIGHT or spec.dtype not in (torch.float16, torch.bfloat16):
        return None
    name = masters.get(spec.tag.parameter)
    return state.tensors[name] if name is not None and state.specs[name].shape == spec.shape else None


class _Step(NamedTuple):
    step: float
    curvature: torch.Tensor | None
    """What the steps' rows and columns follow, of the weight's shape."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The scheme.

    Args:
        options: its settings.
        occasion: the save: a base, and the first save after a restore, take dithers of their own.
        scale: the steps' scale, where the search has chosen it; None takes the options', or else a mild one.
    """

    name: ClassVar[str] = "auto"

    options: AutoOptions = field(default_factory=AutoOptions)
    occasion: Occasion
    scale: float | None = None

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """See `Scheme.codecs`."""
        makers: dict[str, Callable[[], TensorCodec]] = {}
        steps = self._steps(state)
        moments = self._moment_steps(state, steps)
        masters = _by_parameter(state, Role.MASTER)
        paired = {spec.tag.parameter for spec in state.specs.values() if spec.tag.role is Role.EXP_AVG_SQ}
        for name, spec in state.specs.items():
            master = _master(state, spec, masters)
            if master is not None:
                makers[name] = partial(RoundedCodec, master=master)
            elif name in steps:
                makers[name] = partial(self._lattice, spec, steps[name])
            elif spec.numel >= self.options.min_elements:
                step = moments.get(spec.tag.parameter or "", self._usual / _finer(spec))
                maker = self._moment(spec, step, spec.tag.parameter in paired)
                makers |= {name: maker} if maker is not None else {}
        return makers

    def _moment(self, spec: TensorSpec, step: float, paired: bool) -> Callable[[], TensorCodec] | None:
        if spec.tag.role is Role.EXP_AVG_SQ:
            return FactoredSecondMomentCodec
        if spec.tag.role is not Role.EXP_AVG:
            return None
        if not paired:
            step = min(_WIDEST, self._usual / _finer(spec) * _OWN_UNITS)
        seed, states = self._seed(spec), self._states
        if states is not None:
            step = min(_WIDEST, step * WIDER[states])
            if paired:
                return partial(TrellisFirstMomentCodec, step=step, seed=seed, states=states)
            return partial(TrellisMomentumCodec, step=step, seed=seed, states=states)
        if paired:
            return partial(DitheredFirstMomentCodec, step=step, seed=seed, effort="fast")
        return partial(DitheredMomentumCodec, step=step, seed=seed, effort="fast")

    @property
    def _usual(self) -> float:
        return self.options.first_moment_step or _MOMENT_STEP

    def _moment_steps(self, state: TrainingState, steps: Mapping[str, "_Step"]) -> dict[str, float]:
        """Of Adam's first moments, by parameter: so wide that their noise moves a weight by a share of its own noise."""
        reach = reach_of_first_moments(state)
        if self.options.first_moment_step is not None or reach is None:
            return {}
        found = {}
        for name, step in steps.items():
            spec = state.specs[name]
            finer = _finer(spec)
            wanted = _MOMENTS_SHARE * step.step * finer / max(reach.distance, _LEAST)
            corrected = min(max(wanted, _MOMENT_STEPS[0]), _MOMENT_STEPS[1])
            stored = corrected / max(reach.correction, _LEAST)
            found[spec.tag.parameter or name] = min(max(stored, _NARROWEST), _WIDEST) / finer
        return found

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        return {**described(self.name, self.options), "scale": self._scale}

    @property
    def settings(self) -> str:
        """In short, for logs."""
        fixed = self.options.first_moment_step
        return f"scale={self._scale:.3g}" + (f" first_moment_step={fixed:g}" if fixed is not None else "")

    @property
    def _scale(self) -> float:
        return self.scale or self.options.weight_scale or MILD_SCALE

    def _lattice(self, spec: TensorSpec, step: _Step) -> TensorCodec:
        exponents = curvature_exponents(step.curvature, spec.shape) if step.curvature is not None else None
        states = self._states
        if states is not None:
            return TrellisLatticeCodec(
                step=step.step * WIDER[states],
                exponents=exponents,
                seed=self._seed(spec),
                went_on=self.occasion.restored,
                states=states,
            )
        held = (self.occasion.reference or {}).get(spec.name)
        goes_on = held is not None and held.codec == LatticeCodec.id and not self.occasion.restored
        seed = None if goes_on else self._seed(spec)
        return LatticeCodec(step=step.step, exponents=exponents, seed=seed, effort="fast")

    @property
    def _states(self) -> States | None:
        """Of the trellises; None for scalar quantizers, which take half the time."""
        by_effort: dict[Effort, States | None] = {"fast": None, "default": 4, "max": 8}
        return by_effort[self.options.effort]

    def _seed(self, spec: TensorSpec) -> int:
        return zlib.crc32(f"{self.occasion.step}/{spec.name}".encode())

    def _steps(self, state: TrainingState) -> dict[str, _Step]:
        """Of the weights that have one; what is all zeros or of no ordinary size is stored exactly."""
        specs = [spec for spec in state.specs.values() if self.options.takes(spec)]
        moments: dict[str, list[TensorSpec]] = {}
        for spec in state.specs.values():
            if spec.tag.parameter is not None and spec.tag.role in (Role.EXP_AVG, Role.EXP_AVG_SQ):
                moments.setdefault(spec.tag.parameter, []).append(spec)
        found = {
            spec.name: self._curvature(state, spec, moments.get(spec.tag.parameter or "", ()))
            for spec in specs
        }
        many = [spec for spec in specs if _finer(spec) == 1] or specs
        size = _size([state.tensors[spec.name] for spec in many])
        means = _means([(found[spec.name], spec.numel) for spec in many])
        steps = {}
        for spec in specs:
            curvature = found[spec.name]
            if curvature is None:
                unit, tensor = _size([state.tensors[spec.name]]), None
            else:
                octaves = (means.get(curvature.kind, curvature.level) - curvature.level) / 4
                unit = size * min(_FARTHEST, max(1 / _FARTHEST, math.exp(octaves)))
                tensor = curvature.tensor
            if 1e-20 < unit < 1e20:
                steps[spec.name] = _Step(self._scale / _finer(spec) * unit, tensor)
            elif not bool(torch.isfinite(state.tensors[spec.name]).all()):
                steps[spec.name] = _Step(1.0, None)  # of any step: the codec refuses the tensor, and says why
        return steps

    def _curvature(
        self, state: TrainingState, weight: TensorSpec, moments: Sequence[TensorSpec]
    ) -> "_Curvature | None":
        beside = {spec.tag.role: spec.name for spec in moments if spec.shape == weight.shape}
        gradient = (self.occasion.gradients or {}).get(weight.tag.parameter or weight.name)
        if Role.EXP_AVG_SQ in beside:
            return _curvature("second moment", state.tensors[beside[Role.EXP_AVG_SQ]])
        if Role.EXP_AVG in beside:
            return _curvature("momentum", _square(state.tensors[beside[Role.EXP_AVG]]))
        if gradient is not None and tuple(gradient.shape) == weight.shape:
            return _curvature("gradient", _square(gradient))
        return None


def _finer(spec: TensorSpec) -> int:
    few = len(spec.shape) < 2 or spec.tag.layer_type is LayerType.NORM or spec.numel < _FEW
    return _FINER if few else 1


class _Curvature(NamedTuple):
    kind: str
    tensor: torch.Tensor
    level: float
    """Natural logarithm of the mean."""


def _curvature(kind: str, tensor: torch.Tensor) -> _Curvature | None:
    from shrinkpoint.schemes import matrix_kernels  # numba

    if tensor.is_complex() or tensor.numel() == 0:
        return None
    least, most = torch.aminmax(tensor)
    if not (bool(least >= 0) and bool(most > 0) and bool(torch.isfinite(most))):  # NaN is neither
        return None
    mean = matrix_kernels.total(widened(tensor)) / tensor.numel()
    return _Curvature(kind, tensor, math.log(max(mean, _LEAST)))


def _square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().square()


def _size(tensors: list[torch.Tensor]) -> float:
    """Root of the mean square of all elements that are finite in sum."""
    from shrinkpoint.schemes import matrix_kernels  # numba

    squares = [(float(matrix_kernels.square_sum(widened(tensor))), tensor.numel()) for tensor in tensors]
    finite = [(square, count) for square, count in squares if math.isfinite(square)]
    return math.sqrt(sum(s for s, _ in finite) / max(1, sum(n for _, n in finite)))


def _means(found: list[tuple[_Curvature | None, int]]) -> dict[str, float]:
    """The mean level over all elements, for each kind: kinds are not measured in the same unit."""
    totals: dict[str, tuple[float, int]] = {}
    for curvature, count in found:
        if curvature is not None:
            total, before = totals.get(curvature.kind, (0.0, 0))
            totals[curvature.kind] = total + count * curvature.level, before + count
    return {kind: total / count for kind, (total, count) in totals.items()}
