"""Bytes and speed of the coders of ExCP's symbols, on three small trainings.

    OMP_NUM_THREADS=1 python examples/benchmarks/excp_coders.py [--models gpt] [--width 96] [--lstm]

The trainings of `schemes.py`, narrower, are run for 150 steps and saved every 50. Of ExCP's last delta (second moments restored as
row times column, matrices only, moments of a base coded too), the bytes of all symbols are printed for every coder, and how many
times those of rANS they are. Speeds are of coding and of reading the whole delta, in MB of raw state per CPU second, best of three.
``--lstm`` adds scheme ``itmo``, which takes minutes, and whose speed is of one run.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from schemes_measure import Chain
from schemes_models import MODELS, Course, Training
from schemes_settings import Setting

from shrinkpoint.schemes.catalogue import options_of
from shrinkpoint.schemes.published.excp_codecs import ExcpOptions
from shrinkpoint.schemes.symbol_coders import SymbolCoder
from shrinkpoint.state.training import TrainingState

EXCP: dict[str, Any] = {
    "refill": "factored",
    "base_moments": "quantized",
    "matrices_only": True,
    "min_elements": 2000,
}
CODERS: tuple[SymbolCoder, ...] = tuple(c for c in get_args(SymbolCoder) if c not in ("packed", "cyclic"))


@dataclass(frozen=True, kw_only=True)
class Narrow(Course):
    """A training of `schemes.py` with narrower layers."""

    width: int

    @property
    def config(self) -> Any:
        """Shape and recipe."""
        return replace(super().config, width=self.width, layers=3, heads=4)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one setting takes."""

    symbols: int
    """Bytes of ExCP's symbols in the delta."""
    encode: float
    decode: float
    """Seconds of the delta."""


def states_of(course: Course) -> list[TrainingState]:
    """The training's states at its saves."""
    training, states = Training(course), []
    for step in course.save_steps:
        training.run(step)
        states.append(training.state())
    return states


def best_of(repeats: int, function: Callable[[], object]) -> float:
    """Shortest CPU time in seconds: other processes are not counted."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return min(times)


def measure(setting: Setting, states: Sequence[TrainingState], course: Course, repeats: int) -> Found:
    """Code a chain; what is timed has been done once before, so that kernels are compiled, unless it is done once."""
    chain, steps = Chain(setting), course.save_steps
    for state, step in zip(states[:-1], steps[:-1], strict=True):
        chain.add(state, step)
    if repeats > 1:
        chain.encode(states[-1], steps[-1])
    encode = best_of(repeats, lambda: chain.encode(states[-1], steps[-1]))
    coded = chain.add(states[-1], steps[-1])
    chain.read()
    decode = best_of(repeats, chain.read) - best_of(repeats, lambda: chain.read(len(steps) - 1))
    symbols = sum(len(entry.encoded.sections.get("symbols", b"")) for entry in coded.checkpoint.entries)
    return Found(symbols=symbols, encode=encode, decode=decode)


def speeds(found: Found, raw: int) -> str:
    """Columns of speeds."""
    return f"{raw / found.encode / 1e6:>10.1f}{raw / found.decode / 1e6:>10.1f}"


def print_excp(states: Sequence[TrainingState], course: Course, raw: int, alpha: float, lstm: bool) -> None:
    """One line for each coder."""
    settings = {
        coder: Setting(scheme="excp", label=coder, options=ExcpOptions(alpha=alpha, coder=coder, **EXCP))
        for coder in CODERS
    }
    if lstm:
        options = replace(options_of("itmo"), alpha=alpha, **EXCP)
        settings["lstm"] = Setting(scheme="itmo", label="lstm", options=options)
    found = {
        name: measure(setting, states, course, 1 if name == "lstm" else 3)
        for name, setting in settings.items()
    }
    for name, one in found.items():
        share = one.symbols / found["rans"].symbols
        print(
            f"{course.model:<9}excp, alpha {alpha:<8g}{name:<9}{one.symbols:>10}{share:>8.3f}{speeds(one, raw)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="by commas (default all three)")
    parser.add_argument("--width", type=int, default=96, help="of the layers (default 96)")
    parser.add_argument("--alphas", default="5e-5,2e-4,1e-3", help="ExCP's thresholds, by commas")
    parser.add_argument("--lstm", action="store_true", help="scheme itmo too, with the second alpha: minutes")
    parser.add_argument("--every", type=int, default=50, help="steps between saves (default 50)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    alphas = [float(alpha) for alpha in options.alphas.split(",")]
    print(f"{'training':<9}{'scheme':<23}{'coder':<9}{'bytes':>10}   share  ...  encode, decode in MB/s")
    for model in options.models.split(","):
        course = Narrow(
            model=model, seed=1, every=options.every, saves=3, marks=(0,), held_out=1, width=options.width
        )
        states = states_of(course)
        raw = sum(spec.nbytes for spec in states[-1].specs.values())
        print(f"{model}: {raw / 1e6:.1f} MB", flush=True)
        for place, alpha in enumerate(alphas):
            print_excp(states, course, raw, alpha, options.lstm and place == min(1, len(alphas) - 1))


if __name__ == "__main__":
    main()
