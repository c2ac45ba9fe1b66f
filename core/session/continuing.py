"""Puts a checkpoint's weights and optimizer states into a training, after what would make it another training was refused or said."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from shrinkpoint.engine.fitting import fitted, quantized_as
from shrinkpoint.engine.resume import overridden_options, require_optimizers, require_same_ties
from shrinkpoint.errors import StateMismatchError
from shrinkpoint.optimizers.objects import put_back_objects
from shrinkpoint.session.identity import (
    add_late_parameters,
    identities,
    other_schedulers,
    require_same_optimizers,
    scheduler_classes,
)
from shrinkpoint.state.stateful import load_optimizer, load_stateful
from shrinkpoint.warn import warn

if TYPE_CHECKING:
    from shrinkpoint.session.adapter import TrainingAdapter

_LIGHTNING = "pytorch-lightning_version"  # in every checkpoint of Lightning


def require_format(stored: Any, name: str, version: int, url: str, *, callback: str) -> None:
    """Refuse a state of another framework than that of the `callback`, or of a newer shrinkpoint, by a
    StateMismatchError.

    The entries ``format``, ``version`` and Lightning's mark are enough of it.
    """
    if not isinstance(stored, dict) or stored.get("format") != name:
        lightning = isinstance(stored, dict) and _LIGHTNING in stored
        writer = "Lightning's callback" if lightning else "another program"
        raise StateMismatchError(
            f"{url} was written by {writer}, not by {callback}: its weights and"
            " optimizer can be exported with `shrinkpoint export`, but its run cannot be continued here. Give this run a URL of its own"
        )
    if stored["version"] > version:
        raise StateMismatchError(
            f"{url} was written by a newer shrinkpoint (its state is of version {stored['version']}, and this one reads {version}): upgrade"
            " shrinkpoint"
        )


def load_model(stored: Mapping[str, Any], model: nn.Module, url: str) -> None:
    """Put weights and buffers into a model, which may be built otherwise, as far as `fitted` says.

    Raises:
        StateMismatchError: they are another model's, or separate tensors of different values are tied here.
    """
    untied = require_same_ties(stored, model, url)
    if untied is not None:
        warn(untied)
    given = fitted(stored, model, url, warns=True)
    load_stateful(model, quantized_as(stored, given, model))


def require_same_training(
    adapter: "TrainingAdapter",
    stored: Sequence[Mapping[str, Any]],
    states: Sequence[Any],
    url: str,
    classes: Mapping[str, str] = MappingProxyType({}),
    *,
    ordered: bool = True,
    warns: bool = True,
) -> None:
    """Refuse optimizers that are not the stored ones, and add to their groups the parameters that were added later.

    Args:
        adapter: of the training.
        stored: the optimizers' `identities`.
        states: theirs, as stored.
        url: of the run, for messages.
        classes: the schedulers' `scheduler_classes`, as stored.
        ordered: as of `require_same_optimizers`.
        warns: whether to warn of what differs and is allowed to.

    Raises:
        StateMismatchError: they are others; the message says which.
    """
    model, optimizers, schedulers = adapter.model, adapter.optimizers, adapter.schedulers()
    late = add_late_parameters(stored, states, optimizers, model)
    require_optimizers(states, optimizers, url)
    here = identities(model, optimizers)[: len(stored)]
    said = (
        late,
        require_same_optimizers(stored, here, url, ordered=ordered),
        other_schedulers(classes, scheduler_classes(schedulers)),
        overridden_options(states, optimizers, schedulers=schedulers.values()),
    )
    for message in said if warns else ():
        if message is not None:
            warn(message)


def load_optimizers(optimizers: Sequence[Any], states: Sequence[Any], *, same_dtypes: bool) -> None:
    """Put states into optimizers, without wrappers, that `require_same_training` has accepted; as `load_optimizer`."""
    for optimizer, state in zip(optimizers, states, strict=True):
        load_optimizer(optimizer, state, same_dtypes=same_dtypes)
        put_back_objects(optimizer, state)
