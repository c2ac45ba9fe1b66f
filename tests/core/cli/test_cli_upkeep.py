"""The commands that change a run: `prune`, `undelete`, `compact`; a dry run changes nothing."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.cli_runs import made_run, run, run_json

from shrinkpoint.cli import prune as pruning
from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.saver import Saver
from shrinkpoint.store.run import RunStore


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps(folder: Path) -> list[int]:
    return [manifest.step for manifest in RunStore(folder).manifests()]


@pytest.mark.parametrize(
    "command", [["prune", "--keep-last", "1"], ["prune", "--pin", "a", "--step", "20"], ["compact"]]
)
def test_without_yes_nothing_changes(folder: Path, command: list[str]) -> None:
    before = contents(folder)
    name, *options = command
    assert not run_json(name, str(folder), *options)["done"]
    assert "give --yes" in run(name, str(folder), *options).stdout
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (["--keep-last", "2"], [50, 40]),
        (["--keep-every", "20"], [50, 40, 20, 10]),
        (["--keep-best", "1", "--metric", "val_loss", "--mode", "max"], [50, 10]),
        (["--keep-best", "2", "--metric", "val_loss"], [50, 40]),
        (["--keep-last", "1", "--keep-best", "1", "--metric", "val_loss", "--mode", "max"], [50, 10]),
    ],
)
def test_prune_does_what_its_dry_run_said(folder: Path, rules: list[str], kept: list[int]) -> None:
    said = run_json("prune", str(folder), *rules)
    assert [entry["step"] for entry in said["keep"]] == kept
    size = sum(file.stat().st_size for file in (folder / "data").iterdir())
    done = run_json("prune", str(folder), *rules, "--yes", "--grace", "0")
    assert done["done"]
    assert done["keep"] == said["keep"]
    assert done["containers_waiting"] == 0
    assert steps(folder) == kept
    assert size - sum(file.stat().st_size for file in (folder / "data").iterdir()) == said["bytes_freed"]
    run("verify", str(folder), "--all")


def test_removed_data_waits_for_its_grace(folder: Path) -> None:
    files = len(list((folder / "data").iterdir()))
    done = run_json("prune", str(folder), "--keep-last", "1", "--yes")
    assert steps(folder) == [50]
    assert done["containers_waiting"] == done["containers_freed"] == 3
    assert len(list((folder / "data").iterdir())) == files


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a byte, folder or new file fits any more; names go, and time stamps change."""
    real = os.open

    def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT:
            full()
        return real(path, flags, *rest, **more)

    def full(*arguments: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", opened)
    for name in ("write", "mkdir", "link", "rename", "replace"):
        monkeypatch.setattr(os, name, full)


def test_prune_without_grace_frees_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder / "probe", ignore_errors=True)  # as in a copy
    said = run_json("prune", str(folder), "--keep-last", "1")
    size = sum(file.stat().st_size for file in (folder / "data").iterdir())
    with monkeypatch.context() as patch:
        fill_disk(patch)
        done = run_json("prune", str(folder), "--keep-last", "1", "--yes", "--grace", "0")
    assert done["containers_waiting"] == 0
    assert steps(folder) == [50]
    assert size - sum(file.stat().st_size for file in (folder / "data").iterdir()) == said["bytes_freed"] > 0
    assert list(folder.glob("trash/*")) == []
    run("verify", str(folder), "--all")


def test_prune_with_a_grace_on_a_full_disk_frees_what_it_can_and_tells_the_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("prune", str(folder), "--keep-last", "2", "--yes")
    for path in (*folder.glob("trash/*"), *folder.glob("data/*")):
        os.utime(path, (0, 0))
    files = len(list((folder / "data").iterdir()))
    with monkeypatch.context() as patch:
        fill_disk(patch)
        said = run("prune", str(folder), "--keep-last", "1", "--yes", code=1).stderr
    assert "the disk is full" in said
    assert "prune --grace 0" in said
    assert steps(folder) == [50, 40]
    assert len(list((folder / "data").iterdir())) == files - 3
    run("verify", str(folder), "--all")


def test_ls_shows_what_waits_for_its_grace_apart(folder: Path) -> None:
    whole = run_json("ls", str(folder))
    assert (whole["unlisted_containers"], whole["unlisted_bytes"]) == (0, 0)
    assert "that none of these needs" not in run("ls", str(folder)).stdout
    run("prune", str(folder), "--keep-last", "1", "--yes")
    listed = run_json("ls", str(folder))
    assert listed["unlisted_containers"] == 3
    assert listed["stored_bytes"] + listed["unlisted_bytes"] == whole["stored_bytes"]
    assert listed["stored_bytes"] == sum(ref.size for m in RunStore(folder).manifests() for ref in m.chain)
    text = " ".join(run("ls", str(folder)).stdout.split())
    assert "and 3 containers" in text
    assert "shrinkpoint undelete" in text


def test_prune_that_frees_nothing_names_compact(folder: Path) -> None:
    first = run("prune", str(folder), "--keep-last", "1", "--yes", "--grace", "0").stdout
    assert "compact" not in first
    again = run("prune", str(folder), "--keep-last", "1", "--yes", "--grace", "0").stdout
    assert "1 containers" in again
    command = again.split("`")[1].split()
    assert command[:2] == ["shrinkpoint", "compact"]
    run(*command[1:])
    assert (
        run_json("prune", str(folder), "--keep-last", "1", "--yes", "--grace", "0")["containers_of_chains"]
        == 0
    )
    assert len(list((folder / "data").iterdir())) == 1
    assert "compact" not in run("prune", str(folder), "--keep-last", "1", "--yes", "--grace", "0").stdout


def test_prune_keeps_the_newest_sound_checkpoint_and_pinned_ones(folder: Path) -> None:
    run("prune", str(folder), "--pin", "release", "--step", "20", "--yes")
    (folder / RunStore(folder).manifests()[0].chain[-1].key).unlink()  # step 50 is the newest, and damaged
    said = run_json("prune", str(folder), "--keep-last", "1")
    assert [entry["step"] for entry in said["keep"]] == [50, 40, 20]
    run("prune", str(folder), "--keep-last", "1", "--yes", "--grace", "0")
    assert steps(folder) == [50, 40, 20]
    restored = Saver(str(folder)).restore(20)
    assert restored is not None


def test_prune_reads_what_it_takes_for_sound(folder: Path) -> None:
    newest = folder / RunStore(folder).manifests()[0].chain[-1].key
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1  # its size is right
    newest.write_bytes(data)
    run("prune", str(folder), "--keep-last", "1", "--yes", "--grace", "0")
    assert steps(folder) == [50, 40]
    with pytest.warns(ShrinkpointWarning, match="passed over"):
        restored = Saver(str(folder)).restore()
    assert restored is not None
    assert restored.manifest.step == 40


def test_prune_leaves_a_run_without_a_sound_checkpoint_alone(folder: Path) -> None:
    for file in (folder / "data").iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    before = contents(folder)
    assert (
        "none of them can be restored"
        in run("prune", str(folder), "--keep-last", "1", "--yes", code=1).stderr
    )
    assert contents(folder) == before


def test_prune_leaves_a_training_under_way_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Saver(str(folder), SaverConfig(scheme="lossless", threads=1))
    found = trainer.restore()
    assert found is not None
    state = found.state.to_object()
    report = pruning._report

    def meanwhile(*plan: Any) -> Any:
        for step in (60, 70, 80):
            trainer.save(state, step=step, wait=True)
        return report(*plan)

    monkeypatch.setattr(pruning, "_report", meanwhile)
    run("prune", str(folder), "--keep-last", "1", "--yes")
    assert steps(folder) == [80, 70, 60, 50]
    trainer.save(state, step=90, wait=True)
    assert steps(folder)[0] == 90
    run("verify", str(folder), "--all")


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ([], "say what to keep"),
        (["--keep-best", "1"], "give --metric too"),
        (["--keep-last", "1", "--step", "20"], "give --pin NAME too"),
        (["--keep-last", "1", "--metric", "val_loss"], "is for --keep-best"),
        (["--keep-best", "1", "--metric", "bleu"], "they have lr, val_loss"),
        (["--pin", "x", "--seq", "2", "--keep-best", "1", "--metric", "bleu"], "they have lr, val_loss"),
        (["--keep-best", "1", "--metric", "lr", "--mode", "best"], "'max'"),
    ],
)
def test_rules_that_cannot_work_are_refused(folder: Path, rules: list[str], why: str) -> None:
    before = contents(folder)
    assert why in run("prune", str(folder), *rules, "--yes", code=2).stderr
    assert contents(folder) == before


def test_pins_are_set_listed_and_released(folder: Path) -> None:
    pinned = run_json("prune", str(folder), "--pin", "best", "--seq", "2", "--yes")
    assert pinned == {"done": True, "pinned": {"name": "best", "seq": 2, "step": 30}}
    assert [c["pins"] for c in run_json("ls", str(folder))["checkpoints"]] == [[], [], ["best"], [], []]
    assert "pinned: best" in run("ls", str(folder)).stdout
    assert (
        "unpin it first" in run("prune", str(folder), "--pin", "best", "--seq", "3", "--yes", code=2).stderr
    )
    assert "the pins are: best" in run("prune", str(folder), "--unpin", "bset", code=2).stderr
    said = run_json(
        "prune", str(folder), "--unpin", "best", "--pin", "other", "--step", "20", "--keep-last", "1"
    )
    assert [entry["step"] for entry in said["keep"]] == [50, 20]
    run("prune", str(folder), "--unpin", "best", "--yes")
    assert RunStore(folder).pins() == {}
    assert "pinned step 50" in run("prune", str(folder), "--pin", "newest", "--yes").stdout


def test_commands_that_write_make_no_run_by_mistake(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for arguments in (
        ["prune", nowhere, "--pin", "a", "--yes"],
        ["prune", nowhere, "--unpin", "a", "--yes"],
        ["prune", nowhere, "--keep-last", "1", "--yes"],
    ):
        assert "there is no run" in run(*arguments, code=1).stderr
    assert not (tmp_path / "nowhere").exists()


def test_a_damaged_pin_does_not_hide_the_checkpoints_and_can_be_released(folder: Path) -> None:
    run("prune", str(folder), "--pin", "best", "--step", "20", "--yes")
    (folder / "pins" / "x.json").write_bytes(b"?")
    result = run("ls", str(folder), "--json")
    assert len(json.loads(result.stdout)["checkpoints"]) == 5
    assert "warning: the pins are not shown" in result.stderr
    assert "x.json" in run("prune", str(folder), "--keep-last", "1", code=1).stderr
    assert "would release pin x" in run("prune", str(folder), "--unpin", "x").stdout
    done = run_json("prune", str(folder), "--unpin", "x", "--keep-last", "1", "--yes")
    assert ([entry["step"] for entry in done["keep"]], done["unpinned"]) == ([50, 20], "x")
    assert list(RunStore(folder).pins()) == ["best"]


def test_compact_makes_a_base_of_the_newest_delta(folder: Path) -> None:
    run("prune", str(folder), "--pin", "last", "--yes")
    said = run_json("compact", str(folder), "--step", "50")
    assert (said["chain_length"], said["stored_exactly"], said["already_base"]) == (2, [], False)
    done = run_json("compact", str(folder), "--step", "50", "--yes")
    assert done["pins"] == ["last"]
    newest = RunStore(folder).manifests()[0]
    assert (newest.seq, newest.step, newest.kind) == (done["new_seq"], 50, "base")
    assert newest.chain[0].size == said["base_bytes"]
    run("verify", str(folder), "--all")
    assert "a base already" in run("compact", str(folder), "--yes").stdout
    run("prune", str(folder), "--keep-last", "1", "--yes", "--grace", "0")
    assert len(list((folder / "data").iterdir())) == 1


def test_undelete_brings_back_the_checkpoint_that_is_named(folder: Path) -> None:
    before = steps(folder)
    run("prune", str(folder), "--keep-last", "1", "--yes")
    kept = steps(folder)
    removed = [step for step in before if step not in kept]
    assert len(removed) > 1
    for name, chosen in (
        ([f"{folder}#step={removed[0]}"], removed[0]),
        ([str(folder), "--step", str(removed[1])], removed[1]),
    ):
        report = run_json("undelete", *name, "--yes")
        assert [entry["step"] for entry in report["undelete"]] == [chosen]
        kept.append(chosen)
        assert sorted(steps(folder)) == sorted(kept)


@pytest.mark.parametrize("command", [["prune", "--pin", "name"], ["undelete"], ["compact"]])
def test_options_of_the_store_are_read(folder: Path, command: list[str]) -> None:
    result = run(command[0], str(folder), *command[1:], "--storage-options", "[]", code=2)
    assert "must be a JSON object" in result.stderr
