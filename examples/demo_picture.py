"""The demo's picture, written as SVG by hand so that the demo needs no plotting library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from demo_report import Curve, DemoResult, human_size

WIDTH, LEFT, RIGHT = 920, 84, 24
INK, FAINT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
REFERENCE, RUN, BASE, DELTA, KILL = "#9aa5b1", "#0b69a3", "#0b69a3", "#62b0e8", "#cf1124"


_Span = tuple[float, float]


@dataclass(frozen=True)
class _Panel:
    """One plot: where it lies on the page and what its axes span."""

    top: float
    height: float
    x_span: _Span
    y_span: _Span
    log: bool = False

    def x(self, value: float) -> float:
        low, high = self.x_span
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        scale: Callable[[float], float] = math.log10 if self.log else float
        low, high = map(scale, self.y_span)
        return self.top + self.height * (high - scale(value)) / (high - low)

    @property
    def bottom(self) -> float:
        return self.top + self.height


def _text(x: float, y: float, words: str, *, anchor: str = "start", color: str = INK, **style: object) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{extra}'
    return f"<text {place}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, width: float = 1, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"{dashes}/>'


def _polyline(panel: _Panel, curve: Curve, color: str, *, width: float) -> str:
    points = " ".join(f"{panel.x(step):.1f},{panel.y(value):.1f}" for step, value in sorted(curve.items()))
    style = f'fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round"'
    return f'<polyline points="{points}" {style} clip-path="url(#p{panel.top:.0f})"/>'


def _frame(panel: _Panel, title: str, unit: str, ticks: Sequence[tuple[float, str]]) -> list[str]:
    right = WIDTH - RIGHT
    area = f'<rect x="{LEFT}" y="{panel.top:.1f}" width="{right - LEFT}" height="{panel.height:.1f}"/>'
    parts = [
        f'<clipPath id="p{panel.top:.0f}">{area}</clipPath>',
        _text(LEFT, panel.top - 14, title, font_weight="600", font_size=15),
        _text(right, panel.top - 14, unit, anchor="end", color=FAINT),
    ]
    for value, label in ticks:
        parts.append(_line(LEFT, panel.y(value), right, panel.y(value), GRID))
        parts.append(_text(LEFT - 8, panel.y(value) + 4, label, anchor="end", color=FAINT))
    parts.append(_line(LEFT, panel.bottom, right, panel.bottom, FAINT))
    for step in _ticks(panel.x_span[0], panel.x_span[1], 7):
        parts.append(_line(panel.x(step), panel.bottom, panel.x(step), panel.bottom + 4, FAINT))
        parts.append(_text(panel.x(step), panel.bottom + 18, f"{step:g}", anchor="middle", color=FAINT))
    return parts


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that divide ``low..high`` into about so many parts."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    pace = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough)
    return [k * pace for k in range(math.ceil(low / pace - 1e-9), math.floor(high / pace + 1e-9) + 1)]


def _kill_mark(panel: _Panel, result: DemoResult, *label: str) -> list[str]:
    x, top = panel.x(result.killed_at), panel.top + 0.42 * panel.height
    mark = _line(x, panel.top, x, panel.bottom, KILL, width=1.5, dash="5 4")
    rows = enumerate(label)
    return [
        mark,
        *(_text(x + 8, top + 16 * row, words, color=KILL, font_weight="600") for row, words in rows),
    ]


def _legend(top: float, entries: Sequence[tuple[str, str, float]]) -> list[str]:
    """Swatches in the upper right corner, one line each: words, colour, thickness."""
    parts = []
    x = WIDTH - RIGHT - 270
    for row, (words, color, width) in enumerate(entries):
        y = top + 14 + 18 * row
        parts += [_line(x, y - 4, x + 24, y - 4, color, width=width), _text(x + 32, y, words)]
    return parts


def _bytes_panel(result: DemoResult, panel: _Panel, every: float) -> list[str]:
    ticks = [(t, human_size(t).replace(".00", "")) for p in range(3, 10) for t in (10.0**p,)]
    ticks = [(t, words) for t, words in ticks if panel.y_span[0] <= t <= panel.y_span[1]]
    parts = _frame(panel, "Bytes per checkpoint: weights and optimizer state", "logarithmic scale", ticks)
    full = max(save.torch_bytes for save in result.saves)
    parts.append(_line(LEFT, panel.y(full), WIDTH - RIGHT, panel.y(full), INK, width=2))
    parts.append(_text(LEFT + 6, panel.y(full) - 6, f"torch.save: {human_size(full)}", font_weight="600"))
    half = 0.32 * (panel.x(every) - panel.x(0))
    for save in result.saves:
        x, y = panel.x(save.step), panel.y(save.bytes)
        color = BASE if save.kind == "base" else DELTA
        place = f'x="{x - half:.1f}" y="{y:.1f}" width="{2 * half:.1f}" height="{panel.bottom - y:.1f}"'
        parts.append(f'<rect {place} fill="{color}"/>')
        parts.append(_text(x, y - 6, f"{save.ratio:.0f}x", anchor="middle", font_size=12))
    names = [("base: readable alone", BASE, 10), ("delta: needs its predecessor", DELTA, 10)]
    return parts + _legend(panel.y(full) + 6, names)


def _smooth(curve: Curve, window: int) -> Curve:
    steps = sorted(curve)
    last = {step: steps[max(0, i + 1 - window) : i + 1] for i, step in enumerate(steps)}
    return {step: sum(curve[s] for s in some) / len(some) for step, some in last.items()}


def _loss_panel(result: DemoResult, top: float, height: float, x_span: _Span) -> tuple[_Panel, list[str]]:
    window = max(1, result.steps // 60)
    kept = {step: loss for step, loss in result.before.items() if step <= result.resumed_at}
    resumed = {s: loss for s, loss in _smooth(kept | result.after, window).items() if s >= result.resumed_at}
    curves = [_smooth(result.reference, window), _smooth(result.before, window), resumed]
    low = min(min(curves[0].values()), *result.reference_val.values())
    high = curves[0][max(1, result.steps // 15)]
    panel = _Panel(top, height, x_span, (low - 0.04 * (high - low), high))
    ticks = [(t, f"{t:g}") for t in _ticks(*panel.y_span, 5)]
    parts = _frame(
        panel, f"Training loss, mean over {window} steps, and validation loss", "nats per byte", ticks
    )
    parts.append(_polyline(panel, curves[0], REFERENCE, width=5))
    parts += [_polyline(panel, curve, RUN, width=1.6) for curve in curves[1:]]
    for curve, radius, fill in ((result.reference_val, 6, REFERENCE), (result.run_val, 3, RUN)):
        for step, value in curve.items():
            if panel.y_span[0] <= value <= panel.y_span[1]:
                place = f'cx="{panel.x(step):.1f}" cy="{panel.y(value):.1f}"'
                parts.append(f'<circle {place} r="{radius}" fill="{fill}"/>')
    names = [("undisturbed, torch.save", REFERENCE, 5.0), ("compressed, killed and resumed", RUN, 2.0)]
    return panel, parts + _legend(top, names)


def _difference_panel(
    result: DemoResult, top: float, height: float, x_span: _Span
) -> tuple[_Panel, list[str]]:
    after = {s: 100 * (v / result.reference[s] - 1) for s, v in result.after.items() if s in result.reference}
    before = {s: 100 * (v / result.reference[s] - 1) for s, v in result.before.items()}
    limit = max(0.5, 1.1 * max((abs(v) for v in after.values()), default=0.5))
    panel = _Panel(top, height, x_span, (-limit, limit))
    ticks = [(t, f"{t:+g} %" if t else "0") for t in _ticks(-limit, limit, 4)]
    title = "Difference of the training losses on the same batch, step by step"
    parts = _frame(panel, title, "compressed against undisturbed", ticks)
    return panel, [*parts, _polyline(panel, before, RUN, width=2), _polyline(panel, after, RUN, width=1.2)]


def picture(result: DemoResult) -> str:
    """The demo's picture as an SVG document: bytes, both loss curves, and their difference, over the steps."""
    steps = [save.step for save in result.saves]
    every = min((b - a for a, b in itertools.pairwise(steps)), default=result.steps)
    x_span = (0.0, result.steps + 0.6 * every)
    sizes = [save.bytes for save in result.saves]
    full = max(save.torch_bytes for save in result.saves)
    sizes_panel = _Panel(56, 210, x_span, (min(sizes) / 3, full * 2.2), log=True)
    loss_panel, losses = _loss_panel(result, 336, 250, x_span)
    difference_panel, differences = _difference_panel(result, 656, 130, x_span)
    words = f"SIGKILL after step {result.killed_at}", f"resumed from step {result.resumed_at}"
    body = [
        *_bytes_panel(result, sizes_panel, every),
        *_kill_mark(sizes_panel, result),
        *losses,
        *_kill_mark(loss_panel, result, *words),
        *differences,
        *_kill_mark(difference_panel, result),
        _text((LEFT + WIDTH - RIGHT) / 2, 824, "optimizer step", anchor="middle", color=FAINT),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 840" width="{WIDTH}" height="840" '
        'font-family="system-ui, sans-serif" font-size="13">'
        "<title>Compressed checkpoints: bytes and loss curves of the demo</title>"
        f'<rect width="{WIDTH}" height="840" fill="#ffffff"/>'
    )
    return head + "\n".join(body) + "</svg>\n"
