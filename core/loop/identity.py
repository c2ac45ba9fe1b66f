"""Whether a resumed run's objects are the stored one's: what names and shapes of weights, and options of optimizers, do not show."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.state.wrappers import plain_names, scheduler_in

__all__ = [
    "Identities",
    "disabled_scalers",
    "identities",
    "other_schedulers",
    "require_same_optimizers",
    "rounded_weights",
    "scheduler_classes",
]

_ALIKE = {"torch.optim.Adam", "torch.optim.AdamW"}


def identities(model: nn.Module, optimizers: Sequence[Any]) -> list[dict[str, str]]:
    """The class of each optimizer, and a digest of its parameters' names in their order.

    Names are those of ``state_dict()``, with `plain_names`.

    Args:
        model: which has the parameters; shards as they are between steps.
        optimizers: without wrappers.
    """
    names: dict[int, str] = {}
    with plain_names(model) as inner:
        for name, parameter in inner.state_dict(keep_vars=True).items():
            names.setdefault(id(parameter), name)
    return [
        {"class": _class_name(optimizer), "parameters": _digest(optimizer, names)} for optimizer in optimizers
    ]


class Identities:
    """`identities` for each save; found once, as long as the optimizers get no further parameters: training waits for it."""

    def __init__(self) -> None:
        self._counts: list[list[int]] | None = None
        self._found: list[dict[str, str]] = []

    def of(
        self, model: nn.Module, optimizers: Sequence[Any], prepare: Callable[[], None] = lambda: None
    ) -> list[dict[str, str]]:
        """As `identities`.

        Args:
            model: always the same one.
            optimizers: always the same ones.
            prepare: called before the parameters are looked at.
        """
        counts = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
        if counts != self._counts:
            prepare()
            self._found, self._counts = identities(model, optimizers), counts
        return self._found


def require_same_optimizers(
    stored: Sequence[Mapping[str, str]], here: Sequence[Mapping[str, str]], url: str, *, ordered: bool = True
) -> str | None:
    """Refuse to give one optimizer the state of another one, or of other parameters.

    Args:
        stored: as `identities` gave them.
        here: of the same number of optimizers.
        url: the run, for messages.
        ordered: whether the order of the parameters counts.

    Returns:
        A warning, where one of another class may be meant to go on with the state; else None.

    Raises:
        StateMismatchError: the classes are two of torch's whose states differ, or the parameters have another order.
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
    """The class of each of torch's learning rate schedulers among some objects, by their names.

    A LambdaLR is followed by the names of its functions, as far as they have some: those of Transformers differ in nothing else.

    Args:
        named: the objects; accelerate's wrappers are looked into.
    """
    inner = {name: scheduler_in(given) for name, given in named.items()}
    return {
        name: " ".join([_class_name(each), *_functions(each)])
        for name, each in inner.items()
        if each is not None
    }


def other_schedulers(stored: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """A warning where a scheduler takes the state of one of another class, which torch merges without a word.

    Args:
        stored: as `scheduler_classes` gave them; empty of an older checkpoint.
        here: of this run.
    """
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
    """Refuse to give a gradient scaler the state of a disabled one, which is empty: torch would, when all else is restored.

    Args:
        stored: the states of the checkpoint's objects, by their names.
        here: the objects of this run.
        url: the run, for the message.

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
    """Say that a restore changes the dtype of weights.

    Args:
        stored: the checkpoint's ``model.state_dict()``.
        live: the one of the model that takes it.
    """
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


def _functions(scheduler: LRScheduler) -> list[str]:
    functions = [getattr(given, "func", given) for given in getattr(scheduler, "lr_lambdas", ())]
    names = {
        name: None for name in (getattr(given, "__name__", "<") for given in functions) if "<" not in name
    }
    return list(names)


def _digest(optimizer: Any, names: Mapping[int, str]) -> str:
    digest = xxhash.xxh3_64()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            digest.update(f"{names.get(id(parameter), tuple(parameter.shape))}\n".encode())
    return digest.hexdigest()
