"""What the exact log costs a training by Lightning, whose state is captured at the end of each segment."""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from shrinkpoint.callbacks.lightning import CompressedCheckpoint

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from gpt import GPTConfig, train_loader
from lightning_gpt import GPTModule

__all__ = ["Timed", "measure_lightning"]

_WARM_UP = 2  # segments: the first one is rehearsed


@dataclass(frozen=True)
class Timed:
    """Seconds of some steps."""

    seconds: list[float]
    """Of each."""
    waited: float
    """Of all that the training's thread spent in the log."""
    waited_cpu: float
    """CPU time of that."""
    thread_cpu: float
    """CPU time of the training's thread, in all."""


class _Clock(Callback):
    """Notes the times after each step, and what the log has counted by then."""

    def __init__(self, checkpoint: CompressedCheckpoint, before: int) -> None:
        self._checkpoint = checkpoint
        self._before = before
        self.times: list[tuple[float, float, float, float]] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        log = self._checkpoint._session.run.log.log
        assert log is not None
        assert log.off is None, log.off
        if len(self.times) == self._before - 1:
            gc.collect()  # all modules' objects: it takes longer than what is measured, and would fall anywhere
        self.times.append((time.perf_counter(), log.blocked_s, log.blocked_cpu_s, time.thread_time()))


def measure_lightning(text: Tensor, config: GPTConfig, log: str, *, steps: int, segment: int) -> Timed:
    """Train with ``step_log="exact"`` and its defaults.

    Args:
        text: of the corpus.
        config: of the model.
        log: the log's folder.
        steps: that are timed.
        segment: steps of a segment.
    """
    before = _WARM_UP * segment
    with tempfile.TemporaryDirectory() as run:
        checkpoint = CompressedCheckpoint(
            run,
            every_n_train_steps=before + steps + 1,  # none is due
            scheme="lossless",
            step_log="exact",
            step_log_url=log,
            save_last=False,
        )
        clock = _Clock(checkpoint, before)
        trainer = Trainer(
            max_steps=before + steps,
            gradient_clip_val=1.0,
            limit_val_batches=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                checkpoint,
                clock,
            ],  # Lightning calls checkpoints last: a step's log counts with the next step
        )
        trainer.fit(GPTModule(config), train_loader(text, config))
    timed = clock.times[before - 1 :]  # from the end of the last step before them
    _, waited, waited_cpu, thread_cpu = (
        last - first for first, last in zip(timed[0], timed[-1], strict=True)
    )
    seconds = [after[0] - one[0] for one, after in itertools.pairwise(timed)]
    return Timed(seconds, waited, waited_cpu, thread_cpu)
