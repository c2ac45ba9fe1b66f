"""A training that is compiled or wrapped at one start and not at the next is the same training: no name in a checkpoint shows it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.options import grouped
from torch import nn
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning"),
]
INPUTS = torch.linspace(-1, 1, 24).view(8, 3)


class Net(nn.Module):
    """`module` is a name of the user's own, and stays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.module(x))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def within(model: nn.Module) -> nn.Module:
    model.module = compiled(model.module)
    model.module._orig_mod[0] = nn.DataParallel(model.module._orig_mod[0])
    return model


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "not": lambda model: model,
    "compiled": compiled,
    "parallel": nn.DataParallel,
    "both": lambda model: compiled(nn.DataParallel(compiled(model))),
    "within": within,
}


def trained(url: Path, wrap: Callable[[nn.Module], nn.Module], steps: int, **options: Any) -> nn.Module:
    model = Net()
    wrapped = wrap(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(wrapped)
    options = {"scheme": "lossless", "busy": "wait", **options}
    with shrinkpoint.Checkpointer(
        str(url), wrapped, optimizer, **grouped(every=2, average=average, **options)
    ) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            optimizer.zero_grad()
            wrapped(INPUTS).square().mean().backward()
            optimizer.step()
            average.update_parameters(wrapped)
            checkpointer.step(step + 1)
    return model


@pytest.mark.parametrize("before", WRAPPED)
@pytest.mark.parametrize("after", WRAPPED)
def test_own_loop(tmp_path: Path, before: str, after: str) -> None:
    trained(tmp_path / "run", WRAPPED[before], 2)
    trained(tmp_path / "run", WRAPPED[after], 4)
    trained(tmp_path / "whole", WRAPPED["not"], 4)
    weights = shrinkpoint.load_weights(str(tmp_path / "run"))
    Net().load_state_dict(weights)
    whole = shrinkpoint.load_weights(str(tmp_path / "whole"))
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
    out = tmp_path / "run.safetensors"
    assert CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(out)]).exit_code == 0
    assert load_file(out).keys() == Net().state_dict().keys()
    arguments = ["diff", "--json", f"{tmp_path}/whole", f"{tmp_path}/run"]
    diff = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert {row["state"] for row in diff["tensors"]} == {"bit-identical"}


def test_roles_are_found_and_losses_measured(tmp_path: Path) -> None:
    def sizes(name: str) -> dict[str, tuple[str, str]]:
        trained(tmp_path / name, WRAPPED[name], 2, scheme="auto", evaluate=lambda: 1.0)
        shown = CliRunner().invoke(app, ["show", "--json", str(tmp_path / name)]).stdout
        return {tensor["name"]: (tensor["role"], tensor["codec"]) for tensor in json.loads(shown)["tensors"]}

    assert sizes("both") == sizes("within") == sizes("not")


@pytest.mark.parametrize(("before", "after"), [("not", "compiled"), ("within", "not"), ("both", "within")])
def test_transformers(tmp_path: Path, before: str, after: str) -> None:
    pytest.importorskip("transformers")
    from transformers import Trainer, TrainingArguments

    from shrinkpoint.callbacks.transformers import CompressedCheckpoint

    class Model(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": super().forward(x).square().mean()}

    def train(url: str, steps: int, wrap: str) -> dict[str, torch.Tensor]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=steps,
            save_steps=2,
            use_cpu=True,
            report_to=[],
            lr_scheduler_type="constant",
            remove_unused_columns=False,
            disable_tqdm=True,
            per_device_train_batch_size=2,
        )
        trainer = Trainer(
            WRAPPED[wrap](Model()),
            arguments,
            train_dataset=[{"x": x} for x in INPUTS],
            callbacks=[CompressedCheckpoint(f"{tmp_path}/{url}", scheme="lossless")],
        )
        trainer.train()
        return shrinkpoint.load_weights(f"{tmp_path}/{url}")

    train("run", 2, before)
    found, whole = train("run", 4, after), train("whole", 4, "not")
    Net().load_state_dict(found)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
