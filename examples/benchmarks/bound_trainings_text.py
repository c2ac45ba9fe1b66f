"""The bench's trainings on text. Nothing here knows of checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache, partial

import torch
from bound_data import STATES, chains, code_text, english_text, windows
from bound_models_text import (
    CausalConvolutions,
    MaskedModel,
    MixtureGPT,
    RecurrentModel,
    WithAdapters,
    next_loss,
)
from bound_optimizers import Lion, Muon
from bound_training import Kind, Training, generator, mean_loss, scheduled
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

__all__ = ["TEXT"]

_BATCH = 16
_PROBE, _TRUTH = 3, 32
"""Held-out batches of the probe, and of the truth."""
_PRETRAINING = 300
"""Steps of the base of fine-tuning and of adapters."""


def _warm_cosine(steps: int, warmup: int, end: float) -> Callable[[int], float]:
    """Linear warm-up, then a cosine to a share `end` of the peak."""

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2

    return rate


def _shape(quick: bool) -> GPTConfig:
    if quick:
        return GPTConfig(width=32, layers=2, heads=2, block=32)
    return GPTConfig(width=112, layers=3, heads=4, block=64)


def _held_out(text: Tensor, length: int, quick: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Batches of the probe and of the truth, from one half of a held-out text each."""
    half, truth = len(text) // 2, 4 if quick else _TRUTH
    probe = windows(text[:half], _PROBE * _BATCH, length, generator(0, 1))
    return list(probe.split(_BATCH)), list(
        windows(text[half:], truth * _BATCH, length, generator(0, 2)).split(_BATCH)
    )


def _on_text(
    model: nn.Module, seed: int, quick: bool, texts: tuple[Tensor, Tensor], length: int, batch: int = _BATCH
) -> Training:
    """Next-byte prediction without an optimizer yet."""
    loss = partial(next_loss, model)
    probe, truth = _held_out(texts[1], length + 1, quick)

    def train_loss(index: int) -> Tensor:
        return loss(windows(texts[0], batch, length + 1, generator(seed, index)))

    return Training(
        model=model,
        optimizers=[],
        train_loss=train_loss,
        probe=mean_loss(model, loss, probe),
        final=mean_loss(model, loss, truth),
        clip=1.0,
    )


def _gpt(seed: int, quick: bool) -> Training:
    torch.manual_seed(seed)
    shape = _shape(quick)
    return _on_text(GPT(shape), seed, quick, code_text(), shape.block)


def _adamw(model: nn.Module, lr: float, beta2: float = 0.95) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, beta2))


def _plain_gpt(end: float, seed: int, kind: Kind, quick: bool) -> Training:
    training, steps = _gpt(seed, quick), kind.steps(quick)
    optimizer = _adamw(training.model, 2e-3)
    training.optimizers = [optimizer]
    training.scheduler = scheduled(optimizer, _warm_cosine(steps, steps // 10, end))
    return training


def _lion_gpt(seed: int, kind: Kind, quick: bool) -> Training:
    training, steps = _gpt(seed, quick), kind.steps(quick)
    optimizer = Lion(training.model.parameters(), lr=3e-4, weight_decay=0.1)
    training.optimizers = [optimizer]
    training.scheduler = scheduled(optimizer, _warm_cosine(steps, steps // 10, 0.1))
    return training


def _warm_restarts(seed: int, kind: Kind, quick: bool) -> Training:
    """The rate falls from one checkpoint to the next and rises right after each."""
    training, every = _gpt(seed, quick), kind.interval(quick)
    optimizer = _adamw(training.model, 2e-3)

    def rate(step: int) -> float:
        warm = min(1.0, (step + 1) / every)  # over the first interval: a start at the peak would be rough
        return warm * (0.01 + 0.99 * (1 + math.cos(math.pi * (step % every + 1) / every)) / 2)

    training.optimizers, training.scheduler = [optimizer], scheduled(optimizer, rate)
    return training


def _changed_at_resume(seed: int, kind: Kind, quick: bool) -> Training:
    """The rate falls to a third from one checkpoint to the next, and whoever resumes trebles it by hand."""
    training, every = _gpt(seed, quick), kind.interval(quick)
    optimizer = _adamw(training.model, 2e-3)

    def treble() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 3

    training.optimizers = [optimizer]
    training.scheduler = ExponentialLR(optimizer, gamma=3 ** (-1 / every))
    training.after_restore = treble
    return training


def _convolutions(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    model = CausalConvolutions(24, 2) if quick else CausalConvolutions(120, 7)
    training, steps = _on_text(model, seed, quick, code_text(), 64), kind.steps(quick)
    optimizer = _adamw(model, 2e-3, 0.999)
    training.optimizers = [optimizer]
    training.scheduler = scheduled(optimizer, _warm_cosine(steps, steps // 10, 0.1))
    return training


def _recurrent(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    model = RecurrentModel(32 if quick else 192)
    training = _on_text(model, seed, quick, code_text(), 64, batch=32)
    training.optimizers = [torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.99, momentum=0.0)]
    training.clip = 1.0
    return training


def _experts(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    shape, steps = _shape(quick), kind.steps(quick)
    shape = shape if quick else GPTConfig(width=96, layers=2, heads=4, block=64)
    model = MixtureGPT(GPT(shape), shape.width, 4)
    training = _on_text(model, seed, quick, code_text(), shape.block)
    matrices = model.matrices()
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    muon, adamw = Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95))
    rate = _warm_cosine(steps, steps // 10, 0.1)
    muon_rate = scheduled(muon, rate)
    training.optimizers = [muon, adamw]
    training.scheduler = scheduled(adamw, rate)
    training.stateful, training.after_step = {"muon_scheduler": muon_rate}, muon_rate.step
    return training


def _masked(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    length, count, steps = 24, 32, kind.steps(quick)
    model = MaskedModel(STATES, 32, 2, length) if quick else MaskedModel(STATES, 112, 3, length)

    def batch(drawn: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = chains(count, length, drawn)
        return tokens, torch.rand(tokens.shape, generator=drawn) < 0.15

    optimizer = _adamw(model, 2e-3, 0.98)
    return Training(
        model=model,
        optimizers=[optimizer],
        train_loss=lambda i: model.loss(batch(generator(seed, i))),
        probe=mean_loss(model, model.loss, [batch(generator(0, 10 + i)) for i in range(_PROBE)]),
        final=mean_loss(
            model, model.loss, [batch(generator(0, 100 + i)) for i in range(4 if quick else _TRUTH)]
        ),
        scheduler=scheduled(optimizer, _warm_cosine(steps, steps // 10, 0.1)),
        clip=1.0,
    )


# --- from a pretrained base ---------------------------------------------------------------------------------


@cache
def _pretrained(quick: bool) -> GPT:
    """A GPT that has learnt Python's source text; the same for all seeds."""
    training = _gpt(20_250_101, quick)
    steps = 8 if quick else _PRETRAINING
    optimizer = _adamw(training.model, 2e-3)
    training.optimizers = [optimizer]
    training.scheduler = scheduled(optimizer, _warm_cosine(steps, steps // 10, 0.1))
    for index in range(steps):
        training.step(index)
    training.model.zero_grad()
    return training.model


def _from_base(seed: int, quick: bool, adapt: Callable[[GPT], nn.Module]) -> Training:
    """Next-byte prediction of English by a model that knows Python; how well it still does is an ability."""
    base = copy.deepcopy(_pretrained(quick))
    torch.manual_seed(seed)  # after the pretraining, which draws numbers in the first run of a process only
    length = _shape(quick).block
    training = _on_text(adapt(base), seed, quick, english_text(), length)
    truth = _held_out(code_text()[1], length + 1, quick)[1]
    training.abilities = {"old domain": mean_loss(training.model, partial(next_loss, training.model), truth)}
    return training


def _fine_tuning(seed: int, kind: Kind, quick: bool) -> Training:
    training = _from_base(seed, quick, lambda base: base)
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=2e-5, betas=(0.9, 0.999), weight_decay=0.01)
    training.optimizers = [optimizer]
    training.scheduler = scheduled(optimizer, _warm_cosine(kind.steps(quick), kind.steps(quick) // 10, 0.1))
    return training


def _adapters(seed: int, kind: Kind, quick: bool) -> Training:
    training = _from_base(seed, quick, lambda base: WithAdapters(base, 8))
    model = training.model
    assert isinstance(model, WithAdapters)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, betas=(0.9, 0.999), weight_decay=0.0)
    training.optimizers = [optimizer]
    training.scheduler = scheduled(optimizer, _warm_cosine(kind.steps(quick), kind.steps(quick) // 10, 0.1))
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    training.originals = {n: value.clone() for n, value in model.state_dict().items() if n in frozen}
    adapted = training.abilities["old domain"]

    def alone() -> float:
        model.switch(False)
        try:
            return adapted()
        finally:
            model.switch(True)

    training.abilities = {"base alone, old domain": alone}
    return training


TEXT = (
    Kind(
        name="gpt",
        title="GPT, AdamW (0.9, 0.95), cosine to a tenth",
        build=partial(_plain_gpt, 0.1),
        every=36,
    ),
    Kind(
        name="gpt-zero",
        title="GPT, AdamW, cosine to zero",
        build=partial(_plain_gpt, 0.0),
        every=36,
        late=True,
    ),
    Kind(
        name="warm-restarts",
        title="GPT, AdamW, the rate rises right after each checkpoint",
        build=_warm_restarts,
        every=36,
        only_spread=True,
    ),
    Kind(
        name="changed-schedule",
        title="GPT, AdamW, three times the rate at every resume",
        build=_changed_at_resume,
        every=36,
        only_spread=True,
    ),
    Kind(name="gpt-lion", title="GPT, Lion", build=_lion_gpt, every=36),
    Kind(name="moe-muon", title="Mixture of experts, Muon and AdamW", build=_experts, every=32),
    Kind(name="conv", title="Causal convolutions, AdamW", build=_convolutions, every=32),
    Kind(name="lstm", title="LSTM, RMSprop, clipped", build=_recurrent, every=36, late=True),
    Kind(name="bert", title="Masked language model, AdamW", build=_masked, every=36),
    Kind(name="fine-tuning", title="Fine-tuning, AdamW at 2e-5", build=_fine_tuning, every=24),
    Kind(name="lora", title="LoRA on a frozen base, AdamW", build=_adapters, every=24),
)
