"""How far weights have moved, against plain torch; what it is counted from."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fake_objects import FakeObjects
from support.training import OPTIMIZERS, TinyMLP, train

from shrinkpoint.engine.movement import MovementTracker, is_followed
from shrinkpoint.saver import Saver, SaverConfig
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import Role, Tag, TrainingState

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def state_of(*, role=Role.WEIGHT, **tensors):
    return TrainingState.capture(tensors, lambda path, tensor: Tag(role=role, parameter=path[0]))


def rows_by_torch(after, before):
    rows = after.shape[0] if after.dim() >= 2 else 1
    squares = (after.double() - before.double()).square().reshape(rows, -1)
    return squares.mean(dim=1).sqrt().numpy()


def moved(after, before, step=5, at=2):
    tracker = MovementTracker()
    tracker.note(state_of(w=before), at)
    return tracker.since(state_of(w=after), step)


shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), size=st.integers(-4, 3))
def test_rows_are_what_plain_torch_computes(shape, dtype, seed, size):
    generator = torch.Generator().manual_seed(seed)
    before, after = (
        (torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**size).to(dtype)
        for _ in range(2)
    )
    movement = moved(after, before)
    assert set(movement.rows) == {"w"}
    np.testing.assert_allclose(movement.rows["w"], rows_by_torch(after, before), rtol=1e-5)
    assert movement.rows["w"].dtype == np.float64
    assert movement.steps == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4, 5)])
def test_what_has_not_moved_has_moved_by_exactly_zero(shape, dtype):
    tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
    assert not moved(tensor.clone(), tensor).rows["w"].any()


def test_not_contiguous_tensors_are_compared_by_their_own_rows():
    before, after = torch.randn(6, 4).T, torch.randn(6, 4).T
    np.testing.assert_allclose(moved(after, before).rows["w"], rows_by_torch(after, before), rtol=1e-5)


def test_nan_is_no_movement_that_anything_could_be_smaller_than():
    after = torch.ones(2, 2)
    after[0, 0] = torch.nan
    rows = moved(after, torch.zeros(2, 2)).rows["w"]
    assert np.isnan(rows[0])
    assert rows[1] == 1


@pytest.mark.parametrize(("step", "steps"), [(7, 5), (2, 1), (0, 1)])
def test_there_is_one_step_at_least(step, steps):
    assert moved(torch.ones(2), torch.zeros(2), step=step).steps == steps


def test_only_weights_masters_and_averages_of_floating_point_are_followed():
    def describe(path, tensor):
        return Tag(role=Role(path[0].split("-")[0]), parameter="p")

    tensors = {role.value: torch.ones(3, 3) for role in Role}
    tensors["weight-int"] = torch.ones(3, 3, dtype=torch.int32)
    tensors["weight-empty"] = torch.ones(0, 3)
    state = TrainingState.capture(tensors, describe)
    assert {name for name, spec in state.specs.items() if is_followed(spec)} == {
        "weight",
        "master",
        "average",
    }
    tracker = MovementTracker()
    tracker.note(state, 0)
    assert set(tracker.since(state, 1).rows) == {"weight", "master", "average"}


def test_what_is_new_or_has_another_shape_or_dtype_is_missing():
    tracker = MovementTracker()
    tracker.note(
        state_of(same=torch.ones(2, 2), shape=torch.ones(2, 2), dtype=torch.ones(2), gone=torch.ones(2)), 0
    )
    now = state_of(
        same=torch.ones(2, 2), shape=torch.ones(4), dtype=torch.ones(2).double(), new=torch.ones(2)
    )
    assert set(tracker.since(now, 1).rows) == {"same"}
    tracker.note(now, 1)
    assert set(tracker.since(now, 2).rows) == {"same", "shape", "dtype", "new"}


def test_a_note_is_a_copy():
    tracker, live = MovementTracker(), torch.ones(3, 3)
    tracker.note(state_of(w=live), 0)
    live += 1
    assert tracker.since(state_of(w=live), 1).rows["w"].tolist() == [1.0, 1.0, 1.0]
    tracker.note(state_of(w=live), 1)
    assert not tracker.since(state_of(w=live), 2).rows["w"].any()
    tracker.note(state_of(w=torch.ones(5)), 2)
    assert tracker.noted["w"].shape == (5,)


# ---- what the saver counts from


class Loop:
    """A training whose saves tell what movement they were given."""

    def __init__(self, monkeypatch, objects, **config):
        monkeypatch.setattr("shrinkpoint.store.run.open_objects", lambda url, options, **several: objects)
        torch.manual_seed(0)
        self.model = TinyMLP()
        self.optimizer = OPTIMIZERS["AdamW"](self.model)
        self.saver = Saver("fake://run", SaverConfig(**{"scheme": "auto", "busy": "wait", **config}))
        self.steps = 0
        self.movements = []
        since = self.saver._background.movement.since

        def told(state, step):
            self.movements.append(since(state, step))
            return self.movements[-1]

        monkeypatch.setattr(self.saver._background.movement, "since", told)

    @property
    def describe(self):
        return describe_training(
            self.model, [self.optimizer], model_path=("model",), optimizers_path=("optimizers",)
        )

    def begin(self):
        self.saver.begin({"model": self.model.state_dict()}, step=self.steps, describe=self.describe)
        return self.weights()

    def train(self):
        train(self.model, self.optimizer, [self.steps])
        self.steps += 1

    def save(self):
        state = {"model": self.model.state_dict(), "optimizers": [self.optimizer.state_dict()]}
        self.saver.save(state, step=self.steps, describe=self.describe, wait=True)
        return self.weights()

    def weights(self):
        return {f"model/{name}": p.detach().clone() for name, p in self.model.named_parameters()}

    def check(self, now, before, steps):
        """The last save was told the movement between these weights."""
        movement = self.movements[-1]
        assert movement.steps == steps
        assert movement.rows.keys() == now.keys()
        for name, rows in movement.rows.items():
            np.testing.assert_allclose(rows, rows_by_torch(now[name], before[name]), rtol=1e-5)


@pytest.fixture
def objects():
    return FakeObjects()


def test_movement_is_counted_from_the_beginning_and_then_from_the_save_before(monkeypatch, objects):
    loop = Loop(monkeypatch, objects)
    start = loop.begin()
    loop.train()
    loop.train()
    first = loop.save()
    loop.check(first, start, 2)
    loop.train()
    loop.check(loop.save(), first, 1)


def test_without_a_beginning_nothing_is_known_until_the_second_save(monkeypatch, objects):
    loop = Loop(monkeypatch, objects)
    loop.train()
    first = loop.save()
    assert loop.movements == [None]
    loop.train()
    loop.check(loop.save(), first, 1)


def test_a_beginning_after_a_restore_changes_nothing(monkeypatch, objects):
    loop = Loop(monkeypatch, objects)
    loop.train()
    loop.save()
    again = Loop(monkeypatch, objects)
    restored = again.saver.restore().state.to_object()
    again.model.load_state_dict(restored["model"])
    again.optimizer.load_state_dict(restored["optimizers"][0])
    again.steps = 1
    before = again.weights()
    with torch.no_grad():  # as if somebody changed the weights before training begins
        again.model.inner.weight += 1
    again.begin()
    again.train()
    again.check(again.save(), before, 1)


def test_a_second_fit_in_one_process_goes_on_counting_from_the_last_save(monkeypatch, objects):
    loop = Loop(monkeypatch, objects)
    loop.begin()
    loop.train()
    first = loop.save()
    loop.train()
    loop.begin()
    loop.train()
    loop.check(loop.save(), first, 2)


def test_after_forgetting_it_is_counted_from_the_next_beginning(monkeypatch, objects):
    loop = Loop(monkeypatch, objects)
    loop.begin()
    loop.train()
    loop.save()
    loop.saver.forget()
    loop.train()
    begun = loop.begin()
    loop.train()
    loop.check(loop.save(), begun, 1)


def test_a_save_that_fails_leaves_the_movement_counted_from_the_last_one_that_was_stored(
    monkeypatch, objects
):
    loop = Loop(monkeypatch, objects)
    loop.begin()
    loop.train()
    first = loop.save()
    objects.fail_at(0)
    loop.train()
    with pytest.warns(match="failed"):
        loop.save()
    objects.heal()
    loop.train()
    loop.check(loop.save(), first, 2)


def test_a_beginning_while_the_first_save_is_written_changes_nothing(monkeypatch, objects):
    loop = Loop(monkeypatch, objects)
    opened = threading.Event()
    objects.before = lambda operation, key: operation != "put" or opened.wait(60)
    loop.train()
    first = loop.weights()
    loop.saver.save({"model": loop.model.state_dict()}, step=1, describe=loop.describe)
    loop.train()
    loop.begin()
    assert loop.saver.busy
    opened.set()
    loop.saver.flush()
    loop.train()
    loop.check(loop.save(), first, 2)


def test_a_lossless_run_counts_no_movement(monkeypatch, objects):
    loop = Loop(monkeypatch, objects, scheme="lossless")
    loop.begin()
    loop.train()
    loop.save()
    loop.train()
    loop.save()
    assert loop.movements == [None, None]
