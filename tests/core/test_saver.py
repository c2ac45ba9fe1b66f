import math
import threading
from contextlib import closing, nullcontext

import numpy as np
import pytest
import torch
from support.containers import identical
from support.fake_objects import FakeObjects, InjectedError
from support.losses import nearly_flat
from support.training import OPTIMIZERS, TinyMLP, train

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.errors import (
    ChainError,
    ConfigError,
    FencedError,
    NoCheckpointError,
    SaveFailedError,
    ShrinkpointWarning,
)
from shrinkpoint.saver import Saver, SaverConfig
from shrinkpoint.state.dtypes import DTYPES
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import LayerType, Role, Tag, TrainingState
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter

pytestmark = pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")


@pytest.fixture
def objects(monkeypatch):
    """What every URL leads to."""
    fake = FakeObjects()
    monkeypatch.setattr("shrinkpoint.store.run.open_objects", lambda url, options, **several: fake)
    return fake


class Loop:
    """A model in training and everything that `Saver.save` takes."""

    def __init__(self, **config):
        torch.manual_seed(0)
        self.model = TinyMLP()
        self.optimizer = OPTIMIZERS["AdamW"](self.model)
        self.saver = Saver("fake://run", SaverConfig(**{"scheme": "lossless", **config}))
        self.steps = 0
        self.threads = set()

    def train(self, steps=1):
        train(self.model, self.optimizer, range(self.steps, self.steps + steps))
        self.steps += steps

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizers": [self.optimizer.state_dict()],
            "list": [1, "a"],
        }

    def copy(self):
        live = TrainingState.capture(self.state())
        return TrainingState(
            live.tree, {n: t.clone() for n, t in live.tensors.items()}, live.specs
        ).to_object()

    def save(self, **options):
        describe = describe_training(
            self.model, [self.optimizer], model_path=("model",), optimizers_path=("optimizers",)
        )
        return self.saver.save(self.state(), **{"step": self.steps, "describe": describe, **options})

    def evaluate(self, weights):
        self.threads.add(threading.get_ident())
        return nearly_flat(weights)


@pytest.fixture
def loop(objects):
    loop = Loop()
    yield loop
    loop.saver.close()


def restored(which=None):
    return Saver("fake://run").restore(which)


class Gate:
    """Holds the background at a store operation until it is let through."""

    def __init__(self, objects):
        self.objects, self.reached, self.open = objects, threading.Event(), threading.Event()
        objects.before = self._before

    def _before(self, operation, key):
        if operation == "put" and key.startswith("data/"):
            self.reached.set()
            assert self.open.wait(60)

    def release(self):
        self.objects.heal()
        self.open.set()


# ---- round trips


def test_a_chain_of_saves_and_every_step_restored(loop):
    states = {}
    for _ in range(4):
        loop.train()
        states[loop.steps] = loop.copy()
        accepted = loop.save(wait=True, metrics={"loss": 0.5})
        assert accepted.step == loop.steps
        assert accepted.blocked_s > 0
    reports = loop.saver.reports()
    assert [(r.step, r.kind, r.seq) for r in reports] == [
        (1, "base", 0), (2, "delta", 1), (3, "delta", 2), (4, "delta", 3)
    ]  # fmt: skip
    for step, state in states.items():
        back = restored(step)
        assert back.manifest.step == step
        assert back.manifest.meta["save"]["metrics"] == {"loss": 0.5}
        assert identical(back.state.to_object(), state)
    assert restored().manifest.step == 4


def test_an_empty_run(objects):
    saver = Saver("fake://run")
    assert saver.newest() is None
    assert saver.restore() is None
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 5"):
        saver.restore(5)


def test_the_next_save_continues_a_restored_chain(loop):
    loop.train()
    loop.save(wait=True)
    again = Loop()
    assert again.saver.restore().manifest.step == 1
    again.train(2)
    again.save(wait=True)
    (report,) = again.saver.reports()
    assert report.kind == "delta"
    assert identical(restored().state.to_object(), again.copy())


def test_the_newest_checkpoint_is_one_that_was_saved_after_it_was_asked_for(loop):
    loop.train()
    loop.save(wait=True)
    assert loop.saver.newest().step == 1
    loop.train()
    loop.save(wait=True)
    assert loop.saver.restore().manifest.step == 2


def test_what_was_restored_is_the_callers(loop):
    """Training goes on in the very tensors that were restored, and the next delta must not notice."""
    loop.train()
    loop.save(wait=True)
    again = Loop()
    state = again.saver.restore().state
    for tensor in state.tensors.values():
        tensor.view(-1).view(torch.uint8).zero_()
    again.train(2)
    again.save(wait=True)
    assert identical(restored().state.to_object(), again.copy())


def test_a_snapshot_does_not_see_what_training_does_next(loop, objects):
    gate = Gate(objects)
    loop.train()
    expected = loop.copy()
    numbers = np.arange(3)
    loop.save()
    for tensor in loop.model.state_dict().values():
        tensor.zero_()
    loop.train(3)
    numbers += 1
    gate.release()
    loop.saver.flush()
    assert identical(restored().state.to_object(), expected)


# ---- never blocks


def test_a_save_that_is_due_while_one_is_written_is_skipped(loop, objects):
    gate = Gate(objects)
    loop.train()
    assert loop.save() is not None
    assert gate.reached.wait(60)
    assert loop.saver.busy
    with pytest.warns(ShrinkpointWarning, match="a save is skipped, since that of step 1 .* under way"):
        assert loop.save(step=2) is None
    assert loop.saver.skipped == 1
    assert not loop.saver.flush(timeout_s=0.01)
    gate.release()
    assert loop.saver.flush()
    assert loop.save(step=3) is not None
    loop.saver.flush()
    assert [r.step for r in loop.saver.reports()] == [1, 3]


def test_a_save_may_wait_for_the_one_before(objects):
    loop = Loop(busy="wait")
    for _ in range(4):
        loop.train()
        assert loop.save() is not None
    loop.saver.flush()
    assert [r.step for r in loop.saver.reports()] == [1, 2, 3, 4]
    assert loop.saver.skipped == 0


def test_host_memory_is_one_snapshot_and_one_of_what_the_reader_holds(loop, monkeypatch):
    """References are given up tensor by tensor as the next checkpoint is coded."""
    peaks = []

    def watched(state, scheme, *, reference, release, **options):
        def given_up(name):
            release(name)
            peaks.append(len(reference))

        return encode_state(
            state, scheme, reference=reference, release=given_up if release else None, **options
        )

    monkeypatch.setattr("shrinkpoint.engine.background.encode_state", watched)
    buffers = set()
    for _ in range(3):
        loop.train()
        loop.save(wait=True)
        buffers.add(frozenset(t.data_ptr() for t in loop.saver._placement.snapshotter._buffers.values()))
    count = len(loop.saver._placement.snapshotter._buffers)
    assert peaks == [*range(count)][::-1] * 2
    assert len(buffers) == 1
    reference = loop.saver._background.link.reference
    nbytes = sum(plane.nbytes for one in reference.values() for plane in one.planes.values())
    assert nbytes == sum(t.nbytes for t in loop.saver._placement.snapshotter._buffers.values())


def test_blocked_time_is_told(loop):
    loop.train()
    accepted = loop.save(wait=True)
    (report,) = loop.saver.reports()
    assert 0 < report.blocked_s == accepted.blocked_s == loop.saver.blocked_s
    assert report.encode_s > 0
    assert report.write_s > 0
    assert report.raw_bytes > report.bytes * 0.5
    assert report.ratio == report.raw_bytes / report.bytes


# ---- evaluations


def test_evaluations_are_made_on_the_training_thread_only(objects):
    loop = Loop(scheme="inshrinkerator", guards=False, busy="wait")
    for _ in range(3):
        loop.train()
        loop.save(evaluate=loop.evaluate)
        while loop.saver.busy:
            loop.saver.poll()
            loop.train()
    assert loop.threads == {threading.get_ident()}
    reports = loop.saver.reports()
    assert all(r.scheme == "inshrinkerator" and r.evaluations >= 1 for r in reports)
    assert all(0 <= r.degradation <= 0.01 for r in reports)
    assert loop.saver.search_s > 0
    assert loop.saver.poll() == 0.0


def test_what_exceeds_the_bound_is_stored_bit_for_bit(objects):
    loop = Loop(scheme="inshrinkerator", guards=False)

    def evaluate(weights):  # exact weights are fine, anything else is not
        live = dict(loop.model.named_parameters())
        return 1.0 if all(torch.equal(live[name], value) for name, value in weights.items()) else 1.5

    loop.train()
    loop.save(evaluate=evaluate, wait=True)
    (report,) = loop.saver.reports()
    assert report.scheme == "lossless"
    assert report.degradation == 0.0
    assert "stored exactly" in report.reason
    assert identical(restored().state.to_object(), loop.copy())


def test_what_is_restored_is_what_was_evaluated(objects):
    loop = Loop(scheme="inshrinkerator", guards=False)
    seen = []

    def evaluate(weights):
        seen.append({name: value.clone() for name, value in weights.items()})
        return nearly_flat(weights)

    loop.train(3)
    loop.save(evaluate=evaluate, wait=True)
    back = restored().state.to_object()["model"]
    stored = {name: back[name] for name in seen[0]}
    assert any(identical(stored, {name: weights[name] for name in stored}) for weights in seen)
    assert identical(seen[0], {name: loop.copy()["model"][name] for name in seen[0]})


@pytest.mark.parametrize("loss", [math.nan, math.inf, "raise"])
def test_an_evaluation_that_fails_or_diverges_costs_the_size_alone(objects, loss):
    loop = Loop(scheme="inshrinkerator", guards=False)

    def evaluate(weights):
        if loss == "raise":
            raise ZeroDivisionError("no batches")
        return loss

    loop.train()
    with nullcontext() if loss == "raise" else pytest.warns(ShrinkpointWarning, match="held-out loss is"):
        loop.save(evaluate=evaluate, wait=True, metrics={"val_loss": math.nan})
    loop.train()
    loop.save(evaluate=evaluate, wait=True, metrics={"val_loss": math.nan})
    reports = loop.saver.reports()
    assert [r.scheme for r in reports] == ["lossless"] * 2
    assert ("no batches" if loss == "raise" else "not finite") in reports[0].reason
    with nullcontext() if loss == "raise" else pytest.warns(ShrinkpointWarning, match="step 2 .*not finite"):
        back = restored()
    assert back.manifest.meta["save"]["metrics"] == {"val_loss": None}
    assert back.manifest.meta["save"]["baseline"] is None
    assert identical(back.state.to_object(), loop.copy())


def test_one_save_can_be_asked_to_be_exact(objects):
    loop = Loop(scheme="inshrinkerator", guards=False)
    loop.train()
    loop.save(evaluate=loop.evaluate, exact=True, wait=True)
    assert identical(restored().state.to_object(), loop.copy())
    assert not loop.threads


def test_closing_while_an_evaluation_is_waited_for_stores_exactly(objects):
    loop = Loop(scheme="inshrinkerator", guards=False)
    loop.train()
    loop.save(evaluate=loop.evaluate)
    loop.saver._desk.wait_for_request(60)
    assert loop.saver.close()
    assert not loop.threads
    (report,) = loop.saver.reports()
    assert "training has ended" in report.reason
    assert identical(restored().state.to_object(), loop.copy())


def test_a_closed_saver_can_be_used_again(objects):
    loop = Loop(scheme="inshrinkerator", guards=False)
    for _ in range(2):
        loop.train()
        loop.save(evaluate=loop.evaluate, wait=True)
        assert loop.saver.close()
        assert loop.saver.close()
    assert [r.scheme for r in loop.saver.reports()] == ["inshrinkerator"] * 2
    assert restored().manifest.epoch == 2


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_a_close_that_is_refused_changes_nothing(objects, timeout_s):
    """One that a signal's handler calls within a save, say: later saves are measured as before."""
    loop, said = Loop(scheme="auto"), []
    real = describe_training(
        loop.model, [loop.optimizer], model_path=("model",), optimizers_path=("optimizers",)
    )

    def describe(*arguments):
        if not said:
            with pytest.raises(ConfigError, match="close was called within save") as error:
                loop.saver.close(timeout_s)
            said.append(error)
        return real(*arguments)

    for _ in range(2):
        loop.train()
        loop.save(evaluate=loop.evaluate, describe=describe, wait=True)
    loop.saver.close()
    assert said
    assert [report.measured for report in loop.saver.reports()] == ["measured", "measured"]


def test_close_with_a_time_limit(loop, objects):
    gate = Gate(objects)
    loop.train()
    loop.save()
    assert gate.reached.wait(60)
    assert not loop.saver.close(timeout_s=0.01)
    gate.release()
    assert loop.saver.close()
    assert len(loop.saver.reports()) == 1


def test_a_restore_while_a_save_is_under_way_is_what_the_next_save_continues(objects):
    loop = Loop(scheme="auto", busy="wait")
    loop.train()
    loop.save(evaluate=loop.evaluate, wait=True)
    loop.train()
    loop.save(evaluate=loop.evaluate)
    assert loop.saver.busy  # nobody has evaluated yet
    back = loop.saver.restore(1)
    loop.train()
    loop.save(evaluate=loop.evaluate, wait=True)
    newest = loop.saver.store.manifests()[0]
    assert newest.parent_digest == back.manifest.digest
    assert newest.meta["search"]["restores"]["restores"] == 1
    loop.saver.close()


def test_any_dtype_is_saved_and_restored_where_torch_is_deterministic(tmp_path):
    bits = {
        name: torch.randint(0, 2, (2, 8 * dtype.itemsize), dtype=torch.uint8)
        for name, dtype in DTYPES.items()
    }
    state = {name: bits[name].view(dtype) for name, dtype in DTYPES.items()}
    state |= {f"none of {name}": tensor[:0] for name, tensor in state.items()}
    torch.use_deterministic_algorithms(True)
    try:
        with closing(Saver(str(tmp_path / "run"), SaverConfig(scheme="lossless"))) as saver:
            saver.check()
            saver.save(state, step=1, wait=True)
            restored = saver.restore().state.to_object()
    finally:
        torch.use_deterministic_algorithms(False)
    assert identical(restored, state)


@pytest.mark.parametrize("which", [None, 2])
def test_a_save_that_is_under_way_can_be_restored(objects, which):
    loop = Loop(scheme="auto", busy="wait")
    for _ in range(2):
        loop.train()
        loop.save(evaluate=loop.evaluate)
    assert loop.saver.busy  # nobody has evaluated yet
    assert loop.saver.restore(which).manifest.step == 2
    assert loop.saver.newest().step == 2
    loop.saver.close()


def test_a_search_state_that_cannot_be_read_is_left_with_a_warning(objects):
    loop = Loop(scheme="inshrinkerator", guards=False)
    loop.train()
    loop.saver._background.planner.state_dict = lambda: {"restores": {"spent": "much"}}
    loop.save(evaluate=loop.evaluate, wait=True)
    with pytest.warns(ShrinkpointWarning, match="search starts over"):
        assert restored().manifest.step == 1


# ---- failures


def test_a_failed_save_warns_and_the_next_one_is_a_base(loop, objects):
    loop.train()
    loop.save(wait=True)
    objects.fail_at(0)
    loop.train()
    with pytest.warns(
        ShrinkpointWarning, match=r"step 2 to fake://run failed \(1 in a row\).*next save tries again"
    ):
        assert loop.save(wait=True) is None  # nothing is acknowledged
    assert loop.saver.failed
    objects.heal()
    assert restored().manifest.step == 1
    loop.train()
    loop.save(wait=True)
    assert not loop.saver.failed
    assert [(r.step, r.kind) for r in loop.saver.reports()] == [(1, "base"), (3, "base")]
    assert identical(restored().state.to_object(), loop.copy())


@pytest.mark.parametrize("where", ["save", "flush"])
def test_failures_in_a_row_end_training(objects, where):
    loop = Loop()
    loop.saver.check()
    objects.fail_at(0)
    loop.train()
    for _ in range(2):
        with pytest.warns(ShrinkpointWarning, match="failed"):
            loop.save(wait=True)
    loop.save()
    loop.saver._worker.join()
    with pytest.raises(
        SaveFailedError, match=r"3 in a row.*the 3rd failure in a row: training ends"
    ) as caught:
        loop.saver.flush() if where == "flush" else loop.save()
    assert "injected" in str(caught.value.__cause__)
    objects.heal()
    loop.save(wait=True)
    assert restored().manifest.step == 1


def test_a_success_in_between_starts_the_count_anew(objects):
    loop = Loop()
    for _ in range(3):
        objects.fail_at(0)
        loop.train()
        for count in (1, 2):
            with pytest.warns(ShrinkpointWarning, match=f"{count} in a row"):
                loop.save(wait=True)
        objects.heal()
        loop.save(wait=True)


def test_a_saver_that_forgets_what_it_read_makes_a_base(loop, warned_in_background):
    loop.train()
    loop.save(wait=True)
    again = Loop()
    assert again.saver.newest() is not None
    again.saver.forget()
    assert again.saver.restore().manifest.step == 1
    again.saver.forget()
    again.train(2)
    again.save(wait=True)
    assert again.saver.reports()[-1].kind == "base"
    (told,) = warned_in_background
    assert "that this training does not continue" in str(told)
    warned_in_background.clear()


def test_forgetting_while_a_save_is_under_way_makes_a_base_of_the_next_one(objects, warned_in_background):
    loop = Loop(scheme="auto", busy="wait")
    for _ in range(3):
        loop.train()
        loop.save(evaluate=loop.evaluate)
        assert loop.saver.busy  # nobody has evaluated yet
        if loop.steps == 2:
            loop.saver.forget()
    loop.saver.flush()
    assert [report.kind for report in loop.saver.reports()] == ["base", "delta", "base"]
    loop.saver.close()
    (told,) = warned_in_background
    assert "that this training does not continue" in str(told)
    warned_in_background.clear()


def test_an_overtaken_writer_is_told_and_harms_nothing(loop, warned_in_background):
    loop.train()
    loop.save(wait=True)
    other = Loop()
    other.train(2)
    other.save(wait=True)
    for _ in range(2):
        with pytest.raises(FencedError, match="another writer"):
            loop.save(wait=True)
    assert restored().manifest.step == 2
    (told,) = warned_in_background
    assert "that this training does not continue" in str(told)
    warned_in_background.clear()


@pytest.mark.parametrize("wrong", ["digest", "step"])
def test_a_container_that_is_not_its_manifests_is_noticed(loop, objects, monkeypatch, wrong):
    commit = RunWriter.commit

    def lying(self, container, **facts):
        facts["state_digest" if wrong == "digest" else "step"] = "0" * 32 if wrong == "digest" else 77
        return commit(self, container, **facts)

    monkeypatch.setattr(RunWriter, "commit", lying)
    loop.train()
    loop.save(wait=True)
    with pytest.warns(ShrinkpointWarning, match="another state than its manifest"), pytest.raises(ChainError):
        restored()


# ---- retention


def test_old_checkpoints_are_removed_but_not_what_a_kept_delta_needs(objects):
    loop = Loop(key_every=3, keep_last=2, grace_s=0)
    for _ in range(5):
        objects.now += 10
        loop.train()
        loop.save(wait=True)
    assert [m.step for m in loop.saver.store.manifests()] == [5, 4]
    assert [len(m.chain) for m in loop.saver.store.manifests()] == [3, 2]
    assert len([key for key in objects.blobs if key.startswith("data/")]) == 3  # 1, 4 and 5
    assert identical(restored().state.to_object(), loop.copy())
    assert restored(4).manifest.step == 4


def test_a_store_that_forbids_deleting_does_not_fail_saves(objects):
    loop = Loop(keep_last=1, grace_s=0)
    loop.train()
    loop.save(wait=True)

    def no_delete(operation, key):
        if operation == "delete":
            raise InjectedError("AccessDenied")

    objects.before = no_delete
    for _ in range(2):
        loop.train()
        with pytest.warns(ShrinkpointWarning, match=r"checkpoint is stored, but .*AccessDenied"):
            loop.save(wait=True)
    assert [(r.step, r.kind) for r in loop.saver.reports()] == [(1, "base"), (2, "delta"), (3, "delta")]


def test_thousands_of_tensors_kept_exactly_still_fit_a_manifest(objects):
    loop = Loop(scheme="inshrinkerator", guards=False)
    names = {f"layer.{i}.{'x' * 200}": torch.full((50, 40), math.nan) for i in range(3000)}
    names["sound"] = TinyMLP().inner.weight

    def describe(path, tensor):
        return Tag(role=Role.WEIGHT, layer_type=LayerType.LINEAR, parameter=path[0])

    with pytest.warns(ShrinkpointWarning, match="NaN or infinity"):
        loop.saver.save(names, step=1, describe=describe, evaluate=loop.evaluate, wait=True)
    (report,) = loop.saver.reports()
    assert len(report.kept_exactly) == 3000
    with pytest.warns(ShrinkpointWarning, match="and 2997 more tensors.*holds no finite checkpoint"):
        stored = restored().manifest.meta["save"]["kept_exactly"]
    assert len(stored) == 101
    assert stored["..."] == "and 2900 more tensors"


def test_a_new_saver_of_an_old_store_does_no_input_or_output(objects):
    Saver("fake://run")
    assert objects.calls == []
    assert isinstance(Saver("fake://run").store, RunStore)
