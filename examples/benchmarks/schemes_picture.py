"""The bench as a picture: how small against what it costs, one colour per scheme. SVG by hand, as the demo's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from schemes_summary import Row, ratio, share
from schemes_table import BOUND, RESTORES_BOUND

__all__ = ["picture"]

INK, FAINT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
COLORS = {
    "auto": "#0b69a3",
    "excp": "#cf1124",
    "itmo": "#8f0d1c",
    "inshrinkerator": "#e67e00",
    "lc-checkpoint": "#2f8132",
    "uniform": "#7b4bb0",
    "adaptive": "#c2339c",
    "gobo": "#8a5a2b",
    "delta-dnn": "#3fb0a8",
    "topn": "#9fae1b",
    "scar": "#7f93a8",
    "lossless": "#1f2933",
}
_OTHER = "#616e7c"

_WIDTH, _LEFT, _GAP, _RIGHT = 1080, 70, 74, 24
_TOP, _HEIGHT, _ROW = 136, 250, 366
_LINEAR = 0.001  # rises up to this are drawn on a linear scale, beyond it on a logarithmic one
_HIGHEST = 0.3
_Y_TICKS = (-0.01, -0.001, 0.0, 0.001, 0.005, 0.02, 0.05, 0.2)
_X_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

Point = tuple[float, float]
"""A ratio, and the rise of a loss as a share."""


def _bent(rise: float) -> float:
    return math.copysign(math.log10(1 + abs(rise) / _LINEAR), rise)


@dataclass(frozen=True)
class _Panel:
    left: float
    top: float
    width: float
    x_span: Point
    y_span: Point

    def x(self, value: float) -> float:
        low, high = map(math.log10, self.x_span)
        return self.left + self.width * (math.log10(value) - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = map(_bent, self.y_span)
        inside = min(high, max(low, _bent(value)))
        return self.top + _HEIGHT * (high - inside) / (high - low)


@dataclass(frozen=True)
class _Curve:
    """The points of one scheme that differ in one number alone, from the largest files to the smallest."""

    scheme: str
    points: tuple[Point, ...]
    hollow: bool


def _text(x: float, y: float, words: str, *, anchor: str = "start", color: str = INK, **style: object) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{extra}>{escape(words)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dashes}/>'


def _curves(rows: Sequence[Row], point: Callable[[Row], Point | None]) -> list[_Curve]:
    """Settings are of one curve if their labels agree from the first comma on."""
    found: dict[tuple[str, str], list[Point]] = {}
    for row in rows:
        place = point(row)
        if place is not None:
            found.setdefault((row.scheme, row.setting.partition(", ")[2]), []).append(place)
    return [
        _Curve(scheme, tuple(sorted(points)), hollow=bool(variant))
        for (scheme, variant), points in found.items()
    ]


def _after_resuming(mark: int) -> Callable[[Row], Point | None]:
    def point(row: Row) -> Point | None:
        size, rise = row.of("chain", lambda cell: ratio(cell, "delta")), row.rise(mark)
        return (size.mean, rise.mean) if size and rise else None

    return point


def _after_restores(row: Row) -> Point | None:
    size, rise = (
        row.of("restores", lambda cell: ratio(cell, "delta")),
        row.of("restores", lambda cell: cell["rise"]),
    )
    return (size.mean, rise.mean) if size and rise else None


def _frame(panel: _Panel, title: str, across: str, bound: float) -> list[str]:
    right, bottom = panel.left + panel.width, panel.top + _HEIGHT
    parts = [_text(panel.left, panel.top - 10, title)]
    for tick in _Y_TICKS:
        if panel.y_span[0] <= tick <= panel.y_span[1]:
            parts.append(_line(panel.left, panel.y(tick), right, panel.y(tick), GRID))
            label = f"{100 * tick:+g} %" if tick else "0"
            parts.append(
                _text(panel.left - 6, panel.y(tick) + 4, label, anchor="end", color=FAINT, font_size=11)
            )
    for tick in _X_TICKS:
        if panel.x_span[0] <= tick <= panel.x_span[1]:
            parts.append(_line(panel.x(tick), panel.top, panel.x(tick), bottom, GRID))
            parts.append(
                _text(panel.x(tick), bottom + 16, f"{tick}x", anchor="middle", color=FAINT, font_size=11)
            )
    parts.append(_line(panel.left, bottom, right, bottom, FAINT))
    parts.append(_line(panel.left, panel.y(bound), right, panel.y(bound), INK, dash="5 4"))
    parts.append(_text(right - 4, panel.y(bound) - 5, f"bound: {share(bound)}", anchor="end", font_size=11))
    parts.append(_text(right, bottom + 34, across, anchor="end", color=FAINT, font_size=11))
    return parts


def _drawn(panel: _Panel, curve: _Curve) -> list[str]:
    color = COLORS.get(curve.scheme, _OTHER)
    places = [(panel.x(size), panel.y(rise)) for size, rise in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    width = 2.4 if curve.scheme == "auto" else 1.2
    parts = []
    if len(places) > 1:
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-opacity="0.7"/>'
        )
    for x, y in places:
        fill = "#ffffff" if curve.hollow else color
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{color}" stroke-width="1.6"/>'
        )
    return parts


def _spans(curves: Sequence[_Curve]) -> tuple[Point, Point]:
    points = [point for curve in curves for point in curve.points]
    rises = [rise for _, rise in points]
    highest = min(_HIGHEST, max(0.02, 1.2 * max(rises, default=0.0)))
    lowest = max(-0.05, min(-0.0005, 1.2 * min(rises, default=0.0)))
    return (1.0, max(20.0, 1.25 * max((size for size, _ in points), default=1.0))), (lowest, highest)


def _legend(schemes: Sequence[str]) -> list[str]:
    parts, x, y = [], float(_LEFT), 58.0
    for scheme in schemes:
        if x + 30 + 8 * len(scheme) > _WIDTH - _RIGHT:
            x, y = float(_LEFT), y + 20
        color = COLORS.get(scheme, _OTHER)
        weight = {"font_weight": "600"} if scheme == "auto" else {}
        parts.append(f'<circle cx="{x + 5:.1f}" cy="{y - 4:.1f}" r="5" fill="{color}"/>')
        parts.append(_text(x + 15, y, scheme, **weight))
        x += 34 + 7.6 * len(scheme)
    return parts


def picture(rows: Sequence[Row], mark: int, names: Callable[[str], str]) -> str:
    """An SVG document with a row of two plots for every training.

    Args:
        rows: of all trainings.
        mark: resumed steps after which the left plots' losses are compared.
        names: a model's title.
    """
    trainings = list(dict.fromkeys((row.model, row.every) for row in rows if row.chain or row.restores))
    height = _TOP + _ROW * len(trainings)
    width = (_WIDTH - _LEFT - _GAP - _RIGHT) / 2
    body = [
        _text(
            _LEFT, 30, "Size against loss: lower and further right is better", font_size=17, font_weight="600"
        )
    ]
    body += _legend(list(dict.fromkeys(row.scheme for row in rows)))
    words = "hollow: a variant of the scheme (moments coded too, refilled, other coders)"
    body.append(_text(_WIDTH - _RIGHT, 30, words, anchor="end", color=FAINT, font_size=11))
    sides = (
        (_after_resuming(mark), f"loss {mark} steps after a restore", "ratio of a delta, whole state", BOUND),
        (_after_restores, "final loss, restored from every checkpoint", "ratio of its deltas, whole state", RESTORES_BOUND),
    )  # fmt: skip
    for index, (model, every) in enumerate(trainings):
        of_it = [row for row in rows if (row.model, row.every) == (model, every)]
        where = f"{names(model)}, a checkpoint every {every} steps"
        body.append(_text(_LEFT, _TOP + index * _ROW - 32, where, font_weight="600", font_size=15))
        for side, (point, title, across, bound) in enumerate(sides):
            curves = _curves(of_it, point)
            left = _LEFT + side * (width + _GAP)
            panel = _Panel(left, _TOP + index * _ROW, width, *_spans(curves))
            body += _frame(panel, title, across, bound)
            if not curves:
                body.append(
                    _text(left + width / 2, panel.top + 60, "not measured", anchor="middle", color=FAINT)
                )
            for curve in reversed(curves):  # ours on top
                body += _drawn(panel, curve)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13"><title>Checkpoint schemes: ratio against loss</title>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    )
    return head + "\n".join(body) + "</svg>\n"
