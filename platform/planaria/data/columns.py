"""Which column holds what: as configured, else guessed from names and types, else an error that lists the columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from planaria.config import ColumnsConfig
from planaria.data.errors import DataError

Kind = Literal["bytes", "picture", "pictures", "text", "messages", "other"]
"""What a column can hold, by its type: encoded bytes, one picture ({bytes, path} or a blob known to be one), a list of
pictures or paths, text, a list of mappings, anything else."""

CONVERSATION_NAMES = ("conversations", "conversation", "messages", "texts")
_IMAGE_NAMES = (
    *("image", "images", "img", "imgs", "picture", "pictures", "photo", "jpg", "jpeg", "png", "webp"),
    *("image_bytes", "image_path", "image_file", "file_name"),
)
_TEXT_NAMES = ("caption", "captions", "text", "txt", "answer", "response", "output", "description", "alt_text", "label")
_GUESSES: dict[str, tuple[tuple[str, ...], tuple[Kind, ...]]] = {
    "conversation": (CONVERSATION_NAMES, ("messages", "text")),
    "image": (_IMAGE_NAMES, ("picture", "pictures", "bytes", "text")),
    "text": (_TEXT_NAMES, ("text", "bytes")),
    "prompt": (("question", "prompt", "instruction", "query", "problem"), ("text",)),
    "key": (("id", "key", "__key__", "image_id", "sample_id", "uid", "url"), ("text", "other")),
}


@dataclass(frozen=True)
class Columns:
    """The columns that make a sample; None: there is none."""

    image: str | None
    text: str | None
    prompt: str | None
    conversation: str | None
    key: str | None

    @property
    def used(self) -> list[str]:
        """Names of all of them, each once."""
        names = (self.image, self.text, self.prompt, self.conversation, self.key)
        return list(dict.fromkeys(name for name in names if name is not None))


def choose_columns(kinds: Mapping[str, Kind], config: ColumnsConfig, where: str) -> Columns:
    """The columns to use, of those with these kinds.

    Raises:
        DataError: a configured column that is not there, or neither text nor conversation; lists all columns.
    """
    listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "none"
    chosen: dict[str, str | None] = {}
    for role, (names, suitable) in _GUESSES.items():
        wanted: str | None = getattr(config, role)
        if wanted is not None and wanted not in kinds:
            raise DataError(where, f"no column {wanted!r}; there are: {listed}", f"correct data.columns.{role}")
        chosen[role] = wanted or _guess(kinds, names, suitable)
    if config.text is not None and config.conversation is None:
        chosen["conversation"] = None  # whoever names the text means it
    if chosen["conversation"] is not None and config.text is None:
        chosen["text"] = chosen["prompt"] = None
    if chosen["image"] is None and config.image is None:
        pictures = [name for name, kind in kinds.items() if kind == "picture"]
        chosen["image"] = pictures[0] if len(pictures) == 1 else None
    found = Columns(**chosen)
    if found.text is None and found.conversation is None:
        raise DataError(where, f"no column is known to hold text; there are: {listed}", "set data.columns.text")
    return found


def _guess(kinds: Mapping[str, Kind], names: tuple[str, ...], suitable: tuple[Kind, ...]) -> str | None:
    by_name = {name.lower(): name for name in reversed(list(kinds))}
    for guess in names:
        name = by_name.get(guess)
        if name is not None and kinds[name] in suitable:
            return name
    return None
