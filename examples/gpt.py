"""A small byte-level GPT, real text that is on every machine, and the LightningModule that joins them.

The text is the source of the Python standard library: about ten megabytes, present wherever Python is, and
rich enough that a model of 2.2 million parameters keeps learning for hours. One byte is one token, so there
is no tokenizer to fetch or to train.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = [
    "GPT",
    "GPTConfig",
    "GPTModule",
    "TextWindows",
    "build_optimizer",
    "load_corpus",
    "loss_on",
    "train_loader",
    "val_batches",
]

VOCABULARY = 256
"""One token per byte value."""

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape and training recipe of the model; the defaults give 2.2 million parameters."""

    width: int = 208
    layers: int = 4
    heads: int = 4
    block: int = 128
    batch: int = 8
    peak_lr: float = 1e-3
    warmup: int = 100
    steps: int = 600

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}; change one of them"
            )


def load_corpus(max_bytes: int = 12_000_000) -> tuple[Tensor, Tensor]:
    """Read the standard library's modules and split them by file.

    Args:
        max_bytes: Stop reading after so many bytes of source text.

    Returns:
        Training and validation text, each a 1-D uint8 tensor. Every tenth file is held out, so that no
        sentence of a validation file was trained on.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (p for p in sorted(root.rglob("*.py")) if not _SKIPPED_FOLDERS & set(p.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for index, path in enumerate(paths):
        if total >= max_bytes:
            break
        text = path.read_bytes()
        parts[index % 10 == 9].append(text)
        total += len(text)
    train, val = (torch.frombuffer(bytearray(b"\n".join(p)), dtype=torch.uint8) for p in parts)
    return train, val


class TextWindows(Dataset[Tensor]):
    """Non-overlapping windows of ``block + 1`` bytes: inputs and, shifted by one, their targets."""

    def __init__(self, text: Tensor, block: int) -> None:
        self._text, self._block = text, block

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._block

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._block
        return self._text[start : start + self._block + 1].long()


def train_loader(text: Tensor, config: GPTConfig) -> DataLoader[Tensor]:
    """Windows in a fresh random order every epoch, drawn from torch's global generator."""
    return DataLoader(TextWindows(text, config.block), batch_size=config.batch, shuffle=True, drop_last=True)


def val_batches(text: Tensor, config: GPTConfig, count: int = 16, batch: int = 8) -> list[Tensor]:
    """The same ``count`` held-out batches in every run: evenly spaced windows, int64 ``(batch, block + 1)``."""
    windows = TextWindows(text, config.block)
    stride = max(1, len(windows) // (count * batch))
    flat = torch.stack([windows[(i * stride) % len(windows)] for i in range(count * batch)])
    return list(flat.split(batch))


class _Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attn_norm = nn.LayerNorm(config.width)
        self.attn_in = nn.Linear(config.width, 3 * config.width)
        self.attn_out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.attn_in(self.attn_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A pre-norm decoder-only transformer whose output layer shares the embedding's weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.block, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_init_weights)
        # GPT-2's rule: the residual stream is summed 2 * layers times, so its writers start smaller.
        for block in self.blocks:
            for layer in (block.attn_out, block.mlp_out):
                nn.init.normal_(layer.weight, std=0.02 / (2 * config.layers) ** 0.5)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, length, 256)`` for int64 tokens ``(batch, length)``."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte over windows ``(batch, length + 1)``."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def _init_weights(layer: nn.Module) -> None:
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


def build_optimizer(
    model: nn.Module, config: GPTConfig
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW (0.9, 0.95) with weight decay on matrices only; linear warm-up, then a cosine to a tenth."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, 0.95))
    warmup = min(config.warmup, max(1, config.steps // 5))
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=max(1, config.steps - warmup), eta_min=config.peak_lr / 10
            ),
        ],
        milestones=[warmup],
    )
    return optimizer, schedule


@torch.no_grad()
def loss_on(model: GPT, batches: list[Tensor]) -> float:
    """Mean loss over fixed batches, in nats per byte, leaving the model's mode as it was."""
    was_training = model.training
    model.eval()
    total = sum(model.loss(batch).double() for batch in batches) / len(batches)
    model.train(was_training)
    return float(total)


class GPTModule(LightningModule):
    """The model, its optimizer and its schedule, as Lightning wants them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model = GPT(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model.loss(batch)
        self.log("val_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer, schedule = build_optimizer(self.model, self.config)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
