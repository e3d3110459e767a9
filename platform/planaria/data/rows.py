"""From a row of a table, or a JSON record, to a sample: the same for all formats that have named columns."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from planaria.config import ColumnsConfig
from planaria.data.columns import Columns, Kind, choose_columns
from planaria.data.conversation import question_turn, read_turns
from planaria.data.files import File, read_all
from planaria.data.images import decode_image
from planaria.data.sample import Sample, Turn, conversation_sample
from planaria.data.text import as_text
from planaria.recipe import BadSample
from planaria.state.storage import is_url

_LASTING = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP}


@dataclass(frozen=True)
class Shard:
    """A run of samples that lie together, a file or a part of it: best read together, in whatever order."""

    file: File
    samples: int


@dataclass(frozen=True)
class Needs:
    """What a sample must have to be of use to a recipe."""

    least: int = 0
    """Fewest pictures."""
    most: int | None = None
    """Most pictures of the whole sample."""
    most_at_once: int | None = None
    """Most pictures of the first question."""
    side: int | None = None
    """Pictures are made squares of this side in pixels as they are decoded, which spares copies of the whole ones;
    None: they keep their size."""

    def check(self, key: str, pictures: int, at_once: int) -> None:
        """Raises :class:`BadSample` for too few or too many pictures."""
        if pictures < self.least:
            raise BadSample(key, "there is no image")
        if self.most is not None and pictures > self.most:
            raise BadSample(key, f"there are {pictures} images, and the model takes {self.most}")
        if self.most_at_once is not None and at_once > self.most_at_once:
            what = f"the first question has {at_once} images, and data.max_length has room for {self.most_at_once}"
            raise BadSample(key, what)


class Rows(Protocol):
    """Random access to the rows of files; can be pickled, and shared by threads."""

    @property
    def shards(self) -> Sequence[Shard]:
        """In the order of the rows."""
        ...

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """All columns."""
        ...

    def __len__(self) -> int: ...
    def select(self, columns: Sequence[str]) -> None:
        """Rows need to have these columns only."""
        ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Values by column; raises :class:`BadSample`, or ``OSError`` where another attempt may succeed."""
        ...

    def name(self, index: int) -> str:
        """File and place in it."""
        ...

    def close(self) -> None: ...


class TableDataset:
    """Samples from rows; see :class:`planaria.recipe.Dataset`.

    A picture is bytes, ``{bytes, path}`` or a path; a path is relative to ``image_root``.

    Args:
        rows: where values come from.
        columns: configured names of columns.
        prompt: the instruction before a caption.
        image_root: a folder, local or remote.
        needs: what makes a sample useless.
        where: names the data set in errors.

    Raises:
        DataError: a column is missing.
    """

    def __init__(
        self, rows: Rows, columns: ColumnsConfig, prompt: str, image_root: str, needs: Needs, where: str
    ) -> None:
        self.columns: Columns = choose_columns(rows.kinds, columns, where)
        self.rows = rows
        self.prompt = prompt
        self.image_root = image_root.rstrip("/")
        self.needs = needs
        rows.select(self.columns.used)

    @property
    def shards(self) -> Sequence[Shard]:
        """The files and how many samples each has, in order."""
        return self.rows.shards

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``, 0 <= index < len(self).

        Raises:
            IndexError: outside that range.
            BadSample: text or pictures are missing, damaged, too many, or do not fit together.
            OSError: the files cannot be read now.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        row = self.rows.row(index)
        key = self._key(row, index)
        blobs = _pictures(None if self.columns.image is None else row.get(self.columns.image), key, self.image_root)
        turns = self._turns(row, len(blobs), key)
        self.needs.check(key, len(blobs), turns[0].pictures)
        return conversation_sample(
            key, [decode_image(_fetched(blob, key), key, self.needs.side) for blob in blobs], turns
        )

    def _turns(self, row: Mapping[str, Any], pictures: int, key: str) -> tuple[Turn, ...]:
        columns = self.columns
        if columns.conversation is not None:
            return read_turns(row.get(columns.conversation), pictures, key)
        answer = as_text(row.get(columns.text or ""), key)
        if columns.prompt is not None:
            question = as_text(row.get(columns.prompt), key, "question")
            return question_turn(question, answer, pictures, key, marked=True)
        if not pictures:
            raise BadSample(key, "there is no image")  # a caption of nothing
        return question_turn(self.prompt, answer, pictures, key, marked=False)

    def close(self) -> None:
        """Close the files; the next access opens them again."""
        self.rows.close()

    def _key(self, row: Mapping[str, Any], index: int) -> str:
        own = None if self.columns.key is None else row.get(self.columns.key)
        name = self.rows.name(index)
        own = own.decode("utf-8", "replace") if isinstance(own, bytes) else own
        return name if own in (None, "") else f"{name.rpartition('/')[0]}/{own}"


def _pictures(value: Any, key: str, root: str) -> list[bytes | str]:
    """Encoded pictures, or whole paths of them."""
    if value is None:
        return []
    if isinstance(value, bytes):
        return [value]
    if isinstance(value, str):
        if not value:
            return []
        return [value if is_url(value) or os.path.isabs(value) else f"{root}/{value}"]
    if isinstance(value, Mapping):
        inner = value.get("bytes")
        if inner is None:
            inner = value.get("path") or None
        if not isinstance(inner, bytes | str):
            raise BadSample(key, "the image has neither bytes nor a path")
        return _pictures(inner, key, root) if inner else [b""]
    if isinstance(value, Sequence):
        if any(item is None or item == "" for item in value):
            raise BadSample(key, f"image {[item in (None, '') for item in value].index(True) + 1} of several is null")
        return [picture for item in value for picture in _pictures(item, key, root)]
    raise BadSample(key, f"the image is neither bytes nor a path but {type(value).__name__}")


def _fetched(picture: bytes | str, key: str) -> bytes:
    if isinstance(picture, bytes):
        return picture
    try:
        return read_all(picture)
    except OSError as error:
        if error.errno not in _LASTING:
            raise
        raise BadSample(key, f"the image {picture} cannot be read ({error.strerror})") from None
    except ValueError as error:  # another scheme, a name with a zero byte
        raise BadSample(key, f"the image {picture!r} cannot be read ({error})") from None
