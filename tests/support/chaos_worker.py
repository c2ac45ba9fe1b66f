"""A process that saves until it is killed: resume from the newest sound checkpoint, commit, acknowledge, repeat.

:func:`command` starts one. Containers are small random bytes; the digest of a state is the sha256 over its parent's
digest and its own container, so a reader can tell whether it was given the right bytes of the whole chain. Every event
goes to the journal, one synced JSON line each; "ack" is written after ``commit`` returned and not before. Imports no
torch: a start takes a fraction of a second.
"""

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.injected_calls import inject
from support.journal import Journal
from support.newest import newest_sound

from shrinkpoint.errors import CorruptionError, FencedError, ShrinkpointError
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.s3 import S3Objects
from shrinkpoint.store.writer import RunWriter

__all__ = [
    "FAILED",
    "FENCED",
    "WorkerConfig",
    "chain_digest",
    "command",
    "verified_digest",
    "work",
]

FENCED = 3  # exit status: another writer took over
FAILED = 4  # exit status: the store could not be opened or read


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What one worker does.

    ``saves`` None means without end. ``believe_conditions`` skips the probe and takes it that the store honours
    put-if-absent, whether it does or not: for negative controls. ``inject`` is what `support.injected_calls` is to do, and the
    calls that were made are told at the end.
    """

    url: str | list[str]
    journal: str
    storage_options: dict[str, Any] | list[dict[str, Any] | None] | None = None
    believe_conditions: bool = False
    seed: int = 0
    saves: int | None = None
    pause: float = 0.0
    container_bytes: int = 20_000
    chain_limit: int = 5
    retire_every: int | None = None
    keep: int = 10
    grace_s: float = 60.0
    inject: dict[str, Any] | None = None


def command(config: WorkerConfig) -> list[str]:
    """The command line of a worker."""
    tests = Path(__file__).parents[1]  # holds `support`
    return ["env", f"PYTHONPATH={tests}", sys.executable, __file__, json.dumps(asdict(config))]


def chain_digest(containers: Sequence[bytes]) -> str:
    """The digest of the state that a chain of containers, base first, stands for."""
    digest = ""
    for container in containers:
        digest = hashlib.sha256(digest.encode() + container).hexdigest()
    return digest


def verified_digest(manifest: Manifest, containers: Sequence[bytes]) -> str:
    """The digest of a chain; raises CorruptionError where it is not what the manifest says."""
    digest = chain_digest(containers)
    if digest != manifest.state_digest:
        raise CorruptionError(
            f"commit {manifest.seq}: the chain gives {digest}, its manifest says {manifest.state_digest}"
        )
    return digest


class _Worker:
    def __init__(
        self, config: WorkerConfig, store: RunStore, writer: RunWriter, parent: Manifest | None
    ) -> None:
        self.config = config
        self.journal = Journal(config.journal)
        self.store = store
        self.writer = writer
        self.rng = random.Random(config.seed)
        self.parent = parent
        self.step = parent.step if parent else 0
        self.chain = self.rng.randrange(config.chain_limit)  # a resumed chain is not always continued

    def save(self) -> None:
        self.step += 1
        is_delta = self.parent is not None and self.chain < self.config.chain_limit
        parent = self.parent if is_delta else None
        container = self.rng.randbytes(self.rng.randrange(1, self.config.container_bytes))
        digest = hashlib.sha256((parent.state_digest if parent else "").encode() + container).hexdigest()
        self.chain = self.chain + 1 if is_delta else 0
        self.parent = None  # until this save is known to have worked, the next one must be a base
        manifest = self.writer.commit(
            container,
            step=self.step,
            kind="delta" if is_delta else "base",
            parent=parent,
            state_digest=digest,
            meta={"seed": self.config.seed},
        )
        self.journal.write(
            "ack",
            seq=manifest.seq,
            epoch=self.writer.epoch,
            step=self.step,
            digest=digest,
            mode=self.writer.mode,
        )
        self.parent = manifest

    def retire(self, keep: int) -> None:
        seen = self.store.manifests()
        seqs = [manifest.seq for manifest in seen]
        self.journal.write("retire", seqs=seqs[keep:])  # before it happens: what may be gone afterwards
        self.writer.collect(seqs[:keep], seen=seen, grace_s=self.config.grace_s)
        self.journal.write("retired", seqs=seqs[keep:])

    def run(self) -> None:
        done = 0
        while self.config.saves is None or done < self.config.saves:
            try:
                self.save()
                if self.config.retire_every and (done + 1) % self.config.retire_every == 0:
                    self.retire(self.config.keep)
            except FencedError:
                raise
            except ShrinkpointError as error:
                self.journal.write("error", error=f"{type(error).__name__}: {error}")
            done += 1
            time.sleep(self.config.pause)


def work(config: WorkerConfig) -> int:
    """Run one worker to its end; returns the exit status."""
    journal = Journal(config.journal)
    journal.write("start", pid=os.getpid())
    injected, end_injection = inject(**config.inject) if config.inject is not None else (None, lambda: None)
    try:
        store = RunStore(config.url, storage_options=config.storage_options)
        found = newest_sound(store, verified_digest)
        parent = found[0] if found else None
        journal.write("resumed", seq=parent.seq if parent else None)
        if config.believe_conditions:
            patch.object(S3Objects, "create_is_atomic", True).start()
        writer = store.writer()
        journal.write("opened", epoch=writer.epoch, mode=writer.mode)
        _Worker(config, store, writer, parent).run()
        writer.close()
    except FencedError as error:
        journal.write("fenced", error=str(error))
        return FENCED
    except ShrinkpointError as error:
        journal.write("failed", error=f"{type(error).__name__}: {error}")
        return FAILED
    finally:
        end_injection()
    if injected is not None:
        journal.write("calls", calls=injected.calls)
    journal.write("end")
    return 0


if __name__ == "__main__":
    sys.exit(work(WorkerConfig(**json.loads(sys.argv[1]))))
