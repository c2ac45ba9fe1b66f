"""Speed of the coders on one thread, in CPU time; peers.py has what else stores a state.

    OMP_NUM_THREADS=1 python examples/benchmarks/auto_speed.py [--width 512] [--matrices 6] [--small 1000]

The state is AdamW's in fp32: matrices, and an embedding that has a third of it. Nothing is trained. Second moments are rows times
columns times a scatter, first ones are noise in units of their roots, and weights move by noise, which no prediction makes shorter.

The first table has microseconds per tensor of many small matrices and their moments.

The second one has MB of raw state per CPU second, of a chain of eight checkpoints, from snapshots to containers and back. ``1 link``
is what each further checkpoint of the chain adds to reading. ``memory`` is the most that a save takes beside its snapshot, with what a
reader would hold and the container, as a share of the state (Linux).
"""

import math
import time
from collections.abc import Iterator, Sequence

import torch
from common import cpu, parsed, reset_peak, resident, show
from torch import nn

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import decode_chain, in_memory
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.movement import MovementTracker
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.catalogue import build
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import TrainingState

_CHAIN, _INTERVAL = 8, 10


def saves_of(shapes: Sequence[tuple[int, int]], count: int) -> Iterator[SaveContext]:
    """States of a training, some steps apart."""
    draw = torch.Generator().manual_seed(0)
    model = nn.ParameterList([nn.Parameter(0.02 * torch.randn(shape, generator=draw)) for shape in shapes])
    optimizer = torch.optim.AdamW(model.parameters())
    describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
    tracker = MovementTracker()
    for step in range(_INTERVAL, _INTERVAL * (count + 1), _INTERVAL):
        for weight in model.parameters():
            rows, columns = weight.shape
            scales = torch.randn(rows, 1, generator=draw).exp() * torch.randn(columns, generator=draw).exp()
            second = (1e-3 * scales) ** 2 * (0.5 + torch.rand(weight.shape, generator=draw))
            first = 0.3 * second.sqrt() * torch.randn(weight.shape, generator=draw)
            weight.data += 1e-4 * torch.randn(weight.shape, generator=draw)
            kept = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}
            optimizer.state[weight] = kept
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        state = TrainingState.capture({"model": weights, "optimizers": [optimizer.state_dict()]}, describe)
        yield SaveContext(state=state, step=step, movement=tracker.since(state, step))
        tracker.note(state, step)


class Chain:
    """Checkpoints of one scheme, each built on the one before."""

    def __init__(self, scheme: str) -> None:
        self.files: list[bytes] = []
        self.seconds: list[float] = []
        self.memory = 0.0
        self.size = 0
        self._scheme, self._options = scheme, AutoOptions(weight_scale=1.0) if scheme == "auto" else None
        self._last: EncodedState | None = None

    def encode(self, save: SaveContext) -> tuple[EncodedState, bytes]:
        known = {"reference": self._last and dict(self._last.reference)}
        context = SaveContext(state=save.state, step=save.step, movement=save.movement, **known)
        encoded = encode_state(
            save.state,
            build(self._scheme, self._options, context), step=save.step, threads=1, lasting=True,
            parent=self._last and self._last.checkpoint.state_digest, **known,
        )  # fmt: skip
        assert self._scheme != "auto" or not encoded.kept_exactly, encoded.kept_exactly
        return encoded, write_container(encoded.checkpoint)

    def add(self, save: SaveContext, rounds: int = 2) -> None:
        best, encoded, data = math.inf, None, b""
        for _ in range(rounds):
            encoded, data = None, b""
            before, began = reset_peak(), time.thread_time()
            encoded, data = self.encode(save)
            best = min(best, time.thread_time() - began)
            self.memory = max(self.memory, (resident("VmHWM") - before) / save.state.nbytes)
        self._last, self.size = encoded, save.state.nbytes
        self.seconds.append(best)
        self.files.append(data)

    def read(self, links: int = _CHAIN) -> None:
        decode_chain([*map(in_memory, self.files[:links])], threads=1)

    def speeds(self) -> list[str]:
        megabytes = self.size / 1e6
        base, second, last = (cpu(lambda n=n: self.read(n))[0] for n in (1, 2, _CHAIN))  # type: ignore[misc]
        link = (last - second) / (_CHAIN - 2)
        rates = [megabytes / seconds for seconds in (self.seconds[0], min(self.seconds[1:]), base, link)]
        rest = (
            f"{1e3 * last / megabytes:.1f}",
            f"{self.size / len(self.files[-1]):.1f}x",
            f"{self.memory:.2f}x",
        )
        return [*(f"{rate:.0f}" for rate in rates), *rest]


def main() -> None:
    options = parsed(__doc__, width=512, matrices=6, small=1000)
    torch.set_num_threads(1)
    width, matrices, rows = options.width, options.matrices, []
    shapes = [
        (2 * matrices * width, width),
        *([(4 * width, width), (width, 4 * width)] * matrices)[:matrices],
    ]
    chains = {scheme: Chain(scheme) for scheme in ("auto", "lossless")}
    for scheme in chains:
        small = Chain(scheme)
        for tiny in saves_of([(32, 32)] * options.small, 2):
            small.add(tiny)
        seconds = [*small.seconds, cpu(lambda: small.read(2))[0] / 2]  # noqa: B023
        rows.append([scheme, *(f"{1e6 * each / options.small / 3:.0f}" for each in seconds)])
    title = f"{options.small} matrices of 32 x 32, and their moments: microseconds per tensor"
    show(" | saving a base | a delta | reading, per link", rows, title)
    for save in saves_of(shapes, _CHAIN):
        for chain in chains.values():
            chain.add(save)
    headings = " | saving a base | a delta | reading a base | 1 link | the eighth, s/GB | its ratio | memory"
    rows = [[scheme, *chain.speeds()] for scheme, chain in chains.items()]
    show(headings, rows, f"{save.state.nbytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
