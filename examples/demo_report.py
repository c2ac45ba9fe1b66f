"""What `make demo` measured, and the tables that show it; the picture is in demo_picture.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

Curve = dict[int, float]
"""A loss by the step after which it was measured."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """One committed checkpoint of the compressed run, beside torch.save of the undisturbed run at its step."""

    step: int
    kind: str
    bytes: int
    torch_bytes: int
    degradation: float | None
    blocked_s: float
    """Time training waited for the snapshot."""
    search_s: float
    """Time training paused to measure the held-out loss of candidate encodings."""

    @property
    def ratio(self) -> float:
        """How many times smaller than torch.save's file."""
        return self.torch_bytes / self.bytes


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Everything measured in one demo."""

    versions: str
    """Of Lightning and of torch."""
    steps: int
    saves: list[Save]
    reference: Curve
    """Training loss of the undisturbed run."""
    before: Curve
    """Training loss of the compressed run until it was killed."""
    after: Curve
    """Training loss from the resume on."""
    reference_val: Curve
    run_val: Curve
    killed_at: int
    resumed_at: int
    resume_degradation: float
    """Relative change of the validation loss right after the crash's restore."""
    final_reference_val: float
    final_run_val: float
    remeasured_degradation: float
    """The last checkpoint, restored in a fresh process, against the true final weights."""
    torch_save_s: float
    """Total time torch.save blocked the undisturbed run."""
    reference_train_s: float
    """Time the undisturbed run spent between its first and last step."""
    train_s: float
    """Time the compressed run spent between the first and the last step of its two processes."""
    wall_s: float

    @property
    def blocked_s(self) -> float:
        """Total time that saving held up the compressed run."""
        return sum(save.blocked_s for save in self.saves)

    @property
    def search_s(self) -> float:
        """Total time that measuring the degradation held up the compressed run."""
        return sum(save.search_s for save in self.saves)

    @property
    def ratio(self) -> float:
        """All of torch.save's bytes over all of the compressed run's."""
        return sum(s.torch_bytes for s in self.saves) / max(1, sum(s.bytes for s in self.saves))

    @property
    def identical_until_kill(self) -> bool:
        """Whether both runs' training losses agree in every bit up to the kill."""
        return all(self.reference.get(step) == loss for step, loss in self.before.items())

    @property
    def final_difference(self) -> float:
        """Relative difference of the final validation losses, compressed against undisturbed."""
        return self.final_run_val / self.final_reference_val - 1


def relative_difference(curve: Curve, reference: Curve, first: int, last: int) -> float:
    """Mean of ``curve`` over the mean of ``reference``, minus 1, over the steps ``first..last`` both have."""
    steps = [s for s in range(first, last + 1) if s in curve and s in reference]
    return sum(curve[s] for s in steps) / sum(reference[s] for s in steps) - 1 if steps else math.nan


def human_size(count: float) -> str:
    """Bytes in decimal units with two decimals."""
    for unit in ("B", "kB", "MB"):
        if count < 1000 or unit == "MB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: MB ends the loop")


def percent(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:+.{digits}f} %"


HEADINGS = ("step", "kind", "bytes", "torch.save", "ratio", "degradation", "blocked", "evaluating")


def _rows(result: DemoResult) -> list[tuple[str, ...]]:
    return [
        (
            str(save.step),
            save.kind,
            human_size(save.bytes),
            human_size(save.torch_bytes),
            f"{save.ratio:.1f}x",
            percent(save.degradation),
            f"{1000 * save.blocked_s:.0f} ms",
            f"{1000 * save.search_s:.0f} ms",
        )
        for save in result.saves
    ]


def _totals(result: DemoResult) -> tuple[str, ...]:
    measured = [save.degradation for save in result.saves if save.degradation is not None]
    return (
        "all",
        "",
        human_size(sum(save.bytes for save in result.saves)),
        human_size(sum(save.torch_bytes for save in result.saves)),
        f"{result.ratio:.1f}x",
        f"≤ {percent(max(measured))}" if measured else "-",
        f"{1000 * result.blocked_s:.0f} ms",
        f"{1000 * result.search_s:.0f} ms",
    )


LEGEND = (
    "ratio: torch.save's bytes over shrinkpoint's; degradation: rise of the held-out loss at a restore, measured when saving; "
    "blocked: training waited for the snapshot; evaluating: training paused to measure the degradation"
)


def rich_table(result: DemoResult) -> Table:
    """The table of checkpoints for a terminal; a rule marks where the process was killed."""
    title = "Checkpoints of the killed and resumed run"
    left = {"title_justify": "left", "caption_justify": "left"}
    table = Table(
        title=title, caption=LEGEND, box=box.HORIZONTALS, collapse_padding=True, show_footer=True, **left
    )
    for heading, total in zip(HEADINGS, _totals(result), strict=True):
        justify = "left" if heading == "kind" else "right"
        table.add_column(heading, footer=total, justify=justify, no_wrap=True)
    for index, (save, row) in enumerate(zip(result.saves, _rows(result), strict=True)):
        following = result.saves[index + 1].step if index + 1 < len(result.saves) else save.step
        table.add_row(*row, end_section=save.step <= result.resumed_at < following)
    return table


def findings(result: DemoResult) -> list[tuple[str, str]]:
    """The results that are not per checkpoint: what was measured, and its value."""
    start = result.resumed_at
    training = (
        f"{percent(relative_difference(result.after, result.reference, start + a, start + b))} (steps {a}-{b})"
        for a, b in ((1, 5), (6, 20), (21, 40))
        if start + b <= result.steps
    )
    validation = (
        f"{percent(value / result.reference_val[step] - 1)} ({step - start} steps later)"
        for step, value in sorted(result.run_val.items())
        if step > start
    )
    final = f"{result.final_run_val:.4f}, undisturbed {result.final_reference_val:.4f}"
    final += f" ({percent(result.final_difference)})"
    identical = "identical in every bit" if result.identical_until_kill else "NOT identical"
    return [
        ("kill -9", f"after step {result.killed_at}; resumed by itself from step {start}"),
        ("both runs until then", f"training losses {identical}"),
        ("validation loss at the restore", f"{percent(result.resume_degradation)} against the true state's"),
        ("validation loss later", ", ".join(itertools.islice(validation, 3))),
        ("training loss, same batches", ", ".join(training)),
        ("final validation loss", final),
        (
            "last checkpoint",
            f"{percent(result.remeasured_degradation)}, restored and measured in a fresh process",
        ),
        ("training blocked by saving", _time_share(result.blocked_s, result.train_s)),
        ("training paused to evaluate", _time_share(result.search_s, result.train_s)),
        ("torch.save, same disk", _time_share(result.torch_save_s, result.reference_train_s)),
        ("the whole demo", f"{result.wall_s:.0f} s"),
    ]


def _time_share(part: float, whole: float) -> str:
    return f"{part:.2f} s of {whole:.1f} s ({100 * part / whole:.2f} %)"


def markdown(result: DemoResult) -> str:
    """Write the table and the findings as Markdown."""
    lines = markdown_table(HEADINGS, _rows(result), _totals(result))
    lines += ["", LEGEND + ".", "", *markdown_table(("measured", "value"), findings(result))]
    return "\n".join(lines) + "\n"


def markdown_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], totals: Sequence[str] = ()
) -> list[str]:
    """The lines of a Markdown table; the last row, if there are totals, is bold."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    if totals:
        lines.append("| " + " | ".join(f"**{cell}**" if cell else "" for cell in totals) + " |")
    return lines


def grid(pairs: Sequence[tuple[str, str]]) -> Table:
    """Names and values without lines between them, for a terminal."""
    table = Table.grid(padding=(0, 2))
    for what, value in pairs:
        table.add_row(what, f"[bold]{value}")
    return table
