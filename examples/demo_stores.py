"""What `make demo-stores` adds to the demo: the run is in three stores, and one of them is lost in the middle of it.

Three folders stand for three buckets. One is deleted while the training runs; what the training then says is found in its
log, and `shrinkpoint stores` and `shrinkpoint stores --heal` are run as a user would. At last another one is deleted: the last
checkpoint is restored from what healing wrote.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from demo_process import DemoError

__all__ = ["Stores"]

NAMES = ("bucket-a", "bucket-b", "disk-c")
WARNING = "ShrinkpointWarning: "


class Stores:
    """The stores of a run, and what happens to them.

    Args:
        folder: They are folders in this one.
        lose_at: The step after which one of them is deleted, as soon as it holds a checkpoint.
    """

    def __init__(self, folder: Path, lose_at: int) -> None:
        self.urls = [str(folder / name) for name in NAMES]
        self._lose_at = lose_at
        self._lost_at: int | None = None
        self._commits_before = 0
        self._shown: list[str] = []

    def watch(self, step: int) -> None:
        """Delete one of them when it is time."""
        if self._lost_at is None and step >= self._lose_at and self._commits:
            self._commits_before = self._commits
            shutil.rmtree(self.urls[1], ignore_errors=True)  # a save may be writing to it
            self._lost_at = step

    @property
    def continued(self) -> bool:
        """Whether a checkpoint has been saved without the lost one."""
        return self._lost_at is not None and self._commits > self._commits_before

    @property
    def _commits(self) -> int:
        return len(list(Path(self.urls[0], "commits").glob("[0-9]*.json")))

    def heal(self) -> None:
        """Look at them, heal, look again, and delete another one."""
        for words, code in (
            (["stores"], 1),
            (["stores", "--heal"], 0),
            (["stores"], 0),
        ):  # 1: something is missing
            done = subprocess.run(
                [Path(sys.executable).with_name("shrinkpoint"), *words, *self.urls],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != code:
                raise DemoError(
                    f"shrinkpoint {' '.join(words)} {' '.join(self.urls)}\n{done.stdout}{done.stderr}"
                )
            lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
            self._shown += [f"$ shrinkpoint {' '.join(words)} {' '.join(self.urls)}", *lines, ""]
        shutil.rmtree(self.urls[0])

    def story(self, log: Path, restarted_log: Path) -> Iterator[str]:
        """What happened, line by line.

        Args:
            log: What the training wrote that lost the store.
            restarted_log: What it wrote when it was started again.
        """
        yield f"{self.urls[1]} was deleted after step {self._lost_at}. The training went on, and said:"
        yield from (f"    {line}" for line in _warnings(log, self.urls[1]))
        yield "After kill -9 it resumed from the other two, and said:"
        yield from (f"    {line}" for line in _warnings(restarted_log, self.urls[1]))
        yield ""
        yield from self._shown
        yield f"Then {self.urls[0]} was deleted: the last checkpoint was restored from the other two."


def _warnings(log: Path, url: str) -> list[str]:
    """The warnings that name a store as one that fails."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    shown = f"({os.path.abspath(url)})"
    found = [line.partition(WARNING)[2] for line in lines if WARNING in line and shown in line]
    if not found:
        raise DemoError(f"{log} does not tell that {url} is lost")
    return found
