"""Campaigns of kills: start workers, kill them, and account for every acknowledged save afterwards."""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support import chaos_worker
from support.chaos_worker import WorkerConfig, verified_digest
from support.faults import (
    CorruptDown,
    CorruptUp,
    DropResponse,
    Fault,
    Hang,
    Latency,
    ResetBefore,
    ResetUpload,
    Status,
    Truncate,
    Zombie,
)
from support.journal import read_journal
from support.newest import newest_sound

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.store.run import RunStore

__all__ = ["Account", "Campaign", "Worker", "audit", "draw_fault", "run_campaign"]


def draw_fault(rng: random.Random, *, corrupt_uploads: bool = True) -> Fault:
    """One fault out of everything that a network and a server do to a request."""
    draws: list[Callable[[], Fault]] = [
        lambda: Latency(rng.uniform(0.02, 0.3)),
        lambda: Status(503, "SlowDown"),
        lambda: Status(500, "InternalError"),
        ResetBefore,
        lambda: ResetUpload(rng.randrange(1, 20_000)),
        DropResponse,
        DropResponse,
        lambda: Hang(rng.uniform(0.2, 1.0)),
        lambda: Truncate(rng.randrange(1, 2_000)),
        lambda: CorruptDown(rng.randrange(300)),
        lambda: Zombie(rng.uniform(0.3, 4.0)),
    ]
    if corrupt_uploads:  # only for servers that check what they are sent
        draws.append(lambda: CorruptUp(rng.randrange(300)))
    return rng.choice(draws)()


class Worker:
    """One worker process, its journal and its standard error."""

    def __init__(self, config: WorkerConfig) -> None:
        self.journal = Path(config.journal)
        self._errors = self.journal.with_suffix(".stderr")
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                chaos_worker.command(config), stdin=subprocess.DEVNULL, stderr=errors
            )

    def kill(self) -> bool:
        """Kill -9; False where it had ended by itself."""
        alive = self.process.poll() is None
        self.process.kill()
        self.process.wait()
        self.check()
        return alive

    def check(self) -> int | None:
        """The exit status, or None while it runs; a traceback in the worker is a failure of the campaign."""
        status = self.process.poll()
        if status not in (None, 0, -9, chaos_worker.FENCED, chaos_worker.FAILED):
            raise AssertionError(f"a worker ended with {status}:\n{self._errors.read_text()[-4000:]}")
        return status


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """``kills`` kills, each ``lifetime`` seconds after the worker has begun, or has opened the run; some successors start before
    the kill.

    How long a process takes to import what it needs depends on the machine's load alone.
    """

    kills: int
    lifetime: tuple[float, float] = (2.0, 6.0)
    overlap: float = 0.5
    overlap_seconds: tuple[float, float] = (0.2, 1.5)
    limit_seconds: float = 240.0
    seed: int = 0


@dataclass(kw_only=True)
class Account:
    """What a campaign did and what is left of it."""

    starts: int = 0
    kills: int = 0
    overlaps: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    acked: int = 0
    verified: int = 0
    retired: int = 0
    collections: int = 0
    listed: int = 0
    errors: int = 0
    lost: list[str] = field(default_factory=list)
    stale_resumes: list[str] = field(default_factory=list)
    kinds_of_error: Counter[str] = field(default_factory=Counter)


def run_campaign(campaign: Campaign, configure: Callable[[int], WorkerConfig]) -> tuple[Account, list[Path]]:
    """Kill workers one after another; ``configure(n)`` is the n-th worker's configuration.

    Returns the account so far and the journals, for :func:`audit`.
    """
    rng = random.Random(campaign.seed)
    account = Account()
    workers: list[Worker] = []

    def start() -> Worker:
        workers.append(Worker(configure(len(workers))))
        account.starts += 1
        return workers[-1]

    deadline = time.monotonic() + campaign.limit_seconds
    try:
        current = start()
        while account.kills < campaign.kills:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"only {account.kills} of {campaign.kills} kills in {campaign.limit_seconds} s"
                )
            _reach(current, rng.choice(("start", "opened")), deadline)
            _wait(current, rng.uniform(*campaign.lifetime))
            previous, successor = current, None
            if previous.check() is None and rng.random() < campaign.overlap:
                account.overlaps += 1
                successor = start()
                time.sleep(rng.uniform(*campaign.overlap_seconds))
            account.kills += previous.kill()
            account.statuses[previous.process.returncode] += 1
            current = successor or start()
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
    return account, [worker.journal for worker in workers]


def _reach(worker: Worker, event: str, deadline: float) -> None:
    """Wait for an event in a worker's journal, or until the worker ends by itself."""
    line = f'"event": "{event}"'
    while worker.check() is None and time.monotonic() < deadline:
        if worker.journal.exists() and line in worker.journal.read_text(errors="replace"):
            return
        time.sleep(0.05)


def _wait(worker: Worker, seconds: float) -> None:
    """Wait, or until the worker ends by itself."""
    end = time.monotonic() + seconds
    while worker.check() is None and time.monotonic() < end:
        time.sleep(0.02)


def audit(store: RunStore, account: Account, journals: list[Path]) -> Account:
    """Look for every acknowledged save in ``store``; what retention was told to drop may be gone."""
    runs = [read_journal(journal) for journal in journals]
    events = [event for run in runs for event in run]
    acks = [event for event in events if event["event"] == "ack"]
    retired = {seq for event in events if event["event"] == "retire" for seq in event["seqs"]}
    try:
        # Of several stores, one number may hold what was acknowledged and what was not.
        manifests = {(manifest.seq, manifest.state_digest): manifest for manifest in store.manifests()}
    except ShrinkpointError as error:  # a manifest that two writers have torn, on a server that lets them
        account.lost.append(f"the run cannot be read: {type(error).__name__}: {error}")
        return account
    account.acked, account.retired, account.listed = len(acks), len(retired), len(manifests)
    account.collections = sum(event["event"] == "retired" for event in events)
    failures = [event["error"] for event in events if "error" in event]
    account.errors = len(failures)
    account.kinds_of_error = Counter(text[:90] for text in failures)
    for ack in acks:
        manifest = manifests.get((ack["seq"], ack["digest"]))
        if manifest is None:
            # One that is still listed must be sound all the same: manifests go before blobs.
            if ack["seq"] not in retired:
                taken = any(seq == ack["seq"] for seq, _ in manifests)
                account.lost.append(f"{ack['seq']}: {'replaced by another' if taken else 'not listed'}")
            continue
        try:
            verified_digest(manifest, store.fetch(manifest))
            account.verified += 1
        except ShrinkpointError as error:
            account.lost.append(f"{ack['seq']}: {type(error).__name__}: {error}")
    newest = max((ack["seq"] for ack in acks if ack["seq"] not in retired), default=None)
    found = newest_sound(store, verified_digest)
    if newest is not None and (found is None or found[0].seq < newest):
        account.lost.append(f"{newest} is acknowledged, recovery finds {found[0].seq if found else None}")
    account.stale_resumes = _stale_resumes(runs, acks)
    return account


def _stale_resumes(runs: list[list[dict[str, object]]], acks: list[dict[str, object]]) -> list[str]:
    """Workers that began from an older checkpoint than what was acknowledged before they started."""
    stale = []
    for events in runs:
        began = next((event["at"] for event in events if event["event"] == "start"), None)
        resumed = next((event for event in events if event["event"] == "resumed"), None)
        if began is None or resumed is None:
            continue
        before = max(
            (int(str(ack["seq"])) for ack in acks if float(str(ack["at"])) < float(str(began))), default=0
        )
        if int(str(resumed["seq"] or 0)) < before:
            stale.append(f"resumed from {resumed['seq']} though {before} was acknowledged")
    return stale
