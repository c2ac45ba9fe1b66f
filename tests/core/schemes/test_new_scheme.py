"""CONTRIBUTING's "How to add a scheme": two files, and the scheme works everywhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys
import torch
import shrinkpoint
from shrinkpoint.cli.app import app
from typer.testing import CliRunner

torch.manual_seed(0)
url = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
images = torch.randn(32, 64)


def loss():
    return model(images).square().mean()


def trained():
    with shrinkpoint.Checkpointer(url, model, optimizer, scheme="half", evaluate=loss, every=2, busy="wait") as checkpointer:
        start = checkpointer.resume()
        for step in range(start or 0, 6):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            checkpointer.step(step + 1)
    return start


assert not trained()
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
assert trained() == 6
weight = model[0].weight.detach()
assert torch.equal(weight, weight.half().float()) and weight.abs().sum() > 0
assert shrinkpoint.load_weights(url)["0.weight"].equal(weight)
shown = CliRunner().invoke(app, ["show", url])
assert "half-weight" in shown.output or "half" in shown.output, shown.output
assert CliRunner().invoke(app, ["verify", url]).exit_code == 0
print("restored")
"""


def blocks() -> list[str]:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## How to add a scheme")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.mark.slow
def test_a_scheme_needs_a_module_and_an_entry(tmp_path: Path) -> None:
    package = tmp_path / "shrinkpoint"
    for folder, into in (("core", ""), ("callbacks", "callbacks"), ("integrations", "integrations")):
        shutil.copytree(
            ROOT / folder, package / into, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    module, entry = blocks()
    (package / "schemes" / "published" / "half.py").write_text(module)
    catalogue = package / "schemes" / "catalogue.py"
    text = catalogue.read_text()
    for place, more in (
        (
            "\n__all__ =",
            "from shrinkpoint.schemes.published.half import Half, HalfCodec\n"
            "from shrinkpoint.schemes.recipe import WeightOptions\n",
        ),
        ('    "lossless",\n]', '    "half",\n'),
        ('        "lossless": SchemeEntry', entry),
    ):
        assert text.count(place) == 1
        text = text.replace(place, more + place)
    catalogue.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("restored")
