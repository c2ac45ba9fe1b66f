"""The wheel with compiled kernels, in an environment without this tree and with an empty cache of numba's."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support.wheels import ROOT, built, environment, installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="no level of processors is known for others"),
]

SAVE_AND_RESTORE = """
import sys
import torch
from numba.core import event
from shrinkpoint import Saver, SaverConfig
from shrinkpoint.engine.warmup import is_compiled
from shrinkpoint.state.roles import describe_training

class Names(event.Listener):
    def on_start(self, event):
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith("shrinkpoint"):
            print(f"{function.__module__}.{function.__name__}")
    def on_end(self, event):
        pass

event.register("numba:compile", Names())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv1d(24, 96, 3), torch.nn.Linear(30, 300), torch.nn.Embedding(200, 40))
optimizer = torch.optim.AdamW(model.parameters())
describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
saver = Saver(sys.argv[1], SaverConfig())
for step in range(1, 5):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 2**step
    optimizer.step()
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
    saver.save(state, step=step, describe=describe, exact=step == 4, wait=True)
assert [report.step for report in saver.reports()] == [1, 2, 3, 4]
Saver(sys.argv[1]).restore()
print("restored", is_compiled("auto"))
"""


@pytest.fixture(scope="module", name="wheels")
def _wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """For all platforms, and for this one."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel, out = built(folder), folder / "out"
    command = [sys.executable, ROOT / ".ci" / "platform_wheel.py", wheel, "--out", out]
    out.mkdir()
    (out / "shrinkpoint-0.0.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"of another version")
    for _ in range(2):  # the second one takes the place of the first
        subprocess.run(command, check=True, cwd=folder)
    (out / "shrinkpoint-0.0.0-cp311-cp311-linux_x86_64.whl").unlink()
    [made] = out.glob("*.whl")
    return wheel, made


def run(python: Path, folder: Path, **variables: str) -> list[str]:
    """What a training's saves and a restore compile, and a last line."""
    folder.mkdir()
    done = subprocess.run(
        [python, "-W", "ignore", "-c", SAVE_AND_RESTORE, str(folder / "run")],
        cwd=folder,
        env=environment() | {"NUMBA_CACHE_DIR": str(folder / "cache"), **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def verified(python: Path, url: Path) -> None:
    """Every tensor's digest, by this environment's kernels."""
    command = [python.parent / "shrinkpoint", "verify", url]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_compiled_where_the_platforms_wheel_is_installed(
    wheels: tuple[Path, Path], tmp_path: Path
) -> None:
    assert wheels[0].name.endswith("-none-any.whl")
    assert "x86_64" in wheels[1].name
    for_all, python = (
        installed(wheel, tmp_path / name)
        for wheel, name in zip(wheels, ("for-all", "platforms"), strict=True)
    )
    assert run(python, tmp_path / "first") == ["restored True"]
    assert not list((tmp_path / "first" / "cache").rglob("*.nbc"))

    *compiled, last = run(for_all, tmp_path / "second")
    assert len(compiled) > 20
    assert last == "restored False"
    verified(python, tmp_path / "second" / "run")
    verified(for_all, tmp_path / "first" / "run")

    # another source of the kernels, as after an editor's change: they count as none
    [changed] = (tmp_path / "platforms").glob(
        "lib/python*/site-packages/shrinkpoint/entropy/static/rans_kernels.py"
    )
    changed.write_text(changed.read_text() + "\n")
    *compiled, last = run(python, tmp_path / "third")
    assert len(compiled) > 20
    assert last == "restored False"
