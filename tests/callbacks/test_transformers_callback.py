"""What the callback for Hugging Face's Trainer saves, refuses, and leaves alone."""

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped

from shrinkpoint.config import Advanced

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.transformers_models import Setup, Texts, train
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.errors import ConfigError, ShrinkpointWarning
from shrinkpoint.saver import Saver
from shrinkpoint.state.training import Role

pytestmark = pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")

BEST = (
    ("metric_for_best_model", "loss"),
    ("load_best_model_at_end", True),
    ("save_strategy", "steps"),
    ("save_steps", 5),
    ("max_steps", 15),
    ("learning_rate", 0.3),  # so that it gets worse
)


def fresh() -> str:
    return f"memory://transformers-callback/{uuid.uuid4()}"


def saving(url: str, **options: Any) -> CompressedCheckpoint:
    return CompressedCheckpoint(url, **grouped(**{"scheme": "lossless", "busy": "wait", **options}))


def steps(url: str) -> list[int]:
    return sorted(manifest.step for manifest in Saver(url).store.manifests())


def test_takes_the_place_of_the_trainers_own_checkpoints(tmp_path: Path) -> None:
    url = fresh()
    setup = Setup(arguments=(("max_steps", 9),))
    callback = saving(url, save_top_k=-1)
    train(setup, str(tmp_path), callback)
    assert steps(url) == [4, 8, 9]
    assert not list(tmp_path.glob("checkpoint-*"))
    assert callback.last_model_path == f"{url}#step=9"


def test_the_trainers_own_checkpoints_can_be_kept(tmp_path: Path) -> None:
    url = fresh()
    callback = saving(url, save_top_k=-1, every_n_train_steps=3, keep_trainer_saves=True)
    train(Setup(arguments=(("max_steps", 7),)), str(tmp_path), callback)
    assert steps(url) == [3, 6, 7]
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").exists()


def test_another_trainer_is_left_alone(tmp_path: Path) -> None:
    train(Setup(arguments=(("max_steps", 4),)), str(tmp_path))
    assert (tmp_path / "checkpoint-4").exists()


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_loads_the_best_model_from_the_store(tmp_path: Path, strategy: str) -> None:
    arguments = (*BEST, ("save_strategy", strategy))
    own = train(Setup(masking=False, arguments=BEST), str(tmp_path / "own"))
    url = fresh()
    ours = train(Setup(masking=False, arguments=arguments), str(tmp_path / "ours"), saving(url))
    assert all(torch.equal(own.weights[name], ours.weights[name]) for name in own.weights)
    assert not list((tmp_path / "ours").glob("checkpoint-*"))


def test_the_best_is_loaded_after_a_crash_too(tmp_path: Path) -> None:
    own = train(Setup(masking=False, arguments=BEST), str(tmp_path / "own"))
    url = fresh()
    setup = Setup(masking=False, arguments=BEST)
    train(setup, str(tmp_path / "ours"), saving(url), crash=12)
    ours = train(setup, str(tmp_path / "ours"), saving(url), seed=999)
    assert ours.steps[0][0] == 11
    assert all(torch.equal(own.weights[name], ours.weights[name]) for name in own.weights)


def test_a_monitor_that_contradicts_the_trainer_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metric_for_best_model"):
        train(Setup(arguments=BEST), str(tmp_path), saving(fresh(), monitor="accuracy"))


def test_shards_are_refused_at_construction() -> None:
    arguments = type("Arguments", (), {"deepspeed": "zero3.json", "fsdp": ""})()
    callback: Any = saving(fresh())
    with pytest.raises(ConfigError, match="deepspeed"):
        callback.on_init_end(arguments, None, None)


def test_another_schedule_is_warned_of(tmp_path: Path) -> None:
    """The Trainer's schedulers are of one class, and differ in their functions."""
    url, short = fresh(), (("max_steps", 4), ("eval_strategy", "no"))
    train(Setup(arguments=short), str(tmp_path), saving(url))
    other = Setup(arguments=(*short, ("max_steps", 8), ("lr_scheduler_type", "cosine")))
    with pytest.warns(ShrinkpointWarning, match="another learning rate scheduler.*linear.*cosine.* here"):
        assert train(other, str(tmp_path), saving(url)).finished


def test_two_of_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of them"):
        train(Setup(), str(tmp_path), saving(fresh()), saving(fresh()))


def test_auto_compresses_and_measures(tmp_path: Path) -> None:
    """Moments are known as such behind accelerate's wrapper, and evaluations leave no trace."""
    url = fresh()
    setup = Setup(arguments=(("max_steps", 12), ("save_steps", 5)))
    plain = train(setup, str(tmp_path / "plain"))
    callback = CompressedCheckpoint(url, advanced=Advanced(busy="wait", guards=False))
    ours = train(setup, str(tmp_path / "ours"), callback)
    assert all(torch.equal(plain.weights[name], ours.weights[name]) for name in plain.weights)
    assert plain.history == ours.history
    assert plain.random == ours.random
    saver = Saver(url)
    restored = saver.restore()
    assert restored is not None
    roles = {spec.tag.role for spec in restored.state.specs.values()}
    assert {Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ} <= roles
    assert restored.manifest.meta["save"]["measured"] == "measured"


class Counting(Trainer):  # type: ignore[misc]
    """Notes in `compute_loss`, as trainers of other libraries do."""

    noted: list[Any]
    latest: "Counting"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Counting.latest = self

    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        self.noted = [*getattr(self, "noted", []), "loss"]
        vars(self).setdefault("metrics", {"train": []})["train"].append(1)
        return super().compute_loss(model, inputs, **more)


def test_what_a_trainer_notes_while_it_computes_a_loss_is_of_the_training_alone(tmp_path: Path) -> None:
    counts = []
    for callbacks in (
        [],
        [CompressedCheckpoint(fresh(), every_n_train_steps=3, advanced=Advanced(busy="wait"))],
    ):
        setup = Setup(arguments=(("max_steps", 7),))
        train(setup, str(tmp_path), *callbacks, trainer_class=Counting)
        trainer = Counting.latest
        counts.append((len(trainer.noted), len(vars(trainer)["metrics"]["train"])))
    assert counts[0] == counts[1]


def test_a_callback_that_is_added_later_works_too(tmp_path: Path) -> None:
    url = fresh()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, report_to=[], disable_tqdm=True, use_cpu=True
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=1))
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.add_callback(saving(url))
    trainer.train()
    assert steps(url) == [3]
    with pytest.warns(ShrinkpointWarning, match="is complete"):
        trainer.train()
    assert trainer.state.global_step == 3


def test_objects_that_accelerate_prepared_work_with_a_checkpointer(tmp_path: Path) -> None:
    from accelerate import Accelerator

    def loop(url: str, stop: int) -> tuple[int, dict[str, torch.Tensor]]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(1)
        model = nn.Linear(10, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        data = torch.utils.data.DataLoader(torch.randn(20, 10), batch_size=4)
        model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
        checkpointer = Checkpointer(
            url,
            accelerator.unwrap_model(model),
            optimizer,
            every=4,
            scheduler=scheduler,
            scheme="lossless",
            advanced=Advanced(busy="wait"),
        )
        begins = checkpointer.resume()
        for step in range(begins, stop):
            batch = list(data)[step % 5] + torch.rand(4, 10)
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            checkpointer.step(step + 1)
        checkpointer.close()
        return begins, {name: value.clone() for name, value in model.state_dict().items()}

    _, whole = loop(str(tmp_path / "whole"), 11)
    loop(str(tmp_path / "run"), 6)
    begins, rest = loop(str(tmp_path / "run"), 11)
    assert begins == 6
    assert all(torch.equal(whole[name], rest[name]) for name in whole)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"step_log": "exact"},
            r"step_log: .* no such option; this callback logs no steps.*docs/resuming\.md",
        ),
        ({"step_logs": "exact"}, r"step_logs: CompressedCheckpoint has no such option$"),
    ],
)
def test_there_is_no_step_log(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompressedCheckpoint("memory://unused/run", **grouped(**option))
