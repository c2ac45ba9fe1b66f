"""The bench of schemes: its bookkeeping here, and the whole of it on small models among the slow tests."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The folders on the path, as they are for the script that lies there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "baselines"))


@pytest.fixture
def key():
    from schemes_cache import Key

    return Key(
        part="chain", model="gpt", every=50, seed=1, scheme="auto", setting="scale 1", options="0123456789ab"
    )


# --- the cache ----------------------------------------------------------------------------------------------


def test_cells_outlive_an_interruption_in_the_middle_of_a_line(tmp_path, key):
    from schemes_cache import Cache

    other = replace(key, seed=2)
    Cache(tmp_path / "new").put(key, {"rises": {0: 0.1}})
    with (tmp_path / "new" / Cache.FILE).open("a") as file:
        file.write('{"key": {"part": "cha')
    cache = Cache(tmp_path / "new")
    assert key in cache
    assert other not in cache
    cache.put(other, {"rises": {0: 0.2}})
    again = Cache(tmp_path / "new")
    assert again.get(key) == {"rises": {"0": 0.1}}
    assert again.get(other) == cache.get(other) == {"rises": {"0": 0.2}}


def test_a_cell_that_was_measured_again_counts(tmp_path, key):
    from schemes_cache import Cache

    cache = Cache(tmp_path)
    cache.put(key, {"rise": 1})
    cache.put(key, {"rise": 2})
    assert Cache(tmp_path).get(key) == {"rise": 2}


def test_pieces_are_put_together_by_copying_files(tmp_path, key):
    from schemes_cache import Cache

    other = replace(key, part="restores")
    Cache(tmp_path / "here").put(key, {"rise": 1})
    Cache(tmp_path / "there").put(other, {"rise": 2})
    (tmp_path / "there" / Cache.FILE).rename(tmp_path / "here" / "there.jsonl")
    assert {found for found, _ in Cache(tmp_path / "here").items()} == {key, other}


def test_digest_does_not_depend_on_the_order_of_keys():
    from schemes_cache import digest

    assert digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


# --- settings and trainings ---------------------------------------------------------------------------------


def test_settings_have_keys_and_labels_of_their_own():
    from baselines import BASELINES
    from schemes_settings import SETTINGS

    from shrinkpoint.schemes.catalogue import SCHEMES

    every = {*SCHEMES, *BASELINES}
    assert {setting.scheme for setting in SETTINGS} == every - {"itmo"}
    assert len({(s.scheme, s.label) for s in SETTINGS}) == len(SETTINGS)
    assert len({(s.scheme, s.key) for s in SETTINGS}) == len(SETTINGS)
    assert {s.scheme for s in SETTINGS if s.restores} == every - {"itmo", "lossless"}


def test_settings_are_chosen_by_scheme_or_in_full():
    from schemes_settings import SETTINGS, chosen, known

    assert chosen(SETTINGS, known([])) == list(SETTINGS)
    assert {s.scheme for s in chosen(SETTINGS, known(["topn,scar"]))} == {"topn", "scar"}
    named = "excp:alpha 0.001, refilled, rANS, lossy base"
    assert [f"{s.scheme}:{s.label}" for s in chosen(SETTINGS, known([named]))] == [named]
    with pytest.raises(ValueError, match="no setting is called excp:alpha 7"):
        known(["auto,excp:alpha 7"])


def test_courses_differ_in_their_keys_and_refuse_what_cannot_be_measured():
    from schemes_models import Course

    course = Course(model="gpt", seed=1, every=50, saves=10, marks=(0, 5, 20, 40))
    assert (course.steps, list(course.save_steps)[-1], course.probes) == (550, 500, (250, 500))
    others = [replace(course, **change) for change in ({"seed": 2}, {"model": "gpt-999"}, {"held_out": 1})]
    assert len({one.key for one in (course, *others)}) == 4
    with pytest.raises(ValueError, match="40 steps between"):
        replace(course, every=20)
    with pytest.raises(ValueError, match="must be one of gpt, gpt-999, conv"):
        replace(course, model="resnet")


@pytest.mark.parametrize("model", ["gpt", "gpt-999", "conv"])
def test_training_goes_on_from_its_own_state_bit_by_bit(model):
    from schemes_models import Course, Training

    course = Course(model=model, seed=3, every=4, saves=3, marks=(0, 2), quick=True, held_out=1)
    undisturbed, resumed = Training(course), Training(course)
    undisturbed.run(4)
    state = undisturbed.state()
    resumed.load(state)
    for training in (undisturbed, resumed):
        training.run(7)
    assert undisturbed.loss() == resumed.loss()
    again = Training(course)
    again.load(state)  # what was loaded first has trained since; the state has not changed with it
    again.run(7)
    assert again.loss() == resumed.loss()


def test_network_of_convolutions_sees_no_later_byte():
    import torch
    from schemes_models import ConvNet

    torch.manual_seed(0)
    model, tokens = ConvNet(16, 6), torch.randint(256, (1, 40))
    changed = tokens.clone()
    changed[0, 25:] += 1
    torch.testing.assert_close(model(tokens)[:, :25], model(changed % 256)[:, :25])
    assert not torch.equal(model(tokens)[:, 25:], model(changed % 256)[:, 25:])


# --- the summary --------------------------------------------------------------------------------------------


def chain_cell(delta: int, rise: float) -> dict:
    """A chain of a base of 5,000 bytes and two deltas, for states of 100,000 bytes, a third of which are weights."""
    sizes = [
        {"kind": kind, "stored": size, "raw": 100_000, "weights": size // 2, "raw_weights": 33_000}
        for kind, size in (("base", 5_000), ("delta", delta), ("delta", delta))
    ]
    return {"sizes": sizes, "rises": {"0": rise / 2, "40": rise}}


@pytest.fixture
def rows(key):
    from schemes_summary import rows_of

    measured = {
        ("auto", "scale 1"): [(1_000, 0.001), (1_250, 0.002)],
        ("auto", "scale 2"): [(500, 0.004), (800, 0.006)],
        ("excp", "alpha 0.001"): [(2_000, 0.003), (2_000, 0.004)],
        ("excp", "alpha 0.003"): [(1_000, 0.02), (1_000, 0.03)],
        ("topn", "half"): [(9_000, 0.02), (9_000, 0.0)],
    }
    cells = []
    for (scheme, setting), seeds in measured.items():
        for seed, (delta, rise) in enumerate(seeds, 1):
            place = replace(key, scheme=scheme, setting=setting, seed=seed)
            cells.append((place, chain_cell(delta, rise)))
            restored = {"sizes": chain_cell(2 * delta, 0)["sizes"], "rise": 2 * rise}
            cells.append((replace(place, part="restores"), restored))
    return rows_of(cells)


def test_ratio_counts_bytes_not_checkpoints():
    from schemes_summary import ratio

    cell = chain_cell(1_000, 0.0)
    assert ratio(cell) == 300_000 / 7_000
    assert (ratio(cell, "base"), ratio(cell, "delta")) == (20, 100)
    assert ratio(cell, "delta", weights=True) == 66


def after_40(cell):
    return cell["rises"]["40"]


def test_best_under_a_bound_is_found_for_every_seed_by_itself(rows):
    from schemes_summary import advantage, best_under, ratio

    def best(scheme: str, bound: float = 0.005):
        mine = [row for row in rows if row.scheme == scheme]
        return best_under(mine, "chain", after_40, bound, lambda cell: ratio(cell, "delta"))

    ours, theirs = best("auto"), best("excp")
    assert ours.ratios == {1: 200, 2: 80}
    assert ours.settings == {1: "scale 2", 2: "scale 1"}
    assert theirs.ratios == {1: 50, 2: 50}
    spread = advantage(ours, theirs).spread
    assert spread.values == (4, 1.6)
    assert (spread.mean, spread.half) == (2.8, 1.2)
    assert best("topn") is None, "one of two seeds is beyond the bound"
    assert best("gobo") is None
    assert best("excp", 0.001) is None
    assert advantage(ours, None) is None


def test_document_says_who_is_smaller_and_who_misses_the_bound(rows):
    from schemes_table import document

    text = document(rows, (0, 40), [1, 2])
    assert (
        "- deltas: `auto` under 0.5 % after 40 resumed steps is **2.8x (1.6 to 4) smaller** than `excp`'s best"
        in text
    )
    assert "restored at every checkpoint: `auto` under 1 % reaches" in text
    assert "| auto | 140x (80 to 200) | scale 2, scale 1 |" in text
    assert "| topn | - | - | - | - | - | - |" in text
    assert (
        "| auto | scale 1 | 20x | 90x | 41.4x | 13.2x | 59.4x | 27.3x | +0.07 ±0.03 % | +0.15 ±0.05 % |"
        in text
    )
    assert "with 2 seeds" in text
    without = document([row for row in rows if row.scheme != "excp"], (0, 40), [1, 2])
    assert "deltas: no setting of `excp` stays within 0.5 % with every seed" in without


def test_speeds_and_slices_stand_in_tables_of_their_own(key):
    from schemes_summary import rows_of
    from schemes_table import document

    numbers = {f"{what}_{threads}": 100.0 * threads for what in ("encode", "decode") for threads in (1, 2)}
    speed = {"speeds": numbers, "zstd": dict.fromkeys(numbers, 200.0)}
    cut = {"parameter": "w", "bits": {"weight": 0.5, "exp_avg": 0.25}, "seconds": 9}
    cells = [(replace(key, part="speed"), speed), (replace(key, part="slice", scheme="itmo"), cut)]
    text = document(rows_of(cells), (0, 40), [1])
    assert "| auto | scale 1 | 100 (0.50) | 200 (1.00) | 100 (0.50) | 200 (1.00) |" in text
    assert "| gpt | 50 | itmo | scale 1 | 0.500 | 0.250 | 0.000 | 0.750 |" in text
    assert "steps between checkpoints" not in text, "nothing was measured of a training"


def test_a_table_shows_restores_of_settings_that_were_named_once(monkeypatch):
    import schemes

    monkeypatch.setattr(sys, "argv", ["schemes.py", "--models", "gpt", "--seeds", "1", "--parts", "restores"])
    arguments = schemes._arguments()
    asked = {cell.key for cell in schemes.cells(arguments)}
    shown = {cell.key for cell in schemes.cells(arguments, every_restore=True)}
    assert asked < shown
    assert "3 bit, moments too" in {key.setting for key in shown - asked}


def test_picture_is_well_formed_and_stays_on_the_page(rows):
    from schemes_picture import COLORS, picture

    root = ElementTree.fromstring(picture(rows, 40, str))
    width, height = float(root.get("width")), float(root.get("height"))
    drawn = [element for element in root.iter() if element.tag.endswith("circle")]
    assert {COLORS["auto"], COLORS["excp"], COLORS["topn"]} == {dot.get("fill") for dot in drawn}
    for element in root.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.get(name, 0)) <= width
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.get(name, 0)) <= height


def test_every_scheme_has_a_colour_of_its_own():
    from baselines import BASELINES
    from schemes_picture import COLORS

    from shrinkpoint.schemes.catalogue import SCHEMES

    every = {*SCHEMES, *BASELINES}
    assert every <= set(COLORS)
    assert len({COLORS[scheme] for scheme in every}) == len(every)


def test_slice_is_a_matrix_that_has_moments():
    from schemes_measure import slice_of
    from schemes_models import Course, Training

    course = Course(model="gpt", seed=1, every=4, saves=3, marks=(0,), quick=True, held_out=1)
    training = Training(course)
    training.run(1)
    state = training.state()
    found = [spec for spec in state.specs.values() if spec.tag.parameter == slice_of(state)]
    assert {spec.tag.role.value for spec in found} >= {"weight", "exp_avg", "exp_avg_sq"}
    assert all(len(spec.shape) == 2 for spec in found if spec.tag.role.value == "weight")


# --- the script ---------------------------------------------------------------------------------------------


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(BENCHMARKS / "schemes.py"),
        "--quick",
        "--seeds",
        "1",
        *map(str, arguments),
    ]
    return subprocess.run(command, capture_output=True, check=False, text=True, env=os.environ, timeout=600)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--models", "resnet"), "there is no resnet"),
        (("--parts", "chains"), "there is no chains"),
        (("--only", "zip"), "no setting is called zip"),
    ],
)
def test_unknown_names_are_refused(monkeypatch, capsys, arguments, said):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the script would set it for good
    monkeypatch.setattr(sys, "argv", ["schemes.py", *arguments])
    from schemes import main

    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_the_page_in_docs_is_made_of_the_cells_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    docs = BENCHMARKS.parents[1] / "docs"
    monkeypatch.setattr(sys, "argv", ["schemes.py", "--table", "--cache", str(docs), "--out", str(tmp_path)])
    from schemes import main

    main()
    for name in ("schemes.md", "schemes.svg", "schemes.jsonl"):
        made, kept = ((folder / name).read_text().splitlines() for folder in (tmp_path, docs))
        versions = 3 if name == "schemes.md" else 0  # the line that names them
        assert made[versions:] == kept[versions:]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_bench_runs_from_end_to_end_and_continues(tmp_path):
    only = ("--only", "auto:scale 1,excp:alpha 0.001,lossless")
    done = bench("--cache", tmp_path, *only, "--models", "gpt", "--parts", "chain")
    assert done.returncode == 0, done.stderr
    assert "chain of lossless" in done.stdout
    named = ("--cache", tmp_path, *only, "--models", "gpt,conv")
    planned = bench(*named, "--plan")
    assert "gpt, every 8: " in planned.stdout
    assert "cells of restores, of unknown length" in planned.stdout
    done = bench(*named, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert "gpt, every 8, seed 1: chain" not in done.stdout, "it was measured already"
    text = (tmp_path / "schemes.md").read_text()
    for heading in ("## GPT", "## Convolutional network", "## Speed", "## On a slice"):
        assert heading in text
    exact = [line for line in text.splitlines() if line.startswith("| lossless | exact |")]
    assert all(line.count("+0.00 %") == 4 for line in exact[:2]), "what is restored bit by bit costs nothing"
    ElementTree.fromstring((tmp_path / "schemes.svg").read_text())
    assert "seed 1" not in bench(*named).stdout, "nothing is left to measure"
    bench(*named, "--out", tmp_path / "out")
    bench("--models", "gpt,conv", "--cache", tmp_path / "out", "--table", "--out", tmp_path / "again")
    for name in ("schemes.md", "schemes.svg", "schemes.jsonl"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "out" / name).read_text()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_lstm_is_compared_with_the_bytes_that_the_scheme_stores(tmp_path, monkeypatch, capsys):
    flags = ("--quick", "--deltas", "--seeds", "1,2", "--cache", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["itmo.py", *flags])
    import itmo
    from schemes import course_of
    from schemes_measure import Chain
    from schemes_models import Undisturbed
    from schemes_settings import SETTINGS, chosen

    itmo.main()
    said = capsys.readouterr().out.splitlines()
    lines = [line for line in said if line.startswith("seed ")]
    assert len(lines) == 2 * 2 * (2 + 1), "first moments, weights, and their sums"
    assert "2 seeds)" in said[-1]

    run = Undisturbed(course_of("gpt", 2, None, quick=True), tmp_path / "runs")
    chain = Chain(*chosen(SETTINGS, {"auto:scale 1"}))
    *_, last = [chain.add(run.state(step), step) for step in run.course.save_steps]
    for role, key, section in (("weight", "w", "points"), ("exp_avg", "m", "levels")):
        entries = [
            entry
            for entry in last.checkpoint.entries
            if entry.spec.tag.role.value == role
            and entry.spec.tag.parameter.startswith("blocks.0.")
            and len(entry.spec.shape) == 2
        ]
        stored = 8 * sum(len(entry.encoded.sections[section]) for entry in entries)
        bits = stored / sum(entry.spec.numel for entry in entries)
        place = f"seed 2, step {run.course.save_steps[-1]}: scale 1 "
        (line,) = [line for line in lines if line.startswith(place) and f" {key} " in line]
        assert f"{bits:.4f}" in line
