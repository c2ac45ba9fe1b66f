"""`make demo`: train, kill -9, start again, and measure what the compressed checkpoints cost.

    python examples/demo.py [--steps 600] [--seed 1] [--out demo-out] [--quick] [--stores]

1. A small GPT learns the Python standard library's source text, undisturbed, with ordinary checkpoints.
2. The same training with CompressedCheckpoint gets SIGKILL at a random moment, is started again by the same
   command, resumes by itself and finishes.
3. The last checkpoint is restored in a fresh process and compared with the true weights.

With ``--stores`` (`make demo-stores`) the run is in three folders that stand for three buckets. One is deleted while the training runs; what
the training then says is found in its log, and `shrinkpoint stores` and `shrinkpoint stores --heal` are run as a user would. At last another
one is deleted: the last checkpoint is restored from what healing wrote.

Every number shown at the end was measured in this run. Each run gets a new numbered folder under ``--out``;
nothing older is touched, but ``demo.svg`` and ``table.md`` directly under ``--out`` show the newest one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from demo_picture import picture
from demo_report import DemoResult, Save, findings, grid, markdown, rich_table
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

QUICK = {"width": 64, "layers": 2, "heads": 2, "block": 64, "warmup": 10}


class DemoError(Exception):
    """The demo cannot go on; the message says why and where to look."""


class TrainingProcess:
    """A child process of the demo, watched from outside through the events that it logs."""

    def __init__(self, settings: Path, name: str) -> None:
        self.name, self.output = name, settings.parent / f"{name}.log"
        self.events: list[dict[str, Any]] = []
        path = settings.parent / f"{name}.events.jsonl"
        path.touch()
        self._reader, self._partial = path.open(encoding="utf-8"), ""
        command = [sys.executable, str(Path(__file__).with_name("demo_train.py")), str(settings), str(path)]
        with self.output.open("wb") as output:
            # In a session of its own, so that Ctrl-C reaches the demo alone, which then ends the child. Saving works beside the
            # training: torch's idle threads must leave it the processor, not spin.
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            )

    def poll(self) -> bool:
        """Read new events; returns whether the process is still running."""
        running = self.process.poll() is None
        *lines, self._partial = (self._partial + self._reader.read()).split("\n")
        self.events += [json.loads(line) for line in lines]
        return running

    def kill(self) -> None:
        """SIGKILL, at once, and wait until the process is gone."""
        self.process.kill()
        self.process.wait()
        self.poll()

    def wait(self, watch: Callable[[], None] = lambda: None, *, killed_on_purpose: bool = False) -> None:
        """Call `watch` again and again until the process has ended; raise if it did not end well."""
        while self.poll():
            watch()
            time.sleep(0.1)
        self.poll()
        watch()
        code = self.process.returncode
        if code and not (killed_on_purpose and code == -signal.SIGKILL):
            tail = "\n".join(self.output.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(f"{self.name} ended with code {code}; {self.output} ends so:\n{tail}")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def step(self) -> int:
        """The optimizer step reached, 0 before the first."""
        return next((int(e["step"]) for e in reversed(self.events) if e["event"] in ("train", "start")), 0)

    @property
    def seconds(self) -> float:
        """Time from the start of training to the last step seen."""
        steps = [e["time"] for e in self.events if e["event"] in ("start", "train", "val", "end")]
        return float(steps[-1] - steps[0])

    def curve(self, kind: str) -> dict[int, float]:
        """A loss by step: ``train`` or ``val``."""
        return {int(e["step"]): float(e["loss"]) for e in self.of(kind)}


class Stores:
    """The three stores of a run, and what happens to them.

    Args:
        folder: They are folders in this one.
        lose_at: The step after which one of them is deleted, as soon as it holds a checkpoint.
    """

    def __init__(self, folder: Path, lose_at: int) -> None:
        self.urls = [str(folder / name) for name in ("bucket-a", "bucket-b", "disk-c")]
        self._lose_at, self._commits_before = lose_at, 0
        self._lost_at: int | None = None
        self._shown: list[str] = []

    def watch(self, step: int) -> None:
        """Delete one of them when it is time, and no commit is under way that would make its folder again."""
        commits = self._commits()
        if self._lost_at is None and step >= self._lose_at and commits[0] and len(set(commits)) == 1:
            self._commits_before, self._lost_at = commits[0], step
            lost = Path(self.urls[1]).rename(f"{self.urls[1]}-lost")  # at once: a save may be writing to it
            shutil.rmtree(lost, ignore_errors=True)

    @property
    def continued(self) -> bool:
        """Whether a checkpoint has been saved without the lost one."""
        return self._lost_at is not None and self._commits()[0] > self._commits_before

    def _commits(self) -> list[int]:
        return [len(list(Path(url, "commits").glob("[0-9]*.json"))) for url in self.urls]

    def heal(self) -> None:
        """Look at them, heal, look again, and delete another one."""
        for words, code in (
            (["stores"], 1),
            (["stores", "--heal"], 0),
            (["stores"], 0),
        ):  # 1: something is missing
            command = [Path(sys.executable).with_name("shrinkpoint"), *words, *self.urls]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            shown = f"shrinkpoint {' '.join([*words, *self.urls])}"
            if done.returncode != code:
                raise DemoError(f"{shown}\n{done.stdout}{done.stderr}")
            self._shown += [f"$ {shown}", *map(str.rstrip, done.stdout.strip().splitlines()), ""]
        shutil.rmtree(self.urls[0])

    def story(self, folder: Path) -> Iterator[str]:
        """What happened, line by line, and what the training said of it before and after the kill."""
        yield f"{self.urls[1]} was deleted after step {self._lost_at}. The training went on, and said:"
        yield from _warnings(folder / "run-1.log", self.urls[1])
        yield "After kill -9 it resumed from the other two, and said:"
        yield from _warnings(folder / "run-2.log", self.urls[1])
        yield from ("", *self._shown)
        yield f"Then {self.urls[0]} was deleted: the last checkpoint was restored from the other two."


def _warnings(log: Path, url: str) -> list[str]:
    """What the warnings say of a store that fails."""
    said = re.compile(rf"store \d \({re.escape(os.path.abspath(url))}\).*")
    found = [f"    {line}" for line in said.findall(log.read_text(encoding="utf-8", errors="replace"))]
    if not found:
        raise DemoError(f"{log} does not tell that {url} is lost")
    return found


class Demo:
    """The whole demo, from an empty folder to a `DemoResult`."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.console = console
        self.steps = options.steps or (60 if options.quick else 600)
        self.every = max(2, self.steps // (6 if options.quick else 8))
        self.folder = _new_folder(options.out)
        # After the first save, and before the kill.
        self.stores = Stores(self.folder / "run", self.every * 3 // 2) if options.stores else None
        self.urls = self.stores.urls if self.stores else [str(self.folder / "run")]
        self._common: dict[str, Any] = {
            "every": self.every,
            "seed": options.seed,
            "threads": options.threads,
            # Tiny steps are faster than saving: they must wait, or most saves of the quick demo would be skipped.
            "busy": "wait" if options.quick else "skip",
            "config": {**(QUICK if options.quick else {}), "steps": self.steps},
            "true_weights": str(self.folder / "true-final-weights.pt"),
        }
        # Anywhere between two saves in the middle half of the run.
        middle = range(self.steps * 2 // 5, self.steps * 3 // 4)
        self.kill_step = random.Random(options.seed).choice([s for s in middle if s % self.every])
        self.kill_delay = random.random() * 0.1
        self._children: list[TrainingProcess] = []

    def run(self) -> DemoResult:
        """Do everything; the children are gone when this returns or raises."""
        started = time.monotonic()
        try:
            with _progress(self.console) as progress:
                reference = self._train(progress, "undisturbed, torch.save", "reference", "reference")
                first = self._train(progress, "compressed, until kill -9", "compressed", "run-1", kill=True)
                second = self._train(progress, "started again, resumes", "compressed", "run-2")
                if self.stores:
                    healing = progress.add_task("shrinkpoint stores, heal, stores", total=1)
                    self.stores.heal()
                    progress.update(healing, completed=1)
                check = self._start("remeasure", "remeasure")
                waiting = progress.add_task("restore in a fresh process", total=1)
                check.wait()
                progress.update(waiting, completed=1)
        finally:
            for child in self._children:
                child.kill()
        return self._result(reference, first, second, check, time.monotonic() - started)

    def _start(self, mode: str, name: str) -> TrainingProcess:
        url = str(self.folder / "reference") if mode == "reference" else self.urls
        settings = self.folder / f"{name}.settings.json"
        settings.write_text(
            json.dumps({"mode": mode, "url": url, **self._common}, indent=1), encoding="utf-8"
        )
        child = TrainingProcess(settings, name)
        self._children.append(child)
        return child

    def _train(
        self, progress: Progress, title: str, mode: str, name: str, *, kill: bool = False
    ) -> TrainingProcess:
        child = self._start(mode, name)
        task = progress.add_task(title, total=self.steps)

        def watch() -> None:
            progress.update(task, completed=child.step)
            if kill and self.stores:
                self.stores.watch(child.step)
            if kill and child.step >= self.kill_step and self._may_be_killed():
                time.sleep(self.kill_delay)
                child.kill()
                progress.stop_task(task)
                progress.update(
                    task, completed=child.step, description=f"[red]kill -9 after step {child.step}"
                )

        child.wait(watch, killed_on_purpose=kill)
        if kill and child.step >= self.steps:
            raise DemoError(
                f"{name} finished before it could be killed: {self.urls[0]} had no checkpoint by then"
            )
        return child

    def _may_be_killed(self) -> bool:
        """Whether there is something to resume from, and of several stores, whether saving went on without one."""
        return self.stores.continued if self.stores else any(Path(self.urls[0], "commits").glob("*.json"))

    def _result(
        self,
        reference: TrainingProcess,
        first: TrainingProcess,
        second: TrainingProcess,
        check: TrainingProcess,
        wall_s: float,
    ) -> DemoResult:
        resumed = second.of("start")[0]
        if not resumed["step"]:
            raise DemoError(f"the second start did not resume: see {second.output}")
        torch_saves = {int(e["step"]): e for e in reference.of("torch_save")}
        measured = check.of("remeasured")[0]
        reference_val = reference.curve("val")
        early_val = {s: v for s, v in first.curve("val").items() if s <= resumed["step"]}
        return DemoResult(
            versions=check.of("process")[0]["versions"],
            steps=self.steps,
            saves=_collect_saves(self.urls, {step: int(e["bytes"]) for step, e in torch_saves.items()}),
            reference=reference.curve("train"),
            before=first.curve("train"),
            after=second.curve("train"),
            reference_val=reference_val,
            run_val=early_val | second.curve("val"),
            killed_at=first.step,
            resumed_at=int(resumed["step"]),
            resume_degradation=resumed["val_loss"] / reference_val[int(resumed["step"])] - 1,
            final_reference_val=reference.of("end")[0]["val_loss"],
            final_run_val=second.of("end")[0]["val_loss"],
            remeasured_degradation=measured["restored_loss"] / measured["true_loss"] - 1,
            torch_save_s=sum(float(e["seconds"]) for e in torch_saves.values()),
            reference_train_s=reference.seconds,
            train_s=first.seconds + second.seconds,
            wall_s=wall_s,
        )


def _collect_saves(urls: list[str], torch_bytes: dict[int, int]) -> list[Save]:
    """What the run's own manifests say, so that saves of the killed process count as well."""
    # Imported late: torch takes seconds, and the progress bar should not wait for it.
    from shrinkpoint.store.run import RunStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the store that was deleted last
        manifests = sorted(RunStore(urls).manifests(), key=lambda m: (m.epoch, m.seq))
    return [
        Save(
            step=manifest.step,
            kind=manifest.kind,
            bytes=manifest.chain[-1].size,
            torch_bytes=torch_bytes[manifest.step],
            degradation=manifest.meta["save"]["degradation"],
            blocked_s=manifest.meta["save"]["blocked_s"],
            search_s=manifest.meta["save"]["search_s"],
        )
        for manifest in manifests
        if manifest.step in torch_bytes  # the last one may not be, where `every` does not divide the steps
    ]


def _new_folder(out: Path) -> Path:
    """The next free numbered folder under ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in (out / f"{number:03d}" for number in itertools.count(1)):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: the numbers do not end")


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _show(console: Console, result: DemoResult, demo: Demo) -> None:
    from shrinkpoint.store.urls import url_text  # imported late, as above

    folder, out = demo.folder, demo.folder.parent
    for name, text in (("demo.svg", picture(result)), ("table.md", markdown(result))):
        (folder / name).write_text(text, encoding="utf-8")
        shutil.copyfile(folder / name, out / name)
    console.print(f"\n[bold]{result.versions}")
    console.print(rich_table(result))
    console.print(grid(findings(result)))
    console.print(f"\npicture      {out / 'demo.svg'}\ntable        {out / 'table.md'}")
    console.print(f"checkpoints  {folder / 'run'}  (shrinkpoint ls {url_text(demo.urls)})")
    if demo.stores:
        story = "\n".join(demo.stores.story(folder)) + "\n"
        console.print(f"\n{story}", markup=False, highlight=False, soft_wrap=True)
        (folder / "stores.txt").write_text(story, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, help="optimizer steps of each run (default 600; 60 with --quick)")
    add("--seed", type=int, default=1, help="seeds weights, batches and the step of the kill")
    add("--out", type=Path, default=Path("demo-out"), help="folder for everything that is written")
    add("--threads", type=int, default=2, help="torch threads of each training process")
    add("--stores", action="store_true", help="three stores, one of which is lost in the middle")
    add("--quick", action="store_true", help="a tiny model, done in under a minute")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 24:
        parser.error(f"--steps {options.steps} leaves no room for saves and a kill; use at least 24")

    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)  # as Ctrl-C: end the training process too
    console = Console()
    demo = Demo(options, console)
    console.print(f"Everything is written to [bold]{demo.folder}[/]; Ctrl-C stops cleanly.\n")
    try:
        result = demo.run()
    except KeyboardInterrupt:
        console.print(
            f"\nStopped; the training processes have ended. What was written so far is in {demo.folder}."
        )
        return 130
    except DemoError as error:
        console.print(f"\n{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    _show(console, result, demo)
    return 0


if __name__ == "__main__":
    sys.exit(main())
