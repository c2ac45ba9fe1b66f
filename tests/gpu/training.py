"""A small training on the GPU whose every source of randomness is the GPU's, in this process."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from support.options import grouped
from support.stepped import OPTIONS
from torch import nn
from torch.nn import functional

import shrinkpoint
from gpu.device import DEVICE, ON_GPU

__all__ = ["CASES", "Net", "Training", "devices"]

_CAPTURABLE = ("Adam", "AdamW", "NAdam", "RAdam", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD")
_FUSED = ("SGD", "Adam", "AdamW")
_IMPLEMENTATIONS: Mapping[str, Mapping[str, bool]] = {
    "only": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


def _cases() -> list[tuple[str, str]]:
    found = []
    for name in OPTIONS:
        kinds = ["only"] if name in ("SparseAdam", "Muon") else ["loop", "foreach"]
        kinds += ["fused"] if name in _FUSED else []
        kinds += ["capturable"] if name in _CAPTURABLE and ON_GPU else []
        if hasattr(torch.optim, name):
            found += [(name, kind) for kind in kinds]
    return found


CASES = _cases()
"""Every optimizer of torch.optim with every implementation that it has on a GPU."""


class Net(nn.Module):
    """Dropout draws from the GPU's generator, BatchNorm has buffers, and one convolution has its channels last."""

    def __init__(self, *, sparse: bool = False, matrices: bool = False, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width, sparse=sparse)
        self.norm = nn.BatchNorm1d(width, affine=not (sparse or matrices))
        self.conv = (
            None
            if sparse or matrices
            else nn.Conv2d(width, width, 3, padding=1).to(memory_format=torch.channels_last)
        )
        self.body = None if sparse else nn.Linear(width, width, bias=not matrices)
        self.head = None if sparse else nn.Linear(width, 64, bias=not matrices)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        if self.conv is not None:
            x = x + self.conv(x.transpose(1, 2).unsqueeze(2)).squeeze(2).transpose(1, 2)
        x = functional.dropout(x, 0.1, self.training)
        if self.body is None or self.head is None:
            return x @ self.table.weight.detach().T
        return self.head(torch.tanh(self.body(x)))


class Training:
    """One process of a training: made afresh, it knows nothing but the URL.

    Args:
        optimizer, implementation: a case of `CASES`.
        precision: ``fp32``; ``fp16``, autocast with a gradient scaler; ``bf16``, autocast; ``pure-bf16``, weights in that format.
        options: of the optimizer.
    """

    def __init__(
        self, optimizer: str = "AdamW", implementation: str = "fused", precision: str = "fp32", **options: Any
    ) -> None:
        torch.manual_seed(3)
        self.model = Net(sparse=optimizer == "SparseAdam", matrices=optimizer == "Muon").to(DEVICE)
        if precision == "pure-bf16":
            self.model.bfloat16()
        options = {**OPTIONS[optimizer], **_IMPLEMENTATIONS[implementation], **options}
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), **options)
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=3, enabled=ON_GPU)
        self.precision = precision
        self.stateful: dict[str, Any] = {"scaler": self.scaler} if precision == "fp16" else {}
        self.checkpointer: Any = None

    def at(self, url: object, **options: Any) -> "Training":
        """Give it a checkpointer."""
        given = {
            "every": 2,
            "scheme": "lossless",
            "busy": "wait",
        }
        self.checkpointer = shrinkpoint.Checkpointer(
            str(url), self.model, self.optimizer, **grouped(**{**given, **self.stateful, **options})
        )
        return self

    def loss(self, seed: int) -> torch.Tensor:
        """Of one batch of its own."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(64, (8, 17), generator=generator).sort(dim=1).values.to(DEVICE)
        half = {"fp16": torch.float16 if ON_GPU else torch.bfloat16, "bf16": torch.bfloat16}.get(
            self.precision
        )
        with torch.autocast(DEVICE, half) if half is not None else nullcontext():
            logits = self.model(tokens[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def step(self, seed: int) -> float:
        """One training step; its loss."""
        self.optimizer.zero_grad()
        loss = self.loss(seed)
        if self.precision == "fp16":
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def run(self, begin: int, end: int) -> list[float]:
        """Some steps; every save is committed before the next step."""
        losses = []
        for step in range(begin, end):
            losses.append(self.step(step))
            if self.checkpointer is not None:
                self.checkpointer.step(step + 1)
                self.checkpointer.flush()
        return losses

    def everything(self) -> dict[str, Any]:
        """What a resumed run must share with the undisturbed one."""
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generator": torch.cuda.get_rng_state() if ON_GPU else torch.get_rng_state(),
        }

    def evaluate(self) -> list[float]:
        """Held-out losses by batch."""
        return [self.loss(1000 + index).item() for index in range(4)]

    def train_loss(self, index: int) -> torch.Tensor:
        """Of some fixed batches."""
        return self.loss(2000 + index)


def devices(value: Any, at: str = "") -> dict[str, str]:
    """The kind of device of every tensor, by its place."""
    if isinstance(value, torch.Tensor):
        return {at: value.device.type}
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    return {place: kind for name, item in items for place, kind in devices(item, f"{at}/{name}").items()}
