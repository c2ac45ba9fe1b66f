"""``shrinkpoint verify``: reads checkpoints back, decodes them and compares the digests."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.output import console, print_json
from shrinkpoint.cli.runs import (
    AsJson,
    Pairs,
    Seq,
    Step,
    StorageOptions,
    Target,
    addressed,
    open_run,
    parse_storage_options,
)
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ChainError, ConfigError, FormatError, NoCheckpointError, ShrinkpointWarning
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.store.connect import looks_like_file, read_file

if TYPE_CHECKING:
    from shrinkpoint.store.manifest import Manifest
    from shrinkpoint.store.run import RunStore


def verify(
    url: Target,
    step: Step = None,
    seq: Seq = None,
    everything: Annotated[bool, typer.Option("--all", help="Verify every checkpoint of the run.")] = False,
    storage_options: StorageOptions = None,
    option: Pairs = None,
    as_json: AsJson = False,
) -> None:
    """Fetch and decode checkpoints and compare every digest; exits with 1 when something is damaged."""
    address = addressed(url, step, seq)
    url = address.url
    options = parse_storage_options(url, storage_options, option)
    named = not address.is_newest
    if everything and named:
        raise ConfigError("--all and --step or --seq exclude each other: give one of them")
    if looks_like_file(url):
        with waiting_for(f"verifying {url}"):
            shown, results = url, [_verify_file(url, read_file(url, options))]
    else:
        run = open_run(url, options)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ShrinkpointWarning
            )  # unreadable checkpoints are among the results
            results = verify_run(run, address, everything=everything, with_unreadable=not named)
        shown = run.display
    damaged = sum(not result["sound"] for result in results)
    if as_json:
        print_json({"url": shown, "sound": len(results) - damaged, "damaged": damaged, "results": results})
    else:
        _print(results, damaged, shown)
    if damaged:
        raise typer.Exit(1)


def verify_run(
    run: "RunStore", address: Address, *, everything: bool, with_unreadable: bool
) -> list[dict[str, Any]]:
    """Read and decode the checkpoint of an address, or every one; returns a result for each.

    Raises:
        NoCheckpointError: there is none.
    """
    manifests = run.manifests()
    unreadable = [_result(key=d.key, error=d.reason) for d in run.damaged]
    if not manifests and not unreadable:
        raise NoCheckpointError(f"{run.display} is a run without a checkpoint yet: nothing to verify")
    chosen = manifests if everything else [address.find(manifests)] if manifests else []
    results = []
    with waiting_for("verifying") as waiting:
        for count, manifest in enumerate(chosen):
            waiting.say(f"verifying step {manifest.step} ({count + 1} of {len(chosen)})")
            results.append(_verify_one(run, manifest))
    return results + (unreadable if with_unreadable else [])


def _verify_one(run: "RunStore", manifest: "Manifest") -> dict[str, Any]:
    from shrinkpoint.coding.selective import decode_chain, sources_of_run
    from shrinkpoint.config import SaverConfig

    about: dict[str, Any] = {
        "seq": manifest.seq,
        "step": manifest.step,
        "kind": manifest.kind,
        "key": manifest.chain[-1].key,
    }
    try:
        # every byte, also those that a restore passes over
        chain = [opening() for opening in sources_of_run(run, manifest, whole=True)]
        decoded = decode_chain(
            [partial(lambda each: each, each) for each in chain], threads=SaverConfig().encoder_threads
        )
    except (FormatError, ChainError) as error:
        return _result(**about, error=str(error))
    return _result(**about, tensors=len(decoded.state.tensors), state_digest=manifest.state_digest)


def _verify_file(url: str, data: bytes) -> dict[str, Any]:
    """Decode a base; of a delta, whose chain is not available, verify the checksums."""
    from shrinkpoint.coding.selective import decode_chain, in_memory
    from shrinkpoint.container.reader import read_container

    try:
        checkpoint = read_container(data)
        if checkpoint.kind == "base":
            decode_chain([in_memory(data)])
    except (FormatError, ChainError) as error:
        return _result(key=url, error=str(error))
    return _result(
        key=url,
        step=checkpoint.step,
        kind=checkpoint.kind,
        tensors=len(checkpoint.entries),
        state_digest=checkpoint.state_digest,
        decoded=checkpoint.kind == "base",
    )


def _result(*, key: str, error: str | None = None, decoded: bool = True, **known: Any) -> dict[str, Any]:
    empty = {"seq": None, "step": None, "kind": None, "tensors": None, "state_digest": None}
    return {
        "key": key,
        **empty,
        **known,
        "decoded": decoded and error is None,
        "sound": error is None,
        "error": error,
    }


def _print(results: list[dict[str, Any]], damaged: int, shown: str) -> None:
    out = console()
    for result in results:
        out.print(_line(result))
    verdict = "all sound" if not damaged else f"{damaged} of {len(results)} damaged"
    out.print(f"{verdict}: {shown}")


def _line(result: Mapping[str, Any]) -> str:
    where = result["key"]
    if result["step"] is not None:
        commit = f"seq {result['seq']}, " if result["seq"] is not None else ""
        where = f"step {result['step']} ({commit}{result['kind']})"
    if not result["sound"]:
        return f"DAMAGED {where}: {result['error']}"
    if not result["decoded"]:
        return f"ok      {where}: checksums match; a delta can only be decoded within its run"
    return f"ok      {where}: {result['tensors']} tensors, state {result['state_digest']}"
