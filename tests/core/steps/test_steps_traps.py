"""What a careless log misses: each of these must be found, or the digests would prove nothing."""

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from uuid import uuid4

import pytest
import torch
from support.stepped import Training
from torch import nn

from shrinkpoint.errors import ConfigError, ShrinkpointWarning
from shrinkpoint.steps import replay
from shrinkpoint.steps.record import Dense


@pytest.fixture
def crashed(places: tuple[str, str]) -> tuple[tuple[str, str], list[float], list[str]]:
    """A crash after 9 steps with a checkpoint of step 5; the undisturbed losses, and the digests after each step."""
    truth = Training()
    losses, digests = [], [truth.digest]
    for step in range(12):
        losses += truth.run(step, step + 1)
        digests.append(truth.digest)
    training = Training().log(*places, steps=1)
    training.checkpointer.resume()
    training.run(0, 9)
    training.crash()
    return places, losses, digests


def resumed(crashed, told: str) -> Training:
    """Resume, and check that what goes on is the undisturbed training all the same."""
    places, losses, digests = crashed
    again = Training().log(*places, steps=1)
    with pytest.warns(ShrinkpointWarning, match=told):
        begin = again.checkpointer.resume()
    assert again.digest == digests[begin]
    assert again.run(begin, 12) == losses[begin:]
    assert again.digest == digests[12]
    assert begin < 9
    again.checkpointer.close()
    return again


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable) -> None:
    """Have the log say something else than what was written, past all checksums."""
    honest = replay.decode_record

    def decode(*arguments):
        record = honest(*arguments)
        for event in [*record.events]:
            change(record, event)
        return record

    monkeypatch.setattr(replay, "decode_record", decode)


def test_a_replay_that_is_given_up_leaves_no_gradients(crashed, monkeypatch):
    """A loop that sets them to zero after its steps would add them to its next ones."""
    spoil(monkeypatch, another_learning_rate)
    again = Training().log(*crashed[0], steps=1)
    with pytest.warns(ShrinkpointWarning, match="give another state"):
        assert again.checkpointer.resume() == 5
    assert [parameter.grad for parameter in again.model.parameters()] == [None] * 9
    again.checkpointer.close()


def another_learning_rate(record, event):
    for group in event.groups:
        group.update(lr=0.01)


def another_implementation(record, event):
    for group in event.groups:
        group.update(fused=True, foreach=False)


def none_as_zeros(record, event):
    shapes = [p.shape for p in Training().model.parameters()]
    for index, gradient in enumerate(event.gradients):
        if gradient is None:
            event.gradients[index] = Dense(torch.zeros(shapes[index]))


def one_bit(record, event):
    if record.end == 8:
        event.gradients[0].values.view(torch.int32).view(-1)[7] ^= 1 << 12


def one_step_left_out(record, event):
    if record.end == 7:
        record.events.clear()


@pytest.mark.parametrize(
    "change", [another_learning_rate, another_implementation, none_as_zeros, one_bit, one_step_left_out]
)
def test_what_is_logged_otherwise_is_not_believed(crashed, monkeypatch, change):
    spoil(monkeypatch, change)
    again = resumed(crashed, "give another state")
    assert again.checkpointer.step_log.log.off is None


def test_without_what_stands_beside_the_weights_the_next_losses_differ(crashed, monkeypatch):
    places, losses, digests = crashed
    monkeypatch.setattr("shrinkpoint.steps.remainder.Remainder.load", lambda remainder, _remainder: None)
    again = Training().log(*places, steps=1)
    assert again.checkpointer.resume() == 9
    assert again.digest == digests[9]
    assert again.run(9, 12) != losses[9:]


def test_gradients_of_before_clipping(crashed, monkeypatch):
    """The log contains what a capture at the end of the backward pass would have seen, before `clip_grad_norm_`."""
    before: dict[int, list[torch.Tensor | None]] = {}
    training = Training()
    clip = nn.utils.clip_grad_norm_
    with monkeypatch.context() as patch:
        patch.setattr(
            "torch.nn.utils.clip_grad_norm_",
            lambda parameters, most: (
                before.update({len(before) + 1: [copied(p.grad) for p in training.model.parameters()]}),
                clip(training.model.parameters(), most),
            ),
        )
        training.run(0, 9)
    assert training.digest == crashed[2][9]
    spoil(
        monkeypatch,
        lambda record, event: event.gradients.__setitem__(
            slice(None), [None if g is None else Dense(g) for g in before[record.end]]
        ),
    )
    resumed(crashed, "give another state")


def copied(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def with_clipping_hook() -> Training:
    """Gradients are clipped in a hook before the step, which was registered before the log's own."""
    training = Training()
    training.optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(training.model.parameters(), 0.05) and None
    )
    return training


def test_clipping_that_is_repeated(places, monkeypatch):
    """Clipped again, gradients have other bits: so hooks before the step are off while it is replayed."""
    training = with_clipping_hook().log(*places)
    training.checkpointer.resume()
    losses = training.run(0, 9)
    digest = training.digest
    training.crash()
    assert losses != Training().run(0, 9)  # the hook clips
    monkeypatch.setattr(replay, "_without_pre_hooks", lambda optimizer: nullcontext())
    again = with_clipping_hook().log(*places)
    with pytest.warns(ShrinkpointWarning, match="give another state"):
        assert again.checkpointer.resume() == 5
    assert again.run(5, 9) == losses[5:]
    assert again.digest == digest


class Average(nn.Module):
    """Moving averages of a training's parameters, too large to be logged as other small objects are."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._live = list(training.model.parameters())
        self.values = nn.ParameterList([p.detach().clone() for _ in range(8) for p in self._live])

    @torch.no_grad()
    def update(self) -> None:
        for index, value in enumerate(self.values):
            value.lerp_(self._live[index % len(self._live)], 0.1)


def averaged(places: tuple[str, str], *, replays: bool = True) -> tuple[Training, Average]:
    training = Training()
    average = Average(training)
    training.after = average.update
    training.stateful = {"average": average}
    training.log(*places, after_step=average.update if replays else lambda: None)
    return training, average


@pytest.mark.parametrize("digest", ["of all", "of weights"])
@pytest.mark.parametrize("replays", [True, False])
def test_an_average_that_is_not_replayed(digest, replays, places, monkeypatch):
    """Without ``after_step=`` the average differs; the digest contains it, or nobody would notice."""
    if digest == "of weights":
        monkeypatch.setattr("shrinkpoint.steps.remainder.Remainder.made", lambda remainder: {})
    training, average = averaged(places)
    training.checkpointer.resume()
    training.run(0, 9)
    training.crash()
    again, of_replay = averaged(places, replays=replays)
    if replays or digest == "of weights":
        assert again.checkpointer.resume() == 9
        assert again.digest == training.digest
        assert all(map(torch.equal, average.values, of_replay.values)) is replays
        return
    with pytest.warns(ShrinkpointWarning, match="give another state"):
        assert again.checkpointer.resume() == 5
    again.run(5, 9)
    assert all(map(torch.equal, average.values, of_replay.values))


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_after_the_step_that_is_registered_late(before, places):
    """It may change the weights within the step: a replay runs it if it is there by then, or else the digest differs."""

    def register(training: Training) -> None:
        @torch.no_grad()
        def shrink(*_: object) -> None:
            for parameter in training.model.parameters():
                parameter.mul_(0.999)

        training.optimizer.register_step_post_hook(shrink)

    truth = Training()
    register(truth)
    losses, digests = [], [truth.digest]
    for step in range(12):
        losses += truth.run(step, step + 1)
        digests.append(truth.digest)
    training = Training().log(*places, steps=1)
    register(training)
    training.checkpointer.resume()
    training.run(0, 9)
    assert training.checkpointer.step_log.log.off is None
    training.crash()
    again = Training().log(*places, steps=1)
    if before:
        register(again)
        assert again.checkpointer.resume() == 9
        assert again.digest == digests[9]
    else:
        with pytest.warns(ShrinkpointWarning, match="give another state"):
            assert again.checkpointer.resume() == 5
        assert again.digest == digests[5]
        register(again)
    assert again.run(9 if before else 5, 12) == losses[9 if before else 5 :]
    again.checkpointer.close()


def log_of(training: Training, **options):
    name = uuid4().hex
    training.log(f"memory://{name}/run", f"memory://{name}/log", every=50, **options)
    training.checkpointer.resume()
    return training.checkpointer.step_log.log


def clamped() -> Training:
    training = Training()
    training.after = lambda: training.model.head.weight.data.clamp_(-0.05, 0.05)
    return training


def test_weights_that_are_changed_behind_the_step_are_found_out():
    training = clamped()
    log_of(training)
    training.run(0, 4)
    training.crash()
    assert resumes_at(Training(), training) == 0


def resumes_at(again: Training, training: Training) -> int:
    """Where a training continues from another one's log, of which it says that it does not lead to what it should."""
    url = training.checkpointer.saver.url
    again.log(url, url.replace("/run", "/log"), every=50)
    with pytest.warns(ShrinkpointWarning, match="could not be replayed|give another state"):
        return again.checkpointer.resume()


def test_changed_weights_are_replayed_with_after_step():
    training = clamped()
    log_of(training, after_step=training.after)
    training.run(0, 4)
    digest = training.digest
    training.crash()
    again, url = clamped(), training.checkpointer.saver.url
    again.log(url, url.replace("/run", "/log"), every=50, after_step=again.after)
    assert again.checkpointer.resume() == 4
    assert again.digest == digest


class Sam(torch.optim.SGD):
    """Sharpness-aware minimization as it is mostly written: the weights move, and back, within one step."""

    def step(self, closure=None):
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [0.01 * p.grad for p in parameters]
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p += move
        loss = closure()
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p -= move
        super().step()
        return loss


def with_closure(kind: type[torch.optim.SGD]) -> Training:
    training = Training()
    training.optimizer = kind(training.model.parameters(), lr=0.1)
    training.scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0)
    training.closure = True
    return training


def test_sam_is_found_out():
    training = with_closure(Sam)
    log_of(training)
    training.run(0, 4)
    training.crash()
    assert resumes_at(with_closure(Sam), training) == 0


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        closure()
        return super().step(closure)


def test_a_closure_that_is_called_twice_is_told_once():
    training = with_closure(Twice)
    log = log_of(training)
    with pytest.warns(ShrinkpointWarning, match="Twice evaluates its closure several times") as told:
        training.run(0, 3)
    assert len(told) == 1
    assert "several times" in log.off


def test_a_hook_that_is_registered_later_is_told():
    training = Training()
    log = log_of(training)
    training.optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(training.model.parameters(), 0.01) and None
    )
    with pytest.warns(ShrinkpointWarning, match="a hook was registered on AdamW after the log's own"):
        training.run(0, 3)
    assert log.off is not None


def test_weights_that_are_changed_once_end_the_replay_there(places):

    def make():
        training = Training()
        training.done = 0

        def after():
            training.done += 1
            if training.done == 7:
                training.model.head.weight.data.mul_(0.5)

        training.after = after
        return training

    training = make().log(*places)
    training.checkpointer.resume()
    training.run(0, 9)
    training.crash()
    again = Training().log(*places)
    with pytest.warns(ShrinkpointWarning, match="replayed from step 5 to 7, give another state"):
        assert again.checkpointer.resume() == 5


class Teacher(nn.Module):
    """A model with a slowly moving copy of a layer, which no optimizer trains."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.student = model
        self.teacher = nn.Linear(128, 128).requires_grad_(False)
        self.table = model.table

    def forward(self, *arguments, **more):
        return self.student(*arguments, **more)


@pytest.mark.parametrize("moved", [False, True])
def test_a_teacher_that_moves_is_named_and_one_that_stands_is_fine(moved):
    training = Training()
    training.model = Teacher(training.model)
    if moved:
        training.after = lambda: training.model.teacher.weight.data.mul_(0.99)
    log = log_of(training)
    if moved:
        with pytest.warns(
            ShrinkpointWarning, match=r"'teacher.weight', which no optimizer trains, is changed"
        ):
            training.run(0, 6)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        training.run(0, 4)
        training.model.teacher.weight.data = training.model.teacher.weight.data.clone()
        training.model.teacher.weight.add_(0)  # touched, but the same
        training.run(4, 6)
    assert log.off is None


def test_a_log_that_was_closed_holds_up_nothing():
    training = Training()
    log = log_of(training)
    training.run(0, 3)
    training.checkpointer.close()
    written = log.written
    training.run(3, 4)
    training.checkpointer.save(4, wait=True)
    again = threading.Thread(target=training.checkpointer.close, daemon=True)
    again.start()
    again.join(60)
    assert not again.is_alive()
    assert log.written == written


def test_averages_without_after_step_are_refused_by_name():
    training = Training()
    wide = nn.Linear(128, 128)
    average = torch.optim.swa_utils.AveragedModel(wide)
    with pytest.raises(ConfigError, match=r"'average' contains .*module.weight.*after_step="):
        training.log("memory://averaged/run", "memory://averaged/log", average=average)
