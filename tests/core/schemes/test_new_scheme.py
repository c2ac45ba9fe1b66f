"""CONTRIBUTING's "How to add a scheme": a package of two files, and where it is installed the scheme works everywhere."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import torch
from support.options import grouped
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.errors import ConfigError, UnsupportedFormatError
from shrinkpoint.schemes import catalogue

ROOT = Path(__file__).parents[3]

TRAINING = """
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
    options = {"scheme": "half"}
    with shrinkpoint.Checkpointer(url, model, optimizer, evaluate=loss, every=2, advanced=shrinkpoint.Advanced(busy="wait"), **options) as checkpointer:
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
assert "half-scheme:weight" in shown.output, shown.output
assert CliRunner().invoke(app, ["verify", url]).exit_code == 0
print("restored")
"""


def installed(folder: Path) -> None:
    """Install the package of the section into a folder, as pip would."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## How to add a scheme")[1].split("\n## ")[0]
    (module,), (project,) = (
        re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL) for kind in ("python", "toml")
    )
    (folder / "half.py").write_text(module)
    told = tomllib.loads(project)["project"]
    metadata = folder / f"{told['name'].replace('-', '_')}-{told['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in told["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def run(program: str, site: Path, *arguments: str) -> str:
    """What a program says in a process of its own, where the packages of a folder are installed."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=site,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run that was saved where the package is installed."""
    folder = tmp_path_factory.mktemp("half")
    installed(folder)
    assert run(TRAINING, folder, f"{folder}/run").strip().endswith("restored")
    return f"{folder}/run"


def test_a_scheme_of_another_package_is_refused_by_its_name_where_that_is_not_installed(url: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        ConfigError, match=r"scheme must be 'auto' or .* or one that an installed package adds .* not 'half'"
    ):
        shrinkpoint.Checkpointer(url, model, optimizer, scheme="half", every=2)
    with pytest.raises(
        UnsupportedFormatError, match="codec 'half-scheme:weight' of the package 'half-scheme'"
    ):
        shrinkpoint.load_weights(url)
    with (
        shrinkpoint.Checkpointer(url, model, optimizer, scheme="lossless", every=2) as checkpointer,
        pytest.raises(UnsupportedFormatError, match="the package 'half-scheme', which is not installed"),
    ):
        checkpointer.resume()
    listed = CliRunner().invoke(app, ["ls", url, "--json"])
    assert [one["step"] for one in json.loads(listed.stdout)["checkpoints"]] == [6, 4, 2]
    verified = CliRunner().invoke(app, ["verify", url])
    assert verified.exit_code == 1
    assert "half-scheme" in verified.output


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("import there_is_no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("ENTRY = 7", "must be a SchemeEntry, not int"),
        (
            "from shrinkpoint.schemes.catalogue import SchemeEntry\nENTRY = SchemeEntry(None, choice='scale')",
            "has choice='scale'",
        ),
        (
            "from shrinkpoint.schemes.catalogue import ENTRIES\nENTRY = ENTRIES['excp']",
            "the codec 'excp-weight', whose id must begin with 'other-schemes:'",
        ),
    ],
)
def test_entry_points_that_are_no_schemes(
    module: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "other_schemes-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-schemes\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[shrinkpoint.schemes]\nother = other_schemes:ENTRY\n")
    (tmp_path / "other_schemes.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_schemes", raising=False)
    with pytest.raises(ConfigError, match=told) as refused:
        shrinkpoint.SaverConfig(scheme="other")
    assert "scheme 'other' of the package 'other-schemes'" in str(refused.value)
    assert catalogue.SCHEMES[0] == "auto"


def test_a_scheme_of_this_library_looks_for_no_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.entry_points

    def found(**parameters: str) -> object:
        assert parameters.get("group") != "shrinkpoint.schemes"
        return real(**parameters)

    monkeypatch.setattr("importlib.metadata.entry_points", found)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for scheme in ("auto", "lossless"):
        options = {"scheme": scheme, "evaluate": lambda: 1.0, "every": 1}
        with shrinkpoint.Checkpointer(
            f"{tmp_path}/{scheme}", model, optimizer, **grouped(**options)
        ) as checkpointer:
            checkpointer.save(1, wait=True)
        assert shrinkpoint.load_weights(f"{tmp_path}/{scheme}")
