"""Conversations as data sets spell them, to turns with places for pictures.

Three spellings are known: LLaVA's and ShareGPT's ``{from: human | gpt, value}``, the chat messages
``{role: user | assistant, content}``, whose content may be a list of text and picture parts, and the pairs
``{user, assistant}`` of The Cauldron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planaria.data.sample import Turn
from planaria.data.text import as_text, parsed
from planaria.recipe import BadSample

MARK = "<image>"
"""Where a picture stands in the text of a question."""

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}


def read_turns(value: Any, pictures: int, key: str) -> tuple[Turn, ...]:
    """The turns of a conversation, which hold ``pictures`` pictures in all.

    Text of the system, and a question that is followed by another one, go before the next question. Where no place
    is marked, all pictures stand before the first question.

    Raises:
        BadSample: no conversation, one that does not alternate or ends without an answer, empty text, or another
            number of marks than pictures.
    """
    if isinstance(value, str | bytes):
        value = parsed(value, key, "conversation")
    if not isinstance(value, Sequence) or not value:
        raise BadSample(key, "the conversation is no list of turns, or an empty one")
    turns: list[Turn] = []
    waiting: list[str] = []
    for role, text in _messages(value, key):
        if role == "assistant":
            if not waiting:
                raise BadSample(key, f"turn {len(turns) + 1} of the conversation is an answer without a question")
            turns.append(Turn(tuple("\n".join(waiting).split(MARK)), as_text(text, key, f"answer {len(turns) + 1}")))
            waiting = []
        elif text.strip():
            waiting.append(as_text(text, key, "question"))
    if waiting or not turns:
        raise BadSample(key, "the conversation ends without an answer")
    return _placed(turns, pictures, key)


def question_turn(prompt: str, answer: str, pictures: int, key: str, marked: bool) -> tuple[Turn, ...]:
    """One question and its answer, as :func:`read_turns` has it; marks in ``prompt`` count only if ``marked``."""
    pieces = tuple(prompt.split(MARK)) if marked else (prompt,)
    return _placed([Turn(pieces, answer)], pictures, key)


def _placed(turns: Sequence[Turn], pictures: int, key: str) -> tuple[Turn, ...]:
    marks = sum(turn.pictures for turn in turns)
    if marks == 0 and pictures:
        first, *rest = turns
        turns = [Turn((*("",) * pictures, _own_line(first.prompt[0])), first.answer), *rest]
    elif marks != pictures:
        raise BadSample(key, f"the text has {marks} {MARK} marks, but there are {pictures} pictures")
    return tuple(Turn((_own_line(turn.prompt[0]), *turn.prompt[1:]), turn.answer) for turn in turns)


def _own_line(text: str) -> str:
    """Text that begins on a line of its own; nothing stays nothing."""
    if not text.strip():
        return ""
    return text if text.startswith("\n") else f"\n{text}"


def _messages(value: Sequence[Any], key: str) -> Iterator[tuple[str, str]]:
    """(user, assistant or system; text) of each message."""
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            raise BadSample(key, f"message {number} of the conversation is no mapping but {type(message).__name__}")
        if isinstance(message.get("user"), str) and "assistant" in message:
            yield "user", message["user"]
            yield "assistant", _content(message["assistant"], key, number)
            continue
        name = message.get("from") or message.get("role")
        role = _ROLES.get(str(name).lower())
        if role is None:
            raise BadSample(key, f"message {number} of the conversation is from {name!r}; known: {', '.join(_ROLES)}")
        text = _content(message.get("value", message.get("content")), key, number)
        if role == "assistant" and MARK in text:
            raise BadSample(key, f"message {number} of the conversation is an answer with a place for a picture")
        yield role, text


def _content(content: Any, key: str, number: int) -> str:
    """Text of a message; picture parts become marks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise BadSample(key, f"message {number} of the conversation has no text but {type(content).__name__}")
    pieces: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            pieces.append(part["text"])
        elif kind in ("image", "image_url"):
            pieces.append(MARK)
        else:
            raise BadSample(key, f"message {number} of the conversation has a part of unknown type {kind!r}")
    return "".join(pieces)
