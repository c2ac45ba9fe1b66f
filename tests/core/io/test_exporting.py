"""Weights exported tensor by tensor: the same as those that are loaded, in one file or several, within little memory."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.io.export import bytes_of, export_weights


def trained(url: Path, model: torch.nn.Module, steps: int = 2) -> None:
    """A run of some checkpoints of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with shrinkpoint.Checkpointer(
        url,
        model,
        optimizer,
        every=1,
        scheme="lossless",
        advanced=shrinkpoint.Advanced(busy="wait", threads=1),
    ) as checkpointer:
        for step in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            checkpointer.step(step + 1)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
        self.last.weight = self.first.weight
        self.inner = torch.nn.Linear(8, 40)
        self.register_buffer("count", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("flags", torch.tensor([True, False, True]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trained(tmp_path / "run", Tied())
    return tmp_path / "run"


def test_one_file_has_what_load_weights_gives(run: Path, tmp_path: Path) -> None:
    exported = export_weights(f"{run}#step=1", tmp_path / "model.safetensors")
    wanted = shrinkpoint.load_weights(f"{run}#step=1")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys() - {"last.weight"}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    assert (exported.step, exported.seq, exported.tensors) == (1, 0, 5)
    assert exported.notes == ("last.weight is tied to first.weight, which contains the tensor",)
    model = Tied()
    from safetensors.torch import load_model

    load_model(model, str(tmp_path / "model.safetensors"))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_several_files_have_an_index(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"older")
    with pytest.raises(ConfigError, match="exists already"):
        export_weights(run, target, max_shard_size=1700)
    exported = export_weights(run, target, max_shard_size=1700, force=True)
    assert not target.exists()  # readers would prefer it to the index
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert [path.name for path in exported.files] == names[:2]
    index = json.loads((tmp_path / names[2]).read_text())
    wanted = shrinkpoint.load_weights(run)
    assert index["metadata"]["total_size"] == 50 * 8 * 4 + 40 * 9 * 4 + 8 + 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], wanted[name])
    assert index["weight_map"].keys() == wanted.keys() - {"last.weight"}


def test_a_failed_export_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shrinkpoint.io.export.SafetensorsWriter.put", fails)
    with pytest.raises(StoreError, match=r"model.safetensors: No space left"):
        export_weights(run, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_sizes_and_their_use(run: Path, tmp_path: Path) -> None:
    assert [bytes_of(text) for text in ("5GB", "1.5 MiB", "700")] == [5 * 10**9, 3 * 2**19, 700]
    with pytest.raises(ConfigError, match="'5 apples' is no size"):
        bytes_of("5 apples")
    refused = CliRunner().invoke(
        app, ["export", str(run), str(tmp_path / "m.ckpt"), "--max-shard-size", "1GB"]
    )
    assert refused.exit_code == 2
    done = CliRunner().invoke(
        app, ["export", str(run), str(tmp_path / "m.safetensors"), "--max-shard-size", "1.7KB", "--json"]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert len(report["files"]) == 2
    assert report["path"].endswith("m.safetensors.index.json")
    assert (report["step"], report["seq"]) == (2, 1)


@pytest.mark.slow
def test_transformers_loads_the_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=101, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    trained(tmp_path / "run", model)
    folder = tmp_path / "model"
    folder.mkdir()
    config.save_pretrained(folder)
    exported = export_weights(tmp_path / "run", folder / "model.safetensors", max_shard_size=30_000)
    assert len(exported.files) > 2
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder)
    wanted = model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


MEMORY = """
    import sys
    from pathlib import Path

    import torch

    import shrinkpoint
    from shrinkpoint.io import export as exporting

    run, out = sys.argv[1:]

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    exporting._BATCH = 2**23
    exporting.export_weights(run + "-small", out + "-small.safetensors")  # loads what any export needs
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    exporting.export_weights(run, out + ".safetensors")
    print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """Before, the whole state was decoded: 200 MB here.

    Freed memory that glibc keeps is not counted, which depends on what the process did before: large blocks are given back at once.
    """
    trained(tmp_path / "run-small", Tied())
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    trained(tmp_path / "run", model)
    program = [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path / "run"), str(tmp_path / "out")]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(program, check=True, capture_output=True, text=True, env=environment)
    grown = int(done.stdout)
    wanted = model.state_dict()
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    print(f"{grown / 1e6:.1f} MB for 67 MB of weights, of a state of 201 MB")
    assert grown < 40e6
