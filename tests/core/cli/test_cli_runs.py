"""The command line on real runs: `ls`, `show`, `verify`, `export`, on a folder, in memory and on S3."""

import contextlib
import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support.cli_runs import STEPS, Model, made_run, make_run, run, run_json
from support.s3 import moto_server, new_bucket, storage_options
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.saver import Saver
from shrinkpoint.store.run import RunStore


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture(scope="module", params=["folder", "memory", "s3"])
def place(request: pytest.FixtureRequest, made: Path) -> Iterator[tuple[str, list[str]]]:
    """A run's URL, and what else the command line needs in order to reach it."""
    if request.param == "folder":
        yield str(made), []
    elif request.param == "memory":
        make_run("memory://cli/run", scheme="lossless")
        yield "memory://cli/run", []
    else:
        with moto_server() as server:
            options = storage_options(server)
            url = f"s3://{new_bucket(server)}/run"
            make_run(url, scheme="lossless", storage_options=options)
            flat = [f"key={options['key']}", f"secret={options['secret']}"]
            nested = [f"client_kwargs.{name}={value}" for name, value in options["client_kwargs"].items()]
            yield url, [word for pair in flat + nested for word in ("-o", pair)]


def test_every_command_reads_every_store(place: tuple[str, list[str]], tmp_path: Path) -> None:
    url, options = place
    listed = run_json("ls", url, *options)["checkpoints"]
    assert [checkpoint["step"] for checkpoint in listed] == list(reversed(STEPS))
    assert run_json("show", url, *options)["step"] == STEPS[-1]
    assert run_json("verify", url, "--all", *options)["sound"] == len(STEPS)
    run("export", url, str(tmp_path / "a.ckpt"), *options)
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == STEPS[-1]
    run("report", url, "-o", str(tmp_path / "a.html"), *options)
    assert f"from step {STEPS[-1]}" in (tmp_path / "a.html").read_text(encoding="utf-8")
    key = listed[2]["key"]
    assert run_json("show", f"{url}/{key}", *options)["step"] == 30


def test_ls_tells_what_the_saver_noted(folder: Path) -> None:
    report = run_json("ls", str(folder))
    newest, base = report["checkpoints"][0], report["checkpoints"][-1]
    assert (newest["seq"], newest["step"], newest["kind"], newest["chain_length"]) == (4, 50, "delta", 2)
    assert (base["seq"], base["kind"], base["chain_length"]) == (0, "base", 1)
    assert newest["metrics"] == {"val_loss": 1.0, "lr": 0.01}
    assert newest["ratio"] == pytest.approx(newest["raw_bytes"] / newest["bytes"])
    assert newest["damage"] is None
    assert report["stored_bytes"] == sum(file.stat().st_size for file in (folder / "data").iterdir())
    text = run("ls", str(folder)).stdout
    for word in ("seq", "delta", "val_loss", "5 checkpoints", " on disk instead of "):
        assert word in text
    highs = [checkpoint["cost_high"] or 0 for checkpoint in report["checkpoints"]]
    assert text.count("a restore may raise the loss by at most") == (max(highs) > 0)


def at_a_terminal(*arguments: str, columns: int = 80) -> list[str]:
    """The lines that the program prints on a terminal."""
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    command = [sys.executable, "-m", "shrinkpoint", *arguments]
    process = subprocess.Popen(command, stdout=writing, env={**os.environ, "TERM": "dumb"})
    os.close(writing)
    printed = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while part := os.read(reading, 65536):
            printed += part
    os.close(reading)
    assert process.wait() == 0
    return printed.decode().splitlines()


@pytest.mark.parametrize("command", ["ls", "show"])
def test_every_row_is_one_line_of_80_columns(folder: Path, command: str) -> None:
    report = run_json(command, str(folder))
    head, *lines = at_a_terminal(command, str(folder))
    count = (
        len(report["checkpoints"]) if command == "ls" else sum(t["elements"] > 1 for t in report["tensors"])
    )
    assert max(map(len, [head, *lines])) <= 80
    first = head.split().index("bytes")
    assert all(line.split()[first] for line in lines[:count])
    assert any(("checkpoints in" if command == "ls" else "scalars") in line for line in lines[count:])


def test_show_sorts_filters_and_sums_up(folder: Path) -> None:
    weights = run_json("show", str(folder), "--role", "weight", "--sort", "bytes")["tensors"]
    assert {tensor["role"] for tensor in weights} == {"weight"}
    assert [t["bytes"] for t in weights] == sorted((t["bytes"] for t in weights), reverse=True)
    assert "there are" in run("show", str(folder), "--role", "wieght", code=2).stderr
    layers = run("show", str(folder), "--layers").stdout.splitlines()
    assert [line.split()[0] for line in layers[1:3]] == ["embedding", "norm"]
    everything = run_json("show", str(folder))["tensors"]
    scalars = [tensor["name"] for tensor in everything if tensor["elements"] == 1]
    assert scalars
    assert not any(name in run("show", str(folder)).stdout for name in scalars)
    assert all(name in run("show", str(folder), "--all").stdout for name in scalars)


def test_ls_marks_what_is_damaged_and_why(folder: Path) -> None:
    manifests = RunStore(folder).manifests()
    (folder / manifests[0].chain[0].key).unlink()  # the base of step 40, which step 50 needs
    blob = folder / manifests[3].chain[-1].key
    blob.write_bytes(blob.read_bytes()[:-1])  # step 20, which step 30 needs
    (folder / "commits" / "0000000007.json").write_bytes(b"half a manifest")
    report = run_json("ls", str(folder))
    damage = {checkpoint["step"]: checkpoint["damage"] for checkpoint in report["checkpoints"]}
    assert damage[10] is None
    assert all("missing" in damage[step] for step in (40, 50))
    assert all("bytes instead of" in damage[step] for step in (20, 30))
    assert [entry["key"] for entry in report["unreadable"]] == ["commits/0000000007.json"]
    text = run("ls", str(folder)).stdout
    assert "steps 50, 40: DAMAGED" in text
    assert "steps 30, 20: DAMAGED" in text
    assert "UNREADABLE commits/0000000007.json" in text


def test_show_reads_the_header_and_no_tensors(folder: Path) -> None:
    report = run_json("show", str(folder), "--step", "40")
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    weight = tensors["state_dict/embedding.weight"]
    assert (weight["role"], weight["dtype"], weight["shape"]) == ("weight", "float32", [96, 32])
    assert weight["bits_per_element"] == pytest.approx(8 * weight["bytes"] / (96 * 32))
    assert "state_dict/head.weight" not in tensors  # tied
    totals = report["totals"]
    assert sum(total["bytes"] for total in totals.values()) + report["overhead_bytes"] == report["bytes"]
    assert totals["exp_avg_sq"]["raw_bytes"] == sum(
        t["raw_bytes"] for t in tensors.values() if t["role"] == "exp_avg_sq"
    )
    assert report["checkpoint"]["configuration"]
    assert report["checkpoint"]["reason"]
    assert report["provenance"]["shrinkpoint"] == shrinkpoint.__version__
    text = run("show", str(folder)).stdout
    for word in ("bits/element", "state_dict/embedding.weight", "configuration", "header and index"):
        assert word in text

    key = folder / report["checkpoint"]["key"]
    data = bytearray(key.read_bytes())
    data[-1] ^= 1
    key.write_bytes(data)
    assert run_json("show", str(folder), "--step", "40")["tensors"] == report["tensors"]
    assert run_json("verify", str(folder), "--step", "40", code=1)["damaged"] == 1


def test_a_single_file_is_shown_verified_and_exported(tmp_path: Path) -> None:
    weights = Model().state_dict()
    shrinkpoint.save(weights, tmp_path / "model.bin")
    report = run_json("show", str(tmp_path / "model.bin"))
    assert report["checkpoint"] is None
    assert report["raw_bytes"] == sum(t.nbytes for n, t in weights.items() if n != "head.weight")
    assert run_json("verify", str(tmp_path / "model.bin"))["sound"] == 1
    run("export", str(tmp_path / "model.bin"), str(tmp_path / "model.safetensors"))
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["embedding.weight"], weights["embedding.weight"])
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04 something else")
    assert "not a shrinkpoint container" in run("show", str(tmp_path / "model.bin"), code=1).stderr
    assert run_json("verify", str(tmp_path / "model.bin"), code=1)["damaged"] == 1


def test_a_delta_alone_is_verified_as_far_as_it_can_be(folder: Path) -> None:
    key = RunStore(folder).manifests()[0].chain[-1].key
    (result,) = run_json("verify", str(folder / key))["results"]
    assert result["kind"] == "delta"
    assert result["sound"]
    assert not result["decoded"]
    assert "base is missing" in run("export", str(folder / key), str(folder / "a.ckpt"), code=1).stderr


def test_verify_says_what_is_damaged_and_why(folder: Path) -> None:
    assert run_json("verify", str(folder), "--all") | {"results": None} == {
        "url": str(folder),
        "sound": 5,
        "damaged": 0,
        "results": None,
    }
    assert len(run_json("verify", str(folder))["results"]) == 1
    blob = folder / RunStore(folder).manifests()[0].chain[0].key
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    report = run_json("verify", str(folder), "--all", code=1)
    broken = {result["step"]: result["error"] for result in report["results"] if not result["sound"]}
    assert set(broken) == {40, 50}
    assert all("does not match its checksum" in why for why in broken.values())
    run("verify", str(folder), "--step", "30")
    text = run("verify", str(folder), code=1).stdout
    assert "DAMAGED step 50" in text
    assert "1 of 1 damaged" in text


def test_verify_counts_unreadable_checkpoints(folder: Path) -> None:
    (folder / "commits" / "0000000004.json").write_bytes(b"")
    report = run_json("verify", str(folder), code=1)
    assert [(r["step"], r["sound"]) for r in report["results"]] == [(40, True), (None, False)]
    run("verify", str(folder), "--step", "40")


def test_an_export_equals_the_restored_state(folder: Path, tmp_path: Path) -> None:
    report = run_json("export", str(folder), str(tmp_path / "a.pt"), "--step", "30")
    assert (report["step"], report["seq"]) == (30, 2)
    restored = Saver(str(folder)).restore(30)
    assert restored is not None
    weights = restored.state.to_object()["state_dict"]
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert all(torch.equal(loaded["state_dict"][name], weight) for name, weight in weights.items())
    Model().load_state_dict(loaded["state_dict"])

    report = run_json("export", str(folder), str(tmp_path / "a.safetensors"), "--seq", "2")
    assert "head.weight is tied to embedding.weight" in report["notes"][0]
    model = Model()
    safetensors.torch.load_model(model, tmp_path / "a.safetensors")
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


def test_an_export_never_replaces_a_file_unasked(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.ckpt"
    target.write_bytes(b"precious")
    assert "--force" in run("export", str(folder), str(target), code=2).stderr
    assert target.read_bytes() == b"precious"
    run("export", str(folder), str(target), "--force")
    assert torch.load(target, weights_only=True)["global_step"] == STEPS[-1]


def test_the_newest_export_passes_damaged_checkpoints_over_and_says_so(folder: Path, tmp_path: Path) -> None:
    (folder / RunStore(folder).manifests()[0].chain[-1].key).unlink()
    result = run("export", str(folder), str(tmp_path / "a.ckpt"))
    assert "warning: checkpoint 4 (step 50) passed over" in result.stderr
    assert "step 40" in result.stdout
    assert "missing" in run("export", str(folder), str(tmp_path / "b.ckpt"), "--step", "50", code=1).stderr


# ---- errors


@pytest.mark.parametrize("end", ["latest", "stp=20", "step=x", ""])
def test_what_is_behind_the_url_is_no_part_of_a_folders_name(folder: Path, end: str) -> None:
    assert "#step=1000, #seq=12 or #newest" in run("show", f"{folder}#{end}", code=2).stderr


def test_show_names_the_file_that_is_damaged(folder: Path) -> None:
    newest = RunStore(str(folder)).manifests()[0]
    path = folder / newest.chain[-1].key
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    assert f"{folder}/{newest.chain[-1].key}: the container" in run("show", str(folder), code=1).stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify", "compact"])
def test_a_prefix_without_a_run_says_what_is_there(tmp_path: Path, command: str) -> None:
    assert "empty or does not exist" in run(command, str(tmp_path / "nowhere"), code=1).stderr
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"")
    assert "it holds cat.jpg" in run(command, str(tmp_path / "photos"), code=1).stderr
    (tmp_path / "photos" / "epoch=1.ckpt").touch()
    assert "`shrinkpoint try` and `import`" in run(command, str(tmp_path / "photos"), code=1).stderr
    assert sorted(os.listdir(tmp_path)) == ["photos"]
    assert sorted(os.listdir(tmp_path / "photos")) == ["cat.jpg", "epoch=1.ckpt"]
    assert "comma" not in run(command, str(tmp_path / "nowhere"), code=1).stderr
    told = run(command, f"{tmp_path / 'a'},b", code=1).stderr
    assert "the comma is part of the name" in " ".join(told.split())


def test_the_folder_above_runs_names_them(folder: Path) -> None:
    assert "the runs run. Add one" in run("show", str(folder.parent), code=1).stderr


def test_ls_of_a_folder_of_runs_is_a_table_of_them(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "more" / "other")
    listed = run_json("ls", str(folder.parent))["runs"]
    assert {one["run"] for one in listed} == {"run", "more/other"}
    assert all((one["checkpoints"], one["newest_step"]) == (5, 50) for one in listed)
    stored = run_json("ls", str(folder))["stored_bytes"]
    assert all(one["stored_bytes"] == stored for one in listed)
    head, *rows = run("ls", str(folder.parent)).stdout.splitlines()
    assert head.split()[:2] == ["run", "checkpoints"]
    assert len(rows) == 2


def test_of_a_folder_of_runs_it_is_said_which_are_damaged(folder: Path) -> None:
    for name, damaged in (("whole", ""), ("short", "data/*"), ("unreadable", "commits/*")):
        copied = Path(shutil.copytree(folder, folder.parent / "runs" / name))
        for file in sorted(copied.glob(damaged))[:1] if damaged else ():
            file.write_bytes(b"cut")
    told = run("ls", str(folder.parent / "runs")).stdout
    assert "short: " in told
    assert "unreadable: 1 checkpoint DAMAGED" in told
    assert "whole: " not in told
    listed = run_json("ls", str(folder.parent / "runs"))["runs"]
    assert {each["run"]: each["damaged"] > 0 for each in listed} == {
        "whole": False,
        "short": True,
        "unreadable": True,
    }


def test_a_file_in_a_runs_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    assert "is a file, not a run" in run("ls", str(tmp_path / "x"), code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["ls", "gopher://x/y"], 2, "unknown protocol 'gopher'"),
        (["ls", "s3://"], 2, "names no folder"),
        (["ls", "memory://x", "-o", "nonsense"], 2, "KEY=VALUE"),
        (["ls", "memory://x", "--storage-options", "{"], 2, "not JSON"),
        (["ls", "memory://x", "--storage-options", "[]"], 2, "JSON object"),
        (["show", "FOLDER", "--step", "31"], 1, "step 31; there are 10, 20, 30, 40, 50"),
        (["show", "FOLDER", "--seq", "9"], 1, "commit 9; there are"),
        (["show", "FOLDER", "--seq", "1", "--step", "20"], 2, "exclude each other"),
        (["verify", "FOLDER", "--all", "--step", "20"], 2, "exclude each other"),
        (["export", "FOLDER", "x.tar"], 2, "must end in one of .ckpt, .pt, .safetensors"),
    ],
)
def test_wrong_calls_get_one_clear_line(made: Path, arguments: list[str], code: int, why: str) -> None:
    result = run(*[str(made) if word == "FOLDER" else word for word in arguments], code=code)
    assert why in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.store.urls.find_spec", lambda name: None)
    assert 'pip install "shrinkpoint[s3]"' in run("ls", "s3://bucket/run", code=1).stderr


def test_an_unknown_option_is_a_usage_error(made: Path) -> None:
    run("ls", str(made), "--nonsense", code=2)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--debug", "ls", str(tmp_path)])
    assert type(result.exception).__name__ == "NoCheckpointError"


def test_storage_options_may_come_from_the_environment(tmp_path: Path) -> None:
    exported = {"SHRINKPOINT_STORAGE_OPTIONS": '{"key": "from-there"}'}
    result = CliRunner().invoke(app, ["ls", "s3://bucket/x", "-o", "no_such=1"], env=exported)
    assert result.exit_code == 1
    assert "storage_options" in result.stderr
    here = CliRunner().invoke(app, ["ls", str(tmp_path)], env=exported)  # a folder has no use for them
    assert "there is no run" in here.stderr
    given = CliRunner().invoke(app, ["ls", str(tmp_path), "-o", "key=x"], env=exported)
    assert given.exit_code == 2
    assert "drop them" in given.stderr


@pytest.mark.parametrize("command", ["show", "verify", "compact", "export"])
def test_one_checkpoint_is_addressed_in_the_url(tmp_path: Path, command: str) -> None:
    make_run(str(tmp_path / "run"))
    steps = [
        entry["step"]
        for entry in json.loads(run("ls", str(tmp_path / "run"), "--json").stdout)["checkpoints"]
    ]
    more = [str(tmp_path / "x.ckpt")] if command == "export" else []
    told = run(command, f"{tmp_path / 'run'}#step={steps[-1]}", *more, "--json").stdout
    assert f'"step": {steps[-1]}' in told
    both = run(
        command,
        f"{tmp_path / 'run'}#step={steps[-1]}",
        *more,
        "--step",
        "1",
        "--force" if more else "--json",
        code=2,
    )
    assert "leave --step" in both.stderr


def test_commands_about_a_run_refuse_a_checkpoint(tmp_path: Path) -> None:
    make_run(str(tmp_path / "run"))
    for command in (["ls"], ["prune", "--keep-last", "1"]):
        refused = run(command[0], f"{tmp_path / 'run'}#newest", *command[1:], code=2)
        assert "takes the run" in refused.stderr


def test_a_state_that_an_export_cannot_hold_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrinkpoint.save({"date": np.datetime64("2024-01-02")}, tmp_path / "x.shrink")
    error = run("export", str(tmp_path / "x.shrink"), str(tmp_path / "x.ckpt"), code=1).stderr
    assert "date contains a numpy.datetime64" in error
    assert issubclass(CannotRepresentError, shrinkpoint.ShrinkpointError)


# ---- the program


def test_the_program_starts_without_heavy_imports() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from shrinkpoint.cli.app import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'numba', 'lightning', 'torch', 's3fs', 'composer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_installed_program_prints_one_line_and_an_exit_code(made: Path, tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "shrinkpoint"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"shrinkpoint {shrinkpoint.__version__}\n"
    listed = subprocess.run([program, "ls", made, "--json"], capture_output=True, text=True, check=True)
    assert len(json.loads(listed.stdout)["checkpoints"]) == 5
    failed = subprocess.run([program, "ls", tmp_path], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: there is no run at")
    assert len(failed.stderr.splitlines()) == 1
    closed = subprocess.run(
        ["sh", "-c", f"'{program}' ls '{made}' >&-"], capture_output=True, text=True, check=False
    )
    assert (closed.returncode, closed.stderr) == (0, "")
