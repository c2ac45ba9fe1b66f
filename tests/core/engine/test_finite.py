"""A training that diverges: what is marked, kept, told, and how one goes back."""

import json
import warnings

import pytest
import torch
from support.options import grouped
from support.training import OPTIMIZERS, TinyMLP, train
from torch import nn
from typer.testing import CliRunner

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.cli.app import app
from shrinkpoint.engine.reporting import not_finite
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import Role, Tag, TrainingState
from shrinkpoint.store.run import RunStore

pytestmark = pytest.mark.filterwarnings("error::shrinkpoint.errors.ShrinkpointWarning")

NAN, INF = float("nan"), float("inf")


def make(url, **options):
    torch.manual_seed(0)
    model = TinyMLP()
    optimizer = OPTIMIZERS["AdamW"](model)
    options = {"scheme": "lossless", "keep_last": 3, "every": 1, **options}
    return model, optimizer, Checkpointer(str(url), model, optimizer, **grouped(**options))


def diverging(url, *, healthy, diverged, **options):
    """A run whose weights are NaN after so many healthy saves."""
    model, optimizer, checkpointer = make(url, **options)
    messages = []
    for step in range(1, healthy + diverged + 1):
        train(model, optimizer, [step])
        if step > healthy:
            with torch.no_grad():
                model.inner.weight.fill_(NAN)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ShrinkpointWarning)
            checkpointer.step(step)
            checkpointer.flush()
        messages += [str(warning.message) for warning in caught]
    checkpointer.close()
    return messages


def steps(url):
    return sorted(manifest.step for manifest in RunStore(str(url)).manifests())


def test_checkpoints_of_a_diverged_training_displace_no_healthy_one(tmp_path):
    diverging(tmp_path, healthy=4, diverged=6)
    assert steps(tmp_path) == [2, 3, 4, 8, 9, 10]


def test_that_a_training_has_diverged_is_told_once(tmp_path):
    [message] = diverging(tmp_path, healthy=2, diverged=3)
    assert "step 3 is not finite: NaN or infinity in model/inner.weight" in message


def test_resuming_what_diverged_names_the_last_finite_checkpoint(tmp_path):
    diverging(tmp_path, healthy=4, diverged=5)
    model, _, checkpointer = make(tmp_path)
    with pytest.warns(ShrinkpointWarning, match=r"step 9 .* is not finite: .*of step 4.*resume\(step=4\)"):
        assert checkpointer.resume() == 9
    checkpointer.close()
    model, optimizer, checkpointer = make(tmp_path)
    assert checkpointer.resume(step=4) == 4
    assert not_finite(TrainingState.capture(model.state_dict())) is None
    train(model, optimizer, [4])
    checkpointer.step(5)
    checkpointer.flush()
    checkpointer.close()
    assert make(tmp_path)[2].resume() == 5


def test_ls_and_show_mark_what_is_not_finite(tmp_path):
    diverging(tmp_path, healthy=1, diverged=1)
    listed = CliRunner().invoke(app, ["ls", str(tmp_path)], env={"COLUMNS": "250"})
    lines = {line.split()[1]: line for line in listed.output.splitlines()[1:3]}
    assert "%" not in lines["2"]
    marked = [line for line in listed.output.splitlines() if "NOT FINITE" in line]
    assert [
        line.startswith("step 2: NOT FINITE: NaN or infinity in model/inner.weight") for line in marked
    ] == [True]
    noted = json.loads(CliRunner().invoke(app, ["ls", str(tmp_path), "--json"]).output)["checkpoints"]
    assert [bool(checkpoint["not_finite"]) for checkpoint in noted] == [True, False]
    shown = CliRunner().invoke(app, ["show", str(tmp_path)], env={"COLUMNS": "250"})
    assert "not finite" in shown.output


def test_prune_keeps_the_newest_finite_checkpoint(tmp_path):
    diverging(tmp_path, healthy=2, diverged=3, keep_last=None)
    pruned = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep-last", "1", "--yes"])
    assert pruned.exit_code == 0, pruned.output
    assert steps(tmp_path) == [2, 5]


def test_a_held_out_loss_that_is_nan_marks_a_checkpoint(tmp_path):
    model, optimizer, checkpointer = make(tmp_path, scheme="auto", evaluate=lambda: NAN)
    train(model, optimizer, [0])
    with pytest.warns(ShrinkpointWarning, match="the held-out loss is nan"):
        checkpointer.save(1, wait=True)
    checkpointer.close()
    [report] = checkpointer.reports()
    assert report.not_finite == "the held-out loss is nan"


@pytest.mark.parametrize(
    ("role", "parameter", "value", "bad"),
    [
        (Role.WEIGHT, "w", INF, True),
        (Role.EXP_AVG, "w", NAN, True),
        (Role.EXP_AVG_SQ, "w", INF, True),
        (Role.BUFFER, "mask", -INF, False),
        (Role.BUFFER, "running_var", NAN, True),
        (Role.OTHER, "w", NAN, True),
        (Role.OTHER, None, NAN, False),  # a callback's best score, say
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64]
)
def test_what_counts_as_not_finite(role, parameter, value, bad, dtype):
    state = {"ok": torch.ones(3), "x": torch.tensor([1.0, value, 2.0]).to(dtype), "none": torch.empty(0)}
    tags = {"ok": Tag(role=Role.WEIGHT), "x": Tag(role=role, parameter=parameter), "none": Tag()}
    found = not_finite(TrainingState.capture(state, lambda path, tensor: tags[path[0]]))
    assert found == ("NaN or infinity in x" if bad else None)


def test_without_roles_nan_counts_and_infinity_does_not():
    state = {"a": torch.tensor([NAN]), "b": torch.tensor([INF]), "c": torch.arange(3)}
    assert not_finite(TrainingState.capture(state)) == "NaN or infinity in a"


def test_many_tensors_are_told_by_their_number():
    state = {str(index): torch.tensor([NAN]) for index in range(9)}
    assert not_finite(TrainingState.capture(state)) == "NaN or infinity in 0, 1, 2 and 6 more tensors"


def test_a_parameter_that_is_not_trained_may_hold_a_mask():
    model, mask = nn.Linear(4, 4), nn.Parameter(torch.full((4, 4), -INF).triu(1), requires_grad=False)
    model.mask = mask
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
    assert not_finite(TrainingState.capture(state, describe)) is None
    mask.data[0, 0] = NAN
    assert not_finite(TrainingState.capture(state, describe)) == "NaN or infinity in model/mask"
