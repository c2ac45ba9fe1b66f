"""A run of Hugging Face's Trainer that adopts its checkpoints equals, after any interruption, the undisturbed one, bit by bit."""

import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.options import grouped

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.matrices import some_fast
from support.transformers_models import Setup, assert_continues, train

from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.transformers.settings import Settings
from shrinkpoint.saver import Saver
from shrinkpoint.session.triggers import Schedule

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",
)


@dataclass(frozen=True)
class Case:
    setup: Setup
    crashes: tuple[int, ...]
    begins: int
    """The first step of the continued run."""
    options: tuple[tuple[str, Any], ...] = ()


def with_arguments(**arguments: Any) -> Setup:
    return Setup(arguments=tuple(arguments.items()))


BEST = Setup(
    patience=4,
    arguments=(
        ("metric_for_best_model", "loss"),
        ("load_best_model_at_end", True),
        ("save_strategy", "steps"),
        ("save_steps", 5),
    ),
)
CASES = {
    "masking, mid epoch": Case(Setup(), (7,), 5),
    "masking, later epoch, twice": Case(Setup(), (7, 19), 17),
    "the last batch of an epoch": Case(Setup(), (12,), 12, (("every_n_train_steps", 11),)),
    "by epochs": Case(Setup(), (24,), 23, (("every_n_epochs", 1),)),
    "accumulation": Case(
        with_arguments(gradient_accumulation_steps=3, eval_steps=2), (7,), 6, (("every_n_train_steps", 5),)
    ),
    "plain samplers": Case(with_arguments(accelerator_config={"use_seedable_sampler": False}), (19,), 17),
    "masking in workers": Case(with_arguments(dataloader_num_workers=2), (19,), 17),
    "early stopping": Case(BEST, (12,), 11),
    "plateaus": Case(
        with_arguments(lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="loss"), (19,), 17
    ),
    "a stream": Case(
        Setup(data="stream", masking=False, arguments=(("max_steps", 14), ("eval_strategy", "no"))), (7,), 5
    ),
}
FAST = ("masking, mid epoch", "by epochs")


@pytest.mark.parametrize(
    "name", some_fast(CASES, FAST, ["accumulation", "masking in workers", "early stopping"])
)
def test_adopting_training_continues_bit_by_bit(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case, url = CASES[name], f"memory://transformers-adopt/{uuid.uuid4()}"

    def adopting(where: str) -> CompressedCheckpoint:
        return CompressedCheckpoint(
            f"{url}/{where}", **grouped(adopt=8, max_degradation=0.5, **dict(case.options))
        )

    whole = train(case.setup, str(tmp_path), adopting("whole"))
    for number, crash in enumerate(case.crashes):
        assert not train(case.setup, str(tmp_path), adopting("run"), crash=crash, seed=number).finished
    rest = train(case.setup, str(tmp_path), adopting("run"), seed=999)
    assert rest.steps[0][0] == case.begins
    assert_continues(whole, rest)
    manifests = Saver(f"{url}/whole").store.manifests()
    assert any(m.meta["adoption"]["planned"] and m.meta["save"]["measured"] == "measured" for m in manifests)


@pytest.mark.parametrize(
    ("options", "arguments", "planned"),
    [
        ({"every_n_train_steps": 5}, {"max_steps": 44}, 8),
        ({"every_n_train_steps": 5}, {"max_steps": -1}, None),
        ({"every_n_epochs": 2}, {"num_train_epochs": 5}, 2),
        ({}, {"save_strategy": "steps", "save_steps": 6, "max_steps": 44}, 7),
        ({}, {"save_strategy": "steps", "save_steps": 0.1, "max_steps": 44}, None),
        ({}, {"save_strategy": "epoch", "num_train_epochs": 3}, 3),
        ({}, {"save_strategy": "best", "max_steps": 44}, None),
    ],
)
def test_planned_saves_follow_from_the_trainers_limits(
    options: dict[str, int], arguments: dict[str, Any], planned: int | None
) -> None:
    settings = Settings(
        run=cast(Any, None), schedule=Schedule(**options) if options else None, keep_trainer_saves=False
    )
    known = {"save_strategy": "no", "save_steps": 500, "max_steps": -1, "num_train_epochs": 3, **arguments}
    assert settings.planned_for(SimpleNamespace(**known)) == planned


def test_adoption_is_refused_where_it_is_no_replay(tmp_path: Path) -> None:
    by_time = CompressedCheckpoint(
        "memory://transformers-adopt/clock", train_time_interval=timedelta(minutes=1), adopt=True
    )
    with pytest.raises(ConfigError, match="a clock would decide"):
        train(Setup(), str(tmp_path), by_time)
