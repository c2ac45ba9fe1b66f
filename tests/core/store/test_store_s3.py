"""S3: what failures mean, and what must not happen to anybody else's objects."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from support.newest import newest_sound
from support.s3 import S3Server, moto_server, new_bucket, storage_options

from shrinkpoint.errors import CorruptionError, StoreError
from shrinkpoint.store.connect import open_objects
from shrinkpoint.store.objects import CredentialsError, MissingKeyError, TransientStoreError
from shrinkpoint.store.retry import RetryPolicy
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.s3 import PART_BYTES, S3Objects, http_status, translate

KEY = "data/000000000001-0123456789abcdef-0123456789abcdef.shrink"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


@pytest.fixture
def bucket(server: S3Server) -> str:
    return new_bucket(server)


@pytest.fixture
def objects(server: S3Server, bucket: str) -> S3Objects:
    opened = open_objects(f"s3://{bucket}/run", storage_options(server))
    assert isinstance(opened, S3Objects)
    return opened


def response_error(status: int, code: str = "") -> ClientError:
    response = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")  # type: ignore[arg-type]


def wrapped(error: Exception) -> OSError:
    """As s3fs raises it, with an errno that says nothing."""
    outer = OSError(22, "Invalid argument")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("status", "code", "kind", "text"),
    [
        (404, "NoSuchKey", MissingKeyError, "NoSuchKey"),
        (404, "404", MissingKeyError, "HTTP 404"),
        (404, "NoSuchBucket", StoreError, "create the bucket"),
        (403, "AccessDenied", StoreError, "s3:PutObject"),
        (403, "InvalidAccessKeyId", CredentialsError, "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", CredentialsError, "AWS_SECRET_ACCESS_KEY"),
        (400, "ExpiredToken", CredentialsError, "renew"),
        (403, "RequestTimeTooSkewed", CredentialsError, "clock"),
        (403, "QuotaExceeded", StoreError, "full"),
        (507, "", StoreError, "full"),
        (301, "PermanentRedirect", StoreError, "region"),
        (416, "InvalidRange", CorruptionError, "shorter"),
        (409, "ConditionalRequestConflict", TransientStoreError, "409"),
        (429, "", TransientStoreError, "429"),
        (500, "InternalError", TransientStoreError, "500"),
        (503, "SlowDown", TransientStoreError, "503"),
        (400, "BadDigest", TransientStoreError, "BadDigest"),
        (400, "RequestTimeout", TransientStoreError, "RequestTimeout"),
        (400, "InvalidArgument", StoreError, "InvalidArgument"),
        (501, "NotImplemented", StoreError, "501"),
    ],
)
def test_status_decides(status: int, code: str, kind: type[Exception], text: str) -> None:
    for error in (response_error(status, code), wrapped(response_error(status, code))):
        translated = translate(error, "cannot write s3://b/k")
        assert type(translated) is kind
        assert str(translated).startswith("cannot write s3://b/k")
        assert text in str(translated)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (NoCredentialsError(), CredentialsError, "storage_options"),
        (EndpointConnectionError(endpoint_url="http://x"), TransientStoreError, "endpoint_url"),
        (ReadTimeoutError(endpoint_url="http://x"), TransientStoreError, "network"),
        (ConnectionResetError(), TransientStoreError, "network"),
        (asyncio.TimeoutError(), TransientStoreError, "network"),
        (ValueError("bad bucket name"), StoreError, "bad bucket name"),
    ],
)
def test_failures_without_a_response(error: Exception, kind: type[Exception], text: str) -> None:
    assert http_status(error) is None
    translated = translate(error, "cannot write s3://b/k")
    assert type(translated) is kind
    assert text in str(translated)


class Call:
    """Replaces what sends a store's requests, to lose responses or to invent them."""

    def __init__(self, objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answer: Callable[[str, dict[str, Any], Callable[[], Any]], Any] = lambda m, k, real: real()
        inner = objects._call

        def call(method: str, **options: Any) -> Any:
            self.requests.append((method, options))
            return self.answer(method, options, lambda: inner(method, **options))

        monkeypatch.setattr(objects, "_call", call)


@pytest.fixture
def call(objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(objects, monkeypatch)


def test_own_lost_response_is_recognized(objects: S3Objects, call: Call) -> None:
    """The first attempt commits, its response is lost, the second gets 412: that is a success, once."""
    store = RunStore("ignored", objects=objects, retry=RetryPolicy(first_delay_s=0))
    writer = store.writer()
    lost = []

    def lose(method: str, options: dict[str, Any], real: Callable[[], Any]) -> Any:
        answer = real()
        if "/commits/" in options.get("Key", "") and not lost:
            lost.append(options["Key"])
            raise wrapped(ReadTimeoutError(endpoint_url="http://x"))
        return answer

    call.answer = lose
    manifest = writer.commit(b"base", step=1, kind="base", parent=None, state_digest="", meta={})
    assert lost
    assert manifest.seq == 0
    assert store.manifests() == [manifest]


@pytest.mark.parametrize("wrap", [lambda error: error, wrapped, lambda error: FileExistsError()])
def test_409_is_repeated_and_412_is_an_answer(objects: S3Objects, call: Call, wrap: Any) -> None:
    def conflict(method: str, options: dict[str, Any], real: Callable[[], Any]) -> Any:
        error = response_error(409, "ConditionalRequestConflict")
        raise wrap(error) from error

    call.answer = conflict
    with pytest.raises(TransientStoreError, match="409"):
        objects.put_if_absent(KEY, b"x")

    def taken(method: str, options: dict[str, Any], real: Callable[[], Any]) -> Any:
        error = response_error(412, "PreconditionFailed")
        raise wrap(error) from error

    call.answer = taken
    assert not objects.put_if_absent(KEY, b"x")


@pytest.mark.parametrize("refuse", [True, False])
def test_server_without_the_condition(objects: S3Objects, call: Call, refuse: bool) -> None:
    """Ignored, or refused as not implemented: the writer says so and works alone."""

    def ignore(method: str, options: dict[str, Any], real: Callable[[], Any]) -> Any:
        if "IfNoneMatch" in options:
            if refuse:
                raise wrapped(response_error(501, "NotImplemented"))
            del options["IfNoneMatch"]
        return real()

    call.answer = ignore
    store = RunStore("ignored", objects=objects)
    with pytest.warns(UserWarning, match="does not honour put-if-absent"):
        writer = store.writer()
    assert writer.mode == "single-writer"
    manifest = writer.commit(b"base", step=1, kind="base", parent=None, state_digest="", meta={})
    assert newest_sound(store, lambda _, blobs: blobs) == (manifest, [b"base"])


def test_large_blobs_go_in_parts_and_manifests_never(objects: S3Objects, call: Call) -> None:
    data = bytes(2 * PART_BYTES) + b"tail"
    objects.put(KEY, data)
    assert [method for method, _ in call.requests] == ["head_object"]  # the parts went through pipe_file
    assert objects.get(KEY, len(data) - 4, len(data), max_size=4) == b"tail"
    call.requests.clear()
    assert objects.put_if_absent("commits/0000000000.json", data)
    assert [method for method, _ in call.requests] == ["put_object"]


def test_sweep_aborts_our_old_uploads_alone(objects: S3Objects, bucket: str) -> None:
    filesystem = objects._filesystem
    ours = f"run/{KEY}"
    for key in (ours, "run-2/data/x", f"other/{KEY}"):
        filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    assert objects.sweep(0.0) == 0  # nothing is that old; moto dates every upload to 2010
    assert objects.sweep(objects.server_time()) == 1
    left = filesystem.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", [])
    assert sorted(upload["Key"] for upload in left) == sorted(["run-2/data/x", f"other/{KEY}"])


def test_long_listings_are_paged(objects: S3Objects, call: Call) -> None:
    keys = [f"probe/{number:016x}" for number in range(7)]
    for key in keys:
        objects.put(key, b"")
    call.answer = lambda method, options, real: S3Objects._call(objects, method, **options, MaxKeys=3)
    assert [info.key for info in objects.list("probe/")] == keys
    assert len(objects.list("probe/", limit=4)) == 4


def test_refused_deletion_is_an_error(objects: S3Objects, call: Call) -> None:
    refused = {"Errors": [{"Key": KEY, "Code": "AccessDenied", "Message": "no"}]}
    call.answer = lambda method, options, real: refused if method == "delete_objects" else real()
    with pytest.raises(StoreError, match="s3:DeleteObject"):
        objects.delete([KEY])


def test_bucket_that_does_not_exist(server: S3Server) -> None:
    store = RunStore("s3://no-such-bucket/run", storage_options=storage_options(server))
    for attempt in (store.exists, store.manifests, store.writer):
        with pytest.raises(StoreError, match="create the bucket"):
            attempt()


def test_no_credentials(server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    store = RunStore(f"s3://{bucket}/run", storage_options={"endpoint_url": server.endpoint})
    with pytest.raises(StoreError, match=r"no credentials.*storage_options"):
        newest_sound(store, lambda manifest, blobs: blobs)


def test_messages_hold_no_secrets(server: S3Server) -> None:
    options = {**storage_options(server), "secret": "hunter2hunter2"}
    store = RunStore("s3://no-such-bucket/run", storage_options=options)
    with pytest.raises(StoreError) as caught:
        store.exists()
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(store)
