"""CPU seconds per GB of state, saving and reading, beside torch.save, zstd and torch.distributed.checkpoint.

    python examples/benchmarks/cost.py [--width 512] [--layers 8]

The state is that of a GPT after some AdamW steps on the standard library's source text, and again some steps later: weights and both
moments in fp32. One thread; user and system time of the process, the better of two runs, the first of which may compile. Files
of torch.save and DCP are written to a temporary folder and read while they are in the page cache. A delta is read with its base, as a
restore does: what the base alone takes is subtracted. A candidate is the model that is measured before its checkpoint is
encoded: its weights are quantized once more for that. ``profile`` as an argument prints where a delta of ``auto`` spends its time.
"""

import argparse
import cProfile
import io
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import zstandard
from codec import train

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import decode_chain, in_memory
from shrinkpoint.container.writer import write_container
from shrinkpoint.quality.trial import restored_model
from shrinkpoint.quantize.movement import MovementTracker
from shrinkpoint.schemes.auto.scheme import AutoOptions
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.schemes.catalogue import build
from shrinkpoint.state.training import TrainingState

SCHEMES = ("auto", "lossless")
_SCALE = 0.5


def cpu(function: Callable[[], Any]) -> tuple[float, Any]:
    """The better of two runs' CPU seconds, and the result."""
    best, result = float("inf"), None
    for _ in range(2):
        start = time.process_time()
        result = function()
        best = min(best, time.process_time() - start)
    return best, result


def context_of(states: list[TrainingState], before: EncodedState | None) -> SaveContext:
    """Of the first state as a base, or of the second as a delta."""
    tracker = MovementTracker()
    if before is not None:
        tracker.note(states[0], 8)
    state, reference = states[before is not None], before.reference if before else None
    return SaveContext(state=state, step=12, reference=reference, movement=tracker.since(state, 12))


def scheme_of(scheme: str, save_context: SaveContext) -> Scheme:
    """A scheme for this save; its weights have half the default noise."""
    options = AutoOptions(weight_scale=_SCALE) if scheme == "auto" else None
    return build(scheme, options, save_context)


def encode(states: list[TrainingState], scheme: str, before: EncodedState | None) -> EncodedState:
    """The first state as a base, or the second as a delta."""
    save_context = context_of(states, before)
    return encode_state(
        save_context.state,
        scheme_of(scheme, save_context),
        step=12,
        reference=save_context.reference,
        parent=before.checkpoint.state_digest if before else None,
    )


def candidate(states: list[TrainingState], scheme: str, before: EncodedState | None) -> Mapping[str, Any]:
    """The model that is measured before a checkpoint is encoded: only weights are quantized, and nothing is coded."""
    save_context = context_of(states, before)
    return restored_model(save_context.state, scheme_of(scheme, save_context), save_context.reference)


def row(name: str, gigabytes: float, saving: float, reading: float | None, size: float | None) -> None:
    """One line of the table; without what there is not."""
    read = "-" if reading is None else f"{reading / gigabytes:.2f}"
    ratio = "-" if size is None else f"{gigabytes * 1e9 / size:.1f}x"
    print(f"{name:28} {saving / gigabytes:8.2f} {read:>8} {ratio:>9}", flush=True)


def ours(scheme: str, states: list[TrainingState], gigabytes: float) -> None:
    """A base and a delta."""
    saving, base = cpu(lambda: encode(states, scheme, None))
    files = [write_container(base.checkpoint)]
    reading, _ = cpu(lambda: decode_chain([in_memory(files[0])]))
    row(f"{scheme}: base", gigabytes, saving, reading, len(files[0]))
    if scheme != "lossless":
        row(
            "    a candidate for it",
            gigabytes,
            cpu(lambda: candidate(states, scheme, None))[0],
            None,
            None,
        )
    saving, delta = cpu(lambda: encode(states, scheme, base))
    files.append(write_container(delta.checkpoint))
    both, _ = cpu(lambda: decode_chain([*map(in_memory, files)]))
    row(f"{scheme}: delta", gigabytes, saving, both - reading, len(files[1]))
    if scheme != "lossless":
        row(
            "    a candidate for it",
            gigabytes,
            cpu(lambda: candidate(states, scheme, base))[0],
            None,
            None,
        )


def others(states: list[TrainingState], live: Any, gigabytes: float, folder: Path) -> None:
    """What else a state can be stored with."""
    file = folder / "state.pt"
    saving, _ = cpu(lambda: torch.save(live, file))
    reading, _ = cpu(lambda: torch.load(file, weights_only=False))
    row("torch.save", gigabytes, saving, reading, file.stat().st_size)
    raw = b"".join(tensor.contiguous().numpy().tobytes() for tensor in states[1].tensors.values())
    saving, packed = cpu(lambda: zstandard.ZstdCompressor(level=3).compress(raw))
    reading, _ = cpu(lambda: zstandard.ZstdDecompressor().decompress(packed))
    row("zstd -3", gigabytes, saving, reading, len(packed))
    flat = dict(states[1].tensors)
    to = folder / "dcp"
    saving, _ = cpu(lambda: dcp.save(flat, checkpoint_id=to, no_dist=True))
    empty = {name: torch.empty_like(tensor) for name, tensor in flat.items()}
    reading, _ = cpu(lambda: dcp.load(empty, checkpoint_id=to, no_dist=True))
    size = sum(part.stat().st_size for part in to.rglob("*") if part.is_file())
    row("torch.distributed.checkpoint", gigabytes, saving, reading, size)


def profile(states: list[TrainingState]) -> None:
    """Where the time of a delta goes, encoding and decoding."""
    base = encode(states, "auto", None)
    delta = encode(states, "auto", base)
    files = [write_container(each.checkpoint) for each in (base, delta)]
    for what in (
        lambda: encode(states, "auto", base),
        lambda: decode_chain([*map(in_memory, files)]),
    ):
        profiler, told = cProfile.Profile(), io.StringIO()
        profiler.runcall(what)
        pstats.Stats(profiler, stream=told).sort_stats("tottime").print_stats(22)
        print("\n".join(told.getvalue().splitlines()[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("what", nargs="?", choices=("table", "profile"), default="table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    states, live = train(arguments.width, arguments.layers)
    if arguments.what == "profile":
        profile(states)
        return
    gigabytes = states[1].nbytes / 1e9
    print(f"{gigabytes:.2f} GB of state, CPU seconds per GB")
    print(f"{'':28} {'saving':>8} {'reading':>8} {'ratio':>9}")
    with tempfile.TemporaryDirectory() as folder:
        others(states, live, gigabytes, Path(folder))
    for scheme in SCHEMES:
        ours(scheme, states, gigabytes)


if __name__ == "__main__":
    sys.exit(main())
