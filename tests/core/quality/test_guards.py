"""Guards refuse by tensors alone what a loss may not see, and accept what `auto` makes."""

import math
import re
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from support.baseline_schemes import BASELINES
from support.optimizers import KINDS
from support.training import OPTIMIZERS, TinyGPT, TinyMLP, capture, train

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.movement import MovementTracker
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.quality.guards import Guard, Verdict, sampled_parameters
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import EncodedTensor, Movement, SaveContext, Staged
from shrinkpoint.schemes.catalogue import SCHEMES, build
from shrinkpoint.state.training import Role, Tag, TrainingState


@dataclass(frozen=True)
class Changing:
    """A codec that restores what a function makes of the tensor."""

    change: object
    id = "changing"
    needs = ()

    def stage(self, tensor, spec, context):
        return Staged(self.change(tensor), lambda: (EncodedTensor(self.id, {}, {}), {}))


@dataclass(frozen=True)
class ChangingScheme:
    """Restores changed tensors of some roles, or of some names."""

    change: object
    roles: tuple = ()
    names: tuple = ()
    name: str = field(default="changing")

    def codecs(self, state):
        return {
            name: lambda: Changing(self.change)
            for name, spec in state.specs.items()
            if spec.tag.role in self.roles or name in self.names
        }


class Trained:
    """A training that has gone on for some steps since the checkpoint before."""

    def __init__(self, make=OPTIMIZERS["AdamW"], model=TinyMLP, steps=20):
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = make(self.model)
        tracker = MovementTracker()
        train(self.model, self.optimizer, range(10))
        tracker.note(capture(self.model, self.optimizer), 10)
        train(self.model, self.optimizer, range(10, 10 + steps))
        self.state = capture(self.model, self.optimizer)
        self.movement = tracker.since(self.state, 10 + steps)

    @property
    def save_context(self):
        return SaveContext(state=self.state, step=30, movement=self.movement)

    def look(self, scheme, **options):
        guard = Guard([OptimizerKind.of(self.optimizer)], **options)
        found = guard(self.save_context, scheme)
        return found.reason, found


@pytest.fixture(scope="module")
def trained():
    return Trained()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def added(size):
    def change(tensor):
        generator = torch.Generator().manual_seed(tensor.numel())
        return tensor + size * torch.randn(tensor.shape, generator=generator)

    return change


@pytest.mark.parametrize("optimizer", sorted(KINDS))
@pytest.mark.parametrize("model", [TinyMLP, TinyGPT])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_auto_makes_is_accepted(optimizer, model, threads):
    if threads == 2 and optimizer != "AdamW":
        return
    trained = Trained(KINDS[optimizer], model)
    scheme = Auto(save_context=trained.save_context, scale=1.0)
    why, guard = trained.look(scheme, threads=threads)
    assert why is None
    assert guard.untried is None
    assert guard.updates.error < 0.6
    assert 0.9 < guard.updates.length <= 1.05


@pytest.mark.parametrize(
    ("size", "refused"), [(0.5, False), (1.2, False), (2.0, True), (100.0, True), (math.nan, True)]
)
def test_noise_is_compared_with_movement(trained, size, refused):
    name = "model/inner.weight"
    moved = math.sqrt(float((trained.movement.rows[name] ** 2).mean()))
    why, _ = trained.look(ChangingScheme(added(size * moved), names=(name,)))
    assert (why is not None) == refused
    assert why is None or why.startswith(f"the noise of {name} would be")


def test_any_noise_in_a_tensor_that_has_not_moved_is_refused(trained):
    name = "model/outer.weight"
    still = np.zeros_like(trained.movement.rows[name])
    movement = Movement(rows={**trained.movement.rows, name: still}, steps=20)
    save_context = SaveContext(state=trained.state, movement=movement)
    found = Guard()(save_context, ChangingScheme(added(1e-6), names=(name,)))
    assert found.reason == (
        f"the noise of {name} would be not zero, as is what training has moved it by since the last checkpoint"
    )
    assert Guard()(save_context, ChangingScheme(torch.clone, names=(name,))).reason is None


def test_without_a_known_movement_weights_are_not_judged_by_it(trained):
    save_context = SaveContext(state=trained.state)
    assert Guard()(save_context, ChangingScheme(added(1.0), (Role.WEIGHT,))).reason is None


def lagging(trained, share):
    """Elements that have moved least keep the values of the checkpoint before, this share of them."""
    before = {name: old.clone() for name, old in trained.movement.before.items()}

    def change(tensor):
        alike = (old.reshape(tensor.shape) for old in before.values() if old.numel() == tensor.numel())
        old = min(alike, key=lambda old: float((tensor - old).norm()))
        moved = (tensor - old).abs()
        return torch.where(moved <= moved.flatten().quantile(share), old, tensor)

    return change


@pytest.mark.parametrize(("share", "refused"), [(0.1, False), (0.9, True), (1.0, True)])
def test_weights_that_stay_where_they_were_are_refused_for_the_steps_that_they_lose(trained, share, refused):
    """As in a dead zone; in which noise that is no larger than the movement looks harmless."""
    names = [name for name in trained.movement.before if trained.state.tensors[name].dim() == 2]
    why, guard = trained.look(ChangingScheme(lagging(trained, share), names=names))
    assert (why is not None) == refused
    if refused:
        assert re.fullmatch(
            r"the weights of a restore would set training back by (\d+\.\d\d) of the 20 steps between two checkpoints",
            why,
        )
        assert guard.lost_steps > 0.3
        assert not guard.moments
    if share == 1.0:
        assert guard.lost_steps > 0.8 * 20


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_weight_that_was_not_finite_does_not_hide_what_others_lose(value):
    trained = Trained()
    names = [name for name in trained.movement.before if trained.state.tensors[name].dim() == 2]
    change = lagging(trained, 1.0)
    trained.movement.before[names[0]].view(-1)[0] = value
    why, guard = trained.look(ChangingScheme(change, names=names))
    assert "would set training back by" in why
    assert guard.lost_steps > 0.8 * 20


@pytest.mark.parametrize("noise", [0.3, 0.0])
def test_a_tensor_that_moves_far_does_not_hide_one_that_stands_still(noise):
    trained = Trained()
    names = sorted(trained.movement.before, key=lambda name: trained.movement.before[name].numel())
    far, still = names[0], names[-1]
    trained.state.tensors[far].copy_(trained.movement.before[far].reshape(trained.state.tensors[far].shape))
    trained.state.tensors[far].add_(torch.randn(trained.state.tensors[far].shape, generator=seeded(0)))
    trained.movement.rows[far][...] = 1.0
    change = lagging(trained, 1.0)

    def both(tensor):
        if tensor.shape != trained.state.tensors[far].shape:
            return change(tensor)
        return tensor + noise * torch.randn(
            tensor.shape, generator=seeded(1)
        )  # an equal copy counts as itself

    assert trained.state.tensors[far].shape != trained.state.tensors[still].shape
    why, guard = trained.look(ChangingScheme(both, names=(far, still)))
    assert "would set training back by" in why
    assert guard.lost_steps > (0.3 if noise == 0 else 0.05) * 20


@pytest.mark.parametrize(("share", "moment", "blamed"), [(0.2, 0.97, True), (0.24, 0.985, False)])
def test_what_loses_more_is_blamed(trained, share, moment, blamed):
    names = [name for name in trained.movement.before if trained.state.tensors[name].dim() == 2]
    moments = ChangingScheme(lambda m: moment * m, (Role.EXP_AVG,))
    why, guard = trained.look(Both(moments, ChangingScheme(lagging(trained, share), names=names)))
    assert why.startswith("the weights and moments of a restore would set training back by")
    assert guard.moments == blamed


@dataclass(frozen=True)
class Both:
    """Two schemes of different tensors."""

    one: ChangingScheme
    other: ChangingScheme

    def codecs(self, state):
        return {**self.one.codecs(state), **self.other.codecs(state)}


def test_lost_progress_of_the_weights_counts_with_that_of_the_moments(trained):
    names = [name for name in trained.movement.before if trained.state.tensors[name].dim() == 2]
    moments = ChangingScheme(lambda m: 0.97 * m, (Role.EXP_AVG,))
    weights = ChangingScheme(lagging(trained, 0.2), names=names)
    lost = []
    for scheme in (moments, weights):
        why, guard = trained.look(scheme)
        assert why is None
        assert guard.lost_steps > 0.1
        lost.append(guard.lost_steps)
    why, guard = trained.look(Both(moments, weights))
    assert guard.lost_steps == pytest.approx(sum(lost), rel=0.2)
    assert why.startswith(
        f"the weights and moments of a restore would set training back by {guard.lost_steps:.2f} of the 20 steps"
    )


def flipped(tensor):
    signs = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    return torch.where(signs, -tensor, tensor)


def drawn(tensor):
    size = tensor.square().mean().sqrt()
    return size * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("optimizer", sorted(KINDS))
@pytest.mark.parametrize("noise", [flipped, drawn])
@pytest.mark.parametrize("known", [False, True])
def test_moments_replaced_by_noise_of_their_own_size_are_refused(optimizer, noise, known):
    """Whether the optimizer can be tried or not."""
    trained = Trained(KINDS[optimizer], steps=5)
    guard = Guard([OptimizerKind.of(trained.optimizer)] if known else ())
    why = guard(trained.save_context, ChangingScheme(noise, (Role.EXP_AVG,))).reason
    assert "the moment" in why
    assert "times as far from the truth as zeros are" in why


def test_moments_that_are_zeros_are_refused_for_the_steps_that_they_lose_and_not_for_being_far_from_the_truth(
    trained,
):
    why, guard = trained.look(ChangingScheme(torch.zeros_like, (Role.EXP_AVG,)))
    assert re.fullmatch(
        r"the moments of a restore would set training back by [2-9]\.\d\d of the 20 steps between two checkpoints",
        why,
    )
    assert guard.moments
    assert guard.lost_steps == guard.updates.lost_steps > 2


@pytest.mark.parametrize(("steps", "refused"), [(1, True), (100, True), (1000, False), (None, True)])
def test_how_much_of_a_moment_may_be_lost_depends_on_the_steps_between_checkpoints(trained, steps, refused):
    movement = replace(trained.movement, steps=steps) if steps is not None else None
    save_context = SaveContext(state=trained.state, movement=movement)
    guard = Guard([OptimizerKind.of(trained.optimizer)])
    found = guard(save_context, ChangingScheme(torch.zeros_like, (Role.EXP_AVG,)))
    assert (found.reason is not None) == refused
    assert 2 < found.lost_steps < 15


@pytest.mark.parametrize(("budget", "refused"), [(10, False), (100, True)])
def test_checkpoints_that_are_close_together_may_lose_less_each_if_they_are_many(trained, budget, refused):
    """A tenth of a step may be lost by ten restores that are a step apart, not by a hundred."""
    movement = replace(trained.movement, steps=1)
    save_context = SaveContext(state=trained.state, movement=movement, restore_budget=budget)
    guard = Guard([OptimizerKind.of(trained.optimizer)])
    less = ChangingScheme(lambda tensor: 0.98 * tensor, (Role.EXP_AVG,))
    found = guard(save_context, less)
    assert 0.025 < found.lost_steps < 0.25
    assert (found.reason is not None) == refused


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion"])
def test_finer_moments_lose_less(optimizer):
    trained = Trained(KINDS[optimizer], TinyGPT)
    lost = []
    for finer in (False, True):
        why, guard = trained.look(Auto(save_context=trained.save_context, scale=1.0, finer_moments=finer))
        assert why is None
        lost.append(guard.lost_steps)
    assert lost[1] < 0.5 * lost[0]


def test_a_moment_of_zeros_must_stay_zeros(trained):
    name = next(name for name, spec in trained.state.specs.items() if spec.tag.role is Role.EXP_AVG)
    tensors = {**trained.state.tensors, name: torch.zeros_like(trained.state.tensors[name])}
    save_context = SaveContext(state=TrainingState(trained.state.tree, tensors, trained.state.specs))
    why = Guard()(save_context, ChangingScheme(lambda tensor: tensor + 1e-9, names=(name,))).reason
    assert why == f"the moment {name} would be not zeros, as is the truth"


@pytest.mark.parametrize(
    ("factor", "refused"), [(0.25, True), (0.7, True), (0.87, True), (0.95, False), (1.05, False)]
)
def test_second_moments_that_lengthen_updates_are_refused(trained, factor, refused):
    changing = ChangingScheme(lambda tensor: factor * tensor, (Role.EXP_AVG_SQ,))
    why, guard = trained.look(changing)
    assert (why is not None) == refused
    assert why is None or "times as long as it should be, with an error of" in why
    assert guard.updates.length == pytest.approx(factor**-0.5, rel=0.1)


def test_why_updates_were_not_tried_is_told(trained):
    untried = "the optimizers' states are not found in what is saved"
    assert Guard()(trained.save_context, Auto(save_context=trained.save_context)) == Verdict(untried=untried)


# ---- what is looked at is what is stored


@pytest.mark.parametrize(
    "name", [name for name in (*SCHEMES, *BASELINES) if name not in ("lossless", "itmo")]
)
@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
def test_a_scheme_that_was_looked_at_stores_what_it_would_have_stored(trained, name):
    config = SaverConfig(scheme=name)
    reference, digest = None, None
    for _ in range(2):
        save_context = SaveContext(
            state=trained.state, step=30, movement=trained.movement, reference=reference
        )
        fresh, seen = (build(name, config.scheme_options, save_context) for _ in range(2))
        Guard([OptimizerKind.of(trained.optimizer)])(save_context, seen)
        coded = [
            encode_state(trained.state, scheme, step=30, reference=reference, parent=digest)
            for scheme in (fresh, seen)
        ]
        assert write_container(coded[0].checkpoint) == write_container(coded[1].checkpoint)
        reference, digest = dict(coded[0].reference), coded[0].checkpoint.state_digest


# ---- the sample


def weights(**shapes):
    """A state of weights of these shapes, none of which is in memory."""
    tensors = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
    return TrainingState.capture(tensors, lambda path, tensor: Tag(role=Role.WEIGHT, parameter=path[0]))


def gpt2():
    shapes = {"wte": (50257, 768), "wpe": (1024, 768)}
    for layer in range(12):
        of_a_layer = {
            "norm": (768,),
            "qkv": (2304, 768),
            "qkv_bias": (2304,),
            "out": (768, 768),
            "out_bias": (768,),
        }
        of_a_layer |= {"up": (3072, 768), "up_bias": (3072,), "down": (768, 3072), "down_bias": (768,)}
        shapes |= {f"{layer}.{name}": shape for name, shape in of_a_layer.items()}
    return shapes


def test_of_a_large_model_a_matrix_at_least_is_looked_at_and_no_more_than_is_quick():
    shapes = gpt2()
    chosen = sampled_parameters(weights(**shapes))
    assert sum(math.prod(shapes[name]) for name in chosen) <= 1 << 20
    assert any(len(shapes[name]) == 2 for name in chosen)
    assert len({name.split(".")[0] for name in chosen}) > 6  # of all over the model


def test_what_is_wrong_with_every_parameter_of_a_large_model_is_seen_in_a_sample(monkeypatch):
    monkeypatch.setattr("shrinkpoint.quality.guards._MOST_ELEMENTS", 3000)
    trained = Trained(model=TinyGPT)
    assert sum(trained.state.tensors[name].numel() for name in trained.movement.rows) > 30_000
    why, guard = trained.look(ChangingScheme(lambda v: v / 4, (Role.EXP_AVG_SQ,)))
    assert "times as long as it should be" in why
    assert guard.updates.length == pytest.approx(2, abs=0.2)  # not watered down by what was not looked at
    why, _ = trained.look(ChangingScheme(flipped, (Role.EXP_AVG,)))
    assert "times as far from the truth as zeros are" in why
    moved = max(float(rows.max()) for rows in trained.movement.rows.values())
    why, _ = trained.look(ChangingScheme(added(10 * moved), (Role.WEIGHT,)))
    assert "what training has moved it by" in why
