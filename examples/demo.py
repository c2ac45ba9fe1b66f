"""`make demo`: train, kill -9, start again, and measure what the compressed checkpoints cost.

    python examples/demo.py [--framework lightning] [--steps 600] [--seed 1] [--out demo-out] [--quick] [--stores] [--adopt]

1. A small GPT learns the Python standard library's source text, undisturbed, with ordinary checkpoints.
2. The same training with CompressedCheckpoint gets SIGKILL at a random moment, is started again by the same
   command, resumes by itself and finishes.
3. The last checkpoint is restored in a fresh process and compared with the true weights.

With ``--adopt`` the compressed run goes on from what its checkpoints restore (docs/resuming.md), and so is another training than the
undisturbed one from its first save on; how long it waits for that is shown.

With ``--stores`` (`make demo-stores`) the run is in three stores, one of which is lost before the kill; see demo_stores.py.

Every number shown at the end was measured in this run. Each run gets a new numbered folder under ``--out``;
nothing older is touched, but ``demo.svg`` and ``table.md`` directly under ``--out`` show the newest one. Where the
same training has also been done with the other framework, both are shown side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo_comparison import comparison_markdown, comparison_table, same_training
from demo_picture import picture
from demo_process import DemoError, TrainingProcess, wait
from demo_report import DemoResult, Save, findings, grid, markdown, rich_table
from demo_stores import Stores
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

FRAMEWORKS = ("lightning", "composer")
FULL: dict[str, int] = {}
QUICK = {"width": 64, "layers": 2, "heads": 2, "block": 64, "warmup": 10}


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
            "framework": options.framework,
            "every": self.every,
            "seed": options.seed,
            "threads": options.threads,
            # Tiny steps are faster than saving: they must wait, or most saves of the quick demo would be skipped.
            "busy": "wait" if options.quick else "skip",
            "adopt": self.steps // self.every if options.adopt else False,
            "config": {**(QUICK if options.quick else FULL), "steps": self.steps},
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
                wait(check, lambda: None)
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

        wait(child, watch, killed_on_purpose=kill)
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
            training={name: self._common[name] for name in ("every", "seed", "config")},
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
            adopt_s=manifest.meta["save"].get("adopt_s") or 0.0,
        )
        for manifest in manifests
        if manifest.step in torch_bytes  # the last one may not be, where `every` does not divide the steps
    ]


def _new_folder(out: Path) -> Path:
    """The next free numbered folder under ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in _numbered(out):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: the numbers do not end")


def _numbered(out: Path) -> Iterator[Path]:
    number = 1
    while True:
        yield out / f"{number:03d}"
        number += 1


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _show(console: Console, result: DemoResult, demo: Demo, framework: str) -> None:
    from shrinkpoint.store.urls import url_text  # imported late, as above

    folder, out = demo.folder, demo.folder.parent
    for name, text in (("demo.svg", picture(result)), ("table.md", markdown(result))):
        (folder / name).write_text(text, encoding="utf-8")
        shutil.copyfile(folder / name, out / name)
    (out / f"{framework}.json").write_text(result.to_json(), encoding="utf-8")
    console.print(f"\n[bold]{result.versions}")
    console.print(rich_table(result))
    console.print(grid(findings(result)))
    _show_beside(console, out)
    console.print(f"\npicture      {out / 'demo.svg'}\ntable        {out / 'table.md'}")
    console.print(f"checkpoints  {folder / 'run'}  (shrinkpoint ls {url_text(demo.urls)})")
    if demo.stores:
        _tell(console, demo.stores, folder)


def _tell(console: Console, stores: Stores, folder: Path) -> None:
    """What became of the stores, on the terminal and in a file."""
    lines = ["", *stores.story(folder / "run-1.log", folder / "run-2.log")]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    (folder / "stores.txt").write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")


def _show_beside(console: Console, out: Path) -> None:
    """Both frameworks side by side, if each has done this training."""
    files = [out / f"{name}.json" for name in FRAMEWORKS]
    if not all(file.exists() for file in files):
        return
    results = [DemoResult.from_json(file.read_text(encoding="utf-8")) for file in files]
    if same_training(results):
        console.print(comparison_table(results))
        (out / "comparison.md").write_text(comparison_markdown(results), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, default="lightning", help="what trains the model")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of each run (default 600; 60 with --quick)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seeds weights, batches and the step of the kill")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for everything that is written"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads of each training process")
    parser.add_argument(
        "--stores", action="store_true", help="three stores, one of which is lost in the middle"
    )
    parser.add_argument("--adopt", action="store_true", help="train on from what the checkpoints restore")
    parser.add_argument("--quick", action="store_true", help="a tiny model, done in under a minute")
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
    _show(console, result, demo, options.framework)
    return 0


if __name__ == "__main__":
    sys.exit(main())
