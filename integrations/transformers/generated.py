"""What trainers of reinforcement learning, such as TRL's, keep outside of any state: generated batches, and a reference that follows."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.integrations.common.ranks import is_first
from shrinkpoint.state.training import TrainingState, plain
from shrinkpoint.warn import warn

__all__ = ["Generated", "load_reference", "reference_of"]

_COUNT = "_step"  # of passes, by which a trainer decides when to generate anew
_BUFFERS = "_buffered"


def reference_of(trainer: Any) -> dict[str, Any]:
    """The model that the trainer compares with, where it is moved after the trained one: part of a stored state, by name."""
    module = getattr(trainer, "ref_model", None)
    moves = getattr(trainer.args, "sync_ref_model", False) and isinstance(module, torch.nn.Module)
    return {"reference": trainer.accelerator.unwrap_model(module).state_dict()} if moves else {}


def load_reference(stored: Mapping[str, Any], trainer: Any) -> None:
    """Put the reference back, where both trainings move one."""
    if "reference" in stored and reference_of(trainer):
        trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(stored["reference"])


class Generated:
    """Saves and restores the batches that a trainer has generated and goes on using."""

    def __init__(self) -> None:
        self._warned = False

    def state(self, trainer: Any) -> dict[str, Any]:
        """This rank's; empty for a trainer without any."""
        kept = {name: value for name, value in vars(trainer).items() if name.startswith(_BUFFERS)}
        count = getattr(trainer, _COUNT, None)
        if not kept or type(count) is not int:
            return {}
        every = self._every(trainer)
        if every and count % every == 0:  # they are made anew before the next pass
            return {_COUNT: count}
        moved = tree_map(lambda value: value.detach().cpu() if torch.is_tensor(value) else value, kept)
        try:
            TrainingState.capture(moved, plain)
        except CannotRepresentError as error:
            self._warn(trainer, every, error)
            return {_COUNT: count}
        return {_COUNT: count, **moved}

    def restore(self, trainer: Any, stored: Mapping[str, Any]) -> None:
        """Put a checkpoint's back.

        Args:
            trainer: about to train.
            stored: what `state` gave.
        """
        device = trainer.args.device
        for name, value in stored.items():
            setattr(trainer, name, tree_map(lambda v: v.to(device) if torch.is_tensor(v) else v, value))

    def _every(self, trainer: Any) -> int:
        """Passes for which generated batches are used; 0 where that is not known."""
        found = [
            getattr(trainer, name, getattr(trainer.args, name, 0))
            for name in ("steps_per_generation", "num_iterations")
        ]
        return math.prod(size for size in found if type(size) is int)

    def _warn(self, trainer: Any, every: int, error: Exception) -> None:
        accumulated = trainer.args.gradient_accumulation_steps
        steps = every // math.gcd(every, accumulated) if every else None
        which = "where they are made anew" if steps is None else f"at multiples of {steps} steps"
        if is_first() and not self._warned:
            warn(
                f"the batches that {type(trainer).__name__} has generated cannot be stored ({error}): a resume is exact {which} only; elsewhere"
                " it generates them anew. This warning comes once"
            )
        self._warned = True
