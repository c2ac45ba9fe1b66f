"""What trainers such as TRL's keep outside of any state: batches that they have generated, and a reference that follows the model."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.state.training import TrainingState, plain
from shrinkpoint.warn import warn

__all__ = ["generated_state", "load_generated", "load_reference", "reference_of"]

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


def generated_state(trainer: Any, warned: set[str]) -> dict[str, Any]:
    """The batches that a trainer goes on using on this rank, and its count of passes; empty for a trainer without any.

    Args:
        trainer: between two steps.
        warned: of what there has been a warning.
    """
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
    try:
        TrainingState.capture(kept, plain)
    except CannotRepresentError as error:
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
