"""Stores that a campaign takes away, blanks, puts back to an earlier day, and lets rot: folders, and buckets behind a proxy."""

import os
import random
import shutil
from pathlib import Path
from typing import Any, Protocol

from support.fault_proxy import FaultProxy
from support.faults import ResetBefore, Rule
from support.s3 import S3Server, new_bucket, storage_options

__all__ = ["BucketPlace", "FolderPlace", "Place"]


class Place(Protocol):
    """One store of a run under test."""

    @property
    def opened(self) -> dict[str, Any] | None:
        """URL and options for a writer's process; None for the folder of its number."""

    def lose(self) -> None:
        """From now on it is not there."""

    def blank(self) -> None:
        """It answers, and holds nothing."""

    def remember(self) -> None:
        """What it holds now is the earlier day."""

    def put_back(self) -> None:
        """It is as it was on the earlier day."""

    def rot(self, rng: random.Random) -> None:
        """Bytes of every container are changed."""

    def vanish(self) -> None:
        """It goes away, with what it holds."""

    def come_back(self) -> None:
        """It is there again as it went."""

    def replace(self) -> None:
        """Where it was lost, an empty one is in its place."""


class FolderPlace:
    """A folder."""

    opened = None

    def __init__(self, root: Path, number: int) -> None:
        self._folder = root / f"s{number}"
        self._gone, self._old = root / f"gone{number}", root / f"old{number}"

    def lose(self) -> None:
        shutil.rmtree(self._folder)

    def blank(self) -> None:
        self.lose()
        self._folder.mkdir()

    def remember(self) -> None:
        shutil.copytree(self._folder, self._old)

    def put_back(self) -> None:
        self.lose()
        os.rename(self._old, self._folder)

    def rot(self, rng: random.Random) -> None:
        for path in (self._folder / "data").glob("*"):
            with path.open("r+b") as file:
                file.seek(rng.randrange(max(1, path.stat().st_size)))
                file.write(b"\xa5\x5a")

    def vanish(self) -> None:
        os.rename(self._folder, self._gone)

    def come_back(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._gone.exists():
            os.rename(self._gone, self._folder)

    def replace(self) -> None:
        """What writes there makes it."""


class BucketPlace:
    """A bucket that is reached through a proxy, which refuses everything while the store is lost."""

    def __init__(self, server: S3Server, proxy: FaultProxy, noise: Rule) -> None:
        import boto3  # type: ignore[import-untyped]

        self._bucket, self._proxy, self._noise = new_bucket(server), proxy, noise
        self._lost = False
        self._old: dict[str, bytes] = {}
        self.opened = {"url": f"s3://{self._bucket}/run", "options": storage_options(server, proxy.url)}
        self._client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            region_name="us-east-1",
        )
        proxy.add(noise)

    def _keys(self) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def _read(self, key: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        return data

    def vanish(self) -> None:
        self._proxy.clear()
        self._proxy.add(Rule("", ResetBefore(), times=None))

    def come_back(self) -> None:
        self._proxy.clear()
        self._proxy.add(self._noise)

    def lose(self) -> None:
        self._lost = True
        self.vanish()

    def blank(self) -> None:
        for key in self._keys():
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def remember(self) -> None:
        self._old = {key: self._read(key) for key in self._keys()}

    def put_back(self) -> None:
        self.blank()
        for key, data in self._old.items():
            self._client.put_object(Bucket=self._bucket, Key=key, Body=data)

    def rot(self, rng: random.Random) -> None:
        for key in self._keys():
            if "/data/" in key:
                data = bytearray(self._read(key))
                data[rng.randrange(len(data))] ^= 0x5A
                self._client.put_object(Bucket=self._bucket, Key=key, Body=bytes(data))

    def replace(self) -> None:
        if self._lost:
            self._lost = False
            self.blank()
            self.come_back()

    def close(self) -> None:
        """Delete everything: the servers keep it in memory."""
        self._proxy.clear()
        self.blank()
        self._client.close()
