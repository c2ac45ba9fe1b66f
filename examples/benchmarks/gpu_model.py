"""The training of the GPU's bench, and its clocks, memory counters and tables."""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import gpt_of
from demo_report import markdown_table
from gpt import GPTConfig
from torch import Tensor, nn

import shrinkpoint

_BATCHES = 8
_SCORED = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the model and its batches."""

    layers: int
    width: int
    vocabulary: int
    length: int
    batch: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        """Whether there is one to be waited for."""
        return self.device.type == "cuda"


class Training:
    """A GPT of GPT-2's form on made-up tokens, with bf16 autocast and AdamW.

    Args:
        shape: of it.
        fused: the optimizer's implementation; otherwise ``foreach``, torch's own choice on a GPU.
        sharded: by FSDP2, over the default process group.
        warm: steps that are made at once, so that memory is allocated and kernels are chosen.
    """

    def __init__(self, shape: Shape, *, fused: bool = True, sharded: bool = False, warm: int = 5) -> None:
        self.shape = shape
        torch.manual_seed(0)
        with shape.device:
            config = GPTConfig(
                width=shape.width, layers=shape.layers, heads=max(1, shape.width // 64), block=shape.length
            )
            self.model: nn.Module = gpt_of(config, shape.vocabulary)
            # Few tokens are frequent, as in text: there is something to be learned, and rows of the embedding move unequally.
            size = (_BATCHES + _SCORED, shape.batch, shape.length + 1)
            tokens = (shape.vocabulary ** torch.rand(size)).long() - 1
            self._batches = list(tokens.clamp(0, shape.vocabulary - 1))
        if sharded:
            from torch.distributed.fsdp import fully_shard

            for block in self.model.blocks:  # type: ignore[union-attr]
                fully_shard(block)
            fully_shard(self.model)
        how = {"fused": True} if fused else {"foreach": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4, betas=(0.9, 0.95), **how)
        self.done = 0
        """Steps so far."""
        for _ in range(warm):
            self.step()
        self.wait()

    @property
    def nbytes(self) -> int:
        """Of the weights and of what the optimizer keeps."""
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *kept))

    def state(self) -> dict[str, Any]:
        """As one would give it to ``torch.save``."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def loss(self, index: int) -> Tensor:
        """Of one of the training's batches."""
        return self._loss(self._batches[index % _BATCHES])

    def held_out(self) -> list[float]:
        """Losses of batches that are not trained on."""
        with torch.no_grad():
            losses = [self._loss(batch) for batch in self._batches[_BATCHES:]]
        return torch.stack(losses).tolist()

    def _loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(self.shape.device.type, torch.bfloat16):
            logits = self.model(batch[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def step(self) -> int:
        """One step; how many have been made. The GPU may not be done with it."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.done).backward()
        self.optimizer.step()
        self.done += 1
        return self.done

    def wait(self) -> None:
        """For the GPU."""
        if self.shape.on_gpu:
            torch.cuda.synchronize(self.shape.device)

    def timed(self, steps: int, after: Callable[[int], object] = lambda step: None) -> float:
        """Seconds of some steps, the GPU's work included.

        Args:
            steps: how many.
            after: called after each one, with the number of steps so far.
        """
        self.wait()
        started = time.perf_counter()
        for _ in range(steps):
            after(self.step())
        self.wait()
        return time.perf_counter() - started

    def rest(self, steps: int, blocks: int = 3) -> float:
        """Seconds of a step with nothing beside it."""
        return statistics.median(self.timed(steps) for _ in range(blocks)) / steps

    # ---- the GPU's memory

    def reset_peak(self) -> None:
        """Count the GPU's memory anew."""
        if self.shape.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.shape.device)

    def peak(self) -> int:
        """The most bytes of the GPU that were allocated since."""
        return torch.cuda.max_memory_allocated(self.shape.device) if self.shape.on_gpu else 0


def pinned() -> int:
    """Bytes of pinned memory that torch has allocated; 0 where it does not say."""
    try:
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    except (AttributeError, RuntimeError):
        return 0


def release() -> None:
    """Give back what the section before has left, so that the next one's first save allocates its own pinned memory."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(
            torch._C, "_host_emptyCache", None
        )
        if empty is not None:
            empty()


def number(value: float | None, digits: int = 3) -> str:
    """For a table, without an exponent."""
    if value is None or value != value:
        return "-"
    if value == 0:
        return "0"
    places = max(0, digits - len(str(int(abs(value)))) if abs(value) >= 1 else digits)
    return f"{value:.{places}f}"


@dataclass(kw_only=True)
class Bench:
    """What every section gets."""

    shape: Shape
    folder: Path
    """For runs; removed at the end."""
    steps: int
    """Of a timed block."""
    rounds: int
    """Saves that are measured after the first one."""
    threads: int | None

    def url(self, name: str) -> str:
        """Name a new run."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return str(self.folder / name)


@contextmanager
def table(*headings: str) -> Iterator[Callable[..., None]]:
    """Print the rows that are added inside as a table, whatever happens; and each at once on stderr, should the machine be lost."""
    rows: list[Sequence[str]] = []

    def add(*cells: str) -> None:
        rows.append(cells)
        print("   ", *cells, sep="  ", file=sys.stderr, flush=True)

    try:
        yield add
    finally:
        print("", *markdown_table(headings, rows), "", sep="\n", flush=True)


@contextmanager
def checkpointing(
    bench: Bench, url: str, training: Training, busy: Any = "skip", **options: Any
) -> Iterator[shrinkpoint.Checkpointer]:
    """Make one that is let go of after some seconds where something fails."""
    made = shrinkpoint.Checkpointer(
        url,
        training.model,
        training.optimizer,
        advanced=shrinkpoint.Advanced(busy=busy, threads=bench.threads),
        **options,
    )
    try:
        yield made
    except BaseException:
        made.saver.close(timeout_s=5)
        raise
    made.close()
