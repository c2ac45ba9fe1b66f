"""The default scheme: weights on a dithered trellis, moments by what they do to the next updates.

Which codec takes which tensor:

* weights, and masters of half-precision weights: the trellis, with step sizes by `shrinkpoint.schemes.auto.weight_steps`; one scale for
  the whole model, up to 1, which a search chooses. Half-precision weights are rounded from their masters;
* Adam and its kin: the second moment as a row times a column where it is nearly that, or will soon be forgotten, and else every
  element to a share of itself; the first moment in units of its root;
* SGD with momentum, Lion: the momentum in units of its own root mean square by rows and columns;
* other squares of gradients (RMSprop, Adagrad, Adadelta, amsgrad's maximum and its second moment), and other sizes (Adamax's largest
  gradient, Rprop's steps): every element to a share of itself;
* averages of the weights (EMA, SWA, ASGD's): the trellis, by how far each has itself moved, with its weight's curvature; exactly
  while that is not known, or they are copies of their weights. An optimizer's copies that move with their weights take no bytes;
* any other state, and whatever is small: exactly.

What a restored first moment has lost is lost progress: as many steps as the optimizer remembers, times the share that is
lost. It may be a small share of the steps between two checkpoints, however high the learning rate is or will be.
"""

import math
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.followers import CopiedCodec, RoundedCodec
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.optimizer_memory import (
    EPSILON,
    FADING,
    UNKNOWN,
    epsilons,
    errors_at_once,
    memories,
    second_memories,
    states_of,
)
from shrinkpoint.schemes.auto.options import MILD_SCALE, AutoOptions
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec, rank_one
from shrinkpoint.schemes.auto.trellis import WIDER
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.auto.weight_steps import WeightStep, WeightSteps, known_movement
from shrinkpoint.schemes.base import Makers, SaveContext, TensorCodec
from shrinkpoint.schemes.recipe import described
from shrinkpoint.schemes.sums import WeightSums
from shrinkpoint.state.training import Role, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

Maker = Callable[[], TensorCodec]

# Levels of other squares and sizes, in sixteenths of an octave: wider where what a restore has changed is soon forgotten
_FADING_STEP, _LASTING_STEP = 16, 8
_USUAL_ERRORS = 10  # of as many restores, which steps were chosen for where nothing is forgotten
# Of the steps between two checkpoints: how many of them a restored first moment may have lost.
_LOST_STEPS = 0.01
_OF_DIRECTION = 8  # times less where an optimizer uses the direction of a moment alone
_MOST_LOST = 0.45  # of a first moment; from a half on, it would be farther from the truth than zeros are
_LEAST_LOST = 0.005  # by each of ten restores, however close the checkpoints are
# Where direction is all, weak directions weigh as much as strong ones, and an orthogonalised update (Muon's) is mostly made of them.
_LEAST_LOST_OF_DIRECTION = 0.002
_NEEDED = "needed:what is restored of it would change the next updates too much"
_FINER = 4  # times less of a first moment is lost by each grade of finer moments
# Octaves, root mean square, that a second moment may be from a row times a column where it remembers a gradient from one checkpoint
# to the next; inversely as the root of the share of those steps that it remembers. Training then goes on with other rates by element
# for as long: it cost a forecasting GRU (0.8 octaves, ten restores) 1.4 % of its loss, and fine-tuning (0.7 to 1.1) 0.45 %.
_MISFIT = 0.7
_LEAST = 1e-30


@dataclass(frozen=True)
class _Names:
    """Names of a state's tensors: of weights and masters by their parameter, of an optimizer's tensors by where they stand."""

    masters: Mapping[str | None, str]
    weights: Mapping[str | None, str]
    firsts: Mapping[str, str]
    seconds: Mapping[str, str]
    squares: Mapping[str, str]

    @staticmethod
    def of(state: TrainingState) -> "_Names":
        return _Names(
            _by_parameter(state, Role.MASTER),
            _by_parameter(state, Role.WEIGHT),
            _by_place(state, Role.EXP_AVG),
            _by_place(state, Role.EXP_AVG_SQ),
            _by_place(state, Role.SQUARES),
        )


@dataclass(frozen=True, kw_only=True)
class Auto:
    """The scheme.

    Args:
        options: its settings.
        save_context: the save: a base, and the first save after a restore, take dithers of their own.
        scale: the steps' scale, where the search has chosen it; None takes the options', or else a mild one.
        finer_moments: see there.
        exact_optimizers: see there.
    """

    name: ClassVar[str] = "auto"

    options: AutoOptions = field(default_factory=AutoOptions)
    save_context: SaveContext
    scale: float | None = None
    finer_moments: float = 0
    """By how many grades moments are to lose less than usual, at more bytes: with each a quarter of it. From 1 on, second moments are
    stored element by element, and from 2 on, their levels are half as wide with each."""
    exact_optimizers: Collection[int] = ()
    """Positions of optimizers whose state is stored exactly."""

    def codecs(self, state: TrainingState) -> Mapping[str, Maker]:
        """See `Scheme.codecs`."""
        left: dict[str, str] = {}
        names = _Names.of(state)
        makers = self._weights(state, names, left)
        moments, remembered = self._first_moments(state, names), second_memories(state)
        kept = states_of(state, self.exact_optimizers)
        left |= dict.fromkeys(kept - makers.keys(), _NEEDED)
        for name, spec in state.specs.items():
            if name in makers or name in left or spec.numel < self.options.min_elements:
                continue
            if spec.tag.role is Role.EXP_AVG:
                makers[name] = moments[name]
            elif spec.tag.role in (Role.SQUARES, Role.STATE) or self._by_element(spec, names):
                makers[name] = self._log_levels(spec, _memory(spec, names, remembered))
            elif spec.tag.role is Role.EXP_AVG_SQ:
                first = names.firsts.get(spec.place)
                makers[name] = partial(
                    self._second_moment,
                    spec,
                    state.tensors[name],
                    first=state.tensors[first] if first else None,
                    memory=remembered.get(name, math.inf),
                )
        return Makers(makers, left)

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        finer: dict[str, JSON] = {"finer_moments": float(self.finer_moments)} if self.finer_moments else {}
        if self.exact_optimizers:
            finer["exact_optimizers"] = sorted(self.exact_optimizers)
        return {**described(self.name, self.options), "scale": self._scale, **finer}

    @property
    def settings(self) -> str:
        """In short, for logs."""
        fixed = self.options.first_moment_step
        step = f" first_moment_step={fixed:g}" if fixed is not None else ""
        grade = f" x{self.finer_moments:g}" if self.finer_moments not in (0, 1) else ""
        finer = f" finer moments{grade}" if self.finer_moments else ""
        return f"scale={self._scale:.3g}{step}{finer}{' exact moments' if self.exact_optimizers else ''}"

    @property
    def _scale(self) -> float:
        return self.scale or self.options.weight_scale or MILD_SCALE

    # ---- weights, masters and averages

    def _weights(self, state: TrainingState, names: _Names, left: dict[str, str]) -> dict[str, Maker]:
        specs = self._quantized(state, names, left)
        steps = WeightSteps(self.options, self.save_context, self._scale).of(specs, state, left)
        makers: dict[str, Maker] = {
            name: partial(self._weight, state.specs[name], step) for name, step in steps.items()
        }
        for name, spec in state.specs.items():
            master = _master(state, spec, names.masters)
            weight = names.weights.get(spec.tag.parameter)
            if master is not None:
                makers[name] = partial(RoundedCodec, leader=master)
            elif weight is not None and self._is_copy(state, spec, weight):
                makers[name] = partial(CopiedCodec, leader=state.tensors[weight])
        return makers

    def _quantized(self, state: TrainingState, names: _Names, left: dict[str, str]) -> list[TensorSpec]:
        """Return the weights, masters and averages that are coded with step sizes."""
        specs = []
        for spec in filter(self.options.takes, state.specs.values()):
            weight = names.weights.get(spec.tag.parameter)
            if spec.tag.role is Role.AVERAGE and not self._is_averaged(state, spec, weight):
                left[spec.name] = "copy"
            else:
                specs.append(spec)
        return specs

    def sums(self, state: TrainingState) -> WeightSums:
        """Return what step sizes depend on of all weights together: to be added where each rank has some of them (`SaveContext.sums`)."""
        specs = self._quantized(state, _Names.of(state), {})
        return WeightSteps(self.options, self.save_context, self._scale).sums(specs, state)

    def _weight(self, spec: TensorSpec, step: WeightStep) -> TensorCodec:
        size, exponents = step.sizes(spec)
        return TrellisWeightCodec(
            step=size * WIDER,
            exponents=exponents,
            seed=self._seed(spec.name),
            after_restore=self.save_context.restored,
            kept=step.kept,
        )

    def _is_averaged(self, state: TrainingState, spec: TensorSpec, weight: str | None) -> bool:
        """Return whether an average is more than a copy of its weight, and it is known how far it moves: else it is stored exactly."""
        if weight is None or known_movement(self.save_context, spec) is None:
            return False
        return not _is_equal(state.tensors[spec.name], state.tensors[weight])

    def _is_copy(self, state: TrainingState, spec: TensorSpec, weight: str) -> bool:
        """Return whether an optimizer's average, as ASGD's, is its weight, bit by bit, and moves as that does.

        What stands still is a reference, and exact; so are copies that the user keeps.
        """
        if spec.tag.role is not Role.AVERAGE or not _is_of_optimizer(spec):
            return False
        moved = known_movement(self.save_context, spec)
        if moved is None:  # the first one that is saved
            moved = known_movement(self.save_context, state.specs[weight])
        moves = moved is not None and bool((moved > 0).any())
        return moves and _is_equal(state.tensors[spec.name], state.tensors[weight])

    # ---- the optimizer's state

    def _first_moments(self, state: TrainingState, names: _Names) -> dict[str, Maker]:
        """Of all of them: how much of each may be lost depends on what its optimizer remembers."""
        remembered, added = memories(state), epsilons(state)
        makers: dict[str, Maker] = {}
        allowed = _LOST_STEPS * self.save_context.interval
        for name, spec in state.specs.items():
            if spec.tag.role is not Role.EXP_AVG:
                continue
            directed, place = name in self.save_context.directions, spec.place
            lost = allowed / max(remembered.get(name, UNKNOWN), _LEAST) / (_OF_DIRECTION if directed else 1)
            make: Callable[..., TensorCodec] = CentroidFirstMomentCodec
            if place not in names.seconds:
                # the update is a multiple of the momentum, or has its direction alone
                make = partial(CentroidMomentumCodec, linear=not directed)
            elif place not in names.squares:  # where amsgrad keeps a maximum, it divides by that
                second = names.seconds[place]
                make = partial(make, second_moment=state.tensors[second], epsilon=added.get(second, EPSILON))
            least = (_LEAST_LOST_OF_DIRECTION if directed else _LEAST_LOST) / self.save_context.budget_ratio
            loss = min(max(lost, least), _MOST_LOST)
            loss /= _FINER**self.finer_moments
            makers[name] = partial(make, step=self.options.first_moment_step, loss=loss)
        return makers

    def _second_moment(
        self, spec: TensorSpec, second: torch.Tensor, *, first: torch.Tensor | None, memory: float
    ) -> TensorCodec:
        """Return a row times a column, unless that is too far from it for too many of the steps between two checkpoints.

        Args:
            spec: of the second moment.
            second: its values.
            first: the first moment of the same parameter, where there is one.
            memory: for how many steps it remembers a gradient, and a restore's error lasts.
        """
        share = min(1.0, memory / max(self.save_context.interval, 1))
        factors, misfit = rank_one(second, spec)
        if share > 0 and misfit > _MISFIT / math.sqrt(share):
            return self._log_levels(spec, memory)()
        return FactoredSecondMomentCodec(first_moment=first, factors=factors)

    def _by_element(self, spec: TensorSpec, names: _Names) -> bool:
        """Return whether a row times a column is not good enough for a second moment."""
        is_second, has_maximum = spec.tag.role is Role.EXP_AVG_SQ, spec.place in names.squares  # amsgrad's
        return is_second and (self.finer_moments >= 1 or has_maximum)

    def _log_levels(self, spec: TensorSpec, memory: float) -> Maker:
        """Make a moment's codec by levels; dither continues as long as no restore has put it on its levels.

        Tensors that stand together share it: so amsgrad's maximum is never restored below the second moment that it is of.

        Where training goes on from every checkpoint, the errors of those that the optimizer remembers are there at once: levels are
        finer by as much. And they are right in the mean of ``log v``, not of ``1 / v``: that would make v, of which optimizers take
        means, larger each time, and updates ever shorter.

        Args:
            spec: of the tensor.
            memory: as `_memory` gives it.
        """
        step, usual = (_FADING_STEP, 1) if spec.key in FADING else (_LASTING_STEP, _USUAL_ERRORS)
        adopts = self.save_context.adopts
        if adopts:
            at_once = errors_at_once(memory, self.save_context.interval, self.save_context.restore_budget)
            step = max(1, round(step * math.sqrt(min(1.0, usual / at_once))))
        step = max(1, step >> max(0, int(self.finer_moments) - 1))
        reference = (self.save_context.reference or {}).get(spec.name)
        before = reference is not None and reference.codec == LogLevelsCodec.id
        return partial(
            LogLevelsCodec,
            step=step,
            seed=None if before and not self.save_context.restored else self._seed(spec.place),
            divides=spec.tag.role is not Role.STATE and not adopts,
        )

    def _seed(self, name: str) -> int:
        return zlib.crc32(f"{self.save_context.step}/{name}".encode())


def _memory(spec: TensorSpec, names: _Names, remembered: Mapping[str, float]) -> float:
    """For how many steps an error in a tensor lasts that is coded element by element; the same for those that stand together."""
    if spec.key in FADING:
        return remembered.get(spec.name, UNKNOWN)
    if spec.tag.role is not Role.EXP_AVG_SQ or spec.place in names.squares:
        return math.inf
    return remembered.get(spec.name, math.inf)


def _by_parameter(state: TrainingState, role: Role) -> dict[str | None, str]:
    """Return names of the tensors of a role, by their parameter."""
    specs = state.specs.items()
    return {spec.tag.parameter: name for name, spec in specs if spec.tag.role is role and spec.tag.parameter}


def _by_place(state: TrainingState, role: Role) -> dict[str, str]:
    """Return names of the tensors of a role, the first of each place where they stand."""
    found: dict[str, str] = {}
    for name, spec in state.specs.items():
        if spec.tag.role is role:
            found.setdefault(spec.place, name)
    return found


def _master(state: TrainingState, spec: TensorSpec, masters: Mapping[str | None, str]) -> torch.Tensor | None:
    """Return the fp32 weight that this half of it is rounded from, if it is."""
    if spec.tag.role is not Role.WEIGHT or spec.dtype not in (torch.float16, torch.bfloat16):
        return None
    name = masters.get(spec.tag.parameter)
    return state.tensors[name] if name is not None and state.specs[name].shape == spec.shape else None


def _is_of_optimizer(spec: TensorSpec) -> bool:
    """Return whether it stands in an optimizer's state, by parameter and key: ``.../state/0/ax``."""
    folders = spec.name.split("/")
    return len(folders) > 3 and folders[-3].endswith("state")


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
