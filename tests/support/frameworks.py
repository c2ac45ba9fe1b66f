"""One small training, in each way in: an own loop, Lightning, Hugging Face's Trainer, Composer.

As a program, ``frameworks.py NAME FOLDER`` trains `LONG` to be killed: it saves to ``FOLDER/run`` and adds a byte to
``FOLDER/progress`` after each step.
"""

import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.options import grouped

__all__ = [
    "FRAMEWORKS",
    "LENGTH",
    "LONG",
    "MONITORS",
    "Crashed",
    "Drawing",
    "Net",
    "Noisy",
    "Outcome",
    "PartlyEvaluating",
    "Recipe",
    "nothing",
]

LENGTH = 6
"""Batches of an epoch."""


class Crashed(Exception):
    """What a test ends a training by."""


class Points(Dataset[Any]):
    """Points with their numbers."""

    def __init__(self, batches: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(4 * batches, 8, generator=draw)
        self.y = self.x.sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"index": torch.tensor(index), "x": self.x[index], "labels": self.y[index]}


class Noisy(Points):
    """Draws noise, when points are read, from generators of its own."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.numpy, self.others = np.random.default_rng(7), [random.Random(3)]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        return {**item, "x": item["x"] + 0.1 * self.numpy.normal() + 0.1 * self.others[0].random()}


class Net(nn.Module):
    """Batch norm, dropout and all three generators in the loss: what is restored wrongly changes the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 1)
        self.seen: list[tuple[tuple[int, ...], float]] = []
        """Numbers of the points and loss of each batch that was trained on since the last step."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss = (self.head(self.body(batch["x"])) - batch["labels"]).square().mean()
        if self.training and torch.is_grad_enabled():
            loss = loss + 0.01 * random.random() + 0.01 * np.random.rand()
            self.seen.append((tuple(batch["index"].tolist()), float(loss.detach())))
        return loss


class Drawing(Net):
    """Has generators of its own for the noise in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head.numpy, self.torch = np.random.RandomState(5), torch.Generator().manual_seed(2)

    def loss(self, batch: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().loss(batch)
        noise = 0.1 * self.head.numpy.rand() + 0.1 * torch.rand((), generator=self.torch)
        return super().loss({**batch, "x": batch["x"] + noise})


class PartlyEvaluating(Net):
    """Puts its normalization into evaluation mode at one of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", torch.zeros((), dtype=torch.int64))

    def loss(self, batch: Any) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.made += 1
            if self.made == 3:
                self.body[1].eval()
        return super().loss(batch)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and for how long."""

    steps: int = 15
    every: int | None = 4
    """Steps between saves."""
    accumulate: int = 1
    clip: float | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(
        parameters, lr=1e-2
    )
    net: Callable[[], nn.Module] = Net
    evaluate: int | None = None
    """Steps between evaluations."""
    workers: int = 0
    data: Callable[[int], Points] = Points

    def loader(self, kind: Any = DataLoader) -> Any:
        return kind(self.data(LENGTH), batch_size=4, shuffle=True, num_workers=self.workers)

    def held_out(self) -> Any:
        return DataLoader(Points(2), batch_size=4)

    def trained(self, net: nn.Module) -> torch.optim.Optimizer:
        return self.optimizer([each for each in net.parameters() if each.requires_grad])


@dataclass
class Outcome:
    """What a training came to."""

    rows: dict[int, Any] = field(default_factory=dict)
    """Of each step that was made here: points, losses and learning rates."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    random: float = 0.0
    finished: bool = False
    ended: Any = None
    """With what the process was asked to exit."""

    def note(self, step: int, net: Any, optimizers: Any) -> None:
        rates = tuple(group["lr"] for each in optimizers for group in each.param_groups)
        self.rows[step] = (tuple(net.seen), rates)
        net.seen.clear()

    def end(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.finished = True
        self.weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
        self.optimizer = optimizer.state_dict()
        self.random = float(torch.rand(())) + random.random() + float(np.random.rand())


def nothing(step: int) -> None:
    """What happens after each step of a training that nothing disturbs."""


@contextlib.contextmanager
def _interrupted(outcome: Outcome) -> Any:
    try:
        yield
    except Crashed:
        pass
    except (SystemExit, KeyboardInterrupt) as error:
        outcome.ended = repr(error)


@contextlib.contextmanager
def _complete() -> Any:
    try:
        yield
    except ValueError as error:
        if "No training would occur" not in str(error):  # Composer's answer to a training that has ended
            raise


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def in_own_loop(
    url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, seed: int = 1, **options: Any
) -> Outcome:
    """With a `Checkpointer`."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    import shrinkpoint

    _seed(1)
    net, outcome = recipe.net(), Outcome()
    optimizer = recipe.trained(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    loader = recipe.loader(StatefulDataLoader)
    _seed(seed)

    def evaluate() -> list[float]:
        return [float(net.loss(batch)) for batch in recipe.held_out()]

    def validate() -> float:
        net.eval()
        with torch.no_grad():
            losses = evaluate()
        net.train()
        return sum(losses) / len(losses)

    checkpointer = None
    if url is not None:
        more: dict[str, Any] = {"every": recipe.every, "loader": loader, "scheduler": scheduler}
        if recipe.evaluate is not None and options.get("scheme") != "lossless":
            more["evaluate"] = evaluate
        checkpointer = shrinkpoint.Checkpointer(url, net, optimizer, **more, **grouped(**options))
    step = 0 if checkpointer is None else checkpointer.resume()

    def train(step: int) -> None:
        nonlocal pending
        while step < recipe.steps:
            for batch in loader:
                net.loss(batch).div(recipe.accumulate).backward()
                pending += 1
                if pending < recipe.accumulate:
                    continue
                pending = 0
                if recipe.clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                outcome.note(step, net, [optimizer])
                after(step)
                measured = recipe.evaluate is not None and step % recipe.evaluate == 0
                metrics = {"val_loss": validate()} if measured else None
                if checkpointer is not None:
                    checkpointer.step(step, metrics=metrics)
                if step == recipe.steps:
                    break

    pending = 0
    with _interrupted(outcome):
        train(step)
        if checkpointer is not None:
            checkpointer.close()
        outcome.end(net, optimizer)
    if checkpointer is not None:
        checkpointer.saver.close()  # what a crash has left under way
    return outcome


def in_toy_trainer(
    url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, seed: int = 1, **options: Any
) -> Outcome:
    """With a trainer whose adapter is `support.toy`'s."""
    from support.toy import ToyCheckpoint, ToyTrainer
    from torchdata.stateful_dataloader import StatefulDataLoader

    _seed(1)
    net, outcome = recipe.net(), Outcome()
    optimizer = recipe.trained(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    loader = recipe.loader(StatefulDataLoader)
    _seed(seed)

    class After:
        def step_ends(self, trainer: ToyTrainer) -> None:
            outcome.note(trainer.step, net, [optimizer])
            after(trainer.step)

    callbacks: list[Any] = [After()]
    if url is not None:
        callbacks.append(ToyCheckpoint(url, every=recipe.every, **grouped(**options)))
    trainer = ToyTrainer(
        net,
        optimizer,
        scheduler,
        loader,
        steps=recipe.steps,
        accumulate=recipe.accumulate,
        clip=recipe.clip,
        validate_every=recipe.evaluate,
        held_out=recipe.held_out(),
        callbacks=callbacks,
    )
    with _interrupted(outcome):
        trainer.fit()
        outcome.end(net, optimizer)
    return outcome


def with_lightning(
    url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, seed: int = 1, **options: Any
) -> Outcome:
    """With Lightning's Trainer."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    outcome = Outcome()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = recipe.net()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net.loss(batch)

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", self.net.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = recipe.trained(self.net)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    class After(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            step = trainer.global_step
            if step not in outcome.rows and len(module.net.seen) == recipe.accumulate:
                outcome.note(step, module.net, trainer.optimizers)
                after(step)

    _seed(1)
    module = Module()
    _seed(seed)
    callbacks: list[Any] = [After()]
    if url is not None:
        callbacks.append(CompressedCheckpoint(url, every_n_train_steps=recipe.every, **grouped(**options)))
    validating = {"limit_val_batches": 0} if recipe.evaluate is None else {"check_val_every_n_epoch": None}
    if recipe.evaluate is not None:
        validating["val_check_interval"] = recipe.evaluate * recipe.accumulate
    trainer = Trainer(
        max_steps=recipe.steps,
        accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=recipe.clip,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        enable_checkpointing=url is not None,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **validating,  # type: ignore[arg-type]
    )
    with _interrupted(outcome):
        trainer.fit(module, recipe.loader(), recipe.held_out())
        outcome.end(module.net, trainer.optimizers[0])
    return outcome


def with_transformers(
    url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, seed: int = 1, **options: Any
) -> Outcome:
    """With Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from shrinkpoint.callbacks.transformers import CompressedCheckpoint

    outcome = Outcome()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = recipe.net()

        def forward(self, index: Any = None, x: Any = None, labels: Any = None) -> Any:
            return {"loss": self.net.loss({"index": index, "x": x, "labels": labels})}

    class After(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            outcome.note(state.global_step, model.net, [given["optimizer"]])
            after(state.global_step)

    _seed(1)
    model = Wrapped()
    optimizer = recipe.trained(model.net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    evaluating = {"eval_strategy": "no"}
    if recipe.evaluate is not None:
        evaluating = {"eval_strategy": "steps", "eval_steps": recipe.evaluate}
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=recipe.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=recipe.accumulate,
        max_grad_norm=recipe.clip or 0.0,
        dataloader_num_workers=recipe.workers,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
        **evaluating,  # type: ignore[arg-type]
    )
    callbacks: list[Any] = [After()]
    if url is not None:
        callbacks.append(CompressedCheckpoint(url, every_n_train_steps=recipe.every, **grouped(**options)))
    _seed(seed)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=recipe.data(LENGTH),
        eval_dataset=Points(2),
        optimizers=(optimizer, scheduler),
        callbacks=callbacks,
    )
    with _interrupted(outcome):
        trainer.train()
        outcome.end(model.net, optimizer)
    return outcome


def with_composer(
    url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, seed: int = 1, **options: Any
) -> Outcome:
    """With Composer's Trainer."""
    from composer import Callback, ComposerModel, Evaluator, Trainer
    from composer.algorithms import GradientClipping
    from composer.utils import reproducibility
    from torchmetrics import MeanMetric

    from shrinkpoint.callbacks.composer import CompressedCheckpoint

    outcome = Outcome()

    class Module(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = recipe.net()

        def forward(self, batch: Any) -> Any:
            return self.net.loss(batch)

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs

        def get_metrics(self, is_train: bool) -> Any:
            return {} if is_train else {"val_loss": MeanMetric()}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(outputs)

    class After(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            step = int(state.timestamp.batch)
            outcome.note(step, module.net, state.optimizers)
            after(step)

    _seed(1)
    module = Module()
    optimizer = recipe.trained(module)
    callbacks: list[Any] = [After()]
    if url is not None:
        interval = f"{10**6 if recipe.every is None else recipe.every}ba"
        callbacks.append(CompressedCheckpoint(url, save_interval=interval, **grouped(**options)))
    evaluating: dict[str, Any] = {}
    if recipe.evaluate is not None:
        held_out = Evaluator(label="eval", dataloader=recipe.held_out(), metric_names=["val_loss"])
        evaluating = {"eval_dataloader": held_out, "eval_interval": f"{recipe.evaluate}ba"}
    loader = recipe.loader()
    if recipe.accumulate > 1:
        loader = DataLoader(
            Points(LENGTH * recipe.accumulate), batch_size=4 * recipe.accumulate, shuffle=True
        )
    reproducibility.seed_all(seed)
    trainer = Trainer(
        model=module,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
        step_schedulers_every_batch=True,
        train_dataloader=loader,
        device_train_microbatch_size=4,
        algorithms=[] if recipe.clip is None else [GradientClipping("norm", recipe.clip)],
        max_duration=f"{recipe.steps}ba",
        callbacks=callbacks,
        device="cpu",
        progress_bar=False,
        seed=seed,
        **evaluating,
    )
    try:
        with _interrupted(outcome):
            with _complete():
                trainer.fit()
            outcome.end(module.net, trainer.state.optimizers[0])
    finally:
        trainer.close()
    return outcome


MONITORS = {
    in_own_loop: "val_loss",
    in_toy_trainer: "val_loss",
    with_lightning: "val_loss",
    with_transformers: "eval_loss",
    with_composer: "metrics/eval/val_loss",
}
"""What each calls the loss of its evaluations."""

FRAMEWORKS: dict[str, Callable[..., Outcome]] = {
    "own loop": in_own_loop,
    "toy": in_toy_trainer,
    "lightning": with_lightning,
    "transformers": with_transformers,
    "composer": with_composer,
}

LONG = Recipe(steps=24, every=2)


def _to_be_killed(name: str, folder: str) -> None:
    def after(step: int) -> None:
        with Path(folder, "progress").open("a") as file:
            file.write(".")
        time.sleep(0.1)

    torch.set_num_threads(1)
    FRAMEWORKS[name](f"{folder}/run", LONG, after, scheme="lossless", busy="wait")


if __name__ == "__main__":
    _to_be_killed(*sys.argv[1:])
