"""What the papers report and no other bench here does: rework, transfer, bins, and the LSTM's coder, on small trainings.

    OMP_NUM_THREADS=1 python examples/benchmarks/published.py [--only rework,transfer,bins,coder] [--seeds 6] [--quick]

rework (LC-Checkpoint, figures 3 to 5): a training fails at a random step, is restored from what each way has kept up to the checkpoint
before, and goes on until its held-out loss is as low as it was at the failure. The steps that this takes, with 95 % intervals over
seeds and failures; and the bytes of the weights of a checkpoint, as a share of theirs. SCAR saves an eighth of the rows, eight times as
often; the others save every 16 steps. Moments are exact but with `auto` and two bits.
transfer (Inshrinkerator, table 6): a GPT that has learnt Python is stored, restored, and fine-tuned on English.
bins (table 7): what Inshrinkerator's search chooses with different limits on the loss, without our guards, and with as much time as
training has. coder (ITMO): ExCP's symbols of a GPT's second delta by LZMA, as published, by ours, and by the LSTM.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import random
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from common import TextTraining, cpu, parsed, show
from gpt import GPTConfig
from schemes_run import SETTINGS, Chain, Position, Setting, chosen
from scipy.stats import t as student
from torch import nn
from trainings import KINDS
from trainings.base import Kind, Run, Training, split, training
from trainings.base import chosen as drawn
from trainings.data import images
from trainings.parts import cosine

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.config import Advanced
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.schemes.catalogue import ItmoOptions
from shrinkpoint.schemes.published.excp_codecs import ExcpOptions
from shrinkpoint.state.roles import describe_training

_EVERY = 16
_SMALL = GPTConfig(width=96, layers=2, heads=4, block=64, batch=8)


def _logistic(run: Run) -> Training:
    pictures, labels = images(0, 4096, 16)
    held = split([part[:1024] for part in images(1, 1024, 16)], 256)
    model = nn.Sequential(nn.Flatten(), nn.Linear(pictures[0].numel(), int(labels.max()) + 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.02)
    loss = lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return training(
        run, model, loss, drawn((pictures, labels), 64), (held, held), sgd, rate=cosine(run.steps, 0.1)
    )


_LOGISTIC = Kind("logistic", "Logistic regression, SGD", _logistic, _EVERY)
_REWORK = {"logistic": _LOGISTIC, **{name: KINDS[name] for name in ("matrix-factorization", "resnet")}}
_WAYS = (
    "lossless:exact", "lc-checkpoint:2 bit, moments too", "lc-checkpoint:3 bit", "scar:an eighth", "topn:a tenth",
    "auto:scale 1",
)  # fmt: skip


class Placed(Position):
    """A training of the bench of the bound that can be stopped, looked at, and put elsewhere."""

    def __init__(self, kind: Kind, seed: int, quick: bool, steps: int | None = None) -> None:
        made = kind.make(seed, quick, steps)
        self._made, self.loss, self.final, self.step = made, made.probe, made.final, 0
        paths: dict[str, Any] = {"model_path": ("model",), "optimizers_path": ("optimizers",)}
        self._describe = describe_training(made.model, [made.optimizers[0]], **paths)


def lost(kind: Kind, seed: int, quick: bool) -> Iterator[tuple[str, int, float]]:
    """Fail once: what each way has taken to be as good again, and the share of bytes of its last save."""
    steps = 3 * _EVERY if quick else 8 * _EVERY
    position, states, losses = Placed(kind, seed, quick, 2 * steps), {}, []
    states[0] = position.state()
    for step in range(1, steps):
        position.run(step)
        losses.append(position.loss())
        if step % (_EVERY // 8) == 0:
            states[step] = position.state()
    fails = random.Random(seed).randrange(2 * _EVERY, steps)
    for way in chosen(SETTINGS, _WAYS):
        every = _EVERY // 8 if way.scheme == "scar" else _EVERY
        chain = Chain(way, states[0])
        for step in range(every, fails, every):
            chain.add(states[step], step)
        position.load(chain.read().state)
        start = position.step
        while position.loss() > losses[fails - 1] and position.step < 2 * steps:
            position.run(position.step + 1)
        sizes = chain.sizes["delta"]
        share = sizes["weights"] / max(1, sizes["raw_weights"])
        yield f"{way.scheme}, {way.label}", position.step - start, share


def rework(options: Any) -> None:
    rows = []
    for kind in _REWORK.values():
        found: dict[str, list[tuple[int, float]]] = {}
        for seed in range(1, (2 if options.quick else options.seeds) + 1):
            for name, steps, share in lost(kind, seed, options.quick):
                found.setdefault(name, []).append((steps, share))
        for name, each in found.items():
            steps = [pair[0] for pair in each]
            error = student.ppf(0.975, len(steps) - 1) * statistics.stdev(steps) / len(steps) ** 0.5
            mean, share = statistics.mean(steps), statistics.mean(pair[1] for pair in each)
            interval = f"{mean:.1f} ({mean - error:.1f} to {mean + error:.1f})"
            rows.append([kind.title, name, interval, f"{share:.1%}", f"{1 / share:.1f}x"])
    show("training | kept by | rework, steps | bytes of the weights | ratio", rows, "Rework")


def transfer(options: Any) -> None:
    kind, exact, rows = KINDS["fine-tuning"], {}, []
    for way in reversed(chosen(SETTINGS, ("lossless:exact", "inshrinkerator:mild", "inshrinkerator:harsh"))):
        changes: list[tuple[float, float]] = []
        for seed in range(1, 2 if options.quick else 4):
            position = Placed(kind, seed, options.quick)
            chain = Chain(way, position.state())
            chain.add(position.state(), 0)
            position.load(chain.read().state)
            start = position.final()
            position.run(kind.steps(options.quick))
            first, last = exact.setdefault(seed, (start, position.final()))
            changes.append((100 * (start / first - 1), 100 * (position.final() / last - 1)))
        ratio = chain.sizes["base"]["raw_weights"] / chain.sizes["base"]["weights"]
        ends = [(statistics.median(c), min(c), max(c)) for c in zip(*changes, strict=True)]
        cells = ["{:+.2f} % ({:+.2f} to {:+.2f})".format(*each) for each in ends]
        rows.append([f"{way.scheme}, {way.label}", f"{ratio:.1f}x", *cells])
    show("stored by | ratio of the weights | loss at the restore | after the fine-tuning", rows, "Transfer")


def bins(options: Any) -> None:
    rows = []
    for limit in (0.001, 0.01, 0.05):
        made = TextTraining(_SMALL)
        with tempfile.TemporaryDirectory() as folder:
            run = Checkpointer(
                folder, made.model, made.optimizer, scheme="inshrinkerator", every=None, evaluate=made.loss,
                max_degradation=limit, advanced=Advanced(busy="wait", guards=False, search_overhead=1.0),
            )  # fmt: skip
            run.resume()
            for step in range(1, (9 if options.quick else 161)):
                made.step()
                run.step(step)
                if step % (4 if options.quick else 40) == 0:
                    run.save(step, wait=True)
            run.close()
            for report in run.reports():
                weights = report.raw_sections["weight"] / max(1, report.sections["weight"])
                kept = report.configuration or report.reason
                rise = f"{report.degradation or 0:+.2%}"
                rows.append([f"{limit:.1%}", report.step, kept, f"{weights:.1f}x", rise])
    show("limit | step | configuration | ratio of the weights | loss at the restore", rows, "Bins")


def coder(options: Any) -> None:
    made, states = TextTraining(_SMALL), []
    for _ in range(4):
        for _ in range(2 if options.quick else 50):
            made.step()
        states.append(made.snapshot())
    raw, rows, first = sum(tensor.nbytes for tensor in states[-1].tensors.values()), [], 0
    for scheme, name, settings in (
        ("excp", "LZMA, as ExCP", ExcpOptions()),
        ("excp", "rANS given the labels before", ExcpOptions(coder="rans")),
        ("itmo", "LSTM, 32 units", ItmoOptions()),
    ):
        chain = Chain(Setting(scheme=scheme, label=name, options=settings), states[0])
        for step, state in enumerate(states[1:-1]):
            chain.add(state, step)
        seconds, _ = cpu(lambda chain=chain: chain.add(states[-1], 3), 1)
        first = first or len(chain.files[-1])
        size = len(chain.files[-1])
        less, speed = f"{1 - size / first:.1%}", f"{raw / 1e6 / seconds:.2g}"
        rows.append([name, f"{size:,}", f"{raw / size:.1f}x", less, speed])
    headings = "coder | bytes of the second delta | ratio | less than LZMA | MB per CPU second"
    show(headings, rows, "Coder of ExCP's symbols")


TABLES = {table.__name__: table for table in (rework, transfer, bins, coder)}


def main() -> None:
    options = parsed(__doc__, only=list(TABLES), seeds=6, quick=False)
    warnings.simplefilter("ignore", ShrinkpointWarning)
    torch.set_num_threads(1)
    for name in options.only:
        TABLES[name](options)


if __name__ == "__main__":
    main()
