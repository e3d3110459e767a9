"""Upload of one large object in parts, with bounded memory."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from planaria.state import s3_errors
from planaria.state.errors import CheckpointError
from planaria.state.s3_client import S3Client, md5
from planaria.state.storage import Buffer

PART_BYTES = 16 << 20
TOGETHER = 4
MOST_PARTS = 10_000
"""What S3 allows. Parts grow with the upload, so that it suffices for any object S3 takes (5 TiB)."""


def upload(client: S3Client, key: str, chunks: Iterable[Buffer], part_bytes: int = PART_BYTES) -> int:
    """Write ``chunks`` as one object, which appears when it is whole; gives its size in bytes.

    Holds at most ``TOGETHER + 2`` parts in memory. A failure aborts the upload; a process that dies leaves it to
    the clean-up of a later commit.
    """
    parts = _parts(chunks, part_bytes)
    first = next(parts, bytearray())
    second = next(parts, None)
    if second is None:
        client.put(key, bytes(first))
        return len(first)
    upload_id = client.run(_begin(client, key))
    etags: list[str] = []
    pending: deque[Future[str]] = deque()
    size = 0
    try:
        for number, part in enumerate(itertools.chain((first, second), parts), 1):
            if len(pending) >= TOGETHER:
                etags.append(pending.popleft().result())
            digest = md5(part)
            pending.append(client.submit(_send(client, key, upload_id, number, part, digest)))
            size += len(part)
        while pending:
            etags.append(pending.popleft().result())
        client.run(_complete(client, key, upload_id, etags, size))
    except BaseException:
        for future in pending:
            future.cancel()
        with contextlib.suppress(OSError, CheckpointError):
            client.run(_abort(client, key, upload_id))
        raise
    return size


def _parts(chunks: Iterable[Buffer], part_bytes: int) -> Iterator[bytearray]:
    """``chunks`` cut and joined into parts of ``part_bytes`` bytes, larger ones after many; the last may be smaller."""
    count, part, wanted = 0, bytearray(), part_bytes
    for chunk in chunks:
        left = memoryview(chunk).cast("B")
        while len(left):
            taken = left[: wanted - len(part)]
            part += taken
            left = left[len(taken) :]
            if len(part) == wanted:
                yield part
                count, part = count + 1, bytearray()
                wanted = part_bytes << (count * 8 // MOST_PARTS)
    if part:
        yield part


async def _begin(client: S3Client, key: str) -> str:
    answer = await client.call(key, lambda s3: s3.create_multipart_upload(Bucket=client.bucket, Key=key))
    return str(answer["UploadId"])


async def _send(client: S3Client, key: str, upload_id: str, number: int, part: bytearray, digest: str) -> str:
    def request(s3: Any) -> Any:
        return s3.upload_part(
            Bucket=client.bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=part, ContentMD5=digest
        )

    return str((await client.call(key, request, len(part)))["ETag"])


async def _complete(client: S3Client, key: str, upload_id: str, etags: list[str], size: int) -> None:
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]

    async def request(s3: Any) -> None:
        try:
            await s3.complete_multipart_upload(
                Bucket=client.bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
        except Exception as error:
            if s3_errors.code_of(error) != "NoSuchUpload":
                raise
            # An earlier try whose answer was lost has done it, if the object is there.
            found = await s3.head_object(Bucket=client.bucket, Key=key)
            if found["ContentLength"] != size:
                raise

    await client.call(key, request)


async def _abort(client: S3Client, key: str, upload_id: str) -> None:
    await client.call(
        key,
        lambda s3: s3.abort_multipart_upload(Bucket=client.bucket, Key=key, UploadId=upload_id),
        policy=client.policy.brief(),
    )
