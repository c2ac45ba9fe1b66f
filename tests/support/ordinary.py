"""Checkpoints that real frameworks wrote, of trainings of a few steps."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

__all__ = ["composer_files", "lightning_files", "loop_files", "transformers_folders"]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))


def loop_files(folder: Path, count: int = 4, net: nn.Module | None = None) -> list[Path]:
    """Of a loop of one's own; without a step inside."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    net = net or Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    files = []
    for step in range(10, 10 * count + 10, 10):
        optimizer.zero_grad()
        net(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        files.append(folder / f"model-step={step}.pt")
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, files[-1])
    return files


def lightning_files(folder: Path) -> list[Path]:
    """Of Lightning's ``ModelCheckpoint``, of steps 10, 20, 30."""
    import lightning.pytorch as pl
    from support.lightning_models import QUIET, Points

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return (self.net(batch[1]) - batch[2]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    torch.manual_seed(0)
    save = pl.callbacks.ModelCheckpoint(str(folder), every_n_train_steps=10, save_top_k=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(max_steps=30, callbacks=[save], **QUIET).fit(Module(), DataLoader(Points(80), 8))
    return sorted(folder.glob("*.ckpt"))


def transformers_folders(folder: Path, *, lora: bool) -> list[Path]:
    """Of Hugging Face's Trainer, of steps 4 and 8; of the whole model, or of an adapter of PEFT."""
    from support.transformers_models import Texts
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"]))
        arguments = TrainingArguments(
            str(folder), max_steps=8, save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True
        )
        Trainer(model, arguments, train_dataset=Texts()).train()
    return sorted(folder.glob("checkpoint-*"))


def composer_files(folder: Path) -> list[Path]:
    """Of Composer's ``CheckpointSaver``, of batches 4 and 8."""
    from composer import Trainer
    from composer.optim import DecoupledAdamW
    from support.composer_data import BATCH
    from support.composer_models import Points, Setup, Tiny

    model = Tiny(Setup())
    Trainer(
        model=model,
        train_dataloader=DataLoader(Points(64), BATCH),
        optimizers=DecoupledAdamW(model.parameters(), 1e-2),
        max_duration="8ba",
        save_folder=str(folder),
        save_interval="4ba",
        progress_bar=False,
        device="cpu",
    ).fit()
    return sorted(folder.glob("ep*.pt"))
