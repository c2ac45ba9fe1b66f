"""A run of Hugging Face's Trainer that was interrupted and continues by itself equals one that was not, bit by bit.

The continuing process has generators in another state; the uninterrupted one never sees our callback.
"""

import uuid
import warnings
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
from support.transformers_models import Outcome, Setup, assert_continues, train

from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.errors import ConfigError, ShrinkpointWarning
from shrinkpoint.integrations.transformers.settings import Settings
from shrinkpoint.saver import Saver
from shrinkpoint.session.triggers import Schedule

pytestmark = pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")


@dataclass(frozen=True)
class Case:
    setup: Setup
    crashes: tuple[int, ...]
    begins: int
    """The first step of the continued run."""
    epochs: int | None = None
    every: int | None = None
    """Steps between saves; None takes the trainer's ``save_steps``, 4."""


def with_arguments(**arguments: Any) -> Setup:
    return Setup(arguments=tuple(arguments.items()))


CASES = {
    "masking, later epoch, twice": Case(Setup(), (7, 19), 17),
    "by epochs": Case(Setup(), (24,), 23, epochs=1),
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
        Setup(streamed=1000, masking=False, arguments=(("max_steps", 14), ("eval_strategy", "no"))), (7,), 5
    ),
    "the end of a stream's epoch": Case(
        Setup(streamed=16, arguments=(("max_steps", 14), ("eval_strategy", "no"))), (7,), 5
    ),
}


FAST = (
    "masking, later epoch, twice",
    "a collator with a generator, first epoch",
    "masking in workers",
    "a stream",
    "the end of a stream's epoch",
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
    options = {"every_n_epochs": case.epochs}
    for number, crash in enumerate(case.crashes):
        first = train(case.setup, str(folder / "run"), saving(url, **options), crash=crash, seed=number)
        assert not first.finished
    rest = train(case.setup, str(folder / "run"), saving(url, **options), seed=999)
    assert rest.steps[0][0] == case.begins
    assert_continues(uninterrupted(case.setup, folder), rest)
    assert not list((folder / "run").glob("checkpoint-*"))


ADOPTING = {
    "masking, mid epoch": Case(Setup(), (7,), 5),
    "the last batch of an epoch": Case(Setup(), (12,), 12, every=11),
    "accumulation": Case(with_arguments(gradient_accumulation_steps=3, eval_steps=2), (7,), 6, every=5),
    **{
        name: CASES[name]
        for name in ("masking, later epoch, twice", "by epochs", "plain samplers", "masking in workers")
    },
    **{name: CASES[name] for name in ("early stopping", "plateaus", "a stream")},
}
"""Cases that are tried with adoption: most of what a case is about, it does not touch."""


@pytest.mark.parametrize(
    "name",
    some_fast(
        ADOPTING,
        ("masking, mid epoch", "by epochs"),
        ["accumulation", "masking in workers", "early stopping"],
    ),
)
def test_adopting_training_continues_bit_by_bit(name: str, folder: Path) -> None:
    """With the default scheme, lossy as it is: the undisturbed run has gone on from its checkpoints, too."""
    case, url = ADOPTING[name], fresh()
    schedule = {"every_n_train_steps": case.every, "every_n_epochs": case.epochs}

    def adopting(where: str) -> CompressedCheckpoint:
        return CompressedCheckpoint(f"{url}/{where}", **grouped(adopt=8, max_degradation=0.5, **schedule))

    warnings.simplefilter("ignore", ShrinkpointWarning)
    whole = train(case.setup, str(folder / "adopting"), adopting("whole"))
    for number, crash in enumerate(case.crashes):
        assert not train(
            case.setup, str(folder / "adopting"), adopting("run"), crash=crash, seed=number
        ).finished
    rest = train(case.setup, str(folder / "adopting"), adopting("run"), seed=999)
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


def test_adoption_is_refused_where_it_is_no_replay(folder: Path) -> None:
    by_time = CompressedCheckpoint(fresh(), train_time_interval=timedelta(minutes=1), adopt=True)
    with pytest.raises(ConfigError, match="a clock would decide"):
        train(Setup(), str(folder / "run"), by_time)


def test_a_run_that_ended_early_trains_no_further_step(folder: Path) -> None:
    setup, url = CASES["early stopping"].setup, fresh()
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
