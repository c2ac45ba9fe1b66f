"""The stored state of a Hugging Face run: collecting and restoring it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers.trainer_callback import EarlyStoppingCallback, ExportableState, TrainerControl

from shrinkpoint.group.group import world
from shrinkpoint.state.digest import state_digest, tensor_digest
from shrinkpoint.state.stateful import state_of
from shrinkpoint.state.tree import refusal
from shrinkpoint.warn import warn


def arguments(args: Any) -> dict[str, Any]:
    """Return the arguments from which the length of a training is computed."""
    return {"max_steps": args.max_steps, "num_train_epochs": float(args.num_train_epochs)}


def trainer_state(trainer: Any) -> dict[str, Any]:
    """Return the trainer's state as it writes it itself, with its callbacks' present states."""
    stateful: dict[str, Any] = {}
    for part in _exportable(trainer):
        name = type(part).__name__
        if name in stateful:
            before = stateful[name]
            stateful[name] = [*(before if isinstance(before, list) else [before]), part.state()]
        else:
            stateful[name] = part.state()
    state = dataclasses.asdict(trainer.state)
    state["stateful_callbacks"] = stateful
    state["best_model_checkpoint"] = None  # a shrinkpoint address, which the run determines itself
    return state


def _exportable(trainer: Any) -> list[Any]:
    parts = [*trainer.callback_handler.callbacks, trainer.control]
    return [part for part in parts if isinstance(part, ExportableState)]


def stopped_early(trainer: Any) -> bool:
    """Return whether `EarlyStoppingCallback` has ended the training, and not a time limit, from which a restart continues."""
    return any(
        isinstance(part, EarlyStoppingCallback)
        and part.early_stopping_patience_counter >= part.early_stopping_patience
        for part in trainer.callback_handler.callbacks
    ) and bool(trainer.control.should_training_stop)


def steps_per_epoch(trainer: Any) -> int | None:
    """Return the optimizer's steps in an epoch; None of a stream of unknown length."""
    try:
        batches = len(trainer.callback_handler.train_dataloader)
    except TypeError:
        return None
    return max(-(-batches // trainer.args.gradient_accumulation_steps), 1)


def load_callbacks(stored: Mapping[str, Any], trainer: Any) -> None:
    """Put the states of callbacks back, of the trainer's own instances; their options are the new ones.

    The trainer itself would create new instances with the old options, and only on request.
    """
    waiting = {
        name: list(states) if isinstance(states, list) else [states]
        for name, states in stored["trainer"]["stateful_callbacks"].items()
    }
    for part in _exportable(trainer):
        states = waiting.get(type(part).__name__)
        if states and not isinstance(part, TrainerControl):
            for name, value in states.pop(0).get("attributes", {}).items():
                setattr(part, name, value)


_LAST_LOGGED = "_globalstep_last_logged"
_TOTAL = "_total_loss_scalar"
_FIRST_STEP = "_initial_global_step"
_SUM = "_tr_loss"


def inside_epoch(state: Any) -> bool:
    """Return whether batches of the present epoch are still to be trained on."""
    return bool(state.epoch) and float(state.epoch) != round(state.epoch)


class Progress:
    """The sums behind the losses that a trainer logs, saved and put back."""

    def __init__(self) -> None:
        self._pending = 0.0

    def state(self, trainer: Any, tr_loss: torch.Tensor | None) -> dict[str, Any]:
        """Return this rank's sums, after a step has been logged; `tr_loss` is None where training has ended."""
        return {
            "loss": 0.0 if tr_loss is None else float(tr_loss.item()),
            "total_loss": float(getattr(trainer, _TOTAL, 0.0)),
            "last_logged": int(getattr(trainer, _LAST_LOGGED, trainer.state.global_step)),
        }

    def restore(self, trainer: Any, stored: Mapping[str, Any]) -> None:
        """Put a checkpoint's sums and counts back; the trainer has just set them as if it had logged at this step."""
        step, ranks = stored["trainer"]["global_step"], stored["processes"]
        trainer.state.global_step = step  # it was given a different one where nothing is left to train
        setattr(trainer, _LAST_LOGGED, step)
        if hasattr(trainer, _FIRST_STEP):
            setattr(trainer, _FIRST_STEP, step)
        if len(ranks) != world().size:
            return
        own = ranks[world().rank]
        setattr(trainer, _LAST_LOGGED, own["last_logged"])
        if hasattr(trainer, _FIRST_STEP):
            # Since transformers 5 the loss of a whole call is that of its own steps.
            setattr(trainer, _TOTAL, -sum(each["loss"] for each in ranks) / len(ranks))
        else:
            setattr(trainer, _TOTAL, own["total_loss"])
        if isinstance(getattr(trainer, _SUM, None), torch.Tensor):
            getattr(trainer, _SUM).fill_(own["loss"])
        else:
            self._pending = own["loss"]

    def add_pending(self, tr_loss: torch.Tensor) -> None:
        """Before the first step is logged, add the stored sum to the trainer's local variable."""
        if self._pending:
            tr_loss += self._pending
            self._pending = 0.0


# ---- what trainers such as TRL's keep outside of any state: batches that they have generated, and a reference that follows the model

_COUNT = "_step"  # of passes, by which a trainer decides when to generate anew
_BUFFERS = "_buffered"
_END = 4096  # elements
_MODELS = 100  # of a list, which may be the data


def reference_of(trainer: Any) -> dict[str, Any]:
    """Return the model that the trainer compares with, where it is moved after the trained one: part of a stored state, by name."""
    module = getattr(trainer, "ref_model", None)
    moves = getattr(trainer.args, "sync_ref_model", False) and isinstance(module, torch.nn.Module)
    return {"reference": trainer.accelerator.unwrap_model(module).state_dict()} if moves else {}


def load_reference(stored: Mapping[str, Any], trainer: Any) -> None:
    """Put the reference back, where both trainings move one."""
    if "reference" in stored and reference_of(trainer):
        trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(stored["reference"])


def others_of(trainer: Any) -> dict[str, str]:
    """Return digests of the models that a trainer keeps in attributes or lists, and neither trains nor moves, by attribute."""
    moved = trainer.ref_model if reference_of(trainer) else torch.nn.Module()
    known = {*map(id, (*trainer.model.parameters(), *moved.parameters()))}
    parts = {
        name: value if isinstance(value, list | tuple) else [value] for name, value in vars(trainer).items()
    }
    modules = {
        name: torch.nn.ModuleList(one for one in part[:_MODELS] if isinstance(one, torch.nn.Module))
        for name, part in parts.items()
    }
    others = {
        name: part for name, part in modules.items() if part and known.isdisjoint(map(id, part.parameters()))
    }
    return {name: _digest_of_ends(state_of(part)) for name, part in others.items()}


def _digest_of_ends(state: Mapping[str, Any]) -> str:
    """Return a digest of both ends of each tensor, in milliseconds; without tensors that are made of others, as shards are."""
    tensors = ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))
    own = ((name, one) for name, one in tensors if not (hasattr(one, "__tensor_flatten__") or one.is_meta))
    flat = {name: one.detach().reshape(-1) for name, one in own}
    ends = {name: torch.cat([one[:_END], one[-_END:]]).cpu() for name, one in flat.items()}
    return state_digest({name: tensor_digest(one) for name, one in ends.items()})


def generated_state(trainer: Any, warned: set[str]) -> dict[str, Any]:
    """Return the batches that a trainer goes on using on this rank, and its count of passes; empty for a trainer without any."""
    kept = {name: value for name, value in vars(trainer).items() if name.startswith(_BUFFERS)}
    count = getattr(trainer, _COUNT, None)
    if not kept or type(count) is not int:
        return {}
    sizes = [
        getattr(trainer, name, getattr(trainer.args, name, 0))
        for name in ("steps_per_generation", "num_iterations")
    ]
    every = math.prod(size or 0 for size in sizes)  # passes that a generated batch serves
    if every and count % every == 0:  # batches are generated before the next pass
        return {_COUNT: count}
    kept = tree_map_only(torch.Tensor, lambda value: value.detach().cpu(), kept)
    if (error := refusal(kept)) is not None:
        kept = {}
        steps = every // math.gcd(every, trainer.args.gradient_accumulation_steps) if every else "as many"
        if _BUFFERS not in warned:
            warned.add(_BUFFERS)
            warn(
                f"the batches that {type(trainer).__name__} has generated cannot be stored ({error}): a resume is exact at multiples of {steps}"
                " steps, after which it generates new ones, and elsewhere generates them anew. This warning comes once"
            )
    return {_COUNT: count, **kept}


def load_generated(stored: Mapping[str, Any], trainer: Any) -> None:
    """Put back what `generated_state` gave; the trainer is about to train."""
    for name, value in tree_map_only(
        torch.Tensor, lambda value: value.to(trainer.args.device), dict(stored)
    ).items():
        setattr(trainer, name, value)
