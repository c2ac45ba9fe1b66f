"""Small trainings with Hugging Face's Trainer, and what they came to."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

__all__ = ["Crash", "Crashed", "Outcome", "Setup", "assert_continues", "train"]

VOCABULARY = 40
LENGTH = 44
"""Samples: 11 batches of 4."""


class Crashed(Exception):
    """What a test ends a training by."""


class Texts(Dataset):  # type: ignore[type-arg]
    """Sequences with a rule to learn."""

    def __init__(self, length: int = LENGTH, *, labels: bool = False) -> None:
        self._length = length
        self._labels = labels

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begins = torch.arange(10) * (1 + index % 3) + index
        ids = begins % VOCABULARY
        return {"input_ids": ids, "labels": torch.tensor(index % 3) if self._labels else ids.clone()}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same, as a stream of some samples in each epoch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        texts = Texts(self._count)
        for index in range(self._count):
            yield texts[index]


class Masking:
    """A collator that draws random numbers, as those for masked language modelling do."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self.generator: torch.Generator | None = None

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if self._seed is not None and self.generator is None:  # on first use, as transformers' own
            self.generator = torch.Generator().manual_seed(self._seed)
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        masked = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.2
        masked[0, 0] ^= random.random() < 0.5
        masked[0, 1] ^= np.random.random() < 0.5
        batch["input_ids"] = batch["input_ids"].masked_fill(masked, 0)
        return batch


@dataclass(frozen=True)
class Setup:
    """What is trained."""

    model: str = "gpt2"
    streamed: int = 0
    """Samples of an epoch of a stream; 0 for a data set that is read by index."""
    masking: bool = True
    mask_seed: int | None = None
    patience: int | None = None
    arguments: tuple[tuple[str, Any], ...] = ()


@dataclass
class Outcome:
    """What a training came to."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)
    """The steps that this process has made, with the sums of its weights after each."""
    random: float = 0.0
    finished: bool = False


class Crash(TrainerCallback):  # type: ignore[misc]
    """Notes every step, and ends the training before one of them."""

    def __init__(self, before: int | None = None) -> None:
        self._before = before
        self.steps: list[tuple[int, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._before is not None and state.global_step >= self._before:
            raise Crashed

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        total = sum(float(value.detach().double().sum()) for value in more["model"].parameters())
        self.steps.append((state.global_step, total))


def train(
    setup: Setup,
    output: str,
    *callbacks: Any,
    crash: int | None = None,
    resume: Any = None,
    seed: int = 1,
    trainer_class: type[Trainer] = Trainer,
) -> Outcome:
    """Train, or go on training, in this process.

    Args:
        setup: what.
        output: the trainer's folder.
        callbacks: ours among them.
        crash: raise before the step after so many.
        resume: the trainer's ``resume_from_checkpoint``.
        seed: what the process's generators start from; the trainer sets them anew.
        trainer_class: with methods of its own.
    """
    torch.manual_seed(seed)
    given = {
        "output_dir": output,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 4,
        "learning_rate": 3e-3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
    }
    arguments = TrainingArguments(**{**given, **dict(setup.arguments)})
    set_seed(5)
    if setup.model == "bert":
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            num_labels=3,
        )
        model: Any = BertForSequenceClassification(config)
    else:
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        )
    labels = setup.model == "bert"
    crashing = Crash(crash)
    more = (
        []
        if setup.patience is None
        else [EarlyStoppingCallback(setup.patience, early_stopping_threshold=100.0)]
    )
    collate = {"data_collator": Masking(setup.mask_seed)} if setup.masking else {}
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=Stream(setup.streamed) if setup.streamed else Texts(labels=labels),
        eval_dataset=Texts(8, labels=labels),
        callbacks=[crashing, *more, *callbacks],
        **collate,
    )
    outcome = Outcome(steps=crashing.steps)
    with contextlib.suppress(Crashed):
        trainer.train(resume_from_checkpoint=resume)
        outcome.finished = True
    outcome.weights = {name: value.clone() for name, value in model.state_dict().items()}
    outcome.optimizer = trainer.optimizer.state_dict()
    outcome.scheduler = trainer.lr_scheduler.state_dict()
    outcome.history = [
        {
            name: value
            for name, value in entry.items()
            if "runtime" not in name and "per_second" not in name and name != "train_loss"
        }
        for entry in trainer.state.log_history
    ]
    state = trainer.state
    outcome.state = {
        name: getattr(state, name) for name in ("epoch", "global_step", "best_metric", "total_flos")
    }
    outcome.random = float(torch.rand(()))
    return outcome


def assert_continues(whole: Outcome, rest: Outcome) -> None:
    """The end of a run that was interrupted is the end of one that was not, bit by bit."""
    assert rest.finished
    begins = rest.steps[0][0]
    assert begins > 1
    assert [row for row in whole.steps if row[0] >= begins] == rest.steps
    _assert_same(whole.weights, rest.weights)
    _assert_same(whole.optimizer, rest.optimizer)
    _assert_same(whole.scheduler, rest.scheduler)
    assert whole.history == rest.history
    assert whole.state == rest.state
    assert whole.random == rest.random


def _assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            _assert_same(left, right)
    else:
        assert one == other
