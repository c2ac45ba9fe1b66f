"""What a model has tied and a checkpoint has not is found before anything is loaded, by the callbacks too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shrinkpoint.errors import ShrinkpointWarning, StateMismatchError

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_lightning(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    class Module(BoringModel):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            if tied:
                self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(self.second(self.first(x)))

        def configure_optimizers(self) -> Any:  # groups say nothing of the ties
            return torch.optim.SGD(self.layer.parameters(), lr=0.1)

    def fit(url: Path, steps: int, tied: bool) -> Module:
        module = Module(tied)
        callback = CompressedCheckpoint(str(url), scheme="lossless", every_n_train_steps=2)
        trainer = Trainer(
            max_steps=steps, limit_val_batches=0, callbacks=[callback], accelerator="cpu", **QUIET
        )
        trainer.fit(module)
        return module

    fit(tmp_path / "separate", 2, tied=False)
    with pytest.raises(StateMismatchError, match=r"first\.weight and second\.weight are separate"):
        fit(tmp_path / "separate", 4, tied=True)
    fit(tmp_path / "tied", 2, tied=True)
    with pytest.warns(ShrinkpointWarning, match=r"first\.weight and second\.weight are tied"):
        module = fit(tmp_path / "tied", 4, tied=False)
    assert torch.equal(module.first.weight, module.second.weight)


def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from shrinkpoint.callbacks.transformers import CompressedCheckpoint

    texts = [{"input_ids": [i % 16] * 8, "labels": [i % 16] * 8} for i in range(32)]

    def train(url: Path, steps: int, tied: bool) -> None:
        config = GPT2Config(
            vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=1, tie_word_embeddings=tied
        )
        model = GPT2LMHeadModel(config)
        more = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
        arguments = TrainingArguments(str(tmp_path / "out"), max_steps=steps, save_steps=2, **more)
        optimizer = torch.optim.SGD(model.transformer.h.parameters(), lr=0.1)
        callback = CompressedCheckpoint(str(url), scheme="lossless")
        Trainer(
            model,
            arguments,
            train_dataset=texts,
            callbacks=[callback],
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        ).train()

    train(tmp_path / "separate", 2, tied=False)
    with pytest.raises(StateMismatchError, match=r"are separate tensors with different values"):
        train(tmp_path / "separate", 4, tied=True)
    train(tmp_path / "tied", 2, tied=True)
    with pytest.warns(ShrinkpointWarning, match="are tied, one tensor, in the checkpoint"):
        train(tmp_path / "tied", 4, tied=False)
