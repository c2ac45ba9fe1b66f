"""The small log: the weights of any logged step, and what happens when its files are damaged or missing."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from support.small_log import SmallLogTraining
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.errors import (
    CorruptionError,
    FormatError,
    NoCheckpointError,
    ShrinkpointError,
    ShrinkpointWarning,
)
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.steps.segment import Key, Place, Reference
from shrinkpoint.steps.writer import chain_ends

WEIGHTS = ("0.weight", "2.weight")
"""The tensors that are coded."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SmallLogTraining]:
    folder = tmp_path_factory.mktemp("trained")
    training = SmallLogTraining(folder / "run").run(0, 27)
    training.leave()
    return folder / "run", training


@pytest.fixture
def copy(trained, tmp_path) -> tuple[Path, SmallLogTraining]:
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run", trained[1]


def segments(run: Path) -> list[Path]:
    return sorted((run / "steps").glob("*.steps"))


def test_the_weights_of_any_logged_step(trained):
    run, training = trained
    assert training.log.off is None
    for step in (14, 17, 20, 23, 26, 27):
        found = shrinkpoint.load_weights(f"{run}#step={step}")
        assert found.keys() == training.truth[step].keys()
        assert training.miss(step, found, step // 10 * 10 if step % 10 else step - 10) < 0.9
        for name in ("1.running_mean", "1.num_batches_tracked", "1.weight"):  # small ones are exact
            assert torch.equal(found[name], training.truth[step][name])
    found = shrinkpoint.load_weights(f"{run}#step=27", names=["weight"], prefix="2.", device="cpu")
    assert list(found) == ["weight"]


def test_a_step_that_was_saved_is_read_from_the_checkpoint(trained):
    run, training = trained
    found = shrinkpoint.load_weights(f"{run}#step=20")
    assert all(torch.equal(found[name], true) for name, true in training.truth[20].items())


def test_errors_do_not_accumulate(tmp_path):
    training = SmallLogTraining(tmp_path / "run", every=10).run(0, 11)
    training.checkpointer._every = None
    training.run(11, 61)
    training.leave()
    errors = [
        training.miss(step, shrinkpoint.load_weights(f"{tmp_path}/run#step={step}"), 10)
        for step in (15, 30, 60)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.2


def test_a_lossy_base_is_healed(tmp_path):
    coarse = AutoOptions(weight_scale=0.25)
    training = SmallLogTraining(tmp_path / "run", scheme=coarse).run(0, 19)
    training.leave()
    assert training.log.off is None
    base = shrinkpoint.load_weights(f"{tmp_path}/run#step=10")
    lost = sum(float((base[name] - training.truth[10][name]).square().sum()) for name in WEIGHTS) ** 0.5
    found = shrinkpoint.load_weights(f"{tmp_path}/run#step=19")
    missed = sum(float((found[name] - training.truth[19][name]).square().sum()) for name in WEIGHTS) ** 0.5
    assert missed < 0.8 * lost  # true updates on this base would leave all that it has lost
    assert training.miss(19, found, 10) < 0.25


def test_a_step_that_is_not_logged(trained):
    run, _ = trained
    with pytest.raises(
        NoCheckpointError,
        match=r"has no checkpoint of step 5; there are 10, 20.*; and step 5 is not in the log, which has \d+ steps from 1[1-4] to 27",
    ):
        shrinkpoint.load_weights(f"{run}#step=5")
    with pytest.raises(
        NoCheckpointError, match="has no checkpoint of step 14"
    ):  # the whole state is not logged
        shrinkpoint.load(f"{run}#step=14")


def test_a_run_without_a_log(tmp_path):
    saver = shrinkpoint.Saver(str(tmp_path / "run"), scheme_config())
    saver.save({"model": {"w": torch.ones(3)}}, step=1, wait=True)
    saver.close()
    with pytest.raises(NoCheckpointError, match="has no checkpoint of step 2"):
        shrinkpoint.load_weights(f"{tmp_path}/run#step=2")


def scheme_config():
    return shrinkpoint.SaverConfig(scheme="lossless")


def test_the_command_line(trained, tmp_path):
    run, _ = trained
    out = tmp_path / "w.safetensors"
    result = CliRunner().invoke(app, ["export", str(run), str(out), "--step", "27", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["step"], report["logged"], report["seq"]) == (27, True, None)
    assert "weights alone" in report["notes"][0]
    from safetensors.torch import load_file

    found, again = load_file(out), shrinkpoint.load_weights(f"{run}#step=27")
    assert all(torch.equal(found[name], tensor) for name, tensor in again.items())
    result = CliRunner().invoke(app, ["export", str(run), str(out), "--step", "1", "--force"])
    assert result.exit_code != 0
    said = " ".join(result.output.split())
    assert "has no checkpoint of step 1; there are 10, 20" in said
    assert "is not in the log" in said


def test_a_log_in_a_folder_of_its_own(tmp_path):
    training = SmallLogTraining(tmp_path / "run", log=str(tmp_path / "log")).run(0, 15)
    training.leave()
    assert not (tmp_path / "run" / "steps").exists()
    with pytest.raises(NoCheckpointError, match="has no checkpoint of step 15"):
        shrinkpoint.load_weights(f"{tmp_path}/run#step=15")
    found = shrinkpoint.load_weights(f"{tmp_path}/run#step=15", step_log_url=f"{tmp_path}/log")
    assert torch.equal(found["1.running_mean"], training.truth[15]["1.running_mean"])


def test_a_remote_run_and_several_stores():
    name = uuid4().hex
    for url in (f"memory://{name}/run", f"memory://{name}/a,memory://{name}/b,memory://{name}/c"):
        training = SmallLogTraining(url).run(0, 15)
        training.leave()
        assert training.log.off is None
        found = shrinkpoint.load_weights(f"{url}#step=15")
        assert torch.equal(found["1.running_mean"], training.truth[15]["1.running_mean"])


def test_every_third_step_only(tmp_path):
    training = SmallLogTraining(tmp_path / "run", every=10).run(0, 1)
    training.log.every = 3
    training.run(1, 30)
    training.leave()
    for step in range(24, 30):
        if step % 3 == 0:
            shrinkpoint.load_weights(f"{tmp_path}/run#step={step}")
        elif step % 10:
            with pytest.raises(NoCheckpointError, match="not in the log"):
                shrinkpoint.load_weights(f"{tmp_path}/run#step={step}")


def test_the_interval_is_raised_until_the_overhead_is_met(tmp_path, monkeypatch):
    """Each step takes a second, and each record 0.06 s of what the processors can do."""
    training = SmallLogTraining(tmp_path / "run", overhead=0.02).run(0, 11)
    log, now = training.log, [0.0]
    monkeypatch.setattr("shrinkpoint.steps.small.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("shrinkpoint.steps.small.processors", lambda: 2)
    log.blocked_s, log._records_cpu_s, log._records, log._since = 0.0, 0.0, 0, None

    def steps() -> None:
        for step in range(1, 400):
            now[0] += 1.0
            if step % log.every == 0:
                log.blocked_s += 0.01
                log._records_cpu_s += 0.1
                log._records += 1
            log._pace()

    with pytest.warns(ShrinkpointWarning, match="contains every [34] steps instead of every 1"):
        steps()
    assert log.every in (3, 4)
    assert log.share <= 0.0201
    training.checkpointer.close()


def test_an_overhead_that_is_exceeded_is_reported(tmp_path):
    training = SmallLogTraining(tmp_path / "run", overhead=1e-6).run(0, 12)
    with pytest.warns(
        ShrinkpointWarning, match=r"more than overhead=1e-06: it now\s+contains every \d+ steps"
    ):
        training.run(12, 40)
    assert training.log.every > 1
    assert training.log.share > 1e-6
    training.leave()


def test_only_the_last_intervals_are_kept(tmp_path):
    training = SmallLogTraining(tmp_path / "run").run(0, 45)
    training.leave()
    with pytest.raises(NoCheckpointError):
        shrinkpoint.load_weights(f"{tmp_path}/run#step=19")
    for step in (35, 45):
        shrinkpoint.load_weights(f"{tmp_path}/run#step={step}")
    one, two = len(segments(tmp_path / "run")), 0
    training = SmallLogTraining(tmp_path / "more", keep=5).run(0, 45)
    training.leave()
    two = len(segments(tmp_path / "more"))
    assert one < two
    shrinkpoint.load_weights(f"{tmp_path}/more#step=19")


def test_a_checkpoint_that_is_committed_late_leaves_no_hole(tmp_path, monkeypatch):
    """The steps until its commit belong to the checkpoint before, whose chain is kept as long as they are."""
    training = SmallLogTraining(tmp_path / "run").run(0, 15)
    committed, late = training.log.committed, []
    monkeypatch.setattr(training.log, "committed", late.append)
    training.run(15, 25)  # the checkpoint of step 20 is stored, and the log does not know
    monkeypatch.undo()
    for step in late:
        committed(step)
    training.log.flush()
    training.run(25, 35)
    training.leave()
    for step in range(21, 35):
        if step not in (25, 26, 30, 31, 32):  # a new chain begins with a step that is not logged
            shrinkpoint.load_weights(f"{tmp_path}/run#step={step}")


def test_a_chain_is_collected_as_a_whole():
    place = [Place(step, f"{step:032x}") for step in range(40)]
    key = [Key(1, "0" * 16, number) for number in range(1, 6)]
    spans = [(10, 14), (14, 18), (18, 23), (20, 25), (25, 28)]
    references = [
        Reference(k, "0" * 32, place[begin], place[end]) for k, (begin, end) in zip(key, spans, strict=True)
    ]
    assert {at.step: last for at, last in chain_ends(references).items()} == {
        14: 23, 18: 23, 23: 23, 25: 28, 28: 28,
    }  # fmt: skip


# ---- resuming


def test_a_resume_continues_from_the_checkpoint_and_keeps_the_log(tmp_path):
    first = SmallLogTraining(tmp_path / "run").run(0, 18)
    first.crash()
    second = SmallLogTraining(tmp_path / "run")
    assert second.checkpointer.resume() == 10
    assert all(torch.equal(second.model.state_dict()[n], t) for n, t in first.truth[10].items())
    second.log.flush()
    logged = first.log.written
    assert logged > 14
    found = shrinkpoint.load_weights(f"{tmp_path}/run#step={logged}")
    assert first.miss(logged, found, 10) < 0.9
    second.run(10, 16)
    second.leave()
    assert second.miss(16, shrinkpoint.load_weights(f"{tmp_path}/run#step=16"), 11) < 1.5


def test_a_log_of_another_training_is_removed(tmp_path):
    SmallLogTraining(tmp_path / "run").run(0, 18).crash()
    fresh = SmallLogTraining(tmp_path / "run", resume="never")
    assert fresh.checkpointer.resume() == 0
    fresh.log.flush()
    assert [path.name[:8] for path in segments(tmp_path / "run")] == ["00000002"]
    fresh.leave()


def test_kill_9_leaves_every_whole_segment(tmp_path):
    child = os.fork()
    if child == 0:
        training = SmallLogTraining(tmp_path / "run").run(0, 18)
        (tmp_path / "written").write_text(str(training.log.written))
        training.step()
        training.checkpointer.step(19)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    written = int((tmp_path / "written").read_text())
    assert written > 14
    truth = SmallLogTraining(tmp_path / "truth").run(0, 18)
    for step in range(14, written + 1):
        found = shrinkpoint.load_weights(f"{tmp_path}/run#step={step}")
        assert truth.miss(step, found, 10) < 0.9
        assert torch.equal(found["1.running_var"], truth.truth[step]["1.running_var"])
    truth.leave()


# ---- damage


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def last(run: Path) -> Path:
    return segments(run)[-1]


def exchange(run: Path) -> None:
    *_, one, other = segments(run)
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


DAMAGE = {
    "cut short": lambda run: last(run).write_bytes(last(run).read_bytes()[:-9]),
    "empty": lambda run: last(run).write_bytes(b""),
    "magic": lambda run: flip(last(run), 0),
    "lengths": lambda run: flip(last(run), 17),
    "header": lambda run: flip(last(run), 200),
    "payload": lambda run: flip(last(run), last(run).stat().st_size - 40),
    "exchanged": exchange,
    "missing": lambda run: segments(run)[-2].unlink(),
    "no first segment": lambda run: segments(run)[0].unlink(),
    "another segment's copy": lambda run: shutil.copy(segments(run)[-2], last(run)),
    "checkpoint gone": lambda run: [path.unlink() for path in (run / "commits").glob("*1.json")],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_an_error_and_never_other_weights(copy, damage):
    run, _ = copy
    assert shrinkpoint.load_weights(f"{run}#step=27")
    DAMAGE[damage](run)
    with pytest.raises((FormatError, NoCheckpointError)):
        shrinkpoint.load_weights(f"{run}#step=27")


def test_earlier_steps_are_read_although_a_later_segment_is_damaged(copy):
    run, training = copy
    flip(last(run), 200)
    assert training.miss(23, shrinkpoint.load_weights(f"{run}#step=23"), 20) < 1


def test_a_base_with_other_weights(copy):
    run, _ = copy
    other = SmallLogTraining(run.parent / "other")
    with torch.no_grad():
        other.model[0].weight.add_(1)
    other.run(0, 27).leave()
    for path in (run / "commits").glob("*.json"):
        path.unlink()
    for folder in ("commits", "data"):
        shutil.copytree(run.parent / "other" / folder, run / folder, dirs_exist_ok=True)
    shutil.copy(run.parent / "other" / "committed.json", run / "committed.json")
    with pytest.raises(ShrinkpointError):
        shrinkpoint.load_weights(f"{run}#step=27")


def test_weights_that_are_not_finite(tmp_path):
    training = SmallLogTraining(tmp_path / "run").run(0, 16)
    with torch.no_grad():
        training.model[0].weight[0, 0] = float("nan")
    training.run(16, 18)
    training.leave()
    with pytest.raises(NoCheckpointError, match=r"of '0\.weight' were not finite"):
        shrinkpoint.load_weights(f"{tmp_path}/run#step=17")
    shrinkpoint.load_weights(f"{tmp_path}/run#step=16")


def test_a_parameter_that_is_added_ends_the_log_and_not_the_training(tmp_path):
    training = SmallLogTraining(tmp_path / "run").run(0, 14)
    training.model[0] = torch.nn.Linear(64, 48, bias=False)
    with pytest.warns(
        ShrinkpointWarning, match=r"the step log is off: the model's tensor '0\.bias' is not there"
    ) as told:
        training.run(14, 16)
    assert len([one for one in told if "step log" in str(one.message)]) == 1
    training.leave()


def test_a_tied_weight_that_is_untied_ends_the_log_and_is_never_read_as_tied(tmp_path):
    training = SmallLogTraining(tmp_path / "run")
    training.model[0].register_parameter("twin", training.model[2].weight)
    training.run(0, 14)
    training.model[2].weight = torch.nn.Parameter(torch.zeros(64, 48))
    with pytest.warns(ShrinkpointWarning, match=r"the step log is off: the model's tensor '2\.weight' is"):
        training.run(14, 20)
    training.leave()
    assert training.log.written == 14


def test_a_store_that_fails_ends_the_log_and_not_the_training(tmp_path, monkeypatch):
    training = SmallLogTraining(tmp_path / "run").run(0, 14)
    put = shrinkpoint.store.local.LocalObjects.put

    def full(self, key, data):
        if key.startswith("steps/"):
            raise CorruptionError("the disk is full")
        put(self, key, data)

    monkeypatch.setattr("shrinkpoint.store.local.LocalObjects.put", full)
    with pytest.warns(ShrinkpointWarning, match="the step log is off: the disk is full") as told:
        training.run(14, 25)
    assert len([one for one in told if "step log" in str(one.message)]) == 1
    training.leave()
    assert shrinkpoint.load_weights(f"{tmp_path}/run#step=20")


def test_two_writers(tmp_path):
    first = SmallLogTraining(tmp_path / "run").run(0, 14)
    second = SmallLogTraining(tmp_path / "run")
    assert second.checkpointer.resume() == 10
    second.log.flush()
    second.run(10, 17)
    first.log.committed(10)
    first.log.flush()
    with pytest.warns(ShrinkpointWarning, match="another process has taken over the log"):
        first.checkpointer.step_log.end_step(15)
    assert second.miss(17, shrinkpoint.load_weights(f"{tmp_path}/run#step=17"), 11) < 1.5
    for training in (first, second):
        training.checkpointer.saver.close()


def listed(run: Path) -> str:
    result = CliRunner().invoke(app, ["ls", str(run)])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_ls_tells_of_the_log_in_the_run(copy):
    run, _ = copy
    names = segments(run)
    assert f"and a step log ('small') up to step 27: {len(names)} segments," in listed(run)
    assert "shrinkpoint export" in listed(run)
    names[-1].write_bytes(b"damaged")
    assert re.search(r"step log \('small'\) up to step (2[0-6]|1\d): ", listed(run))
    told = json.loads(CliRunner().invoke(app, ["ls", str(run), "--json"]).stdout)["step_log"]
    assert (told["segments"], told["kind"]) == (len(names), "small")
    for name in names:
        name.write_bytes(b"damaged")
    assert "whose newest segments are damaged" in listed(run)
    shutil.rmtree(run / "steps")
    assert "step log" not in listed(run)
