"""The bench of the bound: its trainings in their quick form, its bookkeeping and its tables."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
NAMES = (
    "gpt", "gpt-zero", "warm-restarts", "changed-schedule", "gpt-lion", "moe-muon", "conv", "lstm", "bert", "fine-tuning",
    "lora", "vit", "resnet", "diffusion", "diffusion-average", "vae-lion", "recommender", "recommender-adagrad",
    "recommender-sparse", "matrix-factorization", "flow", "forecasting", "graph", "autoencoder",
    "autoencoder-short",
)  # fmt: skip
MORE = (
    "clip", "dqn", "dqn-difference", "gan", "pinn", "pinn-lbfgs", "gpt-bf16", "sines", "poisson", "borehole",
    "sines-fit", "sines-sound", "sines-deep", "bells-fit", "gru-ctc", "lstm-ctc", "gru-adding", "lstm-adding",
    "gpt-nadam", "vae-nadam", "series-nadam", "mlp-nadam", "binary", "ternary", "binary-sgd", "binary-mlp",
)  # fmt: skip
"""Those that run only if they are asked for."""
FEW = ("lora", "moe-muon", "diffusion-average")
"""Frozen tensors and abilities; two optimizers and schedulers; an object with a state, and a loss beside the final one."""


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The folders on the path, as they are for the script that lies there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def built(name: str, seed: int = 1):
    from bound_trainings import KINDS

    return KINDS[name].build(seed, KINDS[name], True)


def on_first_batches(training) -> float:
    """The training loss of some fixed batches, without a trace but in buffers."""
    import torch

    training.model.train()
    with torch.no_grad():
        return sum(float(training.train_loss(index)) for index in range(6)) / 6


# --- trainings ----------------------------------------------------------------------------------------------


def test_names_are_those_of_the_trainings_and_half_of_them_are_tuned_on():
    from bound_trainings import KINDS, LISTED, TUNED

    assert set(LISTED) == set(NAMES)
    assert set(KINDS) == {*NAMES, *MORE}
    assert set(KINDS) > TUNED
    assert 9 <= len(TUNED & set(LISTED)) <= len(NAMES) - 9


@pytest.mark.parametrize("name", NAMES)
def test_training_is_the_same_from_the_same_seed_and_learns(name):
    from bound_trainings import KINDS

    training, same, other = built(name), built(name), built(name, seed=2)
    frozen = {key: value.clone() for key, value in training.originals.items()}
    before = on_first_batches(training)
    on_first_batches(same)
    steps = KINDS[name].steps(True)
    losses = [training.step(index) for index in range(steps)]
    again = [same.step(index) for index in range(5)]
    assert again == losses[:5]
    assert other.step(0) != losses[0]
    assert on_first_batches(training) < before
    assert training.probe() != training.final()
    assert training.final() == training.final()
    assert training.frozen_changes() == 0
    if name == "lora":
        assert frozen
        unused = built(name)
        assert training.abilities["base alone, old domain"]() == unused.abilities["base alone, old domain"]()
        assert training.final() != unused.final()


@pytest.mark.parametrize("name", MORE)
def test_a_further_training_is_the_same_from_the_same_seed_and_learns(name):
    from bound_trainings import KINDS

    training, same, other = built(name), built(name), built(name, seed=2)
    before, steps = training.final(), KINDS[name].steps(True)
    losses = [training.step(index) for index in range(steps)]
    assert [same.step(index) for index in range(5)] == losses[:5]
    assert other.step(0) != losses[0]
    if name.startswith("dqn"):  # its quick form is over before anything is worth trying
        assert training.final() != before
    else:
        assert training.final() < before
    assert training.probe() != training.final()
    assert training.final() == training.final()


def test_a_target_is_copied_at_its_steps_alone():
    import torch

    training = built("dqn")
    for index in range(9):
        training.step(index)
        pairs = zip(training.model.parameters(), training.target.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs) == (index in (3, 7))


def test_save_steps_are_spread_over_the_run_or_its_last_tenth():
    from bound_trainings import KINDS

    kind = KINDS["gpt"]
    spread, late = (kind.save_steps(part, False) for part in ("spread", "late"))
    assert len(spread) == len(late) == 11
    assert spread[-1] == late[-1] == kind.steps(False)
    assert spread[0] == kind.every
    assert late[0] >= 0.9 * kind.steps(False)
    assert kind.save_steps("plain", False) == []


def test_a_restored_schedule_is_changed_at_the_same_steps_without_restores():
    training, rates = built("changed-schedule"), []
    for index in range(6):
        training.step(index)
        if index % 3 == 2:
            training.after_restore()
        rates.append(training.optimizers[0].param_groups[0]["lr"])
    assert rates[1] < rates[0]
    assert rates[2] == pytest.approx(2e-3)
    assert rates[5] == pytest.approx(2e-3)


def lossless_is_as_undisturbed(name: str, part: str) -> None:
    from bound_run import Setting, Task, measure

    task = Task(name=name, seed=1, part=part, quick=True, setting=Setting(scheme="lossless"))
    undisturbed, restored = measure(replace(task, part="plain")), measure(task)
    for what in ("final", "probe", "abilities", "also", "curve"):
        assert restored[what] == undisturbed[what], what
    for what in ("final", "probe", "abilities", "also"):
        assert restored["last"][what] == undisturbed[what], what
    assert restored["frozen_changes"] == restored["last"]["frozen_changes"] == 0
    assert len(restored["saves"]) == 11
    assert [save["configuration"] for save in restored["saves"]] == 11 * ["exact"]
    json.dumps(restored, allow_nan=False)


@pytest.mark.parametrize("name", FEW)
def test_lossless_restores_change_no_digit(name):
    lossless_is_as_undisturbed(name, "spread")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in (*NAMES, *MORE) if name not in FEW])
def test_lossless_restores_change_no_digit_of_any_training(name):
    lossless_is_as_undisturbed(name, "spread")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt-zero", "resnet"])
def test_lossless_late_restores_change_no_digit(name):
    lossless_is_as_undisturbed(name, "late")


# --- optimizers and data ------------------------------------------------------------------------------------


def test_muon_makes_updates_orthogonal_and_lion_takes_signs():
    import torch
    from bound_optimizers import Lion, Muon

    torch.manual_seed(0)
    for shape in ((24, 16), (16, 24), (3, 16, 24)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape)
        Muon([weight], lr=1.0).step()
        scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
        singular = torch.linalg.svdvals(weight.detach()) / scale
        assert 0.6 < float(singular.min()) < float(singular.max()) < 1.3
    weight = torch.nn.Parameter(torch.zeros(5))
    weight.grad = torch.tensor([3.0, -0.1, 0.0, 1e-3, -8.0])
    Lion([weight], lr=0.5).step()
    assert weight.tolist() == [-0.5, 0.5, 0.0, -0.5, 0.5]


def test_graphs_know_the_distance_from_the_marked_node():
    import torch
    from bound_data import graphs

    near, mark, distance = graphs(4, 30, torch.Generator().manual_seed(1))
    assert bool((mark.sum(1) == 1).all())
    assert bool(((distance == 0) == (mark > 0)).all())
    for graph in range(4):
        for node in range(30):
            if 0 < distance[graph, node] < 5:
                neighbours = distance[graph][near[graph, node] > 0]
                assert neighbours.min() == distance[graph, node] - 1


def test_ids_come_by_zipfs_law():
    import torch
    from bound_data import zipf

    ids = zipf(1000, (200_000,), torch.Generator().manual_seed(1))
    counts = torch.bincount(ids, minlength=1000).float()
    assert (int(ids.min()), len(counts)) == (0, 1000)
    assert float(counts[9] / counts[99]) == pytest.approx(10, rel=0.4)


# --- bookkeeping --------------------------------------------------------------------------------------------


def test_cells_outlive_an_interruption_and_the_later_line_counts(tmp_path):
    from bound_cache import Cells

    path = tmp_path / "new" / "cells.jsonl"
    key, other = {"training": "gpt", "seed": 1}, {"training": "gpt", "seed": 2}
    Cells(path).put(key, {"final": 1.0})
    with path.open("a") as file:
        file.write('{"key": {"part": "pla')
    cells = Cells(path)
    cells.put(other, {"final": 2.0})
    cells.put(key, {"final": 3.0})
    again = Cells(path)
    assert again.get({"seed": 1, "training": "gpt"}) == {"final": 3.0}
    assert again.get(other) == {"final": 2.0}
    assert again.get({"training": "lora"}) is None
    assert again.prune() == 2
    assert list(Cells(path)) == [(key, {"final": 3.0}), (other, {"final": 2.0})]


def test_keys_tell_settings_apart_but_not_of_undisturbed_runs():
    from bound_run import Setting, Task

    task = Task(name="gpt", seed=1, part="spread")
    harsh = replace(task, setting=Setting(options='{"weight_scale": 1}'))
    assert task.key != harsh.key
    for part in ("plain", "nudged"):
        assert replace(task, part=part).key == replace(harsh, part=part).key
    assert harsh.setting.build().options.weight_scale == 1
    assert harsh.setting.label == "auto weight_scale=1"


def test_parts_are_those_that_make_sense(capsys):
    import bound

    def planned(*given: str) -> list[tuple[str, str]]:
        return [(task.name, task.part) for task in bound.tasks(bound._arguments(given))]

    assert planned("--only", "gpt,lstm", "--seeds", "1") == [
        ("gpt", "plain"), ("gpt", "spread"), ("lstm", "plain"), ("lstm", "spread"), ("lstm", "late"),
    ]  # fmt: skip
    late = planned("--only", "gpt,warm-restarts", "--seeds", "2", "--parts", "late")
    assert late == 2 * [("gpt", "plain"), ("gpt", "late"), ("warm-restarts", "plain")]
    for wrong in (["--only", "gtp"], ["--options", '{"weight": 1}'], ["--config", '{"key_every": 0}']):
        with pytest.raises(SystemExit):
            bound._arguments(wrong)
    assert "key_every" in capsys.readouterr().err


def test_cells_of_another_library_are_measured_again_where_asked(tmp_path):
    import bound
    from bound_cache import Cells
    from bound_run import Task

    cells = Cells(tmp_path / "cells.jsonl")
    plain, old, new = (
        Task(name="gpt", seed=seed, part=part) for seed, part in ((1, "plain"), (1, "spread"), (2, "spread"))
    )
    cells.put(plain.key, {"seconds": 30.0})
    cells.put(old.key, {"library": "of old", "seconds": 60.0})
    planned = [plain, old, new]
    assert bound.missing_of(planned, cells, fresh=False, stale=False) == [new]
    assert bound.missing_of(planned, cells, fresh=False, stale=True) == [old, new]
    assert bound.missing_of(planned, cells, fresh=True, stale=False) == planned
    assert "gpt, spread: 2 cells of 60 s" in bound.plan([old, new], cells)
    assert "2 cells: 2 minutes" in bound.plan([old, new], cells)


# --- tables -------------------------------------------------------------------------------------------------


def save(degradation: float | None, **more) -> dict:
    return {
        "step": 1, "kind": "delta", "bytes": 1000, "raw_bytes": 20_000, "configuration": "scale 1",
        "degradation": degradation, "evaluations": 2, "search_s": 0.1, "blocked_s": 0.01, "encode_s": 0.2, **more,
    }  # fmt: skip


@pytest.fixture
def cells():
    """Two trainings: one kept and honest, one whose truth and ability are not what was told."""
    from bound_run import Setting, Task

    found = []

    def add(name: str, seed: int, final: float, *, plain: float, saves=None, setting=None, **more) -> None:
        task = Task(name=name, seed=seed, part="plain")
        abilities = more.pop("undisturbed", {})
        found.append((task.key, {"final": plain, "abilities": abilities, "also": {}}))
        if name == "gpt":
            nudged = {"final": plain * (1 + seed / 1000), "abilities": {}, "also": {}}
            found.append((replace(task, part="nudged").key, nudged))
        if saves is None:
            return
        task = replace(task, part="spread", setting=setting or Setting())
        cell = {
            "final": final, "abilities": {}, "also": {}, "frozen_changes": 0, "saves": saves,
            "last": {"final": final * 1.001}, "train_s": 20.0, "warnings": [], "library": "one", **more,
        }  # fmt: skip
        found.append((task.key, cell))

    told = {"degradation_low": 0.0002, "degradation_high": 0.0008}
    updates = {"update_error": 0.4, "update_length": {"AdamW": 1.02}}
    for seed in (1, 2):
        plain = 2.0 + 0.002 * seed
        add(
            "gpt",
            seed,
            plain * (1.003 + 0.001 * (seed == 2)),
            plain=plain,
            saves=11 * [save(0.0005, **told, **updates)],
        )
        abilities = {"abilities": {"old domain": 3.03}, "undisturbed": {"old domain": 3.0}}
        warned = {"warnings": ["ShrinkpointWarning: the probe\nis blind"]}
        add(
            "lora", seed, plain * 1.002, plain=plain, saves=11 * [save(0.0001)], frozen_changes=7, **abilities, **warned
        )  # fmt: skip
        add("graph", seed, plain * 1.3, plain=plain, saves=[*10 * [save(None)], save(0.001)])
    harsh = Setting(scheme="excp", options='{"alpha": 0.001}')
    add("gpt", 1, 2.002 * 1.05, plain=2.002, saves=11 * [save(0.0)], setting=harsh)
    return found


def test_summary_judges_by_the_mean_of_the_seeds(cells):
    from bound_summary import rows_of

    rows = {(row.training, row.scheme): row for row in rows_of(cells)}
    gpt, lora, graph, excp = (
        rows[name] for name in (("gpt", "auto"), ("lora", "auto"), ("graph", "auto"), ("gpt", "excp"))
    )
    assert gpt.ratio == 20
    assert gpt.spread == pytest.approx(0.002 / 2**0.5 / 2.003)
    assert gpt.truths == {1: pytest.approx(0.003), 2: pytest.approx(0.004)}
    assert (gpt.mean.value, gpt.mean.error, gpt.mean.seeds) == (
        pytest.approx(0.0035),
        pytest.approx(0.0005),
        2,
    )
    assert gpt.reports[1].mean == pytest.approx(0.005)
    assert gpt.reports[1].high == pytest.approx(0.013)  # with the reserve
    assert gpt.reports[1].recomputed == 10
    assert gpt.kept
    assert not gpt.is_chaotic
    assert gpt.covered is True
    assert gpt.reported("update_length") == {"AdamW": 22 * [1.02]}
    assert gpt.last == {1: pytest.approx(0.001), 2: pytest.approx(0.001)}
    assert lora.abilities == {"old domain": [pytest.approx(0.01), pytest.approx(0.01)]}
    assert not lora.kept
    assert graph.covered is None, "nothing was reported of it"
    assert not graph.kept
    assert (excp.kept, excp.covered) == (False, False)
    assert (gpt.within, excp.within) == ({1: True, 2: True}, {1: False})
    assert rows_of(cells, quick=True) == []


def changed(cells, *finals: float, nudge: float | None = None):
    """The row of the GPT with other changes of the final losses."""
    from bound_summary import rows_of

    plain = {
        key["seed"]: cell["final"]
        for key, cell in cells
        if (key["training"], key["part"]) == ("gpt", "plain")
    }
    for key, cell in cells:
        if key["training"] == "gpt" and key["part"] == "spread" and key["scheme"] == "auto":
            cell["final"] = plain[key["seed"]] * (1 + finals[key["seed"] - 1])
        elif key["training"] == "gpt" and key["part"] == "nudged" and nudge is not None:
            cell["final"] = plain[key["seed"]] * (1 + nudge * (-1) ** key["seed"])
    return next(row for row in rows_of(cells) if (row.training, row.scheme) == ("gpt", "auto"))


def test_a_mean_is_kept_within_the_limit_and_two_errors(cells):
    assert changed(cells, 0.02, 0.004).kept, "1.2 % with an error of 0.8 %"
    assert not changed(cells, 0.0155, 0.0145).kept, (
        "1.5 % with an error of 0.05 %, whatever the spread of the seeds"
    )
    assert changed(cells, -0.3, 0.004).kept


def test_a_training_is_chaotic_where_a_millionth_does_more_than_restores(cells):
    assert changed(cells, 0.02, -0.03, nudge=0.04).is_chaotic
    assert not changed(cells, 0.02, -0.03, nudge=0.02).is_chaotic
    assert not changed(cells, 0.001, -0.001, nudge=0.005).is_chaotic, "within the limit"


def test_reported_costs_are_those_of_the_reports_or_computed_from_them():
    from bound_summary import reported_of

    old = [
        {**save(0.0005), "degradation_high": 0.0008, "step": 100 * (i + 1), "baseline": 2.0 - 0.1 * i, "lost_steps": 1.0}
        for i in range(2)
    ]  # fmt: skip
    delay = 0.1 / 1.9 / 100  # the fall of the loss in a step, relative
    found = reported_of(old, {})
    assert found.mean == pytest.approx(0.001 + delay / 2)
    assert found.high == pytest.approx(0.0016 + 0.005), "the reserve counts once, and is more than the delay"
    assert reported_of(old, {"max_degradation": 0.0}).high == pytest.approx(0.0016 + delay)
    assert reported_of(old[:1], {"max_degradation": 0.02}).high == pytest.approx(0.0008 + 0.01)
    earlier = {**old[1], "cost": 0.002, "cost_high": 0.003}  # with a tenth of the reserve, or the delay
    found = reported_of([old[0], earlier, save(None), {**save(0.0), "configuration": "exact"}], {})
    assert (found.mean, found.high) == (
        pytest.approx(0.0025),
        pytest.approx(0.0008 + 0.003 - max(delay, 0.0005) + 0.005),
    )
    assert (found.recomputed, found.unmeasured, found.exact) == (2, 1, 1)
    new = [{**old[1], "cost": 0.002, "cost_high": 0.009, "cost_delay": 0.004} for _ in range(2)]
    found = reported_of(new, {})
    assert (found.mean, found.high, found.recomputed) == (pytest.approx(0.004), pytest.approx(0.016), 0)
    assert reported_of([{**save(0.0), "configuration": "exact"}], {}).high == 0


def test_a_reported_bound_below_the_mean_is_said_not_to_hold(cells):
    from bound_table import document

    assert changed(cells, 0.0139, 0.0141).covered is False
    text = document(cells)
    assert "- chosen on these: **the reported bound holds for 0 of 1** that reported one." in text
    assert "- chosen on these: it does not hold for gpt." in text


def test_tables_say_what_was_kept(cells):
    from bound_table import document

    text = document(cells)
    assert (
        "- chosen on these: **1 of 1 kept** in the mean of their seeds. 2 of 2 runs end at +1 % or below."
        in text
    )
    assert "**the reported bound holds for 1 of 1** that reported one." in text
    assert "were computed for this page by the present functions" in text
    assert (
        "- only reported: **0 of 2 kept** in the mean of their seeds. 2 of 4 runs end at +1 % or below."
        in text
    )
    gpt = "| GPT, AdamW (0.9, 0.95), cosine to a tenth | 20x | +0.50 (<+1.30); +0.50 (<+1.30) |"
    assert f"{gpt} +0.30, +0.40 | +0.35 ± 0.05 (2) | 0.07 (2) | +0.15 ± 0.05 (2) | - | kept | yes |" in text
    assert "old domain +1.00, +1.00; frozen elements changed: 7, 7 | **not kept** | yes |" in text
    assert (
        "+0.00, ? 10; +0.00, ? 10 | +30.00, +30.00 | +30.00 ± 0.00 (2) | 0.07 (2) | - | - | **not kept** | - |"
        in text
    )
    assert "| GPT, AdamW (0.9, 0.95), cosine to a tenth, AdamW | - | 1.02 to 1.02 | yes |" in text
    assert "- lora (spread): ShrinkpointWarning: the probe is blind" in text
    assert "# `excp`, alpha=0.001" in text
    assert text.index("# `excp`") > text.index("only reported")
    assert "states of the library" not in text
    changed(cells, 0.02, -0.03, nudge=0.04)
    assert "kept, chaotic | yes |" in document(cells)
    assert "in the mean of their seeds; chaotic: gpt." in document(cells)


def test_tables_say_whether_the_defaults_were_measured_with_one_state_of_the_library(cells):
    from bound_table import document

    restored = [(key, cell) for key, cell in cells if key["part"] == "spread"]
    assert len([cell.update(library="another") for key, cell in restored if key["scheme"] == "excp"]) == 1
    text = document(cells)
    assert "**Cells of 2 states of the library are mixed here" in text
    assert "All restored runs of the library's defaults are of one state of the library." in text
    assert restored[0][0]["scheme"] == "auto"
    restored[0][1]["library"] = "a third"
    text = document(cells)
    assert "**Cells of 3 states of the library are mixed here" in text
    assert "of one state" not in text


def test_tables_leave_out_trainings_that_have_changed_since(cells):
    from bound_table import document

    text = document([({**key, "source": "of old"}, result) for key, result in cells])
    assert "0 trainings" in text


@pytest.mark.slow
@pytest.mark.long
def test_the_whole_of_it_in_quick_form(tmp_path):
    script = [
        sys.executable,
        str(BENCHMARKS / "bound.py"),
        "--quick",
        "--cache",
        str(tmp_path / "cells.jsonl"),
    ]
    told = subprocess.run(
        [*script, "--only", "gpt,recommender", "--seeds", "2", "--parts", "spread,late"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "ten late restores" in (tmp_path / "cells.md").read_text()
    plan = subprocess.run(
        [*script, "--only", "gpt,lora", "--seeds", "1", "--plan"], capture_output=True, text=True, timeout=60
    )
    assert "lora, spread: 1 cells of unknown length" in plan.stdout
