"""A prefix of an S3 bucket as an object store: one request per operation, conditions judged by HTTP status."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

from shrinkpoint.errors import CorruptionError, StoreError
from shrinkpoint.store.generic import GenericObjects
from shrinkpoint.store.objects import CredentialsError, MissingKeyError, ObjectInfo, TransientStoreError
from shrinkpoint.store.urls import Location

PART_BYTES = 16 * 2**20
_DELETE_BATCH = 1000
# A few quick repetitions, so that one lost part does not cost a whole upload; the rest is RetryPolicy's, under its
# deadline. The defaults below (5 attempts of s3fs times 5 of botocore) would take most of a minute to give up once.
_CONFIG = {
    "retries": {"total_max_attempts": 3, "mode": "standard"},
    "connect_timeout": 10,
    "read_timeout": 60,
}


class S3Objects(GenericObjects):
    """Objects below ``s3://bucket/prefix``.

    Args:
        location: The parsed URL.
        options: ``storage_options`` of s3fs (``key``, ``secret``, ``endpoint_url``, ...).
    """

    def __init__(self, location: Location, options: Mapping[str, Any]) -> None:
        super().__init__(location, options)
        self._bucket, _, self._prefix = location.path.partition("/")
        self._ignores_condition = False

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        if self._ignores_condition:
            self.put(key, data)
            return True
        try:
            self._call("put_object", Key=self._full(key), Body=data, IfNoneMatch="*")
        except Exception as error:
            status = http_status(error)
            if status == 412:
                return False
            if status != 501:
                raise translate(error, f"cannot write {self.show(key)}") from error
            # Not implemented: behave like the servers that ignore the header, which the probe finds out.
            self._ignores_condition = True
            self.put(key, data)
        return True

    def put(self, key: str, data: bytes) -> None:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`; several parts at once above 32 MiB."""
        with self._translated("write", key):
            if len(data) < 2 * PART_BYTES:
                self._call("put_object", Key=self._full(key), Body=data)
                return
            # Atomic as well, and it aborts its upload when a part fails.
            self._filesystem.pipe_file(f"{self._bucket}/{self._full(key)}", data, chunksize=PART_BYTES)
            head = self._call("head_object", Key=self._full(key))
            if head["ContentLength"] != len(data):
                raise TransientStoreError(
                    f"cannot write {self.show(key)}: {head['ContentLength']} of {len(data)} bytes arrived"
                )

    def get(self, key: str, start: int | None = None, end: int | None = None, *, max_size: int) -> bytes:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        if start is not None and start == end:
            return b""
        whole = start is None and end is None
        extra = {} if whole else {"Range": f"bytes={start or 0}-{'' if end is None else end - 1}"}
        with self._translated("read", key):
            data: bytes = self._sync(self._read, key, max_size, extra)
        if end is not None and len(data) != end - (start or 0):
            raise CorruptionError(f"{self.show(key)} ends before byte {end}, which its manifest says it has")
        return data

    async def _read(self, filesystem: Any, key: str, max_size: int, extra: dict[str, str]) -> bytes:
        response = await filesystem._call_s3("get_object", Bucket=self._bucket, Key=self._full(key), **extra)
        body = response["Body"]
        try:
            length = response["ContentLength"]
            if length > max_size:
                raise CorruptionError(
                    f"{self.show(key)} has {length} bytes where at most {max_size} were expected"
                )
            data: bytes = await body.read()
        finally:
            body.close()
        if len(data) != length:
            raise TransientStoreError(f"cannot read {self.show(key)}: {len(data)} of {length} bytes arrived")
        return data

    def list(self, prefix: str, *, limit: int | None = None) -> list[ObjectInfo]:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        found: list[ObjectInfo] = []
        with self._translated("list", prefix):
            for page in self._pages("list_objects_v2", self._full(prefix)):
                for entry in page.get("Contents", ()):
                    key = entry["Key"][len(self._full("")) :]
                    modified = entry["LastModified"].timestamp()
                    if key:  # the empty one is the marker that consoles create for a "folder"
                        found.append(ObjectInfo(key=key, size=entry["Size"], modified=modified))
                if limit is not None and len(found) >= limit:
                    return found[:limit]
        return found

    def delete(self, keys: Collection[str]) -> None:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`."""
        names = [{"Key": self._full(key)} for key in keys]
        with self._translated("delete from", ""):
            for first in range(0, len(names), _DELETE_BATCH):
                batch = {"Objects": names[first : first + _DELETE_BATCH], "Quiet": True}
                answer = self._call("delete_objects", Delete=batch)
                for failed in answer.get("Errors", ()):
                    raise _DeleteRefused(failed)

    def server_time(self) -> float:
        """Return the Date header of a listing."""
        with self._translated("list", ""):
            page = next(self._pages("list_objects_v2", self._full("probe/")))
            return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def sweep(self, before: float) -> int:
        """See :class:`~shrinkpoint.store.objects.ObjectStore`; aborts uploads below this prefix, nobody else's."""
        with self._translated("clean", ""):
            old = [
                upload
                for page in self._pages("list_multipart_uploads", self._full("data/"))
                for upload in page.get("Uploads", ())
                if upload["Initiated"].timestamp() < before and upload["Key"].startswith(self._full("data/"))
            ]
            for upload in old:
                self._call("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
        return len(old)

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _pages(self, method: str, prefix: str) -> Iterator[Any]:
        position: dict[str, str] = {}
        while True:
            page = self._call(method, Prefix=prefix, **position)
            yield page
            if not page.get("IsTruncated"):
                return
            if method == "list_objects_v2":
                position = {"ContinuationToken": page["NextContinuationToken"]}
            else:
                position = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _call(self, method: str, **options: Any) -> Any:
        """Return the response to one request about this bucket."""
        filesystem = self._filesystem
        if "IfNoneMatch" not in options:
            return filesystem.call_s3(method, Bucket=self._bucket, **options)
        return self._sync(self._call_conditionally, method, options)

    async def _call_conditionally(self, filesystem: Any, method: str, options: dict[str, Any]) -> Any:
        # What s3fs does, less that it drops options which it does not know: a lost condition would overwrite a commit.
        await filesystem.set_session()
        client = await filesystem.get_s3(self._bucket)
        _accept_condition(client)
        send = getattr(client, method)
        known = filesystem._get_s3_method_kwargs(send, Bucket=self._bucket, **options)
        return await send(**{**known, **options})

    def _sync(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Return the result of the coroutine ``operation(filesystem, *args)``."""
        from fsspec.asyn import sync

        return sync(self._filesystem.loop, operation, self._filesystem, *args)

    def _open(self, options: dict[str, Any]) -> Any:
        import s3fs

        options["config_kwargs"] = {**_CONFIG, **self._options.get("config_kwargs", {})}
        found = s3fs.S3FileSystem(**options)
        found.retries = 1
        return found

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            translated = translate(error, f"cannot {verb} {self.show(key)}")
            if translated is error:
                raise
            raise translated from error


def _accept_condition(client: Any) -> None:
    """Let ``put_object`` take IfNoneMatch, which S3 has had since August 2024 and botocore since 1.35.

    An older one knows the header from ``get_object`` alone. What changes is this client's own copy of the description.
    """
    described = client.meta.service_model.operation_model
    condition = described("GetObject").input_shape.members["IfNoneMatch"]
    described("PutObject").input_shape.members.setdefault("IfNoneMatch", condition)


class _DeleteRefused(Exception):
    """One refusal inside a bulk delete's answer, in the shape that :func:`translate` reads."""

    def __init__(self, failed: Mapping[str, Any]) -> None:
        super().__init__(failed.get("Key", ""))
        code = str(failed.get("Code", ""))
        status = {"AccessDenied": 403, "InternalError": 500, "SlowDown": 503}.get(code, 400)
        self.response = {"Error": dict(failed), "ResponseMetadata": {"HTTPStatusCode": status}}


_TRANSIENT_STATUS = {408, 409, 425, 429}
# Sent with status 400 although the next attempt may succeed: the upload was cut short or damaged on its way.
_TRANSIENT_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch", "SlowDown"}
_NO_SPACE_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "EntityTooLarge"}
_RENEW = "the session token has expired: renew it, or give storage_options as a function, which is then asked again"
_CREDENTIAL_CODES = {
    "ExpiredToken": _RENEW,
    "ExpiredTokenException": _RENEW,
    "TokenRefreshRequired": _RENEW,
    "InvalidAccessKeyId": "the access key is unknown to the server: check AWS_ACCESS_KEY_ID or storage_options['key']",
    "InvalidToken": "the session token is not valid: renew the credentials",
    "SignatureDoesNotMatch": "the secret key does not match: check AWS_SECRET_ACCESS_KEY or storage_options['secret']",
    "RequestTimeTooSkewed": "this machine's clock is wrong by too much: set it",
}
_NO_CREDENTIALS = (
    "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE,"
    " or pass storage_options={'key': ..., 'secret': ...}"
)
# Names, because importing botocore takes a second and its classes do not share a useful base.
_CREDENTIAL_ERRORS = {
    "CredentialRetrievalError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
}
_TRANSIENT_ERRORS = {
    "ClientError",
    "ClientPayloadError",
    "ConnectionClosedError",
    "ConnectTimeoutError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "IncompleteReadError",
    "ProxyConnectionError",
    "ReadTimeoutError",
    "ResponseParserError",
    "ResponseStreamingError",
    "SSLError",
}


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of the response that ``error`` or one of its causes carries; None without a response."""
    return _response(error)[0]


def translate(error: Exception, what: str) -> StoreError | CorruptionError:
    """Return the error to raise instead of ``error``; ``what`` begins its message and names the object."""
    if isinstance(error, StoreError | CorruptionError):
        return error
    status, code, text = _response(error)
    if status is None:
        return _without_response(error, what)
    reason = f"{what}: {text or error} (HTTP {status}{f' {code}' if code else ''})"
    if code == "NoSuchBucket":
        return StoreError(f"{reason}: create the bucket or correct the URL")
    if status == 404:
        return MissingKeyError(reason)
    if status == 416:
        return CorruptionError(f"{reason}: the object is shorter than its manifest says")
    if code in _CREDENTIAL_CODES:
        return CredentialsError(f"{reason}: {_CREDENTIAL_CODES[code]}")
    if code in _NO_SPACE_CODES or status == 507:
        return StoreError(f"{reason}: the store is full: free space or keep fewer checkpoints")
    if status in (401, 403):
        kind = CredentialsError if status == 401 else StoreError
        return kind(
            f"{reason}: these credentials may not do this; a run needs s3:ListBucket, s3:GetObject, s3:PutObject,"
            " and s3:DeleteObject to collect garbage"
        )
    if status in (301, 307, 308):
        return StoreError(
            f"{reason}: the bucket is in another region: set AWS_REGION or storage_options['client_kwargs']"
        )
    if (status >= 500 and status != 501) or status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES:
        return TransientStoreError(reason)
    return StoreError(reason)


def _without_response(error: Exception, what: str) -> StoreError:
    names = {cls.__name__ for link in _links(error) for cls in type(link).__mro__}
    reason = f"{what}: {type(error).__name__}: {error}"
    if names & _CREDENTIAL_ERRORS:
        return CredentialsError(f"{reason}: {_NO_CREDENTIALS}")
    if names & _TRANSIENT_ERRORS or isinstance(error, OSError | EOFError | asyncio.TimeoutError):
        return TransientStoreError(f"{reason}: check the network and endpoint_url")
    if isinstance(error, TypeError | ValueError):
        return StoreError(f"{reason}: storage_options hold something that s3fs does not take; correct them")
    return StoreError(reason)


def _response(error: BaseException) -> tuple[int | None, str, str]:
    for link in _links(error):
        response: Any = getattr(link, "response", None)
        if isinstance(response, dict) and "ResponseMetadata" in response:
            detail = response.get("Error", {})
            status = response["ResponseMetadata"].get("HTTPStatusCode")
            code = str(detail.get("Code", ""))
            # A HEAD has no body: botocore then puts the status where the code should be.
            return status, "" if code.isdigit() else code, str(detail.get("Message", ""))
    return None, "", ""


def _links(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from; s3fs wraps the response once, sometimes twice."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
