"""Which nodes new workers may be started on: pure bookkeeping of trust.

Ray needs ten seconds and more to notice that a node is dead, and would keep a worker that is started there
pending until then. A node that lost a worker is therefore rested, longer each time, until a worker comes up
on it; a node that left and returned starts with a clean record.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0


@dataclass
class _Record:
    failures: int = 0
    rested_at: float = 0.0


class NodeTrust:
    """Failures by node since a worker last came up there."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def failed(self, node: str, now: float) -> None:
        """A worker on ``node`` was lost or did not come up."""
        record = self._records.setdefault(node, _Record())
        record.failures += 1
        rest = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** (record.failures - 1))
        record.rested_at = max(record.rested_at, now + rest)

    def proved(self, node: str) -> None:
        """A worker came up on ``node``, or the node is new."""
        self._records.pop(node, None)

    def suspects(self) -> set[str]:
        """Nodes with a failure on record."""
        return set(self._records)

    def usable(self, node: str, now: float) -> bool:
        """Whether a worker may be started on ``node`` now."""
        record = self._records.get(node)
        return record is None or now >= record.rested_at
