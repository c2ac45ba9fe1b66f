import pytest
import torch
from support.containers import identical
from support.training import OPTIMIZERS, TinyConvNet, TinyGPT, train
from torch import nn

from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.state.rng import capture_rng


def everything(model):
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "grads": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "modes": [module.training for module in model.modules()],
        "places": [p.data_ptr() for p in model.parameters()],
        "rng": capture_rng(),
    }


@pytest.mark.parametrize("model_class", [TinyGPT, TinyConvNet])
@pytest.mark.parametrize("fails", [False, True])
def test_training_does_not_notice(model_class, fails):
    model = model_class()
    train(model, OPTIMIZERS["AdamW"](model), range(2))
    next(iter(model.children())).eval()
    others = {name: torch.randn_like(p) for name, p in model.named_parameters() if p.dim() >= 2}
    before = everything(model)

    def evaluate():
        with swapped_weights(model, others):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            assert all(torch.equal(model.get_parameter(name), value) for name, value in others.items())
            model.train()  # an evaluation may do what it likes
            model.loss(5)
            torch.rand(3)
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            evaluate()
    else:
        evaluate()
    assert torch.is_grad_enabled()
    assert identical(everything(model), before)


def test_gradients_of_a_step_under_way_are_not_disturbed():
    model = TinyGPT()
    model.loss(0).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = model.loss(0)
    with swapped_weights(model, {"up.weight": torch.zeros_like(model.up.weight)}):
        model.loss(1)
    loss.backward()
    assert identical([p.grad for p in model.parameters()], expected)


def test_tied_weights_stay_tied():
    model = TinyGPT()
    with swapped_weights(model, {"wte.weight": torch.ones_like(model.wte.weight)}):
        assert model.head.weight is model.wte.weight
        assert bool((model.head.weight == 1).all())
    assert model.head.weight is model.wte.weight


def test_weights_of_another_precision_are_converted():
    model = nn.Linear(3, 3).bfloat16()
    before = model.weight.clone()
    with swapped_weights(model, {"weight": torch.ones(3, 3)}):
        assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, before)


def test_a_weight_of_another_shape_changes_nothing():
    model = nn.Linear(3, 3)
    before = everything(model)
    with (
        pytest.raises(RuntimeError),
        swapped_weights(model, {"bias": torch.ones(3), "weight": torch.ones(4, 4)}),
    ):
        pass
    assert identical(everything(model), before)
