"""WebDataset shards (tar files) with random access."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import BinaryIO

from planaria.data.cache import Cache, Handles, default_folder
from planaria.data.columns import CONVERSATION_NAMES
from planaria.data.conversation import question_turn, read_turns
from planaria.data.errors import DataError, DataUnreachable
from planaria.data.files import File, find_files
from planaria.data.images import decode_image
from planaria.data.reading import COMPRESSED, Reader, each
from planaria.data.rows import Needs, Shard
from planaria.data.sample import Sample, Turn, conversation_sample
from planaria.data.tarindex import Entry, Span, index_tar
from planaria.data.text import as_text, parsed
from planaria.recipe import BadSample

MAX_OPEN = 16
"""File handles that one data set keeps open, besides the one that each reading thread has in use."""
_CACHE = Cache(default_folder(), 20 << 30)


class WebDataset:
    """Image-caption pairs from tar shards, in the order of the sorted shard names; see
    :class:`planaria.recipe.Dataset`.

    The shards are indexed once, here; they must not change while a job runs. A sample's key is the shard's
    file name, ``/``, and its key in the shard, so equal keys in different shards do no harm. Instances can be
    pickled and shared by threads.
    """

    def __init__(
        self,
        pattern: str | Sequence[File],
        prompt: str,
        backoff: Sequence[float] = (0.05, 0.2, 0.8),
        reader: Reader = Reader(_CACHE),  # noqa: B008 (frozen)
        needs: Needs = Needs(),  # noqa: B008 (frozen)
    ) -> None:
        """
        Args:
            pattern: the shards, or what :func:`find_files` takes for them. Compressed ones are unpacked into the cache.
            prompt: the instruction before every caption.
            backoff: waits in seconds before a failed read is tried again.
            reader: opens the shards.
            needs: what makes a sample useless.

        Raises:
            DataError: no shard, no sample, or a shard that :func:`index_tar` refuses.
        """
        files = find_files(pattern, is_tar) if isinstance(pattern, str) else list(pattern)
        self.prompt = prompt
        self.backoff = tuple(backoff)
        self.needs = needs
        self._entries: list[tuple[int, Entry]] = []
        shards: list[Shard] = []
        indices = each(partial(_index, reader=reader), files)
        for number, (file, entries) in enumerate(zip(files, indices, strict=True)):
            self._entries += [(number, entry) for entry in entries]
            shards.append(Shard(file, len(entries)))
        if not self._entries:
            where = pattern if isinstance(pattern, str) else files[0].path
            raise DataError(where, f"no samples in {len(files)} shard(s)", "members are named KEY.png, KEY.txt")
        self.shards: Sequence[Shard] = tuple(shards)
        """The files and how many samples each has, in order."""
        self._handles = Handles(partial(_open, reader, files), MAX_OPEN)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``, 0 <= index < len(self).

        Raises:
            IndexError: outside that range.
            BadSample: no image or caption, damaged, or a local shard that is unreadable after the last retry.
            OSError: a remote shard that cannot be read now.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        shard, entry = self._entries[index]
        key = f"{self.shards[shard].file.name}/{entry.key}"
        pictures = int(entry.image is not None)
        turns: tuple[Turn, ...] = ()
        if entry.text is not None:
            caption = as_text(self._read(shard, entry.text, key), key)
        elif entry.json is not None:
            caption, turns = _told(self._read(shard, entry.json, key), pictures, key)
        else:
            raise BadSample(key, "no caption member (txt, or json with a caption)")
        if not pictures and not turns:
            raise BadSample(key, "no image member (png, jpg, jpeg, webp, gif, bmp, tif or tiff)")
        self.needs.check(key, pictures, pictures)
        images = []
        if entry.image is not None:
            images.append(decode_image(self._read(shard, entry.image, key), key, self.needs.side))
        return conversation_sample(key, images, turns or question_turn(self.prompt, caption, 1, key, marked=False))

    def close(self) -> None:
        """Close the file handles; the next access opens them again."""
        self._handles.close()

    def _read(self, shard: int, span: Span, key: str) -> bytes:
        # Network file systems fail for a moment and come back: only lasting trouble is the sample's fault.
        waits = iter(self.backoff)
        file = self.shards[shard].file
        while True:
            try:
                data = self._handles.read(shard, span.offset, span.size)
                break
            except OSError as error:
                if file.remote:
                    raise  # tried again already, and the store may come back
                wait = next(waits, None)
                if wait is None:
                    raise BadSample(key, f"{file.path} cannot be read ({error.strerror or error})") from error
                time.sleep(wait)
        if len(data) < span.size:
            cause = f"{file.path} is truncated: {len(data)} of {span.size} bytes at offset {span.offset}"
            raise BadSample(key, cause)
        return data


def is_tar(name: str) -> bool:
    """Whether a file of this name is a tar shard, compressed or not."""
    lower = name.lower()
    return lower.endswith((".tar", ".tgz", *(f".tar{end}" for end in COMPRESSED)))


def _open(reader: Reader, files: Sequence[File], number: int) -> BinaryIO:
    return reader.open(files[number])


def _index(file: File, reader: Reader) -> list[Entry]:
    try:
        if not file.remote:
            with reader.open(file) as opened:
                return index_tar(opened, file.path)
        # Each process would copy the shard once more after it was dropped from the cache; this stays.
        with reader.derived(file, "index", partial(_dumped, file.path)) as kept:
            return [_loaded(line) for line in kept]
    except (DataError, DataUnreachable):
        raise
    except OSError as error:
        remedy = "check the path and its permissions"
        raise DataError(file.path, f"cannot be read ({error.strerror or error})", remedy) from None


def _dumped(path: str, opened: BinaryIO) -> Iterator[bytes]:
    for entry in index_tar(opened, path):
        yield json.dumps(asdict(entry)).encode() + b"\n"


def _loaded(line: bytes) -> Entry:
    tree = json.loads(line)
    spans = {name: tree[name] and Span(**tree[name]) for name in ("image", "text", "json")}
    return Entry(tree["key"], **spans)


def _told(data: bytes, pictures: int, key: str) -> tuple[str, tuple[Turn, ...]]:
    """The caption of a json member, or its conversation."""
    tree = parsed(data, key, "json member")
    if (
        isinstance(tree, list) and tree and isinstance(tree[0], dict)
    ):  # The Cauldron's shards hold nothing but the turns
        return "", read_turns(tree, pictures, key)
    if isinstance(tree, dict):
        for name in CONVERSATION_NAMES:
            if tree.get(name):
                return "", read_turns(tree[name], pictures, key)
        if isinstance(caption := tree.get("caption"), str):
            return as_text(caption, key), ()
    raise BadSample(key, 'the json member has no text under "caption", and no conversation')
