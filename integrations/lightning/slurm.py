"""Lightning under SLURM: the run takes the place of the checkpoint that Lightning writes before its job is requeued."""

import signal
from collections.abc import Callable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from shrinkpoint.runtime.termination import TerminationRequest
from shrinkpoint.warn import warn

__all__ = ["requeueing", "step_written"]


def requeueing(trainer: Trainer, *, answered: Callable[[], bool]) -> TerminationRequest:
    """Take the signal at which Lightning would write a whole checkpoint of its own and requeue the job.

    Args:
        trainer: before it installs its handlers, which leaves a signal alone that has one.
        answered: as of `TerminationRequest`.

    Returns:
        The request, whose ``end`` requeues; of no signal where Lightning would do nothing.
    """
    environment = trainer._accelerator_connector.cluster_environment
    requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
    number = (environment.requeue_signal if requeues else None) or signal.SIGUSR1
    present = signal.getsignal(number)
    ours = isinstance(
        getattr(present, "__self__", None), TerminationRequest
    )  # of an earlier fit: Lightning puts it back
    taken = [number] if requeues and (ours or present in (None, signal.SIG_DFL)) else []

    def requeue() -> None:
        trainer.save_checkpoint = lambda *args, **kwargs: None  # the run has been saved
        try:
            trainer._signal_connector._slurm_sigusr_handler_fn(number, None)
        finally:
            del trainer.save_checkpoint

    request = TerminationRequest((), more=taken, answered=answered, then=requeue)
    request.watch()
    return request


def step_written(path: str) -> int:
    """The step of a checkpoint of Lightning's own; -1 where it cannot be read, as one that a job's end cut short."""
    try:
        return int(torch.load(path, map_location="meta", mmap=True, weights_only=False)["global_step"])
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the run may be continued
        warn(f"{path} cannot be read: {type(error).__name__}: {error}")
        return -1
