"""Environment variables in the text values of a job description: ``${NAME}`` and ``${NAME:-default}``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_REFERENCE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^${}]*))?\}|\$\{")


class UnresolvedVariable(ValueError):
    """A reference that cannot be replaced; the message says why and what to do."""


def expand(value: str, environment: Mapping[str, str]) -> str:
    """``value`` with its references replaced.

    As in a shell, ``${NAME:-default}`` takes the default where NAME is unset or empty. ``${NAME}`` needs a
    value: an empty one would turn ``${DIR}/train-*.tar`` into a path from the root. ``$${`` stands for ``${``;
    a ``$`` without a brace is left alone, and what a variable holds is not expanded again.

    Raises:
        UnresolvedVariable: a variable that is not set, or a brace that does not make a reference.
    """

    def replacement(match: re.Match[str]) -> str:
        if match.group() == "$${":
            return "${"
        name, default = match.group(1), match.group(2)
        if name is None:
            raise UnresolvedVariable("'${' begins no variable; write ${NAME}, ${NAME:-default}, or $${ for a plain ${")
        held = environment.get(name, "")
        if held:
            return held
        if default is not None:
            return default
        state = "is empty" if name in environment else "is not set"
        raise UnresolvedVariable(
            f"the environment variable {name} {state}; set it, or give a default: ${{{name}:-...}}"
        )

    return _REFERENCE.sub(replacement, value)


def expand_tree(tree: Any, environment: Mapping[str, str]) -> tuple[Any, list[tuple[str, str, str]]]:
    """A copy of nested mappings and lists with every text value expanded (keys are left alone).

    Returns the copy, and (dotted key, value, problem) of every value that could not be expanded.
    """
    problems: list[tuple[str, str, str]] = []

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, dict):
            return {key: walk(value, (*path, str(key))) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value, (*path, str(index))) for index, value in enumerate(node)]
        if isinstance(node, str) and "${" in node:
            try:
                return expand(node, environment)
            except UnresolvedVariable as problem:
                problems.append((".".join(path), node, str(problem)))
        return node

    return walk(tree, ()), problems


def origin_of(key: str, origins: Mapping[str, str]) -> Iterator[str]:
    """The flags that set ``key`` or a section above it, latest first."""
    for name, flag in reversed(list(origins.items())):
        if key == name or key.startswith(name + "."):
            yield flag
