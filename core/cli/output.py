"""Results for people: tables, and numbers in short."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 1000
"""Width where stdout is not a terminal, so that nothing is cut in a pipe."""

_WORTH_SAYING = 0.2
"""Share of a checkpoint's bytes."""

_LEAST = 12
"""Characters of a name that are always shown."""

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints names unchanged: brackets in them are not markup."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def table(
    rows: Sequence[Mapping[str, object]],
    *,
    left: Sequence[str] = (),
    optional: Sequence[str] = (),
    crop: str | None = None,
) -> Iterator[Table]:
    """Yield a table, if there are rows; where `optional` or `crop` is given, each row is one line.

    Args:
        rows: texts and numbers by the titles of their columns, which are the same in all rows.
        left: columns that are left-aligned; the others contain numbers.
        optional: columns that are left out, the first of them first, where the terminal is too narrow.
        crop: the column whose texts lose their middle where that is not enough.
    """
    if not rows:
        return
    shown, width = list(rows[0]), console().width
    texts = [{column: number(value) for column, value in row.items()} for row in rows]
    widths = {column: max(map(cell_len, (column, *(row[column] for row in texts)))) for column in shown}

    def excess() -> int:
        return sum(widths[column] + 2 for column in shown) - 2 - width

    for column in optional:
        if excess() > 0:
            shown.remove(column)
    room = widths[crop] - max(excess(), 0) if crop else 0
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in shown:
        fixed = column not in left or crop is not None or bool(optional)
        made.add_column(column, justify="left" if column in left else "right", no_wrap=fixed, overflow="fold")
    for row in texts:
        made.add_row(*(_cropped(row[name], room) if name == crop else row[name] for name in shown))
    yield made


def _cropped(text: str, room: int) -> str:
    room = max(room, _LEAST)
    begins = (room - 1) // 2
    return text if len(text) <= room else f"{text[:begins]}…{text[len(text) - room + begins + 1 :]}"


def bytes_text(size: float) -> str:
    """Return a size in decimal units, three digits."""
    for unit in _UNITS:
        if size < 999.5 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.3g} {unit}"


def ratio_text(ratio: float | None) -> str:
    """Return a ratio of sizes, or a dash."""
    return "-" if ratio is None else f"{ratio:.1f}x"


def interval_text(mean: object, high: object) -> str:
    """Return a relative rise with its upper end in brackets, in percent; or a dash."""
    if not isinstance(mean, (int, float)):
        return "-"
    return f"{mean:+.2%}" + (f" (<{high:.2%})" if isinstance(high, (int, float)) and high != mean else "")


def percent_text(share: float | None) -> str:
    """Return a share in percent, three digits; or a dash."""
    return "-" if share is None else f"{100 * share:.3g}%"


def _cost_text(noted: Mapping[str, Any]) -> str:
    """Return the measured degradation, and its upper end with what lost steps cost."""
    high, delay = noted["degradation_high"], noted.get("cost_delay")
    return interval_text(noted["degradation"], high if high is None or delay is None else high + delay)


def in_all_text(noted: Iterable[Mapping[str, Any]]) -> str | None:
    """Return what a restore of any of these checkpoints costs at most, with what no measurement sees; None where that is not known."""
    highs = [one["cost_high"] for one in noted if isinstance(one.get("cost_high"), int | float)]
    return f"{max(highs):.2%}" if highs and max(highs) > 0 else None


def counted(number: int, what: str) -> str:
    """Return a number of things, in the singular where it is one."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def degradation_text(noted: Mapping[str, Any]) -> str:
    """Return the measured degradation of a checkpoint's restore, or why it is not known."""
    known = noted["measured"]
    if noted.get("not_finite"):
        return "-"  # nothing more can be lost
    if noted.get("adopted"):
        return "exact"  # the training itself went on from what is restored
    return known if known in ("unmeasured", "blind") else _cost_text(noted)


def adopted_text(noted: Mapping[str, Any]) -> str | None:
    """Return whether training went on from a checkpoint's restored values, and what that cost it; None in runs that do not adopt."""
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
    """Return how much of a lossy checkpoint's bytes is exact, and why; small parts are left out."""
    return [
        f"all exact: {part['reason']}"
        if part["role"] == "all"
        else f"{part['share']:.0%} of the bytes: {part['role']}, exact: {part['reason']}"
        for part in parts
        if part["share"] >= _WORTH_SAYING
    ]


def number(value: object) -> str:
    """Return a number in short, or a dash."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def age(wall_time: float | None) -> str:
    """Return the time since then, or a dash; the writer's clock may be ahead of this one."""
    if wall_time is None:
        return "-"
    seconds = max(0.0, time.time() - wall_time)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
