"""Small trainings of LoRA adapters by PEFT, in each framework."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped
from torch import nn

__all__ = ["TRAININGS", "Net", "adapted", "points"]


class Net(nn.Module):
    """A base with an embedding that is tied to nothing, running statistics, and a head."""

    def __init__(self, seed: int = 0, width: int = 96) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))
        return hidden


def adapted(seed: int = 0, **options: Any) -> Any:
    """The net of a seed with adapters, whose own values are always the same."""
    import peft
    import peft.tuners.lora.torchao

    peft.tuners.lora.torchao.is_torchao_available = lambda: (
        False
    )  # it refuses releases of torchao that nothing here uses
    net = Net(seed)
    torch.manual_seed(100)
    return peft.get_peft_model(net, peft.LoraConfig(**{"r": 2, "target_modules": ["second"], **options}))


def points(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return x, x.sum(dim=1, keepdim=True)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def in_own_loop(url: Path, model: Any, steps: int, **options: Any) -> None:
    """With a Checkpointer."""
    import shrinkpoint

    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    given = {"every": 2, "scheme": "lossless", "busy": "wait", **options}
    checkpointer = shrinkpoint.Checkpointer(str(url), model, optimizer, **grouped(**given))
    for step in range(checkpointer.resume(), steps):
        x, y = points(step)
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(step + 1)
    checkpointer.close()


def with_lightning(url: Path, model: Any, steps: int, **options: Any) -> None:
    """With Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, number: int) -> Any:
            x, y = batch
            return (self.net(x) - y).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(trained(self), lr=1e-2)

    callback = CompressedCheckpoint(
        str(url), **grouped(**{"every_n_train_steps": 2, "scheme": "lossless", **options})
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=steps, callbacks=[callback], accelerator="cpu", **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader([points(step) for step in range(20)], batch_size=None))


def with_transformers(url: Path, model: Any, steps: int, **options: Any) -> None:
    """With Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    from shrinkpoint.callbacks.transformers import CompressedCheckpoint

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            return (model(inputs["x"]) - inputs["labels"]).pow(2).mean()

    def collate(samples: Any) -> Any:
        x, y = samples[0]
        return {"x": x, "labels": y}

    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "lr_scheduler_type": "constant"}
    more = {"per_device_train_batch_size": 1, "remove_unused_columns": False}
    arguments = TrainingArguments(str(url) + "-out", max_steps=steps, save_steps=2, **quiet, **more)
    callback = CompressedCheckpoint(str(url), **grouped(**{"scheme": "lossless", **options}))
    data: Any = [points(step) for step in range(20)]
    Own(model, arguments, collate, data, callbacks=[callback]).train()


def with_composer(url: Path, model: Any, steps: int, **options: Any) -> None:
    """With Composer's Trainer."""
    pytest.importorskip("composer")
    from composer import ComposerModel, Trainer

    from shrinkpoint.callbacks.composer import CompressedCheckpoint

    class Module(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return (outputs - batch[1]).pow(2).mean()

    module = Module()
    callback = CompressedCheckpoint(
        str(url), **grouped(**{"save_interval": "2ba", "scheme": "lossless", **options})
    )
    trainer = Trainer(
        model=module,
        optimizers=torch.optim.AdamW(trained(module), lr=1e-2),
        train_dataloader=torch.utils.data.DataLoader([points(step) for step in range(20)], batch_size=None),
        device_train_microbatch_size=4,
        max_duration=f"{steps}ba",
        callbacks=[callback],
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()


TRAININGS = {
    "own loop": in_own_loop,
    "lightning": with_lightning,
    "transformers": with_transformers,
    "composer": with_composer,
}
