"""Every public docstring has an example, and every example runs: what the API reference shows is what a user may paste.

The examples run in a folder that has a run ``runs/7`` with checkpoints of the steps 1000, 2000 and 3000 of `model`, a
file ``model.shrink``, and the names of `namespace`.
"""

import doctest
import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
NAMES = sorted(
    name
    for page in REFERENCE.glob("*.md")
    for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
)
"""What the API reference shows; `make docs` fails if a public name is missing there."""


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run, and a file of one state."""
    folder = tmp_path_factory.mktemp("docstrings")
    model, optimizer = _model()
    inputs = torch.randn(16, 32)
    checkpointer = shrinkpoint.Checkpointer(
        str(folder / "runs" / "7"),
        model,
        optimizer,
        scheme="lossless",
        advanced=shrinkpoint.Advanced(busy="wait"),
    )
    for step in (1000, 2000, 3000):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        checkpointer.save(step, metrics={"val_loss": 2e3 / step})
    checkpointer.close()
    shrinkpoint.save({"weights": model.state_dict(), "epoch": 3}, folder / "model.shrink")
    return folder


@pytest.fixture
def namespace(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take as given, in a folder of their own."""
    shutil.copytree(folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    model, optimizer = _model()
    inputs = torch.randn(16, 32)

    def train_one_step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def validation_loss(module: torch.nn.Module) -> float:
        return float(module(inputs).square().mean())

    return {
        "model": model,
        "optimizer": optimizer,
        "shrinkpoint": shrinkpoint,
        "torch": torch,
        "train_one_step": train_one_step,
        "validation_loss": validation_loss,
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_each_public_docstring_runs(name: str, namespace: dict[str, Any]) -> None:
    module, _, attribute = name.rpartition(".")
    if module.startswith("shrinkpoint.callbacks."):
        pytest.importorskip(module.rpartition(".")[2])
    found = getattr(importlib.import_module(module), attribute)
    examples = doctest.DocTestParser().get_doctest(
        inspect.getdoc(found) or "", namespace, name, inspect.getsourcefile(found), None
    )
    assert examples.examples, f"{name} has no example in its docstring"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(examples, out=said.append)
    assert not said, "".join(said)
