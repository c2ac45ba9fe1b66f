"""Bytes of a chain on real trainings, at one setting of the quantizers: python examples/benchmarks/delta_bytes.py (15 minutes)

    python examples/benchmarks/delta_bytes.py [--only gpt,resnet] [--states FOLDER]

GPTs of 2 and 13 million parameters with AdamW, saved every 40 and every 200 steps and with batches of eight times the size, and
a ResNet with SGD. Weights may have a quarter of the greatest noise, and first moments levels half a root of the second apart, so that
only what the coders make of them differs between two versions. ``--states`` keeps the states in a folder, or takes them from there.
"""

import copy
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import TextTraining, parsed, show
from gpt import GPTConfig
from torch import nn
from trainings import KINDS

from shrinkpoint import Saver, SaverConfig
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.state.roles import describe_training

_GPTS = {
    "gpt": (GPTConfig(), 40, 8),
    "gpt-200": (GPTConfig(), 200, 4),
    "gpt-13m": (GPTConfig(width=512, heads=8), 40, 4),
    "gpt-batches": (GPTConfig(batch=64), 40, 4),
}
"""Shape, steps between two saves, and saves."""
_RESNET = "resnet", 40, 8


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[None]]:
    """Return a model, its optimizer, and what trains them up to the next save."""
    if name in _GPTS:
        config, every, saves = _GPTS[name]
        text = TextTraining(config)

        def train() -> Iterator[None]:
            for _ in range(saves):
                for _ in range(every):
                    text.step()
                yield

        return text.model, text.optimizer, train()
    _, every, saves = _RESNET
    training = KINDS[name].make(1, quick=False)

    def steps() -> Iterator[None]:
        for save in range(saves):
            for step in range(every):
                training.step(every * save + step)
            yield

    return training.model, training.optimizers[0], steps()


def states_of(name: str, kept: Path | None) -> tuple[nn.Module, torch.optim.Optimizer, list[dict[str, Any]]]:
    """Return the states of one training, which are read where they have been kept."""
    model, optimizer, saves = trained(name)
    if kept and kept.exists():
        return model, optimizer, torch.load(kept)
    live = {"model": model, "optimizer": optimizer}
    states = [copy.deepcopy({part: one.state_dict() for part, one in live.items()}) for _ in saves]
    if kept:
        torch.save(states, kept)
    return model, optimizer, states


def reports_of(name: str, kept: Path | None) -> list[SaveReport]:
    """Store the chain of one training, and return the report of each checkpoint."""
    model, optimizer, states = states_of(name, kept)
    optimizer.load_state_dict(states[0]["optimizer"])
    describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(folder, SaverConfig(scheme=AutoOptions(weight_scale=0.25, first_moment_step=0.5)))
        for number, state in enumerate(states, 1):
            whole = {"model": state["model"], "optimizers": [state["optimizer"]]}
            saver.save(whole, step=number, describe=describe, wait=True)
        saver.close()
    return saver.reports()


def main() -> None:
    options = parsed(__doc__, only=[*_GPTS, _RESNET[0]], states="")
    warnings.simplefilter("ignore", ShrinkpointWarning)  # that nothing is evaluated
    rows = []
    for name in options.only:
        base, *deltas = reports_of(name, Path(options.states, f"{name}.pt") if options.states else None)
        sizes = Counter[str]()
        for delta in deltas:
            sizes += Counter({"all": delta.bytes, **delta.sections})
        means = (f"{sizes[part] / len(deltas):.0f}" for part in ("all", "weight"))
        rows.append(
            [
                name,
                f"{base.raw_bytes / 1e6:.1f}",
                base.bytes,
                *means,
                f"{base.raw_bytes * len(deltas) / sizes['all']:.1f}x",
            ]
        )
        print(*rows[-1], flush=True)
    show(
        "training | MB | base, bytes | a delta, bytes | its weights | its ratio",
        rows,
        " ",
    )


if __name__ == "__main__":
    main()
