"""A small training with everything that a careless log of its steps would miss, in this process or in one of its own."""

import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.options import grouped, leave
from torch import nn
from torch.nn import functional

import shrinkpoint
from shrinkpoint.steps.fingerprint import fingerprint
from shrinkpoint.steps.writer import SegmentWriter

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2},
    "Adadelta": {},
    "Adamax": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
    "SparseAdam": {},
    "Muon": {},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def cases() -> list[tuple[str, str, bool]]:
    """Every optimizer of torch.optim with every implementation that it has on a CPU, with a closure and without."""
    found = []
    for name in OPTIONS:
        kinds = ["loop", "foreach", *(["fused"] if name in FUSED else [])]
        if name in ("SparseAdam", "Muon"):
            kinds = ["only"]
        if hasattr(torch.optim, name):
            found += [(name, kind, closure) for kind in kinds for closure in (False, True)]
    return found


class Net(nn.Module):
    """Dropout draws from a generator, BatchNorm has buffers, and one layer gets a gradient on every third step only."""

    def __init__(self, *, sparse: bool = False, matrices: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16, sparse=sparse)
        self.conv = None if sparse or matrices else nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16, affine=not (sparse or matrices))
        self.spare = None if sparse else nn.Linear(16, 16, bias=not matrices)
        self.head = None if sparse else nn.Linear(16, 32, bias=not matrices)

    def forward(self, tokens: torch.Tensor, spare: bool) -> torch.Tensor:
        x = self.table(tokens)
        if self.conv is not None:
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + functional.dropout(x, 0.1, self.training)
        x = x + 0.1 * self.norm(x.transpose(1, 2)).transpose(1, 2)
        if spare and self.spare is not None:
            x = x + self.spare(x)
        return x @ self.table.weight.detach().T if self.head is None else self.head(x)


class Batches:
    """Batches by a generator of their own."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def next(self) -> torch.Tensor:
        return torch.randint(32, (4, 9), generator=self._generator).sort(dim=1).values

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class Training:
    """One process of a training: made afresh, it knows nothing but the URLs.

    Accumulates over two batches, clips, and follows a schedule that does not restore its learning rate.
    """

    def __init__(
        self,
        optimizer: str = "AdamW",
        implementation: str = "foreach",
        *,
        closure: bool = False,
        clip: float = 0.5,
        set_to_none: bool = True,
        **more: Any,
    ) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.model = Net(sparse=optimizer == "SparseAdam", matrices=optimizer == "Muon")
        kind = getattr(torch.optim, optimizer)
        options = {**OPTIONS[optimizer], **IMPLEMENTATIONS.get(implementation, {}), **more}
        self.optimizer = kind(self.model.parameters(), **options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 7))
        self.batches = Batches()
        self.closure, self.clip, self.set_to_none = closure, clip, set_to_none
        self.after: Callable[[], None] | None = None
        self.stateful: dict[str, Any] = {}
        self.checkpointer: Any = None

    def log(
        self,
        url: str,
        log: str | None,
        *,
        every: int = 5,
        steps: int = 2,
        overhead: float | None = None,
        **options: Any,
    ) -> "Training":
        """Give it a checkpointer; with a log of its steps, for which training waits, if there is a place for it."""
        own = shrinkpoint.StepLog(segment_steps=steps, overhead=overhead)
        logged = {} if log is None else {"step_log": own, "log_url": log}
        self.checkpointer = shrinkpoint.Checkpointer(
            url,
            self.model,
            self.optimizer,
            **grouped(
                **{
                    "every": every,
                    "scheme": "lossless",
                    "scheduler": self.scheduler,
                    "batches": self.batches,
                    **self.stateful,
                    **logged,
                    **options,
                }
            ),
        )
        return self

    def step(self, step: int) -> float:
        """One training step; the loss."""

        def work() -> float:
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
            total = 0.0
            for _ in range(2):
                tokens = self.batches.next()
                logits = self.model(tokens[:, :-1], spare=step % 3 == 0)
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 2
                loss.backward()
                total += loss.item()
            if not self.model.table.sparse:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            return total + random.random() + float(np.random.rand())

        if self.closure:
            loss = self.optimizer.step(work)
        else:
            loss = work()
            self.optimizer.step()
        if self.after is not None:
            self.after()
        self.scheduler.step()
        return float(loss)

    def run(self, begin: int, end: int) -> list[float]:
        """Some steps with their losses; every save is committed before the next step."""
        losses = []
        for step in range(begin, end):
            losses.append(self.step(step))
            if self.checkpointer is not None:
                self.checkpointer.step(step + 1)
                self.checkpointer.flush()
        return losses

    def leave(self) -> None:
        """Close the log and the run, without a last save."""
        leave(self.checkpointer)

    def crash(self) -> None:
        """What remains after a kill -9: all that was written, and no hooks."""
        self.checkpointer.step_log.flush()
        self.checkpointer.step_log.log._recorder.close()
        self.checkpointer.saver.close()

    @property
    def digest(self) -> str:
        """Of weights and optimizer state."""
        return fingerprint([self.optimizer])

    def buffers(self) -> list[torch.Tensor]:
        """Copies of the model's."""
        return [buffer.clone() for buffer in self.model.buffers()]


def held_up(monkeypatch: Any) -> threading.Event:
    """Nothing is written until the event is set."""
    put, go = SegmentWriter._put, threading.Event()

    def held(*arguments, **members) -> object:
        assert go.wait(600)
        return put(*arguments, **members)

    monkeypatch.setattr(SegmentWriter, "_put", held)
    return go


@dataclass(frozen=True, kw_only=True)
class Life:
    """One process of a training that is killed."""

    folder: str
    """For the run, and the journals of all processes."""
    log: str
    """The folder of the step log."""


SEGMENT = 3
"""Steps in a segment of these trainings."""
PAUSE_S = 0.02
"""What a step takes longer than this tiny model does: the log is then written within a step, as in a real training."""


def journal_of(folder: str | Path, process: int) -> Path:
    """What a process notes about its steps."""
    return Path(folder) / f"journal-{process}"


def saves_no_more(folder: str | Path, process: int) -> Path:
    """A file that is there once this process is to save no more."""
    return Path(folder) / f"saves-no-more-{process}"


def overtaken(folder: str | Path, process: int) -> Path:
    """A file that is there once another process has continued the training of this one."""
    return Path(folder) / f"overtaken-{process}"


def main(life: Life) -> None:
    """Train until killed, and note every step before the next one begins.

    Where another process has taken over, the gradients are other ones from then on, so that nothing that is logged here may
    ever be replayed. There are no more checkpoints either: that they are refused is the run's matter, not that of its log.
    A process that commits one beside its successor finds the successor's log and ends its own, so one of which the log is to
    go on must save no more before the successor begins.
    """
    log = shrinkpoint.StepLog(segment_steps=SEGMENT)
    training = Training().log(f"{life.folder}/run", life.log, every=20, step_log=log)
    checkpointer = training.checkpointer
    begin = checkpointer.resume()
    stray, last_save = (place(life.folder, os.getpid()) for place in (overtaken, saves_no_more))
    with journal_of(life.folder, os.getpid()).open("x", buffering=1) as journal:
        first = {
            "resumed": begin,
            "digest": training.digest,
            "session": checkpointer.step_log.log._writer._session,
        }
        replayed = [str(reference.key) for reference in checkpointer.step_log.log._inherits]
        journal.write(json.dumps({**first, "replayed": replayed}) + "\n")
        for step in itertools.count(begin):
            if checkpointer._every is not None and (last_save.exists() or stray.exists()):
                checkpointer._every = None
                if not stray.exists():
                    checkpointer.flush()
            if stray.exists():
                training.clip = 1e-3
            loss = training.step(step)
            checkpointer.step(step + 1)
            log = checkpointer.step_log.log
            line = {"step": step + 1, "loss": loss, "digest": training.digest}
            journal.write(
                json.dumps(
                    {
                        **line,
                        "written": log.written,
                        "gaps": log.gaps,
                        "off": log.off,
                        "saves": len(checkpointer.reports()),
                        "saves_on": checkpointer._every is not None,
                    }
                )
                + "\n"
            )
            time.sleep(PAUSE_S)


def serve() -> None:
    """For each line on stdin, a `Life` as JSON: fork it and print its process id; for a number: reap that process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # import and compile everything once, before the first fork
        training = Training().log(f"{folder}/run", f"{folder}/log", every=2)
        training.run(0, 4)
        training.checkpointer.close()
    for line in sys.stdin:
        text = line.strip()
        if text.isdecimal():
            print(os.waitpid(int(text), 0)[1], flush=True)
            continue
        child = os.fork()
        if child == 0:
            status = 1
            try:
                main(Life(**json.loads(text)))
                status = 0
            except BaseException:  # noqa: BLE001 - the child must never return into the server's loop
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(child, flush=True)


if __name__ == "__main__":
    serve()
