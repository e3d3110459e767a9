"""Which of many errors is the cause: when one rank fails, the collectives of all others fail too. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from planaria.runtime.outcome import End, Outcome

_PEER_KINDS = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "Interrupted", "KeeperError", "PeerGone"}
)
_PEER_WORDS = ("gloo", "connection reset", "connection closed", "nccl", "aborted", "broken pipe")

ENVIRONMENT_KINDS = frozenset({"StorageUnavailable"})
"""Errors of the surroundings, which may have passed at the next attempt; never the job's own code."""

FATAL_KINDS = frozenset({"DataError", "ConfigError", "ShardingError", "LayoutError", "MemoryTooSmall"})
"""Errors that another attempt cannot mend."""


def is_peer_error(kind: str | None, error: str | None) -> bool:
    """Whether an error says only that a peer, or the connection to it, is gone."""
    if kind in _PEER_KINDS:
        return True
    text = (error or "").lower()
    return kind == "RuntimeError" and any(word in text for word in _PEER_WORDS)


def root_cause(outcomes: Mapping[str, Outcome], lost: Mapping[str, str]) -> Outcome | None:
    """The outcome whose error is no mere consequence; None if the loss of members explains everything."""
    failed = [outcome for outcome in outcomes.values() if outcome.end is End.FAILED and outcome.error]
    own = next((outcome for outcome in failed if not is_peer_error(outcome.kind, outcome.error)), None)
    if own is not None:
        return own
    return None if lost else next(iter(failed), None)
