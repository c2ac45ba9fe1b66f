"""Which checkpoint of a Composer run is the best: its metric was measured on its weights."""

from typing import Any

import pytest

pytest.importorskip("composer")

from support.composer_callbacks import Make, steps, url_of
from support.composer_models import Setup, fit

import shrinkpoint


def at(interval: str, evaluated: str, saving: Make, **options: Any) -> Any:
    callback = saving(save_interval=interval, monitor="Accuracy", mode="max", save_top_k=-1, **options)
    outcome = fit(callback, setup=Setup(eval_interval=evaluated, duration="2ep"))
    return callback, dict(outcome.evaluations)


@pytest.mark.parametrize(
    ("interval", "evaluated", "saved"),
    [
        ("2ba", "4ba", [2, 4, 6, 8, 10, 12, 14, 16]),
        ("4ba", "1ep", [4, 8, 12, 16]),  # the evaluation comes after the last batch's moment to save
        ("3ba", "5ba", [3, 5, 6, 9, 10, 12, 15, 16]),  # saves and evaluations that never meet
    ],
)
def test_only_a_save_at_the_evaluation_is_ranked(
    saving: Make, interval: str, evaluated: str, saved: list[int]
) -> None:
    callback, accuracy = at(interval, evaluated, saving)
    assert steps(callback) == saved
    best = max(accuracy, key=lambda step: (accuracy[step], -step))  # of equals, the older
    assert callback.best_model_path == f"{url_of(callback)}#step={best}"
    assert (
        int(shrinkpoint.load(f"{url_of(callback)}#best")["state"]["timestamp"]["Timestamp"]["batch"]) == best
    )
