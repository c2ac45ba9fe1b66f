"""Draws which of the package's folders import which: docs/imports.svg. `python docs/imports.py`, or `make imports`.

The folders are those of import-linter's layers in pyproject.toml, from top to bottom. An arrow on the right leads to a lower
layer, or within one; one that led up would be on the left, in red, and is an error here as it is in `make lint`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import grimp
import tomllib

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "imports.svg"
PACKAGE = "shrinkpoint"

_INK, _DOWN, _UP, _BAND = "#1f2933", "#0b69a3", "#cf1124", "#f0f4f8"
_ROW, _EDGE, _TOP = 30, 260, 78
_NEAR, _PER_ROW = 26, 17

Arrows = Mapping[str, frozenset[str]]


def layers_of(project: Path) -> list[list[str]]:
    """The layers of the first contract of import-linter, from top to bottom; folders of one layer do not depend on its others."""
    contracts = tomllib.loads(project.read_text())["tool"]["importlinter"]["contracts"]
    layers = next(
        one["layers"] for one in contracts if one["type"] == "layers" and one["containers"] == [PACKAGE]
    )
    return [[name.strip() for name in layer.replace("|", ":").split(":")] for layer in layers]


def arrows_of(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """For each folder or module of the package, those that it imports."""
    graph = grimp.build_graph(PACKAGE)
    for name in names:
        graph.squash_module(f"{PACKAGE}.{name}")
    found = {name: graph.find_modules_directly_imported_by(f"{PACKAGE}.{name}") for name in names}
    return {
        name: frozenset(one.removeprefix(f"{PACKAGE}.") for one in imported) - {PACKAGE, name}
        for name, imported in found.items()
    }


def without_detours(arrows: Arrows) -> set[tuple[str, str]]:
    """The arrows that do not follow from others: a -> c is left out where there are a -> b and b -> c, but none of a circle."""

    def reached(name: str, seen: set[str]) -> set[str]:
        for other in arrows[name]:
            if other not in seen:
                seen.add(other)
                reached(other, seen)
        return seen

    beyond = {name: reached(name, set()) for name in arrows}
    return {
        (name, other)
        for name, imported in arrows.items()
        for other in imported
        if name in beyond[other] or not any(other in beyond[third] for third in imported - {other})
    }


def drawing(layers: Sequence[Sequence[str]], arrows: Arrows) -> str:
    """The picture, as SVG."""
    rows = [(name, at) for at, layer in enumerate(layers) for name in layer]
    place = {name: _TOP + index * _ROW for index, (name, _) in enumerate(rows)}
    layer = dict(rows)
    width, height = 640, _TOP + len(rows) * _ROW + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="system-ui, sans-serif" font-size="14">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="24" y="30" font-size="18" font-weight="600" fill="{_INK}">Imports inside the package, by layer</text>',
        f'<text x="24" y="52" font-size="12" fill="{_INK}">Each imports what its arrows lead to, at once or by several:'
        " a -&gt; c is left out where there are a -&gt; b and b -&gt; c.</text>",
    ]
    for name, at in rows:
        y = place[name]
        band = _BAND if at % 2 == 0 else "#ffffff"
        parts.append(
            f'<rect x="24" y="{y - _ROW / 2:.1f}" width="{_EDGE - 24}" height="{_ROW}" fill="{band}"/>'
        )
        parts.append(f'<text x="40" y="{y + 5}" fill="{_INK}">{escape(_titled(name))}</text>')
    for name, other in sorted(without_detours(arrows), key=lambda arrow: (place[arrow[0]], place[arrow[1]])):
        parts.append(_arc(place[name], place[other], up=layer[other] < layer[name]))
    return "\n".join([*parts, "</svg>", ""])


def _titled(name: str) -> str:
    return {"callbacks": "callbacks/", "integrations": "integrations/"}.get(name, f"core/{name}")


def _arc(begin: float, end: float, *, up: bool) -> str:
    """From one row to another, the farther to the side the more rows it passes."""
    reach = _NEAR + abs(end - begin) / _ROW * _PER_ROW
    edge, outward = (24, -1) if up else (_EDGE, 1)
    side, tip, color = edge + outward * reach, edge + outward * 7, _UP if up else _DOWN
    begin, end = begin + 6, end - 5
    return (
        f'<path d="M {edge} {begin:.1f} C {side:.1f} {begin:.1f}, {side:.1f} {end:.1f}, {tip} {end:.1f}" fill="none"'
        f' stroke="{color}" stroke-width="1.4"/>'
        f'<path d="M {edge} {end:.1f} L {tip} {end - 4:.1f} L {tip} {end + 4:.1f} Z" fill="{color}"/>'
    )


def upward(layers: Sequence[Sequence[str]], arrows: Arrows) -> list[str]:
    """Imports that go up, in words."""
    at = {name: index for index, layer in enumerate(layers) for name in layer}
    return sorted(
        f"{name} -> {other}"
        for name, imported in arrows.items()
        for other in imported
        if at[other] < at[name]
    )


def drawn() -> tuple[str, list[str]]:
    """The drawing of the package as it is, and the imports in it that go up."""
    layers = layers_of(ROOT / "pyproject.toml")
    arrows = arrows_of([name for layer in layers for name in layer])
    return drawing(layers, arrows), upward(layers, arrows)


def main() -> None:
    """Write it; an import that goes up is an error."""
    text, wrong = drawn()
    OUT.write_text(text)
    print(f"written: {OUT}")
    if wrong:
        sys.exit(f"imports that go up: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
