"""Real training that saves all the time, in children that are there to be killed.

Run as a program (with the tests' folder in PYTHONPATH) it imports everything once, then serves one request per line of
standard input: it forks a child that trains with the configuration in that line (JSON, the fields of TrainingConfig)
and answers with its process id; ``{"reap": pid}`` waits for that child and answers with its wait status. A fork costs
milliseconds where a new interpreter would spend seconds importing torch. The program ends, with its children, when
standard input closes.
"""

import hashlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from support.journal import Journal
from torch import nn

from shrinkpoint import Advanced, Checkpointer

__all__ = ["Scheme", "TrainingConfig", "state_digest", "train"]


Scheme = Literal["inshrinkerator", "lossless"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One child's training."""

    url: str | list[str]
    journal: str
    scheme: Scheme = "lossless"
    steps: int = 1_000_000
    keep_last: int = 3
    grace_s: float = 1.0
    width: int = 48


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if torch.is_tensor(value):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key], f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _tensors(item, f"{name}/{at}")


def state_digest(model: Any, optimizers: Any) -> str:
    """Digest of every tensor in the state dictionaries of a model and its optimizers, computed without shrinkpoint."""
    sha = hashlib.sha256()
    for name, tensor in (*_tensors(model, "model"), *_tensors(optimizers, "optimizers")):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train(config: TrainingConfig) -> None:
    """Train and save after every step until killed; the journal tells what was saved and what was acknowledged."""
    journal = Journal(config.journal)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(config.width, 64), nn.GELU(), nn.Linear(64, config.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held_out = torch.randn(16, config.width)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch), batch.flip(1))

    lossy = config.scheme == "inshrinkerator"
    advanced = Advanced(
        busy="wait",
        grace_s=config.grace_s,
        threads=1,
        key_every=4,
        guards=False,  # its noise is far wider than what a step moves the weights by: all would be exact
    )
    checkpointer = Checkpointer(
        config.url,
        model,
        optimizer,
        evaluate=(lambda: float(loss(held_out))) if lossy else None,
        scheme=config.scheme,
        keep_last=config.keep_last,
        advanced=advanced,
    )
    start = checkpointer.resume()
    journal.write("resumed", step=start, digest=state_digest(model.state_dict(), [optimizer.state_dict()]))
    acked = 0
    for step in range(start + 1, start + 1 + config.steps):
        optimizer.zero_grad()
        loss(torch.randn(8, config.width)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        journal.write("saving", step=step, digest=state_digest(model.state_dict(), [optimizer.state_dict()]))
        checkpointer.save(step)  # waits for the save before it, so that there is always one under way
        for report in checkpointer.reports()[acked:]:
            journal.write("ack", step=report.step, seq=report.seq)
            acked += 1
    checkpointer.close()


def _fork(config: TrainingConfig) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            train(config)
            status = 0
        except BaseException:  # noqa: BLE001 - the child must never return into the server's loop
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    return pid


def _serve() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # import and compile everything once, before the first fork
        for scheme in get_args(Scheme):
            train(
                TrainingConfig(url=f"{folder}/{scheme}", journal=f"{folder}/journal", scheme=scheme, steps=3)
            )
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            answer = os.waitpid(request["reap"], 0)[1]
            children.discard(request["reap"])
        else:
            answer = _fork(TrainingConfig(**request))
            children.add(answer)
        print(answer, flush=True)
    for child in children:
        os.kill(child, 9)


if __name__ == "__main__":
    _serve()
