"""Pages that load no other file: tables, curves as SVG, and the style and script of ``page.css`` and ``page.js``."""

import base64
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any

from shrinkpoint.cli.output import bytes_text, counted, number, percent_text, ratio_text

GENERATOR = '<meta name="generator" content="shrinkpoint report">'
"""By which a page of ours is recognised."""
COLOURS = 4
"""Of curves; as many more are dashed."""

_WIDE, _HIGH, _TICKS, _DOTS = 1000.0, 200.0, 4, 60
_FAR = 60.0
"""An axis is logarithmic, where it may be, if the greatest number is as many times the least."""
_DRAWN = 1e100
"""Greater numbers, and logarithms of those below its inverse, are not drawn."""
_UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))

Row = Mapping[str, Any]
Columns = Mapping[str, str]
"""The titles of columns, by their keys in a row."""


@dataclass(frozen=True)
class Line:
    """One curve: steps and numbers, None where there is a gap; and intervals, each a step and two numbers."""

    name: str
    points: Sequence[tuple[float, float | None]]
    intervals: Sequence[tuple[float, float, float]] = ()
    dashed: bool = False


def finite(value: object) -> float | None:
    """Return a number that can be drawn, or None for anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _DRAWN
    return float(value) if known else None  # type: ignore[arg-type]


def seconds_text(spent: float) -> str:
    """Return a time spent."""
    return f"{spent:.2g} s" if spent < 99.5 else f"{spent:.0f} s"


def when(seconds: float) -> str:
    """Return a time of day."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


_SECONDS = ("blocked_s", "search_s", "encode_s", "copies_sum", "evaluations_sum", "adoptions_sum")
_TEXTS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("bytes", "raw_bytes", "chain_bytes", "raw_sum", "disk_sum"), bytes_text),
    **dict.fromkeys(("ratio", "ratio_sum"), ratio_text),
    **dict.fromkeys(
        ("degradation", "degradation_low", "degradation_high", "allowed", "cost_high"), percent_text
    ),
    **dict.fromkeys(_SECONDS, seconds_text),
    "share": "{:.1%}".format,
    "bits_per_element": "{:.2f}".format,
    "wall_time": when,
}
"""How the numbers under a key are written; others as `number` does."""
_DASHED = ("raw_bytes", "raw_sum", "baseline", "allowed")
"""Keys whose curves are dashed."""


# ---- axes


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def over(cls, numbers: Sequence[float], *, log: bool) -> "_Axis":
        low, high = min(numbers), max(numbers)
        if log and low > 1 / _DRAWN and high / low >= _FAR:
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            powers = range(first, last + 1, math.ceil((last - first) / _TICKS))
            return cls(10.0**first, 10.0**last, tuple(10.0**power for power in powers), log=True)
        if not log:
            low, high = min(low, 0.0), max(high, 0.0)
        if high - low <= 1e-12 * max(abs(low), abs(high)):
            low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 0.01)
        size = _nice((high - low) / _TICKS)
        first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
        return cls(first * size, last * size, tuple(at * size for at in range(first, last + 1)))

    @classmethod
    def of_steps(cls, steps: Iterable[float]) -> "_Axis":
        low, high = min(steps := list(steps)), max(steps)
        if low == high:
            return cls(low - 1, high + 1, (low,))
        size = max(1.0, _nice((high - low) / _TICKS))
        return cls(low, high, tuple(at * size for at in range(math.ceil(low / size), int(high // size) + 1)))

    def share(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def x(self, step: float) -> str:
        return f"{_WIDE * self.share(step):.1f}"

    def y(self, value: float) -> str:
        return f"{_HIGH * (1 - self.share(value)):.1f}"

    def labels(self, side: str, text: Callable[[float], str]) -> str:
        places = ((100 * self.share(tick), escape(text(tick))) for tick in self.ticks)
        return "".join(f'<span style="{side}:{at:.2f}%">{label}</span>' for at, label in places)


def _nice(size: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(size))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= size * 0.999)


def _step_text(step: float) -> str:
    return next((f"{step / size:g}{unit}" for least, size, unit in _UNITS if step >= least), f"{step:g}")


# ---- figures


def figure(
    title: str,
    rows: Sequence[Row],
    drawn: Columns,
    more: Columns = MappingProxyType({}),
    log: bool = False,
    note: str = "",
) -> str:
    """Return numbers as curves over ``step``, with the intervals that there are, and a table of these and more; see `curves`."""
    lines = []
    for key, name in drawn.items():
        points = [(row["step"], finite(row.get(key))) for row in rows]
        ends = ((row["step"], finite(row.get(f"{key}_low")), finite(row.get(f"{key}_high"))) for row in rows)
        intervals = [(step, low, high) for step, low, high in ends if low is not None and high is not None]
        lines.append(Line(name, points, intervals, key in _DASHED))
    steps = _Axis.of_steps(row["step"] for row in rows)
    shown = table(rows, {"step": "step", **drawn, **more}, steps=steps)
    return curves(title, lines, shown, next(iter(drawn)), log=log, note=note)


def curves(title: str, lines: Sequence[Line], shown: str, key: str, *, log: bool, note: str) -> str:
    """Return a figure of up to eight lines.

    Args:
        title: with the unit.
        lines: those without a number are left out.
        shown: the figure's table.
        key: as of a column, for how the axis writes its numbers.
        log: whether the axis may be logarithmic; it begins at 0 otherwise.
        note: a sentence below the title.
    """
    lines = [line for line in lines if any(y is not None for _, y in line.points)][: 2 * COLOURS]
    if not lines:
        return _framed(title, note, '<p class="none">There are no numbers for this figure.</p>')
    numbers = [y for line in lines for _, y in line.points if y is not None]
    numbers += [end for line in lines for _, *ends in line.intervals for end in ends]
    ys = _Axis.over(numbers, log=log)
    xs = _Axis.of_steps(x for line in lines for x, _ in line.points)
    drawn, keys = [_path("grid", f"M0 {ys.y(tick)}H{_WIDE:g}") for tick in ys.ticks], ""
    for at, line in enumerate(lines):
        style = f"c{at % COLOURS}" + (" dash" if line.dashed or at >= COLOURS else "")
        drawn += _curve(line, style, xs, ys)
        keys += f'<span><i class="{style}"></i>{escape(line.name)}</span>'
    scale = '<span class="scale">logarithmic scale</span>' if ys.log else ""
    plot = _svg(title, _HIGH, f'{"".join(drawn)}<line class="cursor" y1="0" y2="{_HIGH:g}"/>')
    body = (
        f'<p class="keys">{keys}{scale}</p><div class="plot"><div class="ys">{ys.labels("bottom", _TEXTS.get(key, number))}</div>{plot}'
        f'<div class="unit">step</div><div class="xs">{xs.labels("left", _step_text)}</div></div><output></output>'
    )
    return _framed(title, note, body + folded("Table", shown))


def _curve(line: Line, style: str, xs: _Axis, ys: _Axis) -> Iterator[str]:
    path, pen = "", "M"
    for at, y in line.points:
        path += "" if y is None else f"{pen}{xs.x(at)} {ys.y(y)}"
        pen = "M" if y is None else "L"
    there = [(at, y) for at, y in line.points if y is not None]
    bars = "".join(f"M{xs.x(at)} {ys.y(low)}V{ys.y(high)}" for at, low, high in line.intervals)
    yield _path(f"{style} interval", bars)
    yield _path(f"{style} line", path)
    if len(there) <= _DOTS:
        yield _path(f"{style} dots", "".join(f"M{xs.x(at)} {ys.y(y)}h0" for at, y in there))


def _path(style: str, path: str) -> str:
    return f'<path class="{style}" d="{path}"/>' if path else ""


def _svg(title: str, high: float, body: str) -> str:
    box = f'viewBox="0 0 {_WIDE:g} {high:g}" preserveAspectRatio="none" role="img"'
    return f'<svg {box} aria-label="{escape(title)}">{body}</svg>'


def _framed(title: str, note: str, body: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{paragraph(note) if note else ''}{body}</figure>"


def strips(title: str, rows: Mapping[str, Sequence[float]], more: str) -> str:
    """Return marks at the steps of each name's checkpoints; and more below all of them."""
    xs, lines = _Axis.of_steps(step for steps in rows.values() for step in steps), ""
    for at, (name, steps) in enumerate(rows.items()):
        places = sorted({round(_WIDE / 2 * xs.share(step)) * 2 for step in steps})
        marks = _path(f"c{at % COLOURS} dots", "".join(f"M{place} 10h0" for place in places))
        drawn = _svg(name, 20, _path("grid", f"M0 10H{_WIDE:g}") + marks)
        count = counted(len(steps), "checkpoint")
        lines += f"<dt>{escape(name)} <small>{count}</small></dt><dd>{drawn}</dd>"
    labels = f'<dd class="xs">{xs.labels("left", _step_text)}</dd>'
    return _framed(title, "", f'<dl class="strips">{lines}{labels}</dl>{more}')


# ---- tables and texts


def table(rows: Sequence[Row], columns: Columns, *, share: str = "", steps: _Axis | None = None) -> str:
    """Return a table that its reader may sort; with bars by the numbers under `share`, or places on a figure's axis.

    Columns without any value are left out, and those without a number are words.
    """
    styles = {
        key: "" if any(finite(row.get(key)) is not None for row in rows) else ' class="words"'
        for key in columns
        if any(row.get(key) is not None for row in rows)
    }
    titles = ((style, escape(columns[key])) for key, style in styles.items())
    head = "".join(f"<th{style}><button>{title}</button></th>" for style, title in titles)
    most, body = max((finite(row.get(share)) or 0.0 for row in rows), default=0.0) or 1.0, ""
    for row in rows:
        place = "" if steps is None else f' data-x="{steps.share(row["step"]):.4f}"'
        width = 100 * (finite(row.get(share)) or 0.0) / most
        bar = f'<i class="bar" style="width:{width:.1f}%"></i>' if share else ""
        cells = []
        for key, style in styles.items():
            value, known = row.get(key), finite(row.get(key))
            data = "" if known is None else f' data-v="{known:.9g}"'
            text = "-" if value is None else str(value) if known is None else _TEXTS.get(key, number)(value)
            cells.append(f"<td{style}{data}>{escape(text)}")
        cells[0] += bar
        body += f"<tr{place}>{'</td>'.join(cells)}</td></tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bars(
    title: str, rows: Sequence[Row], columns: Columns, share: str = "", note: str = "", none: str = "None."
) -> str:
    """Return a table with bars, which is its own figure."""
    shown = table(rows, columns, share=share) if rows else f'<p class="none">{escape(none)}</p>'
    return _framed(title, note, shown)


def folded(title: str, body: str) -> str:
    """Return what is opened by a click, and printed open."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def card(kind: str, big: str, *texts: str, code: str = "", alarm: bool = False) -> str:
    """Return one answer of the page's first screen."""
    words = "".join(f"<p>{escape(text)}</p>" for text in texts)
    words += f"<pre>{escape(code)}</pre>" if code else ""
    style = "card alarm" if alarm else "card"
    return f'<div class="{style}"><h2>{escape(kind)}</h2><p class="big">{escape(big)}</p>{words}</div>'


def paragraph(text: str) -> str:
    """Return a sentence or two."""
    return f'<p class="note">{escape(text)}</p>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return names and values, one pair a line."""
    lines = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f'<dl class="facts">{"".join(lines)}</dl>'


def codes(lines: Mapping[str, str]) -> str:
    """Return lines to copy, by what they do."""
    texts = ((escape(name), escape(line)) for name, line in lines.items())
    return "".join(f"<div><h3>{name}</h3><pre>{line}</pre></div>" for name, line in texts)


def section(title: str, figures: Iterable[str], style: str = "figures") -> str:
    """Return a heading, and figures in as many columns as there is room for."""
    return f'<section><h2>{escape(title)}</h2><div class="{style}">{"".join(figures)}</div></section>'


def document(title: str, below: str, parts: Iterable[str]) -> str:
    """Return the whole page. It may load nothing, and run no script but its own, whatever the names in it are."""
    page, style, script = (
        Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    return Template(page).substitute(
        title=escape(title),
        style=style,
        script=script,
        parts="".join([paragraph(below), *parts]),
        generator=GENERATOR,
        allowed=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
