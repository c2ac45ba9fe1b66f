"""A small training that adopts its checkpoints, in this process or in one of its own that is killed."""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.options import grouped, leave
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shrinkpoint
from shrinkpoint.state.digest import state_digest, tensor_digest
from shrinkpoint.state.training import TrainingState

EVERY = 4
STEPS = 32
WORDS, WIDTH = 96, 48


class Net(nn.Module):
    """Rare rows that most steps do not move, tied weights, a buffer that follows the data, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(tokens).transpose(1, 2).float()).transpose(1, 2).to(self.body.weight.dtype)
        x = functional.dropout(torch.relu(self.body(x)), 0.1, self.training)
        return self.head(x)


def _adamw(net: Net) -> list[Any]:
    return [torch.optim.AdamW(net.parameters(), lr=1e-2)]


def _two(net: Net) -> list[Any]:
    table = [net.table.weight]
    others = [p for p in net.parameters() if p is not net.table.weight]
    return [
        torch.optim.SGD(table, lr=0.1, momentum=0.9),
        torch.optim.Adam(others, lr=1e-2, fused=True),
    ]


OPTIMIZERS: dict[str, Callable[[Net], list[Any]]] = {
    "adamw": _adamw,
    "two": _two,
    "amsgrad": lambda net: [torch.optim.Adam(net.parameters(), lr=1e-2, amsgrad=True, foreach=False)],
    "adagrad": lambda net: [torch.optim.Adagrad(net.parameters(), lr=1e-2)],
    "rmsprop": lambda net: [torch.optim.RMSprop(net.parameters(), lr=1e-3, foreach=True)],
    "asgd": lambda net: [torch.optim.ASGD(net.parameters(), lr=1e-2)],
    "bfloat16": _adamw,
    "scaled": _adamw,  # by a GradScaler, which skips some steps
}


class Training:
    """One process of a training: made afresh, it knows nothing but the URL."""

    def __init__(self, case: str = "adamw", *, average: bool = True) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.model = Net()
        if case == "bfloat16":
            self.model.to(torch.bfloat16)
            self.model.norm.float()
        self.optimizers = OPTIMIZERS[case](self.model)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**10, growth_interval=3, enabled=case == "scaled"
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizers[0], lambda step: 1 / (1 + step / 9)
        )
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if average else None
        self.losses: dict[int, tuple[str, str]] = {}
        """By step: the loss, and the digest of the state after it."""
        self.reached = 0
        self.checkpointer: Any = None

    def evaluate(self) -> list[float]:
        """Losses of two batches that are not trained on."""
        with torch.no_grad():
            return [self._loss(self._tokens(seed)).item() for seed in (-1, -2)]

    def save_to(self, url: str | Path | list[str], **options: Any) -> "Training":
        """Give it a checkpointer, and resume."""
        wanted: dict[str, Any] = {
            "every": EVERY,
            "adopt": STEPS // EVERY,
            "evaluate": self.evaluate,
            "key_every": 2,
            "max_degradation": 0.2,
            **options,
        }
        stateful: dict[str, Any] = {} if self.average is None else {"ema": self.average}
        if self.scaler.is_enabled():
            stateful["scaler"] = self.scaler
        self.checkpointer = shrinkpoint.Checkpointer(
            url, self.model, self.optimizers, **grouped(scheduler=self.scheduler, **stateful, **wanted)
        )
        self.reached = self.checkpointer.resume()
        return self

    def run(self, end: int, *, quiet: bool = True) -> "Training":
        """Train up to a step."""
        with warnings.catch_warnings():
            if quiet:
                warnings.filterwarnings("ignore", "training waits for", shrinkpoint.ShrinkpointWarning)
            for step in range(self.reached, end):
                self.step(step)
        return self

    def step(self, step: int) -> None:
        """One step, and what follows it."""
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._loss(self._tokens(step))
        self.scaler.scale(loss).backward()
        if (
            self.scaler.is_enabled() and step % 7 == 5
        ):  # an overflow: this step is skipped, and the scale halved
            self.model.body.bias.grad.fill_(torch.inf)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        self.reached = step + 1
        if self.checkpointer is not None:
            self.checkpointer.step(step + 1)
        self.losses[step + 1] = (loss.item() + noise + self.scaler.get_scale()).hex(), self.digest

    def end(self) -> dict[int, tuple[str, str]]:
        """Let go of the run without a last save; what was noted."""
        if self.checkpointer is not None:
            leave(self.checkpointer)
        return self.losses

    def _tokens(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + seed)
        rare = torch.rand(8, 9, generator=generator) < 0.02
        usual = torch.randint(WORDS // 2, (8, 9), generator=generator)
        return torch.where(rare, usual + WORDS // 2, usual).sort(dim=1).values

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @property
    def digest(self) -> str:
        """Of all tensors that training changes."""
        parts: list[Any] = [self.model.state_dict(), [o.state_dict() for o in self.optimizers]]
        if self.average is not None:
            parts.append(self.average.state_dict())
        tensors = TrainingState.capture(parts).tensors
        return state_digest({name: tensor_digest(value.detach()) for name, value in tensors.items()})


def truth(
    folder: Path, case: str = "adamw", steps: int = STEPS, **options: Any
) -> dict[int, tuple[str, str]]:
    """What an undisturbed training notes."""
    training = Training(case).save_to(folder / f"truth-{case}", **options).run(steps)
    return training.end()


# ---- in processes of their own

POINTS = ("before adopting", "after adopting", "before commit", "after commit")


def kill_at(training: Training, point: str, save: int) -> None:
    """From now on, this process kills itself at a point of its n-th planned save.

    Of the points only what a training and its run's folder show is known: that it is evaluated before it adopts anything, and which files are
    made then.
    """
    evaluate, step = training.evaluate, training.checkpointer.step
    due, measured = threading.Event(), threading.Event()  # measured once the save before is stored

    def evaluated() -> list[float]:
        if due.is_set():
            measured.set()
            die_at("before adopting")
        return evaluate()

    def file_event(name: str, arguments: tuple[Any, ...]) -> None:
        if not measured.is_set():
            return
        if name == "open" and "/data/.tmp-" in str(arguments[0]):
            die_at("after adopting")
        if name in ("os.link", "os.rename") and "/commits/" in str(arguments[1]):
            die_at("before commit")

    def stepped(number: int) -> None:
        if number == save * EVERY:
            due.set()
        step(number)
        if due.is_set():
            training.checkpointer.flush()
            die_at("after commit")

    def die_at(here: str) -> None:
        if here == point:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(file_event)
    training.evaluate, training.checkpointer.step = evaluated, stepped  # type: ignore[method-assign]


def main(folder: str, point: str, save: int, end: int, stores: int, case: str = "adamw") -> None:
    """Train until killed, with checkpoints in so many stores, and note every step."""
    url = f"{folder}/run" if stores == 1 else [f"{folder}/run-{i}" for i in range(stores)]
    training = Training(case)
    training.save_to(url, adopt=end // EVERY, evaluate=lambda: training.evaluate())
    if point:
        kill_at(training, point, save)
    with (Path(folder) / "journal").open("a", buffering=1) as journal:
        journal.write(json.dumps({"resumed": training.reached}) + "\n")
        for step in range(training.reached, end):
            training.run(step + 1)
            journal.write(json.dumps({"step": step + 1, "noted": training.losses[step + 1]}) + "\n")
    training.end()


def serve() -> None:
    """For each job on stdin, as JSON (`main`'s arguments): fork a training and print its process id; for a number: reap it."""
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    try:  # import and compile everything once, before the first fork
        Training().save_to(f"{folder}/run").run(3 * EVERY).end()
    finally:
        shutil.rmtree(folder)
    for line in sys.stdin:
        job = json.loads(line)
        if isinstance(job, int):
            print(os.waitpid(job, 0)[1], flush=True)
            continue
        child = os.fork()
        if child == 0:
            status = 1
            try:
                main(*job)
                status = 0
            except BaseException:  # noqa: BLE001 - the child must never return into the server's loop
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(child, flush=True)


if __name__ == "__main__":
    serve()
