"""A training that adopts its checkpoints is the undisturbed one after any crash, bit for bit."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from support import away as away_program
from support.adopting import EVERY, OPTIMIZERS, STEPS, Training, truth
from support.matrices import some_fast

import shrinkpoint
from shrinkpoint.engine.handover import unsuitable
from shrinkpoint.engine.under_way import SaveUnderWay
from shrinkpoint.errors import ConfigError, SaveFailedError, ShrinkpointWarning, StoreError
from shrinkpoint.state.training import TrainingState, plain
from shrinkpoint.store.writer import RunWriter


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return truth(folder), folder / "truth-adamw"


def assert_same(noted, true):
    assert noted
    assert {step: true[step] for step in noted} == noted


@pytest.mark.parametrize("case", some_fast(OPTIMIZERS, ["two", "bfloat16", "scaled"], ["amsgrad"]))
def test_resumed_training_is_the_undisturbed_one(tmp_path, case):
    true = truth(tmp_path, case)
    for stop in (EVERY + 1, 3 * EVERY, 5 * EVERY + 3):
        url = tmp_path / f"run-{stop}"
        first = Training(case).save_to(url).run(stop)
        assert_same(first.end(), true)
        again = Training(case).save_to(url)
        assert again.reached == stop // EVERY * EVERY
        assert_same(again.run(STEPS).end(), true)


def test_without_adoption_it_differs(tmp_path):
    true = truth(tmp_path, adopt=False, busy="wait")
    Training().save_to(tmp_path / "run", adopt=False, busy="wait").run(3 * EVERY + 1).end()
    again = Training().save_to(tmp_path / "run", adopt=False, busy="wait").run(STEPS).end()
    assert again[STEPS] != true[STEPS]


def test_training_has_what_a_reader_gets(undisturbed):
    true, url = undisturbed
    for manifest in shrinkpoint.Saver(url).store.manifests():
        reader = Training().save_to(url, adopt=False, every=None)
        assert reader.checkpointer.resume(manifest.step) == manifest.step
        assert reader.digest == true[manifest.step][1]
        assert manifest.meta["adoption"]["planned"]


def test_saves_are_small_and_the_bound_counts_adoptions(undisturbed):
    _, url = undisturbed
    manifests = shrinkpoint.Saver(url).store.manifests()[::-1]
    assert [m.meta["adoption"]["count"] for m in manifests] == list(range(1, STEPS // EVERY + 1))
    assert [m.kind for m in manifests] == ["base", *["delta"] * 3] * 2
    spent = [m.meta["search"]["restores"] for m in manifests]
    assert [s["restores"] for s in spent] == list(range(STEPS // EVERY))
    assert 0 < spent[-1]["spent_high"] <= 0.2 / 4  # a quarter of max_degradation is for what is measured
    assert any(
        "trellis-weight" in str(m.meta["save"]) or m.meta["save"]["degradation"] > 0 for m in manifests
    )
    assert all(m.meta["save"]["adopt_s"] > 0 for m in manifests)


def test_restore_costs_nothing_more(tmp_path, undisturbed):
    _, whole = undisturbed
    url = tmp_path / "run"
    for stop in (5, 9, 14, 18, STEPS):  # four restores in between
        Training().save_to(url).run(stop).end()
    spent, undisturbed_spent = (
        [m.meta["search"] for m in shrinkpoint.Saver(u).store.manifests()] for u in (url, whole)
    )
    assert spent == undisturbed_spent


def test_unplanned_save_is_exact_and_changes_nothing(tmp_path, undisturbed):
    true, _ = undisturbed
    url, stop = tmp_path / "run", 3 * EVERY + 2
    first = Training().save_to(url).run(stop)
    with pytest.warns(ShrinkpointWarning, match="was not a planned save and is stored exactly, in .* MB"):
        first.checkpointer.save(stop, wait=True)
    assert first.checkpointer.reports()[-1].measured == "exact"
    goes_on = first.run(STEPS)
    assert_same(goes_on.end(), true)
    shutil.rmtree(tmp_path / "run")
    first = Training().save_to(url).run(stop)
    first.checkpointer.save(stop, wait=True)
    first.end()
    again = Training().save_to(url)
    assert again.reached == stop
    assert again.digest == true[stop][1]
    assert_same(again.run(STEPS).end(), true)


def test_continued_from_before_the_first_planned_save(tmp_path, undisturbed):
    """How far the weights have moved since training began is known to the undisturbed run's first save."""
    true, _ = undisturbed
    first = Training().save_to(tmp_path / "run").run(2)
    first.checkpointer.save(2, wait=True)
    first.end()
    again = Training().save_to(tmp_path / "run")
    assert again.reached == 2
    assert again.digest == true[2][1]
    assert_same(again.run(STEPS).end(), true)


def test_continued_from_behind_a_planned_save_that_failed(tmp_path, monkeypatch, undisturbed):
    true, _ = undisturbed
    url, calls, commit = tmp_path / "run", [], RunWriter.commit

    def failing_commit(self, *args, **kwargs):
        calls.append(1)
        if len(calls) in (2, 3):
            raise StoreError("the store is away")
        return commit(self, *args, **kwargs)

    monkeypatch.setattr(RunWriter, "commit", failing_commit)
    first = Training().save_to(url).run(3 * EVERY + 2)
    first.checkpointer.save(first.reached, wait=True)
    first.end()
    assert [m.step for m in shrinkpoint.Saver(url).store.manifests()] == [3 * EVERY + 2, EVERY]
    again = Training().save_to(url)
    assert again.reached == 3 * EVERY + 2
    assert_same(again.run(4 * EVERY + 1).end(), true)
    last = Training().save_to(url)  # from a planned save that was quantized after one that is not stored
    assert last.reached == 4 * EVERY
    assert_same(last.run(STEPS).end(), true)


def test_an_exact_save_without_its_predecessor_restores_what_was_given(tmp_path):
    """What it carries for the next save is no part of the state that a reader gets."""
    first = Training().save_to(tmp_path / "run").run(2)
    first.checkpointer.save(2, wait=True)
    first.end()
    state = shrinkpoint.Saver(tmp_path / "run").restore().state
    assert any(name.startswith("adopted before/") for name in state.tensors)
    assert set(state.to_object()) == {
        "format",
        "step",
        "model",
        "optimizers",
        "identities",
        "trained",
        "schedulers",
        "data",
        "stateful",
        "rng",
    }


@pytest.mark.parametrize("failing", some_fast([{1}, {2, 3}, {4, 5}], [{2, 3}], [{1}]))
def test_failed_saves_change_nothing(tmp_path, monkeypatch, undisturbed, failing):
    true, _ = undisturbed
    url, calls, commit = tmp_path / "run", [], RunWriter.commit

    def failing_commit(self, *args, **kwargs):
        calls.append(1)
        if len(calls) in failing:
            raise StoreError("the store is away")
        return commit(self, *args, **kwargs)

    monkeypatch.setattr(RunWriter, "commit", failing_commit)
    with pytest.warns(ShrinkpointWarning, match="the store is away"):
        assert_same(Training().save_to(url).run(STEPS - 1).end(), true)
    kinds = {m.step: m.kind for m in shrinkpoint.Saver(url).store.manifests()}
    assert set(kinds) == {EVERY * save for save in range(1, STEPS // EVERY) if save not in failing}
    assert kinds[EVERY * (max(failing) + 1)] == "base"  # its predecessor is not stored
    for manifest in shrinkpoint.Saver(url).store.manifests():
        again = Training().save_to(url, every=EVERY)
        assert again.checkpointer.resume(manifest.step) == manifest.step
        assert again.digest == true[manifest.step][1]
        again.reached = manifest.step
        assert_same(again.run(STEPS).end(), true)


def test_changed_settings_are_said(tmp_path):
    url = tmp_path / "run"
    Training().save_to(url).run(2 * EVERY).end()
    torch.set_num_threads(torch.get_num_threads() + 1)
    try:
        with pytest.warns(ShrinkpointWarning, match="From step 12 on, its bits differ") as said:
            Training().save_to(url, max_degradation=0.1, clip_grad_norm=0.5).run(3 * EVERY).end()
    finally:
        torch.set_num_threads(torch.get_num_threads() - 1)
    [text] = [str(one.message) for one in said if "settings have changed" in str(one.message)]
    assert "clip_grad_norm=0.5 instead of None; max_degradation=0.1 instead of 0.2; torch_threads=" in text


def test_run_is_not_switched_without_a_word(tmp_path):
    Training().save_to(tmp_path / "one").run(EVERY).end()
    with pytest.warns(ShrinkpointWarning, match="adopted its checkpoints .* goes on without that"):
        Training().save_to(tmp_path / "one", adopt=False).end()
    Training().save_to(tmp_path / "other", adopt=False, busy="wait").run(EVERY).end()
    with pytest.warns(ShrinkpointWarning, match="adopts its checkpoints from now on"):
        Training().save_to(tmp_path / "other").run(2 * EVERY).end()


def test_adopted_tensors_keep_their_memory(tmp_path):
    training = Training().save_to(tmp_path / "run")
    places = {name: p.data_ptr() for name, p in training.model.named_parameters()}
    view, table = training.model.table.weight.view(-1), training.model.table.weight
    training.run(EVERY)
    assert {name: p.data_ptr() for name, p in training.model.named_parameters()} == places
    assert training.model.head.weight is table
    assert torch.equal(view, table.detach().view(-1))
    assert table.is_leaf
    assert table.grad_fn is None
    training.end()


def test_nan_is_not_adopted(tmp_path):
    training = Training(average=False).save_to(tmp_path / "run").run(EVERY)
    weight = training.model.body.weight
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with pytest.warns(ShrinkpointWarning, match="diverged"):
        training.run(2 * EVERY).end()
    newest = shrinkpoint.Saver(tmp_path / "run").store.manifests()[0]
    assert newest.meta["save"]["measured"] == "exact"
    assert newest.meta["save"]["not_finite"]
    again = Training(average=False).save_to(tmp_path / "run")
    assert again.digest == training.digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "excp"}, "only 'auto' is quantized such that a replay gets the same values"),
        ({"scheme": "inshrinkerator"}, "search by time"),
        ({"scheme": "lossless"}, "exact already"),
        ({"keep_optimizer": 0}, "keep_optimizer=0"),
        ({"every": None}, "needs every="),
        ({"adopt": True}, "give their number, as in adopt=200"),
        ({"adopt": 0.5}, "adopt must be True, False, or the number"),
        ({"adopt": "yes"}, "adopt must be True, False, or the number"),
        ({"step_log": "exact"}, "exclude each other"),
    ],
)
def test_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        Training().save_to(tmp_path / "run", **options)


def test_unsuitable_tensors():
    storage = torch.zeros(8)
    with torch.inference_mode():
        inference = torch.zeros(3)
    state = {
        "fine": torch.zeros(4),
        "expanded": torch.zeros(1).expand(5),
        "one": storage[:6],
        "other": storage[4:],
        "apart": torch.zeros(9)[5:],
        "inference": inference,
        "count": torch.zeros(1, dtype=torch.int64).expand(5),
    }
    captured = TrainingState.capture(state, plain)
    found = unsuitable(
        captured, TrainingState.capture({**state, "apart": state["apart"].clone()}, plain).tensors
    )
    assert set(found) == {"expanded", "one", "other", "apart", "inference"}
    assert "copy" in found["apart"]
    assert "expanded" in found["expanded"]
    assert "shares memory" in found["one"]


def test_saves_too_close_together_are_said():
    under_way = SaveUnderWay()
    under_way.waited(0.0, 5.0)  # the first compiles
    with pytest.warns(ShrinkpointWarning, match=r"waits for 75% of its time: 3 s at this save, of 4 s"):
        under_way.waited(6.0, 9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        under_way.waited(9.5, 13.0)


class _Copied:
    """An object that returns copies of its tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self):
        return {name: value.clone() for name, value in self.values.items()}

    def load_state_dict(self, state):
        self.values = {name: value.clone() for name, value in state.items()}


def test_copies_are_stored_exactly_with_the_reason(tmp_path):
    training = Training(average=False)
    copied = _Copied(training.model)
    training.save_to(tmp_path / "run", shadow=copied)
    for step in range(2 * EVERY):
        with torch.no_grad():
            for name, value in copied.values.items():
                value.lerp_(dict(training.model.named_parameters())[name], 0.1)
        training.run(step + 1)
    before = {name: value.clone() for name, value in copied.values.items()}
    training.end()
    kept = shrinkpoint.Saver(tmp_path / "run").store.manifests()[0].meta["save"]["kept_exactly"]
    assert any("returns a copy" in why for name, why in kept.items() if "shadow" in name)
    reader = Training(average=False)
    shadow = _Copied(reader.model)
    reader.save_to(tmp_path / "run", shadow=shadow)
    assert all(torch.equal(shadow.values[name], value) for name, value in before.items())


def test_an_outage_does_not_end_training(tmp_path, monkeypatch, undisturbed):
    """Five saves fail, and two would do; what is stored afterwards, and before, is the undisturbed run's."""
    true, _ = undisturbed
    training = Training().save_to(tmp_path / "run").run(EVERY)
    training.checkpointer.flush()
    assert [m.step for m in shrinkpoint.Saver(tmp_path / "run").store.manifests()] == [EVERY]
    monkeypatch.setattr(RunWriter, "commit", away_program.away)
    with pytest.warns(
        ShrinkpointWarning, match=r"failed \(5 in a row\).*Nothing has been stored for .* minutes"
    ):
        training.run(STEPS - EVERY - 1).checkpointer.flush()
    monkeypatch.undo()
    assert_same(training.run(STEPS).end(), true)
    assert [m.step for m in shrinkpoint.Saver(tmp_path / "run").store.manifests()] == [
        STEPS,
        STEPS - EVERY,
        EVERY,
    ]


def test_a_store_that_is_gone_ends_training_after_hours(tmp_path, monkeypatch):
    hours = iter(range(100))
    monkeypatch.setattr("shrinkpoint.engine.under_way.monotonic", lambda: 3600.0 * next(hours))
    training = Training(average=False).save_to(tmp_path / "run")
    monkeypatch.setattr(RunWriter, "commit", away_program.away)
    with pytest.raises(
        SaveFailedError, match=r"3rd failure in a row, and the store has been away for 3\.0 hours"
    ):
        training.run(STEPS)
    assert 4 * EVERY <= training.reached <= 5 * EVERY
    training.checkpointer.saver.close()


@pytest.mark.slow
@pytest.mark.long
def test_a_store_that_stays_away_takes_no_memory(tmp_path):
    """Resident memory of a process: the median after the first six saves, and after the last six of thirty."""
    program = Path(away_program.__file__)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(program.parents[1]),
        "MALLOC_MMAP_THRESHOLD_": str(
            2**20
        ),  # what is freed is given back at once, else it differs by 100 MB from save to save
    }
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    resident = json.loads(done.stdout)
    assert len(resident) == away_program.SAVES
    weights = 4 * 1024 * 1025
    # a copy of the weights for each save would be 24 of them
    assert median(resident[-6:]) - median(resident[:6]) < 2 * weights


class _Tables(torch.nn.Module):
    """Weights in memory that cannot be given values, or where one value is several elements."""

    def __init__(self, folder):
        super().__init__()
        np.save(folder / "table.npy", np.linspace(-1, 1, 600, dtype=np.float32).reshape(30, 20))
        mapped = np.load(folder / "table.npy", mmap_mode="c")  # copied on write: the file stays
        self.mapped = torch.nn.Parameter(torch.from_numpy(mapped))
        self.body = torch.nn.Linear(20, 20)
        self.register_buffer("wide", torch.linspace(0, 1, 20).expand(30, 20), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("noise", torch.linspace(1, 2, 400).reshape(20, 20))


class _Wide:
    """An object whose state is an expanded tensor, which torch's own load_state_dict refuses to fill."""

    def __init__(self, net):
        self.net = net

    def state_dict(self):
        return {"wide": self.net.wide}

    def load_state_dict(self, state):
        assert torch.equal(self.net.wide, state["wide"])


def _tables(folder, url):
    torch.manual_seed(0)
    net = _Tables(folder)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    checkpointer = shrinkpoint.Checkpointer(
        url,
        net,
        optimizer,
        every=EVERY,
        adopt=4,
        evaluate=lambda: [float((net.mapped @ net.noise).square().mean()) + 1 for _ in range(2)],
        max_degradation=0.5,
        wide=_Wide(net),
    )
    digests = {}
    for step in range(checkpointer.resume(), 3 * EVERY):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        x = torch.randn(30, 20, generator=generator)
        (net.body(x + net.mapped + net.wide) @ net.noise).square().mean().backward()
        optimizer.step()
        net.count += 1
        checkpointer.step(step + 1)
        digests[step + 1] = [value.clone() for value in net.state_dict().values()]
    checkpointer.close()
    return net, digests


def test_mapped_expanded_and_other_tensors_that_stay(tmp_path):
    """A weight in a mapped file is adopted and its file untouched; buffers, expanded or not, are not changed by adoption."""
    url, before = tmp_path / "run", np.linspace(-1, 1, 600, dtype=np.float32).reshape(30, 20)
    net, true = _tables(tmp_path, url)
    assert np.array_equal(np.load(tmp_path / "table.npy"), before)
    assert torch.equal(net.noise, torch.linspace(1, 2, 400).reshape(20, 20))
    assert torch.equal(net.wide, torch.linspace(0, 1, 20).expand(30, 20))
    assert int(net.count) == 3 * EVERY
    manifests = shrinkpoint.Saver(url).store.manifests()
    assert all(m.meta["save"]["measured"] == "measured" for m in manifests)
    newest = max((url / "commits").iterdir())
    newest.unlink()  # as if training had been killed before its last commit
    _, rest = _tables(tmp_path, url)
    assert min(rest) == 2 * EVERY + 1
    assert all(torch.equal(a, b) for step in rest for a, b in zip(rest[step], true[step], strict=True))
