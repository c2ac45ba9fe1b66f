"""Trainings whose every bit is the same on all machines: what a save makes of them may be compared with a record.

Gradients are PCG64's integers, weights and moments follow from them by single IEEE operations in float64, and a loss is a sum that
is rounded once (`math.fsum`). Optimizers are torch's own, but their states are set. No decision of a save follows a clock: with
``search_overhead=inf`` each search and each probe is made at once, and with 0 none is.
"""

import hashlib
import json
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.options import grouped
from torch import nn

from shrinkpoint import Checkpointer
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.store.run import RunStore

BATCHES = 3
FAST = {"threads": 1, "resume": "auto"}
EVERY_PROBE = {"search_overhead": math.inf}
NO_PROBE = {"search_overhead": 0.0}
LEVELS = {"name": "lc-checkpoint", "moments": "levels"}


class Drawn:
    """Bell-shaped numbers: sums of four 16-bit integers, about as wide as the normal distribution."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        lanes = self._bits.random_raw(math.prod(shape)).view(np.uint16).reshape(-1, 4).astype(np.int64)
        centred = lanes[:, 0] + lanes[:, 1] + lanes[:, 2] + lanes[:, 3] - 2 * 65535
        return (centred / 2.0**15).reshape(shape)


class Model(nn.Module):
    """Matrices of several kinds, a norm, statistics of a norm, and a head that may be tied."""

    def __init__(self, *, tied: bool = False, frozen: bool = False, half: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 32)
        self.inner = nn.Linear(32, 80)
        self.norm = nn.BatchNorm1d(80)
        self.outer = nn.Linear(80, 32, dtype=torch.bfloat16 if half else torch.float32)
        self.head = nn.Linear(32, 96, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.table.requires_grad_(not frozen)


class Average(nn.Module):
    """An average of the weights, kept beside the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = Model()
        self.module.load_state_dict(model.state_dict())


def adam(model: Model) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.AdamW(trained, lr=2.0**-8, betas=(0.875, 0.984375))]


def adamax(model: Model) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adamax(model.parameters(), lr=2.0**-8, betas=(0.875, 0.984375))]


def two(model: Model) -> list[torch.optim.Optimizer]:
    matrices = [model.inner.weight, model.outer.weight]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.SGD(matrices, lr=2.0**-6, momentum=0.875), torch.optim.AdamW(others, lr=2.0**-8)]


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One training."""

    options: Mapping[str, Any]
    """Of the Checkpointer."""
    model: Mapping[str, bool] = field(default_factory=dict)
    optimizers: Callable[[Model], list[torch.optim.Optimizer]] = adam
    saves: int = 6
    interval: int = 6
    """Steps between two saves."""
    loss: Callable[[int], float] = lambda save: 1.0
    """By what factor errors in the weights raise the loss, at each save."""
    evaluates: bool = True
    probes: bool = False
    averages: bool = False
    """Whether there is an average of the weights, and it alone is measured."""
    resumes: tuple[int, ...] = ()
    """After these saves everything is made anew and restored."""
    exact: tuple[int, ...] = ()
    """These saves are asked for bit-exactly."""
    broken: tuple[int, ...] = ()
    """At these saves a weight is not finite."""


PUBLISHED = {"guards": False, **NO_PROBE}

GOLDEN: Mapping[str, Golden] = {
    "auto": Golden(options={"key_every": 3, **EVERY_PROBE}, probes=True, saves=9, resumes=(4,)),
    "auto-unlucky": Golden(
        options=EVERY_PROBE,
        probes=True,
        saves=8,
        loss=lambda save: (1.0, 300.0, 1e9, 30.0, 30.0, 3.0, 0.01, 0.01)[save],
        exact=(6,),
    ),
    "auto-broken": Golden(options=NO_PROBE, broken=(2,), loss=lambda save: math.nan if save == 3 else 1.0),
    "auto-adopted": Golden(
        options={"adopt": 6, "search_overhead": 4.0},  # of a clock that counts steps
        probes=True,
        resumes=(3,),
        exact=(2,),
    ),
    "auto-slimmed": Golden(options={"keep_optimizer": 2, "key_every": 2, **NO_PROBE}),
    "auto-weights-only": Golden(options={"keep_optimizer": 0, **NO_PROBE}, saves=3),
    "auto-two-optimizers": Golden(
        options=EVERY_PROBE, optimizers=two, model={"tied": True, "half": True}, probes=True, saves=4
    ),
    "auto-frozen": Golden(options={"frozen": "reference", **NO_PROBE}, model={"frozen": True}, saves=3),
    "auto-frozen-stored": Golden(options={"frozen": "store", **NO_PROBE}, model={"frozen": True}, saves=3),
    "auto-average": Golden(options=NO_PROBE, averages=True, saves=3),
    "auto-unmeasured": Golden(options=NO_PROBE, optimizers=adamax, evaluates=False, saves=3),
    "auto-far-apart": Golden(options=EVERY_PROBE, probes=True, interval=2, saves=4, loss=lambda _: 20.0),
    "auto-flat": Golden(options=NO_PROBE, interval=20, loss=lambda save: 2.0**-12 + (save == 0)),
    "lossless": Golden(options={"scheme": "lossless", "key_every": 2}, resumes=(1,), saves=5),
    "inshrinkerator": Golden(
        options={"scheme": "inshrinkerator", **EVERY_PROBE, "guards": False},
        saves=4,
        loss=lambda save: 0.1 if save < 3 else 0.5,
    ),
    "lc-checkpoint": Golden(options={"scheme": LEVELS, **PUBLISHED}, saves=4, loss=lambda _: 0.05),
    "excp": Golden(options={"scheme": "excp", **PUBLISHED}, saves=4, loss=lambda save: 0.1),
    "excp-guarded": Golden(options={"scheme": "excp", **NO_PROBE}, saves=2),
    "itmo": Golden(options={"scheme": {"name": "itmo", "width": 4}, **PUBLISHED}, saves=3),
}


class Process:
    """One process of a training; made afresh, it knows nothing but the folder."""

    def __init__(self, golden: Golden, url: str) -> None:
        self.golden, self.save = golden, 0
        random.seed(1)  # the generators' states are saved, too
        np.random.seed(1)
        torch.manual_seed(1)
        self.model = Model(**golden.model)
        start, aim, skew = Drawn(1), Drawn(2), Drawn(3)
        self.aims: dict[str, np.ndarray] = {}
        self.batches: dict[str, list[np.ndarray]] = {}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                shape = tuple(parameter.shape)
                parameter.copy_(torch.from_numpy(start(shape) / 16))
                self.aims[name] = aim(shape) / 16
                self.batches[name] = [self.aims[name] + skew(shape) / 64 for _ in range(BATCHES)]
        self.average = Average(self.model) if golden.averages else None
        self.optimizers = golden.optimizers(self.model)
        self.checkpointer = Checkpointer(
            url,
            self.model,
            self.optimizers,
            **grouped(
                every=golden.interval if golden.options.get("adopt") else None,
                evaluate=self.evaluate if golden.evaluates else None,
                train_loss=self.train_loss if golden.probes else None,
                **FAST,
                **golden.options,
                **{} if self.average is None else {"average": self.average},
            ),
        )
        self.begun = self.checkpointer.resume()

    def evaluate(self) -> list[float]:
        measured = self.model if self.average is None else self.average.module
        weights = {name: wide(p) for name, p in measured.named_parameters()}
        harm = self.golden.loss(self.save)
        return [
            1
            + harm
            * math.fsum(
                x for n, w in weights.items() for x in ((w - self.batches[n][batch]) ** 2).ravel().tolist()
            )
            / 64
            for batch in range(BATCHES)
        ]

    def train_loss(self, index: int) -> torch.Tensor:
        drawn = Drawn(1000 + index)
        parts = [
            (p.double() - torch.from_numpy(self.aims[name] + drawn(tuple(p.shape)) / 32)).square().sum()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        ]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def step(self, index: int) -> None:
        drawn = Drawn(10_000 + index)
        names = {p: name for name, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    rows = 2.0 ** -(np.arange(p.shape[0]) % 4).reshape(-1, *[1] * (p.dim() - 1))
                    gradient = (wide(p) - self.aims[names[p]] + drawn(tuple(p.shape)) / 8) * rows
                    advance(optimizer, group, p, gradient)
        mean, variance = self.model.norm.running_mean, self.model.norm.running_var
        mean.copy_(torch.from_numpy(wide(mean) + drawn(tuple(mean.shape)) / 64))
        variance.copy_(torch.from_numpy(wide(variance) + drawn(tuple(mean.shape)) ** 2 / 64))
        self.model.norm.num_batches_tracked += 1
        if self.average is not None:
            for kept, live in zip(self.average.module.parameters(), self.model.parameters(), strict=True):
                kept.copy_(torch.from_numpy(wide(kept) * 0.75 + wide(live) * 0.25))


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def advance(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], p: torch.Tensor, gradient: np.ndarray
) -> None:
    """One step as the optimizer makes it, without its rounding."""
    state = optimizer.state[p]
    fresh = torch.zeros_like(p)

    def moved(key: str, memory: float, towards: np.ndarray) -> np.ndarray:
        kept = state.setdefault(key, fresh.clone())
        kept.copy_(torch.from_numpy(wide(kept) * memory + towards))
        return wide(kept)

    if isinstance(optimizer, torch.optim.SGD):
        change = moved("momentum_buffer", group["momentum"], gradient)
    else:
        first, second = group["betas"]
        state["step"] = state.get("step", torch.zeros(())) + 1
        mean = moved("exp_avg", first, (1 - first) * gradient)
        if isinstance(optimizer, torch.optim.Adamax):
            before = wide(state.setdefault("exp_inf", fresh.clone()))
            state["exp_inf"].copy_(torch.from_numpy(np.maximum(before * second, np.abs(gradient))))
            change = mean / (wide(state["exp_inf"]) + 2.0**-20)
        else:
            squares = moved("exp_avg_sq", second, (1 - second) * gradient * gradient)
            change = mean / (np.sqrt(squares) + 2.0**-20)
    p.copy_(torch.from_numpy(wide(p) - group["lr"] * change))


def made(golden: Golden, folder: Path) -> list[dict[str, Any]]:
    """Run a training; what its saves have stored, in order, and what later saves have replaced it by."""
    url, rows, seen = str(folder), [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = Process(golden, url)
        for save in range(golden.saves):
            process.save = save
            for index in range(save * golden.interval, (save + 1) * golden.interval):
                process.step(index)
                process.checkpointer.step(index + 1)
            if save in golden.broken:
                process.model.inner.weight.data[3, 5] = math.nan
            if save in golden.exact or not golden.options.get("adopt"):
                process.checkpointer.save(index + 1, wait=True, exact=save in golden.exact)
            process.checkpointer.flush()
            if save in golden.broken:
                process.model.inner.weight.data[3, 5] = 0.0
            rows += [*stored(url, seen)]
            if save in golden.resumes:
                process.checkpointer.close()
                process = Process(golden, url)
                assert process.begun == index + 1
        process.checkpointer.close()
    return rows


DECIDED = ("configuration", "reason", "measured", "evaluations", "allowed", "degradation", "degradation_low", "degradation_high",
           "degradation_noise", "cost", "cost_high", "cost_delay", "resumed", "resumed_high")  # fmt: skip
"""What the report of a save tells of its plan."""
FURTHER = (
    "scheme",
    "baseline",
    "update_error",
    "update_length",
    "lost_steps",
    "not_finite",
    "kept_exactly",
    "exact",
)


_MEASURED_ON_UPDATES = (" update_error", " update_length", " lost_steps")


def stored(url: str, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Of each checkpoint of a run that was not seen yet: digests of what its container holds, and what its manifest says."""
    store = RunStore(url)
    for manifest in reversed(store.manifests()):
        if manifest.digest in seen:
            continue
        seen.add(manifest.digest)
        checkpoint = read_container(store.fetch(manifest)[-1])
        container = write_container(replace(checkpoint, provenance=None))  # which names versions
        save: Any = manifest.meta["save"]
        yield {
            "step": manifest.step,
            "kind": manifest.kind,
            "chain": len(manifest.chain),
            "weights_only": bool(manifest.meta.get("weights_only")),
            **{name: save[name] for name in (*DECIDED, *FURTHER)},
            "header": short([str(checkpoint.part), checkpoint.parent, checkpoint.scheme, checkpoint.tree]),
            "tensors": {
                entry.spec.name: short(
                    [entry.spec.to_json(), entry.encoded.codec, dict(entry.encoded.params), entry.digest],
                    *entry.encoded.sections.values(),
                )
                for entry in checkpoint.entries
            },
            "bytes": len(container),
            "sha256": hashlib.sha256(container).hexdigest(),
        }


def short(plain: Any, *more: bytes) -> str:
    """The beginning of a digest, enough to tell which part differs."""
    hashed = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for data in more:
        hashed.update(data)
    return hashed.hexdigest()[:8]


def difference(found: Any, expected: Any, place: str = "") -> str | None:
    """The first place where two records differ, as by more than 0.0001 of a number; None where they are equal.

    What the guard measures on trial updates depends on how a processor adds up, and may differ by 0.001.
    """
    if isinstance(expected, list) and isinstance(found, list):
        found, expected = dict(enumerate(found)), dict(enumerate(expected))
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        told = (
            difference(found.get(key), expected.get(key), f"{place} {key}")
            for key in dict.fromkeys([*expected, *found])
        )
        return next(filter(None, told), None)
    if isinstance(expected, float) and isinstance(found, float | int):
        tolerance = 1e-3 if place.endswith(_MEASURED_ON_UPDATES) else 1e-4
        same = math.isclose(found, expected, rel_tol=tolerance, abs_tol=1e-7)
    else:
        same = found == expected
    return None if same else f"{place}: {found!r}, and {expected!r} is recorded"
