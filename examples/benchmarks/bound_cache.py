"""What the bench of the bound has measured already: a file of one JSON line per cell, which outlives interruptions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Cells"]


class Cells:
    """The cells of a file; of two lines for the same cell the later one counts.

    Args:
        path: made when the first cell is put.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cells: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                node = json.loads(line)
                self._cells[_name(node["key"])] = node["key"], node["result"]
            except (ValueError, KeyError, TypeError):  # cut off by an interruption: measured again
                continue

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Keys and results."""
        return iter(self._cells.values())

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """A cell's result, if it was measured."""
        found = self._cells.get(_name(key))
        return None if found is None else found[1]

    def put(self, key: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Keep a result; on return it is in the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": dict(key), "result": dict(result)}, sort_keys=True)
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size
        with self.path.open("a") as file:
            file.write(("\n" if cut else "") + line + "\n")
        node = json.loads(line)  # as it will be read: string keys, lists
        self._cells[_name(key)] = node["key"], node["result"]

    def prune(self) -> int:
        """Write the file anew with the lines that count, in the order of their keys; returns how many were left out."""
        before = len(self.path.read_text().splitlines()) if self.path.exists() else 0
        lines = [
            json.dumps({"key": key, "result": result}, sort_keys=True)
            for _, (key, result) in sorted(self._cells.items())
        ]
        part = self.path.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in lines))
        part.rename(self.path)
        return before - len(lines)


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
