"""What the bench of schemes has measured already: one JSON line per cell, in a folder that outlives interruptions.

Every ``*.jsonl`` of the folder is read, so that pieces measured apart are put together by copying files; of two lines
for the same cell the later one counts, in the order of the files' names and then of the lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Cache", "Key", "digest", "line_of"]


def digest(value: object) -> str:
    """Twelve hexadecimal digits that stand for a value of JSON's kinds; the order of a dict's keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Key:
    """Which cell: what was measured, on which training, with which scheme."""

    part: str
    model: str
    every: int
    seed: int
    scheme: str
    setting: str
    options: str
    """Digest of everything else that the result depends on: the scheme's options and the training's."""


class Cache:
    """The cells of a folder.

    Args:
        folder: made when the first cell is put.
    """

    FILE = "cells.jsonl"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cells: dict[Key, dict[str, Any]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for key, result in _lines(path):
                self._cells[key] = result

    def __contains__(self, key: Key) -> bool:
        return key in self._cells

    def get(self, key: Key) -> dict[str, Any] | None:
        """A cell's result, if it was measured."""
        return self._cells.get(key)

    def items(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """All cells, those of other options too."""
        return iter(self._cells.items())

    def put(self, key: Key, result: Mapping[str, Any]) -> None:
        """Keep a result; on return it is in the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / self.FILE
        line = line_of(key, result)
        # the line before may have been cut off by an interruption
        cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        with path.open("a") as file:
            file.write(("\n" if cut else "") + line + "\n")
        self._cells[key] = json.loads(line)["result"]  # as it will be read: string keys, lists


def line_of(key: Key, result: Mapping[str, Any]) -> str:
    """A cell as it stands in a file."""
    return json.dumps({"key": asdict(key), "result": dict(result)}, sort_keys=True)


def _lines(path: Path) -> Iterator[tuple[Key, dict[str, Any]]]:
    for line in path.read_text().splitlines():
        try:
            node = json.loads(line)
            yield Key(**node["key"]), node["result"]
        except (ValueError, KeyError, TypeError):  # cut off, or of another version: measured again
            continue
