"""What a wrong job description tells its author: file or flag, key, given value and remedy, one line each."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel


def subsection(section: type[BaseModel] | None, key: object) -> type[BaseModel] | None:
    """The section class under ``key``, or None where it holds a plain value or is unknown."""
    field = section.model_fields.get(str(key)) if section else None
    annotation = field.annotation if field else None
    for choice in (annotation, *typing.get_args(annotation)):  # a section, or one that may be left out
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def _known_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of every key."""
    for name in section.model_fields:
        yield prefix + name
        if below := subsection(section, name):
            yield from _known_keys(below, f"{prefix}{name}.")


def short(value: Any, limit: int = 60) -> str:
    """The value as YAML would write it, cut to a readable length; a section shows its keys alone."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = "a section with " + ", ".join(map(str, value)) if isinstance(value, dict) and value else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def without_passwords(text: str) -> str:
    """``text`` with what stands before the @ of URLs left out."""
    return re.sub(r"://[^/@\s]*@", "://...@", text)


def _origin(key: str, message: str, source: str, origins: Mapping[str, str]) -> str:
    """Where the faulty value came from: the file, a flag, or the file together with flags."""
    latest_first = list(origins.items())[::-1]
    for name, flag in latest_first:
        if key == name or key.startswith(name + "."):
            return flag
    # A rule about several values: name the flags that set one of them.
    inside = [(name.removeprefix(f"{key}." if key else ""), flag) for name, flag in reversed(latest_first)]
    flags = [flag for name, flag in inside if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", message)]
    return f"{source} with {' '.join(flags)}" if flags else source


_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_EXPECTED = {
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "dict_type": "expected a section of keys and values",
    "finite_number": "expected a finite number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "int_from_float": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "string_type": "expected text; put it in quotes",
    "tuple_type": "expected a list, e.g. [a, b]",
}


def explain(problem: Any, root: type[BaseModel], source: str, origins: Mapping[str, str]) -> str:
    """One line with file or flag, key, given value and remedy.

    Args:
        problem: one entry of ``ValidationError.errors()``.
        root: the section class that was validated.
        source: name of the file.
        origins: dotted keys that were overridden, and the flags that did it.
    """
    location = tuple(problem["loc"])
    key = ".".join(map(str, location))
    kind, given, message = problem["type"], problem.get("input"), problem["msg"].removeprefix("Value error, ")
    section: type[BaseModel] | None = root
    for part in location[:-1]:
        section = subsection(section, part)
    leaf = str(location[-1]) if location else ""
    field = section.model_fields.get(leaf) if section else None
    below = subsection(section, leaf) if location else root
    where = _origin(key, message, source, origins)
    if not below and isinstance(given, dict):  # a flag that set something below what is a plain value
        where = next((flag for name, flag in origins.items() if name.startswith(key + ".")), where)
    about = f" ({field.description})" if field and field.description else ""

    if kind == "invalid_key":  # 1: or true: as a key
        return f"{where}: {key}: unknown key, not even text; {_nearest(leaf, location, section, root)}"
    if kind == "extra_forbidden":
        return f"{where}: {key}: unknown key (value {short(given)}); {_nearest(leaf, location, section, root)}"
    if kind == "missing" and isinstance(location[-1], int):  # too few items in a list of fixed length
        return f"{where}: {'.'.join(map(str, location[:-1]))}: item {location[-1] + 1} is missing; add it"
    if kind == "missing":
        return f"{where}: {key}: missing{about}; add it"
    if kind == "too_long":
        return f"{where}: {key}: {short(given)} has too many items; give {problem['ctx']['max_length']}"
    if kind == "model_type":
        keys = ", ".join(below.model_fields) if below else ""
        return f"{where}: {key}: {short(given)} is not a section; give keys below it: {keys}"
    if kind == "literal_error":
        allowed = problem["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        near = difflib.get_close_matches(str(given), allowed.split(", "), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{where}: {key}: {short(given)} is not among {allowed}{hint}"
    if kind in _OUT_OF_RANGE:
        return f"{where}: {key}: {short(given)} is out of range; give {_range(field) or message}{about}"
    if kind == "string_pattern_mismatch":
        rule = "letters, digits, dot, underscore and dash only, a letter or digit first" if key == "name" else message
        return f"{where}: {key}: {short(given)} is not acceptable; use {rule}{about}"
    if kind == "value_error":
        # A section's own rule names the values it is about; a key's rule does not.
        shown = "" if below else f"{short(given)} is not acceptable; "
        return f"{where}: {key + ': ' if key else ''}{shown}{message}"
    expected = _EXPECTED.get(kind, message[:1].lower() + message[1:])
    found = short(given)
    return f"{where}: {key}: {found} is not acceptable; {expected}{about}"


def _nearest(leaf: str, location: tuple[int | str, ...], section: type[BaseModel] | None, root: type[BaseModel]) -> str:
    """The remedy for an unknown key: the known one it resembles, here or in another section."""
    known = list(section.model_fields) if section else []
    # Spelling aside, a key may stand in the wrong section.
    elsewhere = [name for name in _known_keys(root) if name.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(leaf.lower().replace("-", "_"), known, n=1)
    if near:
        return f"did you mean {'.'.join([*map(str, location[:-1]), near[0]])}?"
    leaves = {name.rpartition(".")[2]: name for name in _known_keys(root)}
    near = difflib.get_close_matches(leaf.lower().replace("-", "_"), leaves, n=1, cutoff=0.8)
    if near:
        return f"did you mean {leaves[near[0]]}?"
    return f"remove it, or use one of the keys known here: {', '.join(sorted(known))}"


def _range(field: Any) -> str:
    """The allowed interval of a field, in words."""
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    limits = {name: getattr(item, name) for item in field.metadata for name in words if hasattr(item, name)}
    return " and ".join(f"{words[name]} {limit:g}" for name, limit in sorted(limits.items())) if field else ""
