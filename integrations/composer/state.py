"""The stored state of a Composer run: collecting it, the roles of its tensors, and restoring it."""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from composer.algorithms import EMA
from composer.core import State
from composer.loggers import Logger
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from shrinkpoint.errors import CannotRepresentError, StateMismatchError
from shrinkpoint.integrations.common.ranks import on_first, rank, world_size
from shrinkpoint.loop.gradient_buckets import Buckets
from shrinkpoint.saving.fitting import fitted
from shrinkpoint.saving.quantized import quantized_as
from shrinkpoint.saving.resume import require_same_groups, require_same_model
from shrinkpoint.state.averages import AverageFinder
from shrinkpoint.state.roles import model_tags, part_tag, state_tag
from shrinkpoint.state.training import Describe, Tag
from shrinkpoint.state.tree import Path
from shrinkpoint.state.wrappers import named_buffers, named_parameters, plain_names

__all__ = [
    "OUTLINE",
    "describe_state",
    "followed_state",
    "load_state",
    "model_state",
    "parameter_names",
    "place_in",
    "require_own_run",
    "require_same_optimizers",
    "sharded_state",
    "shards_model",
    "stored_state",
    "trained_module",
    "unloadable_optimizer",
]

FORMAT = "composer"
_VERSION = 1
_SHARDED_VERSION = 2
_LIGHTNING = "pytorch-lightning_version"  # in every checkpoint of Lightning

OUTLINE = ("format", "version", "state", _LIGHTNING)
"""The entries of a stored state that `require_own_run` needs."""

# Parts of parameters' names that wrappers add, and that torch's own state dicts leave out.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def trained_module(state: State) -> nn.Module:
    """The user's model, without the wrapper of data parallelism."""
    module: nn.Module = state.model.module if state.is_model_ddp else state.model
    return module


def parameter_names(module: nn.Module) -> dict[str, str]:
    """The name in a checkpoint of each of the module's own names, with `plain_names`, for parameters and buffers."""
    own = [name for name, _ in (*named_parameters(module), *named_buffers(module))]
    return {name: _without_wrappers(name) for name in own}


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def shards_model(state: State) -> bool:
    """Whether each rank has, and saves, its own shards of the state: with FSDP2, unless full states were asked for."""
    config = state.fsdp_config
    return type(config).__name__ == "FSDP2Config" and config.state_dict_type == "sharded"


def model_state(state: State) -> dict[str, Any]:
    """The model's state as it is stored; each rank's own shards where they are what is saved, and where they are.

    Called on every rank.

    Raises:
        CannotRepresentError: Composer cannot read it; the message says what is in its way.
    """
    if shards_model(state):  # Composer would copy them to the host
        return dict(get_model_state_dict(state.model))
    with _plainly_named(state):
        try:
            return dict(state.get_model_state_dict())
        except AttributeError as error:
            raise CannotRepresentError(
                f"Composer cannot read the model's state ({error}), with its own checkpoints neither: a module's state_dict() has an entry that is"
                " no attribute of it, as that of bitsandbytes' 8-bit layers. Quantize these to 4 bits, or train with another framework"
            ) from error


# ---- saving


def stored_state(
    state: State, ranks: list[Any], buckets: Buckets, hooks: Sequence[Any] = ()
) -> dict[str, Any]:
    """The complete state from which a run is continued; its tensors are the live ones.

    Called on every rank: with FSDP the shards are gathered, and the first rank alone gets them.

    Args:
        state: at one of Composer's checkpoint events, after the first step.
        ranks: every process's position in the data.
        buckets: in which gradients are summed.
        hooks: the states of all processes' communication hooks.
    """
    with _plainly_named(state):
        stored = state.state_dict()
    _begin_next_epoch(stored, state)
    more = {"hooks": list(hooks)} if hooks else {}
    return {
        "format": FORMAT,
        "version": _VERSION,
        "state": stored,
        "ranks": ranks,
        "buckets": buckets,
        **more,
    }


def sharded_state(state: State, place: Mapping[str, Any]) -> dict[str, Any]:
    """As `stored_state`, with this rank's own shards and position; no rank waits for another.

    Args:
        state: at one of Composer's checkpoint events, after the first step.
        place: this process's position in the data.
    """
    attributes = state.serialized_attributes
    state.serialized_attributes = [name for name in attributes if name not in ("model", "optimizers")]
    try:
        stored = state.state_dict()
    finally:
        state.serialized_attributes = attributes
    [optimizer] = state.optimizers
    stored["model"] = model_state(state)
    stored["optimizers"] = {type(optimizer).__qualname__: get_optimizer_state_dict(state.model, optimizer)}
    _begin_next_epoch(stored, state)
    return {
        "format": FORMAT,
        "version": _SHARDED_VERSION,
        "state": stored,
        "world": world_size(),
        "place": place,
        "buckets": [],
    }


def followed_state(state: State) -> dict[str, Any]:
    """The part of a `stored_state` with weights, and averages of them that exist from the start.

    Called on every rank: with FSDP the shards are gathered.
    """
    algorithms = [
        (type(each).__qualname__, each.state_dict() if isinstance(each, EMA) else {})
        for each in state.algorithms
    ]
    return {"state": {"model": model_state(state), "algorithms": algorithms}}


def _plainly_named(state: State) -> AbstractContextManager[object]:
    """Inside the block names are those without wrappers; with FSDP, Composer itself sees to that."""
    return nullcontext() if state.fsdp_enabled else plain_names(state.model)


def _begin_next_epoch(stored: dict[str, Any], state: State) -> None:
    """At an epoch's end, a StreamingDataset still names that epoch, and would restart it at its first sample."""
    streaming = sys.modules.get("streaming")
    if streaming is None or int(state.timestamp.batch_in_epoch):
        return
    if isinstance(getattr(state.train_dataloader, "dataset", None), streaming.StreamingDataset):
        stored["dataset_state"]["train"]["epoch"] += 1


def describe_state(state: State) -> Describe:
    """The role of each tensor of a `stored_state`: Composer names moments after their parameters."""
    module = trained_module(state)
    own = {name: _renamed(tag) for name, tag in model_tags(module).items()}
    averages = AverageFinder(module, own)
    tags = {_without_wrappers(name): tag for name, tag in own.items()}
    parameters = {_without_wrappers(name): value for name, value in named_parameters(module)}
    optimizers = {type(optimizer).__qualname__: optimizer for optimizer in state.optimizers}

    def describe(path: Path, tensor: torch.Tensor) -> Tag:
        match path:
            case ("state", "model", *more) if more:
                return part_tag(tags, tuple(more))
            case ("state", "optimizers", kind, "state", name, key) if (
                kind in optimizers and name in parameters
            ):
                return state_tag(key, tensor, parameters[name], tags[name], optimizers[kind])
            case ("state", "algorithms" | "callbacks", *_):
                return averages.tag(path, tensor)
        return Tag()

    return describe


def _renamed(tag: Tag) -> Tag:
    if tag.parameter is None:
        return tag
    return Tag(role=tag.role, layer_type=tag.layer_type, parameter=_without_wrappers(tag.parameter))


# ---- restoring


def place_in(stored: Mapping[str, Any], *, own: bool) -> tuple[int, Any]:
    """How many processes saved a checkpoint, and this one's position in the data; None if it is not known.

    Args:
        stored: the checkpoint.
        own: whether a position of one process alone is this one's, and not the first one's.
    """
    if "ranks" in stored:
        ranks = stored["ranks"]
        return len(ranks), ranks[rank()] if len(ranks) == world_size() else None
    known = own and stored["world"] == world_size()
    return stored["world"], stored["place"] if known else None


def require_own_run(stored: Any, live: Mapping[str, Any], state: State, url: str) -> None:
    """Refuse another run's checkpoint; Composer would load the matching part and ignore the rest.

    Args:
        stored: the checkpoint, or its outline.
        live: ``state.get_model_state_dict()`` of the first rank.
        state: of the run that is to be saved there.
        url: the run, for the message.

    Raises:
        StateMismatchError: it is another framework's or another model's; the message says which.
    """
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        lightning = isinstance(stored, dict) and _LIGHTNING in stored
        writer = "Lightning's callback" if lightning else "another program"
        raise StateMismatchError(
            f"{url} was written by {writer}, not by Composer's callback: its weights and optimizer can be exported with"
            " `shrinkpoint export`, but its run cannot be continued here. Give this run a URL of its own"
        )
    if stored["version"] > _SHARDED_VERSION:
        raise StateMismatchError(
            f"{url} was written by a newer shrinkpoint (its Composer state is of version {stored['version']}, and this"
            f" one reads {_SHARDED_VERSION}): upgrade shrinkpoint"
        )
    there = stored["state"]
    if not _missing_algorithms(there, state):
        if state.fsdp_enabled:
            require_same_model(_shapes(there["model"]), _shapes(live), url)
        else:
            fitted(there["model"], trained_module(state), url)


def require_same_optimizers(stored: Mapping[str, Any], state: State, url: str) -> None:
    """Refuse a checkpoint of another optimizer, whose state Composer would drop, or of one that it cannot load.

    Raises:
        StateMismatchError: the message says which.
    """
    there = stored["state"]["optimizers"]
    unloadable = unloadable_optimizer(state)
    if unloadable is not None:
        raise StateMismatchError(
            f"the run in {url} cannot be continued: Composer cannot load the state of {unloadable}, which computes the loss by"
            " itself. Its weights can be exported with `shrinkpoint export`; resume='never' starts anew"
        )
    for optimizer in state.optimizers:
        name = type(optimizer).__qualname__
        if name not in there:
            raise StateMismatchError(
                f"{url} contains a run with {' and '.join(there)}, and this one has {name}: build the optimizer that the run"
                " was made with, or give this run a URL of its own"
            )
        require_same_groups(there[name], optimizer, url)


def unloadable_optimizer(state: State) -> str | None:
    """The name of an optimizer whose state Composer can save but not load; None if there is none.

    Before loading, torch lets the optimizer make a step without a loss; some cannot.
    """
    for optimizer in state.optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        required = closure is not None and closure.default is inspect.Parameter.empty
        if required or getattr(optimizer, "_step_supports_amp_closure", False):  # Composer's mark, of SAM
            return type(optimizer).__qualname__
    return None


def load_state(
    stored: Mapping[str, Any], state: State, logger: Logger, url: str, *, optimizers: bool = True
) -> None:
    """Put a checkpoint into a run; called on every rank.

    Args:
        stored: the checkpoint.
        state: of the run.
        logger: for Composer.
        url: the run's, for the message.
        optimizers: False where their state was not stored.

    Raises:
        StateMismatchError: even after Composer has applied the checkpoint's algorithms, the model differs.
    """
    run_name = state.run_name
    missing = _missing_algorithms(stored["state"], state)
    values = stored["state"]
    if not optimizers:  # torch refuses to load the groups alone: they start as built
        values = {name: value for name, value in values.items() if name != "optimizers"}
    if not (missing or state.fsdp_enabled):
        module = trained_module(state)
        given = fitted(values["model"], module, url, warns=True)
        values = {**values, "model": quantized_as(values["model"], given, module)}
    with _plainly_named(state), _growing(values.get("optimizers", {}), trained_module(state)):
        state.load_state_dict(values, logger)
    state.run_name = run_name  # as in Composer: a continued run may have another name
    if missing:
        live = model_state(state)  # with FSDP the first rank alone gets it
        on_first(lambda: require_same_model(_shapes(stored["state"]["model"]), _shapes(live), url))


@contextmanager
def _growing(stored: Mapping[str, Any], module: nn.Module) -> Iterator[None]:
    """Inside the block exactly the parameters that have a state in a checkpoint require gradients: torch loads it for these alone, and
    fails where it lacks one, as of parameters that no loss depends on."""
    kept = {name for optimizer in stored.values() for name in optimizer["state"]}
    wrong = [
        parameter
        for name, parameter in named_parameters(module)
        if kept and parameter.requires_grad != (_without_wrappers(name) in kept)
    ]
    try:
        for parameter in wrong:
            parameter.requires_grad_(not parameter.requires_grad)
        yield
    finally:
        for parameter in wrong:
            parameter.requires_grad_(not parameter.requires_grad)


def _missing_algorithms(stored: Mapping[str, Any], state: State) -> set[str]:
    """Algorithms of the checkpoint that Composer will apply when it is loaded, some of which change the model."""
    return {name for name, _ in stored["algorithms"]} - {
        type(algorithm).__qualname__ for algorithm in state.algorithms
    }


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items() if torch.is_tensor(value)}
