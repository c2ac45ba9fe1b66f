"""The quality bound on shards: evaluations that all ranks make together, which leave no trace, and the plan that follows."""

from pathlib import Path

import pytest
import torch
from support.sharded import launch
from support.sharded_probing import (
    bounded,
    digest,
    failing,
    fails_alone,
    leaves,
    shards_and_whole,
    stepped,
    steps_failing,
    traces,
    trained,
)

import shrinkpoint
from shrinkpoint.engine.warmup import compile_coders


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Once here, and not by each of the ranks at the same time."""
    compile_coders("auto")


HSDP = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8),
    reason="the backward pass of HSDP needs a GPU before torch 2.8",
)


def _compare(tmp_path: Path, kind: str, world: int, limit: int | None = None) -> None:
    url = str(tmp_path / "run")
    answers = launch(shards_and_whole, world, tmp_path, url, kind, limit)
    seen, reports = answers[0]
    assert [(report.step, report.measured) for report in reports] == [(2, "measured"), (4, "measured")]
    assert sum(report.evaluations for report in reports) == len(seen) >= 7
    # tensor parallelism adds parts of products in another order: fp32's spacing at such losses is 1e-6
    near = {"rel": 1e-6} if kind == "tp" else {"abs": 1e-6}
    for own, _ in answers:
        for on_shards, whole, _ in own:
            assert on_shards == pytest.approx(whole, **near)
    evaluated = [[at for *_, at in own] for own, _ in answers]
    assert all(other == evaluated[0] for other in evaluated), "the ranks evaluated different weights"
    # noise, the true weights, what is restored, and its mirror image
    assert len(set(evaluated[0])) >= 7
    assert digest(shrinkpoint.load_weights(url)) in evaluated[0], "what a reader gets was not evaluated"
    baseline = sum(loss for own, _ in answers for loss in own[0][0]) / (2 * world)
    assert reports[0].baseline == pytest.approx(baseline)
    for report in reports:
        assert report.degradation_high is not None
        assert report.allowed is not None
        assert report.degradation_high <= report.allowed
        assert report.search_s > 0
        # restores were tried on the ranks' own parameters, blocks of longer tensors among them
        assert report.update_error is not None
        assert report.lost_steps is not None
        assert "not tried" not in report.reason


@pytest.mark.parametrize("limit", [None, 1000], ids=["whole", "blocks"])
def test_losses_on_shards_are_those_of_the_whole_model(limit: int | None, tmp_path: Path) -> None:
    _compare(tmp_path, "fsdp", 2, limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "limit"),
    [
        pytest.param("fsdp", 3, None, marks=pytest.mark.long),
        pytest.param("hsdp", 4, None, marks=pytest.mark.long),
        ("tp", 4, None),
    ],
    ids=["fsdp", "hsdp", "tp"],
)
def test_losses_on_shards_are_those_of_the_whole_model_on_any_mesh(
    kind: str, world: int, limit: int | None, tmp_path: Path
) -> None:
    _compare(tmp_path, kind, world, limit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "accumulated"])
def test_evaluations_leave_no_trace(kind: str, tmp_path: Path) -> None:
    with_them = launch(traces, 2, tmp_path, str(tmp_path / "measured"), kind, True)
    without = launch(traces, 2, tmp_path, str(tmp_path / "unmeasured"), kind, False)
    for (seen, reports), (wanted, unmeasured) in zip(with_them, without, strict=True):
        assert {measured for measured, *_ in reports} <= {"measured", "exact"}
        assert [measured for measured, *_ in unmeasured] == ["unmeasured"] * 3
        assert sum(evaluations for _, evaluations, _ in reports) > 8
        assert ["2", "4"] in [steps for *_, steps in reports]
        for found, other in zip(seen, wanted, strict=True):
            _same(found, other)


def _same(found: object, wanted: object) -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)  # type: ignore[arg-type]
    elif isinstance(wanted, dict):
        assert isinstance(found, dict)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            _same(found[name], value)
    elif isinstance(wanted, list | tuple):
        assert isinstance(found, list | tuple)
        for one, other in zip(found, wanted, strict=True):
            _same(one, other)
    else:
        assert str(found) == str(wanted)


def _try_steps(tmp_path: Path, kind: str, world: int, limit: int | None = None) -> None:
    url = str(tmp_path / "run")
    answers = launch(stepped, world, tmp_path, url, kind, limit)
    taken, seen, [report] = answers[0]
    assert taken == 2 * [0, 1, 2, 3], "from the true state, and from the restored one"
    assert sorted(report.resumed) == ["2", "4"]
    assert report.measured == "measured"
    assert all(
        (other[0], other[1], other[2][0].resumed) == (taken, seen, report.resumed) for other in answers
    )
    *_, two, four, again_two, again_four = seen
    assert [steps for steps, _ in (two, four, again_two, again_four)] == [2, 4, 6, 8]
    for restored, (first, second) in ((False, (two, four)), (True, (again_two, again_four))):
        for found in launch(trained, world, tmp_path, url, kind, restored):
            assert found == [first[1], second[1]], "training itself goes elsewhere"


@pytest.mark.parametrize("limit", [None, 1000], ids=["whole", "blocks"])
def test_trial_steps_on_shards_are_those_that_training_takes(limit: int | None, tmp_path: Path) -> None:
    _try_steps(tmp_path, "fsdp", 2, limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        pytest.param("fsdp", 3, marks=pytest.mark.long),
        ("bf16", 2),
        pytest.param("hsdp", 4, marks=HSDP),
        ("tp", 4),
    ],
)
def test_trial_steps_are_those_that_training_takes_on_any_mesh(kind: str, world: int, tmp_path: Path) -> None:
    _try_steps(tmp_path, kind, world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("everywhere", "because resumed steps cannot be taken (RuntimeError: no batch)"),
        ("memory", "no room for moments"),
    ],
)
def test_trial_steps_that_fail_are_not_taken_again(how: str, why: str, tmp_path: Path) -> None:
    answers = launch(steps_failing, 2, tmp_path, str(tmp_path / "run"), how)
    wanted = launch(steps_failing, 2, tmp_path, str(tmp_path / "other"), "never")
    for (reported, digests, _), (_, undisturbed, _) in zip(answers, wanted, strict=True):
        assert [measured for measured, _ in reported] == ["exact", "measured", "measured"]
        assert [steps for _, steps in reported] == [[], [], []]
        assert digests == undisturbed
    shown = [warning for *_, warnings in answers for warning in warnings]
    assert sum("measured at the restore alone" in warning and why in warning for warning in shown) in (1, 2)


@pytest.mark.slow
def test_a_rank_that_alone_leaves_trial_steps_ends_the_training_on_all(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    launch(steps_failing, 2, tmp_path, url, "before", ends=[3, 3], limit_s=60.0)
    assert shrinkpoint.Saver(url).store.manifests() == []


@pytest.mark.slow
def test_a_bound_that_cannot_be_kept_stores_exactly(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    [(reports, state, _), (others, *_)] = launch(bounded, 2, tmp_path, url, {"max_degradation": 1e-9})
    assert [report.measured for report in reports] == ["exact", "exact"]
    assert "stored exactly" in reports[0].reason
    assert reports[0].evaluations >= 3
    assert [report.reason for report in others] == [report.reason for report in reports]
    weights = shrinkpoint.load_weights(url)
    assert all(torch.equal(value, state[name]) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.long
def test_a_tight_bound_takes_finer_steps(tmp_path: Path) -> None:
    bounds = {1e-2: "", 1e-5: ""}
    for bound in bounds:
        [(reports, *_), _] = launch(
            bounded, 2, tmp_path, str(tmp_path / f"{bound}"), {"max_degradation": bound}
        )
        assert reports[0].measured in ("measured", "exact")
        bounds[bound] = reports[0].configuration
    wide, tight = (
        0.0 if told == "exact" else float(told.split("=")[1].split()[0]) for told in bounds.values()
    )
    assert tight < wide


def test_moments_take_as_many_bytes_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Each rank must know the decays of its tensors' optimizer: with unknown ones, moments are stored more finely."""
    sizes = []
    for world in (1, 3):
        _, _, [report] = launch(stepped, world, tmp_path, str(tmp_path / f"{world}"), "fsdp")[0]
        sizes.append([report.sections[role] for role in ("exp_avg", "exp_avg_sq")])
    for one, three in zip(*sizes, strict=True):
        assert three == pytest.approx(one, rel=0.03)


def test_inshrinkerator_searches_on_shards(tmp_path: Path) -> None:
    url, options = (
        str(tmp_path / "run"),
        {"scheme": {"name": "inshrinkerator", "min_elements": 100}, "max_degradation": 0.5},
    )
    options |= {"search_overhead": 0.9, "guards": False}
    [(reports, state, _), (others, *_)] = launch(bounded, 2, tmp_path, url, options)
    assert {report.measured for report in reports} == {"measured"}
    assert sum(report.evaluations for report in reports) > 7, "three for each save without a search"
    for report, other in zip(reports, others, strict=True):
        assert report.degradation_high <= report.allowed
        assert (report.configuration, report.reason) == (other.configuration, other.reason)
    weights = shrinkpoint.load_weights(url)
    assert any(not torch.equal(value, state[name]) for name, value in weights.items())


@pytest.mark.slow
def test_settings_that_are_too_coarse_are_refused(tmp_path: Path) -> None:
    coarse = {"scheme": {"name": "uniform", "bits": 2}}
    [(reports, *_), _] = launch(bounded, 2, tmp_path, str(tmp_path / "run"), coarse)
    assert {report.measured for report in reports} == {"exact"}
    assert "the settings given raise the loss by" in reports[0].reason


@pytest.mark.slow
def test_a_resume_goes_on_with_the_search_and_counts_as_a_restore(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    [(first, *_), _] = launch(bounded, 2, tmp_path, url, {})
    [(second, *_), _] = launch(bounded, 2, tmp_path, url, {})
    assert {report.measured for report in (*first, *second)} == {"measured"}
    assert second[0].kind == "delta"
    newest = shrinkpoint.Saver(url).store.manifests()[0].meta["search"]
    assert newest["restores"]["restores"] == 1  # type: ignore[index, call-overload]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["everywhere", pytest.param("after", marks=pytest.mark.long)])
def test_an_evaluation_that_fails_stores_exactly(how: str, tmp_path: Path) -> None:
    answers = launch(failing, 2, tmp_path, str(tmp_path / "run"), how)
    for told, _ in answers:
        assert [(step, measured) for step, measured, _ in told] == [
            (1, "measured"),
            (2, "exact"),
            (3, "measured"),
        ]
        assert "no data" in told[1][2]
    shown = [warning for _, warnings in answers for warning in warnings]
    assert any("cannot be measured" in warning and "no data" in warning for warning in shown)


@pytest.mark.slow
def test_a_rank_that_alone_leaves_an_evaluation_ends_the_training_on_all(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    launch(failing, 2, tmp_path, url, "before", ends=[3, 3], limit_s=60.0)
    assert all(Path(f"{url}-{rank}-1").exists() for rank in range(2))
    [manifest] = shrinkpoint.Saver(url).store.manifests()
    assert manifest.step == 1
    restored = shrinkpoint.Saver(url).restore()
    assert restored is not None
    assert restored.manifest.step == 1


@pytest.mark.slow
def test_a_training_that_leaves_stores_its_save_unmeasured(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    assert launch(leaves, 2, tmp_path, url) == [[(1, "exact")]] * 2


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_whose_training_fails_alone_costs_no_running_save(failed: int, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    answers = launch(fails_alone, 2, tmp_path, url, failed)
    [own], [other] = answers
    assert own == other
    assert own[:2] == (1, "exact")
    assert "no more evaluations: training has ended" in own[2]
    assert [manifest.step for manifest in shrinkpoint.Saver(url).store.manifests()] == [1]
