"""How many bytes the same training takes when one process stores it, and when several ranks do.

    python examples/benchmarks/sharded_bytes.py [--model gpt] [--ranks 2,4] [--saves 4] [--every 10] [--scheme auto]

``--model gpt`` trains the demo's GPT, all ranks on the same batches, so that FSDP2 makes the training of one process but for
rounding. ``--model stack`` is a stack of linear layers (``--width``, ``--layers``; the default has 101 million parameters), whose
gradients are random numbers of a changing direction: a simulated state. One process stores one container for each save, and ranks store
parts and a head. Every column is the sum over all objects of a save, and relative to the one container.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sharded_ranks import join, spawned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import shrinkpoint

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from gpt import GPT, GPTConfig, build_optimizer, load_corpus


class Trained:
    """The demo's GPT, on batches that are the same on all ranks."""

    def __init__(self, world: int) -> None:
        torch.manual_seed(0)
        self._config = GPTConfig()
        self.model = GPT(self._config)
        self._text, _ = load_corpus()
        if world > 1:
            mesh = init_device_mesh("cpu", (world,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer, self._scheduler = build_optimizer(self.model, self._config)
        self._generator = torch.Generator().manual_seed(0)

    def step(self) -> None:
        """One step."""
        block = self._config.block
        starts = torch.randint(
            len(self._text) - block - 1, (self._config.batch,), generator=self._generator
        ).tolist()
        windows = torch.stack([self._text[start : start + block + 1].long() for start in starts])
        logits = self.model(windows[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._scheduler.step()


class Simulated:
    """A stack of layers with made-up gradients, the same on any number of ranks."""

    def __init__(self, world: int, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(*(nn.Linear(width, 4 * width) for _ in range(layers)))
        if world > 1:
            mesh = init_device_mesh("cpu", (world,))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self._generator = torch.Generator().manual_seed(0)

    def step(self) -> None:
        """One step."""
        for parameter in self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=self._generator)
            parameter.grad = (
                distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
                if isinstance(parameter, DTensor)
                else gradient
            )
        self.optimizer.step()


def save(rank: int, world: int, meeting: str, url: str, options: Any, out: Any) -> None:
    """Train, and save now and then; put out the bytes of each save."""
    join(rank, world, meeting)
    training = Trained(world) if options.model == "gpt" else Simulated(world, options.width, options.layers)
    checkpointer = shrinkpoint.Checkpointer(
        url,
        training.model,
        training.optimizer,
        scheme=options.scheme,
        busy="wait",
        threads=1,
        save_last=False,
    )
    for number in range(1, options.saves + 1):
        for _ in range(options.every):
            training.step()
        checkpointer.save(number * options.every)
        checkpointer.flush()
    reports = checkpointer.reports()
    checkpointer.close()
    if rank == 0:
        out.put([(report.kind, report.bytes, report.ratio) for report in reports])
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=["gpt", "stack"], default="gpt")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--scheme", default="auto")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    worlds = [1, *map(int, options.ranks.split(","))]
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for world in worlds:
            [found[world]] = spawned(save, world, Path(name), f"{name}/run-{world}", options)
    table = Table(
        title=f"{options.model}, {options.scheme}: bytes of each save, relative to one process's container"
    )
    for column in (
        "save",
        "kind",
        "bytes, one process",
        "ratio to torch.save",
        *(f"{world} ranks" for world in worlds[1:]),
    ):
        table.add_column(column, justify="right")
    for index, (kind, size, ratio) in enumerate(found[1]):
        others = [found[world][index] for world in worlds[1:]]
        table.add_row(
            str((index + 1) * options.every),
            kind,
            str(size),
            f"{ratio:.2f}",
            *(f"{other[1] / size:.4f}" + ("" if other[0] == kind else f" ({other[0]})") for other in others),
        )
    sums = {world: sum(size for _, size, _ in found[world]) for world in worlds}
    table.add_row("all", "", str(sums[1]), "", *(f"{sums[world] / sums[1]:.4f}" for world in worlds[1:]))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
