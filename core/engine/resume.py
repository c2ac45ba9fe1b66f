"""The rules by which a run continues itself: the same for every framework."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.state.stateful import parts_of, plain_names, scheduler_in, unwrapped
from shrinkpoint.warn import some

ResumePolicy = Literal["auto", "never", "must"]
"""Continue from the newest sound checkpoint if there is one; start afresh; or refuse to start without one."""

_NAMED = 5
_CYCLED = {"momentum", "betas"}  # by some schedulers
_KERNELS = {"foreach", "fused", "capturable", "differentiable"}
_OF_CLASS = "decoupled_weight_decay"  # AdamW sets it again after every load: it is what makes it another class than Adam, which is warned of anyway
# What learning rate schedulers leave in an optimizer's groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"}


def check_policy(policy: str) -> None:
    """Refuse any other word.

    Raises:
        ConfigError: not a `ResumePolicy`.
    """
    if policy not in get_args(ResumePolicy):
        raise ConfigError(f"resume={policy!r} must be one of {', '.join(map(repr, get_args(ResumePolicy)))}")


def require_same_model(
    stored: Mapping[str, Sequence[int]], live: Mapping[str, Sequence[int]], url: str
) -> None:
    """Refuse to continue a run with another model.

    Args:
        stored: shapes by name of the checkpoint's parameters and buffers.
        live: the same of the model that is to be trained.
        url: the run, for the message.

    Raises:
        StateMismatchError: names or shapes differ; the message says which.
    """
    parts = []
    differ = [name for name in stored if name in live and tuple(stored[name]) != tuple(live[name])]
    if differ:
        shapes = [f"{name} is {tuple(live[name])} here and {tuple(stored[name])} there" for name in differ]
        parts.append(f"Tensors of other shapes: {some(shapes)}")
    for label, names in (
        ("missing in the checkpoint", [name for name in live if name not in stored]),
        ("unknown to this model", [name for name in stored if name not in live]),
    ):
        if names:
            parts.append(f"Tensors {label}: {some(names)}")
    if parts:
        raise StateMismatchError(
            f"{url} holds another model's run. {'; '.join(parts)}. Give this model a URL of its own, or build the"
            " model that the run was made with"
        )


def require_same_ties(stored: Mapping[str, Any], model: nn.Module, url: str) -> str | None:
    """Refuse to load separate tensors of different values into tied ones, of which the last one loaded would win.

    Args:
        stored: the checkpoint's ``model.state_dict()``; tied ones are one tensor, as in the model.
        model: that is to take it.
        url: the run, for the message.

    Returns:
        A warning, where tied parameters are given to separate ones, which training moves apart; else None. Of buffers nothing is said:
        moving a model to another device separates them.

    Raises:
        StateMismatchError: separate ones are tied here, and their values differ.
    """
    with plain_names(model) as inner:
        live = inner.state_dict(keep_vars=True)
    there, here = _places(stored), _places(live)
    for names in _tied(here):
        first, *others = [name for name in names if name in there] or [""]
        for name in others:
            if there[name] != there[first] and not _equal(stored[name], stored[first]):
                raise StateMismatchError(
                    f"{url} holds a run in which {first} and {name} are separate tensors with different values, and here they are tied, one"
                    " tensor, so that one of them would be lost. Leave them separate, as the run did, or give this model a URL of its own"
                )
    for names in _tied(there):
        parameters = [name for name in names if name in here and isinstance(live[name], nn.Parameter)]
        if len({here[name] for name in parameters}) > 1:
            return (
                f"resume: {' and '.join(parameters[:_NAMED])} are tied, one tensor, in the checkpoint and separate here: each gets its values,"
                " and training moves them apart. If that is not meant, tie them before resuming"
            )
    return None


def _places(tensors: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    """Return where ordinary tensors with elements are, and how they are read there: that of tied ones is the same."""
    plain = {
        name: value
        for name, value in tensors.items()
        if type(value) in (torch.Tensor, nn.Parameter) and value.numel() and not value.is_meta
    }
    return {
        name: (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        for name, value in plain.items()
        if value.layout == torch.strided
    }


def _tied(places: Mapping[str, tuple[object, ...]]) -> Iterator[list[str]]:
    names: dict[tuple[object, ...], list[str]] = {}
    for name, place in places.items():
        names.setdefault(place, []).append(name)
    return (group for group in names.values() if len(group) > 1)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def require_optimizers(
    stored: Sequence[Mapping[str, Any]], live: Sequence[torch.optim.Optimizer], url: str
) -> None:
    """Refuse to continue with other optimizers.

    Args:
        stored: the checkpoint's ``optimizer.state_dict()`` of each.
        live: the optimizers that are to take them.
        url: the run, for the message.

    Raises:
        StateMismatchError: their number, options or groups differ; the message says which.
    """
    if len(stored) != len(live):
        raise StateMismatchError(
            f"{url} holds {len(stored)} optimizers, and this run has {len(live)}: build the same ones, or use a fresh URL"
        )
    for state, optimizer in zip(stored, live, strict=True):
        for part, inner in parts_of(state, optimizer):
            require_same_groups(part, inner, url)


def require_same_groups(stored: Mapping[str, Any], live: torch.optim.Optimizer, url: str) -> None:
    """Refuse to continue with an optimizer of another kind, or whose parameter groups differ.

    Args:
        stored: the checkpoint's ``optimizer.state_dict()``.
        live: the optimizer that is to take it.
        url: the run, for the message.

    Raises:
        StateMismatchError: options, numbers or sizes of the groups differ; the message says which.
    """
    there = [len(group["params"]) for group in stored["param_groups"]]
    here = [len(group["params"]) for group in live.param_groups]
    if there != here:
        raise StateMismatchError(
            f"{url} holds a run whose {type(live).__name__} has parameter groups of {there} parameters, and here they"
            f" are of {here}. Build the optimizer that the run was made with, or give this run a URL of its own"
        )
    for group, live_group in zip(stored["param_groups"], live.param_groups, strict=True):
        # One side alone may lack options: releases of torch add some, and users may add their own.
        # torch notes one more among the defaults when a state is loaded, as accelerate does with every optimizer.
        lacking = sorted(getattr(live, "defaults", {}).keys() & live_group.keys() - group.keys())
        unknown = sorted(group.keys() - live_group.keys() - _OF_SCHEDULERS)
        if lacking and unknown:
            raise StateMismatchError(
                f"{url} holds a run with another optimizer: its parameter groups have {', '.join(unknown)}, and those of"
                f" this {type(live).__name__} have {', '.join(lacking)} instead. Build the optimizer that the run was"
                " made with, or give this run a URL of its own"
            )


def overridden_options(
    stored: Sequence[Mapping[str, Any]], live: Sequence[torch.optim.Optimizer], *, schedulers: Iterable[Any]
) -> str | None:
    """Say that resuming undoes a change of an optimizer's options; of learning rates, those that schedulers began with are compared
    where there are any. What an optimizer keeps in its groups without being given it, such as schedule-free ones' counts of steps, is no
    option.

    Args:
        stored: as of `require_optimizers`, which has accepted them.
        live: the same.
        schedulers: of the learning rate: some, as ReduceLROnPlateau, do not note what they began with, and some change
            momentum as well.

    Returns:
        One line; None where the options are the same.
    """
    inner = [scheduler_in(given) or given for given in schedulers]
    parts = [part for pair in zip(stored, live, strict=True) for part in parts_of(*pair)]
    for state, optimizer in parts:
        for there, here in zip(state["param_groups"], optimizer.param_groups, strict=True):
            rates = _rates(there, here, scheduled=bool(inner))
            others = list(_others(optimizer, there, here, scheduled=bool(inner)))
            if not (rates or others):
                continue
            given = ", ".join(f"{name}={_shown(new)}" for name, _, new in (*rates, *others))
            kept = ", ".join(_shown(old) for _, old, _ in (*rates, *others))
            ways = [_way_to_rate(there, old, new, _of(optimizer, inner)) for _, old, new in rates]
            if others:
                names = ", ".join(name for name, _, _ in others)
                ways.append(f"to change {names}, set it in optimizer.param_groups after resuming")
            return (
                f"resume: {given}, which this process gave to {type(optimizer).__name__}, is replaced by the"
                f" checkpoint's {kept}; {'; '.join(ways)}"
            )
    return None


_Difference = tuple[str, Any, Any]


def _of(optimizer: Any, schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield the schedulers of an optimizer, those inside of others among them."""
    for scheduler in schedulers:
        if unwrapped(getattr(scheduler, "optimizer", optimizer)) is unwrapped(optimizer):
            yield scheduler
            yield from _of(optimizer, getattr(scheduler, "_schedulers", ()))


def _way_to_rate(there: Mapping[str, Any], old: float, new: float, schedulers: Iterable[Any]) -> str:
    """Return how to have another rate after all, by what the schedulers compute rates from; and the rate that there is otherwise."""
    places = [", ".join(["lr", *(["initial_lr", "max_lr", "min_lr"] if "max_lr" in there else [])])]
    places[0] += " in optimizer.param_groups"
    scheduled = False
    for scheduler in schedulers:
        scheduled, bases = True, [name for name in ("base_lrs", "max_lrs") if hasattr(scheduler, name)]
        places += [f"{' and '.join(bases)} of the {type(scheduler).__name__}"] if bases else []
    if not scheduled and "initial_lr" not in there:
        return "to change it, set lr in optimizer.param_groups after resuming"
    places += [] if scheduled else ["base_lrs of its scheduler"]
    by = f"multiply by {new / old:.6g}" if old else f"set for {_shown(new)}"
    last = f"{', '.join(places[:-1])} and {places[-1]}" if len(places) > 1 else places[0]
    return (
        f"the rate is {_shown(float(there['lr']))} now, by its schedule. To change it, {by} after resuming: {last}"
        " (a scheduler computes the next rates from these)"
    )


def _rates(there: Mapping[str, Any], here: Mapping[str, Any], *, scheduled: bool) -> list[_Difference]:
    both = "initial_lr" in there and "initial_lr" in here
    old, new = ((group.get("initial_lr") if both else group.get("lr")) for group in (there, here))
    unknown = not both and (scheduled or "initial_lr" in there or "initial_lr" in here)
    if unknown or old is None or new is None or float(old) == float(new):
        return []
    return [("lr", float(old), float(new))]


def _others(
    optimizer: torch.optim.Optimizer, there: Mapping[str, Any], here: Mapping[str, Any], *, scheduled: bool
) -> Iterator[_Difference]:
    options = _given(optimizer)
    if isinstance(unwrapped(optimizer), torch.optim.AdamW):
        options -= {_OF_CLASS}
    for name in getattr(optimizer, "defaults", ()):
        if name == "lr" or name in _KERNELS or not {name} <= options & there.keys() & here.keys():
            continue
        if scheduled and name in _CYCLED:
            continue
        old, new = (_plain(group[name]) for group in (there, here))
        if old != new:
            yield name, old, new


def _given(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names by which options are given to an optimizer; of one that is made otherwise, as of a configuration, all that it has."""
    kinds = type(unwrapped(optimizer)).__mro__
    made = [vars(kind)["__init__"] for kind in kinds if "__init__" in vars(kind)]
    named = {name for method in made for name in inspect.signature(method).parameters}
    defaults = getattr(optimizer, "defaults", {})  # schedule-free's wrapper has none
    return named & defaults.keys() or set(defaults)


def _plain(value: Any) -> Any:
    """Comparable: numbers instead of tensors, tuples instead of lists."""
    if torch.is_tensor(value):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value!r:.60}"
