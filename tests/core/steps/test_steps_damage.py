"""Whatever happens to a log's files, what is resumed is a state that the undisturbed training had."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stepped import Training

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.state.rng import capture_rng, restore_rng

END = 14


@pytest.fixture(scope="module")
def truth() -> tuple[list[float], list[str]]:
    training = Training()
    losses, digests = [], [training.digest]
    for step in range(END):
        losses += training.run(step, step + 1)
        digests.append(training.digest)
    return losses, digests


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two crashes after 9 and 12 steps: a checkpoint of step 5, and one segment for each step."""
    folder = tmp_path_factory.mktemp("crashed")
    for end in (9, 12):
        training = Training().log(f"{folder}/run", f"{folder}/log", every=5 if end == 9 else 50, steps=1)
        begin = training.checkpointer.resume()
        assert begin == (0 if end == 9 else 9)
        training.run(begin, end)
        training.crash()
    return folder


def names(folder: Path) -> list[Path]:
    return sorted((folder / "log").rglob("*.steps"))


def own(folder: Path) -> list[Path]:
    """The second writer's: what it went on from, then steps 10, 11 and 12."""
    return [path for path in names(folder) if path.name.startswith("00000002-")]


def inherited(folder: Path) -> list[Path]:
    """The first writer's that the second one went on from: steps 1 to 9."""
    return [path for path in names(folder) if path.name.startswith("00000001-")]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def other_run(folder: Path) -> None:
    """A segment of another run with the same writer's name."""
    last = own(folder)[-1]
    data = last.read_bytes()
    foreign = Training().log(f"{folder}/run-2", f"{folder}/log-2", steps=1)
    foreign.checkpointer.resume()
    foreign.run(0, 1)
    foreign.crash()
    source = sorted((folder / "log-2").rglob("*.steps"))[1]
    target = last.with_name(last.name.replace(last.name[26:36], "0000000004"))
    shutil.copy(source, target)
    assert last.read_bytes() == data


DAMAGE: dict[str, tuple[Callable[[Path], object], int, str | None]] = {
    "none": (lambda folder: None, 12, None),
    "the last one is gone": (lambda f: own(f)[-1].unlink(), 11, None),
    "one in the middle is gone": (lambda f: own(f)[2].unlink(), 10, "not what leads there"),
    "an inherited one is gone": (lambda f: inherited(f)[-2].unlink(), 7, "is missing"),
    "the last one is cut short": (
        lambda f: own(f)[-1].write_bytes(own(f)[-1].read_bytes()[:-9]),
        11,
        "cut short",
    ),
    "the last one is empty": (lambda f: own(f)[-1].write_bytes(b""), 11, "not a segment"),
    "a bit of a gradient": (lambda f: flip(own(f)[1], -40), 9, "checksum of its tensors"),
    "a bit of a header": (lambda f: flip(own(f)[3], 300), 11, "seal does not match"),
    "a bit of an inherited one": (lambda f: flip(inherited(f)[-1], -3000), 8, "checksum of its tensors"),
    "two exchanged": (lambda f: swap(own(f)[1], own(f)[2]), 9, "under another name"),
    "one twice": (
        lambda f: shutil.copy(own(f)[1], str(own(f)[3])[:-7] + "9.steps"),
        12,
        "under another name",
    ),
    "another run's": (other_run, 12, "another run"),
    "a stray one of a later turn": (
        lambda f: shutil.copy(own(f)[1], own(f)[1].with_name("00000007" + own(f)[1].name[8:])),
        12,
        "lacks its writer's first segment",
    ),
    "a copied first one of a later turn": (
        lambda f: shutil.copy(own(f)[0], own(f)[0].with_name("00000007" + own(f)[0].name[8:])),
        12,
        "under another name",
    ),
    "the first one is damaged": (
        lambda f: flip(own(f)[0], 200),
        5,
        "names the segments that its writer continued from",
    ),
    "the first one is empty": (
        lambda f: own(f)[0].write_bytes(b""),
        5,
        "names the segments that its writer continued from",
    ),
    "the first one is gone": (lambda f: own(f)[0].unlink(), 5, "lacks its writer's first segment"),
    "a file of somebody": (lambda f: own(f)[0].with_name("notes.txt").write_text("hello"), 12, "is ignored"),
    "all gone": (lambda f: shutil.rmtree(f / "log"), 5, None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_costs_time_only(crashed, truth, tmp_path, damage):
    folder = Path(shutil.copytree(crashed, tmp_path / "copy"))
    (run,) = (folder / "log").iterdir()
    assert len(names(folder)) >= 8, run
    spoil, reached, told = DAMAGE[damage]
    spoil(folder)
    training = Training().log(f"{folder}/run", f"{folder}/log", every=50, steps=1)
    if told is None:
        begin = training.checkpointer.resume()
    else:
        with pytest.warns(ShrinkpointWarning, match=told):
            begin = training.checkpointer.resume()
    assert begin == reached
    losses, digests = truth
    assert training.digest == digests[begin]
    assert training.run(begin, END) == losses[begin:]
    assert training.digest == digests[END]
    training.crash()
    again = Training().log(f"{folder}/run", f"{folder}/log", every=50, steps=1)
    if damage == "a file of somebody":
        (next((folder / "log").rglob("notes.txt"))).unlink()
    assert again.checkpointer.resume() == END  # the next log goes on from what was found
    assert again.digest == digests[END]
    again.checkpointer.close()


def test_a_damaged_checkpoint_costs_no_step(truth, tmp_path):
    """An older one, and the log from there across the damaged one."""
    training = Training().log(f"{tmp_path}/run", f"{tmp_path}/log", every=5, steps=2)
    training.checkpointer.resume()
    training.run(0, 12)
    training.crash()
    newest = max((tmp_path / "run" / "data").iterdir())
    flip(newest, -20)
    again = Training().log(f"{tmp_path}/run", f"{tmp_path}/log", every=5, steps=2)
    with pytest.warns(ShrinkpointWarning, match="passed over for an older one"):
        assert again.checkpointer.resume() == 12
    assert again.digest == truth[1][12]


def test_a_fenced_writers_segments_are_not_replayed(truth, tmp_path):
    """A process that goes on after another one has taken over: nothing that it logs from then on is used."""
    places = f"{tmp_path}/run", f"{tmp_path}/log"
    old = Training().log(*places, every=50, steps=1)
    old.checkpointer.resume()
    old.run(0, 4)
    old.checkpointer.step_log.flush()
    before = len(names(tmp_path))
    new = Training().log(*places, every=50, steps=1)
    assert new.checkpointer.resume() == 4
    new.checkpointer.step_log.flush()  # its first segment is there, and what it does not continue is removed
    old.optimizer.param_groups[0]["lr"] = 0.5
    generators = capture_rng()
    old.run(4, 8)
    restore_rng(generators)
    old.checkpointer.step_log.flush()
    assert len(names(tmp_path)) >= before + 4
    new.run(4, 6)
    new.crash()
    again = Training().log(*places, every=50, steps=1)
    assert again.checkpointer.resume() == 6
    assert again.digest == truth[1][6]
    old.crash()


def test_a_checkpoint_that_the_log_does_not_know_is_not_continued(truth, tmp_path):
    places = f"{tmp_path}/run", f"{tmp_path}/log"
    training = Training().log(*places, every=50, steps=1)
    training.checkpointer.resume()
    training.run(0, 3)
    training.crash()
    without = Training().log(places[0], None, every=5)
    without.checkpointer.resume()
    without.run(0, 6)
    without.leave()
    again = Training().log(*places, every=50, steps=1)
    with pytest.warns(ShrinkpointWarning, match="does not continue step 5"):
        assert again.checkpointer.resume() == 5
    assert again.digest == truth[1][5]


def test_a_run_that_is_made_anew_knows_nothing_of_the_old_log(tmp_path):
    places = f"{tmp_path}/run", f"{tmp_path}/log"
    training = Training().log(*places, every=5, steps=1)
    training.checkpointer.resume()
    training.run(0, 7)
    training.crash()
    shutil.rmtree(tmp_path / "run")
    again = Training().log(*places, every=5, steps=1)
    assert again.checkpointer.resume() == 0
