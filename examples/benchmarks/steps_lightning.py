"""What the exact log costs a training by Lightning, whose state is captured at the end of each segment."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from shrinkpoint.callbacks.lightning import CompressedCheckpoint

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from gpt import GPTConfig, train_loader
from lightning_gpt import GPTModule

__all__ = ["measure_lightning"]

_WARM_UP = 2  # segments: the first one is rehearsed


class _Clock(Callback):
    """Notes the time after each step, and what the log has counted by then."""

    def __init__(self, checkpoint: CompressedCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.seconds: list[float] = []
        self.waited: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        log = self._checkpoint._session.run.log.log
        assert log is not None
        assert log.off is None, log.off
        self.seconds.append(time.perf_counter())
        self.waited.append(log.blocked_s)


def measure_lightning(
    text: Tensor, config: GPTConfig, log: str, *, steps: int, segment: int
) -> tuple[list[float], float]:
    """Train with ``step_log="exact"`` and its defaults.

    Args:
        text: of the corpus.
        config: of the model.
        log: the log's folder.
        steps: that are timed.
        segment: steps of a segment.

    Returns:
        Seconds of each step, and those of all that the training's thread spent in the log.
    """
    with tempfile.TemporaryDirectory() as run:
        checkpoint = CompressedCheckpoint(
            run,
            every_n_train_steps=10**6,
            scheme="lossless",
            step_log="exact",
            step_log_url=log,
            save_last=False,
        )
        clock = _Clock(checkpoint)
        before = _WARM_UP * segment
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
    # The first batch's end is the beginning of the second step.
    seconds = [b - a for a, b in zip(clock.seconds[before - 1 :], clock.seconds[before:], strict=False)]
    return seconds, clock.waited[-1] - clock.waited[before - 1]
