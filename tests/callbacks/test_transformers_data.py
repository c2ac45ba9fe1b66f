"""A Trainer's run that is continued with other data says so, and goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shrinkpoint.config import Advanced

pytest.importorskip("transformers")

from support.transformers_models import Crash, Crashed, Texts
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from shrinkpoint.callbacks.transformers import CompressedCheckpoint
from shrinkpoint.errors import ShrinkpointWarning


def _train(folder: Path, length: int, crash: int | None = None, **options: Any) -> list[int]:
    torch.manual_seed(1)
    crashing = Crash(crash)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=4, use_cpu=True, report_to=[], **options
    )
    Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=1)),
        args=arguments,
        train_dataset=Texts(length),
        callbacks=[
            crashing,
            CompressedCheckpoint(
                str(folder / "run"), every_n_train_steps=1, scheme="lossless", advanced=Advanced(busy="wait")
            ),
        ],
    ).train()
    return [step for step, _ in crashing.steps]


@pytest.mark.parametrize("length", [12, 60])
def test_says_that_the_data_is_of_another_length(tmp_path: Path, length: int) -> None:
    with pytest.raises(Crashed):
        _train(tmp_path, 40, 7)
    said = rf"len\(dataset\) is {length} here and was 40, len\(loader\) is {length // 4} here and was 10"
    with pytest.warns(ShrinkpointWarning, match=said):
        steps = _train(tmp_path, length)
    assert steps == list(range(8, 3 * length // 4 + 1))


def test_says_that_batches_and_workers_are_others(tmp_path: Path) -> None:
    with pytest.raises(Crashed):
        _train(tmp_path, 40, 3)
    with pytest.warns(ShrinkpointWarning, match="num_workers is 1 here and was 0"):
        _train(tmp_path, 40, dataloader_num_workers=1, num_train_epochs=1)
