"""A run's URL: parsed and checked once, before anything is opened."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, cast

from fsspec.registry import known_implementations, registry

from shrinkpoint.errors import ConfigError, MissingDependencyError
from shrinkpoint.warn import brief, refuses_unknown_options


@refuses_unknown_options
@dataclass(frozen=True)
class Stores:
    """Where a run lives, with options of its stores.

    Raises:
        ConfigError: a field has a value that cannot work.

    Examples:
        >>> stores = shrinkpoint.Stores(["/mnt/a/run", "/mnt/b/run", "/mnt/c/run"], parity=1)
        >>> copied = shrinkpoint.Stores("s3://bucket/run-7", near="/local/nvme/run-7")
    """

    urls: "Sequence[str | os.PathLike[str]] | str | os.PathLike[str]"  # in this order: jsonargparse makes text of a list for a path
    """The folder or URL of the run, or a list of several that hold it together."""
    parity: int | None = None
    """How many of several stores may be lost for good: 0, 1 or 2. None takes what the run began with, or 1. It cannot change after the first save."""
    near: str | os.PathLike[str] | None = None
    """A folder on this node, such as ``/local/nvme/run-7``, for copies of the newest checkpoints. Set it where restarts read slowly
    from `urls`. A copy is made after the checkpoint is stored at `urls`, and read where its digest is right; no save fails of it."""
    near_keep: int = 2
    """How many checkpoints `near` holds at most, with the chains that they need."""

    def __post_init__(self) -> None:
        given = self.urls if isinstance(self.urls, list | tuple) else [self.urls]
        if isinstance(self.urls, Stores) or not all(isinstance(one, str | os.PathLike) for one in given):
            raise ConfigError(
                f"Stores(urls=...) must be a folder or a URL, or a list of several, not {brief(self.urls)}"
            )
        parity, several = self.parity, len(split_urls(self.urls)) > 1
        if not (parity is None or (type(parity) is int and 0 <= parity <= 2)):
            raise ConfigError(
                f"parity={parity!r} must be how many of several stores may be lost: 0, 1 or 2, or None"
            )
        if parity and not several:
            raise ConfigError(
                f"parity={parity} with one URL: give as many URLs as there are stores, 2 or more"
            )
        if not (self.near is None or (isinstance(self.near, str | os.PathLike) and str(self.near))):
            raise ConfigError(f"near must be a folder on this node, or None, not {self.near!r}")
        if type(self.near_keep) is not int or self.near_keep < 1:
            raise ConfigError(f"near_keep must be a positive integer, not {self.near_keep!r}")

    @staticmethod
    def of(url: "RunUrl | Mapping[str, Any]") -> "Stores":
        """Give the same, without options where there are none; of a mapping of the fields, as it stands in YAML, the object."""
        if isinstance(url, Mapping):
            if "urls" not in url:
                raise ConfigError(
                    f"url={dict(url)!r} lacks urls: the folder or URL of the run, or a list of several"
                )
            return Stores(**url)
        return url if isinstance(url, Stores) else Stores(url)


RunUrl: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Stores
"""Where a run lives: one URL, or several as a list, or as one string with commas between them; or `Stores` with options."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_MISTYPED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(:|//)(.*)", re.DOTALL)
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(://|:/|//)")
_CREDENTIAL = re.compile(r"(?i)sig|token|secret|passw|credential|key")
# A comma within a name stays one: only before a path from the root, or a protocol, does another URL begin.
_BETWEEN = re.compile(r",\s*(?=/|~|\.{1,2}/|[A-Za-z][A-Za-z0-9+.-]*://)")
COMMAS = "Behind a comma another store begins only with /, ./, ../, ~ or a protocol; else the comma is part of the name"
"""For messages: how several URLs in one string differ from a name with commas."""
_LOCAL = ("file", "local")
_S3 = ("s3", "s3a")
# Plain HTTP cannot list or write; the others would keep a cache between us and the store.
_REFUSED = {
    "http",
    "https",
    "simplecache",
    "filecache",
    "blockcache",
    "cached",
    "zip",
    "tar",
    "reference",
    "data",
}


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a run lives.

    Attributes:
        kind: ``"local"``, ``"s3"`` or ``"generic"`` (any other fsspec file system).
        protocol: The fsspec protocol, such as ``"s3"`` or ``"memory"``.
        path: The run's prefix as that file system takes it, without a trailing slash.
        display: The URL for messages; holds no credentials.
    """

    kind: str
    protocol: str
    path: str
    display: str

    def show(self, key: str) -> str:
        """Return the URL of one object, for messages."""
        return f"{self.display}/{key}" if key else self.display


def split_urls(url: RunUrl) -> list[str | os.PathLike[str]]:
    """Return the URLs of a run's stores; one for an ordinary run.

    Raises:
        ConfigError: There is none, or one of them cannot stand in a list as text.
    """
    if isinstance(url, Stores):
        return split_urls(url.urls)
    if isinstance(url, str):
        return list(_BETWEEN.split(url))
    if not isinstance(url, list | tuple):
        return [cast("os.PathLike[str]", url)]  # one, or what `parse_url` refuses
    if not url:
        raise ConfigError("url=[] names no store: give the run's folder or URL, or several")
    for one in url:
        if isinstance(one, str | os.PathLike) and _BETWEEN.search(str(os.fspath(one))) is not None:
            raise ConfigError(
                f"url={str(one)!r} in a list of stores has a comma before a path: choose another name"
            )
    return list(url)


def url_text(url: RunUrl) -> str:
    """Return the same as one string, which every command and ``ckpt_path`` take too, and which splits into the same stores again."""
    urls = [str(one) for one in split_urls(url)]
    if len(urls) == 1:
        return urls[0]
    first, *others = (one.rstrip("/") or one for one in urls)
    # A relative folder behind a comma would be part of the name before it.
    return ",".join([first, *(one if _BETWEEN.match(f",{one}") else f"./{one}" for one in others)])


def parse_url(url: str | os.PathLike[str]) -> Location:
    """Parse ``/folder``, ``file:///folder``, ``s3://bucket/prefix`` or the URL of another fsspec file system.

    Raises:
        ConfigError: The URL cannot name a run's prefix; the message says why.
        MissingDependencyError: The package for this protocol is not installed; the message holds the command.
    """
    text = os.fspath(url) if isinstance(url, str | bytes | os.PathLike) else url
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(
            f"url={text!r} is empty or not text: give a folder, or a URL such as s3://bucket/run-1"
        )
    _check_no_secrets(text)
    if "::" in text:
        raise ConfigError(
            f"url={text!r} chains file systems with '::'; a cache in between breaks commits, give the last one alone"
        )
    match = _SCHEME.fullmatch(text)
    protocol = match[1].lower() if match else "file"
    rest = match[2] if match else text
    if match is None:
        _check_not_mistyped(text)
    if protocol in _LOCAL:
        try:
            path = str(Path(rest).expanduser().absolute())
        except RuntimeError as error:
            raise ConfigError(f"url={text!r}: {error} Write the folder out") from None
        return Location(kind="local", protocol="file", path=path, display=path.rstrip("/"))
    return _remote(protocol, rest)


def _check_not_mistyped(text: str) -> None:
    """``s3:/bucket/run`` would be a folder here, and the run would be missed where it was to be."""
    match = _MISTYPED.fullmatch(text)
    if match and match[1].lower() in known_implementations:
        meant = f"{match[1]}://{match[3].lstrip('/')}"
        raise ConfigError(
            f"url={text!r} looks like {meant!r}: write that, or ./{text} for a folder of this name"
        )


def _check_no_secrets(text: str) -> None:
    """Refuse what would be shown in every message and log, without showing it here either."""
    for match in _PROTOCOL.finditer(text):
        protocol = match[1].lower()
        if protocol in _LOCAL or (match[2] != "://" and protocol not in known_implementations):
            continue
        address, _, query = text[match.end() :].partition("?")
        if _holds_password(address, protocol):
            raise ConfigError(
                f"the {protocol}:// URL holds a password, which would end up in logs: pass it in storage_options instead"
            )
        if any(_CREDENTIAL.search(part.partition("=")[0]) for part in query.split("&") if "=" in part):
            raise ConfigError(
                f"the {protocol}:// URL holds a signature or token behind its '?', which would end up in logs: leave it out,"
                " and pass credentials in storage_options instead"
            )


def _holds_password(address: str, protocol: str) -> bool:
    first, _, more = address.partition("/")
    user, at, _ = first.partition("@")
    if at:
        return ":" in user
    if "@" not in more:
        return False
    # A secret key may have slashes in it; ARNs and ports come with a colon, too.
    name, colon, secret = first.partition(":")
    is_port = secret.isdigit() and len(secret) <= 5 and protocol not in _S3
    return bool(colon) and name != "arn" and not is_port


def _remote(protocol: str, rest: str) -> Location:
    path = rest.strip("/")
    shown = f"{protocol}://{path}"
    if protocol in _REFUSED:
        raise ConfigError(
            f"url={shown!r}: {protocol} cannot hold a run; use a folder, s3://, gs:// or the like"
        )
    if not path:
        raise ConfigError(f"url={shown!r} names no folder: add one, as in {protocol}://bucket/run-1")
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ConfigError(f"url={shown!r} has an empty, '.' or '..' part: write the prefix out")
    if protocol in _S3 and any(character in path for character in "?#*[]"):
        raise ConfigError(
            f"url={shown!r} has one of ?#*[] in it, which s3fs does not take literally: choose another prefix"
        )
    _check_installed(protocol, shown)
    return Location(kind="s3" if protocol in _S3 else "generic", protocol=protocol, path=path, display=shown)


def _check_installed(protocol: str, shown: str) -> None:
    if protocol in _S3:
        if find_spec("s3fs") is None:
            raise MissingDependencyError(f'{shown} needs s3fs: pip install "shrinkpoint[s3]"')
        return
    if protocol in registry:
        return
    known = known_implementations.get(protocol)
    if known is None:
        raise ConfigError(
            f"url={shown!r}: unknown protocol {protocol!r}; use a folder, s3://, gs:// or another that fsspec knows"
        )
    package = str(known["class"]).partition(".")[0]
    if find_spec(package) is None:
        raise MissingDependencyError(f"{shown} needs {package}: {known.get('err', f'pip install {package}')}")
