"""The bench of schemes: its trainings."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The folders on the path, as they are for the script that lies there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "baselines"))


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
