"""Layers that bitsandbytes has quantized, between layers that Composer trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("composer")

from support.composer_callbacks import Make, first
from support.composer_models import Crash, Setup, Tiny, assert_continues, fit

from shrinkpoint.errors import CannotRepresentError

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


SETUP = Setup(width=64, duration="2ep", eval_interval=None)


def quantized(layer: Callable[..., torch.nn.Module], **options: Any) -> type[Tiny]:
    class Quantized(Tiny):
        def __init__(self, setup: Setup) -> None:
            super().__init__(setup)
            self.net.insert(3, layer(setup.width, setup.width, **options).requires_grad_(False))
            self.net.to("cpu")

    return Quantized


def test_quantized_layers_are_resumed_bit_by_bit(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = quantized(bnb.nn.Linear4bit, compute_dtype=torch.float32, quant_type="nf4")
    monkeypatch.setattr("support.composer_models.Tiny", model)
    whole = fit(setup=SETUP)
    fit(saving(), Crash(7), setup=SETUP)
    rest = fit(saving(), setup=SETUP, seed=9)
    assert first(rest) == 5
    assert_continues(whole, rest)


def test_layers_that_composer_cannot_read_are_refused_at_the_first_step(
    saving: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = quantized(bnb.nn.Linear8bitLt, has_fp16_weights=False)
    monkeypatch.setattr("support.composer_models.Tiny", model)
    with pytest.raises(CannotRepresentError, match="no attribute 'SCB'"):
        fit(saving(), Crash(2), setup=SETUP)
