"""Encode and decode speed of a whole training state, by stage, beside torch.save and zstd in the same run.

    python examples/benchmarks/codec.py [--width 512] [--layers 8] [--threads 2]

The state is real: a GPT after a few AdamW steps on the standard library's source text, and again a few steps later. MB
are fp32 state (weights and both moments). Absolute speeds belong to this machine; the ratios are what to quote.
"""

import argparse
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zstandard
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, GPTConfig, build_optimizer

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import decode_chain, in_memory
from shrinkpoint.container.writer import write_container
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import TrainingState

CONFIGURATION = Configuration(bins=16, prune=0.0, protect=0.005, metric="sensitivity", embedding_bins=32)


def train(width: int, layers: int) -> tuple[list[TrainingState], dict[str, Any]]:
    """Two snapshots, some steps apart, and the second as ``torch.save`` would take it."""
    torch.manual_seed(0)
    config = GPTConfig(width=width, layers=layers, heads=width // 64)
    model = GPT(config)
    optimizer = build_optimizer(model, config)[0]
    text = b"".join(path.read_bytes() for path in sorted(Path(torch.__file__).parent.glob("*.py"))[:20])
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
    states = []
    for step in range(12):
        starts = torch.randint(0, len(tokens) - 65, (4,)).tolist()
        loss = model.loss(torch.stack([tokens[start : start + 65] for start in starts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (7, 11):
            live = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
            states.append(Snapshotter().take(TrainingState.capture(live, describe)).state)
    return states, live


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """The better of two runs' seconds, and the result; the first one may compile."""
    best, result = float("inf"), None
    for _ in range(2):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return best, result


def encode(state: TrainingState, name: str, before: EncodedState | None, threads: int) -> EncodedState:
    """One checkpoint under a scheme with a given configuration, a delta where there is one before."""
    options = InshrinkeratorOptions()
    scheme = (
        Lossless() if name == "lossless" else Inshrinkerator(options, Weights(state, options), CONFIGURATION)
    )
    reference, parent = (before.reference, before.checkpoint.state_digest) if before else (None, None)
    return encode_state(state, scheme, step=0, reference=reference, parent=parent, threads=threads)


def stages(state: TrainingState) -> list[tuple[str, float]]:
    """Seconds of each stage of encoding the weights, on one thread."""
    options = InshrinkeratorOptions()
    sketching, weights = timed(lambda: Weights(state, options))
    codecs = [(weights.codec(spec, CONFIGURATION), weights.tensors[spec.name]) for spec in weights.specs]
    quantizing, _ = timed(lambda: [codec.quantize(tensor) for codec, tensor in codecs])
    return [("weights: sketches", sketching), ("weights: partition, cluster, assign", quantizing)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    states, live = train(arguments.width, arguments.layers)
    megabytes = states[1].nbytes / 1e6
    table = Table("what", "threads", "MB/s", "ratio", title=f"{megabytes:.0f} MB of training state")

    seconds, _ = timed(lambda: torch.save(live, io.BytesIO()))
    table.add_row("torch.save to memory", "1", f"{megabytes / seconds:.0f}", "1.0")
    raw = b"".join(tensor.contiguous().numpy().tobytes() for tensor in states[1].tensors.values())
    seconds, packed = timed(lambda: zstandard.ZstdCompressor(level=3).compress(raw))
    table.add_row("zstd -3", "1", f"{megabytes / seconds:.0f}", f"{len(raw) / len(packed):.2f}")
    for stage, seconds in stages(states[1]):
        table.add_row(stage, "1", f"{megabytes / seconds:.0f}", "")
    for name in ("inshrinkerator", "lossless"):
        for threads in sorted({1, arguments.threads}):
            seconds, base = timed(lambda name=name, n=threads: encode(states[0], name, None, n))
            size = len(write_container(base.checkpoint))
            table.add_row(
                f"{name}: encode a base",
                f"{threads}",
                f"{megabytes / seconds:.0f}",
                f"{megabytes * 1e6 / size:.1f}",
            )
            seconds, delta = timed(lambda name=name, base=base, n=threads: encode(states[1], name, base, n))
            files = [write_container(each.checkpoint) for each in (base, delta)]
            ratio = f"{megabytes * 1e6 / len(files[1]):.1f}"
            table.add_row(f"{name}: encode a delta", f"{threads}", f"{megabytes / seconds:.0f}", ratio)
            seconds, _ = timed(lambda files=files, n=threads: decode_chain([in_memory(files[0])], threads=n))
            table.add_row(f"{name}: decode a base", f"{threads}", f"{megabytes / seconds:.0f}", "")
            seconds, _ = timed(
                lambda files=files, n=threads: decode_chain([*map(in_memory, files)], threads=n)
            )
            table.add_row(f"{name}: decode base and delta", f"{threads}", f"{megabytes / seconds:.0f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
