"""A run of Hugging Face's Trainer that was interrupted and continues by itself equals one that was not, bit by bit.

The continuing process has generators in another state; the uninterrupted one never sees our callback.
"""

import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.matrices import some_fast
from support.mixed_optimizer import MixedSGD
from support.transformers_models import Outcome, Setup, assert_continues, train
from transformers import Trainer

from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.errors import ShrinkpointWarning

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",
    "error::shrinkpoint.errors.ShrinkpointWarning",
)


@dataclass(frozen=True)
class Case:
    setup: Setup
    crashes: tuple[int, ...]
    begins: int
    """The first step of the continued run."""
    every: int | None = None
    """Steps between saves; None takes the trainer's ``save_steps``, 4."""
    epochs: int | None = None


def with_arguments(**arguments: Any) -> Setup:
    return Setup(arguments=tuple(arguments.items()))


CASES = {
    "masking, mid epoch": Case(Setup(), (7,), 5),
    "masking, later epoch, twice": Case(Setup(), (7, 19), 17),
    "every step": Case(Setup(), (14,), 15, every=1),
    "the last batch of an epoch": Case(Setup(), (12,), 12, every=11),
    "by epochs": Case(Setup(), (24,), 23, epochs=1),
    "accumulation": Case(with_arguments(gradient_accumulation_steps=3, eval_steps=2), (7,), 6, every=5),
    "plain samplers": Case(with_arguments(accelerator_config={"use_seedable_sampler": False}), (19,), 17),
    "a collator with a generator": Case(Setup(mask_seed=3), (19,), 17),
    "a collator with a generator, first epoch": Case(Setup(mask_seed=3), (7,), 5),
    "masking in workers": Case(with_arguments(dataloader_num_workers=2), (19,), 17),
    "workers without randomness": Case(
        Setup(masking=False, arguments=(("dataloader_num_workers", 1),)), (19,), 17
    ),
    "early stopping": Case(
        Setup(
            patience=4,
            arguments=(
                ("metric_for_best_model", "loss"),
                ("load_best_model_at_end", True),
                ("save_strategy", "steps"),
                ("save_steps", 5),
            ),
        ),
        (12,),
        11,
    ),
    "evaluation by epochs": Case(with_arguments(eval_strategy="epoch", logging_strategy="epoch"), (18,), 17),
    "plateaus": Case(
        with_arguments(lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="loss"), (19,), 17
    ),
    "a classifier": Case(Setup(model="bert", masking=False), (7,), 5),
    "a stream": Case(
        Setup(data="stream", masking=False, arguments=(("max_steps", 14), ("eval_strategy", "no"))), (7,), 5
    ),
}


FAST = (
    "masking, later epoch, twice",
    "accumulation",
    "a collator with a generator, first epoch",
    "masking in workers",
    "a stream",
)
"""Those that the fast suite tries."""

UNINTERRUPTED: dict[str, Outcome] = {}


def uninterrupted(setup: Setup, folder: Path) -> Outcome:
    name = repr(setup)
    if name not in UNINTERRUPTED:
        UNINTERRUPTED[name] = train(setup, str(folder / "whole"))
    return UNINTERRUPTED[name]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("output")


def saving(url: str, **options: Any) -> CompressedCheckpoint:
    return CompressedCheckpoint(
        url, **grouped(**{"scheme": "lossless", "busy": "wait", "keep_last": 2, **options})
    )


def fresh() -> str:
    return f"memory://transformers-resume/{uuid.uuid4()}"


@pytest.mark.parametrize("name", some_fast(CASES, FAST))
def test_continues_bit_by_bit(name: str, folder: Path) -> None:
    case, url = CASES[name], fresh()
    options = {"every_n_train_steps": case.every, "every_n_epochs": case.epochs}
    for number, crash in enumerate(case.crashes):
        first = train(case.setup, str(folder / "run"), saving(url, **options), crash=crash, seed=number)
        assert not first.finished
    rest = train(case.setup, str(folder / "run"), saving(url, **options), seed=999)
    assert rest.steps[0][0] == case.begins
    assert_continues(uninterrupted(case.setup, folder), rest)
    assert not list((folder / "run").glob("checkpoint-*"))


@pytest.mark.parametrize("steps", some_fast([5, 11, 16], [5], [11]))
def test_a_longer_run_continues_a_finished_one(steps: int, folder: Path) -> None:
    # Since version 5 the trainer evaluates once more at the end, and masks at random for it.
    setup, url = with_arguments(max_steps=22, lr_scheduler_type="constant", eval_strategy="no"), fresh()
    short = replace(setup, arguments=(*setup.arguments, ("max_steps", steps)))
    assert train(short, str(folder / "run"), saving(url)).finished
    rest = train(setup, str(folder / "run"), saving(url), seed=999)
    assert rest.steps[0][0] == steps + 1
    assert_continues(uninterrupted(setup, folder), rest)


@pytest.mark.parametrize("setup", [with_arguments(max_steps=13), CASES["early stopping"].setup])
def test_a_finished_run_that_is_started_again_trains_no_step(setup: Setup, folder: Path) -> None:
    url = fresh()
    whole = train(setup, str(folder / "run"), saving(url))
    with pytest.warns(ShrinkpointWarning, match="is complete"):
        again = train(setup, str(folder / "run"), saving(url), seed=999)
    assert again.finished
    assert again.steps == []
    assert again.state["global_step"] == whole.state["global_step"] == whole.steps[-1][0]
    assert whole.weights.keys() == again.weights.keys()
    assert all(torch.equal(whole.weights[name], again.weights[name]) for name in whole.weights)


def test_a_trainers_own_folder_wins(folder: Path) -> None:
    setup = with_arguments(max_steps=9)
    train(setup, str(folder / "own"))
    url = fresh()
    rest = train(setup, str(folder / "own"), saving(url), resume=str(folder / "own" / "checkpoint-4"))
    assert rest.finished
    assert rest.steps[0][0] == 5


def test_an_address_of_ours_is_continued(folder: Path) -> None:
    setup, url = with_arguments(max_steps=14), fresh()
    train(setup, str(folder / "run"), saving(url, keep_last=9), crash=13)
    rest = train(setup, str(folder / "run"), saving(url, keep_last=9), resume=f"{url}#step=4", seed=999)
    assert rest.steps[0][0] == 5
    assert_continues(uninterrupted(setup, folder), rest)


def test_true_continues_the_run(folder: Path) -> None:
    setup, url = with_arguments(max_steps=9), fresh()
    train(setup, str(folder / "true"), saving(url), crash=6)
    rest = train(setup, str(folder / "true"), saving(url), resume=True, seed=999)
    assert rest.steps[0][0] == 5
    assert_continues(uninterrupted(setup, folder), rest)


class Scaled(Trainer):  # type: ignore[misc]
    """Scales its losses, as a training in half precision does; on a CPU, accelerate makes no scaler by itself."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        scalers.append(self.accelerator.scaler)


scalers: list[torch.amp.GradScaler] = []


def test_the_gradient_scaler_continues(tmp_path: Path) -> None:
    """Its scale grows after every third step, and its count of steps goes on in the middle of that."""
    scalers.clear()
    setup = with_arguments(max_grad_norm=0.0)
    run = {"every_n_train_steps": 4, "scheme": "lossless", "busy": "wait"}
    whole = train(setup, str(tmp_path / "whole"), trainer_class=Scaled)
    url = str(tmp_path / "run")
    train(
        setup,
        str(tmp_path / "killed"),
        CompressedCheckpoint(url, **grouped(**run)),
        crash=8,
        seed=2,
        trainer_class=Scaled,
    )
    rest = train(
        setup,
        str(tmp_path / "rest"),
        CompressedCheckpoint(url, **grouped(**run)),
        seed=3,
        trainer_class=Scaled,
    )
    assert rest.steps[0][0] == 9
    assert_continues(whole, rest)
    undisturbed, killed, continued = (scaler.state_dict() for scaler in scalers)
    assert killed["scale"] == 16.0
    assert killed["_growth_tracker"] == 2
    assert continued == undisturbed
    assert continued["scale"] == 2.0**13


class Mixed(Trainer):  # type: ignore[misc]
    """Trains weights in bfloat16 with an optimizer that has fp32 copies of them."""

    def create_optimizer(self, *given: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.model.bfloat16()
            self.optimizer = MixedSGD(self.model.parameters())
        return self.optimizer


def test_the_fp32_state_of_half_precision_weights_comes_back_unrounded(tmp_path: Path) -> None:
    setup, url = with_arguments(max_steps=9), fresh()
    whole = train(setup, str(tmp_path / "whole"), trainer_class=Mixed)
    train(setup, str(tmp_path / "run"), saving(url), crash=6, trainer_class=Mixed)
    rest = train(setup, str(tmp_path / "run"), saving(url), seed=999, trainer_class=Mixed)
    assert rest.steps[0][0] == 5
    assert rest.optimizer["state"][0]["master"].dtype is torch.float32
    assert_continues(whole, rest)
