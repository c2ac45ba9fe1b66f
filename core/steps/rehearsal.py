"""Replays the first logged steps on a copy while the training runs, to detect early that a log cannot be replayed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from shrinkpoint.optimizers.updates import OptimizerKind, holds_tensors
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.steps.fingerprint import differing, fingerprints
from shrinkpoint.steps.hyperparameters import frozen_groups, parameters_of
from shrinkpoint.steps.record import Record
from shrinkpoint.steps.replay import make_step

__all__ = ["Rehearsal"]

_NAMED = 3


class Rehearsal:
    """A copy of weights and optimizer states, on which recorded steps can be replayed.

    Args:
        optimizers: of the training, before the first of these steps.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._copies = [_copy(optimizer) for optimizer in optimizers]

    @staticmethod
    def possible(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether copies can be stepped like the optimizers: not where hooks after a step may refer to the training's own
        weights, nor where the step is compiled, which would be compiled anew for the copies."""
        if getattr(optimizer_module, "_global_optimizer_post_hooks", None):
            return False
        return all(
            len(getattr(one, "_optimizer_step_post_hooks", {})) <= 1
            and not holds_tensors(type(one).step)
            and not hasattr(one.step, "_torchdynamo_orig_callable")
            for one in optimizers
        )

    def obstacle(
        self, records: Sequence[Record], optimizers: Sequence[torch.optim.Optimizer], model: nn.Module
    ) -> str | None:
        """Replay the steps on the copy, and return why a replay would fail; None where it succeeds.

        Args:
            records: what was recorded since; if from a GPU, the caller has waited for the copies.
            optimizers: of the training, after the last of these steps.
            model: has the parameters' names.
        """
        rng = capture_rng()  # an optimizer may draw from the training's generators
        try:
            for record in records:
                for event in record.events:
                    make_step(self._copies[event.optimizer], event)
            found = differing(fingerprints(optimizers), fingerprints(self._copies))
        except Exception as error:  # noqa: BLE001 - a third-party optimizer may raise anything
            return f"the logged steps cannot be replayed: {type(error).__name__}: {error}"
        finally:
            restore_rng(rng)
        if not found:
            return None
        names = _names(optimizers, model)
        shown = list(dict.fromkeys(names.get("/".join(part.split("/")[:2]), part) for part in found))
        more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
        return (
            f"steps {records[0].begin} to {records[-1].end}, replayed on a copy, give other values of"
            f" {', '.join(map(repr, shown[:_NAMED]))}{more} than the training: they are changed outside of optimizer.step(), as"
            " by SAM, by clipping weights, by averages put in their place. Give after_step=, a function that does what the"
            " training does after each step, or leave step_log out. A compiled step gives other values too, and can be replayed"
            " if it is the optimizer's own: optimizer.step = torch.compile(optimizer.step)"
        )


def _names(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> dict[str, str]:
    """The parameters' names in the model, by what `fingerprints` calls them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{index}/{place}": names.get(id(parameter), f"parameter {place} of optimizer {index}")
        for index, one in enumerate(optimizers)
        for place, parameter in enumerate(parameters_of(one))
    }


def _copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    parameters = parameters_of(optimizer)
    copies = {
        id(p): torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters
    }
    groups = [
        {**hyper, "params": [copies[id(p)] for p in group["params"]]}
        for hyper, group in zip(frozen_groups(optimizer), optimizer.param_groups, strict=True)
    ]
    state: dict[torch.Tensor, dict[str, Any]] = {
        copies[id(p)]: {name: _cloned(value) for name, value in optimizer.state[p].items()}
        for p in parameters
        if p in optimizer.state
    }
    return OptimizerKind.of(optimizer).with_state(groups, state)


def _cloned(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return [_cloned(item) for item in value] if isinstance(value, list) else value
