"""Numbered claims: which process may commit to a vault and delete from it.

A claim is a file ``claims/epoch-0000000N`` that is created only if its name is free; whoever holds the highest
number is the holder. A controller claims the vault when it starts, so that one which was taken for dead, or cut off,
and wakes up again can harm nothing. Between a check and the publication that follows there is an instant in which
another may claim; what is published then is whole, and the superseded one deletes nothing any more.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from planaria.state.errors import CheckpointError, Fenced
from planaria.state.storage import Storage

FOLDER = "claims"
KEPT = 3
"""Newest claims that stay, for a person who wants to know what happened."""
_ATTEMPTS = 100
_NAME = re.compile(r"epoch-(\d{8,})")


@dataclass(frozen=True)
class Claim:
    """A right to commit. Plain data: the processes of one controller share it.

    Attributes:
        number: later claims have higher ones.
        holder: who claims, for people.
        time: when, as ISO 8601 in UTC.
        nonce: tells two holders of the same number apart, where a store let both have it.
    """

    number: int
    holder: str
    time: str
    nonce: str

    @property
    def name(self) -> str:
        """File name."""
        return f"epoch-{self.number:08d}"

    def encode(self) -> bytes:
        """Contents of the file."""
        return json.dumps({"holder": self.holder, "time": self.time, "nonce": self.nonce}).encode() + b"\n"


def take(storage: Storage, holder: str, report: Callable[[str], None]) -> Claim:
    """Claim ``storage`` with a number above all others.

    A store that ignores the condition of a conditional write is noticed and reported. There, too, at most one of
    two holders of a number may commit: the one whose claim is what the file holds.

    Raises:
        CheckpointError: the place cannot be written.
    """
    for _ in range(_ATTEMPTS):
        numbers = _numbers(storage)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        claim = Claim(max(numbers, default=0) + 1, holder, now, secrets.token_hex(8))
        try:
            if not storage.create(FOLDER, claim.name, claim.encode()):
                continue  # somebody was faster
            if storage.create(FOLDER, claim.name, claim.encode() + b"\n"):  # the name is taken, by ourselves
                report(
                    f"{storage.path()}: this store ignores If-None-Match, so of two processes that claim it at the "
                    f"same moment the first learns of it only when it commits; use a store with conditional writes"
                )
            for number in numbers[: -(KEPT - 1)]:
                storage.discard(FOLDER, Claim(number, "", "", "").name)
        except OSError as error:
            raise CheckpointError(f"{storage.path(FOLDER)}: cannot be claimed: {error.strerror}") from error
        return claim
    raise CheckpointError(f"{storage.path(FOLDER)}: others kept claiming it during {_ATTEMPTS} tries")


def check(storage: Storage, claim: Claim) -> None:
    """Nothing, while ``claim`` is the highest.

    Raises:
        Fenced: it is not, or is gone; the message names who took over.
        CheckpointError: that cannot be found out.
    """
    where = storage.path(FOLDER)
    highest = max(_numbers(storage), default=0)
    newest = Claim(highest, "", "", "").name
    if highest < claim.number:
        raise Fenced(f"{where}: {claim.name}, held by {claim.holder}, is gone: is this another place than before?")
    try:
        held = json.loads(storage.fetch(FOLDER, newest))
        nonce, holder, time = held["nonce"], held["holder"], held["time"]
    except (OSError, ValueError, KeyError, TypeError):
        nonce, holder, time = "", "a process that has not told its name yet", "just now"
    if (highest, nonce) != (claim.number, claim.nonce):
        raise Fenced(
            f"{where}: {claim.holder} (epoch {claim.number}) may not commit or delete any more: {holder} took over "
            f"with epoch {highest} ({time}). Nothing was changed; this process should end"
        )


def _numbers(storage: Storage) -> list[int]:
    """Numbers of all claims, ascending."""
    try:
        matches = map(_NAME.fullmatch, storage.names(FOLDER))
    except OSError as error:
        raise CheckpointError(f"{storage.path(FOLDER)}: cannot be listed: {error.strerror}") from error
    return sorted(int(match[1]) for match in matches if match)
