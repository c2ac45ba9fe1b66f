"""Every public docstring has an example, and every example runs: what the API reference shows is what a user may paste.

The examples run in a folder that has a run ``runs/7`` with checkpoints of the steps 1000, 2000 and 3000 of `model`, a
file ``model.shrink``, and the names of `namespace`.
"""

import doctest
import importlib
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint
from shrinkpoint.schemes import catalogue

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = ("shrinkpoint", "shrinkpoint.errors", "shrinkpoint.store.objects")
FRAMEWORKS = ("lightning", "composer", "transformers")
FURTHER = (
    "shrinkpoint.checkpointer.Stateful",
    "shrinkpoint.export.Exported",
    "shrinkpoint.export.export",
    "shrinkpoint.reports.Accepted",
    "shrinkpoint.reports.SaveReport",
    "shrinkpoint.roles.describe_training",
    "shrinkpoint.saver.Restored",
    "shrinkpoint.state.TrainingState",
    "shrinkpoint.store.manifest.Manifest",
    "shrinkpoint.store.run.RunStore",
)
"""What docs/reference shows beyond the modules' ``__all__`` and the schemes' options."""


def _names() -> Iterator[str]:
    for module in MODULES:
        names = importlib.import_module(module).__all__
        yield from (f"{module}.{name}" for name in names if name != "__version__")
    yield from FURTHER
    options = {type(catalogue.options_of(name)) for name in catalogue.SCHEMES} - {type(None)}
    yield from sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in options)


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
        str(folder / "runs" / "7"), model, optimizer, scheme="lossless", busy="wait", compile_ahead=False
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


def _run(name: str, namespace: dict[str, Any]) -> None:
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    examples = doctest.DocTestParser().get_doctest(
        inspect.getdoc(found) or "", dict(namespace), name, inspect.getsourcefile(found), None
    )
    assert examples.examples, f"{name} has no example in its docstring"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(examples, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", list(_names()))
def test_the_example_of_each_public_docstring_runs(name: str, namespace: dict[str, Any]) -> None:
    _run(name, namespace)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_examples_of_each_callback_run(framework: str, namespace: dict[str, Any]) -> None:
    pytest.importorskip(framework)
    callbacks = importlib.import_module(f"shrinkpoint.callbacks.{framework}")
    for name in callbacks.__all__:
        _run(f"shrinkpoint.callbacks.{framework}.{name}", namespace)
