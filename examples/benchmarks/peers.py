"""What else stores a training's state, each by its own code: size, speed, what training waits for, and restores over links.

    OMP_NUM_THREADS=1 python examples/benchmarks/peers.py [--steps 300] [--rounds 3] [--excp FILE] [--quick]

The GPT of examples/gpt.py is trained, and its state with Adam's moments is saved ``--steps`` steps after the start, and 50 steps on;
deltas are to the first of these, everything else has the second alone. MB of state per CPU second are of this process, our
measurements of the loss apart, whose CPU seconds are in ``measuring``: training waits for these too, and else for ``waits``; ``slower``
is by how much ten steps beside a save exceed ten without one; a cold restore is the CPU seconds of a fresh process, imports included.
Seconds per GB over a link are computed: the coder's CPU seconds, and bytes over the rate, one after the other. Medians of ``--rounds``,
with the least and the most. ZipNN is measured where it is installed, and compress_pythia.py of github.com/Gaffey/ExCP, which needs
faiss, where it lies in build/excp.

The second table has bfloat16 weights against those before, of which a share has changed: chosen at random by one unit in the last
place, and as one step of AdamW changes them. Ours is the codec of exact tensors; the others get the XOR of the bytes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import contextlib
import importlib.util
import io
import lzma
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pcodec.standalone
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zstandard
from common import TextTraining, cpu, in_memory_folder, parsed, show, timed
from gpt import GPTConfig
from lossless import GROUPS, Tensors, coded, coders
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.config import Advanced

RATES = (0.6e9, 0.1e9)
EXCP = Path(__file__).resolve().parents[2] / "build" / "excp" / "compress_pythia.py"
COLUMNS = ("write", "read", "waits", "measuring", "slower", "cold")
Flat = dict[str, torch.Tensor]
Save = Callable[[Flat, str], Any]
"""Stores a state in a folder; returns what waits for the background, where there is one."""

_DCP = """import torch.distributed.checkpoint as dcp
found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
dcp.load({n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in found.items()}, checkpoint_id=folder, no_dist=True)"""
_ZSTD = """import io, zstandard
torch.load(io.BytesIO(zstandard.ZstdDecompressor().decompress(open(folder + "/state", "rb").read())))"""
_OURS = "import shrinkpoint\nshrinkpoint.load(folder)"


def _of_tensors(code: str, decode: str) -> str:
    """Code that reads what `_by_tensor` has written."""
    return f"import pickle\n{code}\nfor part in pickle.load(open(folder + '/state', 'rb')).values(): {decode}"


def _by_tensor(compress: Callable[[Any], Any]) -> Save:
    def save(state: Flat, to: str) -> None:
        parts = {name: compress(tensor.numpy().ravel()) for name, tensor in state.items()}
        Path(to, "state").write_bytes(pickle.dumps(parts))

    return save


def _zstd(state: Flat, to: str) -> None:
    torch.save(state, raw := io.BytesIO())
    Path(to, "state").write_bytes(zstandard.ZstdCompressor(level=3).compress(raw.getbuffer()))


def _dcp(state: Flat, to: str) -> None:
    dcp.save(state, checkpoint_id=to, no_dist=True)


def _extended(state: Flat, to: str) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(to, _extensions=[ZStandard()]), no_dist=True)


def _asynchronous(kind: AsyncCheckpointerType) -> Save:
    return lambda state, to: dcp.async_save(state, checkpoint_id=to, async_checkpointer_type=kind).result


def peers() -> dict[str, tuple[Save, str]]:
    """All that are installed, apart from ours and ExCP, with code by which a fresh process restores."""
    pack = lambda numbers: pcodec.standalone.simple_compress(numbers, pcodec.ChunkConfig())  # noqa: E731
    found: dict[str, tuple[Save, str]] = {
        "torch.save": (lambda state, to: torch.save(state, f"{to}/state"), 'torch.load(folder + "/state")'),
        "torch.save, zstd -3": (_zstd, _ZSTD),
        "safetensors": (
            lambda state, to: save_file(state, f"{to}/state"),
            'from safetensors.torch import load_file\nload_file(folder + "/state")',
        ),
        "DCP": (_dcp, _DCP),
        "DCP, ZStandard extension": (_extended, _DCP),
        "DCP, async by thread": (_asynchronous(AsyncCheckpointerType.THREAD), _DCP),
        "DCP, async by process": (_asynchronous(AsyncCheckpointerType.PROCESS), _DCP),
        "pcodec": (_by_tensor(pack), _of_tensors("from pcodec import standalone", "standalone.simple_decompress(part)")),
    }  # fmt: skip
    if importlib.util.find_spec("zipnn") is not None:
        from zipnn import ZipNN

        made = "from zipnn import ZipNN\ncoder = ZipNN(input_format='byte', bytearray_dtype='float32', threads=1)"
        coder: Any = ZipNN(input_format="byte", bytearray_dtype="float32", threads=1)
        save = _by_tensor(lambda numbers: bytes(coder.compress(bytearray(numbers.tobytes()))))
        found["ZipNN"] = save, _of_tensors(made, "coder.decompress(part)")
    return found


class Ours:
    """A run of one scheme, whose saves refer to that before."""

    def __init__(self, scheme: str, training: TextTraining) -> None:
        self._training, self._scheme, self.evaluating = training, scheme, [0.0]
        self.run: Any = None

    def __call__(self, state: Flat, to: str) -> Any:
        made, self.evaluating[0] = self._training, 0.0
        self.run = self.run or Checkpointer(
            to, made.model, made.optimizer, scheme=self._scheme, every=None, advanced=Advanced(busy="wait", threads=1),
            evaluate=timed(self.evaluating, time.process_time)(made.loss),
        )  # fmt: skip
        self.run.save(made.scheduler.last_epoch)
        return lambda: self.run.flush(600)


def excp(
    script: str, training: TextTraining, before: dict[str, Any], root: Path
) -> tuple[dict[str, list[float]], int]:
    """CPU seconds of the authors' script to code and to read, with LZMA as 7-Zip has it, and bytes."""
    spec: Any = importlib.util.spec_from_file_location("excp_of_its_authors", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.cuda.synchronize = lambda *_: None  # it asks for a GPU only to take times
    named = {id(parameter): name for name, parameter in training.model.named_parameters()}
    module.optimizer_name = [named[id(parameter)] for parameter in training.parameters]
    for place, state in (("before", before), ("now", training.state())):
        (root / place).mkdir()
        weights = {name: state["model"][name] for name in module.optimizer_name}
        save_file(weights, root / place / "model.safetensors")
        torch.save(state["optimizer"], root / place / "optimizer.pt")
    asked = SimpleNamespace(
        checkpoint_path=str(root / "now"), ref_checkpoint_path=str(root / "before"), output=str(root / "out"), recon=False,
        only_recon=False, prune_alpha=5e-5, prune_beta=2.0, quant_bits=4, quant_bits_opt=4,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        coding, _ = cpu(lambda: module.main(asked), 1)
        packing, packed = cpu(
            lambda: lzma.compress((root / "out" / "compressed.pt").read_bytes(), preset=9), 1
        )
        asked.only_recon = True
        reading, _ = cpu(lambda: (lzma.decompress(packed), module.main(asked)), 1)
    return {"write": [coding + packing], "read": [reading]}, len(packed)


def ten_steps(training: TextTraining) -> float:
    began = time.perf_counter()
    for _ in range(10):
        training.step()
    return time.perf_counter() - began


def measured(
    name: str, save: Save, restore: str, flat: Flat, to: str, into: dict[str, list[float]] | None
) -> int:
    """Save and restore once, and what counts from a fresh process, too; the bytes of all that lies there."""
    began, used = time.perf_counter(), time.process_time()
    rest = save(flat, to)
    waited = time.perf_counter() - began
    if rest is not None:
        rest()
    used = time.process_time() - used
    if isinstance(save, Ours):
        report = save.run.reports()[-1]
        used, waited = used - save.evaluating[0], report.blocked_s
    if into is not None:
        if "process" not in name:  # whose time is another's
            into["write"].append(used)
        into["waits"].append(1e3 * waited)
        if isinstance(save, Ours):
            into["measuring"].append(save.evaluating[0])
        into["read"].append(cpu(lambda: exec(restore, {"torch": torch, "folder": to}))[0])
        began = sum(os.times()[2:4])
        code = f"import torch\nfolder = {to!r}\n{restore}"
        subprocess.run([sys.executable, "-c", code], check=True)
        into["cold"].append(sum(os.times()[2:4]) - began)
    return sum(part.stat().st_size for part in Path(to).rglob("*") if part.is_file())


def cells(size: int, stored: int, columns: dict[str, list[float]], base: int = 0) -> list[str]:
    """Cells of a row, and what follows for links; a restore reads the base's bytes too."""
    row, seconds = [f"{size / stored:.2f}x"], {n: statistics.median(v) for n, v in columns.items() if v}
    for name in COLUMNS:
        turn = (lambda s: size / 1e6 / s) if name in ("write", "read") else float
        values, digits = sorted(map(turn, columns.get(name, ()))), 1 if name in ("measuring", "cold") else 0
        ends = (
            [f"{value:.{digits}f}" for value in (statistics.median(values), values[0], values[-1])]
            if values
            else []
        )
        row.append("{} ({} to {})".format(*ends) if values else "-")
    for way, moved in (("write", stored), ("read", stored + base)):
        times = [1e9 * (seconds[way] + moved / rate) / size for rate in RATES] if way in seconds else []
        row += [f"{time:.1f}" for time in times] or ["-", "-"]
    return row


def changed(training: TextTraining, shares: Sequence[float]) -> None:
    """The second table."""

    def now() -> Tensors:
        weights = {str(i): weight.bfloat16() for i, weight in enumerate(training.weights())}
        return {**{role: {} for role in GROUPS}, "weight": weights}

    before, draw, cases, rows = now(), torch.Generator().manual_seed(0), {}, []
    for share in shares:
        cases[f"{share:.1%} at random"] = now()
        for weight in cases[f"{share:.1%} at random"]["weight"].values():
            weight.view(torch.int16).add_((torch.rand(weight.shape, generator=draw) < share).to(torch.int16))
    for group in training.optimizer.param_groups:
        group["lr"] = 1e-6
    training.backward()
    training.optimizer.step()
    cases["one step of AdamW, 1e-6"] = now()
    for name, after in cases.items():
        pairs = [(after["weight"][i], weight) for i, weight in before["weight"].items()]
        share = sum(int((a != b).sum()) for a, b in pairs) / training.count
        for coder, way in coders():
            if coder in ("zstd -3", "ZipNN", "ours (`exact`)"):
                found = coded(way, after, before)["weight"]
                rows.append([name, f"{share:.2%}", coder, f"{found.raw / found.size:.1f}x"])
    show("changed | share | coder | ratio", rows, "Bfloat16 weights against those before")


def main() -> None:
    options = parsed(__doc__, steps=300, rounds=3, excp=str(EXCP), quick=False)
    config = GPTConfig(width=32, layers=1, heads=2, block=32, batch=4) if options.quick else GPTConfig()
    steps, rounds = (3, 1) if options.quick else (options.steps, options.rounds)
    torch.set_num_threads(1)
    warnings.simplefilter(
        "ignore"
    )  # DCP's of one process, torch's of the schedule, and ours of so small a model
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training, states = TextTraining(config), []
    for count in (steps, 3 if options.quick else 50):
        for _ in range(count):
            training.step()
        states.append(training.state())
    snapshot, rows = training.snapshot(), []
    flat, size = dict(snapshot.tensors), snapshot.nbytes
    ways = {**peers(), **{f"shrinkpoint, {scheme}": (None, _OURS) for scheme in ("lossless", "auto")}}
    with tempfile.TemporaryDirectory(dir=in_memory_folder()) as root:
        for name, (save, restore) in ways.items():
            kinds = [name] if save else [f"{name}, base", f"{name}, delta"]
            found: dict[str, dict[str, list[float]]] = {kind: {c: [] for c in COLUMNS} for kind in kinds}
            for number in range(rounds + 1):  # the first one compiles, starts processes, and does not count
                way = save or Ours(name.split()[-1], training)
                Path(to := f"{root}/{name}-{0 if save else number}").mkdir(exist_ok=True)
                stored: list[int] = []
                for kind, state in zip(kinds, states[-len(kinds) :], strict=True):
                    training.load(state)
                    training.optimizer.zero_grad()  # ours would keep the gradients that are there
                    into = found[kind] if number else None
                    stored.append(measured(name, way, restore, flat, to, into) - sum(stored))
                if number and ("async" in name or save is None):
                    alone = ten_steps(training)
                    training.optimizer.zero_grad()
                    rest = way(flat, to)
                    found[kinds[-1]]["slower"].append(100 * (ten_steps(training) / alone - 1))
                    rest()
            rows += [
                [kind, *cells(size, stored[i], found[kind], sum(stored[:i]))] for i, kind in enumerate(kinds)
            ]
        if Path(options.excp).exists():
            training.load(states[1])
            columns, packed = excp(options.excp, training, states[0], Path(root))
            rows.append(["ExCP's script, LZMA, delta", *cells(size, packed, columns)])
    headings = "peer | ratio | write | read | waits, ms | measuring, CPU s | slower, % | cold restore, CPU s"
    headings += " | save at 0.6 GB/s | save at 0.1 | restore at 0.6 GB/s | restore at 0.1"
    show(headings, rows, f"Peers, {size / 1e6:.1f} MB of state: MB per CPU second, seconds per GB over links")
    changed(training, (0.001, 0.01, 0.1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
