"""Requests to one bucket: blocking calls for any thread, each with bounded retries and clear errors.

The requests themselves run on the event-loop thread that fsspec keeps per process. s3fs gives the client (endpoint,
region, profile and keys come from the environment); its own retries and botocore's are off, so that there is one
policy, and so are its caches.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import hashlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from s3fs import S3FileSystem

from planaria.state import s3_errors
from planaria.state.retry import RetryPolicy, retried

T = TypeVar("T")

SLOWEST_BYTES_PER_S = 256 << 10
"""A request may take as long as its bytes need at this speed, and the time-out of a silent store on top."""
RANGE_BYTES = 8 << 20
READ_BYTES = 1 << 20
TOGETHER = 6
"""Ranges, parts or removals under way at once."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds until a silent store counts as failed: at connecting, and between any two of its bytes."""

    connect_s: float = 10.0
    read_s: float = 30.0


@dataclass(frozen=True)
class Stored:
    """One object of a listing: its key, size in bytes, and the tag that changes with its contents."""

    key: str
    size: int
    etag: str


class S3Client:
    """Objects of one bucket.

    Every method raises ``StorageUnavailable`` where the store or bucket cannot be used, ``FileNotFoundError`` for
    an object that is not there, another ``OSError`` for the rest. Safe to use from several threads, and after a fork.
    """

    def __init__(self, bucket: str, policy: RetryPolicy, timeouts: Timeouts) -> None:
        self.bucket, self.policy, self._timeouts = bucket, policy, timeouts
        self._of_process: dict[int, S3FileSystem] = {}

    def __reduce__(self) -> tuple[type[S3Client], tuple[str, RetryPolicy, Timeouts]]:
        return type(self), (self.bucket, self.policy, self._timeouts)

    # -- for any thread ----------------------------------------------------------------------------

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``work`` on the event loop of this process."""
        return asyncio.run_coroutine_threadsafe(work, self._files().loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; it is cancelled if the wait is interrupted."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def listing(self, prefix: str) -> list[Stored]:
        """Every object whose key begins with ``prefix``, in order."""
        return self.run(self._listing(prefix))

    def get(self, key: str) -> bytes:
        """All of a small object."""
        return self.run(self._get(key))

    def read_into(self, key: str, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset`` on, in parallel ranges; fewer bytes only where the object ends."""
        return self.run(self._read_into(key, buffer, offset)) if len(buffer) else 0

    def put(self, key: str, data: bytes, unless: bool = False, match: str | None = None) -> bool:
        """Write a small object; says whether it is there now with these contents.

        Args:
            unless: only if the key is free.
            match: only if the object that is there has this tag.
        """
        return self.run(self._put(key, data, unless, match))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are fine."""
        work = [lambda s3, key=key: s3.delete_object(Bucket=self.bucket, Key=key) for key in keys]
        self.run(self._all(work, list(keys)))

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Key and id of every multipart upload that was begun under ``prefix`` and neither completed nor aborted."""
        return self.run(self._uploads(prefix))

    def abort_uploads(self, uploads: Sequence[tuple[str, str]]) -> None:
        """Abort multipart uploads; those that are not there are fine."""
        work = [
            lambda s3, key=key, id=id: s3.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=id)
            for key, id in uploads
        ]
        self.run(self._all(work, [key for key, _ in uploads]))

    # -- on the event loop -------------------------------------------------------------------------

    async def call(
        self, key: str, request: Callable[[Any], Awaitable[T]], nbytes: int = 0, policy: RetryPolicy | None = None
    ) -> T:
        """What ``request``, given the client, answers; tried again as the policy says.

        Args:
            key: what errors are about.
            request: one try.
            nbytes: size of what is sent or received, for the time limit of a try.
            policy: in place of the client's own.
        """
        limit = self._timeouts.connect_s + self._timeouts.read_s + nbytes / SLOWEST_BYTES_PER_S

        async def attempt() -> T:
            async with asyncio.timeout(limit):  # a store that no longer reads what is sent has no time-out of its own
                return await request(await self._files().set_session())

        try:
            return await retried(policy or self.policy, attempt, s3_errors.transient)
        except Exception as error:
            explained = s3_errors.explained(error, f"s3://{self.bucket}/{key}")
            if explained is error:
                raise
            # The cause is told in the text; as an object it would drag the request along, signature included.
            raise explained from None

    async def _listing(self, prefix: str) -> list[Stored]:
        found: list[Stored] = []
        more: dict[str, str] = {}

        def request(s3: Any) -> Any:
            return s3.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **more)

        while True:
            page = await self.call(prefix, request)
            found += [Stored(item["Key"], item["Size"], item["ETag"]) for item in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _uploads(self, prefix: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        more: dict[str, str] = {}

        def request(s3: Any) -> Any:
            return s3.list_multipart_uploads(Bucket=self.bucket, Prefix=prefix, **more)

        while True:
            page = await self.call(prefix, request)
            found += [(item["Key"], item["UploadId"]) for item in page.get("Uploads", ())]
            if not page.get("IsTruncated"):
                return found
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    async def _get(self, key: str) -> bytes:
        async def request(s3: Any) -> bytes:
            answer = await s3.get_object(Bucket=self.bucket, Key=key)
            async with answer["Body"] as body:
                return bytes(await body.read())

        return await self.call(key, request)

    async def _read_into(self, key: str, buffer: memoryview, offset: int) -> int:
        buffer = buffer.cast("B")
        free = asyncio.Semaphore(TOGETHER)

        async def part(start: int) -> int:
            async with free:
                return await self._range(key, buffer[start : start + RANGE_BYTES], offset + start)

        try:
            async with asyncio.TaskGroup() as group:
                parts = [group.create_task(part(start)) for start in range(0, len(buffer), RANGE_BYTES)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return sum(task.result() for task in parts)

    async def _range(self, key: str, buffer: memoryview, offset: int) -> int:
        done = 0

        async def request(s3: Any) -> int:
            nonlocal done  # a later try goes on where the one before stopped
            span = f"bytes={offset + done}-{offset + len(buffer) - 1}"
            try:
                answer = await s3.get_object(Bucket=self.bucket, Key=key, Range=span)
            except Exception as error:
                if s3_errors.code_of(error) == "InvalidRange" or s3_errors.status_of(error) == 416:
                    return done  # the object ends before
                raise
            end = min(len(buffer), done + answer["ContentLength"])
            async with answer["Body"] as body:
                while done < end:
                    chunk = await body.read(min(READ_BYTES, end - done))
                    if not chunk:
                        raise s3_errors.CutShort(f"the answer ended {end - done} bytes too early")
                    buffer[done : done + len(chunk)] = chunk
                    done += len(chunk)
            return done

        return await self.call(key, request, len(buffer))

    async def _put(self, key: str, data: bytes, unless: bool, match: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if unless else {"IfMatch": match} if match is not None else {}
        digest = md5(data)

        def request(s3: Any) -> Awaitable[Any]:
            return s3.put_object(Bucket=self.bucket, Key=key, Body=data, ContentMD5=digest, **condition)

        async def attempt(s3: Any) -> bool:
            try:
                await request(s3)
            except Exception as error:
                if condition and s3_errors.status_of(error) == 501:
                    condition.clear()  # a store that knows no conditions, and says so
                    await request(s3)
                elif condition and (s3_errors.refused(error) or (match and s3_errors.code_of(error) == "NoSuchKey")):
                    return False
                else:
                    raise
            return True

        if await self.call(key, attempt, len(data)):
            return True
        try:  # a try whose answer was lost may have landed: then the condition fails because of ourselves
            return await self._get(key) == data
        except FileNotFoundError:
            return False

    async def _all(self, work: Sequence[Callable[[Any], Awaitable[Any]]], keys: Sequence[str]) -> None:
        free = asyncio.Semaphore(TOGETHER)

        async def one(request: Callable[[Any], Awaitable[Any]], key: str) -> None:
            async with free:
                try:
                    await self.call(key, request)
                except FileNotFoundError:
                    return

        for outcome in await asyncio.gather(*map(one, work, keys), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _files(self) -> S3FileSystem:
        # Loop thread and connections do not survive a fork, so each process has its own.
        files = self._of_process.get(os.getpid())
        if files is None:
            made = S3FileSystem(
                anon=False,
                skip_instance_cache=True,
                use_listings_cache=False,
                config_kwargs={
                    "connect_timeout": self._timeouts.connect_s,
                    "read_timeout": self._timeouts.read_s,
                    "retries": {"total_max_attempts": 1},
                    "max_pool_connections": 4 * TOGETHER,
                    # Uploads carry Content-MD5, which every store knows; checksums of slices cover the reading.
                    "request_checksum_calculation": "when_required",
                    "response_checksum_validation": "when_required",
                },
            )
            files = self._of_process.setdefault(os.getpid(), made)
        return files


def md5(data: bytes | bytearray) -> str:
    """``Content-MD5`` of a request body: the store refuses what was damaged on the way."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
