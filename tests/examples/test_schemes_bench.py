"""The bench of schemes: its bookkeeping here, and the whole of it on small models among the slow tests."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The folders on the path, as they are for the script that lies there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "baselines"))


# --- settings and trainings ---------------------------------------------------------------------------------


def test_settings_have_keys_and_labels_of_their_own():
    from baselines import BASELINES
    from schemes_run import SETTINGS

    from shrinkpoint.schemes.catalogue import SCHEMES

    every = {*SCHEMES, *BASELINES}
    assert {setting.scheme for setting in SETTINGS} == every - {"itmo"}
    assert len({(s.scheme, s.label) for s in SETTINGS}) == len(SETTINGS)
    assert {s.scheme for s in SETTINGS if s.restores} == every - {"itmo", "lossless"}


def test_settings_are_chosen_by_scheme_or_in_full():
    from schemes_run import SETTINGS, chosen, known

    assert chosen(SETTINGS, known([])) == list(SETTINGS)
    assert {s.scheme for s in chosen(SETTINGS, known(["topn,scar"]))} == {"topn", "scar"}
    named = "excp:alpha 0.001, refilled, rANS, lossy base"
    assert [f"{s.scheme}:{s.label}" for s in chosen(SETTINGS, known([named]))] == [named]
    with pytest.raises(ValueError, match="no setting is called excp:alpha 7"):
        known(["auto,excp:alpha 7"])


def test_courses_save_evenly_and_seldom_where_saves_are_far_apart():
    from schemes_run import Course

    course = Course(model="gpt", seed=1, every=50)
    assert (course.steps, course.save_steps[-1], course.probes) == (550, 500, (250, 500))
    assert list(replace(course, every=500).save_steps) == [500, 1000, 1500, 2000]


@pytest.mark.parametrize("model", ["gpt", "gpt-999", "conv"])
def test_training_goes_on_from_its_own_state_bit_by_bit(model):
    from schemes_run import Course, Position

    course = Course(model=model, seed=3, every=4, quick=True)
    undisturbed, resumed = Position(course), Position(course)
    undisturbed.run(4)
    state = undisturbed.state()
    resumed.load(state)
    for training in (undisturbed, resumed):
        training.run(7)
    assert undisturbed.loss() == resumed.loss()
    again = Position(course)
    again.load(state)  # what was loaded first has trained since; the state has not changed with it
    again.run(7)
    assert again.loss() == resumed.loss()


def test_network_of_convolutions_sees_no_later_byte():
    import torch
    from trainings.text import CausalConvolutions

    torch.manual_seed(0)
    model, tokens = CausalConvolutions(16, 6), torch.randint(256, (1, 40))
    changed = tokens.clone()
    changed[0, 25:] += 1
    torch.testing.assert_close(model(tokens)[:, :25], model(changed % 256)[:, :25])
    assert not torch.equal(model(tokens)[:, 25:], model(changed % 256)[:, 25:])


# --- the summary --------------------------------------------------------------------------------------------


def sizes(delta: int) -> dict:
    """A chain of a base of 5,000 bytes and two deltas, for states of 100,000 bytes, a third of which are weights."""
    return {
        kind: {"raw": n * 100_000, "stored": n * size, "raw_weights": n * 33_000, "weights": n * size // 2}
        for kind, n, size in (("base", 1, 5_000), ("delta", 2, delta))
    }


@pytest.fixture
def rows():
    from schemes_table import rows_of

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
            key = {
                "model": "gpt",
                "every": "50",
                "seed": str(seed),
                "scheme": scheme,
                "setting": setting,
                "quick": "False",
            }
            cells.append(
                {**key, "part": "chain", "sizes": sizes(delta), "rises": {"0": rise / 2, "40": rise}}
            )
            cells.append({**key, "part": "restores", "sizes": sizes(2 * delta), "rise": 2 * rise})
    return rows_of(cells)


def test_ratio_counts_bytes_not_checkpoints():
    from schemes_table import ratio

    cell = {"sizes": sizes(1_000)}
    assert ratio(cell) == 300_000 / 7_000
    assert (ratio(cell, "base"), ratio(cell, "delta")) == (20, 100)
    assert ratio(cell, "delta", weights=True) == 66


def test_best_under_a_bound_is_found_for_every_seed_by_itself(rows):
    from schemes_table import best_under, ratio

    def best(scheme: str, bound: float = 0.005):
        mine = [row for row in rows if row.scheme == scheme]
        return best_under(mine, "chain", lambda c: c["rises"]["40"], bound, lambda c: ratio(c, "delta"))

    ours, theirs = best("auto"), best("excp")
    assert ours.ratios == {1: 200, 2: 80}
    assert ours.settings == {1: "scale 2", 2: "scale 1"}
    assert theirs.ratios == {1: 50, 2: 50}
    spread = ours.over(theirs)
    assert spread.values == (4, 1.6)
    assert (spread.mean, spread.half) == (2.8, 1.2)
    assert best("topn") is None, "one of two seeds is beyond the bound"
    assert best("gobo") is None
    assert best("excp", 0.001) is None


def test_document_says_who_is_smaller_and_who_misses_the_bound(rows):
    from schemes_table import document

    text = document(rows, (0, 40))
    smaller = "- deltas: `auto` under 0.5 % after 40 resumed steps is **2.8x (1.6 to 4) smaller** than `excp`'s best"
    assert smaller in text
    assert "restored at every checkpoint: `auto` under 1 % reaches" in text
    assert "| auto | 140x (80 to 200) | scale 2, scale 1 |" in text
    assert "| topn | - | - | - | - | - | - |" in text
    row = "| auto | scale 1 | 20x | 90x | 41.4x | 13.2x | 59.4x | 27.3x | +0.07 ±0.03 % | +0.15 ±0.05 % |"
    assert row in text
    without = document([row for row in rows if row.scheme != "excp"], (0, 40))
    assert "deltas: no setting of `excp` stays within 0.5 % with every seed" in without


# --- the script ---------------------------------------------------------------------------------------------


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
    from schemes import read

    with pytest.raises(SystemExit) as refused:
        read(arguments)
    assert refused.value.code
    assert said in f"{refused.value.code}{capsys.readouterr().err}"


def test_settings_that_are_named_in_full_are_restored_too(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from schemes import read, tasks

    given = ["--models", "gpt", "--seeds", "1", "--every", "50", "--parts", "restores"]
    asked = {task.setting.label for task in tasks(read(given))}
    named = [
        task.setting.label for task in tasks(read([*given, "--only", "lc-checkpoint:3 bit, moments too"]))
    ]
    assert named == ["3 bit, moments too"]
    assert named[0] not in asked


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_bench_runs_from_end_to_end_and_continues(tmp_path):
    def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARKS / "schemes.py"), "--quick", "--seeds", "1"]
        command += [
            "--only",
            "auto:scale 1,excp:alpha 0.001,lossless",
            "--cache",
            str(tmp_path / "cells.csv"),
        ]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, check=False, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done

    assert "chain, lossless" in bench("--models", "gpt", "--parts", "chain").stderr
    done = bench("--models", "gpt,conv", "--workers", "2")
    assert "gpt, 1, 8, chain" not in done.stderr, "it was measured already"
    for heading in ("## GPT", "## Convolutional network"):
        assert heading in done.stdout
    exact = [line for line in done.stdout.splitlines() if line.startswith("| lossless | exact |")]
    assert all(line.count("+0.00 %") == 4 for line in exact), "what is restored bit by bit costs nothing"
    again = bench("--models", "gpt,conv")
    assert ": chain" not in again.stderr, "nothing is left to measure"
    assert again.stdout == done.stdout
