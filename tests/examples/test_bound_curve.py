"""The scripts beside the bench of the bound: what moments cost in bits, and what a restore costs over the steps after it."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The folders on the path, as they are for the script that lies there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def middle():
    from bound_trainings import KINDS
    from moments import middle_of

    return middle_of(KINDS["moe-muon"], 1, True)


def test_moments_take_fewer_bits_the_more_may_be_lost(capsys):
    import moments

    moments.main(["--quick", "--only", "gpt"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")][2:]
    assert [row[0] for row in rows[:6]] == ["0.005", "0.02", "0.05", "0.1", "0.2", "0.45"]
    assert [row[0][:6] for row in rows[6:]] == ["`auto`", "`auto`"]
    assert rows[7][0].endswith("and second moments")
    bits, errors, lost = ([float(row[at]) for row in rows[:6]] for at in (1, 2, 8))
    assert bits == sorted(bits, reverse=True)
    assert errors == sorted(errors)
    assert lost == sorted(lost)
    assert 0 < errors[0] < 0.11, "half its square is what is lost"
    assert all(0.99 <= float(row[3]) <= 1.01 for row in rows)


def test_second_moments_are_the_nearer_the_more_bits_they_take(capsys):
    import second_moments

    second_moments.main(["--quick", "--only", "gpt", "--seeds", "1"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")][2:]
    assert [row[0] for row in rows] == list(second_moments.WAYS)
    bits, errors = ([float(row[at]) for row in rows] for at in (1, 5))
    assert bits[0] == bits[1] < bits[2] < bits[3]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[-1] < 0.03
    assert float(rows[-1][1]) == 0


def test_other_checkpoints_are_those_of_a_run(middle):
    from bound_trainings import KINDS
    from moments import middle_of

    kind = KINDS["moe-muon"]
    steps = kind.save_steps("spread", True)
    assert middle.save_context.step == steps[5]
    first, last = (middle_of(kind, 1, True, place) for place in (0, 10))
    assert (first.save_context.step, first.save_context.movement.steps) == (steps[0], steps[0])
    assert (last.save_context.step, last.save_context.movement.steps) == (steps[10], steps[10] - steps[9])


def test_trainings_that_are_not_there_are_refused(capsys):
    import moments

    with pytest.raises(SystemExit):
        moments.main(["--only", "gtp"])
    assert "no such training: gtp" in capsys.readouterr().err


def test_undisturbed_paths_are_that_of_the_training_itself(middle):
    import bound_curve

    training, step = middle.training, middle.save_context.step
    expected = [training.final()]
    for done in range(2):
        training.step(step + done)
        expected.append(training.final())
    first = bound_curve._losses(middle, {}, (0, 1, 2))
    again = bound_curve._losses(middle, {}, (0, 1, 2))
    assert first == again == expected


def test_moments_change_nothing_before_the_next_update(middle):
    import bound_curve

    rises = bound_curve._rises(middle, (0, 1))
    assert rises["moments"][0] == 0
    assert rises["moments"][1] != 0
    assert rises["both"][0] == rises["weights"][0] != 0


def test_curves_are_printed_and_drawn(tmp_path, capsys):
    import bound_curve

    out = tmp_path / "curve.svg"
    bound_curve.main(["--quick", "--only", "gpt,gpt-lion", "--seeds", "1", "--out", str(out)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| gpt")]
    assert [row.split(" | ")[1] for row in rows] == 2 * ["weights", "moments", "both"]
    drawn = ElementTree.fromstring(out.read_text())
    words = {element.text for element in drawn.iter() if element.text}
    assert {"GPT, Lion", "rise of the loss", "steps after the restore at step 18"} <= words
    assert len([element for element in drawn.iter() if element.tag.endswith("circle")]) == 2 * 3 * 3
