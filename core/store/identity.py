"""What a prefix holds: a run, which its ``format.json`` says and names, or something else."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shrinkpoint.errors import (
    FormatError,
    NoCheckpointError,
    RunMismatchError,
    UnsupportedFormatError,
)
from shrinkpoint.store.catalog import read_checked
from shrinkpoint.store.keys import FORMAT_KEY, is_own_key, new_nonce
from shrinkpoint.store.manifest import FORMAT, READER_FEATURES, seal, unseal
from shrinkpoint.store.objects import MissingKeyError, ObjectStore
from shrinkpoint.store.urls import COMMAS

__all__ = ["create_record", "is_begun_here", "read_record", "run_id_of", "what_is_there"]

_MAGIC = "shrinkpoint-run"
_RUN_ID = re.compile("[0-9a-f]{32}")
_LOOK_AT = 1000
_NAMED = 5
_begun_here: set[str] = set()


def read_record(objects: ObjectStore) -> dict[str, Any] | None:
    """The run's ``format.json``; None where there is no run.

    Raises:
        RunMismatchError: It is damaged or foreign.
        UnsupportedFormatError: The run needs a newer shrinkpoint.
        StoreError: The store could not be read.
    """
    try:
        record = read_checked(objects, FORMAT_KEY, unseal)
    except MissingKeyError:
        return None
    except FormatError as error:
        raise RunMismatchError(
            f"{error}. If there are checkpoints in the same folder, delete this file: they do not depend on it and it is made anew;"
            " otherwise choose another URL"
        ) from error
    if record.get("type") != _MAGIC:
        raise RunMismatchError(f"{objects.show(FORMAT_KEY)} is not a run's: choose another URL")
    version, features = record.get("format"), record.get("reader_features")
    known = isinstance(features, list) and all(feature in READER_FEATURES for feature in features)
    if version != FORMAT or not known:
        raise UnsupportedFormatError(
            f"{objects.display} has format {version} with features {features}; this version reads {FORMAT}: upgrade shrinkpoint"
        )
    return record


def run_id_of(objects: ObjectStore) -> str:
    """The run's nonce; raises as `shrinkpoint.store.run.RunStore.run_id`."""
    record = read_record(objects)
    if record is None:
        raise NoCheckpointError(f"there is no run at {objects.display}")
    run = record.get("run")
    if not isinstance(run, str) or _RUN_ID.fullmatch(run) is None:
        raise RunMismatchError(f"{objects.show(FORMAT_KEY)} does not name its run: {run!r:.80}")
    return run


def create_record(objects: ObjectStore) -> dict[str, Any]:
    """Make a run of an empty prefix; returns its ``format.json``.

    Raises:
        RunMismatchError: The prefix holds something else.
        StoreError: The store could not be written to.
    """
    foreign = [info.key for info in objects.list("", limit=_LOOK_AT) if not is_own_key(info.key)]
    if foreign:
        raise RunMismatchError(
            f"{objects.display} holds something else ({foreign[0]!r} for one): choose an empty folder or prefix for the run"
        )
    run = new_nonce() + new_nonce()
    record = {"type": _MAGIC, "run": run, "format": FORMAT, "reader_features": []}
    # Who loses this race uses the winner's.
    objects.put_if_absent(FORMAT_KEY, seal(record))
    _begun_here.add(run)
    return read_record(objects) or record


def is_begun_here(record: Mapping[str, Any]) -> bool:
    """Whether this process has begun the run, so that it is no surprise that it holds nothing yet."""
    return str(record.get("run")) in _begun_here


def what_is_there(objects: ObjectStore, *, is_one: bool) -> str:
    """As `shrinkpoint.store.run.RunStore.what_is_there`.

    Args:
        objects: of the prefix.
        is_one: whether they are in one store, whose URL may have been meant as several.
    """
    keys = [info.key for info in objects.list("", limit=_LOOK_AT)]
    if not keys:
        one_name = "," in objects.display and is_one
        return "it is empty or does not exist. Check the URL" + (f". {COMMAS}" if one_name else "")
    runs = sorted({key[: -len("/format.json")] for key in keys if key.endswith("/format.json")})
    if runs:
        return f"below it are the runs {_some(runs)}. Add one of these to the URL"
    return f"it holds {_some(keys)}. Check the URL"


def _some(names: Sequence[str]) -> str:
    more = f" and {'at least ' if len(names) == _LOOK_AT else ''}{len(names) - _NAMED} more"
    return ", ".join(names[:_NAMED]) + (more if len(names) > _NAMED else "")
