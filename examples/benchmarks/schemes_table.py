"""The tables of the bench, in Markdown."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from demo_report import markdown_table
from schemes_summary import Best, Row, Spread, advantage, best_under, ratio, share

__all__ = ["BOUND", "RESTORES_BOUND", "document", "name_of"]

BOUND = 0.005
"""Of the loss after the last mark's resumed steps."""
RESTORES_BOUND = 0.01
"""Of the final loss of a run that is restored from every checkpoint."""

_NONE = "-"
_TITLES = {
    "gpt": "GPT, AdamW (0.9, 0.95)",
    "gpt-999": "GPT, AdamW (0.9, 0.999)",
    "conv": "Convolutional network, AdamW (0.9, 0.999)",
}
_OURS, _RIVAL = "auto", "excp"

_HEAD = """# The schemes, measured

**The results of `auto` are only those measured since its noise is limited by training's own movement and its moments keep their
length ([auto.md](auto.md)); `--only auto` measures the rest.**

Written by `python examples/benchmarks/schemes.py` ({versions}). The demo's GPT (byte-level, Python's standard library) and a
causal dilated convolutional network over the same text are trained for real, {seeds}. Each undisturbed run is coded as one
chain of checkpoints, a base and its deltas, through the library's own path; sizes are those of whole files, against all
bytes of the state (weights: of their sections, against theirs). Every number is the mean over the seeds, `±` half
of the way from the least to the greatest. The measurements are in [schemes.jsonl](schemes.jsonl);
`--table --cache docs` writes this page from them.

- **at a restore, {marks}**: held-out loss of a run that continues from a restored state, against the undisturbed
  run at the same step, so many optimizer steps after the restore; mean over restores of two checkpoints, the
  middle one and the last.
- **restored n times**: final loss of a run that is restored from every one of its n checkpoints, evenly
  spread, against the undisturbed one; and how small its files were.
- "moments too" codes Adam's moments in levels, where the papers do not change them; "refilled" and
  "mended" repair what docs of the options call defects. ExCP's base is stored in full as published, "lossy base" has
  its moments clustered.

![ratio against loss](schemes.svg)
"""


def name_of(model: str) -> str:
    """A model's title."""
    return _TITLES.get(model, model)


def _times(spread: Spread | None) -> str:
    if spread is None:
        return _NONE
    return f"{spread.mean:.3g}x" if spread.mean < 100 else f"{spread.mean:.0f}x"


def _percent(spread: Spread | None) -> str:
    if spread is None:
        return _NONE
    around = f" ±{100 * spread.half:.2f}" if len(spread.values) > 1 else ""
    return f"{100 * spread.mean:+.2f}{around} %"


def _ratios(row: Row, *, weights: bool = False) -> list[str]:
    kinds = ("base", "delta", None)
    return [_times(row.of("chain", lambda cell, k=kind: ratio(cell, k, weights=weights))) for kind in kinds]


def _table(rows: Sequence[Row], marks: Sequence[int]) -> list[str]:
    headings = ["scheme", "setting", "base", "delta", "chain"]
    headings += ["weights: base", "delta", "chain", "at a restore"]
    headings += [f"+{mark}" for mark in marks if mark] + ["restored n times", "its deltas", "its chain"]
    lines = []
    for row in rows:
        if not row.chain and not row.restores:
            continue
        line = [row.scheme, row.setting, *_ratios(row), *_ratios(row, weights=True)]
        line += [_percent(row.rise(mark)) for mark in marks]
        line.append(_percent(row.of("restores", lambda cell: cell["rise"])))
        lines.append([*line, _times(row.of("restores", _delta)), _times(row.of("restores", ratio))])
    return markdown_table(headings, lines)


def _smallest(rows: Sequence[Row], mark: int) -> list[str]:
    """The smallest setting of every scheme that holds the bound."""
    lines = []
    for scheme in dict.fromkeys(row.scheme for row in rows):
        mine = [row for row in rows if row.scheme == scheme]
        delta, chain = (_after_resuming(mine, mark, size) for size in (_delta, ratio))
        restored = _after_restores(mine)
        if not any(row.chain for row in mine):
            continue
        found = [
            (_range(best.spread), ", ".join(dict.fromkeys(best.settings.values())))
            if best
            else (_NONE, _NONE)
            for best in (delta, chain, restored)
        ]
        lines.append([scheme, *(cell for pair in found for cell in pair)])
    headings = ["scheme", "delta", "setting", "chain", "setting", "restored n times: chain", "setting"]
    return markdown_table(headings, lines)


def _delta(cell: Mapping[str, Any]) -> float:
    return ratio(cell, "delta")


def _after_resuming(
    rows: Iterable[Row], mark: int, size: Callable[[Mapping[str, Any]], float]
) -> Best | None:
    return best_under(rows, "chain", lambda cell: cell["rises"][str(mark)], BOUND, size)


def _after_restores(rows: Iterable[Row]) -> Best | None:
    return best_under(rows, "restores", lambda cell: cell["rise"], RESTORES_BOUND, ratio)


def _range(spread: Spread) -> str:
    low, high = min(spread.values), max(spread.values)
    return f"{spread.mean:.3g}x" + (f" ({low:.3g} to {high:.3g})" if len(spread.values) > 1 else "")


def _seeds(rows: Sequence[Row]) -> list[str]:
    """Which settings were measured with how many seeds."""
    measured: dict[int, int] = {}
    for row in rows:
        count = len({*row.chain} | {*row.restores})
        if not count:  # on a slice alone
            continue
        measured[count] = measured.get(count, 0) + 1
    if len(measured) == 1:
        return [f"Seeds: {next(iter(measured))}."]
    told = (
        f"{count} {'seed' if count == 1 else 'seeds'}: {n} settings" for count, n in sorted(measured.items())
    )
    return [f"Measured with {'; '.join(told)} (those with a `±`)."]


def _verdicts(rows: Sequence[Row], mark: int) -> list[str]:
    """How many times smaller ours is than its strongest rival."""
    ours, theirs = ([row for row in rows if row.scheme == name] for name in (_OURS, _RIVAL))
    lines = []
    for words, size in (("deltas", _delta), ("whole chains", ratio)):
        found = advantage(*(_after_resuming(half, mark, size) for half in (ours, theirs)))
        spread = found.spread if found else None
        if spread is not None:
            lines.append(
                f"- {words}: `{_OURS}` under {share(BOUND)} after {mark} resumed steps is **{_range(spread)} smaller**"
                f" than `{_RIVAL}`'s best under the same bound."
            )
        else:
            missing = [
                name
                for name, half in ((_OURS, ours), (_RIVAL, theirs))
                if not _after_resuming(half, mark, size)
            ]
            lines.append(
                f"- {words}: no setting of `{'`, `'.join(missing)}` stays within {share(BOUND)} with every seed."
            )
    restored = _after_restores(ours)
    if restored is not None:
        lines.append(
            f"- restored at every checkpoint: `{_OURS}` under {share(RESTORES_BOUND)} reaches {_range(restored.spread)}."
        )
    return lines


def _speeds(rows: Sequence[Row]) -> list[str]:
    measured = [row for row in rows if row.speed]
    if not measured:
        return []
    numbers = [f"{what}_{threads}" for what in ("encode", "decode") for threads in (1, 2)]
    lines = []
    for row in measured:
        line = [row.scheme, row.setting]
        for number in numbers:
            speed = row.of("speed", lambda cell, n=number: cell["speeds"][n])
            times = row.of("speed", lambda cell, n=number: cell["speeds"][n] / cell["zstd"][n])
            line.append(f"{speed.mean:.0f} ({times.mean:.2f})" if speed and times else _NONE)
        lines.append(line)
    headings = [
        "scheme",
        "setting",
        *(n.replace("_1", ", 1 thread").replace("_2", ", 2 threads") for n in numbers),
    ]
    said = (
        "MB of raw state per second, and in brackets as a multiple of zstd at level 3 in the same minute (which decodes"
        " in one thread). Encoding: the last delta, from tensors in memory to the bytes of the file. Decoding: a chain"
        " of three files, per checkpoint. The state is small, so that what each of its tensors costs counts:"
        " `examples/benchmarks/auto_speed.py` measures `auto` on larger ones."
    )
    return ["## Speed", "", said, "", *markdown_table(headings, lines), ""]


def _slices(rows: Sequence[Row]) -> list[str]:
    measured = [row for row in rows if row.slice]
    if not measured:
        return []
    roles = ("weight", "exp_avg", "exp_avg_sq")
    lines = []
    for row in measured:
        bits = [row.of("slice", lambda cell, r=role: cell["bits"].get(r, 0.0)) for role in roles]
        total = row.of("slice", lambda cell: sum(cell["bits"].values()))
        lines.append(
            [
                row.model,
                str(row.every),
                row.scheme,
                row.setting,
                *(f"{b.mean:.3f}" for b in (*bits, total) if b),
            ]
        )
    headings = ["model", "every", "scheme", "setting", "weight", "first moment", "second", "all"]
    said = (
        "Bits per element of one matrix with its moments, in the last delta of a chain of three: so small that an LSTM"
        " codes it in reasonable time. `itmo` restores what `excp` does with the same options."
    )
    return ["## On a slice", "", said, "", *markdown_table(headings, lines), ""]


def document(rows: Sequence[Row], marks: Sequence[int], seeds: Sequence[int]) -> str:
    """All tables.

    Args:
        rows: of all trainings.
        marks: the resumed steps after which losses were compared.
        seeds: what was asked for.
    """
    versions = f"torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
    some = any({*row.chain} < {*seeds} for row in rows if row.chain)
    many = f"with {'up to ' if some else ''}{len(seeds)} seeds"
    with_seeds = many if len(seeds) > 1 else "with one seed"
    after = ", ".join(f"+{mark}" for mark in marks if mark)
    lines = [_HEAD.format(versions=versions, seeds=with_seeds, marks=after)]
    for model, every in dict.fromkeys((row.model, row.every) for row in rows):
        of_it = [row for row in rows if (row.model, row.every) == (model, every)]
        if not any(row.chain or row.restores for row in of_it):
            continue
        lines += [f"## {name_of(model)}, {every} steps between checkpoints", ""]
        lines += [*_seeds(of_it), ""]
        lines += [*_verdicts(of_it, marks[-1]), ""]
        lines += [
            f"The smallest settings under {share(BOUND)} after {marks[-1]} resumed steps, for every seed by itself"
        ]
        lines += [f"(restored n times: under {share(RESTORES_BOUND)}):", "", *_smallest(of_it, marks[-1]), ""]
        lines += ["All settings:", "", *_table(of_it, marks), ""]
    coders = (Path(__file__).parent / "excp_coders.md").read_text()  # by a bench of its own, which says so
    return "\n".join([*lines, *_speeds(rows), *_slices(rows), coders]).rstrip() + "\n"
