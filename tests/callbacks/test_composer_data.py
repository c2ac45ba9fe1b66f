"""Composer's callback with data and models of other kinds."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("composer")

from composer import ComposerModel, DataSpec, Trainer
from composer.loggers import InMemoryLogger
from support.composer_callbacks import Make, url_of
from support.composer_models import Crash, Preempted, assert_same
from torch.utils.data import DataLoader, TensorDataset

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.saver import Saver


class Classifier(ComposerModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any, *_: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs, batch[1])


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(2, (8,), generator=generator))
        for _ in range(6)
    ]


class Indexed:
    """A sequence of batches, iterable by its numbers alone."""

    def __getitem__(self, index: int) -> Any:
        return batches()[index]

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize(
    "data", [batches, Indexed, lambda: iter(batches()), lambda: DataLoader(TensorDataset(*batches()[0]), 2)]
)
def test_any_iterable_will_do(saving: Make, data: Callable[[], Any]) -> None:
    weights: list[Any] = []

    def run(*callbacks: Any, seed: int) -> None:
        torch.manual_seed(seed)
        model = Classifier()
        trainer = Trainer(
            model=model,
            train_dataloader=DataSpec(data(), get_num_samples_in_batch=lambda _: 8),
            optimizers=torch.optim.Adam(model.parameters(), 0.1),
            max_duration="6ba",
            device_train_microbatch_size=8,
            callbacks=list(callbacks),
            progress_bar=False,
            seed=seed,
            device="cpu",
        )
        try:
            trainer.fit()
            weights.append(model.net.weight.detach().clone())
        except Preempted:
            pass
        finally:
            trainer.close()

    run(seed=1)
    run(saving(save_interval="2ba"), Crash(3), seed=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the order of the samples", ShrinkpointWarning)
        run(saving(save_interval="2ba"), seed=2)
    assert_same(weights[0], weights[1])


def test_a_language_model_of_transformers(saving: Make, warned_in_background: list[Warning]) -> None:
    pytest.importorskip("transformers")
    from composer.models import HuggingFaceModel
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(256, (16, 12), generator=torch.Generator().manual_seed(0))

    def run(*callbacks: Any, seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=256, n_positions=16, n_embd=64, n_layer=2, n_head=2, loss_type="ForCausalLM"
        )
        model = HuggingFaceModel(GPT2LMHeadModel(config))
        data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_size=4, shuffle=True),  # type: ignore[arg-type]
            eval_dataloader=DataLoader(data[:4], batch_size=4),  # type: ignore[arg-type]
            eval_interval="1ba",
            optimizers=torch.optim.AdamW(model.parameters(), 1e-3),
            max_duration="2ep",
            callbacks=list(callbacks),
            progress_bar=False,
            seed=seed,
            device="cpu",
            **options,
        )
        try:
            trainer.fit()
        except Preempted:
            pass
        finally:
            trainer.close()
        return {name: value.clone() for name, value in model.state_dict().items()}

    whole = run(seed=1)
    run(saving(save_interval="3ba"), Crash(5), seed=1)
    assert_same(whole, run(saving(save_interval="3ba"), seed=2))

    logger = InMemoryLogger()
    measured = saving(scheme="inshrinkerator", resume="never")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        run(measured, seed=1, loggers=[logger])
    told, *exact = map(str, warned_in_background)
    assert "that this training does not continue" in told
    assert all("is stored exactly: " in each for each in exact)
    warned_in_background.clear()
    assert logger.data["checkpoint/degradation"]
    manifest = Saver(url_of(measured)).store.manifests()[0]
    weights = 4 * sum(value.numel() for name, value in whole.items() if name != "model.lm_head.weight")
    assert manifest.meta["save"]["raw_sections"]["weight"] == weights  # tied ones once


@pytest.mark.parametrize("length", [16, 80])
@pytest.mark.parametrize("shuffle", [False, True])
def test_other_data_is_told_and_an_epoch_that_is_too_short_left(
    saving: Make, length: int, shuffle: bool
) -> None:
    def fit(points: int, *callbacks: Any) -> Trainer:
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(
            torch.randn(points, 4, generator=generator), torch.randint(2, (points,), generator=generator)
        )
        trainer = Trainer(
            model=Classifier(),
            train_dataloader=DataLoader(data, batch_size=8, shuffle=shuffle),
            max_duration="3ep",
            device="cpu",
            progress_bar=False,
            callbacks=list(callbacks),
        )
        trainer.fit()
        return trainer

    with pytest.raises(Preempted):
        fit(48, saving(save_interval="1ba", busy="wait"), Crash(9))
    said = rf"len\(dataset\) is {length} here and was 48.*batches of an epoch is {length // 8} here and was 6"
    with pytest.warns(ShrinkpointWarning, match=said):
        trainer = fit(length, saving(save_interval="1ba"))
    assert trainer.state.timestamp.epoch == 3
    left = max(length // 8 - 2, 0)  # of the epoch in which it was preempted
    assert int(trainer.state.timestamp.batch) in (8 + left + length // 8, 9 + left - 1 + length // 8)
