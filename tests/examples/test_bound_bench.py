"""The bench of the bound: its trainings in their quick form."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
NAMES = (
    "gpt", "gpt-zero", "warm-restarts", "changed-schedule", "gpt-lion", "moe-muon", "conv", "lstm", "bert", "fine-tuning",
    "lora", "vit", "resnet", "diffusion", "diffusion-average", "vae-lion", "recommender", "recommender-adagrad",
    "recommender-sparse", "matrix-factorization", "flow", "forecasting", "graph", "autoencoder",
    "autoencoder-short",
)  # fmt: skip
MORE = (
    "clip", "dqn", "dqn-difference", "gan", "pinn", "pinn-lbfgs", "gpt-bf16", "sines", "poisson", "borehole",
    "sines-fit", "sines-sound", "sines-deep", "bells-fit", "gru-ctc", "lstm-ctc", "gru-adding", "lstm-adding",
    "gpt-nadam", "vae-nadam", "series-nadam", "mlp-nadam", "binary", "ternary", "binary-sgd", "binary-mlp",
)  # fmt: skip
"""Those that run only if they are asked for."""
STATES = (
    "state-adam-of-8-bit-codes",
    "state-adamw-an-ema-of-the-weights",
    "state-adamw-a-replay-buffer-that-grows",
)
"""Of those with each kind of optimizer state, the ones that keep more than an optimizer of torch does."""
FEW = ("lora", "moe-muon", "diffusion-average")
"""Frozen tensors and abilities; two optimizers and schedulers; an object with a state, and a loss beside the final one."""


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """The folders on the path, as they are for the script that lies there."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    monkeypatch.syspath_prepend(str(BENCHMARKS))


# --- trainings ----------------------------------------------------------------------------------------------


def lossless_is_as_undisturbed(name: str) -> None:
    from bound_run import Setting, Task, measure

    task = Task(name=name, seed=1, part="spread", quick=True, setting=Setting(scheme="lossless"))
    undisturbed, restored = measure(replace(task, part="plain")), measure(task)
    for what in ("final", "probe", "abilities", "also"):
        assert restored[what] == undisturbed[what], what
    assert restored["last"] == undisturbed["final"]
    assert (restored["frozen_changes"], restored["exact"], restored["cost_high"]) == (0, 10, 0)
    assert restored["raw_bytes"] > restored["bytes"]
    json.dumps(restored, allow_nan=False)


@pytest.mark.parametrize("name", FEW)
def test_lossless_restores_change_no_digit(name):
    lossless_is_as_undisturbed(name)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in (*NAMES, *MORE, *STATES) if name not in FEW])
def test_lossless_restores_change_no_digit_of_any_training(name):
    lossless_is_as_undisturbed(name)
