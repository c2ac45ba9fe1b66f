"""Ranks of sharded trainings are killed, on a folder, on several, and on an S3 server behind a faulty proxy: no acknowledged save is lost or mixed, and
nobody hangs.

``--kills 250`` asks for more than the default.
"""

from functools import partial
from pathlib import Path

import pytest
from support.chaos import draw_fault
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.s3 import S3Server, new_bucket, storage_options
from support.sharded_kills import kill_ranks

from shrinkpoint.errors import ShrinkpointError

FAULTED = 0.1
KILLS, KILLS_SEVERAL, KILLS_REAL, KILLS_CONTROL = 8, 4, 3, 12

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # each start of the ranks has a limit


def test_killed_on_a_folder(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    account = kill_ranks(tmp_path, str(tmp_path / "run"), pytestconfig.getoption("--kills") or KILLS, seed=22)
    print(account)
    assert account.stored > 0


def test_killed_on_several_folders(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    urls = ",".join(str(tmp_path / f"run-{number}") for number in range(3))
    account = kill_ranks(tmp_path, urls, pytestconfig.getoption("--kills") or KILLS_SEVERAL, seed=25)
    print(account)
    assert account.stored > 0


@pytest.mark.real_s3
def test_killed_on_a_real_server_through_faults(
    real_s3: S3Server, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    url = f"s3://{new_bucket(real_s3)}/run"
    with FaultProxy((real_s3.host, real_s3.port), seed=22) as proxy:
        proxy.add(Rule("", partial(draw_fault, corrupt_uploads=True), times=None, probability=FAULTED))
        account = kill_ranks(
            tmp_path,
            url,
            pytestconfig.getoption("--kills") or KILLS_REAL,
            seed=23,
            lifetime=(2.0, 15.0),
            faulted=storage_options(real_s3, proxy.url),
            direct=storage_options(real_s3),
        )
        print(f"{len(proxy.log)} requests; {account}")
    assert account.stored > 0


def test_parts_that_are_stored_too_late_are_noticed(tmp_path: Path) -> None:
    """The control: the same campaign, with ranks that report a part as stored before it is."""
    with pytest.raises((AssertionError, ShrinkpointError)) as caught:
        kill_ranks(tmp_path, str(tmp_path / "run"), KILLS_CONTROL, seed=24, lazily=True)
    assert " hang" not in str(caught.value)  # "changed" may be
