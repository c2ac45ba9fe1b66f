"""``shrinkpoint prune``, ``undelete`` and ``compact``: which checkpoints are kept, and what they take."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any

import typer

from shrinkpoint.cli.output import bytes_text
from shrinkpoint.cli.runs import Answer, Seq, Step, Url, Yes, addressed, describe_manifest, keys_of, open_run
from shrinkpoint.engine.retention import RetentionPolicy, record_of
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.store.catalog import is_listed
from shrinkpoint.store.gc import DEFAULT_GRACE_S
from shrinkpoint.store.keys import pin_key
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore

_UNDONE = "Nothing was changed: give --yes to do it"
# Seconds until the commits that one pass removed are older than "now" for the next: clock ticks of file systems and S3.
_CLOCK_TICKS = (0.02, 1.1, 1.1)

_Grace = Annotated[
    float, typer.Option("--grace", min=0, help="Seconds that removed data is kept for active readers.")
]


class Mode(str, Enum):
    """Which value of a metric is best."""

    min = "min"
    max = "max"


def prune(
    url: Url,
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep the newest N.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep the first of every M steps.")] = None,
    keep_best: Annotated[int | None, typer.Option(min=1, help="Keep the K best by --metric.")] = None,
    metric: Annotated[str | None, typer.Option(help="The metric for --keep-best.")] = None,
    mode: Annotated[Mode, typer.Option(help="Which value of it is best.")] = Mode.min,
    pin: Annotated[
        str | None, typer.Option(metavar="NAME", help="Keep that of --step or --seq until --unpin NAME.")
    ] = None,
    unpin: Annotated[str | None, typer.Option(metavar="NAME", help="Release this pin.")] = None,
    step: Step = None,
    seq: Seq = None,
    yes: Yes = False,
    grace: _Grace = DEFAULT_GRACE_S,
) -> Answer:
    """Remove the checkpoints that no rule keeps; pinned ones and the newest sound one, which is read for it, always stay."""
    removes = any((keep_last, keep_every, keep_best))
    if keep_best is not None and metric is None:
        raise ConfigError("--keep-best must know its metric: give --metric too, as --metric val_loss")
    if metric is not None and keep_best is None:
        raise ConfigError(f"--metric {metric} is for --keep-best: say how many of the best to keep")
    if not (removes or pin or unpin):
        raise ConfigError(
            "say what to keep: --keep-last N, --keep-every M, --keep-best K, --pin NAME, or several of these"
        )
    if pin is None and (step, seq) != (None, None):
        raise ConfigError("--step and --seq say which checkpoint --pin keeps: give --pin NAME too")
    address = addressed(url, step, seq)
    run = open_run(url if pin is None else address.url)
    pinned = None if pin is None else address.find(run.manifests())
    report: dict[str, Any] = {"done": yes}
    pins = run.pins(without=unpin)
    if unpin is not None:
        if not is_listed(run.objects, pin_key(unpin)):
            known = ", ".join(sorted(pins)) or "none"
            raise ConfigError(f"there is no pin {unpin!r} in {run.display}; the pins are: {known}")
        report["unpinned"] = unpin
    if pin is not None and pinned is not None:
        report["pinned"] = {"name": pin, "seq": pinned.seq, "step": pinned.step}
        pins[pin] = pinned.seq
    if removes:  # what is refused here leaves the pins alone
        policy = RetentionPolicy(
            keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, mode=mode.value
        )
        keep, remove = _plan(run, policy, metric, set(pins.values()))
        report |= _report(run, keep, remove)
    if yes and (pin or unpin):
        with run.writer() as writer:
            if unpin is not None:
                writer.unpin(unpin)
            if pin is not None and pinned is not None:
                writer.pin(pin, pinned)
    if yes and removes:
        report |= _collect(run, keep, remove, grace)
    return Answer(report, _of_pruned(report, run.display))


def _plan(
    run: RunStore, policy: RetentionPolicy, metric: str | None, pinned: set[int]
) -> tuple[list[Manifest], list[Manifest]]:
    """Divide the checkpoints into those that are kept and those that go.

    Raises:
        ChainError: there are checkpoints, and none is sound; then nothing is removed.
    """
    from shrinkpoint.coding.selective import decode_checkpoint
    from shrinkpoint.config import SaverConfig

    manifests = run.manifests()
    records = [record_of(manifest, metric) for manifest in manifests]
    if metric is not None and all(record.metric is None for record in records):
        names = sorted({name for manifest in manifests for name in describe_manifest(manifest)["metrics"]})
        raise ConfigError(
            f"--metric {metric}: no checkpoint of {run.display} has it; they have {', '.join(names) or 'none'}"
        )
    wanted, threads = policy.select(records, pinned), SaverConfig().encoder_threads
    with waiting_for("looking for the newest sound checkpoint"):
        # by reading it: a damaged file may have the right size
        found = run.newest_readable(lambda manifest: decode_checkpoint(run, manifest, threads=threads))
    wanted |= set() if found is None else {found[0].seq}
    return [m for m in manifests if m.seq in wanted], [m for m in manifests if m.seq not in wanted]


def _report(run: RunStore, keep: Sequence[Manifest], remove: Sequence[Manifest]) -> dict[str, Any]:
    sizes, needed = run.sizes(), keys_of(run, keep)
    freed = {key: sizes[key] for key in keys_of(run, remove) if key in sizes and key not in needed}
    own = {m.chain[-1].key for m in keep}
    chains = {ref.key: ref.total for m in keep for ref in m.chain[:-1] if ref.key not in own}
    return {
        "keep": _listed(keep),
        "remove": _listed(remove),
        "containers_freed": len(freed),
        "bytes_freed": sum(freed.values()),
        "containers_of_chains": len(chains),
        "bytes_of_chains": sum(chains.values()),
        "deltas_with_chains": _listed(m for m in keep if any(ref.key in chains for ref in m.chain)),
    }


def _listed(manifests: Iterable[Manifest]) -> list[dict[str, int]]:
    return [{"seq": manifest.seq, "step": manifest.step} for manifest in manifests]


def _collect(
    run: RunStore, keep: Sequence[Manifest], remove: Sequence[Manifest], grace: float
) -> dict[str, Any]:
    wanted, seen, before = {manifest.seq for manifest in keep}, [*keep, *remove], run.sizes()
    # It commits nothing, so that it asks for no condition, which would mean to write: the disk may be full.
    with run.writer(mode="single-writer") as writer:
        for pause in (0.0, *(_CLOCK_TICKS if grace == 0 else ())):
            time.sleep(pause)
            collected = writer.collect(wanted, seen=seen, grace_s=grace)
            if not collected.waiting:
                break
    found: dict[str, Any] = {"containers_waiting": collected.waiting, "unreadable": list(collected.damaged)}
    if not collected.waiting:  # also what a killed save has left
        freed = before.keys() - run.sizes().keys()
        found |= {"containers_freed": len(freed), "bytes_freed": sum(before[key] for key in freed)}
    return found


def _of_pruned(report: Mapping[str, Any], shown: str) -> Iterator[str]:
    done = report["done"]
    if (released := report.get("unpinned")) is not None:
        yield f"{'released' if done else 'would release'} pin {released}"
    if (pinned := report.get("pinned")) is not None:
        where = f"step {pinned['step']} (seq {pinned['seq']}) as {pinned['name']}"
        yield f"{'pinned' if done else 'would pin'} {where}"
    if "keep" not in report:
        if not done:
            yield _UNDONE
        return
    for word in ("keep", "remove"):
        yield f"{word:<7} {_steps(report[word])}"
    freed = f"{report['containers_freed']} containers, {bytes_text(report['bytes_freed'])}"
    waiting = report.get("containers_waiting")
    if not done:
        yield f"would free {freed} in {shown}. {_UNDONE}"
    else:
        waits = f". {waiting} containers wait for the end of their grace: the next collection deletes them"
        yield f"removed from {shown}; {f'frees {freed}{waits}' if waiting else f'freed {freed}'}"
    if not report["containers_freed"] and report["containers_of_chains"]:
        chains = f"{report['containers_of_chains']} containers, {bytes_text(report['bytes_of_chains'])}"
        command = f"shrinkpoint compact {shown} --seq {report['deltas_with_chains'][0]['seq']} --yes"
        yield (
            f"{chains}, are there only because kept deltas need them: `{command}` makes one a base of its own, after which they can go"
        )
    for key in report.get("unreadable", ()):
        yield f"kept, with all that it may need: unreadable {key}"


def _steps(listed: Sequence[Mapping[str, int]], where: str = "") -> str:
    steps = ", ".join(str(entry["step"]) for entry in listed) or "none"
    return f"{len(listed)} checkpoints{where}; steps: {steps}"


def undelete(url: Url, step: Step = None, seq: Seq = None, yes: Yes = False) -> Answer:
    """Bring back removed checkpoints, all or one, for as long as their data waits for the end of its grace."""
    address = addressed(url, step, seq)
    run = open_run(address.url)
    there = run.removed()
    wanted = [m for m in there if address.step in (None, m.step) and address.seq in (None, m.seq)]
    if not wanted:
        known = ", ".join(str(m.step) for m in there) or "none"
        raise NoCheckpointError(
            f"{run.display} has no such removed checkpoint; the steps that can be brought back are: {known}"
        )
    if yes:
        with run.writer() as writer:
            for manifest in wanted:
                writer.undelete(manifest)
    report: dict[str, Any] = {"done": yes, "undelete": _listed(wanted)}
    steps = _steps(report["undelete"], f" to {run.display}")
    text = f"would bring back {steps}. {_UNDONE}"
    if yes:
        text = f"brought back {steps}. Pin those that a training with retention must not remove"
    return Answer(report, [text])


def compact(
    url: Url, step: Step = None, seq: Seq = None, yes: Yes = False, grace: _Grace = DEFAULT_GRACE_S
) -> Answer:
    """Store a delta again as a base with the same values; fences off a running training."""
    from shrinkpoint.config import SaverConfig
    from shrinkpoint.engine.compaction import compact as commit
    from shrinkpoint.engine.compaction import rebase

    address = addressed(url, step, seq)
    run = open_run(address.url)
    manifest = address.find(run.manifests())
    report: dict[str, Any] = {"step": manifest.step, "seq": manifest.seq, "done": False}
    where = f"step {manifest.step}"
    if manifest.kind == "base":
        report["already_base"] = True
        text = f"{where} (seq {manifest.seq}) is a base already: nothing to do"
        return Answer(report, [text])
    with waiting_for(f"storing {where} as a base"):
        rebased = rebase(run, manifest, threads=SaverConfig().encoder_threads)
    size, length = len(rebased.container), len(manifest.chain)
    report |= {
        "chain_length": length,
        "chain_bytes": manifest.stored_bytes,
        "base_bytes": size,
        "stored_exactly": list(rebased.stored_exactly),
        "already_base": False,
    }
    text = f"{where}: {length} containers of {bytes_text(manifest.stored_bytes)} together become one of {bytes_text(size)}"
    if yes:
        compacted = commit(run, rebased, grace_s=grace)
        report |= {"done": True, "new_seq": compacted.manifest.seq, "pins": list(compacted.pins)}
        text += f"; it is commit {compacted.manifest.seq} now"
    else:
        text += f". {_UNDONE}\nA training that is running in this run would be fenced off: stop it first"
    return Answer(report, [text])
