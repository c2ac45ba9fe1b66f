"""Writers on several folders, to be killed: a server that imports once, and forks a writer at each request.

Lines of JSON on stdin: a `WriterConfig` starts a writer and answers with its process id; ``{"reap": pid}`` waits for one and
answers with its status.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.newest import newest_sound

from shrinkpoint.errors import ChainError, FencedError, StoreError
from shrinkpoint.store.connect import open_location
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.striped import members
from shrinkpoint.store.striped.calls import Patience
from shrinkpoint.store.striped.group import Group
from shrinkpoint.store.striped.objects import StripedObjects
from shrinkpoint.store.urls import parse_url

__all__ = ["CONTROLS", "Control", "WriterConfig", "content", "open_objects", "open_run", "retired", "taken"]

PATIENCE = Patience(late_floor_s=1.0, alone_s=3.0, limit_s=10.0)
# Servers and their clients on one busy machine: what is slow there is not lost.
_REMOTE_CALLS = Patience(late_floor_s=10.0, alone_s=40.0, limit_s=60.0)
_KEPT, _KEPT_REMOTE = 8, 4
"""How many checkpoints a collection keeps; fewer on servers, where each is read many times over."""
_REMOTE_PATIENCE = RetryPolicy(attempts=3, first_delay_s=0.05, max_delay_s=0.5, deadline_s=8.0)


@dataclass(frozen=True, kw_only=True)
class WriterConfig:
    root: str
    stores: int = 3
    parity: int = 1
    how: str = "ours"
    resume: bool = False
    vanish: list[int] | None = None
    """Stores that are taken away after a few saves."""
    places: list[dict[str, Any] | None] | None = None
    """URL and options of stores that are no folders."""
    journal: str = "acks"
    steps: int = 10**6
    pause_s: float = 0.0
    collects: bool = True
    """Without any grace, which is for a single process."""


class _One(members.Quorum):
    """A record counts as committed with one copy, and is looked for in as many stores as otherwise."""

    @property
    def write(self) -> int:
        return 1

    @property
    def read(self) -> int:
        return members.Quorum(self.stores, self.parity).read


class _OneGroup(Group):
    @property
    def quorum(self) -> members.Quorum:
        return _One(len(self.stores), self.parity)


class _OneCopy(StripedObjects):
    """Acknowledged with a manifest in the first store; the others get it while later ones are saved."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.group.__class__ = _OneGroup
        self._owed: list[tuple[str, bytes]] = []

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if not key.startswith("commits/"):
            return super().put_if_absent(key, data)
        self.group.found()
        first, *others = self.group.stores
        while len(self._owed) > 1:
            owed = self._owed.pop(0)
            for store in others:
                store.put_if_absent(*owed)
        created = first.put_if_absent(key, data)
        if created:
            self._owed.append((key, data))
        return created


class _OnlyFirst(StripedObjects):
    """Manifests in the first store alone."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if key.startswith("commits/"):
            self.group.found()
            return self.group.stores[0].put_if_absent(key, data)
        return super().put_if_absent(key, data)


@dataclass(frozen=True)
class Control:
    """A way of doing it that loses checkpoints; or ours."""

    parity: int | None = None
    kind: type[StripedObjects] = StripedObjects


CONTROLS = {
    "ours": Control(),
    "no parity": Control(parity=0),
    "manifests on store 1 only": Control(kind=_OnlyFirst),
    "committed at one copy": Control(kind=_OneCopy),
}


def content(step: int) -> bytes:
    """What the container of a step holds: some are mirrored, most are cut."""
    size = 20_000 if step % 4 == 0 else 300_000 + step
    return np.random.default_rng(step).integers(0, 256, size, np.uint8).tobytes()


def open_objects(
    root: str,
    stores: int,
    parity: int,
    how: str = "ours",
    places: Sequence[Mapping[str, Any] | None] | None = None,
) -> StripedObjects:
    control = CONTROLS[how]
    parity = parity if control.parity is None else control.parity
    each: list[ObjectStore] = []
    for number, place in enumerate(places or [None] * stores):
        if place is None:
            each.append(LocalObjects(f"{root}/s{number}"))
        else:
            each.append(
                RetryingObjects(open_location(parse_url(place["url"]), place["options"]), _REMOTE_PATIENCE)
            )
    return control.kind(each, parity=parity, patience=_REMOTE_CALLS if places and any(places) else PATIENCE)


def open_run(objects: StripedObjects) -> RunStore:
    remote = any(isinstance(store, RetryingObjects) for store in objects.group.stores)
    retry = RetryPolicy(attempts=6 if remote else 2, first_delay_s=0.01, max_delay_s=2.0)
    return RunStore("ignored", objects=objects, retry=retry)


def _take(manifest: Manifest, blobs: list[bytes]) -> list[bytes]:
    return blobs


def _write(config: WriterConfig) -> None:
    warnings.simplefilter("ignore")
    run = open_run(
        open_objects(config.root, config.stores, config.parity, config.how, config.places),
    )
    kept = _KEPT_REMOTE if any(config.places or ()) else _KEPT
    every = kept + 2  # saves between collections
    found = newest_sound(run, _take) if config.resume else None
    parent = found[0] if found else None
    writer = run.writer()
    with open(f"{config.root}/{config.journal}", "a", buffering=1) as journal:
        journal.write(f"# epoch {writer.epoch}\n")
        first = parent.step if parent else 0
        for step in range(first + 1, first + 1 + config.steps):
            if step % 5 == 0:
                parent = None
            kind = "delta" if parent else "base"
            try:
                if step > first + 1 and step % every == 1 and config.collects and config.how == "ours":
                    _retire(kept, run, writer.collect, journal.write)
                parent = writer.commit(
                    content(step),
                    step=step,
                    kind=kind,
                    parent=parent,
                    state_digest="",
                    meta={"who": config.journal},
                )
            except FencedError:
                journal.write("# fenced\n")
                return
            except (
                StoreError,
                ChainError,
            ) as error:  # the chain is not to be relied on: the next one is a base
                journal.write(f"# failed {type(error).__name__}: {error}\n".replace("\n", " ") + "\n")
                parent = None
                continue
            journal.write(f"{step} {parent.seq} {parent.digest}\n")
            if config.vanish and step == first + 3:
                for store in config.vanish:
                    os.rename(f"{config.root}/s{store}", f"{config.root}/gone{store}")
                journal.write(f"# stores {config.vanish} vanished\n")
            time.sleep(config.pause_s)


def _retire(count: int, run: RunStore, collect: Callable[..., object], note: Callable[[str], object]) -> None:
    kept = sorted(m.step for m in run.manifests())[-count:]
    if kept:
        note(f"# retired below {kept[0]}\n")
        try:
            collect([m.seq for m in run.manifests() if m.step >= kept[0]], grace_s=0)
        except FencedError:
            raise
        except StoreError as error:
            note(f"# not collected: {error}\n")


def taken(root: str, journal: str = "acks") -> list[tuple[int, int, str]]:
    """Step, number and digest of every acknowledged checkpoint."""
    path = Path(root, journal)
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    acks = [line.split() for line in lines if line and not line.startswith("#")]
    return [(int(step), int(seq), digest) for step, seq, digest in acks]


def retired(root: str) -> int:
    """Below which step checkpoints may be gone."""
    path = Path(root, "acks")
    lines = path.read_text().split("\n") if path.exists() else []
    return max(
        (int(line.rpartition(" ")[2]) for line in lines if line.startswith("# retired below ")), default=0
    )


def _serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            print(os.waitpid(request["reap"], 0)[1], flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _write(WriterConfig(**request))
                status = 0
            finally:
                if status:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                    sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)


def request_of(config: WriterConfig) -> str:
    return json.dumps(asdict(config))


if __name__ == "__main__":
    _serve()
