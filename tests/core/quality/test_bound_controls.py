"""Controls of the bound: what must be caught with default options, on real small trainings through `Checkpointer`."""

import math
import warnings

import pytest
import torch
from support.containers import identical
from support.optimizers import Lion
from support.options import grouped
from support.training import TinyGPT
from torch import nn
from torch.nn import functional

import shrinkpoint.schemes.auto.first_moments as centroid_moments
from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.saver import Saver
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import Role, TrainingState

EVERY = 20


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


class Training:
    """One process of a training, with default options but for those given; every save waits for the one before."""

    def __init__(self, url, *, make=TinyGPT, optimizer=adamw, evaluate=None, **options):
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = optimizer(self.model)
        measured = evaluate if evaluate is not None else self.held_out
        given = {"evaluate": lambda: measured(self.model), "busy": "wait", **options}
        self.checkpointer = Checkpointer(str(url), self.model, self.optimizer, **grouped(**given))
        self.steps = self.checkpointer.resume()

    @staticmethod
    def held_out(model):
        return torch.stack([model.loss(10_000 + seed) for seed in range(8)])

    def train(self, steps=EVERY):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model.loss(self.steps).backward()
            self.optimizer.step()
            self.steps += 1
            self.checkpointer.step(self.steps)
        return self

    def save(self):
        """Save, and give the report and a copy of what was saved."""
        before = len(self.checkpointer.reports())
        assert self.checkpointer.save(self.steps, wait=True) is not None
        (report,) = self.checkpointer.reports()[before:]
        return report, self.state()

    def state(self):
        describe = describe_training(
            self.model, [self.optimizer], model_path=("model",), optimizers_path=("optimizers",)
        )
        state = {"model": self.model.state_dict(), "optimizers": [self.optimizer.state_dict()]}
        live = TrainingState.capture(state, describe)
        copies = {name: tensor.detach().clone() for name, tensor in live.tensors.items()}
        return TrainingState(live.tree, copies, live.specs)

    def restored(self, url, **options):
        """What another process gets of the newest checkpoint."""
        self.checkpointer.close()
        again = Training(url, resume="must", **options)
        again.checkpointer.close()
        return again.state()


def noise_and_movement(saved, restored, earlier):
    """Root mean squares of a restore's error and of what training did between two states, by the weight's name."""
    found = {}
    for name, spec in saved.specs.items():
        if spec.tag.role is Role.WEIGHT:
            true = saved.tensors[name]
            error, moved = restored.tensors[name] - true, true - earlier.tensors[name]
            found[name] = tuple(float(x.square().mean().sqrt()) for x in (error, moved))
    return found


def all_below_movement(saved, restored, earlier, share=1.25):
    pairs = noise_and_movement(saved, restored, earlier)
    return all(noise <= share * moved for noise, moved in pairs.values())


def moments(state):
    return {name: state.tensors[name] for name, spec in state.specs.items() if spec.tag.role is Role.EXP_AVG}


# ---- forced settings and broken codecs


def lion(model):
    return Lion(model.parameters(), lr=3e-4)


@pytest.mark.parametrize("optimizer", [adamw, lion])
@pytest.mark.parametrize("step", [4, 8, 64])
def test_forced_wide_moments_are_stored_exactly(tmp_path, step, optimizer):
    options = AutoOptions(first_moment_step=step)
    training = Training(tmp_path, optimizer=optimizer, scheme=options).train()
    report, saved = training.save()
    assert (report.scheme, report.measured) == ("lossless", "exact")
    assert report.reason.endswith("stored exactly")
    assert "of the 20 steps between two checkpoints" in report.reason or "with an error of" in report.reason
    assert identical(training.restored(tmp_path, optimizer=optimizer).to_object(), saved.to_object())


@pytest.mark.parametrize("scheme", ["excp", "itmo"])
def test_published_schemes_that_zero_most_of_the_moments_are_refused(tmp_path, scheme):
    training = Training(tmp_path, scheme=scheme).train()
    training.save()  # a chain's first one is exact
    report, saved = training.train().save()
    assert report.scheme == "lossless"
    assert report.reason.endswith("stored exactly")
    assert identical(training.restored(tmp_path, scheme=scheme).to_object(), saved.to_object())


def sign_noise(value, units):
    return value * torch.where(torch.rand(value.shape) < 0.5, -1.0, 1.0)


def noise_in_units(value, units):
    """As large as the moment is in units of the second one's root, so that updates stay as long as they are."""
    size = (value / units.clamp_min(1e-30)).square().mean().sqrt()
    return size * units * torch.randn(value.shape)


def plain_noise(value, units):
    return value.square().mean().sqrt() * torch.randn(value.shape)


@pytest.mark.parametrize("noise", [sign_noise, noise_in_units, plain_noise])
@pytest.mark.parametrize(
    "optimizer",
    [adamw, lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)],
    ids=["AdamW", "Nesterov"],
)
def test_moments_replaced_by_noise_of_their_own_size_are_stored_exactly(
    tmp_path, monkeypatch, noise, optimizer
):
    true = centroid_moments._Quantized.values

    def replaced(self):
        torch.manual_seed(3)
        return noise(torch.from_numpy(true(self)), torch.from_numpy(self.units)).numpy()

    monkeypatch.setattr(centroid_moments._Quantized, "values", replaced)
    training = Training(tmp_path, optimizer=optimizer).train()
    report, saved = training.save()
    assert report.configuration.endswith("exact moments")
    assert "moment" in report.reason or "update" in report.reason
    restored = training.restored(tmp_path, optimizer=optimizer)
    optimizers = [state.to_object()["optimizers"] for state in (restored, saved)]
    assert identical(*optimizers)
    assert not identical(restored.to_object(), saved.to_object()), "weights are coded all the same"


def forgiving(model):
    """A loss that sees the weights, and that hardly anything raises."""
    return 1.0 + 1e-9 * sum(float(p.square().sum()) for p in model.parameters())


def constant(model):
    return 1.0


@pytest.mark.parametrize("evaluate", [forgiving, constant])
@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
def test_forced_wide_weights_are_refused_for_what_training_has_moved(tmp_path, evaluate):
    options = AutoOptions(weight_scale=64)
    training = Training(tmp_path, evaluate=evaluate, scheme=options).train()
    report, saved = training.save()
    assert report.scheme == "lossless"
    assert "what training has moved it by since the last checkpoint: stored exactly" in report.reason
    assert identical(training.restored(tmp_path, scheme=options).to_object(), saved.to_object())


# ---- evaluations that say nothing, or the wrong thing


def another_copy():
    torch.manual_seed(0)
    copy = TinyGPT()
    return lambda model: Training.held_out(copy)


@pytest.mark.parametrize("evaluate", [another_copy(), constant], ids=["another copy", "constant"])
def test_a_blind_evaluation_is_told_once_and_noise_stays_below_movement(tmp_path, evaluate):
    training = Training(tmp_path, evaluate=evaluate)
    start = training.state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, at_first = training.train().save()
        second, at_second = training.train().save()
    told = [str(warning.message) for warning in caught]
    assert [message.split(":")[0] for message in told] == [
        "the evaluation does not see the weights that are stored"
    ]
    assert (first.measured, second.measured) == ("blind", "blind")
    assert (first.degradation, second.degradation) == (None, None)
    assert first.scheme == second.scheme == "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        restored = training.restored(tmp_path)
    assert all_below_movement(at_second, restored, at_first)
    moved_in_all = noise_and_movement(at_second, restored, start)
    assert all(noise < moved for noise, moved in moved_in_all.values())
    assert not identical(restored.to_object()["model"], at_second.to_object()["model"])  # but it is lossy


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_evaluation_that_is_not_finite_makes_saves_exact_with_one_warning(tmp_path, loss):
    training = Training(tmp_path, evaluate=lambda model: loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.train().save()
        report, saved = training.train().save()
    (told,) = caught
    assert isinstance(told.message, ShrinkpointWarning)
    assert "stored exactly" in str(told.message)
    assert (report.scheme, report.measured) == ("lossless", "exact")
    assert identical(training.restored(tmp_path).to_object(), saved.to_object())


def test_with_an_evaluation_on_training_data_noise_stays_below_movement(tmp_path):
    """The training set is three batches, which the model learns by heart."""

    class Overfitting(TinyGPT):
        def loss(self, seed):
            return super().loss(seed % 3 if seed < 10_000 else seed)

    training_data = lambda model: torch.stack([model.loss(seed) for seed in range(3)])  # noqa: E731
    training = Training(tmp_path, make=Overfitting, evaluate=training_data).train(100)
    _, earlier = training.save()
    training.train()
    _, saved = training.save()
    restored = training.restored(tmp_path, make=Overfitting)
    assert all_below_movement(saved, restored, earlier)


# ---- what training does not change


def test_weights_that_stand_still_are_restored_bit_for_bit_and_cost_nothing(tmp_path):
    """The learning rate has gone to zero."""
    training = Training(tmp_path).train()
    training.save()
    base = training.checkpointer.reports()[0]
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(3):
        training.train()
        report, saved = training.save()
    training.checkpointer.close()
    for step in range(2 * EVERY, training.steps + 1, EVERY):
        restored = Saver(str(tmp_path)).restore(step).state
        assert identical(restored.to_object()["model"], saved.to_object()["model"])
    assert report.scheme == "auto"
    assert report.sections["weight"] < 0.02 * base.sections["weight"]
    assert report.sections["other"] < 0.02 * base.bytes


class LowRank(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + functional.linear(functional.linear(x, self.down), self.up)


class Adapted(TinyGPT):
    """Adapters on a base that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.up, self.down = LowRank(self.up), LowRank(self.down)


def test_frozen_parameters_are_the_same_after_ten_restores_and_cost_nothing_in_deltas(tmp_path):
    first = Training(tmp_path, make=Adapted)
    frozen = {name: p.detach().clone() for name, p in first.model.named_parameters() if not p.requires_grad}
    assert sum(p.numel() for p in frozen.values()) > 20_000
    training, reports = first, []
    for _ in range(10):
        report, _ = training.train().save()
        reports.append(report)
        training.checkpointer.close()
        training = Training(tmp_path, make=Adapted, resume="must")
        live = dict(training.model.named_parameters())
        assert identical({name: live[name].detach() for name in frozen}, frozen)
    training.checkpointer.close()
    assert [report.kind for report in reports[:8]] == ["base", *["delta"] * 7]
    base_of_all = reports[0].sections["weight"]
    assert base_of_all > 3 * sum(p.numel() for p in frozen.values())  # stored once, exactly
    assert max(report.sections["weight"] for report in reports[1:8]) < 0.05 * base_of_all
    assert all(report.scheme == "auto" for report in reports)


class Looked(nn.Module):
    """An embedding of which training sees the first half of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 32)
        self.head = nn.Linear(32, 8)

    def loss(self, seed):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(100 if seed < 10_000 else 200, (64,), generator=generator)
        return functional.cross_entropy(self.head(self.embedding(tokens)), tokens % 8)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


ROWS = "model/embedding.weight"


@pytest.mark.parametrize("restarts", [False, True])
def test_rows_that_no_batch_has_touched_are_the_same_bits_through_deltas(tmp_path, restarts):
    training = Training(tmp_path, make=Looked, optimizer=adam)
    preserved_state, saved = training.state().tensors[ROWS][100:], {}
    for _ in range(4):
        training.train()
        report, saved[training.steps] = training.save()
        assert (report.scheme, report.kind) == ("auto", "delta" if len(saved) > 1 else "base")
        if restarts:
            training.checkpointer.close()
            training = Training(tmp_path, make=Looked, optimizer=adam, resume="must")
    training.checkpointer.close()
    restored = {step: Saver(str(tmp_path)).restore(step).state.tensors[ROWS] for step in saved}
    at_base = restored[EVERY][100:]
    away = (at_base - preserved_state).square().mean().sqrt()  # the base has them at its finest
    assert float(away) <= 2.0**-13 * float(preserved_state.abs().max())
    for step, rows in restored.items():
        assert identical(rows[100:], at_base)
        assert not identical(rows[:100], saved[step].tensors[ROWS][:100])  # the others are lossy


# ---- the last checkpoint


def test_the_loss_of_the_very_last_checkpoint_is_within_what_was_told(tmp_path):
    training = Training(tmp_path, every=EVERY).train(10 * EVERY)
    training.checkpointer.close()
    report = training.checkpointer.reports()[-1]
    assert (report.step, report.measured) == (10 * EVERY, "measured")
    loss = float(training.held_out(training.model).mean())
    again = Training(tmp_path, resume="must")
    again.checkpointer.close()
    rise = float(again.held_out(again.model).mean()) / loss - 1
    assert rise - report.degradation_noise <= report.degradation_high <= report.allowed
    assert rise == pytest.approx(report.degradation + report.degradation_noise, abs=2e-4)
    assert report.update_length <= 1.05
