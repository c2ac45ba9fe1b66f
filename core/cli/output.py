"""Prints results: rich tables for people, JSON for scripts."""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = [
    "adopted_text",
    "age",
    "bytes_text",
    "console",
    "degradation_text",
    "exact_texts",
    "interval_text",
    "number",
    "print_json",
    "print_pairs",
    "print_table",
    "ratio_text",
]

_PIPE_WIDTH = 240
"""Width where stdout is not a terminal, so that nothing is cut in a pipe."""

_WORTH_SAYING = 0.2
"""Share of a checkpoint's bytes."""

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def console(*, stderr: bool = False) -> Console:
    """A console that prints names unchanged: brackets in them are not markup."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()) -> None:
    """A table; columns that are not in `left` contain numbers and are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column,
            justify="left" if column in left else "right",
            no_wrap=column not in left,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    console().print(table)


def bytes_text(size: float) -> str:
    """A size in decimal units, three digits."""
    for unit in _UNITS:
        if size < 999.5 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.3g} {unit}"


def ratio_text(ratio: float | None) -> str:
    """A ratio of sizes, or a dash."""
    return "-" if ratio is None else f"{ratio:.1f}x"


def interval_text(mean: object, high: object) -> str:
    """A relative rise with its upper end in brackets, in percent; or a dash."""
    if not isinstance(mean, (int, float)):
        return "-"
    return f"{mean:+.2%}" + (f" (<{high:.2%})" if isinstance(high, (int, float)) and high != mean else "")


def _cost_text(noted: Mapping[str, Any]) -> str:
    """The measured degradation, and the upper end of what a restore costs, of older reports that of the degradation."""
    high = noted.get("cost_high")
    return interval_text(noted["degradation"], noted["degradation_high"] if high is None else high)


def degradation_text(noted: Mapping[str, Any]) -> str:
    """The measured degradation of a checkpoint's restore, or why it is not known."""
    known = noted["measured"]
    if noted.get("not_finite"):
        return "-"  # nothing more can be lost
    if noted.get("adopted"):
        return "exact"  # the training itself went on from what is restored
    return known if known in ("unmeasured", "blind") else _cost_text(noted)


def adopted_text(noted: Mapping[str, Any]) -> str | None:
    """Whether training went on from a checkpoint's restored values, and what that cost it; None in runs that do not adopt."""
    if noted.get("adopted") is None:
        return None
    if not noted["adopted"]:
        return "not planned: exact"
    cost = (
        "nothing"
        if noted["measured"] == "exact"
        else "an unknown part of the loss"
        if noted["degradation"] is None
        else _cost_text(noted)
    )
    seconds = noted.get("adopt_s")
    took = f" in {seconds:.2g} s" if isinstance(seconds, int | float) else ""
    return f"adopted{took}, for {cost}"


def exact_texts(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """How much of a lossy checkpoint's bytes is exact, and why; small parts are left out."""
    return [
        f"all exact: {part['reason']}"
        if part["role"] == "all"
        else f"{part['share']:.0%} of the bytes: {part['role']}, exact: {part['reason']}"
        for part in parts
        if part["share"] >= _WORTH_SAYING
    ]


def number(value: object) -> str:
    """A number in short, or a dash."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def age(wall_time: float) -> str:
    """The time since then; the writer's clock may be ahead of this one."""
    seconds = max(0.0, time.time() - wall_time)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
