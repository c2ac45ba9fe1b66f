"""The rule by which a training is said to have kept the bound, on changes that are worked out by hand."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the folders on the path, as they are for the script that lies there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def row(changes: list[float], nudges: list[float] | None = None, **more: Any) -> Any:
    """Return a row whose restored runs end so much higher than the undisturbed ones, whose loss is 2."""

    def cell(change: float) -> dict[str, Any]:
        given = {"final": 2.0 * (1 + change), "also": {"other": 1.0}, "abilities": {}, "frozen_changes": 0}
        return {**given, "unmeasured": "", "cost_high": 0.01, **more}

    made = importlib.import_module("bound_table").Row(
        "gpt", "auto", "{}", cells={seed: cell(change) for seed, change in enumerate(changes)}
    )
    made.plain = {seed: cell(0.0) | {"also": {"other": 1.0}} for seed in range(len(changes))}
    made.nudged = {seed: cell(change) for seed, change in enumerate(nudges or [])}
    return made


def test_the_mean_is_of_paired_changes_and_has_its_standard_error() -> None:
    of = importlib.import_module("bound_table").Mean.of
    mean = of([0.01, 0.02, 0.06])
    assert mean.value == pytest.approx(0.03)
    assert mean.error == pytest.approx(0.0007**0.5 / 3**0.5)
    assert mean.low == pytest.approx(0.03 - 2 * mean.error)
    assert of([0.02]).error == 0


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ([0.0099, 0.0099, 0.0099], True),
        ([0.011, 0.011, 0.011], False),  # the same in each seed: there is no error
        ([0.02], False),
        ([0.0, 0.06, 0.0], True),  # 0.02 with an error of 0.02
        ([0.02, 0.03, 0.04], False),  # 0.03 with an error of 0.0058
        ([-0.5, -0.5, -0.5], True),
    ],
)
def test_kept_is_a_mean_within_the_limit_and_two_errors(changes: list[float], kept: bool) -> None:
    assert row(changes).kept is kept


def test_every_further_loss_has_to_keep_it() -> None:
    assert row([0.0, 0.0]).kept
    assert not row([0.0, 0.0], also={"other": 1.02}).kept
    assert not row([0.0, 0.0], frozen_changes=1).kept


def test_a_training_is_chaotic_where_a_millionth_does_more_than_restores() -> None:
    assert row([0.03, -0.02], [0.04, -0.03]).is_chaotic
    assert not row([0.03, -0.02], [0.01, -0.01]).is_chaotic  # restores do more
    assert not row([0.001, 0.002], [0.005, 0.005]).is_chaotic  # within the limit
    assert not row([0.03, -0.02]).is_chaotic


def test_a_report_covers_the_mean_but_for_two_errors() -> None:
    assert row([0.0099, 0.0099]).covered is True
    assert row([0.02, 0.02]).covered is False
    assert row([0.0, 0.03]).covered is True
    assert row([0.0], unmeasured="no evaluation").covered is None
