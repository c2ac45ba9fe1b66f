"""The stored state of a Composer run: collecting it, the roles of its tensors, and restoring it."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from composer.algorithms.sam import SAMOptimizer
from composer.core import State
from composer.loggers import Logger
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from shrinkpoint.engine.fitting import fitted
from shrinkpoint.engine.resume import require_optimizers, require_same_model
from shrinkpoint.errors import StateMismatchError
from shrinkpoint.group.group import world
from shrinkpoint.optimizers.objects import with_object_states
from shrinkpoint.session.continuing import load_model, load_optimizers, require_format
from shrinkpoint.session.identity import add_late_parameters, rounded_weights
from shrinkpoint.session.identity import require_same_optimizers as require_same_parameters
from shrinkpoint.state.roles import optimizer_parameter_names
from shrinkpoint.state.stateful import named_buffers, named_parameters, state_of

FORMAT = "composer"
_VERSION = 1
_SHARDED_VERSION = 2

OUTLINE = ("format", "version", "state", "pytorch-lightning_version")
"""The entries of a stored state that `require_own_run` needs."""

# Parts of parameters' names that wrappers add, and that torch's own state dicts leave out.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def trained_module(state: State) -> nn.Module:
    """Return the user's model, without the wrapper of data parallelism."""
    module: nn.Module = state.model.module if state.is_model_ddp else state.model
    return module


def parameter_names(module: nn.Module) -> dict[str, str]:
    """Return the name in a checkpoint of each of the module's own names, with `plain_names`, for parameters and buffers."""
    own = [name for name, _ in (*named_parameters(module), *named_buffers(module))]
    return {name: without_wrappers(name) for name in own}


def without_wrappers(name: str) -> str:
    """Return a parameter's name without those of wrappers that torch's own state dicts leave out."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def shards_model(state: State) -> bool:
    """Return whether each rank has, and saves, its own shards of the state: with FSDP2, unless full states were asked for."""
    config = state.fsdp_config
    return type(config).__name__ == "FSDP2Config" and config.state_dict_type == "sharded"


def model_state(state: State) -> dict[str, Any]:
    """Return the model's state as it is stored; each rank's own shards where they are what is saved, and where they are.

    Called on every rank.
    """
    if shards_model(state):  # Composer would copy them to the host
        return dict(get_model_state_dict(state.model))
    return dict(state.get_model_state_dict() if state.fsdp_enabled else state_of(trained_module(state)))


def plain_optimizers(state: State) -> dict[str, Any]:
    """Return the optimizers by the names of their classes, without the wrapper of Composer's SAM, which keeps nothing between two steps."""
    return {
        type(each).__qualname__: each.base_optimizer if isinstance(each, SAMOptimizer) else each
        for each in state.optimizers
    }


# ---- saving


def stored_state(state: State, position: Any) -> dict[str, Any]:
    """Return the state from which a run is continued; its tensors are the live ones.

    Called on every rank: what FSDP1 shards is gathered, and the first rank alone gets it. Of FSDP2's shards each rank
    gets its own, and waits for no other. The position in the data is that of every process, in a list; of shards this
    process's.
    """
    shards = shards_model(state)
    if state.fsdp_enabled and not shards:
        stored = state.state_dict()
    else:  # as everywhere: Composer's own way reads and loads few optimizers and models but torch's
        stored = {**_others(state), "model": model_state(state), "optimizers": _optimizer_states(state)}
    _begin_next_epoch(stored, state)
    version = _SHARDED_VERSION if shards else _VERSION
    place = {"world": world().size, "place": position} if shards else {"ranks": position}
    return {"format": FORMAT, "version": version, "state": stored, **place}


def _others(state: State) -> dict[str, Any]:
    """Return all of Composer's state but the model's and the optimizers'."""
    attributes = state.serialized_attributes
    state.serialized_attributes = [name for name in attributes if name not in ("model", "optimizers")]
    try:
        return dict(state.state_dict())
    finally:
        state.serialized_attributes = attributes


def _optimizer_states(state: State) -> dict[str, Any]:
    """As Composer's own, with the names of parameters in the places of their numbers."""
    found = {}
    for kind, optimizer in plain_optimizers(state).items():
        if shards_model(state):
            found[kind] = get_optimizer_state_dict(state.model, optimizer)
            continue
        names = optimizer_parameter_names(optimizer, trained_module(state))
        found[kind] = _with_keys(with_object_states(state_of(optimizer)), names)
    return found


def _with_keys(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with other keys of its parameters; that of a container of optimizers stays as it is."""
    if "state" not in state or "param_groups" not in state:
        return dict(state)
    groups = [
        {**group, "params": [keys.get(key, key) for key in group["params"]]}
        for group in state["param_groups"]
    ]
    entries = {keys.get(key, key): entry for key, entry in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def numbered_states(stored: Mapping[str, Any], state: State) -> list[dict[str, Any]]:
    """Return the optimizers' states as these take them, of a `stored_state`."""
    found = []
    for kind, optimizer in plain_optimizers(state).items():
        names = optimizer_parameter_names(optimizer, trained_module(state))
        numbered = _with_keys(stored["state"]["optimizers"][kind], {n: i for i, n in names.items()})
        for group in numbered.get("param_groups", ()):
            group["params"].sort()  # torch takes them in the optimizer's order
        found.append(numbered)
    return found


def _begin_next_epoch(stored: dict[str, Any], state: State) -> None:
    """At an epoch's end, a StreamingDataset still names that epoch, and would restart it at its first sample."""
    streaming = sys.modules.get("streaming")
    if streaming is None or int(state.timestamp.batch_in_epoch):
        return
    if isinstance(getattr(state.train_dataloader, "dataset", None), streaming.StreamingDataset):
        stored["dataset_state"]["train"]["epoch"] += 1


# ---- restoring


def place_in(stored: Mapping[str, Any], *, own: bool) -> tuple[int, Any]:
    """Return how many processes saved a checkpoint, and this one's position in the data; None if it is not known.

    `own` says whether a position of one process alone is this one's, and not the first one's.
    """
    if "ranks" in stored:
        ranks = stored["ranks"]
        return len(ranks), ranks[world().rank] if len(ranks) == world().size else None
    known = own and stored["world"] == world().size
    return stored["world"], stored["place"] if known else None


def require_own_run(stored: Any, live: Mapping[str, Any], state: State, url: str) -> None:
    """Refuse another run's checkpoint, or outline; Composer would load what matches the `live` model and ignore the rest."""
    require_format(stored, FORMAT, _SHARDED_VERSION, url, callback="Composer's callback")
    there = stored["state"]
    if not _missing_algorithms(there, state):
        if state.fsdp_enabled:
            require_same_model(_shapes(there["model"]), _shapes(live), url)
        else:
            fitted(there["model"], trained_module(state), url)


def add_late(stored: Mapping[str, Any], state: State) -> str | None:
    """Give optimizers the parameters that the run had added to its own, as `add_late_parameters` does."""
    here, module = plain_optimizers(state), trained_module(state)
    there = [stored["state"]["optimizers"].get(name, {}) for name in here]
    groups = [{"parameters": [group["params"] for group in each.get("param_groups", ())]} for each in there]
    return None if state.fsdp_enabled else add_late_parameters(groups, there, [*here.values()], module)


def require_same_optimizers(stored: Mapping[str, Any], state: State, url: str) -> None:
    """Refuse a checkpoint of another optimizer, whose state Composer would drop."""
    there = stored["state"]["optimizers"]
    comparable = not state.fsdp_enabled and not _missing_algorithms(stored["state"], state)
    here = _optimizer_states(state) if comparable else {}
    for name, optimizer in plain_optimizers(state).items():
        if name not in there:
            raise StateMismatchError(
                f"{url} contains a run with {' and '.join(there)}, and this one has {name}: build the optimizer that the run"
                " was made with, or give this run a URL of its own"
            )
        require_optimizers([there[name]], [optimizer], url)
        if name in here:
            old, new = ([{"class": name, "parameters": _groups(each[name])}] for each in (there, here))
            require_same_parameters(old, new, url)


def _groups(state: Mapping[str, Any]) -> list[list[str]]:
    return [sorted(group["params"]) for group in state.get("param_groups", ())]


def load_state(
    stored: Mapping[str, Any], state: State, logger: Logger, url: str, *, optimizers: bool = True
) -> None:
    """Put a checkpoint into a run, with the optimizers' options and what was stored of their state; called on every
    rank.

    Raises:
        StateMismatchError: even after Composer has applied the checkpoint's algorithms, the model differs.
    """
    run_name = state.run_name
    missing = _missing_algorithms(stored["state"], state)
    # torch refuses to load groups alone
    apart = set() if optimizers and state.fsdp_enabled else {"optimizers"}
    if not (missing or state.fsdp_enabled):
        load_model(stored["state"]["model"], trained_module(state), url)
        apart.add("model")
    values = {name: value for name, value in stored["state"].items() if name not in apart}
    with _growing(values.get("optimizers", {}), trained_module(state)):
        state.load_state_dict(values, logger)
    if not state.fsdp_enabled:
        _load_optimizers(stored, state)
    state.run_name = run_name  # as in Composer: a continued run may have another name
    if missing:
        live = model_state(state)  # with FSDP the first rank alone gets it
        world().on_first(lambda: require_same_model(_shapes(stored["state"]["model"]), _shapes(live), url))


def _load_optimizers(stored: Mapping[str, Any], state: State) -> None:
    same_dtypes = rounded_weights(stored["state"]["model"], model_state(state)) is None
    inner = [*plain_optimizers(state).values()]
    load_optimizers(inner, numbered_states(stored, state), same_dtypes=same_dtypes)
    for wrapper, own in zip(state.optimizers, inner, strict=True):
        if wrapper is not own:
            wrapper.param_groups = own.param_groups  # which loading has made anew


@contextmanager
def _growing(stored: Mapping[str, Any], module: nn.Module) -> Iterator[None]:
    """Inside the block exactly the parameters that have a state in a checkpoint require gradients: torch loads it for these alone, and
    fails where it lacks one, as of parameters that no loss depends on."""
    kept = {name for optimizer in stored.values() for name in optimizer["state"]}
    wrong = [
        parameter
        for name, parameter in named_parameters(module)
        if kept and parameter.requires_grad != (without_wrappers(name) in kept)
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
