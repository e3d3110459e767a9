"""WebDataset shards (local tar files) with random access."""

from __future__ import annotations

import glob
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from planaria.data.errors import DataError
from planaria.data.images import decode_image
from planaria.data.sample import Sample
from planaria.data.tarindex import Entry, Span, index_shard
from planaria.recipe import BadSample

MAX_OPEN = 16
"""File handles that one data set keeps open, besides the one that each reading thread has in use."""


class WebDataset:
    """Image-caption pairs from tar shards, in the order of the sorted shard names; see
    :class:`planaria.recipe.Dataset`.

    The shards are indexed once, here; they must not change while a job runs. A sample's key is the shard's
    file name, ``/``, and its key in the shard, so equal keys in different shards do no harm. Instances can be
    pickled and shared by threads.
    """

    def __init__(self, pattern: str, prompt: str, backoff: Sequence[float] = (0.05, 0.2, 0.8)) -> None:
        """
        Args:
            pattern: glob of uncompressed tar files; ``**`` crosses directories, ``~`` is the home directory.
            prompt: the instruction before every caption.
            backoff: waits in seconds before a failed read is tried again.

        Raises:
            DataError: no shard, no sample, or a shard that :func:`index_shard` refuses.
        """
        paths = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        if not paths:
            raise DataError(pattern, "no file matches", "check the path as seen from every node, e.g. data/train-*.tar")
        self.paths = [Path(path) for path in paths]
        self.prompt = prompt
        self.backoff = tuple(backoff)
        self._entries: list[tuple[int, Entry]] = [
            (shard, entry) for shard, path in enumerate(self.paths) for entry in index_shard(path)
        ]
        if not self._entries:
            raise DataError(pattern, f"no samples in {len(paths)} shard(s)", "members are named KEY.png, KEY.txt")
        self._start_cache()

    def _start_cache(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_open")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_cache()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``, 0 <= index < len(self).

        Raises:
            IndexError: outside that range.
            BadSample: no image or caption, damaged, or unreadable after the last retry.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        shard, entry = self._entries[index]
        key = f"{self.paths[shard].name}/{entry.key}"
        if entry.image is None:
            raise BadSample(key, "no image member (png, jpg, jpeg, webp, gif or bmp)")
        if entry.text is not None:
            caption = _text(self._read(shard, entry.text, key), key)
        elif entry.json is not None:
            caption = _json_caption(self._read(shard, entry.json, key), key)
        else:
            raise BadSample(key, "no caption member (txt, or json with a caption)")
        caption = caption.strip()
        if not caption:
            raise BadSample(key, "the caption is empty")
        return Sample(key, decode_image(self._read(shard, entry.image, key), key), self.prompt, caption)

    def close(self) -> None:
        """Close the file handles; the next access opens them again."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _read(self, shard: int, span: Span, key: str) -> bytes:
        # Network file systems fail for a moment and come back: only lasting trouble is the sample's fault.
        waits = iter(self.backoff)
        while True:
            try:
                data = self._read_once(shard, span)
                break
            except OSError as error:
                wait = next(waits, None)
                if wait is None:
                    cause = f"{self.paths[shard]} cannot be read ({error.strerror or error})"
                    raise BadSample(key, cause) from error
                time.sleep(wait)
        if len(data) < span.size:
            cause = f"{self.paths[shard]} is truncated: {len(data)} of {span.size} bytes at offset {span.offset}"
            raise BadSample(key, cause)
        return data

    def _read_once(self, shard: int, span: Span) -> bytes:
        # A thread takes the handle out of the cache while it seeks and reads, so nobody else moves or closes it.
        with self._lock:
            file = self._open.pop(shard, None)
        if file is None:
            file = open(self.paths[shard], "rb")  # noqa: SIM115 (closed by eviction)
        try:
            file.seek(span.offset)
            data = file.read(span.size)
        except BaseException:
            file.close()  # a handle that failed once, e.g. a stale NFS one, may never recover
            raise
        with self._lock:
            surplus = [self._open.pop(shard, None)]  # another thread may have opened the shard meanwhile
            self._open[shard] = file
            while len(self._open) > MAX_OPEN:
                surplus.append(self._open.popitem(last=False)[1])
        for other in surplus:
            if other is not None:
                other.close()
        return data


def _text(data: bytes, key: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(key, f"the caption is not UTF-8 (byte {data[error.start]:#04x} at {error.start})") from None


def _json_caption(data: bytes, key: str) -> str:
    try:
        tree = json.loads(_text(data, key))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadSample(key, f"the json member is not valid JSON ({error})") from None
    caption = tree.get("caption") if isinstance(tree, dict) else None
    if not isinstance(caption, str):
        raise BadSample(key, 'the json member has no text under "caption"')
    try:
        caption.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no tokenizer takes
        raise BadSample(key, "the caption holds a lone surrogate") from None
    return caption
