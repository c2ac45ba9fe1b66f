"""Opens runs for the commands: a clear error where there is none, selection of checkpoints, detection of damage."""

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from shrinkpoint.cli.options import addressed, parse_storage_options
from shrinkpoint.engine.address import Address
from shrinkpoint.engine.meta import adopted_of, is_weights_only, lineage_of
from shrinkpoint.errors import ChainError, ConfigError, FormatError, NoCheckpointError
from shrinkpoint.schemes.exactness import explained
from shrinkpoint.store.connect import StorageOptions, open_objects
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.single import looks_like_file
from shrinkpoint.store.urls import split_urls

__all__ = [
    "READ_ANYWAY",
    "OpenRun",
    "describe_manifest",
    "find_damage",
    "open_run",
    "opened",
    "pick",
    "runs_below",
]

_PATIENCE = RetryPolicy(attempts=4, max_delay_s=5.0, deadline_s=60.0)
"""Shorter than in training, since a user waits at the terminal."""

READ_ANYWAY: ContextVar[bool] = ContextVar("READ_ANYWAY", default=False)
"""Whether ``--read-anyway`` was given before the command's name."""

_NEAREST = 5


@dataclass(frozen=True)
class OpenRun:
    """A run that exists."""

    url: str
    store: RunStore
    objects: ObjectStore

    def sizes(self) -> dict[str, int]:
        """Bytes of every container, by key; one listing."""
        return {info.key: info.size for info in self.objects.list("data/")}

    def keys(self, manifests: Iterable[Manifest]) -> set[str]:
        """Keys of all that these checkpoints need; of a head that cannot be read, its own."""
        found: set[str] = set()
        for manifest in manifests:
            try:
                found.update(ref.key for ref in self.store.refs(manifest))
            except (ChainError, FormatError):  # `find_damage` says so
                found.update(ref.key for ref in manifest.chain)
        return found


def open_run(url: str, options: StorageOptions) -> OpenRun:
    """The run at `url`; nothing is written.

    Raises:
        ConfigError: the URL cannot name a run.
        MissingDependencyError: the package for its protocol is not installed.
        NoCheckpointError: there is no run; the message says what is there instead.
        StoreError: the store cannot be read.
    """
    if (address := Address.parse(url)) is not None:
        raise ConfigError(f"{url} names one checkpoint, and this command takes the run: {address.url}")
    if looks_like_file(url):
        raise NoCheckpointError(
            f"{url} is a file, not a run: `show`, `verify` and `export` read single containers"
        )
    objects = RetryingObjects(open_objects(url, options, read_anyway=READ_ANYWAY.get()), _PATIENCE)
    store = RunStore(url, objects=objects, retry=RetryPolicy(attempts=1))
    if not (store.exists() or objects.list("commits/", limit=1)):
        raise NoCheckpointError(f"there is no run at {store.display}: {store.what_is_there()}")
    return OpenRun(url, store, objects)


def opened(
    url: str, step: int | None, seq: int | None, storage_options: str | None, pairs: Sequence[str] | None
) -> tuple[OpenRun, Address]:
    """The run that a command's arguments name, and which of its checkpoints.

    Raises:
        ConfigError, MissingDependencyError, NoCheckpointError, StoreError: as `open_run`; or the arguments contradict each other.
    """
    address = addressed(url, step, seq)
    return open_run(address.url, parse_storage_options(address.url, storage_options, pairs)), address


def runs_below(url: str, options: StorageOptions) -> list[str]:
    """The names of the runs in a folder that is none itself, in alphabetical order.

    Raises:
        ConfigError, MissingDependencyError, StoreError: as `open_run`.
    """
    if Address.parse(url) is not None or looks_like_file(url) or len(split_urls(url)) > 1:
        return []  # `open_run` says why
    objects = RetryingObjects(open_objects(url, options, read_anyway=READ_ANYWAY.get()), _PATIENCE)
    if objects.list("format.json", limit=1) or objects.list("commits/", limit=1):
        return []
    end = "/format.json"
    return sorted(info.key[: -len(end)] for info in objects.list("") if info.key.endswith(end))


def pick(run: OpenRun, address: Address) -> Manifest:
    """The checkpoint that was addressed; the newest by default.

    Raises:
        NoCheckpointError: there is none; the message lists the nearest.
    """
    manifests, step, seq = run.store.manifests(), address.step, address.seq
    if not manifests:
        raise NoCheckpointError(f"{run.store.display} is a run without a readable checkpoint")
    if step is None and seq is None:
        return address.find(manifests)
    name, wanted = ("step", step) if step is not None else ("commit number", seq)
    known = {m: m.step if step is not None else m.seq for m in manifests}
    for manifest in manifests:  # newest first: of a step that was saved twice, the later
        if known[manifest] == wanted:
            return manifest
    assert wanted is not None
    nearest = sorted(sorted(set(known.values()), key=lambda value: abs(value - wanted))[:_NEAREST])
    raise NoCheckpointError(
        f"{run.store.display} has no checkpoint with {name} {wanted}; the nearest are {', '.join(map(str, nearest))}"
    )


def find_damage(run: OpenRun, manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """Damage of a checkpoint's chain that a listing shows (missing or truncated files); None does not verify the
    bytes."""
    try:
        needed = run.store.refs(manifest)
    except (ChainError, FormatError) as error:
        return str(error)
    for ref in needed:
        size = sizes.get(ref.key)
        if size is None:
            return f"{ref.key} is missing"
        if size != ref.size:
            return f"{ref.key} has {size} bytes instead of {ref.size}"
    return None


def _exact(noted: object, size: int) -> list[dict[str, Any]]:
    """The tensors that a lossy scheme has stored exactly, with the reasons' messages."""
    parts = []
    for part in noted if isinstance(noted, list) else ():
        if (
            isinstance(part, dict)
            and isinstance(part.get("code"), str)
            and isinstance(part.get("bytes"), int)
        ):
            share = part["bytes"] / size if size else 0.0
            parts.append({**part, "share": share, "reason": explained(part["code"])})
    return parts


_MEASURED = (
    "degradation",
    "degradation_low",
    "degradation_high",
    "degradation_noise",
    "cost",
    "cost_high",
    "cost_delay",
    "measured",
    "allowed",
    "update_error",
    "update_length",
    "overhead",
    "not_finite",
)


def _adopted(manifest: Manifest) -> bool | None:
    """Whether training went on from what is restored of a checkpoint; None in runs that do not adopt."""
    adopted = adopted_of(manifest)
    return None if adopted is None else adopted.planned


def describe_manifest(manifest: Manifest) -> dict[str, Any]:
    """A manifest's information about its checkpoint as JSON; missing values are null."""
    noted = manifest.meta.get("save")
    save: Mapping[str, Any] = noted if isinstance(noted, dict) else {}
    raw, size = save.get("raw_bytes"), manifest.chain[-1].total
    metrics, resumed, highs = (save.get(name) for name in ("metrics", "resumed", "resumed_high"))
    return {
        "seq": manifest.seq,
        "step": manifest.step,
        "kind": manifest.kind,
        "chain_length": len(manifest.chain),
        "parts": manifest.chain[-1].parts,
        "bytes": size,
        "chain_bytes": manifest.stored_bytes,
        "raw_bytes": raw,
        "ratio": raw / size if isinstance(raw, int) and size else None,
        **{name: save.get(name) for name in _MEASURED},
        "baseline": save.get("baseline"),
        "resumed": resumed if isinstance(resumed, dict) else {},
        "resumed_high": highs if isinstance(highs, dict) else {},
        "metrics": metrics if isinstance(metrics, dict) else {},
        "exact": _exact(save.get("exact"), size),
        "scheme": save.get("scheme"),
        "configuration": save.get("configuration"),
        "reason": save.get("reason"),
        "adopted": _adopted(manifest),
        "adopt_s": save.get("adopt_s"),
        "waited_s": save.get("waited_s"),
        "lineage": lineage_of(manifest.meta),
        "weights_only": is_weights_only(manifest.meta),
        "epoch": manifest.epoch,
        "session": manifest.session,
        "wall_time": manifest.wall_time,
        "library": manifest.library,
        "state_digest": manifest.state_digest,
        "key": manifest.chain[-1].key,
    }
