"""Real runs for the tests of the command line: saved by `Saver`, with tied weights, a buffer, and both kinds."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shrinkpoint.cli.app import app
from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.saver import Saver
from shrinkpoint.state.roles import describe_training

STEPS = (10, 20, 30, 40, 50)
"""In two chains, each delta against the one before: base, delta, delta, base, delta."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def make_run(url: str, *, scheme: str = "inshrinkerator", more: Any = None, **options: Any) -> Saver:
    """A run of five checkpoints, steps as in `STEPS`, with the metric ``val_loss`` = 5, 4, 3, 2, 1."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    describe = describe_training(
        model, [optimizer], model_path=("state_dict",), optimizers_path=("optimizer_states",)
    )
    saver = Saver(url, SaverConfig(scheme=scheme, threads=1), **options)  # type: ignore[arg-type]
    for count, step in enumerate(STEPS):
        if step == 40:
            saver.forget(follows=saver.newest())
            saver.begin({"state_dict": model.state_dict()}, step=30, describe=describe)
        loss = nn.functional.cross_entropy(model(torch.randint(96, (16,))), torch.randint(96, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = {
            "state_dict": model.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
            "global_step": step,
            "callbacks": more or {},
        }
        saver.save(
            state, step=step, describe=describe, metrics={"val_loss": float(5 - count), "lr": 0.01}, wait=True
        )
    saver.close()
    return saver


def made_run(factory: pytest.TempPathFactory, **options: Any) -> Path:
    """The folder of such a run, made without a word."""
    folder = factory.mktemp("made") / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        make_run(str(folder), **options)
    return folder


def run(*arguments: str, code: int = 0) -> Any:
    """What a command says, which must end with this code."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def run_json(*arguments: str, code: int = 0) -> Any:
    """The same of ``--json``."""
    return json.loads(run(*arguments, "--json", code=code).stdout)
