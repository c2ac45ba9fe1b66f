"""What the commands share: the options that name a run, one of its checkpoints or a file, and opening them."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from shrinkpoint.cli.output import console
from shrinkpoint.engine.address import Address
from shrinkpoint.engine.retention import adopted_of, is_weights_only, lineage_of
from shrinkpoint.errors import ChainError, ConfigError, FormatError, NoCheckpointError
from shrinkpoint.schemes.exactness import explained
from shrinkpoint.store.connect import looks_like_file, open_objects
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import split_urls

if TYPE_CHECKING:
    from shrinkpoint.coding.selective import Decoded
    from shrinkpoint.container.reader import Header

_VARIABLE = "SHRINKPOINT_STORAGE_OPTIONS"

Url = Annotated[str, typer.Argument(metavar="URL", help="The run: a folder, s3://bucket/prefix, fsspec URL.")]
Target = Annotated[
    str, typer.Argument(metavar="URL", help="A run, a checkpoint of it (URL#step=N, URL#best), or a file.")
]
_StorageOptions = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        envvar=_VARIABLE,
        show_envvar=True,
        help="Options for the URL's file system, as a JSON object; of several stores for all but folders, or a JSON list.",
    ),
]
_Pairs = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="One such; dots nest: -o client_kwargs.region_name=eu-west-1.",
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of a table.")]
Step = Annotated[int | None, typer.Option(min=0, help="The checkpoint of this step; default: the newest.")]
Seq = Annotated[int | None, typer.Option(min=0, help="The checkpoint with this commit number.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without this, only print what would be done.")]


_given: ContextVar[tuple[str | None, Sequence[str]]] = ContextVar("_given", default=(None, ()))
"""The command's ``--storage-options``, and its ``-o``."""


@dataclass(frozen=True)
class Answer:
    """What a command has found."""

    report: Mapping[str, Any]
    """As ``--json`` prints it."""
    shown: Iterable[str | Table]
    """The same for people, line by line."""
    failed: bool = False
    """Whether something is amiss: the exit code is 1."""
    notes: Iterable[str] = ()
    """For people, on stderr."""


def answering(command: Callable[..., Answer], *, of_stores: bool = True) -> Callable[..., None]:
    """Give a command ``--json`` and, if it opens stores, the options for these; and print its answer."""

    @wraps(command)
    def answered(
        *, as_json: bool, storage_options: str | None = None, option: list[str] | None = None, **more: Any
    ) -> None:
        pairs = option or []
        if "output" in more:  # of `report`, where -o names the page, too
            more["output"] = [more["output"], *(text for text in pairs if "=" not in text)][-1]
            pairs = [text for text in pairs if "=" in text]
        _given.set((storage_options, pairs))
        answer = command(**more)
        if as_json:
            print(json.dumps(answer.report, indent=2, allow_nan=False))
        else:
            for note in answer.notes:
                console(stderr=True).print(f"note: {note}")
            for line in answer.shown:
                console().print(line)
        if answer.failed:
            raise typer.Exit(1)

    added: dict[str, tuple[Any, Any]] = {"as_json": (_AsJson, False)}
    if of_stores:
        added |= {"storage_options": (_StorageOptions, None), "option": (_Pairs, None)}
    new = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in added.items()
    ]
    # typer reads both
    answered.__signature__ = Signature([*signature(command).parameters.values(), *new])  # type: ignore[attr-defined]
    answered.__annotations__ |= {name: kind for name, (kind, _) in added.items()}
    return answered


def options_of(url: str) -> Any:
    """Return the options of a URL's store, of ``--storage-options`` and ``-o``; the latter take precedence.

    Options from the environment apply to remote stores only; a local folder has none.

    Raises:
        ConfigError: not a JSON object, or not KEY=VALUE.
    """
    text, pairs = _given.get()
    if text and text == os.environ.get(_VARIABLE) and "://" not in url:
        text = None
    try:
        options = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(
            f'--storage-options is not JSON ({error}): write it as \'{{"key": "value"}}\''
        ) from None
    are_listed = isinstance(options, list) and all(one is None or isinstance(one, dict) for one in options)
    if are_listed and len(split_urls(url)) > 1 and not pairs:
        return options
    if not isinstance(options, dict):
        raise ConfigError(
            "--storage-options must be a JSON object, as in '{\"anon\": true}', or of several stores a list of JSON objects;"
            " -o is for all of them: leave it out with a list"
        )
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"-o {pair!r} must be KEY=VALUE, as in -o endpoint_url=http://localhost:9000")
        *outer, last = key.split(".")
        inner = options
        for part in outer:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"-o {key}: {part} has a value of its own already")
        # all else is text: an access key may look like a number
        inner[last] = {"true": True, "false": False, "null": None}.get(value, value)
    return options


def addressed(url: str, step: int | None = None, seq: int | None = None) -> Address:
    """Return the run, and which of its checkpoints ``URL#step=N`` or the options name.

    Raises:
        ConfigError: several of these name one.
    """
    address = Address.parse(url)
    if address is not None and (step is not None or seq is not None):
        raise ConfigError(f"{url} names a checkpoint already: leave --step and --seq out")
    return address or Address(url=url, step=step, seq=seq)


def name_of(address: Address) -> str:
    """Return what `shrinkpoint.load` calls this checkpoint, or this file."""
    return address.url if looks_like_file(address.url) else str(address)


# shorter than in training, since a user waits at the terminal
_PATIENCE = RetryPolicy(attempts=4, max_delay_s=5.0, deadline_s=60.0)


def keys_of(store: RunStore, manifests: Iterable[Manifest]) -> set[str]:
    """List the keys of all that these checkpoints need; of a head that cannot be read, its own."""
    found: set[str] = set()
    for manifest in manifests:
        try:
            found.update(ref.key for ref in store.refs(manifest))
        except (ChainError, FormatError):  # `find_damage` says so
            found.update(ref.key for ref in manifest.chain)
    return found


def open_run(url: str) -> RunStore:
    """Open the run at `url`; nothing is written.

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
    objects = _objects(url)
    store = RunStore(url, objects=objects, retry=RetryPolicy(attempts=1))
    if not (store.exists() or objects.list("commits/", limit=1)):
        raise NoCheckpointError(f"there is no run at {store.display}: {store.what_is_there()}")
    return store


def runs_below(url: str) -> list[str]:
    """List the names of the runs in a folder that is none itself, in alphabetical order.

    Raises:
        ConfigError, MissingDependencyError, StoreError: as `open_run`.
    """
    if Address.parse(url) is not None or looks_like_file(url) or len(split_urls(url)) > 1:
        return []  # `open_run` says why
    objects = _objects(url)
    if objects.list("format.json", limit=1) or objects.list("commits/", limit=1):
        return []
    end = "/format.json"
    return sorted(info.key[: -len(end)] for info in objects.list("") if info.key.endswith(end))


def _objects(url: str) -> ObjectStore:
    return RetryingObjects(open_objects(url, options_of(url)), _PATIENCE)


def load(address: Address) -> "tuple[Decoded, int, Manifest | None]":
    """Read the checkpoint or file that `addressed` has found; by default a run's newest sound one.

    Returns:
        It, decoded and verified by its digests; the bytes of its own container; its manifest, None of a single file.

    Raises:
        ShrinkpointError: as `shrinkpoint.load`.
    """
    from shrinkpoint.coding.selective import Source, decode_chain
    from shrinkpoint.config import SaverConfig
    from shrinkpoint.io.loading import Chain, read_chain

    def read(chain: Chain) -> "tuple[Header, tuple[Decoded, Chain]]":
        decoded = decode_chain(chain, threads=SaverConfig().encoder_threads)
        return decoded.header, (decoded, chain)

    _, (decoded, chain), manifest = read_chain(name_of(address), options_of(address.url), read)
    if manifest is not None:
        return decoded, manifest.chain[-1].total, manifest
    file = chain[-1]()
    assert isinstance(file, Source)
    return decoded, file.size, None


def find_damage(store: RunStore, manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """Say what a listing shows to be missing or cut of a checkpoint's chain; None does not verify the bytes."""
    try:
        for ref in store.refs(manifest):
            if (size := sizes.get(ref.key)) is None:
                return f"{ref.key} is missing"
            if size != ref.size:
                return f"{ref.key} has {size} bytes instead of {ref.size}"
    except (ChainError, FormatError) as error:
        return str(error)
    return None


def describe_exact(noted: object, size: int) -> list[dict[str, Any]]:
    """Return the tensors that a lossy scheme has stored exactly, with the reasons' messages."""
    parts = [part for part in noted if isinstance(part, dict)] if isinstance(noted, list) else []
    return [
        {**part, "share": part["bytes"] / size if size else 0.0, "reason": explained(part["code"])}
        for part in parts
        if isinstance(part.get("code"), str) and isinstance(part.get("bytes"), int)
    ]


_OWN = ("seq", "step", "kind", "epoch", "session", "wall_time", "library", "state_digest")
_NOTED = (
    "degradation", "degradation_low", "degradation_high", "degradation_noise", "cost", "cost_high", "cost_delay", "measured",
    "allowed", "update_error", "update_length", "overhead", "blocked_s", "search_s", "encode_s", "not_finite", "baseline", "scheme",
    "configuration", "reason", "adopt_s", "waited_s", "raw_bytes",
)  # fmt: skip


def describe_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest says of its checkpoint, as JSON. A missing number or text is null."""
    save, adopted = _dict(manifest.meta.get("save")), adopted_of(manifest)
    raw, size = save.get("raw_bytes"), manifest.chain[-1].total
    return {
        **{name: getattr(manifest, name) for name in _OWN},
        "chain_length": len(manifest.chain),
        "parts": manifest.chain[-1].parts,
        "bytes": size,
        "chain_bytes": manifest.stored_bytes,
        "ratio": raw / size if isinstance(raw, int) and size else None,
        **{name: save.get(name) for name in _NOTED},
        **{name: _dict(save.get(name)) for name in ("resumed", "resumed_high", "metrics")},
        "exact": describe_exact(save.get("exact"), size),
        "adopted": None if adopted is None else adopted.planned,
        "lineage": lineage_of(manifest.meta),
        "weights_only": is_weights_only(manifest.meta),
        "key": manifest.chain[-1].key,
    }


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
