"""Quantizing first and coding later gives the same bytes as coding at once, and values that depend on the last values alone."""

from dataclasses import replace

import pytest
import torch
from support.adopting import OPTIMIZERS, Training
from support.chains import decode_chain

from shrinkpoint.coding.encode import encode_state, stage_state
from shrinkpoint.engine.movement import MovementTracker
from shrinkpoint.optimizers.recognition import recognised
from shrinkpoint.optimizers.updates import OptimizerKind
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.state.averages import confirmed
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import TrainingState


def _snapshot(training: Training) -> TrainingState:
    objects = {
        "model": training.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in training.optimizers],
    }
    describe = describe_training(
        training.model, training.optimizers, model_path=("model",), optimizers_path=("optimizers",)
    )
    state = Snapshotter().take(TrainingState.capture(objects, describe)).wait()
    return recognised(confirmed(state), tuple(map(OptimizerKind.of, training.optimizers)))


def _two_saves(case: str, options: AutoOptions):
    """The first save, which was adopted, and the second one's state and scheme."""
    training = Training(case, average=False).run(3)
    first, tracker = _snapshot(training), MovementTracker()
    base = encode_state(
        first,
        Auto(options=options, save_context=SaveContext(state=first, step=3)),
        step=3,
        reference=None,
        parent=None,
    )
    decoded = decode_chain([base.checkpoint])
    live = TrainingState.capture(
        {"model": training.model.state_dict(), "optimizers": [o.state_dict() for o in training.optimizers]}
    )
    with torch.no_grad():
        for name, value in decoded.state.tensors.items():
            live.tensors[name].copy_(value)
    tracker.note(decoded.state, 3)
    training.run(6)
    state = _snapshot(training)
    context = SaveContext(
        state=state,
        step=6,
        reference=base.reference,
        restored=True,
        adopts=True,
        movement=tracker.since(state, 6),
    )
    return base, state, Auto(options=options, save_context=context, scale=0.5)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_staged_state_is_coded_as_at_once(case):
    base, state, scheme = _two_saves(case, AutoOptions())
    at_once = encode_state(
        state, scheme, step=6, reference=base.reference, parent=base.checkpoint.state_digest
    )
    staged = stage_state(state, scheme, base.reference)
    later = encode_state(
        staged.state,
        scheme,
        step=6,
        reference=base.reference,
        parent=base.checkpoint.state_digest,
        staged=staged,
    )
    assert later.checkpoint.entries == at_once.checkpoint.entries
    assert not later.kept_exactly.keys() & staged.rows.keys()
    restored = decode_chain([base.checkpoint, later.checkpoint]).state.tensors
    assert all(torch.equal(value, restored[name]) for name, value in staged.state.tensors.items())
    assert any(not torch.equal(value, state.tensors[name]) for name, value in restored.items())


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_values_without_the_predecessor_are_the_same(case):
    """As after a save that could not be stored: its successor is a base."""
    base, state, scheme = _two_saves(case, AutoOptions())
    staged = stage_state(state, scheme, base.reference)
    alone = encode_state(staged.state, scheme, step=6, reference=None, parent=None, staged=staged)
    assert alone.checkpoint.kind == "base"
    restored = decode_chain([alone.checkpoint]).state.tensors
    assert all(torch.equal(value, restored[name]) for name, value in staged.state.tensors.items())


def test_values_do_not_depend_on_threads():
    base, state, scheme = _two_saves("adamw", AutoOptions())
    one, many = (
        stage_state(state, replace(scheme), base.reference, threads=threads).state.tensors
        for threads in (1, 7)
    )
    assert all(torch.equal(value, many[name]) for name, value in one.items())
