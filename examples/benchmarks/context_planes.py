"""Planes of levels from real training, for measuring coders: three quantizations of a small GPT's weights and moments."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt import GPT, GPTConfig, TextWindows, build_optimizer, load_corpus

from shrinkpoint.arrays import Float32s, UInt8s
from shrinkpoint.quantize.clustering import optimal_clusters
from shrinkpoint.schemes.base import Context
from shrinkpoint.schemes.inshrinkerator.codec import InshrinkeratorWeightCodec
from shrinkpoint.schemes.inshrinkerator.partition import Thresholds
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.state.training import Role, TensorSpec

Tensors = dict[str, tuple[Float32s, Float32s, Float32s]]
"""Weight, first and second moment of every matrix, by name."""
Levels = dict[str, dict[str, UInt8s]]
"""Plane (w, m or v) of every matrix, by name."""


def states_of(folder: Path, steps: list[int]) -> Iterator[Tensors]:
    """Matrices of ``step_XXXX.pt`` files with keys model, optim and param_names."""
    for step in steps:
        saved = torch.load(folder / f"step_{step:04d}.pt", weights_only=True)
        moments = {name: saved["optim"]["state"][i] for i, name in enumerate(saved["param_names"])}
        yield _matrices(saved["model"], moments)


def states_of_training(steps: list[int]) -> Iterator[Tensors]:
    """The same from a short training of examples/gpt.py, seeded."""
    torch.manual_seed(0)
    config = GPTConfig(steps=600)
    model = GPT(config)
    optimizer, schedule = build_optimizer(model, config)
    windows = TextWindows(load_corpus(2_000_000)[0], config.block)
    draw = torch.Generator().manual_seed(0)
    for step in range(1, steps[-1] + 1):
        picks = torch.randint(len(windows), (config.batch,), generator=draw)
        loss = model.loss(torch.stack([windows[int(i)] for i in picks]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step in steps:
            names = {parameter: name for name, parameter in model.named_parameters()}
            moments = {names[p]: state for p, state in optimizer.state.items()}
            yield _matrices({k: v.clone() for k, v in model.state_dict().items()}, moments)


def _matrices(weights: dict[str, torch.Tensor], moments: dict[str, Any]) -> Tensors:
    return {
        name: (
            weights[name].numpy(),
            state["exp_avg"].numpy().copy(),
            state["exp_avg_sq"].numpy().copy(),
        )
        for name, state in moments.items()
        if weights[name].ndim == 2
    }


@dataclass(frozen=True)
class Quantization:
    """A sequence of checkpoints as levels, the first state being the exact reference.

    Attributes:
        name: what the table calls it.
        order: planes in the order in which they are coded; later ones have the earlier ones as sides.
        levels: of each checkpoint after the first.
        own: bytes of the last checkpoint's planes as a scheme of the library codes them, by effort, matrix and plane;
            empty where the levels are no scheme's own.
    """

    name: str
    order: tuple[str, ...]
    levels: list[Levels]
    own: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)


def dead_zone(states: list[Tensors], step: float, moment_step: float) -> Quantization:
    """Residuals in units of their median and moments in units of the factored root, rounded towards zero by 0.15."""
    reference = {name: weight for name, (weight, _, _) in states[0].items()}
    out = []
    for state in states[1:]:
        levels: Levels = {}
        for name, (weight, first, second) in state.items():
            factor = np.maximum(np.outer(second.mean(1), second.mean(0)) / max(second.mean(), 1e-30), 1e-30)
            seen = second > 0
            typical = np.exp2(np.log2(second[seen] / factor[seen]).mean()) if seen.any() else 1.0
            residual = weight - reference[name]
            unit = step * max(float(np.median(np.abs(residual))), 1e-9)
            coded = _towards_zero(residual / unit)
            reference[name] = reference[name] + (coded * unit).astype(np.float32)
            moment = _towards_zero(first / np.sqrt(factor * typical) / moment_step)
            levels[name] = {"m": (moment + 31).astype(np.uint8), "w": (coded + 31).astype(np.uint8)}
        out.append(levels)
    return Quantization(f"dead zone, step {step:g}", ("m", "w"), out)


def _towards_zero(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.clip(np.sign(values) * np.floor(np.abs(values) + 0.35), -31, 31)


def excp(states: list[Tensors], alpha: float, beta: float = 2.0) -> Quantization:
    """ExCP (arXiv 2406.11257): jointly pruned residuals and moments, 15 clusters and zero each."""
    reference = {name: weight for name, (weight, _, _) in states[0].items()}
    out = []
    for state in states[1:]:
        levels: Levels = {}
        for name, (weight, first, second) in state.items():
            residual = weight - reference[name]
            cut = min(2.5, alpha / float(np.sqrt(second.mean()))) * np.median(np.abs(residual))
            residual = np.where(np.abs(residual) > cut, residual, np.float32(0))
            keep = (np.abs(first) > beta * np.abs(first).mean()) & (residual != 0)
            coded, restored = _cluster(residual)
            reference[name] = reference[name] + restored
            levels[name] = {
                "m": _cluster(np.where(keep, first, np.float32(0)))[0],
                "v": _cluster(np.where(keep, second, np.float32(0)))[0],
                "w": coded,
            }
        out.append(levels)
    return Quantization(f"ExCP, alpha {alpha:g}", ("w", "m", "v"), out)


def _cluster(values: Float32s) -> tuple[UInt8s, Float32s]:
    kept = values[values != 0]
    if kept.size == 0:
        return np.zeros(values.shape, np.uint8), values
    points = np.unique(np.quantile(kept.astype(np.float64), np.linspace(0, 1, 1001)))
    centroids = optimal_clusters(torch.from_numpy(points), torch.ones(points.size, dtype=torch.float64), 15)
    centroids = centroids.numpy()
    nearest = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values)
    zero = values == 0
    restored = np.where(zero, np.float32(0), centroids[nearest]).astype(np.float32)
    return np.where(zero, 0, nearest + 1).astype(np.uint8), restored


def present_codecs(states: list[Tensors], bins: int) -> Quantization:
    """What shrinkpoint's codecs make: clustered weights, log-factored second and root-units first moments."""
    out = []
    for state in states[1:]:
        levels: Levels = {}
        for name, parts in state.items():
            weight, first, second = map(torch.from_numpy, parts)
            few, most = (float(np.quantile(np.abs(parts[0]), share)) for share in (0.1, 0.995))
            thresholds = Thresholds(
                metric="magnitude",
                prune_magnitude=few,
                prune_sensitivity=few,
                protect_magnitude=most,
                protect_sensitivity=most,
            )
            codec = InshrinkeratorWeightCodec(bins=bins, thresholds=thresholds)
            spec = TensorSpec(name=name, dtype=weight.dtype, shape=tuple(weight.shape))
            v = SecondMomentCodec().encode(second, spec, Context())
            m = FirstMomentCodec().encode(first, spec, Context(siblings={Role.EXP_AVG_SQ.value: v.value}))
            planes = {
                "v": v.planes["levels"],
                "m": m.planes["levels"],
                "w": codec.encode(weight, spec, Context()).planes["levels"],
            }
            levels[name] = {key: np.asarray(p, np.uint8).reshape(weight.shape) for key, p in planes.items()}
        out.append(levels)
    return Quantization(f"present codecs, {bins} bins", ("v", "m", "w"), out)
