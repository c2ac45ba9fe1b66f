"""The demo's results with two frameworks, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from demo_report import (
    DemoResult,
    Save,
    findings,
    grid,
    human_size,
    markdown_table,
    percent,
    ruled_table,
)
from rich.console import Group

__all__ = ["comparison_markdown", "comparison_table", "same_training"]

LEGEND = "bytes of each checkpoint by framework; ratio: bytes of the framework's own checkpoint over ours"
BESIDE = ("kill -9", "final validation loss", "training blocked by saving", "training paused to evaluate")
"""The findings that are worth comparing."""


def same_training(results: Sequence[DemoResult]) -> bool:
    """Whether they trained the same model in the same way, so that they can be compared."""
    return all(result.training == results[0].training for result in results)


def _headings(results: Sequence[DemoResult]) -> list[str]:
    names = [result.versions.split()[0] for result in results]
    return ["step", *(heading for name in names for heading in (name, "ratio", "degradation"))]


def _rows(results: Sequence[DemoResult]) -> list[list[str]]:
    saves = [{save.step: save for save in result.saves} for result in results]
    steps = sorted({step for run in saves for step in run})
    return [[str(step), *(cell for run in saves for cell in _cells(run.get(step)))] for step in steps]


def _cells(save: Save | None) -> list[str]:
    if save is None:
        return ["-", "-", "-"]
    return [human_size(save.bytes), f"{save.ratio:.1f}x", percent(save.degradation)]


def _totals(results: Sequence[DemoResult]) -> list[str]:
    cells = ["all"]
    for result in results:
        measured = [save.degradation for save in result.saves if save.degradation is not None]
        cells += [human_size(sum(save.bytes for save in result.saves)), f"{result.ratio:.1f}x"]
        cells.append(f"≤ {percent(max(measured))}" if measured else "-")
    return cells


def _agreement(results: Sequence[DemoResult]) -> tuple[str, str]:
    """How far apart the frameworks trained where no checkpoint was restored: same weights, same batches."""
    first, *others = (result.reference for result in results)
    apart = max(abs(other[step] / loss - 1) for other in others for step, loss in first.items())
    alike = f"at most {100 * apart:.1g} % apart" if apart else "identical in every bit"
    return "undisturbed runs", f"training losses with both frameworks {alike}"


def _findings(results: Sequence[DemoResult]) -> list[tuple[str, str]]:
    pairs = [_agreement(results)]
    for what in BESIDE:
        pairs += [
            (f"{result.versions.split()[0]}: {what}", dict(findings(result))[what]) for result in results
        ]
    return pairs


def comparison_table(results: Sequence[DemoResult]) -> Group:
    """For a terminal."""
    title = "Side by side: " + "; ".join(result.versions for result in results)
    table = ruled_table(title, LEGEND, _headings(results), _totals(results))
    for row in _rows(results):
        table.add_row(*row)
    return Group("", table, grid(_findings(results)))


def comparison_markdown(results: Sequence[DemoResult]) -> str:
    """Write the comparison as Markdown."""
    lines = ["; ".join(result.versions for result in results) + ".", ""]
    lines += markdown_table(_headings(results), _rows(results), _totals(results))
    lines += ["", LEGEND + ".", "", *markdown_table(("measured", "value"), _findings(results))]
    return "\n".join(lines) + "\n"
