"""Replayed steps give the undisturbed training's state, bit for bit, and its next losses."""

import copy

import pytest
import torch
from support.containers import identical
from support.stepped import Training, cases
from torch import nn

pytestmark = pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")

QUICK = {
    ("SGD", "foreach", False),
    ("Adam", "loop", True),
    ("AdamW", "fused", False),
    ("AdamW", "foreach", True),
    ("Adafactor", "foreach", False),
    ("SparseAdam", "only", True),
}


def compare(
    places: tuple[str, str], make, *, crash_at: int = 9, reached: int = 9, end: int = 12, **options
) -> Training:
    """Train once undisturbed and without a log; once with one, with a crash after `crash_at` steps, and resume."""
    truth = make()
    losses = truth.run(0, reached)
    there = truth.digest, truth.buffers(), copy.deepcopy(truth.scheduler.state_dict())
    losses += truth.run(reached, end)
    killed = make().log(*places, **options)
    assert killed.checkpointer.resume() == 0
    assert killed.run(0, crash_at) == losses[:crash_at]
    assert killed.checkpointer.step_log.log.off is None
    killed.crash()
    torch.rand(3)
    again = make().log(*places, **options)
    assert again.checkpointer.resume() == reached
    assert (again.digest, again.scheduler.state_dict()) == (there[0], there[2])
    assert all(torch.equal(*pair) for pair in zip(again.buffers(), there[1], strict=True))
    assert again.run(reached, end) == losses[reached:]
    assert again.digest == truth.digest
    assert identical(again.model.state_dict(), truth.model.state_dict())
    assert identical(again.optimizer.state_dict(), truth.optimizer.state_dict())
    again.checkpointer.close()
    return again


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case)), marks=() if case in QUICK else pytest.mark.slow)
        for case in cases()
    ],
)
def test_every_optimizer_goes_on_bit_for_bit(places, case):
    name, implementation, closure = case
    compare(places, lambda: Training(name, implementation, closure=closure))


def test_gradients_that_are_set_to_zero_are_not_none(places):
    compare(places, lambda: Training(set_to_none=False))


def test_a_crash_before_the_first_checkpoint_costs_no_more(places):
    compare(places, Training, crash_at=4, reached=4, every=50)


def test_steps_since_the_last_whole_segment_are_computed_again(places):
    compare(places, Training, crash_at=9, reached=8, steps=3)


def test_gradients_in_another_order_of_memory(places):
    def make():
        training = Training("Adafactor", "loop")
        weight = training.model.conv.weight
        with torch.no_grad():  # as modules in the memory format channels_last have them
            weight.set_(weight.permute(2, 0, 1).contiguous().permute(1, 2, 0))
        assert not weight.is_contiguous()
        return training

    compare(places, make)


def test_a_tensor_as_learning_rate(places):
    compare(places, lambda: Training("Adam", "loop", lr=torch.tensor(0.01)))


def test_a_hook_that_clips_and_was_there_before(places):
    def make():
        training = Training()
        training.optimizer.register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_norm_(training.model.parameters(), 0.05) and None
        )
        return training

    compare(places, make)


def test_a_hook_behind_the_step_is_part_of_it(places):
    def make():
        training = Training()
        clip = lambda *_: [p.data.clamp_(-0.2, 0.2) for p in training.model.parameters()] and None  # noqa: E731
        training.optimizer.register_step_post_hook(clip)
        return training

    compare(places, make)


def test_a_frozen_layer_and_nan_gradients(places):
    def make():
        training = Training("SGD", "foreach", momentum=0.0, nesterov=False, clip=1e9)
        training.model.spare.requires_grad_(False)
        training.model.head.bias.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
        return training

    truth, killed = make(), make().log(*places, every=50)
    killed.checkpointer.resume()
    truth.run(0, 4)
    killed.run(0, 4)
    killed.crash()
    again = make().log(*places, every=50)
    assert again.checkpointer.resume() == 4
    assert again.digest == truth.digest
    assert again.model.head.bias.isnan().all()


class Gan(Training):
    """Two optimizers of different frequency; `step` of the checkpointer counts both."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.optim.SGD(self.model.spare.parameters(), lr=0.1, momentum=0.5)
        self.optimizer.param_groups[0]["params"] = [
            p for name, p in self.model.named_parameters() if "spare" not in name
        ]

    def log(self, url, log, **options):
        both = self.optimizer, [self.optimizer, self.other]
        self.optimizer = both[1]
        try:
            return super().log(url, log, **options)
        finally:
            self.optimizer = both[0]

    def step(self, step):
        loss = super().step(step)
        for _ in range(step % 3):
            self.other.step()
        return loss


def test_several_optimizers_of_different_frequency(places):
    compare(places, Gan)


class Scaled(Training):
    """A gradient scaler whose scale overflows at first, so that steps are skipped."""

    def __init__(self) -> None:
        super().__init__("AdamW", "loop")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        self.stateful = {"scaler": self.scaler}
        self.skipped = 0

    def step(self, step):
        self.optimizer.zero_grad()
        tokens = self.batches.next()
        logits = self.model(tokens[:, :-1], spare=step % 3 == 0)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.scaler.scale(loss * 64).backward()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        return loss.item()


def test_a_gradient_scaler_that_skips_steps(places):
    again = compare(places, Scaled)
    whole = Scaled()
    whole.run(0, 9)
    assert whole.skipped >= 2
    assert again.scaler.get_scale() > 1


class Compiled(Training):
    """The model is compiled, by a backend that needs no C compiler."""

    def __init__(self) -> None:
        super().__init__("AdamW", "foreach")
        self.model.forward = torch.compile(self.model.forward, backend="aot_eager")


def test_a_compiled_training(places):
    torch.compiler.reset()
    compare(places, Compiled)


class Clipped(Training):
    """Gradients are limited by value."""

    def step(self, step):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            self.model(tokens := self.batches.next(), spare=True).flatten(0, 1), tokens.flatten()
        )
        loss.backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def test_gradients_that_are_limited_by_value(places):
    compare(places, Clipped)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_fused_optimizer_that_unscales_by_itself(places, found_inf):
    class Fused(Training):
        def step(self, step):
            self.optimizer.grad_scale = torch.tensor(8.0)
            self.optimizer.found_inf = torch.tensor(found_inf if step == 7 else 0.0)
            try:
                return super().step(step)
            finally:
                del self.optimizer.grad_scale, self.optimizer.found_inf

    compare(places, lambda: Fused("AdamW", "fused"))


class Averaged(Training):
    """An average of the weights and of the buffers, updated after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.after = lambda: self.average.update_parameters(self.model)
        self.stateful = {"average": self.average}


def test_averages_are_made_again_by_the_users_function(places):
    def make():
        training = Averaged()
        log = training.log
        training.log = lambda *where, **how: log(*where, after_step=training.after, **how)
        return training

    again = compare(places, make)
    whole = make()
    whole.run(0, 12)
    assert identical(again.average.state_dict(), whole.average.state_dict())


def test_a_second_crash_after_a_replay_loses_no_more(places):
    truth = Training()
    losses = truth.run(0, 16)
    step, got = 0, []
    for crash_at in (4, 8, 11, 16):
        training = Training().log(*places, every=50)
        begin = training.checkpointer.resume()
        assert begin == step - step % 2 if step else begin == 0
        got = got[:begin] + training.run(begin, crash_at)
        step = crash_at
        training.crash()
    assert got == losses
    assert training.digest == truth.digest


def test_a_checkpoint_that_is_asked_for_is_what_one_gets(places):
    training = Training().log(*places)
    training.checkpointer.resume()
    training.run(0, 9)
    training.crash()
    again = Training().log(*places)
    assert again.checkpointer.resume(step=5) == 5
    again.checkpointer.close()
    fresh = Training().log(*places, resume="never")
    assert fresh.checkpointer.resume() == 0


def test_what_was_replayed_is_saved_when_training_ends(places):
    training = Training().log(*places)
    training.checkpointer.resume()
    training.run(0, 9)
    training.crash()
    with Training().log(*places).checkpointer as checkpointer:
        assert checkpointer.resume() == 9
    assert checkpointer.saver.store.manifests()[0].step == 9
    assert Training().log(*places).checkpointer.resume() == 9


def test_a_checkpoint_that_a_crash_prevented_is_made_up_for(places):
    training = Training().log(*places, every=50)
    training.checkpointer.resume()
    training.run(0, 8)
    training.crash()
    again = Training().log(*places, every=5)
    assert again.checkpointer.resume() == 8
    again.run(8, 9)
    assert [manifest.step for manifest in again.checkpointer.saver.store.manifests()] == [9]


class Micro(Training):
    """Counts batches: a gradient is summed over three of them, and both checkpoints and crashes fall in between."""

    def step(self, step):
        if step % 3 == 0:
            self.optimizer.zero_grad()
        tokens = self.batches.next()
        logits = self.model(tokens[:, :-1], spare=step % 2 == 0)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if step % 3 == 2:
            self.optimizer.step()
            self.scheduler.step()
        return loss.item()


@pytest.mark.parametrize(("crash_at", "reached"), [(7, 7), (8, 8), (9, 9), (11, 11)])
def test_sums_of_gradients_that_a_crash_cuts_short_are_there_again(places, crash_at, reached):
    compare(places, Micro, crash_at=crash_at, reached=reached, end=14, steps=1, every=5)


def test_gradients_that_are_changed_after_the_step_and_added_to(places):
    class Decayed(Training):
        def step(self, step):
            self.optimizer.zero_grad = lambda **_: [
                p.grad.mul_(0.5) for p in self.model.parameters() if p.grad is not None
            ]
            loss = super().step(step)
            self.optimizer.zero_grad()
            return loss

    compare(places, Decayed, steps=1)


def test_gradients_that_stay_for_longer_than_a_segment(places):
    class Rare(Training):
        def step(self, step):
            return 0.0 if step % 3 else super().step(step)

    compare(places, Rare, crash_at=6, reached=6, steps=1)


def test_an_optimizer_that_looks_at_the_loss(places):
    class Polyak(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure):
            with torch.enable_grad():
                loss = float(closure())
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.sub_(0.01 * loss * parameter.grad)
            return loss

    class Looking(Training):
        def __init__(self) -> None:
            super().__init__(closure=True)
            self.optimizer = Polyak(self.model.parameters(), {"lr": 0.1})
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    compare(places, Looking)


def test_layers_that_are_frozen_on_the_way(places):
    class Freezing(Training):
        def step(self, step):
            self.model.conv.requires_grad_(step < 6)
            self.model.spare.requires_grad_(step >= 4)
            return super().step(step)

    compare(places, Freezing)


def test_a_checkpoint_that_was_collected_meanwhile(places):
    training = Training().log(*places, every=3, keep_last=1, grace_s=0.0)
    training.checkpointer.resume()
    training.run(0, 11)
    digest = training.digest
    training.crash()
    assert [m.step for m in training.checkpointer.saver.store.manifests()] == [9]
    again = Training().log(*places, every=3, keep_last=1, grace_s=0.0)
    assert again.checkpointer.resume() == 11
    assert again.digest == digest


def test_compressed_gradients_take_few_bytes(tmp_path):
    """What an optimizer gets where training sends 2 % of the gradients: replayed exactly, at about a bit per element."""

    def make():
        torch.manual_seed(0)
        training = Training("Adam", "foreach")
        training.model.wide = nn.Linear(400, 400)
        training.optimizer.add_param_group({"params": list(training.model.wide.parameters())})
        training.scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0)
        generator = torch.Generator().manual_seed(1)

        def sparsify(*_):
            gradient = torch.randn(400, 400, generator=generator)
            kept = torch.rand(400, 400, generator=generator) < 0.02
            training.model.wide.weight.grad = torch.where(kept, gradient, 0.0)

        training.optimizer.register_step_pre_hook(sparsify)
        return training

    places = f"{tmp_path}/run", f"{tmp_path}/log"
    training = make().log(*places, every=50, steps=4)
    training.checkpointer.resume()
    training.run(0, 8)
    digest = training.digest
    training.crash()
    elements = sum(p.numel() for p in training.model.parameters())
    others = (
        elements - 400 * 400
    )  # of which the gradients are logged in full, beside generators at the end of each segment
    remainder = 8 * 4 * others + 2 * 25_000
    assert 8 * (training.checkpointer.step_log.log.bytes - remainder) / (8 * 400 * 400) < 1.1
    again = make().log(*places, every=50, steps=4)
    assert again.checkpointer.resume() == 8
    assert again.digest == digest
