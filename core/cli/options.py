"""Arguments and options that several commands share."""

import json
import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ConfigError
from shrinkpoint.store.urls import split_urls

__all__ = [
    "AsJson",
    "Pairs",
    "Seq",
    "Step",
    "StorageOptions",
    "Target",
    "Url",
    "Yes",
    "addressed",
    "parse_storage_options",
]

_VARIABLE = "SHRINKPOINT_STORAGE_OPTIONS"

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The run: a folder, s3://bucket/prefix, any fsspec URL.")
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="A run, one checkpoint of it (URL#step=N, URL#best), or a container file."
    ),
]
StorageOptions = Annotated[
    str | None,
    typer.Option(
        "--storage-options",
        metavar="JSON",
        envvar=_VARIABLE,
        show_envvar=True,
        help="Options for the URL's file system, as a JSON object; of several stores for all but folders, or a JSON list.",
    ),
]
Pairs = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="One such option, repeatable; dots nest: -o client_kwargs.region_name=eu-west-1.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of a table.")]
Step = Annotated[
    int | None, typer.Option("--step", min=0, help="The checkpoint of this step; default: the newest.")
]
Seq = Annotated[int | None, typer.Option("--seq", min=0, help="The checkpoint with this commit number.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without this, only print what would be done.")]


def addressed(url: str, step: int | None, seq: int | None) -> Address:
    """The run, and which of its checkpoints ``URL#step=N`` or the options name.

    Raises:
        ConfigError: several of these name one.
    """
    address = Address.parse(url)
    if address is not None and (step is not None or seq is not None):
        raise ConfigError(f"{url} names a checkpoint already: leave --step and --seq out")
    if step is not None and seq is not None:
        raise ConfigError(f"--step {step} and --seq {seq} exclude each other: give one of them")
    return address or Address(url=url, step=step, seq=seq)


def parse_storage_options(
    url: str, text: str | None, pairs: Sequence[str] | None
) -> dict[str, Any] | list[dict[str, Any] | None]:
    """The options of ``--storage-options`` and ``-o`` for `url`; the latter take precedence.

    Options from the environment apply to remote stores only; a local folder has none.

    Raises:
        ConfigError: not a JSON object, or not KEY=VALUE.
    """
    if text and text == os.environ.get(_VARIABLE) and "://" not in url:
        text = None
    try:
        options = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(
            f'--storage-options is not JSON ({error}): write it as \'{{"key": "value"}}\''
        ) from None
    if isinstance(options, list) and len(split_urls(url)) > 1:
        if not all(one is None or isinstance(one, dict) for one in options):
            raise ConfigError("--storage-options must be a list of JSON objects, or null for a folder")
        if pairs:
            raise ConfigError(
                "-o is for all stores alike: put it into the objects of the list that --storage-options is"
            )
        return options
    if not isinstance(options, dict):
        raise ConfigError(
            "--storage-options must be a JSON object, as in '{\"anon\": true}', or a list of them for several stores"
        )
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"-o {pair!r} must be KEY=VALUE, as in -o endpoint_url=http://localhost:9000")
        _set(options, key.split("."), _value(value))
    return options


def _set(options: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = options.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"-o {'.'.join(keys)}: {key} has a value of its own already")
        options = inner
    options[keys[-1]] = value


def _value(text: str) -> Any:
    """Everything but true, false and null is text: an access key may look like a number."""
    return {"true": True, "false": False, "null": None}.get(text, text)
