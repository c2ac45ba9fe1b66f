"""What an S3 failure means: judged by the HTTP status, which every server sends, never by the exception's type."""

import asyncio
from collections.abc import Iterator
from typing import Any

from shrinkpoint.errors import CorruptionError, StoreError
from shrinkpoint.store.objects import CredentialsError, MissingKeyError, TransientStoreError

__all__ = ["http_status", "translate"]

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
    """The HTTP status of the response that ``error`` or one of its causes carries; None without a response."""
    return _response(error)[0]


def translate(error: Exception, what: str) -> StoreError | CorruptionError:
    """The error to raise instead of ``error``; ``what`` begins its message and names the object."""
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
