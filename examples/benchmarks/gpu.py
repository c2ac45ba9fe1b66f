"""What saving takes of a training on a GPU: snapshots, measurements, adoption, step logs, FSDP2 and restores.

    python examples/benchmarks/gpu.py [--only saves,adopt] [--layers 12] [--width 768] [--batch 64] [--limit 30] [--out FILE]
        [--device cpu --quick]

A GPT of GPT-2's form trains on made-up tokens with bf16 autocast and AdamW: 124 million parameters, whose state has 1.5 GB. --layers 4
--width 512 is smaller. Each section prints its tables as it goes on. A section that fails prints its traceback, and the next one
begins; one that takes longer than its time (--limit) is ended. After that, and if a section takes the process with it or leaves the GPU unusable,
a new process goes on with the sections after it.

plain: torch.save, torch.distributed.checkpoint.async_save and a bare copy to pinned memory. saves: what the host waits for at a save, and by how much longer a block of steps takes with a save in it than without, both with
the GPU's work included. measured:
with evaluate= and train_loss=. adopt: with adopt=True. restore: until the first step. steps: with step_log=. exchange: FSDP2 with
one rank. --device cpu --quick is to see that it runs: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

SECTIONS = {
    "plain": 25.0,
    "saves": 60.0,
    "measured": 40.0,
    "restore": 30.0,
    "steps": 70.0,
    "adopt": 45.0,
    "exchange": 25.0,
}
"""In the order in which they run, with the seconds that each may take: the last one changes what torch is for the process."""
_GRACE_S = 30.0
_QUICK = {"layers": 2, "width": 64, "vocabulary": 512, "length": 32, "batch": 2, "steps": 3, "rounds": 2}
_FULL = {
    "layers": 12,
    "width": 768,
    "vocabulary": 50257,
    "length": 512,
    "batch": 64,
    "steps": 10,
    "rounds": 3,
}
_COMPILE = """
import time
from shrinkpoint.saving.compilation import compile_coders, is_compiled
started = time.perf_counter()
if not is_compiled("auto"):
    compile_coders("auto")
print(f"{time.perf_counter() - started:.1f}", flush=True)
"""


class TimeOver(BaseException):
    """A section's time is; no Exception, since those the library turns into warnings."""


def parsed() -> argparse.Namespace:
    """The command line; sizes that are not given are those of --quick, or of the whole bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model: no real numbers")
    for name in _FULL:
        parser.add_argument(f"--{name}", type=int, help=f"default {_FULL[name]}")
    limits = ", ".join(f"{name} {seconds:.0f}" for name, seconds in SECTIONS.items())
    parser.add_argument("--limit", type=float, help=f"seconds for each section (default: {limits})")
    parser.add_argument("--threads", type=int, help="of the coders (default: half of the processors)")
    parser.add_argument("--folder", type=Path, help="for runs; default: a temporary one")
    parser.add_argument("--out", type=Path, help="append the tables to this Markdown file")
    parser.add_argument("--begun", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, value in (_QUICK if options.quick else _FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    wanted = options.only.split(",")
    unknown = set(wanted) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    options.only = [name for name in SECTIONS if name in wanted]
    return options


def main() -> None:
    options = parsed()
    if options.begun is not None:
        sys.exit(run(options))
    with tempfile.TemporaryDirectory(prefix="gpu-bench-", dir=options.folder) as folder:
        sys.exit(supervise(options.only, Path(folder)))


def supervise(wanted: list[str], folder: Path) -> int:
    """Run the sections in a process of their own; if it ends before the last one, the others in another one.

    Args:
        wanted: names of the sections.
        folder: for all that they write.

    Returns:
        How many processes have failed.
    """
    failed = 0
    while wanted:
        begun = folder / "begun"
        begun.write_text("")
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--begun", str(begun)]
        code = subprocess.run([*command, "--only", ",".join(wanted)], check=False).returncode
        failed += code != 0
        done = begun.read_text().split()
        if not done:
            print(f"the process ended with {code} before its first section", flush=True)
            break
        wanted = [name for name in wanted if name not in done]
        clear(folder)
    return failed


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeOver` inside after so many seconds; if it is not heeded, end the process, and say where it was."""

    def ring(*_: object) -> None:
        raise TimeOver(f"it has taken more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _GRACE_S / 2)
    faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


class Compilation:
    """Compiles the coders in another process."""

    def __init__(self) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _COMPILE]
        self._child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self._waited = False

    def wait(self) -> None:
        """Until they are compiled, or the process has ended."""
        if self._waited:
            return
        self._waited = True
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        if line:
            print(f"coders were compiled after {line} s", flush=True)
        else:
            print(f"coders are compiled where they are used: {self._child.wait()}", flush=True)


def run(options: argparse.Namespace) -> int:
    """The sections, in this process; how many have failed."""
    compilation = Compilation()
    started = time.perf_counter()
    import gpu_saves
    import gpu_sections
    import gpu_steps
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    from gpu_model import Bench, Report, Shape, Training, release

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU: --device cpu --quick shows that the bench runs")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    report = Report(options.out)
    report.say(*heading(options, torch))
    bench = Bench(
        shape=Shape(
            layers=options.layers,
            width=options.width,
            vocabulary=options.vocabulary,
            length=options.length,
            batch=options.batch,
            device=device,
        ),
        folder=options.folder,
        report=report,
        steps=options.steps,
        rounds=options.rounds,
        threads=options.threads,
        limit_s=0.0,
    )
    tiny = replace(bench.shape, layers=1, width=64, vocabulary=512, length=32, batch=2)
    Training(tiny).held_out()  # imports more of torch, and finds the GPU: not within a section's time
    report.say(f"ready after {time.perf_counter() - started:.1f} s")
    failed = 0
    for name in options.only:
        with options.begun.open("a") as begun:
            begun.write(f"{name}\n")
        report.say("", f"### {name}", "")
        module = next(one for one in (gpu_saves, gpu_steps, gpu_sections) if name in one.__all__)
        if name != "plain":
            compilation.wait()
        bench.limit_s = options.limit or SECTIONS[name]
        bench.began = started = time.perf_counter()
        over = False
        try:
            with limited(bench.limit_s):
                getattr(module, name)(bench)
        except (Exception, TimeOver) as error:  # noqa: BLE001 - the other sections are measured all the same
            over = isinstance(error, TimeOver)
            failed += 1
            traceback.print_exc(file=sys.stdout)
            report.say(f"{name} failed: {type(error).__name__}: {str(error).splitlines()[:1]}")
        report.say(f"{name}: {time.perf_counter() - started:.1f} s")
        if over:  # what was interrupted may be half done, and a save go on in the background, which is not waited for
            sys.stdout.flush()
            os._exit(1)
        if device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # every later call would raise it again
                report.say(f"the GPU is left unusable by {name}, a new process goes on: {error}")
                return 1
        release()
        clear(options.folder)
    return failed


def clear(folder: Path) -> None:
    """Remove the runs of a section that is over."""
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def heading(options: argparse.Namespace, torch: Any) -> list[str]:
    """What was measured, and where."""
    gpu = torch.cuda.get_device_name(0) if options.device == "cuda" else "no GPU"
    cores = len(os.sched_getaffinity(0))
    return [
        f"## {gpu}, torch {torch.__version__}, {cores} processors (os.cpu_count() says {os.cpu_count()})",
        "",
        f"{options.layers} layers, {options.width} wide, vocabulary {options.vocabulary}, {options.batch} x"
        f" {options.length} tokens in a step",
    ]


if __name__ == "__main__":
    main()
