"""What is compiled is noted, for these coders, this numba and this processor; and it is all that a save needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from shrinkpoint.cli.app import app
from shrinkpoint.engine import warmup
from shrinkpoint.engine.warmup import compile_coders, is_compiled
from shrinkpoint.errors import ConfigError
from shrinkpoint.runtime import kernel_cache

FRESH = """
import sys
import torch
from numba.core import event
from shrinkpoint import Saver, SaverConfig
from shrinkpoint.state.roles import describe_training
from shrinkpoint.engine.warmup import compile_coders

class Names(event.Listener):
    def __init__(self):
        self.names = []
    def on_start(self, event):
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith("shrinkpoint"):
            self.names.append(f"{function.__module__}.{function.__name__}")
    def on_end(self, event):
        pass

torch.manual_seed(0)  # which kernels are called depends on the data
listener = Names()
event.register("numba:compile", listener)
if sys.argv[1] == "compile":
    assert compile_coders("auto")
    print(len(listener.names))
else:
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Sequential(torch.nn.Conv1d(24, 96, 3), torch.nn.Linear(30, 300), torch.nn.Embedding(200, 40))
        model = model.to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
        url = f"{sys.argv[2]}-{dtype}"
        saver = Saver(url, SaverConfig())
        for step in range(1, 5):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * 2**step
            optimizer.step()
            state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
            saver.save(state, step=step, describe=describe, exact=step == 4, wait=True)
        assert [report.step for report in saver.reports()] == [1, 2, 3, 4]
        Saver(url).restore()
    print(*listener.names)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of numba's."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(warmup, "cache_folder", lambda: folder)
    monkeypatch.setattr(warmup, "_folders", lambda: iter([folder]))
    return folder


def test_what_is_compiled_is_remembered_until_a_source_changes(cache: Path, monkeypatch) -> None:
    assert not is_compiled("lossless")
    before = torch.random.get_rng_state()
    assert compile_coders("lossless")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert is_compiled("lossless")
    assert not is_compiled("auto")
    monkeypatch.setattr(kernel_cache, "kernel_sources", lambda: "others")
    assert not is_compiled("lossless")
    assert compile_coders("lossless")
    assert is_compiled("lossless")


def test_without_a_cache_nothing_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "cache_folder", lambda: None)
    monkeypatch.setattr(warmup, "_folders", lambda: iter([]))
    made: list[str] = []
    monkeypatch.setattr(warmup, "_make_and_restore", lambda scheme, options: made.append(scheme))
    assert not compile_coders("lossless")
    result = CliRunner().invoke(app, ["compile"])
    assert result.exit_code == 1
    assert "NUMBA_CACHE_DIR" in result.output
    assert made == []


def test_a_mark_in_a_folder_that_may_only_be_read_counts(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "_make_and_restore", lambda scheme, options: None)
    assert compile_coders("auto")
    monkeypatch.setattr(warmup, "cache_folder", lambda: None)
    monkeypatch.setattr(warmup, "_folders", lambda: iter([tmp_path / "none", cache]))
    assert is_compiled("auto")
    assert not compile_coders("auto")


def test_nothing_lasts_where_compiling_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.entropy.static.rans_kernels.encode", lambda *arguments: None)
    assert warmup.cache_folder() is None
    assert not is_compiled("auto")


def test_what_there_is_not() -> None:
    for function in (compile_coders, is_compiled):
        with pytest.raises(ConfigError, match=r"scheme must be .* not 'zip'"):
            function("zip")


def test_command_compiles_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(warmup, "_make_and_restore", lambda scheme, options: made.append(scheme))
    for _ in range(2):
        result = CliRunner().invoke(app, ["compile", "--scheme", "auto"])
        assert result.exit_code == 0, result.output
    assert "already" in result.output
    assert made == ["auto", "lossless"]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # every kernel is compiled, which takes minutes where other work is done
def test_nothing_is_left_to_compile_for_a_save(tmp_path: Path) -> None:
    """In a process of its own with an empty cache, and then in another, which saves and restores what real models have."""
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    said = [
        subprocess.run(
            [sys.executable, "-c", FRESH, what, str(tmp_path / "run")],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for what in ("compile", "save")
    ]
    assert int(said[0][0]) > 20
    assert said[1] == []
