"""A loop with accelerate says what a resume cannot restore of accelerate's own objects."""

import warnings

import pytest
import torch
from torch import nn

import shrinkpoint
from shrinkpoint.errors import ConfigError, ShrinkpointWarning

pytest.importorskip("torchdata")
accelerate = pytest.importorskip("accelerate")


def forget() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def shared_state():
    """All Accelerators of a process have one state, in which a Trainer of another test may have left its loader."""
    forget()
    yield
    forget()


@pytest.mark.parametrize(("every", "told"), [(2, True), (4, False)])
def test_a_save_within_an_accumulation_is_told(tmp_path, every, told):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(5, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    options = {"every": every, "scheme": "lossless", "advanced": shrinkpoint.Advanced(busy="wait")}
    checkpointer = shrinkpoint.Checkpointer(tmp_path, accelerator.unwrap_model(model), optimizer, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShrinkpointWarning)
        for step in range(8):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 5)).sum())
                optimizer.step()
                optimizer.zero_grad()
            checkpointer.step(step + 1)
        checkpointer.close()
    assert ["sync_gradients is True" in str(one.message) for one in caught] == [True] * told


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_with_a_state_that_was_prepared_is_refused(tmp_path, shuffle):
    settings = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(20.0), 4, shuffle=shuffle))
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(ConfigError, match="give torchdata's StatefulDataLoader, not prepared"):
        shrinkpoint.Checkpointer(tmp_path, model, optimizer, loader=loader)
