"""The bench's trainings on text. Nothing here knows of checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.optim import AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from trainings.base import PROBE, Kind, Run, Training, mean_loss, on_drawn, training
from trainings.base import generator as numbers_of
from trainings.data import STATES, VOCABULARY, chains, code_text, english_text, windows
from trainings.optimizers import Lion, Muon
from trainings.parts import attention, decayed, warm_cosine

_BATCH = 16
_PRETRAINING = 300
"""Steps of the base of fine-tuning and of adapters."""


# --- models -------------------------------------------------------------------------------------------------


def next_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of every token but the first, from those before it."""
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class CausalConvolutions(nn.Module):
    """Residual blocks of causal dilated convolutions, as in ByteNet (arXiv 1610.10099)."""

    def __init__(self, width: int, blocks: int, dilations: tuple[int, ...] = (1, 2, 4, 8)) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, 3, dilation=dilations[i % len(dilations)]) for i in range(blocks)
        )
        self.mixers = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks + 1))
        self.head = nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.token.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for conv, mixer, norm in zip(self.convs, self.mixers, self.norms[:-1], strict=True):
            # padded on the left alone: no place sees later bytes
            inner = conv(F.pad(norm(x).transpose(1, 2), (2 * conv.dilation[0], 0)))
            x = x + mixer(F.gelu(inner, approximate="tanh")).transpose(1, 2)
        return self.head(self.norms[-1](x))


class _Recurrent(nn.Module):
    """An LSTM that predicts the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width // 2)
        self.cells = nn.LSTM(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.token(tokens))[0])


class _Masked(nn.Module):
    """A transformer that looks both ways and names masked tokens; one more symbol stands for a mask."""

    def __init__(self, symbols: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(symbols + 1, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.layers = nn.ModuleList(attention(width, 4 * width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        nn.init.normal_(self.token.weight, std=0.1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of the masked tokens, of tokens and which are masked."""
        tokens, masked = batch
        x = self.token(tokens.masked_fill(masked, self.token.num_embeddings - 1)) + self.position
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x))[masked], tokens[masked])


class _Experts(nn.Module):
    """A block's feed-forward layers as a mixture: every token goes to its best two experts of some."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.inner = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.outer = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        share = self.router(flat).softmax(-1)
        best, taken = share.topk(2, -1)
        gate = torch.zeros_like(share).scatter(1, taken, best / best.sum(-1, keepdim=True))
        # all experts see all tokens, and the gate drops most: no slower at this size than to sort the tokens
        hidden = F.gelu(torch.einsum("td,edh->eth", flat, self.inner), approximate="tanh")
        return torch.einsum("eth,ehd,te->td", hidden, self.outer, gate).view_as(x)


class _MixtureGPT(nn.Module):
    """The demo's GPT whose feed-forward layers are mixtures of experts."""

    def __init__(self, gpt: GPT, width: int, experts: int) -> None:
        super().__init__()
        self.gpt = gpt
        for block in self.gpt.blocks:
            block.mlp_in, block.mlp_out = _Experts(width, experts), nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)


class _Adapted(nn.Module):
    """A frozen layer beside a product of two narrow matrices, the second of which begins at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return out + 2.0 * F.linear(F.linear(x, self.down), self.up) if self.active else out


class _WithAdapters(nn.Module):
    """A frozen GPT with low-rank adapters at all layers of its blocks (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: GPT, rank: int) -> None:
        super().__init__()
        base.requires_grad_(False)
        for block in base.blocks:
            for name in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
                setattr(block, name, _Adapted(getattr(block, name), rank))
        self.gpt = base

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)

    def switch(self, active: bool) -> None:
        """Let the adapters count, or not."""
        for part in self.modules():
            if isinstance(part, _Adapted):
                part.active = active


# --- from scratch -------------------------------------------------------------------------------------------


def _shape(run: Run, width: int = 112, layers: int = 3, block: int = 64) -> GPTConfig:
    quick = GPTConfig(width=32, layers=2, heads=2, block=32)
    return run.size(quick, GPTConfig(width=width, layers=layers, heads=4, block=block))


def _held_out(
    run: Run, text: Tensor, length: int, truth: int = 32
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Batches of the probe and of the truth, from one half of a held-out text each."""
    half, count = len(text) // 2, run.size(4, truth)
    probe = windows(text[:half], PROBE * _BATCH, length, numbers_of(0, 1))
    rest = windows(text[half:], count * _BATCH, length, numbers_of(0, 2))
    return probe.split(_BATCH), rest.split(_BATCH)


def _on_text(
    model: nn.Module, run: Run, *optimizers: Optimizer, texts: tuple[Tensor, Tensor] | None = None,
    length: int = 64, batch: int = _BATCH, end: float | None = 0.1, truth: int = 32,
) -> Training:  # fmt: skip
    """Next-byte prediction; the rate ends at a share `end` of its peak after a warm-up, or stays."""
    train, held = texts or code_text()

    def draw(drawn: torch.Generator) -> Tensor:
        return windows(train, batch, length + 1, drawn)

    loss, batches = partial(next_loss, model), _held_out(run, held, length + 1, truth)
    rate = None if end is None else warm_cosine(run.steps, run.steps // 10, end)
    return training(run, model, loss, draw, batches, *optimizers, rate=rate, clip=1.0)


def _adamw(model: nn.Module, lr: float = 2e-3, beta2: float = 0.95) -> AdamW:
    return AdamW(decayed(model, 0.1), lr=lr, betas=(0.9, beta2))


def _gpt(run: Run, end: float | None = 0.1, optimizer: Callable[[GPT], Optimizer] = _adamw) -> Training:
    shape = _shape(run)
    model = GPT(shape)
    return _on_text(model, run, optimizer(model), length=shape.block, end=end)


def _lion_gpt(run: Run) -> Training:
    return _gpt(run, optimizer=lambda model: Lion(model.parameters(), lr=3e-4, weight_decay=0.1))


def _nadam_gpt(run: Run) -> Training:
    shape = _shape(run, 96, 2)
    model = GPT(shape)
    nadam = NAdam(model.parameters(), lr=2e-3)
    return _on_text(model, run, nadam, length=shape.block, batch=12, end=None, truth=24)


def _warm_restarts(run: Run) -> Training:
    """The rate falls from one checkpoint to the next and rises right after each."""
    made, every = _gpt(run, None), run.every

    def rate(step: int) -> float:
        warm = min(1.0, (step + 1) / every)  # over the first interval: a start at the peak would be rough
        return warm * (0.01 + 0.99 * (1 + math.cos(math.pi * (step % every + 1) / every)) / 2)

    made.scheduler = LambdaLR(made.optimizers[0], rate)
    return made


def _changed_at_resume(run: Run) -> Training:
    """The rate falls to a third from one checkpoint to the next, and whoever resumes trebles it by hand."""
    made = _gpt(run, None)
    (optimizer,) = made.optimizers

    def treble() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 3

    made.scheduler = ExponentialLR(optimizer, gamma=3 ** (-1 / run.every))
    made.after_restore = treble
    return made


def _convolutions(run: Run) -> Training:
    model = CausalConvolutions(*run.size((24, 2), (120, 7)))
    return _on_text(model, run, _adamw(model, beta2=0.999))


def _recurrent(run: Run) -> Training:
    model = _Recurrent(run.size(32, 192))
    rmsprop = RMSprop(model.parameters(), lr=2e-3, alpha=0.99, momentum=0.0)
    return _on_text(model, run, rmsprop, batch=32, end=None)


def _experts(run: Run) -> Training:
    shape = _shape(run, 96, 2)
    model = _MixtureGPT(GPT(shape), shape.width, 4)
    named = model.gpt.blocks.named_parameters()
    matrices = [p for name, p in named if p.dim() >= 2 and "router" not in name]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    muon, adamw = Muon(matrices, lr=0.02), AdamW(rest, lr=2e-3, betas=(0.9, 0.95))
    rate = warm_cosine(run.steps, run.steps // 10, 0.1)
    muon_rate = LambdaLR(muon, rate)
    made = _on_text(model, run, muon, adamw, length=shape.block, end=None)
    made.scheduler = LambdaLR(adamw, rate)
    made.stateful, made.after_step = {"muon_scheduler": muon_rate}, muon_rate.step
    return made


def _masked(run: Run) -> Training:
    length = 24
    model = _Masked(STATES, *run.size((32, 2), (112, 3)), length)

    def batch(drawn: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = chains(32, length, drawn)
        return tokens, torch.rand(tokens.shape, generator=drawn) < 0.15

    adamw, rate = _adamw(model, beta2=0.98), warm_cosine(run.steps, run.steps // 10, 0.1)
    return on_drawn(run, model, batch, adamw, truth=(4, 32), rate=rate, clip=1.0)


def _bf16(run: Run) -> Training:
    """Pure bfloat16, and gradients of several batches that its loss adds by itself."""
    shape = _shape(run, 96, 2, 48)
    model = GPT(shape).to(torch.bfloat16)
    made = _on_text(model, run, _adamw(model), length=shape.block)

    def train_loss(index: int) -> Tensor:
        drawn = windows(code_text()[0], 24, shape.block + 1, numbers_of(run.seed, index))
        pieces = drawn.split(8)
        for piece in pieces[:-1]:
            (next_loss(model, piece) / len(pieces)).backward()
        return next_loss(model, pieces[-1]) / len(pieces)

    made.train_loss = train_loss
    return made


# --- from a pretrained base ---------------------------------------------------------------------------------


@cache
def _pretrained(quick: bool) -> GPT:
    """A GPT that has learnt Python's source text; the same for all seeds."""
    steps = 8 if quick else _PRETRAINING
    made = Kind("", "", _gpt).make(20_250_101, quick, steps)
    for index in range(steps):
        made.step(index)
    made.model.zero_grad()
    assert isinstance(made.model, GPT)
    return made.model


def _from_base(run: Run, model: nn.Module, lr: float, weight_decay: float) -> Training:
    """Next-byte prediction of English by a model that knows Python; how well it still does is an ability."""
    length = _shape(run).block
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = AdamW(trained, lr=lr, betas=(0.9, 0.999), weight_decay=weight_decay)
    made = _on_text(model, run, adamw, texts=english_text(), length=length)
    truth = _held_out(run, code_text()[1], length + 1)[1]
    made.abilities = {"old domain": mean_loss(model, partial(next_loss, model), truth)}
    return made


def _fine_tuning(run: Run) -> Training:
    return _from_base(run, copy.deepcopy(_pretrained(run.quick)), 2e-5, 0.01)


def _adapters(run: Run) -> Training:
    base = copy.deepcopy(_pretrained(run.quick))
    torch.manual_seed(run.seed)  # the pretraining draws numbers in the first run of a process only
    model = _WithAdapters(base, 8)
    made = _from_base(run, model, 2e-3, 0.0)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    made.originals = {n: value.clone() for n, value in model.state_dict().items() if n in frozen}
    adapted = made.abilities["old domain"]

    def alone() -> float:
        model.switch(False)
        try:
            return adapted()
        finally:
            model.switch(True)

    made.abilities = {"base alone, old domain": alone}
    return made


TEXT = (
    Kind("gpt", "GPT, AdamW (0.9, 0.95), cosine to a tenth", _gpt, 36),
    Kind("gpt-zero", "GPT, AdamW, cosine to zero", partial(_gpt, end=0.0), 36),
    Kind("warm-restarts", "GPT, AdamW, the rate rises right after each checkpoint", _warm_restarts, 36),
    Kind("changed-schedule", "GPT, AdamW, three times the rate at every resume", _changed_at_resume, 36),
    Kind("gpt-lion", "GPT, Lion", _lion_gpt, 36),
    Kind("moe-muon", "Mixture of experts, Muon and AdamW", _experts, 32),
    Kind("conv", "Causal convolutions, AdamW", _convolutions, 32),
    Kind("lstm", "LSTM, RMSprop, clipped", _recurrent, 36),
    Kind("bert", "Masked language model, AdamW", _masked, 36),
    Kind("fine-tuning", "Fine-tuning, AdamW at 2e-5", _fine_tuning, 24),
    Kind("lora", "LoRA on a frozen base, AdamW", _adapters, 24),
)
MORE_TEXT = (Kind("gpt-bf16", "GPT in bfloat16, gradients of three batches, AdamW", _bf16, 36),)
NADAM_TEXT = (Kind("gpt-nadam", "GPT, NAdam", _nadam_gpt, 16),)
