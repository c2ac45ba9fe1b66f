"""Averaged copies of the weights: found by what they are, coded by their own movement, measured, and left alone."""

import copy
import math

import numpy as np
import pytest
import support.baseline_schemes  # noqa: F401 - for a scheme of theirs
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import format_baselines  # noqa: F401 - which are read too
from support.containers import identical
from support.options import grouped
from support.training import OPTIMIZERS, TinyGPT, TinyMLP, capture, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.coding.encode import restored_values
from shrinkpoint.config import Advanced
from shrinkpoint.engine.movement import MovementTracker
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.quality.comparison import mirrored_model, perturbed_model, restored_model, true_model
from shrinkpoint.quality.guards import Guard
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.state.averages import AverageFinder, average_key, confirmed, live_tensors
from shrinkpoint.state.roles import model_tags
from shrinkpoint.state.training import LayerType, Role, Tag, TrainingState


class Shadow:
    """An average as a list of tensors in the parameters' order, as torch_ema and diffusers keep it."""

    def __init__(self, model, decay=0.9, *, copies=False):
        self.shadow_params = [p.detach().clone() for p in model.parameters()]
        self.decay, self.copies = decay, copies

    def update(self, model):
        for mine, live in zip(self.shadow_params, model.parameters(), strict=True):
            mine.lerp_(live.detach(), 1 - self.decay)

    def state_dict(self):
        shadow = [p.clone() for p in self.shadow_params] if self.copies else self.shadow_params
        return {"decay": self.decay, "shadow_params": shadow}

    def load_state_dict(self, state):
        self.shadow_params = [p.clone() for p in state["shadow_params"]]

    def loss(self, seed):
        model = TinyMLP()
        for live, mine in zip(model.parameters(), self.shadow_params, strict=True):
            live.data.copy_(mine)
        return model.loss(seed)


def ema(model, decay=0.9):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


# ---- what is found by place and shape


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)
        self.top, self.frozen = nn.Linear(5, 3), nn.Linear(4, 2)
        self.frozen.requires_grad_(False)


@pytest.mark.parametrize(
    ("path", "shape", "parameter"),
    [
        (("stateful", "ema", "module.top.weight"), (3, 5), "top.weight"),
        (("stateful", "ema", "module._orig_mod.left.weight"), (5, 5), "left.weight"),
        (("algorithms", "0", "1", "named", "right.bias"), (5,), "right.bias"),
        (("ema", "top", "weight"), (3, 5), "top.weight"),
        (("ema", "weight"), (3, 5), "top.weight"),  # of the submodule alone
        (("ema", "weight"), (5, 5), None),  # of which of the two?
        (("ema", "module.top.weight"), (5, 5), None),
        (("ema", "module.top.kernel"), (3, 5), None),
        (("ema", "module.frozen.weight"), (2, 4), None),
        (("shadow_params", "0"), (5, 5), "left.weight"),
        (("shadow_params", "2"), (5, 5), "right.weight"),
        (("shadow_params", "5"), (3,), "top.bias"),
        (("shadow_params", "1"), (5, 5), None),
        (("shadow_params", "6"), (2, 4), None),
        (("shadow_params", "8"), (5,), None),
        (("shadow_params", "9" * 5000), (5,), None),
        ((), (5, 5), None),
    ],
)
def test_an_average_has_the_shape_and_the_name_or_the_place_of_a_trained_weight(path, shape, parameter):
    module = Twins()
    finder = AverageFinder(module, model_tags(module))
    expected = (
        Tag(role=Role.AVERAGE, layer_type=LayerType.LINEAR, parameter=parameter) if parameter else Tag()
    )
    assert finder.tag(path, torch.ones(shape)) == expected
    for dtype in (torch.int64, torch.complex64, torch.float8_e4m3fn):
        assert finder.tag(path, torch.ones(shape).to(dtype)) == Tag()


def test_averages_are_found_in_whole_states_and_never_among_an_optimizers():
    model = TinyGPT()
    optimizer = OPTIMIZERS["AdamW"](model)
    average, shadow = ema(model), Shadow(model)
    train(model, optimizer, [0])
    state = capture(model, optimizer, stateful={"ema": average.state_dict(), "shadow": shadow.state_dict()})
    found = {name: spec.tag.parameter for name, spec in state.specs.items() if spec.tag.role is Role.AVERAGE}
    names = [name for name, _ in model.named_parameters()]
    assert found == {
        **{f"stateful/ema/module.{name}": name for name in names},
        **{f"stateful/shadow/shadow_params/{index}": name for index, name in enumerate(names)},
    }
    assert state.specs["stateful/ema/module.wte.weight"].tag.layer_type is LayerType.EMBEDDING


# ---- what is confirmed by its values


def pair(weight, average):
    def describe(path, tensor):
        return Tag(role=Role.WEIGHT if path == ("w",) else Role.AVERAGE, parameter="p")

    return TrainingState.capture({"w": weight, "a": average}, describe)


def role_of(weight, average):
    return confirmed(pair(weight, average)).specs["a"].tag.role


@given(seed=st.integers(0, 999), size=st.floats(0, 3), turn=st.floats(0, 2), dtype=st.sampled_from([torch.float32, torch.bfloat16]))  # fmt: skip
def test_an_average_is_nearer_to_its_weight_than_half_of_it(seed, size, turn, dtype):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 9, generator=generator).to(dtype)
    average = size * weight.float() + turn * torch.randn(8, 9, generator=generator)
    share = float((average - weight.float()).norm() / weight.float().norm())
    if abs(share - 0.5) > 1e-3:
        assert role_of(weight, average) is (Role.AVERAGE if share < 0.5 else Role.OTHER)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_average(value):
    weight = torch.ones(3)
    assert role_of(weight, torch.tensor([1.0, value, 1.0])) is Role.OTHER
    assert role_of(torch.tensor([1.0, value, 1.0]), weight) is Role.OTHER


def test_zeros_and_copies_are_averages_that_have_not_begun():
    assert role_of(torch.zeros(3), torch.zeros(3)) is Role.AVERAGE
    assert role_of(torch.zeros(3), torch.ones(3)) is Role.OTHER
    assert role_of(torch.ones(3), torch.ones(3)) is Role.AVERAGE


# ---- how it is stored


def trained(steps=30, between=10, width=64):
    """Two snapshots of a training with two averages, and how far everything has moved from one to the other."""
    torch.manual_seed(3)
    model = TinyMLP(width)
    optimizer = OPTIMIZERS["AdamW"](model)
    average, shadow, copied = ema(model), Shadow(model, 0.98), copy.deepcopy(model)
    tracker, states = MovementTracker(), []
    for step in range(steps):
        train(model, optimizer, [step])
        average.update_parameters(model)
        shadow.update(model)
        if step + 1 in (steps - between, steps):
            copied = copy.deepcopy(model)
            stateful = {
                "ema": average.state_dict(),
                "shadow": shadow.state_dict(),
                "now": copied.state_dict(),
            }
            states.append(confirmed(capture(model, optimizer, stateful=stateful)))
            movement = tracker.since(states[-1], step + 1)
            tracker.note(states[-1], step + 1)
    return states, movement


def rows_rms(tensor):
    return tensor.double().reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1).square().mean(dim=1).sqrt()


def test_the_noise_of_an_average_is_below_its_own_movement_row_by_row():
    (_, state), movement = trained()
    scheme = Auto(
        options=AutoOptions(), save_context=SaveContext(state=state, step=30, movement=movement), scale=0.5
    )
    restored = restored_values(state, scheme, None)
    for name, spec in state.specs.items():
        if "/ema/" not in name and "/shadow/" not in name:
            continue
        assert spec.tag.role in (Role.AVERAGE, Role.OTHER)
        if len(spec.shape) == 2:
            assert spec.tag.role is Role.AVERAGE
            moved, noise = movement.rows[name], rows_rms(restored[name] - state.tensors[name]).numpy()
            assert noise.max() > 0
            assert np.median(noise / moved) < 0.51
            assert float((noise / moved).max()) < 0.75
            weight = movement.rows[f"model/{spec.tag.parameter}"]
            assert np.median(moved) < np.median(weight)
    assert Guard()(SaveContext(state=state, step=30, movement=movement), scheme).reason is None


def test_a_copy_that_has_not_begun_or_an_average_of_unknown_movement_is_exact():
    (_, state), movement = trained()
    for save_context in (
        SaveContext(state=state, step=30, movement=movement),
        SaveContext(state=state, step=30),
    ):
        restored = restored_values(state, Auto(save_context=save_context), None)
        exact = [name for name, value in restored.items() if value is state.tensors[name]]
        assert {n for n in state.tensors if n.startswith("stateful/now/")} <= set(exact)
        assert ("stateful/ema/module.inner.weight" in exact) is (save_context.movement is None)
        assert "model/inner.weight" not in exact


def test_the_guard_refuses_an_average_that_is_noisier_than_it_moves():
    (_, state), movement = trained()
    options = AutoOptions(movement_share=100)
    calm = {name: rows * (1e-2 if "/ema/" in name else 1.0) for name, rows in movement.rows.items()}
    save_context = SaveContext(state=state, step=30, movement=movement)
    judged = SaveContext(state=state, step=30, movement=type(movement)(rows=calm, steps=movement.steps))
    scheme = Auto(options=AutoOptions(), save_context=save_context, scale=0.5)
    assert "noise of stateful/ema/" in Guard()(judged, scheme).reason
    assert (
        "noise of "
        in Guard()(save_context, Auto(options=options, save_context=save_context, scale=1.0)).reason
    )


# ---- what an evaluation gets


def test_averages_are_among_what_is_tried_mirrored_and_perturbed():
    (_, state), movement = trained()
    scheme = Auto(save_context=SaveContext(state=state, step=30, movement=movement))
    name = "stateful/ema/module.inner.weight"
    key = average_key(name)
    true, restored = true_model(state), restored_model(state, scheme, None)
    assert set(true) == set(restored)
    assert {"inner.weight", key} <= set(true)
    assert identical(restored[key], restored_values(state, scheme, None)[name])
    assert not torch.equal(restored[key], true[key])
    away = true[key] - restored[key]
    mirrored = mirrored_model(state, restored)
    assert torch.allclose(mirrored[key] - true[key], away, atol=1e-7)
    assert not torch.equal(perturbed_model(state)[key], true[key])
    network = perturbed_model(state, averages=False)
    assert network[key] is true[key]
    assert not torch.equal(network["inner.weight"], true["inner.weight"])


def test_only_what_an_object_gives_away_itself_can_be_swapped():
    model = TinyMLP()
    names = [f"shadow_params/{index}" for index in range(4)]
    shadow = Shadow(model)
    assert list(live_tensors(shadow.state_dict, [*names, "unknown"])) == names
    assert live_tensors(Shadow(model, copies=True).state_dict, names) == {}


# ---- whole runs


class Run:
    """A training of which only the average is evaluated."""

    def __init__(self, url, average="module", **options):
        torch.manual_seed(17)
        self.model = TinyMLP()
        self.optimizer = OPTIMIZERS["AdamW"](self.model)
        self.average = (
            ema(self.model) if average == "module" else Shadow(self.model, copies=average == "copies")
        )
        loss = self.average.module.loss if average == "module" else self.average.loss
        self.modes = []

        def evaluate():
            self.modes.append(getattr(self.average, "training", None))
            return self.losses()

        self.losses = lambda: [loss(1000 + index).item() for index in range(2)]
        self.evaluate = evaluate
        self.checkpointer = Checkpointer(
            str(url),
            self.model,
            self.optimizer,
            **grouped(every=10, evaluate=evaluate, average=self.average, **options),
        )

    def train(self, until):
        start = self.checkpointer.resume()
        for step in range(start, until):
            train(self.model, self.optimizer, [step])
            if isinstance(self.average, AveragedModel):
                self.average.update_parameters(self.model)
            else:
                self.average.update(self.model)
            self.checkpointer.step(step + 1)
            self.checkpointer.flush()
        self.checkpointer.close()
        return self.checkpointer.reports()


@pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")
@pytest.mark.parametrize("average", ["module", "list"])
def test_an_average_that_is_evaluated_is_measured_coded_and_left_alone(tmp_path, average):
    run, plain = Run(tmp_path / "run", average), Run(tmp_path / "plain", average, scheme="lossless")
    reports, _ = run.train(30), plain.train(30)
    assert identical(run.average.state_dict(), plain.average.state_dict())
    assert identical(run.model.state_dict(), plain.model.state_dict())
    for report in reports:
        assert report.measured == "measured"
        assert report.degradation_high <= report.allowed
        assert "averaged weights alone are measured" in report.reason
    assert any(report.degradation > 0 for report in reports)
    assert reports[-1].baseline == pytest.approx(np.mean(run.evaluate()))
    coded = reports[-1].sections["average"]
    assert coded < reports[-1].raw_sections["average"] / 5
    if average == "module":
        assert run.average.training
        assert not any(run.modes[:-1])
    true = np.mean(run.evaluate())
    again = Run(tmp_path / "run", average)
    assert again.checkpointer.resume() == 30
    rise = np.mean(again.evaluate()) / true - 1
    assert reports[-1].degradation_low < rise - reports[-1].degradation_noise < reports[-1].degradation_high
    again.checkpointer.close()


@pytest.mark.parametrize("adopt", [False, True])
def test_an_average_that_can_be_iterated_over_is_coded_like_any_other(tmp_path, adopt):
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer, average = torch.optim.AdamW(model.parameters(), 1e-3), copy.deepcopy(model)
    held_out = torch.randn(64, 64)
    options = {"adopt": 2} if adopt else {}
    checkpointer = Checkpointer(
        str(tmp_path),
        model,
        optimizer,
        **grouped(
            every=20, evaluate=lambda: (model(held_out) - held_out).pow(2).mean(), average=average, **options
        ),
    )
    for step in range(checkpointer.resume(), 40):
        optimizer.zero_grad()
        batch = torch.randn(64, 64)
        (model(batch) - batch).pow(2).mean().backward()
        optimizer.step()
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.05)
        checkpointer.step(step + 1)
        checkpointer.flush()
    checkpointer.close()
    for report in checkpointer.reports():
        assert report.sections["average"] < report.raw_sections["average"] / 4


def test_steps_are_tried_with_the_average_that_would_be_restored(tmp_path):
    run = Run(tmp_path, "module", search_overhead=math.inf, probe_steps=3)
    checkpointer = Checkpointer(
        str(tmp_path / "run"),
        run.model,
        run.optimizer,
        every=10,
        evaluate=run.evaluate,
        train_loss=run.model.loss,
        average=run.average,
        advanced=Advanced(search_overhead=math.inf, probe_steps=3),
    )
    run.checkpointer = checkpointer
    plain = Run(tmp_path / "plain", scheme="lossless")
    reports, _ = run.train(20), plain.train(20)
    assert identical(run.average.state_dict(), plain.average.state_dict())
    assert identical(run.optimizer.state_dict(), plain.optimizer.state_dict())
    probed = [report for report in reports if report.resumed]
    assert probed
    # no step changes the average, so that all of what it cost at the restore is still there
    assert any(report.resumed["3"] != 0 for report in probed)


@pytest.mark.parametrize(
    ("average", "options"), [("copies", {}), ("module", {"scheme": "uniform", "guards": False})]
)
def test_an_average_that_cannot_be_changed_or_is_exact_leaves_the_evaluation_blind(
    tmp_path, average, options
):
    run = Run(tmp_path, average, **options)
    with pytest.warns(ShrinkpointWarning, match="does not see the weights"):
        reports = run.train(20)
    assert {report.measured for report in reports} == {"blind"}


def test_an_evaluation_that_fails_leaves_the_average_alone(tmp_path):
    run = Run(tmp_path)
    checkpointer = run.checkpointer
    train(run.model, run.optimizer, [0])
    before = copy.deepcopy(run.average.state_dict())
    calls = []

    def fails():
        calls.append(run.average.module.inner.weight.clone())
        if len(calls) > 1:
            raise ZeroDivisionError
        return 1.0

    run.losses = fails
    with pytest.warns(ShrinkpointWarning, match="stored exactly"):
        checkpointer.save(1, wait=True)
    checkpointer.close()
    assert len(calls) == 2
    assert not torch.equal(*calls)
    assert identical(run.average.state_dict(), before)
    assert run.average.training
