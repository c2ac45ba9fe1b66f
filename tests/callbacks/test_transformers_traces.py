"""Measuring by the trainer's own ``compute_loss`` leaves no trace in what it writes down."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shrinkpoint.config import Advanced

pytest.importorskip("transformers")

from support.traces import CALLS, Lasting, Traces
from support.transformers_models import VOCABULARY, Texts
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from shrinkpoint.callbacks.transformers import CompressedCheckpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


class Noting(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.traces = Traces()


class Recording(Trainer):  # type: ignore[misc]
    noting: Noting
    lasting: Lasting | None = None

    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, **more)
        if self.lasting is not None:
            self.lasting.touch()
            return loss
        value = round((loss[0] if isinstance(loss, tuple) else loss).item(), 3)
        self.losses.append(value)
        self.traces.touch(value)
        model.traces.touch(value)
        self.noting.traces.touch(value)
        self.args.hub_token = f"{self.args.hub_token}x"
        self.state.log_history.append({"by_hand": value})
        self.log({"logged": value})
        return loss


def trained(
    folder: Path, *callbacks: Any, evaluates: bool = True, lasting: Lasting | None = None
) -> tuple[Any, ...]:
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
    trainer.losses, trainer.traces, trainer.noting, trainer.lasting = [], Traces(), noting, lasting  # type: ignore[attr-defined]
    trainer.train()
    history = [
        {name: value for name, value in row.items() if "runtime" not in name and "per_second" not in name}
        for row in trainer.state.log_history
    ]
    seen = [trainer.traces.seen(), model.traces.seen(), noting.traces.seen(), str(trainer.losses)]  # type: ignore[attr-defined]
    return [*seen, str(history), trainer.args.hub_token], model.state_dict(), len(CALLS)


@pytest.mark.parametrize("evaluates", [True, False])
def test_what_the_loss_writes_down_is_as_without_the_callback(tmp_path: Path, evaluates: bool) -> None:
    plain = trained(tmp_path / "plain", evaluates=evaluates)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the quality of checkpoints")
        saving = CompressedCheckpoint(
            str(tmp_path / "run"), every_n_train_steps=5, advanced=Advanced(busy="wait")
        )
        saved = trained(tmp_path / "saved", saving, evaluates=evaluates)
    assert saved[2] > plain[2]  # it was measured
    assert plain[0] == saved[0]
    assert all(torch.equal(value, saved[1][name]) for name, value in plain[1].items())


@pytest.mark.parametrize("kind", ["file that is written", "iterator"])
def test_what_cannot_be_put_back_is_named_once_and_ends_measuring(tmp_path: Path, kind: str) -> None:
    *_, undisturbed = trained(tmp_path / "plain", lasting=Lasting(kind, tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saving = CompressedCheckpoint(
            str(tmp_path / "run"), every_n_train_steps=5, advanced=Advanced(busy="wait", probe_steps=0)
        )
        *_, calls = trained(tmp_path / "saved", saving, lasting=Lasting(kind, tmp_path))
    told = [str(each.message) for each in caught if "cannot be put back" in str(each.message)]
    assert len(told) == 1, told
    assert "of Lasting" in told[0]
    assert undisturbed < calls <= undisturbed + 2
