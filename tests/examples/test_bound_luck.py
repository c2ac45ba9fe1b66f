"""The script beside the bench of the bound that takes one restore apart: harm and luck, by weights and by optimizer state."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
FORCED = '{"guards": false, "max_degradation": 0.5}'


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The folders on the path, as they are for the script that lies there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def task(scheme, config="{}"):
    from bound_run import Setting, Task

    setting = Setting(scheme=scheme, config=config)
    return Task(name="recommender", seed=1, part="spread", quick=True, setting=setting)


def test_paths_differ_by_what_is_restored_and_true_tensors_change_nothing(monkeypatch):
    import bound_luck

    true = {"true": lambda true, restored: true}
    monkeypatch.setattr(bound_luck, "PATHS", {**bound_luck.PATHS, **true})
    found = bound_luck.measure(task("uniform", FORCED))
    changes = dict(found.changes)
    assert changes.pop("true") == 0
    assert changes.keys() == {"as restored", "weights alone", "optimizer alone", "random signs"}
    assert changes["as restored"] == changes["weights alone"] != 0, (
        "uniform stores the optimizer's state exactly"
    )
    assert changes["optimizer alone"] == 0
    assert changes["random signs"] not in (0, changes["as restored"])
    rows = bound_luck.table([found, found]).splitlines()[2:]
    assert len(rows) == 5
    assert rows[0].startswith(f"| recommender | {found.step} of 33 | as restored | ")
    assert " | 0.00 | " in rows[0], "both are the same seed"


def test_a_run_whose_checkpoints_are_exact_has_none():
    import bound_luck

    assert bound_luck.measure(task("lossless")) is None
