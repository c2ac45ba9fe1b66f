"""Whether a resumed run's objects are the stored one's: what names and shapes of weights, and options of optimizers, do not show."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from shrinkpoint.errors import StateMismatchError

__all__ = ["Identities", "identities", "require_same_optimizers", "rounded_weights"]

_ALIKE = {"torch.optim.Adam", "torch.optim.AdamW"}


def identities(model: nn.Module, optimizers: Sequence[Any]) -> list[dict[str, str]]:
    """The class of each optimizer, and a digest of its parameters' names in their order.

    Names are those of ``state_dict()``, from which wrappers such as activation checkpointing's take their own parts.

    Args:
        model: which has the parameters; shards as they are between steps.
        optimizers: without wrappers.
    """
    names: dict[int, str] = {}
    for name, parameter in model.state_dict(keep_vars=True).items():
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


def _class_name(optimizer: object) -> str:
    kind = type(optimizer)
    module = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _digest(optimizer: Any, names: Mapping[int, str]) -> str:
    digest = xxhash.xxh3_64()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            digest.update(f"{names.get(id(parameter), tuple(parameter.shape))}\n".encode())
    return digest.hexdigest()
