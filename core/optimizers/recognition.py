"""Classifies optimizer state by its response to gradients and by its values; by name only for well-known optimizers.

State of an unknown name is identified on a copy of its optimizer that takes a few steps on a few numbers. A linear
combination of gradients, the same for all elements, is a first moment; one of their squares is a second moment. State
close to its weight is an average of it. Non-negative state is a magnitude, quantized with a relative error. The rest is
stored exactly, and `Tag.why` gives the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shrinkpoint.optimizers.updates import OptimizerKind, copied_group, obstacle_of
from shrinkpoint.state.averages import is_near
from shrinkpoint.state.stateful import optimizer_states
from shrinkpoint.state.training import Role, TensorSpec, TrainingState

_SIZES = (
    "exp_inf",
    "acc_delta",
    "step_size",
    "prev",
)  # Adamax, Adadelta, Rprop: quantized with a relative error
_SIGNED = ("prev",)
_SECOND = "exp_avg_sq"
_SHAPE = (8, 8)
_STEPS = 4
_SEED = 20230622
_EXACT = 1e-3  # relative residual of a fit that counts as exact: rounding and the optimizers' epsilons
_STRANGE = "it is neither a sum of gradients nor one of their squares, has negative elements, and is no average of the weights"


@dataclass(frozen=True)
class Behaviour:
    """The classification of one entry of an optimizer's state."""

    role: Role
    """`EXP_AVG` for sums of gradients, `SQUARES` for sums of their squares, `STATE` for anything else."""
    last_only: bool = False
    """Whether it is the last gradient alone."""


def recognised(state: TrainingState, kinds: Sequence[OptimizerKind] = ()) -> TrainingState:
    """Return the state with the entries of `Role.STATE` classified, and second moments of unknown optimizers confirmed.

    Args:
        state: a snapshot, on the host; described by `shrinkpoint.state.roles`.
        kinds: of the optimizers, in the order of their states in it; without them, only values are used.
    """
    open_names = {n for n, spec in state.specs.items() if spec.tag.role in (Role.STATE, Role.SQUARES)}
    if not open_names:
        return state
    found = _found_by_behaviour(state, kinds, open_names)
    specs = dict(state.specs)
    weights = state.weights
    for name in open_names:
        specs[name] = _with_role(specs[name], state.tensors[name], found.get(name), weights)
    return replace(state, specs=_with_second_moments(specs, found))


def _with_role(
    spec: TensorSpec,
    tensor: torch.Tensor,
    behaviour: Behaviour | None,
    weights: Mapping[str | None, torch.Tensor],
) -> TensorSpec:
    key, negative = spec.key, bool((tensor < 0).any())
    if spec.tag.role is Role.SQUARES:  # by its name
        return spec if not negative else _exactly(spec, "squares of gradients cannot be negative")
    if key in _SIZES:
        return spec if not negative or key in _SIGNED else _exactly(spec, "a size cannot be negative")
    if behaviour is not None and behaviour.role is not Role.STATE:
        as_state = behaviour.last_only or (behaviour.role is Role.SQUARES and negative)
        return spec if as_state else replace(spec, tag=replace(spec.tag, role=behaviour.role))
    if is_near(tensor, weights.get(spec.tag.parameter)):
        return replace(spec, tag=replace(spec.tag, role=Role.AVERAGE))
    return spec if not negative else _exactly(spec, _STRANGE)


def _exactly(spec: TensorSpec, why: str) -> TensorSpec:
    return replace(spec, tag=replace(spec.tag, role=Role.OTHER, why=why))


def _with_second_moments(
    specs: dict[str, TensorSpec], found: Mapping[str, Behaviour]
) -> dict[str, TensorSpec]:
    """Mark second moments like Adam's: a parameter's only squares, along with a first moment of the same gradients."""
    places: dict[str, list[str]] = {}
    for name in found:
        places.setdefault(specs[name].place, []).append(name)
    for names in places.values():
        kinds = [found[name] for name in names]
        squares = [name for name in names if found[name].role is Role.SQUARES]
        firsts = [kind for kind in kinds if kind.role is Role.EXP_AVG and not kind.last_only]
        alone = len(squares) == 1 and len(squares) + len(firsts) == len(kinds)
        if alone and firsts and specs[squares[0]].tag.role is Role.SQUARES:
            spec = specs[squares[0]]
            specs[spec.name] = replace(spec, tag=replace(spec.tag, role=Role.EXP_AVG_SQ))
    return specs


def _found_by_behaviour(
    state: TrainingState, kinds: Sequence[OptimizerKind], open_names: set[str]
) -> dict[str, Behaviour]:
    """Behaviours of all state tensors of those parameters that have an entry of unknown name."""
    asked = {
        spec.place
        for spec in (state.specs[name] for name in open_names)
        if spec.key == _SECOND or (spec.tag.role is Role.STATE and spec.key not in _SIZES)
    }
    if not asked:
        return {}
    nodes = list(optimizer_states(state.to_object(own_tensors=True)))
    if len(nodes) != len(kinds):
        return {}
    names = {id(tensor): name for name, tensor in state.tensors.items()}
    found: dict[str, Behaviour] = {}
    for kind, node in zip(kinds, nodes, strict=True):
        for group in node["param_groups"]:
            entries = [node["state"].get(index, {}) for index in group["params"]]
            siblings = [
                {key: names[id(value)] for key, value in entry.items() if id(value) in names}
                for entry in entries
                if isinstance(entry, Mapping)
            ]
            siblings = [
                entry for entry in siblings if any(state.specs[n].place in asked for n in entry.values())
            ]
            behaviour = behaviours(kind, group) if siblings else {}
            for entry in siblings:
                found |= {name: behaviour[key] for key, name in entry.items() if key in behaviour}
    return found


def behaviours(kind: OptimizerKind, group: Mapping[str, Any]) -> dict[str, Behaviour]:
    """Classify by key the entries of an optimizer's state that have their parameter's shape.

    Args:
        kind: of the optimizer; the live one is not touched.
        group: its options for some parameters.

    Returns:
        Empty where the optimizer cannot be stepped on copies, or needs more than gradients.
    """
    if obstacle_of(kind) is not None:
        return {}
    generator = torch.Generator().manual_seed(_SEED)
    start = torch.randn(_SHAPE, generator=generator)
    gradients = torch.randn((_STEPS, *_SHAPE), generator=generator)
    try:
        once, twice = (_after(kind, group, start, factor * gradients) for factor in (1.0, 2.0))
    except Exception:  # noqa: BLE001 - a third-party optimizer may raise anything
        return {}
    return {key: _behaviour(value, twice[key], gradients) for key, value in once.items() if key in twice}


def _after(
    kind: OptimizerKind, group: Mapping[str, Any], start: torch.Tensor, gradients: torch.Tensor
) -> dict[str, torch.Tensor]:
    parameter = torch.nn.Parameter(start.clone())
    made = copied_group({**group, "params": [0]}, {0: parameter})
    optimizer = kind.with_state([made], {})
    for gradient in gradients:
        parameter.grad = gradient.clone()
        kind.step(optimizer)
    entries = optimizer.state[parameter].items()
    return {
        key: value.detach().double()
        for key, value in entries
        if isinstance(key, str) and isinstance(value, torch.Tensor) and value.shape == start.shape
    }


def _behaviour(once: torch.Tensor, twice: torch.Tensor, gradients: torch.Tensor) -> Behaviour:
    """Classify by a least-squares fit of the state after some gradients, and after gradients twice as large."""
    terms = gradients.double().flatten(1).T
    shares = _fitted(once, twice, terms, torch.tensor(2.0))
    if shares is not None:
        others = shares[:-1].abs().max()
        return Behaviour(Role.EXP_AVG, last_only=bool(others <= _EXACT * shares[-1].abs()))
    constant = torch.ones(len(terms), 1, dtype=torch.float64)
    factors = torch.tensor([4.0] * _STEPS + [1.0], dtype=torch.float64)
    shares = _fitted(once, twice, torch.cat([terms.square(), constant], dim=1), factors)
    return Behaviour(Role.STATE if shares is None or bool((shares < -_EXACT).any()) else Role.SQUARES)


def _fitted(
    once: torch.Tensor, twice: torch.Tensor, terms: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor | None:
    """Return coefficients of the terms that add up to the state; None where they do not, or do not scale with the
    gradients."""
    value = once.flatten()
    length = float(torch.linalg.vector_norm(value))
    if length == 0:
        return None
    shares = torch.linalg.lstsq(terms, value[:, None]).solution[:, 0]
    away = float(torch.linalg.vector_norm(terms @ shares - value))
    doubled = float(torch.linalg.vector_norm(terms @ (factors * shares) - twice.flatten()))
    return shares if away <= _EXACT * length and doubled <= 4 * _EXACT * length else None
