"""The trainings of the bench of optimizers' state: each can be built again, and goes on from what is restored."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from bound_data import code_text, windows
from bound_training import generator
from bound_trainings import KINDS
from gpt import GPT, GPTConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.store.run import RunStore

__all__ = ["Case", "GptRun", "Outcome", "measured_run", "undisturbed_losses"]

SAVES, EVERY = 5, 40
_BATCH, _LENGTH = 8, 33
_PROBE, _TRUTH = 2, 24

Extra = Callable[["GptRun"], None]
"""Adds objects with a state to a run, and what keeps them up to date."""


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        build: The optimizers, of a model.
        dtype: Of the model.
        extra: What else is trained and saved.
        loop: ``"own"``, one with accelerate, or Hugging Face's Trainer with its callback.
        model: ``"gpt"``, or the ResNet of the bench of the bound in its first steps.
        why: Said where the ratio is below 8.
    """

    build: Callable[[nn.Module], list[Optimizer]]
    dtype: torch.dtype = torch.float32
    extra: Extra | None = None
    loop: str = "own"
    model: str = "gpt"
    why: str = ""

    def every(self, quick: bool) -> int:
        """Steps between two saves."""
        return 5 if quick else 10 if self.model == "resnet" else EVERY


@dataclass(frozen=True)
class Outcome:
    """What became of a run that was restored from every checkpoint but the last.

    Attributes:
        reports: Of each save, in the form of a manifest's ``meta``.
        loss: Held-out, in the end.
    """

    reports: Sequence[Mapping[str, Any]]
    loss: float


class Run(Protocol):
    """A training that can be built again."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    stateful: Mapping[str, Any]

    def step(self, index: int) -> Any:
        """One step."""

    def probe(self) -> float:
        """The loss that the library measures with."""

    def truth(self) -> float:
        """The loss on other held-out data."""


class GptRun:
    """A small GPT on the source of the standard library."""

    def __init__(self, case: Case, seed: int, quick: bool) -> None:
        torch.manual_seed(seed)
        width, layers = (16, 1) if quick else (48, 1)
        self.model: nn.Module = GPT(GPTConfig(width=width, layers=layers, heads=2, block=_LENGTH - 1)).to(
            case.dtype
        )
        self.optimizers: Sequence[Optimizer] = case.build(self.model)
        self.stateful: dict[str, Any] = {}
        self.after_step: Callable[[int], None] = lambda index: None
        self.measured: nn.Module = self.model
        train, held_out = code_text()
        self._text, self._seed = train, seed
        half = len(held_out) // 2
        self._probe, self._truth = (
            list(windows(part, count * _BATCH, _LENGTH, generator(0, which)).split(_BATCH))
            for which, (part, count) in enumerate(((held_out[:half], _PROBE), (held_out[half:], _TRUTH)))
        )
        self._backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
        if case.loop == "accelerate":
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            prepared = accelerator.prepare(self.model, *self.optimizers)
            self.model, self.optimizers = prepared[0], list(prepared[1:])
            self._backward = accelerator.backward
            self.model = self.measured = accelerator.unwrap_model(self.model)
        if case.extra is not None:
            case.extra(self)

    def _loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        wide = torch.promote_types(
            logits.dtype, torch.float32
        )  # a loss of bfloat16 has steps of half a per cent
        return F.cross_entropy(logits.to(wide), tokens[:, 1:].flatten())

    def batch(self, index: int) -> torch.Tensor:
        """Tokens of one step."""
        return windows(self._text, _BATCH, _LENGTH, generator(self._seed, index))

    def step(self, index: int) -> None:
        """One step; LBFGS evaluates its closure oftener than once."""
        self.model.train()

        def closure() -> torch.Tensor:
            self.model.zero_grad()
            loss = self._loss(self.model, self.batch(index))
            self._backward(loss)
            return loss

        if isinstance(self.optimizers[0], torch.optim.LBFGS):
            self.optimizers[0].step(closure)
        else:
            closure()
            for optimizer in self.optimizers:
                optimizer.step()
        self.after_step(index)

    def probe(self) -> float:
        """The loss that the library measures with."""
        return self._mean(self._probe)

    def truth(self) -> float:
        """The loss on other held-out text."""
        return self._mean(self._truth)

    @torch.no_grad()
    def _mean(self, batches: list[torch.Tensor]) -> float:
        self.measured.eval()
        return math.fsum(float(self._loss(self.measured, batch)) for batch in batches) / len(batches)


class ResnetRun:
    """The ResNet of the bench of the bound in its first steps, with the optimizer of the case."""

    def __init__(self, case: Case, seed: int, quick: bool) -> None:
        kind = KINDS["resnet"]
        training = kind.build(seed, kind, quick)
        self.model, self.probe, self.truth = training.model, training.probe, training.final
        training.scheduler = None
        training.optimizers = self.optimizers = case.build(training.model)
        self.stateful: Mapping[str, Any] = {}
        self.step = training.step


def build(case: Case, seed: int, quick: bool) -> Run:
    """A new training."""
    return ResnetRun(case, seed, quick) if case.model == "resnet" else GptRun(case, seed, quick)


def undisturbed_losses(case: Case, seeds: Sequence[int], quick: bool) -> list[float]:
    """What runs without a restore end with, of these seeds of the initial weights and of the batches' order."""
    saves = 3 if quick else SAVES
    losses = []
    for seed in seeds:
        if case.loop == "transformers":
            losses.append(_trained_with_trainer(case, seed, quick, None, [case.every(quick) * saves]).loss)
            continue
        run = build(case, seed, quick)
        for index in range(case.every(quick) * saves):
            run.step(index)
        losses.append(run.truth())
    return losses


def measured_run(case: Case, seed: int, quick: bool) -> Outcome:
    """Train with saves; after each a process of its own, as it were, goes on from it.

    Raises:
        RuntimeError: a checkpoint was not restored.
    """
    every, saves = case.every(quick), 3 if quick else SAVES
    with tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/run"
        if case.loop == "transformers":
            ends = [every * number for number in range(1, saves + 1)]
            return _trained_with_trainer(case, seed, quick, url, ends)
        reports = []
        for number in range(saves):
            run = build(case, seed, quick)
            checkpointer = Checkpointer(
                url, run.model, list(run.optimizers), evaluate=run.probe, **run.stateful
            )
            if checkpointer.resume() != number * every:
                raise RuntimeError(f"the checkpoint of step {number * every} was not restored")
            for index in range(number * every, (number + 1) * every):
                run.step(index)
                checkpointer.step(index + 1)
            checkpointer.save((number + 1) * every, wait=True)
            reports += [report.to_json() for report in checkpointer.reports()]
            checkpointer.close()
        return Outcome(reports, run.truth())


# ---- Hugging Face's Trainer


class _Tokens(nn.Module):
    """The GPT as the Trainer calls models."""

    def __init__(self, run: GptRun) -> None:
        super().__init__()
        self.inner = run.model
        self._losses = [run._loss]

    def forward(self, tokens: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        """The loss of a batch."""
        return {"loss": self._losses[0](self.inner, tokens)}


def _trained_with_trainer(
    case: Case, seed: int, quick: bool, url: str | None, ends: Sequence[int]
) -> Outcome:
    """Train with a Trainer that ends after each of these steps, and with a new one from there."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from shrinkpoint.callbacks.transformers import CompressedCheckpoint

    class StopsAt(TrainerCallback):  # type: ignore[misc]
        def __init__(self, step: int) -> None:
            self.step = step

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = control.should_training_stop or state.global_step == self.step

    for end in ends:
        run = GptRun(case, seed, quick)
        train = [{"tokens": row, "labels": 0} for i in range(ends[-1]) for row in run.batch(i)]
        held_out = [{"tokens": row, "labels": 0} for batch in run._probe for row in batch]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=ends[-1],
                per_device_train_batch_size=_BATCH,
                per_device_eval_batch_size=_BATCH,
                save_strategy="no" if url is None else "steps",
                save_steps=case.every(quick),
                eval_strategy="steps",
                eval_steps=case.every(quick),
                lr_scheduler_type="constant",
                max_grad_norm=1e9,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                seed=seed,
                logging_strategy="no",
            )
            saving = [] if url is None else [CompressedCheckpoint(url, save_top_k=-1, busy="wait")]
            trainer = Trainer(
                _Tokens(run),
                arguments,
                train_dataset=train,
                eval_dataset=held_out,
                optimizers=(run.optimizers[0], None),
                callbacks=[StopsAt(end), *saving],
            )
            trainer.train()
            if trainer.state.global_step != end:
                raise RuntimeError(f"the Trainer ended at step {trainer.state.global_step}, not {end}")
    manifests = [] if url is None else RunStore(url).manifests()
    return Outcome([manifest.meta["save"] for manifest in reversed(manifests)], run.truth())


# ---- what else is trained


def ema(run: GptRun) -> None:
    """An exponential average of the weights; it is what is measured."""
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    run.stateful["ema"], run.measured = average, average.module
    run.after_step = lambda index: average.update_parameters(run.model)


def swa(run: GptRun) -> None:
    """Stochastic weight averaging from a third of the training on, every ten steps."""
    average = AveragedModel(run.model)
    run.stateful["swa"] = average

    def update(index: int) -> None:
        if index >= SAVES * EVERY // 3 and index % 10 == 0:
            average.update_parameters(run.model)

    run.after_step = update


@dataclass
class Buffer:
    """A replay buffer to which every step adds rows: an observation of 32 float32, of a random walk, and what it was worth."""

    observations: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 32))
    rewards: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, index: int) -> None:
        """The rows of one step."""
        rows = torch.randn(8, 32, generator=generator(7, index)).cumsum(0)
        self.observations = torch.cat([self.observations, rows])
        self.rewards = torch.cat([self.rewards, rows.square().mean(1)])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All rows."""
        return {"observations": self.observations, "rewards": self.rewards}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take them back."""
        self.observations, self.rewards = state["observations"], state["rewards"]


def replay(run: GptRun) -> None:
    """A replay buffer that grows with every step."""
    buffer = Buffer()
    run.stateful["replay"] = buffer
    run.after_step = buffer.add
