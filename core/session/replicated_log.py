"""The step log of a hand-written loop that several processes run on copies of a model."""

from collections.abc import Mapping
from typing import Any

from shrinkpoint.group.group import world
from shrinkpoint.session.objects import LoopObjects
from shrinkpoint.session.sharded import BUCKETS, CopiedObjects
from shrinkpoint.sharded.restoring import RANKS_KEY
from shrinkpoint.sharded.trees import own_of
from shrinkpoint.state.stateful import parameters_of
from shrinkpoint.steps.capture import CannotLogError
from shrinkpoint.steps.exact import ExactLog
from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.training import Captured, TrainingLog, on_host

__all__ = ["log_of_copies"]

_RANKS = "ranks"


def log_of_copies(objects: CopiedObjects, options: StepLog, **run: Any) -> TrainingLog:
    """Make the log of a training on copies.

    Args:
        objects: of the loop.
        options: of the log.
        run: the checkpoints' side, as of `TrainingLog`.

    Raises:
        ConfigError: there can be no such log of this training; on every rank.
    """

    def capture() -> Captured:
        captured, hook = _of_ranks(objects), objects.stateful_hook
        if isinstance(log.log, ExactLog) and log.log.accumulates():
            return CannotLogError(
                "gradients are accumulated over several calls of Checkpointer.step, other ones on each process: call it after"
                " optimizer.step() only"
            )
        if hook is not None:
            return CannotLogError(
                f"the state of the DDP communication hook, a {hook}, is each process's own, and not logged here: the callbacks of"
                " Lightning and Composer log it"
            )
        return captured

    def share(step: int, captured: Mapping[str, Any]) -> None:
        parameters = [parameter for one in objects.optimizers for parameter in parameters_of(one)]
        state: dict[str, Any] = {}
        gradients = None
        if world().is_first:
            state = on_host(LoopObjects.state(objects, step))
            gradients = [on_host(parameter.grad) for parameter in parameters]
        objects.load(_with_own({**world().broadcast(state), **captured}), "", warns=False)
        found = world().broadcast(gradients)
        if not world().is_first:
            for parameter, gradient in zip(parameters, found or (), strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    run |= {"stateful": objects.stateful, "capture": capture, "share": share}
    log = TrainingLog(objects.model, objects.optimizers, options, **run)
    return log


def _of_ranks(objects: CopiedObjects) -> dict[str, Any]:
    """Return what is each rank's own, where it differs from the first one's; a collective."""
    group = world()
    own = group.on_every(lambda: own_of(objects.own(), group.rank))
    known = group.broadcast(own.digests())
    kept: dict[str, dict[str, Any]] = {}
    for (of, name), part in own.without(known).parts.items():
        kept.setdefault(of, {})[name] = part.to_object()
    return {_RANKS: group.gather(kept), BUCKETS: objects.buckets()}


def _with_own(state: dict[str, Any]) -> dict[str, Any]:
    """The first rank's state with what is this one's own, if a rank of this number has written some."""
    ranks, here = state.pop(_RANKS), world()
    own = ranks[here.rank] if here.rank < len(ranks) else {}
    merged = {of: {**state[of], **values} for of, values in own.items()}
    return {
        **state,
        **merged,
        RANKS_KEY: {"stored": len(ranks), "here": here.size, "rank": here.rank},
    }
