"""A JSON-lines file that somebody else is writing, read as it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Lines:
    """Hands out every row once; a line that is not whole yet waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Rows written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return [json.loads(line) for line in data[:whole].splitlines()]
