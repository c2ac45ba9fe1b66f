"""``shrinkpoint compact``: turn a delta into a base, so that its chain can be removed."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.output import bytes_text, console, print_json
from shrinkpoint.cli.runs import AsJson, Pairs, Seq, Step, StorageOptions, Url, Yes, opened
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.store.gc import DEFAULT_GRACE_S

if TYPE_CHECKING:
    from shrinkpoint.engine.compaction import Rebased

__all__ = ["compact"]


def compact(
    url: Url,
    step: Step = None,
    seq: Seq = None,
    yes: Yes = False,
    grace: Annotated[
        float,
        typer.Option("--grace", min=0, help="Seconds that the old chain's data is kept for active readers."),
    ] = DEFAULT_GRACE_S,
    storage_options: StorageOptions = None,
    option: Pairs = None,
    as_json: AsJson = False,
) -> None:
    """Store a delta again as a base with the same values; fences off a running training."""
    from shrinkpoint.config import SaverConfig
    from shrinkpoint.engine.compaction import compact as commit
    from shrinkpoint.engine.compaction import rebase

    run, address = opened(url, step, seq, storage_options, option)
    manifest = address.find(run.manifests())
    if manifest.kind == "base":
        _print({"step": manifest.step, "seq": manifest.seq, "done": False, "already_base": True}, as_json)
        return
    with waiting_for(f"storing step {manifest.step} as a base"):
        rebased = rebase(run, manifest, threads=SaverConfig().encoder_threads)
    report = _report(rebased) | {"done": False, "already_base": False}
    if yes:
        compacted = commit(run, rebased, grace_s=grace)
        report |= {"done": True, "new_seq": compacted.manifest.seq, "pins": list(compacted.pins)}
    _print(report, as_json)


def _report(rebased: "Rebased") -> dict[str, Any]:
    return {
        "step": rebased.source.step,
        "seq": rebased.source.seq,
        "chain_length": len(rebased.source.chain),
        "chain_bytes": rebased.source.stored_bytes,
        "base_bytes": len(rebased.container),
        "stored_exactly": list(rebased.stored_exactly),
    }


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    out = console()
    if report["already_base"]:
        out.print(f"step {report['step']} (seq {report['seq']}) is a base already: nothing to do")
        return
    sizes = (
        f"{report['chain_length']} containers of {bytes_text(report['chain_bytes'])} together become one of"
        f" {bytes_text(report['base_bytes'])}"
    )
    if report["done"]:
        out.print(f"step {report['step']}: {sizes}; it is commit {report['new_seq']} now")
    else:
        out.print(f"step {report['step']}: {sizes}. Nothing was changed: give --yes to do it")
        out.print("A training that is running in this run would be fenced off: stop it first")
