"""`shrinkpoint report`: what its page says, of which runs, and how a browser shows it."""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import STEPS, made_run, run, run_json
from support.pages import Page, commit_run, look, noted

import shrinkpoint
from shrinkpoint.store.run import RunStore

OUT = "report.html"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def memory() -> str:
    return f"memory://report/{uuid.uuid4().hex}"


def page_of(url: object, target: Path, *options: str, code: int = 0) -> Page:
    """The page of a run, which one file has."""
    run("report", str(url), "-o", str(target), *options, code=code)
    return Page(target.read_text(encoding="utf-8"))


def test_it_says_how_small_how_safe_and_how_to_resume(folder: Path, tmp_path: Path) -> None:
    listed = run_json("ls", str(folder))
    page = page_of(folder, tmp_path / OUT)
    raw = sum(each["raw_bytes"] for each in listed["checkpoints"])
    assert f"{raw / listed['stored_bytes']:.1f} times smaller" in page.words
    assert "all 5 complete" in page.words
    assert f"from step {STEPS[-1]}" in page.words
    assert str(folder) in page.words
    assert "all 5 verified" in page_of(folder, tmp_path / OUT, "--verify").words


def test_the_way_to_resume_is_the_framework_s_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    waits = shrinkpoint.Advanced(busy="wait")
    checkpointer = shrinkpoint.Checkpointer(
        str(tmp_path / "run"), model, optimizer, scheme="lossless", advanced=waits
    )
    for step in (1, 2):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        checkpointer.save(step)
    checkpointer.close()
    page = page_of(tmp_path / "run", tmp_path / OUT)
    assert "own loop" in page.words
    assert f'Checkpointer("{tmp_path / "run"}", model, optimizer).resume()' in page.words
    assert "checkpointer.resume(step=1)" in page.words
    assert "Every checkpoint is bit-exact." in page.words
    assert "-100%" not in page.words  # what a restore costs has an axis that begins at nothing


def test_a_checkpoint_of_an_imported_run_is_exported_first(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(4), "step": 1}, tmp_path / "one.pt")
    run("import", str(tmp_path / "one.pt"), str(tmp_path / "run"))
    page = page_of(tmp_path / "run", tmp_path / OUT)
    assert f'shrinkpoint export "{tmp_path / "run"}" OUT.pt' in page.words
    assert "model.load_state_dict" not in page.words
    assert "script again" not in page.words


def test_every_figure_has_a_table_with_every_checkpoint(folder: Path, tmp_path: Path) -> None:
    listed = run_json("ls", str(folder))["checkpoints"]
    page = page_of(folder, tmp_path / OUT)
    sizes = page.tables["Bytes of each checkpoint"]
    assert sizes[0] == ["step", "torch.save", "a restore reads", "own file", "kind", "files"]
    assert [(row[0], row[4], row[5]) for row in sizes[1:]] == [
        (str(each["step"]), each["kind"], str(each["chain_length"])) for each in reversed(listed)
    ]
    losses = page.tables["Loss"]
    assert [row[losses[0].index("val_loss")] for row in losses[1:]] == ["5", "4", "3", "2", "1"]
    titles = {
        "Bytes of the run, up to each step",
        "How many times smaller than torch.save",
        "What a restore raises the loss by",
        "Seconds waited, up to each step",
        "Settings over time",
        "What is exact, and why",
    }
    assert titles <= set(page.tables)
    shown = run_json("show", str(folder))
    roles = {row[0]: row[1] for row in page.tables["Bytes by role"][1:]}
    assert set(roles) == set(shown["totals"])
    assert {row[0] for row in page.tables["Bytes by layer"][1:]} >= {"embedding", "norm"}
    assert len(page.tables["What a restore reads"][1:]) == listed[0]["chain_length"]


def test_it_loads_nothing_and_runs_its_own_script_alone(folder: Path, tmp_path: Path) -> None:
    page = page_of(folder, tmp_path / OUT)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [tag for tag, attrs in page.tags if {"src", "href", "srcset", "data"} & set(attrs)]
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")


def test_names_are_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)<"
    hostile = noted(
        0,
        configuration=f'">{bad}',
        reason=bad,
        metrics={f"{bad}loss": 1.0, "'\"&lt;": 2.0},
        scheme=bad,
        not_finite=bad,
    )
    url = tmp_path / bad
    commit_run(str(url), [hostile, noted(1)])
    page = page_of(url, tmp_path / OUT)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert f"{bad}loss" in page.tables["Loss"][0]
    assert "'\"&lt;" in page.tables["Loss"][0]
    assert f'">{bad}' in page.words
    assert not [tag for tag, attrs in page.tags if any(name.startswith("on") for name in attrs)]


def test_losses_that_are_not_finite_are_gaps_and_the_way_back_is_shown(memory: str, tmp_path: Path) -> None:
    nan: dict[str, Any] = {
        "baseline": None,
        "degradation": 0.0,
        "not_finite": "NaN or infinity in w",
        "measured": "exact",
    }
    commit_run(
        memory, [noted(0), noted(1), noted(2, **nan, metrics={"val_loss": None}), noted(3, **nan, metrics={})]
    )
    page = page_of(memory, tmp_path / OUT)
    assert "step 40 is not finite" in page.words
    assert "The last finite one is of step 20" in page.words
    assert f"{memory}#step=20" in page.words
    assert [row[1] for row in page.tables["Loss"][1:]] == ["5", "4.95", "-", "-"]
    paths = [attrs["d"] or "" for tag, attrs in page.tags if tag == "path"]
    assert paths
    assert not [path for path in paths if "nan" in path or "inf" in path]
    huge = page_of(
        commit_run(f"{memory}-huge", [noted(0, baseline=1e308), noted(1, baseline=1e-320), noted(2)]).display,
        tmp_path / OUT,
    )
    assert len(huge.tables["Loss"]) == 4
    sole = page_of(commit_run(f"{memory}-sole", [noted(0, **nan)]).display, tmp_path / OUT)
    assert "The run has no finite one" in sole.words


def test_one_checkpoint_and_one_that_says_nothing_of_itself(memory: str, tmp_path: Path) -> None:
    commit_run(memory, [noted(0)])
    page = page_of(memory, tmp_path / OUT)
    assert "from step 10" in page.words
    assert "1, step 10" in page.words
    assert len(page.tables["Loss"]) == 2
    commit_run(
        f"{memory}-bare", [{}, {"raw_bytes": "x", "metrics": {"loss": "x"}, "measured": 3, "degradation": {}}]
    )
    bare = page_of(f"{memory}-bare", tmp_path / OUT)
    assert "2 checkpoints on disk" in bare.words
    assert "not measured for 2 of them" in bare.words


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    commit_run(str(tmp_path / "run"), [])
    assert "no checkpoint yet" in page_of(tmp_path / "run", tmp_path / OUT).words


def test_the_runs_of_a_folder_are_one_page(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs / "a")
    # of a run's losses the one that says most, wherever it was noted
    commit_run(str(runs / "deep" / "<b>"), [noted(0), noted(1, metrics={"train_loss": 9.0})])
    commit_run(str(runs / "none"), [])
    page = page_of(runs, runs / OUT)
    rows = {row[0]: row for row in page.tables["All runs"][1:]}
    assert {name: row[2] for name, row in rows.items()} == {"a": "5", "deep/<b>": "2", "none": "0"}
    assert rows["deep/<b>"][5:7] == ["5", "val_loss"]
    assert "all 7 complete" in page.words
    assert page.words.count("How to resume") == 4
    assert {row[0] for row in page.tables["How many times smaller"][1:]} == {"a", "deep/<b>"}
    run("report", str(runs), "-o", str(runs / OUT))  # its own page in the folder is no obstacle


def test_damage_is_shown_and_a_resume_goes_around_it(folder: Path, tmp_path: Path) -> None:
    blob = folder / RunStore(folder).manifests()[0].chain[-1].key
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert "all 5 complete" in page_of(folder, tmp_path / OUT).words
    page = page_of(folder, tmp_path / OUT, "--verify", code=1)
    assert "1 of 5 damaged" in page.words
    assert "from step 40" in page.words
    assert "checksum" in page.words
    (folder / "commits" / "0000000007.json").write_bytes(b"half a manifest")
    blob.unlink()
    page = page_of(folder, tmp_path / OUT)
    assert "2 of 6 damaged" in page.words
    assert "commits/0000000007.json" in page.words
    shutil.rmtree(folder / "data")
    page = page_of(folder, tmp_path / OUT)
    assert "6 of 6 damaged" in page.words
    assert "There is no checkpoint to continue from" in page.words


def test_what_is_no_run_and_what_is_no_report(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "other.html"
    assert "there is no run at" in run("report", str(tmp_path / "nothing"), "-o", str(target), code=1).stderr
    assert "names one checkpoint" in run("report", f"{folder}#step=50", "-o", str(target), code=2).stderr
    assert not target.exists()
    target.write_text("a page of somebody's own")
    assert "is no report" in run("report", str(folder), "-o", str(target), code=2).stderr
    assert target.read_text() == "a page of somebody's own"
    assert "is a folder" in run("report", str(folder), "-o", str(tmp_path), code=2).stderr
    assert "does not exist" in run("report", str(folder), "-o", str(tmp_path / "a" / "b.html"), code=2).stderr
    run("report", str(folder), "--output", str(tmp_path / "a=b.html"))
    assert (tmp_path / "a=b.html").exists()


def check_thinned(url: str, target: Path, count: int) -> None:
    sizes = {10 * (at + 1): 100 + at * 37 % 101 for at in range(count)}
    page = page_of(url, target)
    steps = {int(row[0]) for row in page.tables["Bytes of each checkpoint"][1:]}
    assert {10, 10 * count} <= steps
    assert len(steps) < 500
    first = list(sizes)[:20]
    assert {max(first, key=sizes.__getitem__), min(first, key=sizes.__getitem__)} <= steps
    assert f"of {count} checkpoints" in page.words
    assert target.stat().st_size < 3_000_000


def test_of_many_checkpoints_those_that_say_most_are_shown(memory: str, tmp_path: Path) -> None:
    commit_run(memory, [noted(at) for at in range(1400)])
    check_thinned(memory, tmp_path / OUT, 1400)


@pytest.mark.slow
def test_ten_thousand_checkpoints_are_a_page_of_less_than_three_megabytes(
    memory: str, tmp_path: Path
) -> None:
    commit_run(memory, [noted(at) for at in range(10_000)])
    page_of(memory, tmp_path / OUT)
    assert (tmp_path / OUT).stat().st_size < 3_000_000


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["run", "folder"])
def test_a_browser_shows_it_without_overflow_or_small_text(
    kind: str, width: int, folder: Path, tmp_path: Path
) -> None:
    name = "a-run-with-a-rather-long-name-" * 3 + "<script>"
    commit_run(str(tmp_path / name / name), [noted(at) for at in range(30)])
    shutil.copytree(folder, tmp_path / name / "made")
    page_of(tmp_path / name / ("made" if kind == "run" else ""), tmp_path / OUT)
    title, console = look(tmp_path / OUT, width, tmp_path, measured=False)
    assert not console
    assert title == ("made" if kind == "run" else name)
    title, console = look(tmp_path / OUT, width, tmp_path, measured=True)
    assert not console
    seen = json.loads(title)
    assert (seen["width"], seen["scroll"]) == (width, width)
    assert seen["small"] == seen["wide"] == []
    assert seen["sorted"] == 1
    assert seen["readouts"] >= 6
