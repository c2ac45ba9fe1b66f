"""Whether a resumed run's objects are the stored one's: what names and shapes of weights, and options of optimizers, do not show."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.state.stateful import plain_names, scheduler_in

_ALIKE = {"torch.optim.Adam", "torch.optim.AdamW"}


def identities(model: nn.Module, optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the class of each optimizer, without wrappers, and its parameters' names by groups, or the shapes of those that
    the model has not.

    Names are those of ``state_dict()``, with `plain_names`; shards are as they are between steps.
    """
    names = _names(model)
    return [{"class": _class_name(each), "parameters": _groups(each, names)} for each in optimizers]


def _names(model: nn.Module) -> dict[int, tuple[Any, str]]:
    """Return the model's parameters, and the first name of each."""
    names: dict[int, tuple[Any, str]] = {}
    with plain_names(model) as inner:
        for name, parameter in inner.state_dict(keep_vars=True).items():
            names.setdefault(id(parameter), (parameter, name))
    return names


def _groups(optimizer: Any, names: Mapping[int, tuple[Any, str]]) -> list[list[str]]:
    return [
        [names[id(p)][1] if id(p) in names else str(tuple(p.shape)) for p in group["params"]]
        for group in optimizer.param_groups
    ]


def add_late_parameters(
    stored: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    model: nn.Module,
) -> str | None:
    """Give optimizers the model's parameters that were added to the run's after it had begun, as by unfreezing them.

    `stored` are the run's `identities`, and `states` its optimizers'. Returns one line, where there were such
    parameters; else None. Where others differ as well, nothing is changed, and the comparisons that follow refuse the
    state.
    """
    own = _names(model)
    named = {name: parameter for parameter, name in own.values()}
    added: list[str] = []
    for there, state, optimizer in zip(stored, states, optimizers, strict=False):
        here, wanted = _groups(optimizer, own), [*there["parameters"]]
        sizes = [*map(len, here), *[0] * len(wanted)]
        late = [group[size:] for group, size in zip(wanted, sizes, strict=False)]
        whole = all(group[: len(mine)] == mine for group, mine in zip(wanted, here, strict=False))
        names = set(chain.from_iterable(late))
        if (
            not names
            or not whole
            or len(here) > len(wanted)
            or not names <= named.keys() - set(chain.from_iterable(here))
        ):
            continue
        for index, group in enumerate(late):
            options = {key: value for key, value in state["param_groups"][index].items() if key != "params"}
            more = [named[name] for name in group]
            if index < len(here):
                optimizer.param_groups[index]["params"] += more
            else:
                titles = options.pop("param_names", None)
                params = more if titles is None else list(zip(titles, more, strict=True))
                optimizer.add_param_group({**options, "params": params})
        added += names
    if not added:
        return None
    return f"resume: the optimizer goes on with {len(added)} parameters that the run had added to it, such as {min(added)}"


def require_same_optimizers(
    stored: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]], url: str, *, ordered: bool = True
) -> str | None:
    """Refuse to give one optimizer the state of another one, or of other parameters, by `identities`.

    Returns:
        A warning, where one of another class may be meant to go on with the state; else None.

    Raises:
        StateMismatchError: the classes are two of torch's whose states differ, or the parameters have another
            order, where that counts.
    """
    warning = None
    for there, own in zip(stored, here, strict=True):
        old, new = there["class"], own["class"]
        if (
            old != new
            and {old, new} != _ALIKE
            and all(name.startswith("torch.optim.") for name in (old, new))
        ):
            raise StateMismatchError(
                f"{url} holds a run with {old}, and this one has {new}, whose state is another one. Build the optimizer that"
                " the run was made with, or give this run a URL of its own"
            )
        if old != new:
            warning = f"resume: the checkpoint's optimizer is {old}, and this one, which goes on with its state, is {new}"
        if ordered and there["parameters"] != own["parameters"]:
            raise StateMismatchError(
                f"{url} holds a run whose {old} had its parameters in another order, or others: it would get the moments of other"
                " parameters. Give it the parameters as the run did, or give this run a URL of its own"
            )
    return warning


def scheduler_classes(named: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of each of torch's learning rate schedulers among some objects, by their names; accelerate's
    wrappers are looked into.

    A LambdaLR is followed by the names of its functions, as far as they have some: those of Transformers differ in
    nothing else.
    """
    inner = {name: scheduler_in(given) for name, given in named.items()}
    found = {}
    for name, each in inner.items():
        functions = [getattr(given, "func", given) for given in getattr(each, "lr_lambdas", ())]
        names = dict.fromkeys(getattr(given, "__name__", "<") for given in functions)
        if each is not None:
            found[name] = " ".join([_class_name(each), *(one for one in names if "<" not in one)])
    return found


def other_schedulers(stored: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return a warning where a scheduler takes the state of one of another class, which torch merges without a word."""
    differ = [name for name, kind in here.items() if stored.get(name, kind) != kind]
    if not differ:
        return None
    changes = "; ".join(f"{name} was {stored[name]} and is {here[name]} here" for name in differ)
    return (
        f"resume: another learning rate scheduler than the checkpoint's takes its state: {changes}. All of that state is loaded, the"
        " number of steps and the base rates among it. If that is not meant, build the scheduler that the run was made with, or"
        " set this one up after resuming"
    )


def disabled_scalers(stored: Mapping[str, Any], here: Mapping[str, Any], url: str) -> str | None:
    """Refuse to give a gradient scaler the state of a disabled one, which is empty: torch would, when all else is
    restored.

    Returns:
        A warning, where it is the other way round, and torch leaves the state out without a word; else None.

    Raises:
        StateMismatchError: a scaler is enabled, and the checkpoint's was not.
    """
    scalers = {
        name: value for name, value in here.items() if isinstance(value, GradScaler) and name in stored
    }
    for name, scaler in scalers.items():
        if scaler.is_enabled() and not stored[name]:
            raise StateMismatchError(
                f"{url} was written with a disabled GradScaler as {name!r}, which has no state, and here {name!r} is enabled: it cannot go on"
                " from that. Make it with enabled=False, as the run did; or give it to Checkpointer by another name, under which it"
                f" starts with its own scale, {scaler.get_scale():g}"
            )
    left = [name for name, scaler in scalers.items() if stored[name] and not scaler.is_enabled()]
    if not left:
        return None
    return (
        f"resume: the GradScaler {', '.join(left)} is disabled here and was enabled in the checkpoint: its scale is not restored, losses are not"
        " scaled, and the next checkpoint has no scale either. If that is not meant, make it with enabled=True, on a device that it supports"
    )


def rounded_weights(stored: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """Say that a restore changes the dtype of weights."""
    differ = [
        (name, value.dtype, live[name].dtype)
        for name, value in stored.items()
        if torch.is_tensor(value) and torch.is_tensor(live.get(name)) and value.dtype != live[name].dtype
    ]
    if not differ:
        return None
    name, old, new = differ[0]
    return (
        f"resume: {len(differ)} tensors of the model have another dtype than the checkpoint's, to which they are converted: {name} is"
        f" {new} here and {old} there"
    )


def _class_name(given: object) -> str:
    kind = type(given)
    own = kind.__module__.startswith("torch.optim.") and not isinstance(given, LRScheduler)
    return f"{'torch.optim' if own else kind.__module__}.{kind.__qualname__}"
