"""What sharded saving takes at scale, without GPUs: balance of owners, sizes of records, messages; and bytes against one container.

    python examples/benchmarks/sharded_scale.py [--width 192 --layers 4] [--scheme auto]

First table: fp32 weights and both moments of models like Llama's with 7 to 405 billion parameters, on paper, and the CPU time in which one
rank (the fullest owner) finds out what it sends and receives, once for a layout. Second: their saves and restores, computed from the
speeds and ratios in results/peers.csv: 8 ranks share a node and its link of 1 GB/s, each codes with 8 threads and then sends; CPU time is a
share of 16 processors for ten minutes. Third: a GPT after some AdamW steps, coded as
one container and as the parts of 2 to 16 ranks, in the same run; the time that falls with ranks is given as the share of the slowest owner,
in bytes. ``--width 208`` is the demo's GPT, ``--width 768 --layers 14`` has 100 million parameters.
"""

import csv
import itertools
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from cells import RESULTS
from common import TextTraining, parsed, show
from gpt import GPTConfig

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.container.layout import PartOf
from shrinkpoint.container.writer import write_container
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import ReferenceState, SaveContext, Scheme
from shrinkpoint.schemes.exact import Lossless
from shrinkpoint.schemes.sums import WeightSums
from shrinkpoint.sharded.boxes import Box
from shrinkpoint.sharded.gathering import Gathering
from shrinkpoint.sharded.layout import Layout, block_box, owners_of
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState
from shrinkpoint.store.keys import data_key, new_nonce
from shrinkpoint.store.manifest import BlobRef, Head, Manifest, Part

RANKS = (64, 256, 1024, 4096)
MODELS = {
    "7 B": {"width": 4096, "hidden": 11008, "layers": 32, "vocab": 32000, "keys": 4096},
    "70 B": {"width": 8192, "hidden": 28672, "layers": 80, "vocab": 32000, "keys": 1024},
    "405 B": {"width": 16384, "hidden": 53248, "layers": 126, "vocab": 128256, "keys": 1024},
}
CHAIN = 32  # checkpoints, twice those of the longest chain by default
WAYS = ("DCP", "DCP, ZStandard extension", "shrinkpoint, lossless, delta", "shrinkpoint, auto, delta")
RANKS_OF_A_NODE, LINK, THREADS, PIECE = 8, 1e9, 8, 64e6
AGREEMENT = 8 * 11  # bytes of each rank: eleven integers
POST = 700  # bytes of a rank's report, about


def llama(width: int, hidden: int, layers: int, vocab: int, keys: int) -> dict[str, TensorSpec]:
    """The specs of weights, moments and step counts."""
    shapes = {"embed.weight": (vocab, width), "head.weight": (vocab, width), "norm.weight": (width,)}
    layer = {
        "q": (width, width),
        "k": (keys, width),
        "v": (keys, width),
        "o": (width, width),
        "gate": (hidden, width),
    }
    layer |= {"up": (hidden, width), "down": (width, hidden), "norm1": (width,), "norm2": (width,)}
    for number in range(layers):
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    specs: dict[str, TensorSpec] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        below = f"optimizers/0/state/{index}"
        roles = {
            f"model/{name}": Role.WEIGHT,
            f"{below}/exp_avg": Role.EXP_AVG,
            f"{below}/exp_avg_sq": Role.EXP_AVG_SQ,
        }
        for full, role in roles.items():
            tag = Tag(role=role, parameter=name)
            specs[full] = TensorSpec(name=full, dtype=torch.float32, shape=shape, tag=tag)
        specs[f"{below}/step"] = TensorSpec(name=f"{below}/step", dtype=torch.float32, shape=())
    return specs


def record_sizes(world: int) -> tuple[int, int]:
    """Bytes of a head, and of the manifest of a chain of `CHAIN` heads."""
    session = new_nonce()

    def ref(parts: int = 0) -> BlobRef:
        key, more = data_key(10**6, session), {"parts": parts, "parts_bytes": parts * 10**9}
        return BlobRef(key=key, size=10**5 if parts else 10**9, sha256="0" * 64, **more)

    head = Head(step=10**6, parts=tuple(Part(ref=ref(), state_digest="0" * 32) for _ in range(world)))
    manifest = Manifest(
        seq=10**4, epoch=3, session=session, step=10**6, kind="delta", chain=tuple(ref(world) for _ in range(CHAIN)),
        parent_digest="0" * 64, state_digest="0" * 32, wall_time=0.0, library="shrinkpoint", reader_features=("parts",),
    )  # fmt: skip
    return len(head.to_bytes()), len(manifest.to_bytes())


def paper() -> None:
    """The first table."""
    lines = []
    for name, shape in MODELS.items():
        specs = llama(**shape)
        for world in RANKS:
            owners = owners_of(specs, world)
            loads = [0] * world
            for spec, rank in owners.values():
                loads[rank] += spec.nbytes
            head, manifest = record_sizes(world)
            kilobytes = [f"{size / 1e3:.0f} kB" for size in (head, manifest, AGREEMENT * world, POST * world)]
            planning = f"{planning_s(specs, world, loads.index(max(loads)), owners):.2f} s"
            fullest = f"{max(loads) * world / sum(loads):.3f}", f"{max(loads) / 1e9:.2f} GB"
            cells = [name, world, len(owners), *fullest, *kilobytes[:2], world + 2, *kilobytes[2:]]
            lines.append([*cells, planning])
    headings = "parameters | ranks | stored tensors | fullest owner, of the mean | of the fullest | head"
    headings += (
        f" | manifest of a chain of {CHAIN} | puts for a save | agreement, all ranks | posts | planning"
    )
    show(headings, lines, "Owners and records")


def _number(cell: str) -> float:
    return float(re.split("[ x]", cell)[0])


def simulated() -> None:
    """The second table."""
    with (RESULTS / "peers.csv").open(newline="") as file:
        measured = {row["what"]: row for row in csv.DictReader(file)}
    lines = []
    for name, world in itertools.product(("7 B", "70 B"), RANKS[:3]):
        specs = llama(**MODELS[name])
        loads = [0] * world
        for spec, rank in owners_of(specs, world).values():
            loads[rank] += spec.nbytes
        total = sum(spec.nbytes for spec in specs.values())
        for peer in WAYS:
            write, read, ratio = (_number(measured[peer][c]) for c in ("write", "read", "ratio"))
            base = measured.get(peer.replace(", delta", ", base")) if ", delta" in peer else None
            behind = (
                0 if base is None else total / _number(base["ratio"])
            )  # which a restore of a delta reads too
            most = max(loads) if "shrinkpoint" in peer else total / world  # DCP's ranks write what they have
            sent, got = (b / world * RANKS_OF_A_NODE / LINK for b in (total / ratio, total / ratio + behind))
            coding, decoding = (most / 1e6 / speed / THREADS for speed in (write, read))
            requests = world * math.ceil(total / ratio / world / PIECE) + (2 if "shrinkpoint" in peer else 1)
            share = total / world / 1e6 / write / (16 * 600)
            times = f"{coding + sent:.1f} s", f"{decoding + got:.1f} s"
            lines.append(
                [name, world, peer, f"{total / ratio / 1e9:.1f} GB", *times, requests, f"{share:.2%}"]
            )
    headings = "parameters | ranks | stored by | bytes | save | restore | requests | CPU share"
    show(headings, lines, "Saves and restores, computed")


def fsdp_layout(specs: Mapping[str, TensorSpec], world: int) -> Layout:
    """Every tensor cut by rows over all ranks, as FSDP2 does; a tensor without rows is everywhere."""
    tables: dict[tuple[int, ...], dict[Box, tuple[int, ...]]] = {}
    for shape in {spec.shape for spec in specs.values()}:
        if not shape:
            tables[shape] = {Box((), ()): tuple(range(world))}
            continue
        height, rest = -(-shape[0] // world), shape[1:]
        starts = range(0, shape[0], height)
        tables[shape] = {
            Box((start, *(0 for _ in rest)), (min(height, shape[0] - start), *rest)): (rank,)
            for rank, start in enumerate(starts)
        }
    sharded = frozenset(name for name, spec in specs.items() if spec.shape)
    return Layout(specs, {name: tables[spec.shape] for name, spec in specs.items()}, {}, sharded, ())


def planning_s(
    specs: Mapping[str, TensorSpec], world: int, rank: int, owners: Mapping[str, tuple[TensorSpec, int]]
) -> float:
    """CPU seconds in which a rank plans the exchange of a save; they are needed again only when the layout changes."""
    layout = fsdp_layout(specs, world)
    started = time.process_time()
    group: Any = SimpleNamespace(rank=rank, size=world)
    Gathering(group, layout, owners)
    return time.process_time() - started


def part_of(state: TrainingState, owners: Mapping[str, tuple[TensorSpec, int]], rank: int) -> TrainingState:
    """What a rank codes of a state."""
    specs = {name: spec for name, (spec, owner) in owners.items() if owner == rank}
    tensors = {}
    for name, spec in specs.items():
        of, box = block_box(spec)
        rows = slice(box.offset[0], box.offset[0] + box.size[0]) if spec.block else ...
        tensors[name] = state.tensors[of][rows]
    return TrainingState(state.tree if rank == 0 else None, tensors, specs)


def scheme_of(
    name: str, parts: Sequence[TrainingState], step: int, references: Mapping[int, Any]
) -> list[Scheme]:
    """One for each rank; of ``auto``, whose step sizes depend on sums over all ranks' weights, its mildest settings."""
    if name == "lossless":
        return [Lossless() for _ in parts]
    contexts = [
        SaveContext(state=part, step=step, reference=references.get(i)) for i, part in enumerate(parts)
    ]
    sums = (Auto(save_context=context).sums(part) for context, part in zip(contexts, parts, strict=True))
    total = sum(sums, WeightSums())
    return [Auto(save_context=replace(context, sums=total)) for context in contexts]


def coded(states: list[TrainingState], world: int, scheme: str = "lossless") -> list[tuple[int, float]]:
    """Bytes of all parts of each checkpoint of a chain, and the share of the largest part."""
    owners = owners_of(states[0].specs, world)
    reference: dict[int, dict[str, ReferenceState]] = {}
    found = []
    for step, state in enumerate(states):
        sizes = []
        parts = [part_of(state, owners, rank) for rank in range(world)]
        for rank, chosen in enumerate(scheme_of(scheme, parts, step, reference)):
            parent = "0" * 32 if step else None
            encoded = encode_state(
                parts[rank], chosen, step=step, reference=reference.get(rank), parent=parent
            )
            reference[rank] = dict(encoded.reference)
            part = PartOf(rank, world) if world > 1 else None
            sizes.append(len(write_container(replace(encoded.checkpoint, part=part))))
        found.append((sum(sizes), max(sizes) / sum(sizes)))
    return found


def snapshots(width: int, layers: int) -> list[TrainingState]:
    """Train, and take two states some steps apart."""
    training = TextTraining(GPTConfig(width=width, layers=layers, heads=width // 64, block=64, batch=4))
    states = []
    for steps in (8, 4):
        for _ in range(steps):
            training.step()
        states.append(training.snapshot())
    return states


def measured(width: int, layers: int, scheme: str) -> None:
    """The third table."""
    states = snapshots(width, layers)
    lines, alone = [], coded(states, 1, scheme)
    for world in (1, 2, 4, 16):
        found = coded(states, world, scheme)
        ratio = sum(size for size, _ in found) / sum(size for size, _ in alone)
        share = f"1/{1 / max(share for _, share in found):.1f}"
        lines.append([world, *(size for size, _ in found), f"{ratio:.4f}", share])
    title = f"{scheme}, {sum(spec.nbytes for spec in states[0].specs.values()) / 1e6:.1f} MB of state"
    show("ranks | base, bytes | delta, bytes | of one container's | largest owner's share", lines, title)


def main() -> None:
    options = parsed(__doc__, width=192, layers=4, scheme="lossless")
    paper()
    simulated()
    measured(options.width, options.layers, options.scheme)


if __name__ == "__main__":
    main()
