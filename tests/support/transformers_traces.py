"""A training by Hugging Face's Trainer in which everything writes down what it sees."""

import os
from pathlib import Path
from typing import Any

from support.sharded import warm
from support.traces import CALLS, Traces
from support.transformers_models import VOCABULARY, Texts
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.config import Advanced

__all__ = ["saving", "traced", "trained"]

warm()


class Noting(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.traces = Traces()


class Recording(Trainer):  # type: ignore[misc]
    noting: Noting

    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, **more)
        value = round((loss[0] if isinstance(loss, tuple) else loss).item(), 3)
        self.losses.append(value)
        self.traces.touch(value)
        self.model.traces.touch(value)
        self.noting.traces.touch(value)
        self.args.hub_token = f"{self.args.hub_token}x"
        self.state.log_history.append({"by_hand": value})
        self.log({"logged": value})
        return loss


def trained(folder: Path, *callbacks: Any, evaluates: bool = True) -> tuple[Any, ...]:
    """Train for some steps, of several processes each on its share of the data.

    Returns:
        What was written down, the model's state, how often anything was.
    """
    CALLS.clear()
    set_seed(5)
    model: Any = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )
    model.traces = Traces()
    noting = Noting()
    trainer = Recording(
        model=model,
        args=TrainingArguments(
            str(folder),
            per_device_train_batch_size=4,
            max_steps=14,
            logging_steps=3,
            eval_strategy="steps" if evaluates else "no",
            eval_steps=4,
            save_steps=5,
            learning_rate=3e-3,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Texts(),
        eval_dataset=Texts(8),
        callbacks=[noting, *callbacks],
    )
    trainer.losses, trainer.traces, trainer.noting = [], Traces(), noting  # type: ignore[attr-defined]
    trainer.train()
    history = [
        {name: value for name, value in row.items() if "runtime" not in name and "per_second" not in name}
        for row in trainer.state.log_history
    ]
    seen = [trainer.traces.seen(), model.traces.seen(), noting.traces.seen(), str(trainer.losses)]  # type: ignore[attr-defined]
    return [*seen, str(history), trainer.args.hub_token], model.state_dict(), len(CALLS)


def saving(folder: Path) -> CompressedCheckpoint:
    """Return the callback that saves, and measures by default."""
    return CompressedCheckpoint(str(folder / "run"), every_n_train_steps=5, advanced=Advanced(busy="wait"))


def traced(rank: int, world: int, folder: Path, port: str, saves: bool) -> tuple[Any, ...]:
    """Train as one of several ranks, with or without checkpoints."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    return trained(folder / "trainer", *([saving(folder)] if saves else []))
