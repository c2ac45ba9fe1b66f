"""``shrinkpoint report``: a page about a run, or about the runs of a folder."""

import math
import time
import warnings
from contextlib import suppress
from typing import Annotated

import typer

from shrinkpoint.cli import page
from shrinkpoint.cli.ls import survey
from shrinkpoint.cli.output import bytes_text, console, counted, in_all_text
from shrinkpoint.cli.page import finite
from shrinkpoint.cli.runs import OptionsOf, Url, of_stores, open_run, runs_below
from shrinkpoint.cli.sections import METRIC, Run, folder_parts, losses_of, run_parts, when
from shrinkpoint.cli.show import contents_of
from shrinkpoint.cli.verify import verify_run
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ChainError, ConfigError, FormatError, ShrinkpointWarning, StoreError
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.version import __version__


@of_stores
def report(
    url: Url,
    options_of: OptionsOf,
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="The page; -o FILE is the same.")
    ] = "report.html",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check every byte, as `verify --all` does.")
    ] = False,
) -> None:
    """Write a page about a run, or the runs of a folder: how small, how safe, how to resume; one file that loads no other."""
    # torch, for which the command line does not wait
    from shrinkpoint.io.export import check_place, write_whole

    target = check_place(output)
    try:
        ours = not target.exists() or page.GENERATOR.encode() in target.read_bytes()[:1000]
    except OSError as error:
        raise StoreError(f"{target} exists and cannot be read: {error}") from error
    if not ours:
        raise ConfigError(f"{target} exists and is no report: choose another name with -o")
    options = options_of(url)
    below, runs = runs_below(url, options), []
    with waiting_for(f"reading {url}") as waiting:
        for name in below or [""]:
            waiting.say(f"reading {name or url}")
            runs.append(_read(f"{url.rstrip('/')}/{name}" if name else url, name, options, verify=verify))
    shown = url if below else runs[0].found["url"]
    made = f"{shown} · shrinkpoint {__version__}, {when(time.time())}"
    parts = folder_parts(runs) if below else run_parts(runs[0])
    text = page.document(shown.rstrip("/").rpartition("/")[2], made, parts)
    size = write_whole(target, lambda file: file.write_text(text, "utf-8", "replace"), force=True)
    count, damaged = sum(len(run.rows) for run in runs), sum(run.damaged for run in runs)
    console().print(f"wrote {target}: {counted(count, 'checkpoint')}, {bytes_text(size)}")
    if verify and damaged:
        console().print(f"{counted(damaged, 'checkpoint')} DAMAGED: the page says how")
        raise typer.Exit(1)


def _read(url: str, name: str, options: StorageOptions, *, verify: bool) -> Run:
    """Return what is stored of a run."""
    from shrinkpoint.coding.selective import header_of

    run = open_run(url, options)
    manifests, found = survey(run)
    rows = found["checkpoints"]
    if verify and rows:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShrinkpointWarning)
            results = verify_run(run, Address(url=url), everything=True, with_unreadable=False)
        errors = {result["key"]: result["error"] for result in results}  # of another listing than the rows
        for row in rows:
            row["damage"] = errors.get(row["key"], row["damage"])
    newest = next((at for at, row in enumerate(rows) if row["damage"] is None), None)
    contents, wrote = None, ""
    if newest is not None:
        with suppress(FormatError, ChainError):  # `verify` says so
            header = header_of(run, manifests[newest].chain[-1])
            contents = contents_of(header, rows[newest]["bytes"])
            contents["chain"] = [{"key": ref.key, "bytes": ref.total} for ref in manifests[newest].chain]
            tree = header.tree if isinstance(header.tree, dict) else {}
            wrote = "lightning" if "pytorch-lightning_version" in tree else str(tree.get("format"))
    ordered = sorted(zip(rows, manifests, strict=True), key=lambda each: (each[1].step, each[1].position))
    seen: set[str] = set()
    sums = dict.fromkeys(("disk_sum", "raw_sum", "copies_sum", "evaluations_sum", "adoptions_sum"), 0.0)
    for row, manifest in ordered:
        sums["disk_sum"] += sum(ref.total for ref in manifest.chain if ref.key not in seen)
        seen.update(ref.key for ref in manifest.chain)
        sums["raw_sum"] += math.nan if finite(row["raw_bytes"]) is None else row["raw_bytes"]
        sums["copies_sum"] += finite(row["blocked_s"]) or 0.0
        sums["evaluations_sum"] += finite(row["search_s"]) or 0.0
        sums["adoptions_sum"] += (finite(row["adopt_s"]) or 0.0) + (finite(row["waited_s"]) or 0.0)
        row |= {total: finite(value) or None for total, value in sums.items()}
        row["ratio_sum"] = row["raw_sum"] / row["disk_sum"] if row["raw_sum"] and row["disk_sum"] else None
        row["in_all"] = in_all_text([row])
        row |= {METRIC + metric: value for metric, value in row["metrics"].items()}
        losses = [finite(row["metrics"][metric]) for metric in losses_of(row["metrics"])]
        row["loss"] = next((loss for loss in losses if loss is not None), finite(row["baseline"]))
    shown = name or run.display.rstrip("/").rpartition("/")[2]
    best = None if newest is None else rows[newest]
    return Run(shown, found, [row for row, _ in ordered], best, contents, wrote, verify)
