"""Servers that several campaigns share."""

import os
from collections.abc import Iterator

import pytest
from support.ceph import CephGateway, missing_programs
from support.s3 import S3Server, moto_server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def real_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Ceph's S3 gateway; where it is not installed tests skip, or fail if SHRINKPOINT_REQUIRE_REAL_S3=1."""
    if missing := missing_programs():
        reason = f"not on PATH: {', '.join(missing)} (Debian: radosgw ceph-mon ceph-osd ceph-common)"
        if os.environ.get("SHRINKPOINT_REQUIRE_REAL_S3") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with CephGateway(tmp_path_factory.mktemp("ceph") / "cluster") as server:
        yield server
