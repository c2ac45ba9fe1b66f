"""Error of the next updates after a restore: steps the training's own optimizer on copies of its tensors.

The true state and the restored one get the same gradients on the same weights. Distance and length of the updates need
no evaluation and no forward pass, are defined for any optimizer whose state is tensors, and do not depend on the
current learning rate.
"""

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from shrinkpoint.errors import ScratchError
from shrinkpoint.runtime.dispatch import Refusing
from shrinkpoint.state.stateful import optimizer_states, unwrapped
from shrinkpoint.state.training import Role, TrainingState

_STEPS = 10
_MOST_ELEMENTS = 1 << 19  # of all parameters that are tried
_SEED = 20230622
_STATE = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.SQUARES, Role.STATE)
_SUMS = ("sum",)  # Adagrad's: a sum of the squares of all steps
_LONGER = 1.5  # times: an update that is linear in its moment becomes twice as long with it
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Options that select other kernels, or decay the weights independently of the state.
_PLAIN = {"foreach": False, "fused": None, "capturable": False, "differentiable": False, "weight_decay": 0.0}


@dataclass(frozen=True)
class Updates:
    """Errors of the updates from a restored state relative to the true one; the worst of all optimizers."""

    error: float
    """``||u' - u|| / ||u||``: u the first update from the true state, u' from the restored one; 1 if there were none."""
    length: float
    """``||u'|| / ||u||``."""
    lost_steps: float
    """Updates lost: ten times the missing share of the weights' displacement after ten updates, measured along its direction."""
    each: Mapping[int, "Updates"] = field(default_factory=dict)
    """Those of each optimizer alone, by its position among the optimizers."""


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer's class and options, without its parameters and its state."""

    kind: type[Optimizer]
    attributes: Mapping[str, Any]

    @staticmethod
    def of(optimizer: Optimizer) -> "OptimizerKind":
        """Return the kind of an optimizer, or of the one that a wrapper wraps; on the training thread, copies no tensor."""
        optimizer = unwrapped(optimizer)
        kind = type(optimizer)
        attributes: dict[str, Any] = {}
        for name, value in vars(optimizer).items():
            if name.endswith("_hooks"):
                attributes[name] = OrderedDict()
            elif name not in ("param_groups", "state") and not callable(getattr(kind, name, None)):
                attributes[name] = _shallow(value)  # a scheduler wraps `step` in an attribute: not that one
        return OptimizerKind(kind, attributes)

    def with_state(
        self, groups: list[dict[str, Any]], state: Mapping[torch.Tensor, dict[str, Any]]
    ) -> Optimizer:
        """Return an optimizer of this kind for other parameters."""
        made = object.__new__(self.kind)
        vars(made).update(copy.deepcopy(dict(self.attributes)))
        made.param_groups = groups
        made.state = defaultdict(dict, state)
        return made

    def step(self, made: Optimizer) -> None:
        """Step what `with_state` has made, on any thread; an error where that draws from global generators, which are the training's."""
        if any(_draws(function) for _, function in inspect.getmembers(self.kind, inspect.isfunction)):
            raise TypeError("it draws random numbers")
        # torch's own draw none; of thousands of parameters the mode takes as long as the step
        with nullcontext() if self.is_torchs else Refusing(_refuse_draws):
            self.kind.step(made)

    @property
    def is_torchs(self) -> bool:
        """Whether it is one of torch's own."""
        return self.kind.__module__.startswith("torch.optim.")


def _refuse_draws(operation: Any) -> None:
    if torch.Tag.nondeterministic_seeded in operation.tags:
        raise TypeError("it draws random numbers")


@cache
def _draws(function: Any) -> bool:
    """Return whether a function names numpy's or Python's generators: nothing shows on one thread alone that they are drawn from."""
    inner = inspect.unwrap(function)
    names = () if inner.__module__.startswith("torch.") else inner.__code__.co_names
    called = (inner.__globals__.get(name) for name in names)
    return "random" in names or any(_draws(f) for f in called if inspect.isfunction(f) and f is not function)


def _shallow(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception:  # noqa: BLE001 - a lock, a process group: the deep copy fails too, and is reported there
        return value


def compare_updates(
    true: TrainingState,
    restored: TrainingState,
    kinds: Sequence[OptimizerKind],
    *,
    parameters: Collection[str] | None = None,
) -> Updates | str:
    """Compare the next updates of copies of the optimizers from both states, with the same random gradients.

    Args:
        true: a snapshot, on the host.
        restored: the same as a reader would restore it.
        kinds: of the optimizers, in the order of their states in the snapshot.
        parameters: the only ones to be used; None takes the smallest, up to `_MOST_ELEMENTS` elements.

    Returns:
        The comparison; or the reason why there is none, as a message.
    """
    if (hooks := global_hooks()) is not None:
        return hooks
    nodes = [list(optimizer_states(each.to_object(own_tensors=True))) for each in (true, restored)]
    roles = {id(tensor): true.specs[name].tag.role for name, tensor in true.tensors.items()}
    if not kinds or len(nodes[0]) != len(kinds):
        return "the optimizers' states are not found in what is saved"
    names = {id(tensor): name for name, tensor in true.tensors.items()}
    found: dict[int, Updates] = {}
    for position, (kind, one, other) in enumerate(zip(kinds, *nodes, strict=True)):
        chosen = _chosen(one, names, true, parameters)
        if not chosen:
            continue
        if (reason := obstacle_of(kind)) is not None:
            return reason
        try:
            compared = _compare(kind, one, other, chosen, roles)
        except ScratchError:
            raise
        except Exception as error:  # noqa: BLE001 - a third-party optimizer may raise anything
            return f"{kind.kind.__name__} cannot be stepped on copies ({type(error).__name__}: {error})"
        if compared is not None:
            found[position] = compared
    if not found:
        return "no optimizer holds moments that move its parameters"
    each = [(one.error, one.length, one.lost_steps) for one in found.values()]
    away, length, lost = (
        max(values, key=lambda value: math.inf if math.isnan(value) else value)
        for values in zip(*each, strict=True)
    )
    return Updates(away, length, lost, found)


def obstacle_of(kind: OptimizerKind) -> str | None:
    """Return why an optimizer must not be stepped on copies; None where it may."""
    if holds_tensors(kind.kind.step):
        return f"{kind.kind.__name__}.step holds tensors or modules of its own, which it might change"
    return global_hooks()


def global_hooks() -> str | None:
    """Return that hooks are on the steps of all optimizers, of copies too; None where none are."""
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    hooked = any(getattr(optimizer_hooks, name, None) for name in names)
    return "there are hooks on all optimizers' steps" if hooked else None


def holds_tensors(function: Callable[..., Any]) -> bool:
    """Return whether a function, or one that it wraps, closes over something that is trained: copies cannot be stepped by it."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # nothing in it yet
            continue
        if isinstance(content, (torch.Tensor, torch.nn.Module, Optimizer)) or (
            content is not function and callable(content) and holds_tensors(content)
        ):
            return True
    return False


def moments_of_direction(state: TrainingState, kinds: Sequence[OptimizerKind]) -> frozenset[str]:
    """First moments whose scale the optimizer ignores: doubling the moment does not lengthen the update.

    Lion takes signs, Muon the nearest orthogonal matrix: small elements of a moment count as much as large ones, and so
    do small errors.

    Args:
        state: a snapshot, on the host.
        kinds: of the optimizers, in the order of their states in it.

    Returns:
        Names of tensors. For optimizers that are not known, or cannot be stepped on copies, all first moments whose
        parameter has no second moment.
    """
    nodes = list(optimizer_states(state.to_object(own_tensors=True)))
    names = {id(tensor): name for name, tensor in state.tensors.items()}
    found: set[str] = set()
    if global_hooks() is not None or len(nodes) != len(kinds):
        return _alone(state)
    for kind, node in zip(kinds, nodes, strict=True):
        moments: dict[Any, dict[str, str]] = {}  # names by key, by the parameter's number
        for index, entry in node["state"].items():
            for key, value in entry.items() if isinstance(entry, Mapping) else ():
                if isinstance(value, torch.Tensor) and _is_first(state, names.get(id(value), "")):
                    moments.setdefault(index, {})[key] = names[id(value)]
        every = {name for entry in moments.values() for name in entry.values()}
        weights = _chosen(node, names, state, None)
        tried = [index for index in moments if index in weights and len(weights[index].shape) >= 2][:1]
        try:
            if holds_tensors(kind.kind.step):
                raise TypeError("it might change what is trained")
            lengths = [_momentum_step(kind, node, weights, index, moments[index]) for index in tried]
        except ScratchError:
            raise
        except Exception:  # noqa: BLE001 - a third-party optimizer may raise anything
            found |= _alone(state) & every
            continue
        if any(twice < _LONGER * once for once, twice in lengths):
            found |= every
    return frozenset(found)


def _alone(state: TrainingState) -> frozenset[str]:
    """First moments of parameters without a second moment."""
    paired = {spec.place for spec in state.specs.values() if spec.tag.role is Role.EXP_AVG_SQ}
    return frozenset(
        name
        for name, spec in state.specs.items()
        if spec.tag.role is Role.EXP_AVG and spec.place not in paired
    )


def _is_first(state: TrainingState, name: str) -> bool:
    return name in state.specs and state.specs[name].tag.role is Role.EXP_AVG


def _momentum_step(
    kind: OptimizerKind,
    node: Mapping[str, Any],
    weights: Mapping[Any, torch.Tensor],
    index: Any,
    firsts: Collection[str],
) -> tuple[float, float]:
    """Return lengths of the updates from a moment and from twice the moment, both with a zero gradient."""
    lengths = []
    for factor in (1.0, 2.0):
        parameter = torch.nn.Parameter(_widened(weights[index]))
        parameter.grad = torch.zeros_like(parameter)
        entry = _entry(node["state"][index], parameter)
        for key in firsts:
            entry[key] *= factor
        groups = [copied_group(group, {index: parameter}) for group in node["param_groups"]]
        kind.step(kind.with_state([group for group in groups if group["params"]], {parameter: entry}))
        lengths.append(float(torch.linalg.vector_norm(parameter.detach() - _widened(weights[index]))))
    return lengths[0], lengths[1]


def _chosen(
    node: Mapping[str, Any], names: Mapping[int, str], true: TrainingState, parameters: Collection[str] | None
) -> dict[Any, torch.Tensor]:
    """Return weights by their number: those that have a moment, the smallest matrix first, then the smallest of all."""
    weights = true.weights
    found: dict[Any, torch.Tensor] = {}
    for index, entry in node["state"].items():
        for value in entry.values() if isinstance(entry, Mapping) else ():
            spec = true.specs.get(names.get(id(value), "")) if isinstance(value, torch.Tensor) else None
            if spec is not None and spec.tag.role in _STATE:
                name = spec.tag.parameter or ""
                weight = weights.get(name) if parameters is None or name in parameters else None
                if weight is not None and weight.is_floating_point() and weight.numel():
                    found[index] = weight
    chosen: dict[Any, torch.Tensor] = {}
    elements = 0
    order = sorted(found, key=lambda index: found[index].numel())
    matrix = [index for index in order if found[index].dim() >= 2][:1]
    for index in (*matrix, *(index for index in order if index not in matrix)):
        elements += found[index].numel()
        if chosen and elements > _MOST_ELEMENTS and parameters is None:
            break
        chosen[index] = found[index]
    return chosen


def _compare(
    kind: OptimizerKind,
    true: Mapping[str, Any],
    restored: Mapping[str, Any],
    weights: Mapping[Any, torch.Tensor],
    roles: Mapping[int, Role],
) -> Updates | None:
    """Return the comparison; None where the updates from the true state are zero, or not finite."""
    sizes = {
        index: _gradient_size(true["state"][index], _options_of(true, index), roles) for index in weights
    }

    copies = [_copies(kind, node, weights) for node in (true, restored)]
    generator = torch.Generator().manual_seed(_SEED)
    error = size = kept = 1.0
    for step in range(_STEPS):
        for index, weight in weights.items():
            mean, spread = sizes[index]
            noise = torch.randn(weight.shape, generator=generator)
            gradient = (mean + spread * noise).to(copies[0][1][index].dtype)
            copies[0][1][index].grad = gradient
            copies[1][1][index].grad = gradient.clone()  # an optimizer may write to it
        for optimizer, _ in copies:
            kind.step(optimizer)
        if step not in (0, _STEPS - 1):
            continue
        one, other = (
            [parameters[index].detach() - weight.detach() for index, weight in weights.items()]
            for _, parameters in copies
        )
        length = math.sqrt(sum(float(u.square().sum()) for u in one))
        if not 0 < length < math.inf:
            return None
        if step == 0:
            away = math.sqrt(sum(float((v - u).square().sum()) for u, v in zip(one, other, strict=True)))
            error, size = away / length, math.sqrt(sum(float(v.square().sum()) for v in other)) / length
        kept = sum(float((u * v).sum()) for u, v in zip(one, other, strict=True)) / length**2
    return Updates(error, size, _STEPS * max(0.0, 1 - kept))


def _copies(
    kind: OptimizerKind, node: Mapping[str, Any], weights: Mapping[Any, torch.Tensor]
) -> tuple[Optimizer, dict[Any, torch.nn.Parameter]]:
    """Return an optimizer in the state of a node, and its parameters: copies of the weights."""
    parameters = {index: torch.nn.Parameter(_widened(weight)) for index, weight in weights.items()}
    groups = [copied_group(group, parameters) for group in node["param_groups"]]
    if kind.is_torchs:
        for group in groups:  # one operation for all parameters: each takes Python's lock from the training
            if "foreach" in group and not any(isinstance(value, torch.Tensor) for value in group.values()):
                group["foreach"] = True
    state: dict[torch.Tensor, dict[str, Any]] = {
        parameters[index]: _entry(node["state"][index], parameters[index]) for index in weights
    }
    return kind.with_state([group for group in groups if group["params"]], state), parameters


def copied_group(group: Mapping[str, Any], parameters: Mapping[Any, torch.Tensor]) -> dict[str, Any]:
    """Return a group's options adapted to host copies of some of its parameters, which are given by number."""
    made = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    made |= {key: value for key, value in _PLAIN.items() if key in made}
    if isinstance(made.get("lr"), (int, float, torch.Tensor)) and not float(made["lr"]) > 0:
        made["lr"] = 1e-3  # it may rise again
    return {**made, "params": [parameters[index] for index in group["params"] if index in parameters]}


def frozen(value: Any) -> Any:
    """Return the present value, with everything mutable copied."""
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is tuple and all(isinstance(item, _CONSTANTS) for item in value):
        return value
    if type(value) in (dict, list):
        keys = value if type(value) is dict else range(len(value))
        copies = {key: frozen(value[key]) for key in keys}
        return copies if type(value) is dict else [*copies.values()]
    return copy.deepcopy(value)


def _entry(entry: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return a copy of a parameter's state; tensors of the parameter's half precision are widened with it."""
    copied = {key: frozen(value) for key, value in entry.items()}
    return {
        key: value.to(parameter.dtype)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
        else value
        for key, value in copied.items()
    }


def _widened(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp32 or wider: in half precision an update may round to nothing."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def _options_of(node: Mapping[str, Any], index: Any) -> Mapping[str, Any]:
    return next((group for group in node["param_groups"] if index in group["params"]), {})


def _gradient_size(
    entry: Mapping[str, Any], options: Mapping[str, Any], roles: Mapping[int, Role]
) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """Mean and spread of the gradients seen, estimated from the second moment, or from the first moment's magnitude.

    A momentum that is a discounted sum instead of a mean (SGD, RMSprop) is divided by its time constant in steps. Where gradients have
    become smaller, a second moment remembers the larger ones for long: a mean of present ones that is as small shows that their spread is, too.
    """
    root, first = _root(entry, roles), _first(entry, roles)
    if first is None:
        return 0.0, root if root is not None else 1.0
    key, mean = first
    if key == "momentum_buffer":
        if (
            "square_avg" in entry and root is not None
        ):  # RMSprop: what was summed up are gradients in units of this root
            mean = mean * root
        if "dampening" in options or root is not None:
            mean = mean * (1 - float(options.get("momentum", 0.0)))
    memory = float(options["betas"][0]) if "betas" in options else 0.9
    most = math.sqrt((1 + memory) / (1 - memory)) * float(
        mean.square().mean().sqrt()
    )  # if the mean is of noise alone
    if root is None:
        return mean, most
    return mean, root * min(1.0, most / max(float(root.square().mean().sqrt()), 1e-30))


def _first(entry: Mapping[str, Any], roles: Mapping[int, Role]) -> tuple[str, torch.Tensor] | None:
    for key, value in entry.items():
        if isinstance(value, torch.Tensor) and roles.get(id(value)) is Role.EXP_AVG:
            return key, _widened(value)
    return None


def _root(entry: Mapping[str, Any], roles: Mapping[int, Role]) -> torch.Tensor | None:
    """Root of the gradients' mean square, where the state has one."""
    for key, value in entry.items():
        if isinstance(value, torch.Tensor) and roles.get(id(value)) in (Role.EXP_AVG_SQ, Role.SQUARES):
            counted = entry.get("step") if key in _SUMS else None
            return (_widened(value) / max(1.0, float(counted if counted is not None else 1))).sqrt()
    for key in ("exp_inf", "prev"):  # Adamax, Rprop
        if isinstance(entry.get(key), torch.Tensor):
            return _widened(entry[key]).abs()
    return None
