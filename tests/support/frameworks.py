"""One small training, in each way in: an own loop, Lightning, Hugging Face's Trainer, Composer.

As a program, ``frameworks.py NAME FOLDER`` trains `LONG` to be killed: it saves to ``FOLDER/run`` and adds a byte to
``FOLDER/progress`` after each step.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")]

from support.options import grouped

__all__ = [
    "FRAMEWORKS",
    "LENGTH",
    "LONG",
    "MONITORS",
    "Crashed",
    "Drawing",
    "Half",
    "Layered",
    "Net",
    "Noisy",
    "Outcome",
    "PartlyEvaluating",
    "Recipe",
    "continues_on_ranks",
    "dies_on_ranks",
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
        self.outputs: list[float] = []
        """Of each batch of the validation that is being made."""

    def forward(self, batch: Any) -> torch.Tensor:
        loss = (self.head(self.body(batch["x"])) - batch["labels"]).square().mean()
        if self.training and torch.is_grad_enabled():
            loss = loss + 0.01 * random.random() + 0.01 * np.random.rand()
            self.seen.append((tuple(batch["index"].tolist()), float(loss.detach())))
        elif not self.training:
            self.outputs.append(float(loss.detach()))
        return loss


class Layered(Net):
    """Without batch norm, whose buffers are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1] = nn.LayerNorm(16)


class Half(Layered):
    """Has weights in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward({**batch, "x": batch["x"].bfloat16()})


class Drawing(Net):
    """Has generators of its own for the noise in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head.numpy, self.torch = np.random.RandomState(5), torch.Generator().manual_seed(2)

    def forward(self, batch: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(batch)
        noise = 0.1 * self.head.numpy.rand() + 0.1 * torch.rand((), generator=self.torch)
        return super().forward({**batch, "x": batch["x"] + noise})


class PartlyEvaluating(Net):
    """Puts its normalization into evaluation mode at one of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.made += 1
            if self.made == 3:
                self.body[1].eval()
        return super().forward(batch)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and for how long."""

    steps: int = 15
    every: int | None = 4
    """Steps between saves."""
    accumulate: int = 1
    clip: float | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    net: Callable[[], nn.Module] = Net
    evaluate: int | None = None
    """Steps between evaluations."""
    workers: int = 0
    data: Callable[[int], Points] = Points
    scaled: bool = False
    """Scale the losses, as half precision needs."""
    several: bool = False
    """Train the head by an optimizer of its own."""
    average: bool = False
    """Keep a moving average of the weights."""
    ranks: int = 1
    shards: bool = False
    """Shard the model by FSDP2; otherwise several ranks have copies of it, by DDP."""

    def loader(self, kind: Any = DataLoader, sampler: Any = None, size: int = 4) -> Any:
        data = self.data(LENGTH * self.ranks * size // 4)
        sampler = sampler and sampler(data)
        return kind(data, batch_size=size, shuffle=sampler is None, sampler=sampler, num_workers=self.workers)

    def held_out(self, sampler: Any = None) -> Any:
        return DataLoader(Points(2), batch_size=4, sampler=sampler and sampler(Points(2)))

    def scaler(self) -> GradScaler:
        """Return one whose scale grows, in the middle of an epoch too."""
        return GradScaler("cpu", init_scale=4.0, growth_interval=3, enabled=self.scaled)

    def wrapped(self, net: nn.Module) -> nn.Module:
        """Return the net as several ranks train it."""
        if self.shards:
            shard(net, init_device_mesh("cpu", (self.ranks,)))
        return DistributedDataParallel(net) if self.ranks > 1 and not self.shards else net

    def trained(self, net: Any) -> list[torch.optim.Optimizer]:
        parts = [net.body, net.head] if self.several else [net]
        chosen = [[each for each in part.parameters() if each.requires_grad] for part in parts]
        return [self.optimizer(parameters) for parameters in chosen]


def shard(net: Any, mesh: Any) -> None:
    """Let each rank have a part of every parameter."""
    fully_shard(net.body, mesh=mesh)
    fully_shard(net, mesh=mesh)


def averaged(net: nn.Module) -> AveragedModel:
    return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))


def decaying(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    return [torch.optim.lr_scheduler.ExponentialLR(each, 0.97) for each in optimizers]


def whole(value: Any) -> Any:
    """Return a copy of a state, without shards; a collective where it has some."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    if isinstance(value, dict):
        return {name: whole(item) for name, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


@dataclass
class Outcome:
    """What a training came to."""

    rows: dict[int, Any] = field(default_factory=dict)
    """Of each step that was made here: points, losses and learning rates."""
    validations: dict[int, list[float]] = field(default_factory=dict)
    """Of each that was made here, by its step: what it has collected."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    others: Any = None
    """The state of the scaler, and of the average."""
    random: float = 0.0
    shards: bool = False
    finished: bool = False
    ended: Any = None
    """With what the process was asked to exit."""

    def note(self, step: int, net: Any, optimizers: Any) -> None:
        rates = tuple(group["lr"] for each in optimizers for group in each.param_groups)
        self.rows[step] = (tuple(net.seen), rates)
        net.seen.clear()

    def validated(self, step: int, net: Any) -> None:
        self.validations[step] = [*net.outputs]
        net.outputs.clear()

    def end(self, net: Any, optimizers: Any, *others: Any) -> None:
        self.finished = True
        kinds = (type(part).__name__ for part in net.modules())
        self.shards = any(
            kind.startswith("FSDP") for kind in kinds
        )  # parameters are whole after an evaluation
        self.weights = whole(dict(net.state_dict()))
        self.optimizers = [whole(each.state_dict()) for each in optimizers]
        self.others = [whole(each.state_dict()) for each in others if each is not None]
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
    import shrinkpoint

    _seed(1)
    outcome = Outcome()
    net, model, loader, optimizers, schedulers = _parts(recipe)
    scaler, average = recipe.scaler(), averaged(net) if recipe.average else None
    _seed(seed)

    def evaluate() -> list[float]:
        return [float(model(batch)) for batch in recipe.held_out()]

    def validate() -> float:
        net.eval()
        with torch.no_grad():
            losses = evaluate()
        net.train()
        outcome.validated(step, net)
        return sum(losses) / len(losses)

    checkpointer = None
    if url is not None:
        more: dict[str, Any] = {"every": recipe.every, "loader": loader}
        more |= {f"scheduler{number}": each for number, each in enumerate(schedulers)}
        more |= {"scaler": scaler} if recipe.scaled else {}
        more |= {"average": average} if recipe.average else {}
        if recipe.evaluate is not None and options.get("scheme") != "lossless":
            more["evaluate"] = evaluate
        checkpointer = shrinkpoint.Checkpointer(url, model, optimizers, **more, **grouped(**options))
    step = 0 if checkpointer is None else checkpointer.resume()

    def train() -> None:
        nonlocal step
        pending = 0
        while step < recipe.steps:
            for batch in loader:
                scaler.scale(model(batch).div(recipe.accumulate)).backward()
                pending += 1
                if pending < recipe.accumulate:
                    continue
                pending = 0
                if recipe.clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
                for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                    scaler.step(optimizer)
                    scheduler.step()
                    optimizer.zero_grad()
                scaler.update()
                if average is not None:
                    average.update_parameters(net)
                step += 1
                outcome.note(step, net, optimizers)
                after(step)
                measured = recipe.evaluate is not None and step % recipe.evaluate == 0
                metrics = {"val_loss": validate()} if measured else None
                if checkpointer is not None:
                    checkpointer.step(step, metrics=metrics)
                if step == recipe.steps:
                    break

    with _interrupted(outcome):
        train()
        if checkpointer is not None:
            checkpointer.close()
        outcome.end(net, optimizers, scaler, average)
    if checkpointer is not None:
        checkpointer.saver.close()  # what a crash has left under way
    return outcome


def _parts(recipe: Recipe) -> Any:
    """Return what a user makes where no trainer does: net, wrapped net, loader, optimizers, schedulers."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    net = recipe.net()
    model = recipe.wrapped(net)  # first, since shards are other parameters
    optimizers = recipe.trained(net)
    loader = recipe.loader(StatefulDataLoader, StatefulDistributedSampler if recipe.ranks > 1 else None)
    return net, model, loader, optimizers, decaying(optimizers)


def in_toy_trainer(
    url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, seed: int = 1, **options: Any
) -> Outcome:
    """With a trainer whose adapter is `support.toy`'s."""
    from support.toy import ToyCheckpoint, ToyTrainer

    _seed(1)
    outcome = Outcome()
    net, model, loader, optimizers, schedulers = _parts(recipe)
    scaler, average = recipe.scaler(), averaged(net) if recipe.average else None
    _seed(seed)

    class After:
        def validated(self, trainer: ToyTrainer) -> None:
            outcome.validated(trainer.step, net)

        def step_ends(self, trainer: ToyTrainer) -> None:
            outcome.note(trainer.step, net, optimizers)
            after(trainer.step)

    class Averaging:
        def step_ends(self, trainer: ToyTrainer) -> None:
            average.update_parameters(net)

        def state_dict(self) -> Any:
            return average.state_dict()

        def load_state_dict(self, state: Any) -> None:
            average.load_state_dict(state)

    callbacks: list[Any] = [After(), *([Averaging()] if recipe.average else [])]
    if url is not None:
        callbacks.append(ToyCheckpoint(url, every=recipe.every, **grouped(**options)))
    trainer = ToyTrainer(
        model,
        optimizers,
        schedulers,
        loader,
        steps=recipe.steps,
        accumulate=recipe.accumulate,
        clip=recipe.clip,
        scaler=scaler,
        validate_every=recipe.evaluate,
        held_out=recipe.held_out(),
        callbacks=callbacks,
    )
    with _interrupted(outcome):
        trainer.fit()
        outcome.end(net, optimizers, scaler, average)
    return outcome


def with_lightning(
    url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, seed: int = 1, **options: Any
) -> Outcome:
    """With Lightning's Trainer."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import ModelParallelStrategy

    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    outcome, counted = Outcome(), 2 if recipe.several else 1  # by hand, each optimizer's steps count

    class Module(LightningModule):
        automatic_optimization = not recipe.several

        def __init__(self) -> None:
            super().__init__()
            self.net = recipe.net()

        def configure_model(self) -> None:
            if recipe.shards and not any(isinstance(each, DTensor) for each in self.parameters()):
                shard(self.net, self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.net(batch)
            if recipe.several and torch.is_grad_enabled():
                self.manual_backward(loss)
                for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", self.net(batch), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            outcome.validated(self.trainer.global_step // counted, self.net)

        def configure_optimizers(self) -> Any:
            optimizers = recipe.trained(self.net)
            schedulers = [{"scheduler": each, "interval": "step"} for each in decaying(optimizers)]
            return optimizers, schedulers

    class After(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            step = trainer.global_step // counted
            if step not in outcome.rows and len(module.net.seen) == recipe.accumulate:
                outcome.note(step, module.net, trainer.optimizers)
                after(step)

    _seed(1)
    module = Module()
    _seed(seed)
    callbacks: list[Any] = [After()]
    if recipe.average:
        callbacks.append(WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.8)))
    if url is not None:
        every = recipe.every and counted * recipe.every
        callbacks.append(CompressedCheckpoint(url, every_n_train_steps=every, **grouped(**options)))
    validating = {"limit_val_batches": 0} if recipe.evaluate is None else {"check_val_every_n_epoch": None}
    if recipe.evaluate is not None:
        validating["val_check_interval"] = recipe.evaluate * recipe.accumulate
    scaler = MixedPrecision("16-mixed", "cpu", recipe.scaler()) if recipe.scaled else None
    sharding = ModelParallelStrategy(data_parallel_size=recipe.ranks, tensor_parallel_size=1)
    trainer = Trainer(
        max_steps=counted * recipe.steps,
        accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=recipe.clip,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        enable_checkpointing=url is not None,
        accelerator="cpu",
        devices=recipe.ranks,
        strategy=sharding if recipe.shards else "ddp" if recipe.ranks > 1 else "auto",
        plugins=[scaler] if scaler is not None else None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **validating,  # type: ignore[arg-type]
    )
    with _interrupted(outcome):
        trainer.fit(module, recipe.loader(), recipe.held_out())
        outcome.end(module.net, trainer.optimizers, scaler)
    return outcome


def with_transformers(
    url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, seed: int = 1, **options: Any
) -> Outcome:
    """With Hugging Face's Trainer."""
    from sharded_huggingface import Sharded
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from shrinkpoint.callbacks.transformers import CompressedCheckpoint

    outcome = Outcome()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = recipe.net()
            self.average = averaged(self.net) if recipe.average else None

        def forward(self, index: Any = None, x: Any = None, labels: Any = None) -> Any:
            return {"loss": self.net({"index": index, "x": x, "labels": labels})}

    class After(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if model.average is not None:
                model.average.update_parameters(model.net)
            outcome.note(state.global_step, model.net, [given["optimizer"]])
            after(state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            outcome.validated(state.global_step, model.net)

    class Training(Sharded if recipe.shards else Trainer):  # type: ignore[misc]
        layer = "Sequential"

        def create_optimizer(self, *given: Any, **named: Any) -> Any:
            [self.optimizer] = recipe.trained(self.model.net)
            return self.optimizer

        def create_scheduler(self, *given: Any, **named: Any) -> Any:
            [self.lr_scheduler] = decaying([self.optimizer])
            return self.lr_scheduler

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if recipe.scaled:  # accelerate makes none on a CPU
                self.accelerator.scaler = recipe.scaler()

    _seed(1)
    model = Wrapped()
    evaluating = {"eval_strategy": "no"}
    if recipe.evaluate is not None:
        evaluating = {"eval_strategy": "steps", "eval_steps": recipe.evaluate}
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=recipe.steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4 // recipe.ranks,
        gradient_accumulation_steps=recipe.accumulate,
        max_grad_norm=recipe.clip or 0.0,
        dataloader_num_workers=recipe.workers,
        ddp_backend="gloo" if recipe.ranks > 1 else None,
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
    trainer = Training(
        model,
        arguments,
        train_dataset=recipe.data(LENGTH * recipe.ranks),
        eval_dataset=Points(2),
        callbacks=callbacks,
    )
    with _interrupted(outcome):
        trainer.train()
        scaler = trainer.accelerator.scaler if recipe.scaled else None
        outcome.end(model.net, [trainer.optimizer], scaler, model.average)
    return outcome


def with_composer(
    url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, seed: int = 1, **options: Any
) -> Outcome:
    """With Composer's Trainer."""
    from composer import Callback, ComposerModel, Evaluator, Trainer
    from composer.algorithms import EMA, GradientClipping
    from composer.core import Precision
    from composer.utils import dist, reproducibility
    from torchmetrics import MeanMetric

    from shrinkpoint.callbacks.composer import CompressedCheckpoint

    outcome = Outcome()

    class Module(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = recipe.net()

        def forward(self, batch: Any) -> Any:
            return self.net(batch)

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs

        def get_metrics(self, is_train: bool) -> Any:
            return {} if is_train else {"val_loss": MeanMetric()}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(outputs)

    class After(Callback):
        def before_load(self, state: Any, logger: Any) -> None:
            if recipe.scaled:  # which Composer refuses on a CPU
                state.scaler, state.precision = recipe.scaler(), Precision.AMP_FP16

        def batch_end(self, state: Any, logger: Any) -> None:
            step = int(state.timestamp.batch)
            outcome.note(step, module.net, state.optimizers)
            after(step)

        def eval_end(self, state: Any, logger: Any) -> None:
            outcome.validated(int(state.timestamp.batch), module.net)

    _seed(1)
    module = Module()
    [optimizer] = recipe.trained(module.net)
    callbacks: list[Any] = [After()]
    if url is not None:
        interval = f"{10**6 if recipe.every is None else recipe.every}ba"
        callbacks.append(CompressedCheckpoint(url, save_interval=interval, **grouped(**options)))
    more: dict[str, Any] = {}
    sampler = dist.get_sampler if recipe.ranks > 1 else None
    if recipe.evaluate is not None:
        held_out = Evaluator(label="eval", dataloader=recipe.held_out(sampler), metric_names=["val_loss"])
        more = {"eval_dataloader": held_out, "eval_interval": f"{recipe.evaluate}ba"}
    if recipe.shards:
        more["parallelism_config"] = {"fsdp": {"state_dict_type": "sharded"}}
    average = EMA(half_life="3ba") if recipe.average else None
    clipping = None if recipe.clip is None else GradientClipping("norm", recipe.clip)
    reproducibility.seed_all(seed)
    trainer = Trainer(
        model=module,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
        step_schedulers_every_batch=True,
        train_dataloader=recipe.loader(
            sampler=sampler and partial(sampler, shuffle=True), size=4 * recipe.accumulate
        ),
        device_train_microbatch_size=4,
        algorithms=[each for each in (average, clipping) if each is not None],
        max_duration=f"{recipe.steps}ba",
        callbacks=callbacks,
        device="cpu",
        progress_bar=False,
        seed=seed,
        **more,
    )
    try:
        with _interrupted(outcome):
            with _complete():
                trainer.fit()
            scaler = trainer.state.scaler if recipe.scaled else None
            outcome.end(module.net, trainer.state.optimizers, scaler)
            outcome.others += [whole(dict(vars(average.ema_model)))] if average is not None else []
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


def dies_on_ranks(rank: int, world: int, name: str, folder: str, recipe: Recipe, at: int) -> None:
    """Train on one of several ranks, each of which ends at a step as by kill -9, when all saves are committed."""
    commits = Path(folder, "killed", "commits")

    def after(step: int) -> None:
        while step == at and len([*commits.glob("[0-9]*.json")]) < step // recipe.every:
            time.sleep(0.01)
        if step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    _on_rank(name, f"{folder}/killed", recipe, after, seed=1 + rank)


def continues_on_ranks(
    rank: int, world: int, name: str, folder: str, recipe: Recipe, at: int
) -> dict[str, Outcome]:
    """Return what trainings come to on this rank.

    ``whole`` is undisturbed, ``killed`` continues the run of `dies_on_ranks`. Of ``first`` the last rank is asked to end at a step, and ``asked``
    continues it.
    """

    def after(step: int) -> None:
        if step == at and (rank == world - 1 or (name == "lightning" and not recipe.shards)):
            signal.raise_signal(signal.SIGTERM)  # Lightning's own handler waits for all ranks under DDP

    whole = _on_rank(name, None, recipe, seed=1 + rank)
    killed = _on_rank(name, f"{folder}/killed", recipe, seed=99 + rank)
    seldom = replace(recipe, every=10**6)
    if name != "lightning":  # which leaves handlers alone
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    first = _on_rank(name, f"{folder}/asked", seldom, after, seed=1 + rank)
    asked = _on_rank(name, f"{folder}/asked", seldom, seed=99 + rank)
    return {"whole": whole, "killed": killed, "first": first, "asked": asked}


def _on_rank(
    name: str, url: str | None, recipe: Recipe, after: Callable[[int], None] = nothing, *, seed: int
) -> Outcome:
    """In an environment as of Composer's launcher, which is all that the others ask for."""
    os.environ.update(LOCAL_WORLD_SIZE=str(recipe.ranks), NODE_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.update(FSDP_VERSION="2")
    return FRAMEWORKS[name](url, recipe, after, seed=seed, scheme="lossless", busy="wait", threads=1)


def _to_be_killed(name: str, folder: str) -> None:
    def after(step: int) -> None:
        with Path(folder, "progress").open("a") as file:
            file.write(".")
        time.sleep(0.1)

    torch.set_num_threads(1)
    FRAMEWORKS[name](f"{folder}/run", LONG, after, scheme="lossless", busy="wait")


if __name__ == "__main__":
    _to_be_killed(*sys.argv[1:])
