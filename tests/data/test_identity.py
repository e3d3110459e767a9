"""Changes of a data set are noticed and named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.data import identity
from planaria.data.identity import DataIdentity, differences, identity_of

SHARDS = [("a.tar", 100, 10), ("b.tar", 200, 20), ("c.tar", 300, 30)]


class Files:
    def __init__(self, shards: list[tuple[str, int, int]]) -> None:
        self.shards = [SimpleNamespace(file=SimpleNamespace(name=n, size=s), samples=c) for n, s, c in shards]

    def __len__(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError


def of(shards: list[tuple[str, int, int]]) -> DataIdentity:
    return identity_of(Files(shards))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (SHARDS, []),
        (SHARDS[:2], ["removed: c.tar", "60 samples before, 30 now"]),
        ([*SHARDS, ("d.tar", 1, 1)], ["added: d.tar", "60 samples before, 61 now"]),
        ([("a.tar", 101, 10), *SHARDS[1:]], ["altered: a.tar"]),
        ([SHARDS[1], SHARDS[0], SHARDS[2]], ["the same shards in another order"]),
    ],
)
def test_what_changed_is_named(now: list[tuple[str, int, int]], words: list[str]) -> None:
    assert differences(of(SHARDS), of(now)) == words
    assert differences(DataIdentity.from_tree(of(SHARDS).as_tree()), of(now)) == words


def test_of_very_many_shards_a_digest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MOST_LISTED", 2)
    before = of(SHARDS)
    assert before.shards == () and differences(before, of(SHARDS)) == []
    assert differences(before, of([("a.tar", 101, 10), *SHARDS[1:]])) == ["the shards are others"]


def test_shards_of_another_kind_are_the_data_sets_own_affair() -> None:
    class Own(Files):
        def __len__(self) -> int:
            return 2

    own: Any = Own([])
    for shards in (7, ["a.tar"]):
        own.shards = shards
        assert identity_of(own) == DataIdentity(2, "")


def test_made_samples_are_known_by_their_number() -> None:
    assert differences(identity_of(range(5)), identity_of(range(5))) == []
    assert differences(identity_of(range(5)), identity_of(range(6))) == ["5 samples before, 6 now"]
