"""Checkpoints in an object store: ``s3://bucket/prefix``."""

from __future__ import annotations

import errno
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from planaria.state.errors import StorageUnavailable
from planaria.state.manifest import NAME, Manifest, ManifestError
from planaria.state.names import FolderName
from planaria.state.object_names import folder_of, manifest_name, shard_name, token_of
from planaria.state.retry import RetryPolicy
from planaria.state.s3_client import S3Client, Stored, Timeouts
from planaria.state.s3_upload import PART_BYTES, upload
from planaria.state.storage import Buffer

log = logging.getLogger(__name__)

LEAD_BYTES = 32 << 10
"""Read at once when a file is opened, which mostly is the whole header."""


class ObjectBlob:
    """An object, read by ranges."""

    chunk = 1 << 24
    """Large: every request has a latency, beside which a second way through memory is nothing."""

    def __init__(self, client: S3Client, stored: Stored) -> None:
        self.path, self.size = f"s3://{client.bucket}/{stored.key}", stored.size
        self._client, self._key = client, stored.key
        self._lead: bytes | None = None

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if offset == 0 and len(buffer) < LEAD_BYTES:
            head = bytearray(min(LEAD_BYTES, self.size))
            count = self._client.read_into(self._key, memoryview(head), 0)
            self._lead = bytes(head[:count])
        # Used for the header alone: later reads must see the object as it then is.
        lead, self._lead = self._lead, self._lead if offset == 0 else None
        if lead is not None and offset + len(buffer) <= len(lead):
            buffer[:] = lead[offset : offset + len(buffer)]
            return len(buffer)
        return self._client.read_into(self._key, buffer, offset)

    def close(self) -> None:
        self._lead = None


class ObjectFiles:
    """Files of one folder, as one listing shows them."""

    def __init__(self, client: S3Client, files: Mapping[str, Stored]) -> None:
        self._client, self._files = client, files

    def open(self, name: str) -> ObjectBlob:
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return ObjectBlob(self._client, self._files[name])

    def close(self) -> None:
        """Nothing is held open."""


class ObjectStorage:
    """Folders under one prefix of a bucket, see :mod:`planaria.state.object_names`.

    What an object store cannot give: a checkpoint that is removed while it is read is gone (a reader gets
    ``FileNotFoundError`` for its next shard), and listing costs a request per thousand objects.

    Args:
        url: ``s3://bucket/prefix``. Endpoint, region, profile and keys come from the environment.
        policy: how requests are tried again.
        timeouts: when a request counts as failed.
        part_bytes: parts of a multipart upload; S3 wants at least 5 MiB.

    Raises:
        ValueError: not such a URL.
    """

    def __init__(
        self,
        url: str,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008 (frozen)
        timeouts: Timeouts = Timeouts(),  # noqa: B008 (frozen)
        part_bytes: int = PART_BYTES,
    ) -> None:
        bucket, self._prefix = split_url(url)
        self._client = S3Client(bucket, policy, timeouts)
        self._part_bytes = part_bytes
        self._named: dict[tuple[str, str], frozenset[str] | None] = {}
        self._doubtful: set[str] = set()

    def folders(self, leftovers: bool = False) -> dict[str, str]:
        found: dict[str, str] = {}
        for step, files in self._steps(self._client.listing(self._key("step-"))).items():
            for file, stored in files.items():
                if folder := folder_of(step, file):
                    found[str(folder)] = stored.etag
            if leftovers:
                for file in self._unnamed(files) if _suspicious(files) else ():
                    found[str(FolderName(step.step, "tmp", token_of(file) or ""))] = ""
        if leftovers:
            for step, token, _ in self._uploads("step-"):
                found[str(FolderName(step.step, "tmp", token))] = ""
        return found

    def open_files(self, folder: str) -> ObjectFiles:
        step, files = self._folder(folder)
        name = manifest_name(step)
        shown = {file: stored for file, stored in files.items() if token_of(file)}
        return ObjectFiles(self._client, shown | ({NAME: files[name]} if name in files else {}))

    def shard_file(self, writer_id: int, token: str) -> str:
        return shard_name(writer_id, token, secrets.token_hex(4))

    def write(self, folder: str, name: str, chunks: Iterable[Buffer]) -> int:
        return upload(self._client, self._key(folder, name), chunks, self._part_bytes)

    def publish(self, temp: str, final: str, aside: str, manifest: bytes) -> None:
        key = self._key(final, NAME)
        current = next((item for item in self._client.listing(key) if item.key == key), None)
        if current:
            self._client.put(self._key(aside, NAME), self._client.get(key))
        try:
            mine = self._client.put(key, manifest, unless=current is None, match=current.etag if current else None)
        except StorageUnavailable:
            self._doubtful.add(temp)  # it may have landed, or still land: then its shards must be there
            raise
        if not mine:
            self._client.delete([self._key(aside, NAME)])
            raise FileExistsError(errno.EEXIST, "another process has published this step at the same moment", key)

    def remove(self, folder: str, via: str) -> None:
        if folder in self._doubtful:
            return  # a later generation, whose token is another, sees what has become of it
        name, files = self._folder(folder)
        if name.kind == "tmp":
            unnamed = [stored.key for file, stored in self._unnamed(files).items() if token_of(file) == name.token]
            self._client.delete(unnamed)
            mine = [upload for _, token, upload in self._uploads(f"step-{name.step:08d}/") if token == name.token]
            self._client.abort_uploads(mine)
            return
        manifest = files.pop(manifest_name(name), None)
        if manifest is None:
            return
        own = self._names(manifest) or frozenset()
        free = self._unnamed(files)  # what no other manifest names
        self._client.delete([manifest.key])
        self._client.delete([free[file].key for file in own if file in free])

    def names(self, folder: str) -> list[str]:
        prefix = self._key(folder) + "/"
        return [item.key.removeprefix(prefix) for item in self._client.listing(prefix)]

    def create(self, folder: str, name: str, data: bytes) -> bool:
        return self._client.put(self._key(folder, name), data, unless=True)

    def fetch(self, folder: str, name: str) -> bytes:
        return self._client.get(self._key(folder, name))

    def discard(self, folder: str, name: str) -> None:
        self._client.delete([self._key(folder, name)])

    def path(self, folder: str = "", name: str = "") -> str:
        return f"s3://{self._client.bucket}/{self._key(folder, name)}".rstrip("/")

    def free(self) -> int | None:
        return None

    def _key(self, folder: str = "", name: str = "") -> str:
        parsed = FolderName.parse(folder)
        if parsed:
            folder = str(FolderName(parsed.step))
            name = manifest_name(parsed) if name == NAME else name
        return "/".join(filter(None, (self._prefix, folder, name)))

    def _folder(self, folder: str) -> tuple[FolderName, dict[str, Stored]]:
        """The parsed name, and all files of its step."""
        name = FolderName.parse(folder)
        if name is None:
            raise ValueError(f"{folder!r} is no folder of a vault")
        step = FolderName(name.step)
        found = self._steps(self._client.listing(self._key(str(step)) + "/"))
        return name, found.get(step, {})

    def _steps(self, listing: Iterable[Stored]) -> dict[FolderName, dict[str, Stored]]:
        steps: defaultdict[FolderName, dict[str, Stored]] = defaultdict(dict)
        start = len(self._prefix) + 1 if self._prefix else 0
        for stored in listing:
            folder, _, file = stored.key[start:].partition("/")
            name = FolderName.parse(folder)
            if name and not name.kind:
                steps[name][file] = stored
        return steps

    def _unnamed(self, files: Mapping[str, Stored]) -> dict[str, Stored]:
        """Shards among the files of a step that no manifest there names; none if a manifest cannot be read."""
        kept: set[str] = set()
        for file, stored in files.items():
            if PurePosixPath(file).suffix == ".json":
                named = self._names(stored)
                if named is None:
                    return {}  # rather keep too much
                kept |= named
        return {file: stored for file, stored in files.items() if token_of(file) and file not in kept}

    def _names(self, manifest: Stored) -> frozenset[str] | None:
        """Files that a manifest names; ``None`` where it is damaged."""
        at = (manifest.key, manifest.etag)
        if at not in self._named:
            try:
                self._named[at] = frozenset(Manifest.decode(self._client.get(manifest.key)).files)
            except ManifestError:
                self._named[at] = None
            except FileNotFoundError:
                return frozenset()
        return self._named[at]

    def _uploads(self, prefix: str) -> list[tuple[FolderName, str, tuple[str, str]]]:
        """Step, token and (key, id) of unfinished uploads; none where listing them is not allowed."""
        try:
            uploads = self._client.uploads(self._key(prefix))
        except (StorageUnavailable, OSError) as error:
            log.warning("unfinished uploads are left alone, as they cannot be listed: %s", error)
            return []
        found: list[tuple[FolderName, str, tuple[str, str]]] = []
        for key, upload_id in uploads:
            for step, files in self._steps([Stored(key, 0, "")]).items():
                found += [(step, token, (key, upload_id)) for token in map(token_of, files) if token]
        return found


def _suspicious(files: Mapping[str, Stored]) -> bool:
    """Whether there may be shards that no manifest names: told from names alone, mostly no manifest need be read."""
    shards = [file for file in files if token_of(file)]
    tokens, writers = {token_of(file) for file in shards}, {file.split("-")[1] for file in shards}
    return len(shards) > 0 and (NAME not in files or len(tokens) > 1 or len(writers) < len(shards))


def split_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of ``s3://bucket/prefix``.

    Raises:
        ValueError: something else; the message does not repeat the URL, which may hold a password.
    """
    match = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(/[^?#]*)?", url)
    if not match:
        raise ValueError(
            "expected s3://bucket/prefix (endpoint and keys come from the environment: AWS_ENDPOINT_URL, AWS_PROFILE, "
            "AWS_ACCESS_KEY_ID, ...)"
        )
    return match[1], "/".join(part for part in (match[2] or "").split("/") if part)
