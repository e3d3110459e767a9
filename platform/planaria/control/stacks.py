"""Where every process of a generation stands, asked before it is torn down."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

ANSWER_S = 1.0
"""A process that takes longer is frozen, or as good as."""


def write_stacks(handles: Mapping[str, Any], path: str) -> str:
    """Write the stacks of all threads of these workers to ``path``, which is returned."""
    asked = {ident: handle.stacks.options(concurrency_group="control").remote() for ident, handle in handles.items()}
    done, _ = ray.wait(list(asked.values()), num_returns=max(1, len(asked)), timeout=ANSWER_S) if asked else ([], [])
    parts = []
    for ident, reference in asked.items():
        text = f"no answer within {ANSWER_S:g} s: frozen, or its node cannot be reached"
        if reference in done:
            try:
                text = ray.get(reference)
            except ray.exceptions.RayError as error:
                text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        parts.append(f"==== {ident}\n{text}\n")
    with contextlib.suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("\n".join(parts), encoding="utf-8")
    return path
