"""What plans and guards see of a rank's state: of long tensors it has some blocks, which count as parameters of their own."""

import pytest
import torch
from support.optimizers import KINDS
from support.parts import blocks_in, part_of
from support.training import TinyMLP, capture, train

from shrinkpoint.optimizers.updates import OptimizerKind, Updates, compare_updates, moments_of_direction
from shrinkpoint.schemes.auto.optimizer_memory import epsilons, memories
from shrinkpoint.sharded.trees import with_blocks, without_tensors
from shrinkpoint.state.training import Role, TrainingState


def trained(make):
    torch.manual_seed(0)
    model = TinyMLP(32)
    optimizer = make(model)
    train(model, optimizer, range(30))
    return optimizer, capture(model, optimizer)


def is_odd(number):
    return number % 2 == 1


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_an_optimizer_is_stepped_on_blocks_as_on_whole_tensors(name):
    optimizer, state = trained(KINDS[name])
    part, kinds = part_of(state, is_odd), [OptimizerKind.of(optimizer)]
    moments = blocks_in(part, Role.EXP_AVG)
    assert moments
    found = moments_of_direction(part, kinds)
    assert moments <= found if name == "Lion" else not found
    noisy = {n: 1.2 * tensor if n in moments else tensor for n, tensor in part.tensors.items()}
    for parameters in (None, {part.specs[n].tag.parameter for n in moments}):
        compared = compare_updates(
            part, TrainingState(part.tree, noisy, part.specs), kinds, parameters=parameters
        )
        assert isinstance(compared, Updates), compared
        assert compared.error > 0.02


def test_settings_of_the_optimizer_are_those_of_its_blocks():
    options = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6}
    _, state = trained(lambda model: torch.optim.AdamW(model.parameters(), **options))
    part = part_of(state, is_odd)
    firsts, seconds = (blocks_in(part, role) for role in (Role.EXP_AVG, Role.EXP_AVG_SQ))
    assert firsts
    assert all(memories(part)[name] == pytest.approx(4) for name in firsts)
    assert all(epsilons(part)[name] == 1e-6 for name in seconds)


def test_a_count_of_steps_that_another_rank_has_is_that_of_another_parameter():
    _, state = trained(KINDS["AdamW"])
    part = part_of(state, is_odd)
    steps = {name for name in part.tensors if name.endswith("/step")}
    first = min(steps)
    for kept in ({first}, set()):
        tensors = {name: t for name, t in part.tensors.items() if name not in steps or name in kept}
        specs = {name: part.specs[name] for name in tensors}
        tree = without_tensors(with_blocks(state.tree, specs), tensors)
        entries = TrainingState(tree, tensors, specs).to_object()["optimizers"][0]["state"]
        blocks = [entry for index, entry in entries.items() if isinstance(index, str)]
        assert bool(blocks) == bool(kept)
        for entry in blocks:
            assert entry.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert entry["step"] is tensors[first]


def test_a_tree_without_blocks_stays_as_it_is():
    _, state = trained(KINDS["AdamW"])
    assert with_blocks(state.tree, state.specs) is state.tree
