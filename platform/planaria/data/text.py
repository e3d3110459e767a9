"""Text as data sets hold it, checked: what no tokenizer takes makes a bad sample."""

from __future__ import annotations

import json
from typing import Any

from planaria.recipe import BadSample


def as_text(value: Any, key: str, what: str = "caption") -> str:
    """``value``, text or UTF-8 bytes, as text that is not empty, without white space around it.

    Raises:
        BadSample: it is none; ``what`` names it.
    """
    if value is None:
        raise BadSample(key, f"the {what} is missing")
    text = utf8(value, key, what) if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise BadSample(key, f"the {what} is no text but {type(value).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no tokenizer takes
        raise BadSample(key, f"the {what} holds a lone surrogate") from None
    if not (text := text.strip()):
        raise BadSample(key, f"the {what} is empty")
    return text


def utf8(data: bytes, key: str, what: str) -> str:
    """Bytes as text; a byte order mark is left out. Raises :class:`BadSample`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(key, f"the {what} is not UTF-8 (byte {data[error.start]:#04x} at {error.start})") from None


def parsed(data: bytes | str, key: str, what: str) -> Any:
    """JSON as values. Raises :class:`BadSample`."""
    text = utf8(data, key, what) if isinstance(data, bytes) else data
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadSample(key, f"the {what} is not valid JSON ({error})") from None
