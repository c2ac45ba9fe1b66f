"""Adam's first moment against a gradient average of its own, as the sensitivity that protects and prunes weights.

    python examples/benchmarks/sensitivity.py [--steps 200]

Trains the example GPT, averages the gradients of the last 50 steps (Inshrinkerator, arXiv 2306.11800, 4.2), and measures
what a restore costs when weights are scored with that average, with Adam's `exp_avg` (beta1 = 0.9: the same average, of
the clipped gradients, and without any copy), or by magnitude alone. Means over the same held-out batches.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, GPTConfig, build_optimizer, load_corpus, loss_on, val_batches

from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.schemes.inshrinkerator.scheme import InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.sensitivity import GradientEMA
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import Role, TrainingState

WINDOW = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    config = GPTConfig(steps=arguments.steps, warmup=min(100, arguments.steps // 2))
    train_text, val_text = load_corpus()
    held_out = val_batches(val_text, config)
    model = GPT(config)
    optimizer, schedule = build_optimizer(model, config)
    average, seconds_averaging, seconds_steps = GradientEMA(steps=WINDOW), 0.0, 0.0
    for step in range(config.steps):
        started = time.perf_counter()
        begin = torch.randint(len(train_text) - config.block - 1, (config.batch, 1))
        loss = model.loss(train_text[begin + torch.arange(config.block + 1)].long())
        optimizer.zero_grad()
        loss.backward()
        computed = time.perf_counter()
        if average.should_collect(config.steps - step):
            average.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            seconds_averaging += time.perf_counter() - computed
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seconds_steps += time.perf_counter() - started

    state = TrainingState.capture(
        {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]},
        describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",)),
    )
    options = InshrinkeratorOptions()
    own = Weights(state, options, average.result())
    adam = Weights(state, options)
    without = Weights(_without_moments(state), options)

    console = Console()
    baseline = loss_on(model, held_out)
    console.print(f"loss {baseline:.4f} after {config.steps} steps, seed {arguments.seed}")
    console.print(
        f"averaging took {seconds_averaging / seconds_steps:.2%} of the training time, and one copy of the gradients"
    )
    console.print(f"of the 0.5 % most sensitive weights, both averages agree on {_agreement(own, adam):.0%}")
    table = Table(
        "bins", "pruned", "metric", "own average", "exp_avg", "magnitude alone", title="degradation"
    )
    for bins in (8, 16, 32):
        for prune, metric in ((0.0, "sensitivity"), (0.2, "sensitivity"), (0.2, "magnitude")):
            chosen = Configuration(bins=bins, prune=prune, protect=0.005, metric=metric, embedding_bins=32)
            row = [
                f"{_degradation(model, held_out, w.restored(chosen), baseline):+.3%}"
                for w in (own, adam, without)
            ]
            table.add_row(str(bins), f"{prune:.0%}", metric if prune else "-", *row)
    console.print(table)


def _without_moments(state: TrainingState) -> TrainingState:
    specs = {name: spec for name, spec in state.specs.items() if spec.tag.role is not Role.EXP_AVG}
    return TrainingState(state.tree, {name: state.tensors[name] for name in specs}, specs)


def _agreement(own: Weights, adam: Weights) -> float:
    """Share of the weights most sensitive by one average that are so by the other."""
    both, either = 0, 0
    for name, weight in own.tensors.items():
        scores = [
            (weight * gradients[name]).abs().reshape(-1) for gradients in (own.gradients, adam.gradients)
        ]
        count = max(1, round(0.005 * weight.numel()))
        top = [set(score.topk(count).indices.tolist()) for score in scores]
        both, either = both + len(top[0] & top[1]), either + count
    return both / either


def _degradation(
    model: GPT, held_out: list[torch.Tensor], weights: Mapping[str, torch.Tensor], baseline: float
) -> float:
    with swapped_weights(model, weights):
        return loss_on(model, held_out) / baseline - 1


if __name__ == "__main__":
    main()
