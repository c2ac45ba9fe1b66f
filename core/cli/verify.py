"""``shrinkpoint verify``: reads checkpoints back, decodes them and compares the digests."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.runs import Answer, Seq, Step, Target, addressed, open_run, options_of
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
) -> Answer:
    """Fetch and decode checkpoints and compare every digest; exits with 1 when something is damaged."""
    address = addressed(url, step, seq)
    if everything and not address.is_newest:
        raise ConfigError("--all and --step or --seq exclude each other: give one of them")
    if looks_like_file(shown := address.url):
        with waiting_for(f"verifying {shown}"):
            results = [_verify_file(shown, read_file(shown, options_of(shown)))]
    else:
        run = open_run(shown)
        results, shown = verify_run(run, None if everything else address), run.display
    damaged = sum(not result["sound"] for result in results)
    report = {"url": shown, "sound": len(results) - damaged, "damaged": damaged, "results": results}
    whole = f"{f'{damaged} of {len(results)} damaged' if damaged else 'all sound'}: {shown}"
    return Answer(report, [*map(_line, results), whole], bool(damaged))


def verify_run(run: "RunStore", address: Address | None = None) -> list[dict[str, Any]]:
    """Read and decode the checkpoint of an address, or every one; returns a result for each, and for what is unreadable.

    Raises:
        NoCheckpointError: there is none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)  # what is unreadable is among the results
        manifests = run.manifests()
    unreadable = [_result(damaged.key, damaged.reason) for damaged in run.damaged]
    if not manifests and not unreadable:
        raise NoCheckpointError(f"{run.display} is a run without a checkpoint yet: nothing to verify")
    chosen = manifests if address is None else [address.find(manifests)] if manifests else []
    results = []
    with waiting_for("verifying") as waiting:
        for count, manifest in enumerate(chosen):
            waiting.say(f"verifying step {manifest.step} ({count + 1} of {len(chosen)})")
            results.append(_verify_one(run, manifest))
    return results + (unreadable if address is None or address.is_newest else [])


def _verify_one(run: "RunStore", manifest: "Manifest") -> dict[str, Any]:
    from shrinkpoint.coding.selective import decode_chain, sources_of_run
    from shrinkpoint.config import SaverConfig

    key = manifest.chain[-1].key
    about: dict[str, Any] = {"seq": manifest.seq, "step": manifest.step, "kind": manifest.kind}
    try:
        # every byte, also those that a restore passes over
        chain = [opening() for opening in sources_of_run(run, manifest, whole=True)]
        opened = [partial(lambda each: each, each) for each in chain]
        tensors = len(decode_chain(opened, threads=SaverConfig().encoder_threads).state.tensors)
    except (FormatError, ChainError) as error:
        return _result(key, **about, error=str(error))
    return _result(key, **about, tensors=tensors, state_digest=manifest.state_digest)


def _verify_file(url: str, data: bytes) -> dict[str, Any]:
    """Decode a base; of a delta, whose chain is not available, verify the checksums."""
    from shrinkpoint.coding.selective import decode_chain, in_memory
    from shrinkpoint.container.reader import read_container

    try:
        found = read_container(data)
        if found.kind == "base":
            decode_chain([in_memory(data)])
    except (FormatError, ChainError) as error:
        return _result(url, error=str(error))
    about: dict[str, Any] = {"step": found.step, "kind": found.kind, "state_digest": found.state_digest}
    return _result(url, **about, tensors=len(found.entries), decoded=found.kind == "base")


def _result(key: str, error: str | None = None, decoded: bool = True, **known: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("seq", "step", "kind", "tensors", "state_digest"))
    sound = error is None
    return {"key": key, **empty, **known, "decoded": decoded and sound, "sound": sound, "error": error}


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
