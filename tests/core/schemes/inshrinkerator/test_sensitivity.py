"""The gradient average on the CPU, its hand-over, and the logic around asynchronous copies."""

import math
import threading
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.schemes.inshrinkerator.sensitivity import (
    GradientEMA,
    magnitude_score,
    sensitivity_score,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(
    st.integers(0, 8),
    st.floats(0, 0.99),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (0,), (3,), (2, 1, 4)]),
)
def test_the_recurrence(updates: int, beta: float, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ema = GradientEMA(beta)
    expected = torch.zeros(shape, dtype=torch.float64)
    for seed in range(updates):
        gradient = noise(*shape, seed=seed).to(dtype)
        ema.update({"w": gradient})
        expected = beta * expected + (1 - beta) * gradient.double()
    result = ema.result()
    assert list(result) == (["w"] if updates else [])
    for average in result.values():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_skipped_whole(bad: float) -> None:
    ema = GradientEMA(beta=0.5)
    ema.update({"a": torch.ones(2), "b": torch.ones(2)})
    ema.update({"a": torch.ones(2), "b": torch.tensor([1.0, bad])})
    assert ema.non_finite == 1
    assert {name: average.tolist() for name, average in ema.result().items()} == {
        "a": [0.5, 0.5],
        "b": [0.5, 0.5],
    }


def test_a_missing_gradient_is_zero() -> None:
    ema = GradientEMA(beta=0.5)
    ema.update({"a": torch.ones(1), "b": torch.ones(1)})
    ema.update({"b": torch.ones(1)})
    assert ema.result()["a"].item() == 0.25
    assert ema.result()["b"].item() == 0.75


def test_sparse_and_transposed_gradients() -> None:
    ema = GradientEMA(beta=0.0)
    dense = noise(4, 3)
    ema.update({"s": dense.to_sparse(), "t": dense.t()})
    assert torch.equal(ema.result()["s"], dense)
    assert torch.equal(ema.result()["t"], dense.t())


def test_reset_hands_the_average_over() -> None:
    ema = GradientEMA(beta=0.0)
    ema.update({"w": torch.ones(2)})
    handed = ema.result()
    ema.reset()
    assert ema.result() == {}
    ema.update({"w": torch.full((2,), 5.0)})
    assert handed["w"].tolist() == [1.0, 1.0]


class CopyUnderWay:
    """Stands for a CUDA event: complete when the test says so."""

    def __init__(self) -> None:
        self.complete = threading.Event()

    def synchronize(self) -> None:
        assert self.complete.wait(60)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> tuple[GradientEMA, list[CopyUnderWay]]:
    """An average whose copies take until the test completes them."""
    ema, events = GradientEMA(beta=0.5), []

    def start(
        grads: Mapping[str, torch.Tensor], slot: object
    ) -> tuple[dict[str, torch.Tensor], list[CopyUnderWay]]:
        events.append(CopyUnderWay())
        return {name: grad.clone() for name, grad in grads.items()}, [events[-1]]

    monkeypatch.setattr(ema, "_start_copies", start)
    return ema, events


def test_copies_are_folded_in_order_and_a_third_is_dropped(
    copying: tuple[GradientEMA, list[CopyUnderWay]],
) -> None:
    ema, events = copying
    for value in (1.0, 2.0, 100.0):
        ema._enqueue({"w": torch.tensor([value])})
    assert ema.dropped == 1
    assert len(events) == 2
    for event in events:
        event.complete.set()
    assert ema.result()["w"].item() == 0.5 * (0.5 * 1.0) + 0.5 * 2.0
    ema._enqueue({"w": torch.tensor([4.0])})
    events[-1].complete.set()
    assert ema.result()["w"].item() == 0.5 * 1.25 + 0.5 * 4.0


def test_an_error_beside_the_training_surfaces(copying: tuple[GradientEMA, list[CopyUnderWay]]) -> None:
    ema, events = copying
    ema._enqueue({"w": torch.ones(2)})
    ema._enqueue({"w": torch.ones(3)})
    for event in events:
        event.complete.set()
    with pytest.raises(RuntimeError, match="size"):
        ema.result()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu() -> None:
    on_device, on_host = GradientEMA(), GradientEMA()
    for seed in range(6):
        gradient = noise(512, 512, seed=seed)
        reference = gradient.cuda()
        on_device.update({"w": reference})
        on_host.update({"w": gradient})
        reference.zero_()
        on_device.result()  # so that no update is dropped
    assert on_device.dropped == 0
    assert torch.equal(on_device.result()["w"], on_host.result()["w"])


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from([(), (0,), (4, 3)]))
def test_scores(weight_dtype: torch.dtype, gradient_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight, gradient = noise(*shape).to(weight_dtype), noise(*shape, seed=1).to(gradient_dtype)
    kept = weight.clone()
    magnitude, sensitivity = magnitude_score(weight), sensitivity_score(weight, gradient)
    assert magnitude.dtype == sensitivity.dtype == torch.float32
    assert torch.equal(magnitude, weight.float().abs())
    assert torch.equal(sensitivity, (weight.float() * gradient.float()).abs())
    assert torch.equal(weight, kept)
