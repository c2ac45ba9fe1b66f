"""Language models of the bench that are not the demo's GPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from bound_data import VOCABULARY
from gpt import GPT
from torch import Tensor, nn

__all__ = ["CausalConvolutions", "MaskedModel", "MixtureGPT", "RecurrentModel", "WithAdapters", "next_loss"]


def next_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of every token but the first, from those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class CausalConvolutions(nn.Module):
    """Residual blocks of causal dilated convolutions."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, 3, dilation=(1, 2, 4, 8)[i % 4]) for i in range(blocks)
        )
        self.mixers = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks + 1))
        self.head = nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.token.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, length, 256)`` of the next bytes."""
        x = self.token(tokens)
        for conv, mixer, norm in zip(self.convs, self.mixers, self.norms[:-1], strict=True):
            inner = norm(x).transpose(1, 2)
            inner = conv(
                F.pad(inner, (2 * conv.dilation[0], 0))
            )  # on the left alone: nobody sees later bytes
            x = x + mixer(F.gelu(inner, approximate="tanh")).transpose(1, 2)
        return self.head(self.norms[-1](x))


class RecurrentModel(nn.Module):
    """An LSTM that predicts the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width // 2)
        self.cells = nn.LSTM(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, length, 256)`` of the next bytes."""
        return self.head(self.cells(self.token(tokens))[0])


class MaskedModel(nn.Module):
    """A transformer that looks both ways and names masked tokens.

    Args:
        symbols: of the text; one more stands for a mask.
        width: of the residual stream.
        layers: of the encoder.
        length: of the text.
    """

    def __init__(self, symbols: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(symbols + 1, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        nn.init.normal_(self.token.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, length, symbols)``."""
        x = self.token(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of the masked tokens.

        Args:
            batch: the tokens, and which are masked.
        """
        tokens, masked = batch
        logits = self(tokens.masked_fill(masked, self.token.num_embeddings - 1))
        return F.cross_entropy(logits[masked], tokens[masked])


class _Experts(nn.Module):
    """Takes the place of a block's feed-forward layers: every token goes to its best two experts of some."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.inner = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.outer = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        flat = x.flatten(0, -2)
        share = self.router(flat).softmax(-1)
        best, chosen = share.topk(2, -1)
        gate = torch.zeros_like(share).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        # all experts see all tokens, and the gate drops most: no slower at this size than to sort the tokens
        hidden = F.gelu(torch.einsum("td,edh->eth", flat, self.inner), approximate="tanh")
        return torch.einsum("eth,ehd,te->td", hidden, self.outer, gate).view_as(x)


class MixtureGPT(nn.Module):
    """The demo's GPT whose feed-forward layers are mixtures of experts."""

    def __init__(self, gpt: GPT, width: int, experts: int) -> None:
        super().__init__()
        self.gpt = gpt
        for block in self.gpt.blocks:
            block.mlp_in, block.mlp_out = _Experts(width, experts), nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next bytes."""
        return self.gpt(tokens)

    def matrices(self) -> list[nn.Parameter]:
        """What Muon trains: the matrices of the blocks, without the routers."""
        named = self.gpt.blocks.named_parameters()
        return [p for name, p in named if p.dim() >= 2 and "router" not in name]


class _Adapted(nn.Module):
    """A frozen layer beside a product of two narrow matrices, the second of which begins at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        """The base's output, and the adapter's where it is active."""
        out = self.base(x)
        return out + 2.0 * F.linear(F.linear(x, self.down), self.up) if self.active else out


class WithAdapters(nn.Module):
    """A frozen GPT with low-rank adapters at all layers of its blocks (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: GPT, rank: int) -> None:
        super().__init__()
        base.requires_grad_(False)
        for block in base.blocks:
            for name in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
                setattr(block, name, _Adapted(getattr(block, name), rank))
        self.gpt = base

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next bytes."""
        return self.gpt(tokens)

    def switch(self, active: bool) -> None:
        """Let the adapters count, or not."""
        for part in self.modules():
            if isinstance(part, _Adapted):
                part.active = active
