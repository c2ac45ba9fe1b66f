"""A Trainer that goes on using batches which it has generated, as TRL's for GRPO do, continues exactly."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from shrinkpoint.config import Advanced

pytest.importorskip("transformers")

from support.transformers_models import VOCABULARY, Setup, assert_continues, train
from transformers import Trainer, TrainerCallback

from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.errors import ShrinkpointWarning


class Following(TrainerCallback):  # type: ignore[misc]
    """As TRL's ``SyncRefModelCallback``."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step % 2 == 0:
            for mine, trained in zip(self.reference.parameters(), more["model"].parameters(), strict=True):
                mine.data.mul_(0.4).add_(trained.data, alpha=0.6)


class Generating(Trainer):  # type: ignore[misc]
    """As TRL's ``GRPOTrainer``: its own count of passes, and generated batches that serve several of them."""

    num_iterations = 2
    extra: Any = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.args.steps_per_generation = 3
        self.args.sync_ref_model = True
        self._step = 0
        self._buffered_inputs: Any = None
        self.ref_model = copy.deepcopy(self.model).eval()
        self.add_callback(Following(self.ref_model))

    def training_step(self, *args: Any, **options: Any) -> Any:
        loss = super().training_step(*args, **options)
        self._step += 1
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(inputs)
        count = self.args.steps_per_generation
        if self._step % (count * self.num_iterations) == 0 or self._buffered_inputs is None:
            generated = [torch.randint(VOCABULARY, (4, 10)) for _ in range(count)]
            made = [{"input_ids": ids, "labels": ids.clone()} for ids in generated]
            self._buffered_inputs = [super(Generating, self)._prepare_inputs(each) for each in made]
            for each in self._buffered_inputs:
                each["kind"] = self.extra
        batch = dict(self._buffered_inputs[self._step % count])
        batch.pop("kind")
        return batch

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], labels=inputs["labels"])
        loss = outputs.loss
        if model.training:
            with torch.no_grad():
                reference = self.ref_model(input_ids=inputs["input_ids"]).logits
            loss = loss + (outputs.logits - reference).square().mean()
        return (loss, outputs) if return_outputs else loss


class Objects(Generating):
    """What it keeps of each batch cannot be stored."""

    extra = object()


class Comparing(Generating):
    """Train as TRL's ``DPOTrainer`` does: with a reference that stays as the script has built it."""

    built = 0.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.args.sync_ref_model = False
        self.remove_callback(Following)
        self.reward_funcs = [len, copy.deepcopy(self.ref_model)]  # a list, as GRPOTrainer has
        for other in (self.ref_model, self.reward_funcs[1]):
            for parameter in other.parameters():
                parameter.data.add_(self.built)


def _ours(folder: Path) -> CompressedCheckpoint:
    return CompressedCheckpoint(
        str(folder), every_n_train_steps=1, scheme="lossless", advanced=Advanced(busy="wait")
    )


@pytest.mark.parametrize("crash", [6, 8, 10])
def test_goes_on_with_the_same_batches_and_the_same_reference(tmp_path: Path, crash: int) -> None:
    setup = Setup(arguments=(("num_train_epochs", 2), ("gradient_accumulation_steps", 1)))
    whole = train(setup, str(tmp_path / "whole"), trainer_class=Generating)
    train(setup, str(tmp_path / "a"), _ours(tmp_path / "run"), crash=crash, trainer_class=Generating)
    rest = train(setup, str(tmp_path / "b"), _ours(tmp_path / "run"), seed=2, trainer_class=Generating)
    assert rest.steps[0][0] == crash + 1
    assert_continues(whole, rest)


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 6), (4, 3)])
def test_says_where_a_resume_is_exact_if_the_batches_cannot_be_stored(
    tmp_path: Path, accumulated: int, steps: int
) -> None:
    arguments = (("num_train_epochs", 2), ("gradient_accumulation_steps", accumulated))
    with pytest.warns(
        ShrinkpointWarning, match=f"Objects has generated.*exact at multiples of {steps} steps"
    ):
        train(Setup(arguments=arguments), str(tmp_path / "a"), _ours(tmp_path / "run"), trainer_class=Objects)


@pytest.mark.parametrize("built", [0.0, 0.5])
def test_a_reference_that_is_built_otherwise_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, built: float
) -> None:
    train(Setup(), str(tmp_path / "a"), _ours(tmp_path / "run"), crash=4, trainer_class=Comparing)
    monkeypatch.setattr(Comparing, "built", built)
    rest = train(Setup(), str(tmp_path / "b"), _ours(tmp_path / "run"), crash=6, trainer_class=Comparing)
    assert rest.steps[0][0] == 5
    told = [str(one.message) for one in recwarn if "has other weights" in str(one.message)]
    named = [name for name in ("ref_model", "reward_funcs") if any(f"trainer.{name} " in one for one in told)]
    assert len(told) == len(named) == (2 if built else 0)
