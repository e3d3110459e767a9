"""What an object store's errors mean: worth another try or not, and what a person should check."""

from __future__ import annotations

import errno
import time
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from planaria.state.errors import StorageUnavailable
from planaria.state.retry import GaveUp

_PASSING_STATUS = {408, 429, 500, 502, 503, 504}
_PASSING_CODES = {
    "BadDigest",  # damaged on the way; what lies there is as it was
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "XAmzContentSHA256Mismatch",
}
_KEYS = {
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_ABSENT = {"NoSuchKey", "NotFound", "404", "NoSuchUpload"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge"}
_CHECK_KEYS = (
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, AWS_SESSION_TOKEN) on every node, "
    "and that they may list, read, write and delete there"
)


class CutShort(Exception):
    """An answer that ended before its announced length."""


def code_of(error: BaseException) -> str:
    """The store's error code, such as ``NoSuchKey``; empty where the error is not the store's."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""


def status_of(error: BaseException) -> int:
    """The HTTP status; 0 where there was no answer."""
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def refused(error: BaseException) -> bool:
    """Whether the condition of a conditional request did not hold."""
    return code_of(error) == "PreconditionFailed" or status_of(error) == 412


def transient(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, boto.ClientError):
        return code_of(error) in _PASSING_CODES or status_of(error) in _PASSING_STATUS
    if isinstance(error, (boto.SSLError, aiohttp.ClientSSLError)):
        return False  # a certificate does not mend itself
    return isinstance(
        error,
        (
            boto.ConnectionError,
            boto.HTTPClientError,
            boto.IncompleteReadError,
            boto.ResponseStreamingError,
            ResponseParserError,
            aiohttp.ClientError,
            ConnectionError,
            TimeoutError,
            CutShort,
        ),
    )


def explained(error: Exception, url: str) -> Exception:
    """``error`` as an ``OSError`` about ``url``, or as ``StorageUnavailable`` where no object there can be used."""
    tries = ""
    if isinstance(error, GaveUp):
        tries = f" after {error}"
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    code, status = code_of(error), status_of(error)
    if code == "NoSuchBucket":
        return StorageUnavailable(f"{url}: no such bucket; create it, or correct the URL or AWS_ENDPOINT_URL")
    if code == "RequestTimeTooSkewed":
        return StorageUnavailable(f"{url}: {_skew(error)}; set this machine's clock (NTP), then try again")
    if code in _ABSENT:
        return FileNotFoundError(errno.ENOENT, "No such file or directory", url)
    if code in _FULL or status == 507:
        return OSError(errno.ENOSPC, f"the store has no more room ({code or status})", url)
    if code in _KEYS or status in (401, 403):
        return StorageUnavailable(f"{url}: permission denied ({code or status}); {_CHECK_KEYS}")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
        return StorageUnavailable(f"{url}: no usable credentials ({_told(error)}); {_CHECK_KEYS}")
    if isinstance(error, boto.ProfileNotFound):
        return StorageUnavailable(f"{url}: {_told(error)}; correct AWS_PROFILE")
    if transient(error) or isinstance(error, (boto.SSLError, aiohttp.ClientSSLError)):
        told = f"{code or status}: {_message(error)}" if status else _told(error)
        return StorageUnavailable(
            f"{url}: the store cannot be used{tries} (last: {told}); check AWS_ENDPOINT_URL, the network and the store"
        )
    if isinstance(error, (boto.ClientError, boto.BotoCoreError)):
        return OSError(errno.EIO, f"{code or type(error).__name__}: {_message(error)}", url)
    return error


def _skew(error: BaseException) -> str:
    date: str = ""
    if isinstance(error, boto.ClientError):
        date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        ahead = time.time() - parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError):
        return "the clock of this machine differs too much from the store's"
    way = "ahead of" if ahead > 0 else "behind"
    return f"the clock of this machine is {abs(ahead):.0f} s {way} the store's, so it refuses the request"


def _message(error: BaseException) -> str:
    if isinstance(error, boto.ClientError):
        detail: dict[str, Any] = dict(error.response.get("Error", {}))
        return str(detail.get("Message") or "no message")
    return _told(error)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
