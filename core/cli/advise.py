"""``shrinkpoint advise``: how often to save, and whether a step log pays, from a run's own measurements."""

import itertools
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from shrinkpoint.cli.options import AsJson, Pairs, StorageOptions, Url, parse_storage_options
from shrinkpoint.cli.output import bytes_text, console, print_json, print_pairs
from shrinkpoint.cli.runs import OpenRun, open_run
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.steps.pays import (
    Costs,
    LogCosts,
    best_interval,
    waste_with_log,
    waste_without_log,
    worth,
)
from shrinkpoint.store.keys import seq_of_commit
from shrinkpoint.store.manifest import Manifest

__all__ = ["advise"]

_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|d|)")
_LONGEST_WRITE = 3600.0
_TIME_STAMP = 1.0  # what stores round times to: S3 to seconds, file systems to their kernel's clock
_LOOKED_AT = 50  # of the newest checkpoints
_LOGGED = 20  # steps of a log whose share of the time counts
_ASSUMED = {"log_overhead": 0.02, "replay_ratio": 0.1, "segment_steps": 8.0}


@dataclass(frozen=True)
class _Noted:
    """Measurements from a run's manifests, medians of its newest saves; None where a value is missing."""

    saves: int
    stall_s: float
    encode_s: float
    write_s: float | None
    seconds_per_step: float | None
    copy_s: float
    exact_write_s: float | None
    log_overhead: float | None
    replay_ratio: float | None
    segment_steps: float | None
    checkpoint_bytes: float
    gradient_bytes: float
    scheme: str


def advise(
    url: Url,
    mtbf: Annotated[
        str, typer.Option("--mtbf", help="Mean time between failures of the whole training: 90min, 2h, 1d.")
    ],
    seconds_per_step: Annotated[
        float | None,
        typer.Option("--seconds-per-step", help="Default: from the times of the run's checkpoints."),
    ] = None,
    restore_seconds: Annotated[
        float | None,
        typer.Option("--restore-seconds", help="Default: the newest checkpoint is read here and timed."),
    ] = None,
    restart_seconds: Annotated[
        float, typer.Option("--restart-seconds", help="From a failure until the training restores.")
    ] = 60.0,
    log_overhead: Annotated[
        float | None,
        typer.Option(
            "--log-overhead",
            help="Share of the training time that a step log takes. Default: as reported, or 0.02.",
        ),
    ] = None,
    replay_ratio: Annotated[
        float | None,
        typer.Option(
            "--replay-ratio",
            help="Time to replay a step, relative to training it. Default: as reported, or 0.1.",
        ),
    ] = None,
    segment_steps: Annotated[
        int | None,
        typer.Option(
            "--segment-steps",
            min=1,
            help="Steps that a log writes together. Default: as reported, or 8.",
        ),
    ] = None,
    storage_options: StorageOptions = None,
    option: Pairs = None,
    as_json: AsJson = False,
) -> None:
    """Say how often to save, and whether a step log pays, from the run's own reports."""
    failures = _seconds(mtbf)
    for name, value in (
        ("seconds-per-step", seconds_per_step),
        ("restore-seconds", restore_seconds),
        ("restart-seconds", restart_seconds),
        ("log-overhead", log_overhead),
        ("replay-ratio", replay_ratio),
    ):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"--{name} {value} must be a number, 0 or more")
    run = open_run(url, parse_storage_options(url, storage_options, option))
    noted = _noted(run)
    per_step = seconds_per_step or noted.seconds_per_step
    if not per_step:
        raise ConfigError(
            f"{run.store.display} does not show how long a step takes, because no process has committed two checkpoints of"
            " different steps: give --seconds-per-step"
        )
    restore = restore_seconds if restore_seconds is not None else _timed_restore(run)
    costs = Costs(
        mtbf=failures,
        stall=noted.stall_s,
        lag=noted.encode_s + (noted.write_s or 0.0),
        restart=restart_seconds + restore,
    )
    given = {"log_overhead": log_overhead, "replay_ratio": replay_ratio, "segment_steps": segment_steps}
    chosen = {name: _first(value, getattr(noted, name), _ASSUMED[name]) for name, value in given.items()}
    log = LogCosts(
        overhead=chosen["log_overhead"],
        segment=chosen["segment_steps"] * per_step,
        lag=per_step,
        replay=chosen["replay_ratio"],
    )
    exactly = _with_exact_saves(costs, noted)
    without, with_log = best_interval(costs), best_interval(exactly, log)
    advice: dict[str, Any] = {
        "url": run.store.display,
        "seconds_per_step": per_step,
        "costs": asdict(costs),
        "costs_with_log": asdict(exactly),
        "log_costs": asdict(log),
        "without_log": _part(without, waste_without_log(without, costs), per_step),
        "with_log": _part(with_log, waste_with_log(with_log, exactly, log), per_step),
        "log_may_cost": _finite(worth(costs, log, exactly)),
        "log_bytes_per_step": noted.gradient_bytes,
        "log_bytes_kept": 2 * noted.gradient_bytes * max(1, round(with_log / per_step)),
        "measured": asdict(noted) | {"restore_s": restore},
        "assumed": _assumed(noted, seconds_per_step, restore_seconds, given),
    }
    if as_json:
        print_json(advice)
        return
    _print(advice, costs, exactly, log, noted)


def _seconds(text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if value <= 0:
        raise ConfigError(f"--mtbf {text!r} is not a time: write 90s, 30min, 2h or 1d")
    return value


def _noted(run: OpenRun) -> _Noted:
    manifests = run.store.manifests()
    saves = [(m, m.meta["save"]) for m in manifests[:_LOOKED_AT] if isinstance(m.meta.get("save"), dict)]
    if not saves:
        raise NoCheckpointError(f"{run.store.display} contains no checkpoint with a report: save one first")
    newest = saves[0][1]
    raw = newest.get("raw_sections")
    weights = raw.get("weight", 0) if isinstance(raw, dict) else 0
    write_s = _write_seconds(run, [manifest for manifest, _ in saves])
    ratio = _median(
        [max(1.0, _number(save, "raw_bytes") / max(1.0, _number(save, "bytes"))) for _, save in saves]
    )
    per_step = _step_seconds([manifest for manifest, _ in saves])
    logs = [save["step_log"] for _, save in saves if isinstance(save.get("step_log"), dict)]
    return _Noted(
        saves=len(saves),
        stall_s=_median(
            [
                _number(save, "blocked_s") + _number(save, "search_s") + _number(save, "adopt_s")
                for _, save in saves
            ]
        ),
        encode_s=_median([_number(save, "encode_s") for _, save in saves]),
        write_s=write_s,
        seconds_per_step=per_step,
        copy_s=_median([_number(save, "blocked_s") for _, save in saves]),
        exact_write_s=None if write_s is None else write_s * ratio,
        log_overhead=_log_overhead(logs),
        replay_ratio=_replay_ratio(logs, per_step),
        segment_steps=_segment_steps(logs),
        checkpoint_bytes=_median([manifest.chain[-1].total for manifest, _ in saves]),
        gradient_bytes=float(weights) if isinstance(weights, int | float) else 0.0,
        scheme=str(newest.get("scheme")),
    )


def _number(save: Mapping[str, Any], name: str) -> float:
    value = save.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value >= 0 else 0.0


def _log_overhead(logs: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the newest process that logged enough: the training's waiting, and the log's CPU time divided among the
    processors."""
    for log in logs:
        cost = _number(log, "blocked_s") + _number(log, "cpu_s") / max(1.0, _number(log, "cores"))
        rest = _number(log, "seconds") - cost
        if _number(log, "steps") >= _LOGGED and rest > 0:
            return cost / rest
    return None


def _replay_ratio(logs: Sequence[Mapping[str, Any]], per_step: float | None) -> float | None:
    """Of the newest replay."""
    for log in logs:
        steps, seconds = _number(log, "replayed_steps"), _number(log, "replay_s")
        if steps and seconds and per_step:
            return seconds / steps / per_step
    return None


def _segment_steps(logs: Sequence[Mapping[str, Any]]) -> float | None:
    for log in logs:
        if _number(log, "segments") and _number(log, "steps"):
            return _number(log, "steps") / _number(log, "segments")
    return None


def _with_exact_saves(costs: Costs, noted: _Noted) -> Costs:
    """The costs with ``scheme="lossless"``, which an exact log needs: no evaluations, and at most the raw state's bytes to write."""
    if noted.scheme == "lossless":
        return costs
    return replace(costs, stall=noted.copy_s, lag=noted.encode_s + (noted.exact_write_s or 0.0))


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _step_seconds(manifests: Sequence[Manifest]) -> float | None:
    """From the times of checkpoints that one process has committed one after the other."""
    found = [
        (newer.wall_time - older.wall_time) / (newer.step - older.step)
        for newer, older in itertools.pairwise(manifests)
        if newer.session == older.session and newer.step > older.step and newer.wall_time > older.wall_time
    ]
    return _median(found) if found else None


def _write_seconds(run: OpenRun, manifests: Sequence[Manifest]) -> float | None:
    """Time from a manifest's creation, by its writer's clock, to its commit, by the store's; None where the clocks
    disagree by more than a store's time stamps are rounded."""
    appeared = {seq_of_commit(info.key): info.modified for info in run.objects.list("commits/")}
    found = [
        when - manifest.wall_time
        for manifest in manifests
        if (when := appeared.get(manifest.seq)) is not None
    ]
    if not found or not -_TIME_STAMP <= (middle := _median(found)) < _LONGEST_WRITE:
        return None
    return max(0.0, middle)


def _timed_restore(run: OpenRun) -> float:
    from shrinkpoint.saver import decode_checkpoint

    started = time.perf_counter()
    run.store.newest_sound(lambda manifest, containers: bool(decode_checkpoint(manifest, containers)))
    return time.perf_counter() - started


def _part(interval: float, waste: float, per_step: float) -> dict[str, float | int | None]:
    return {"interval_s": interval, "every": max(1, round(interval / per_step)), "waste": _finite(waste)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _assumed(
    noted: _Noted, per_step: float | None, restore: float | None, given: Mapping[str, float | None]
) -> list[str]:
    found = []
    unknown = [name for name, value in given.items() if value is None and getattr(noted, name) is None]
    if unknown:
        what = {
            "log_overhead": f"a log takes {_ASSUMED['log_overhead']:.0%} of the training",
            "replay_ratio": f"a replayed step takes {_ASSUMED['replay_ratio']:.0%} of a training step",
            "segment_steps": f"a segment has {_ASSUMED['segment_steps']:.0f} steps",
        }
        found.append(
            f"{', '.join(what[name] for name in unknown)}: this run's reports do not have it, since no save"
            " followed a log of enough steps, or a replay"
        )
    found.append("a segment is written one step after its last")
    if per_step is None:
        found.append(
            "seconds per step include everything between two checkpoints: validation, and time that was lost"
        )
    if noted.write_s is None:
        found.append(
            "the time of an upload is not known, because this store's clock and the training's differ: it counts as 0"
        )
    if restore is None:
        found.append("a restore takes as long as reading the newest checkpoint took here, from this machine")
    if noted.scheme != "lossless":
        found.append(
            f"step_log='exact' needs scheme='lossless'; its saves are reckoned without the evaluations of {noted.scheme!r}, with as"
            " much time for coding, and with the raw state's bytes to write; its restore with as much time"
        )
    return [*found, "failures come at random, and a save is made as soon as the interval is over"]


def _print(advice: Mapping[str, Any], costs: Costs, exactly: Costs, log: LogCosts, noted: _Noted) -> None:
    def share(value: float | None) -> str:
        return "all of it: no progress" if value is None else f"{value:.2%}"

    without, with_log, most = advice["without_log"], advice["with_log"], advice["log_may_cost"]
    write = "?" if noted.write_s is None else f"{noted.write_s:.3g}"
    print_pairs(
        [
            ("seconds per step", f"{advice['seconds_per_step']:.3g} s"),
            (
                "a save",
                f"stalls {costs.stall:.3g} s; committed after {noted.encode_s:.3g} + {write} s; {bytes_text(noted.checkpoint_bytes)}",
            ),
            (
                "a restart",
                f"{costs.restart:.3g} s, of these {advice['measured']['restore_s']:.3g} s for the restore",
            ),
            ("a failure", f"every {costs.mtbf / 3600:.3g} h"),
            (
                "without a log",
                f"save every {without['every']} steps ({without['interval_s']:.3g} s); failures and saves take {share(without['waste'])}",
            ),
            (
                "with a log",
                f"save every {with_log['every']} steps ({with_log['interval_s']:.3g} s); failures, saves and the log take"
                f" {share(with_log['waste'])}, if the log takes {log.overhead:.2%} and a replay {log.replay:.1%} of training, in"
                f" segments of {log.segment / advice['seconds_per_step']:.3g} steps"
                + (
                    ""
                    if exactly == costs
                    else f", and a lossless save stalls {exactly.stall:.3g} s and is committed after {exactly.lag:.3g} s"
                ),
            ),
            (
                "the log's bytes",
                f"{bytes_text(advice['log_bytes_per_step'])} per step, up to {bytes_text(advice['log_bytes_kept'])} at a time",
            ),
            (
                "a log pays",
                "at any overhead"
                if most is None
                else f"below {most:.2%} of overhead"
                if most > 0
                else "never here",
            ),
        ]
    )
    pays = most is None or log.overhead < most
    chosen = with_log if pays else without
    more = ", scheme='lossless', step_log='exact', step_log_url='/dev/shm/steps'" if pays else ""
    out = console()
    out.print(f"\nCheckpointer(..., every={chosen['every']}{more})" + ("" if pays else "    # no step log"))
    for line in advice["assumed"]:
        out.print(f"assumed: {line}")
