"""Only the holder of the newest claim commits or deletes."""

import pickle
import threading

import pytest
import torch
from tests.state.conftest import chosen
from tests.state.saved import Bucket, Folder, save, state, write

from planaria.state import claims
from planaria.state.errors import CheckpointError, Fenced
from planaria.state.local_storage import LocalStorage
from planaria.state.vault import Vault


@pytest.fixture(params=["folder", "seaweedfs"])
def place(request, monkeypatch):
    if request.param == "folder":
        return Folder(request.getfixturevalue("tmp_path"))
    return Bucket(chosen(request.getfixturevalue("weed"), monkeypatch), request.getfixturevalue("url"))


def test_a_superseded_holder_changes_nothing(place):
    old, new = Vault(place.root, keep_last=1), Vault(place.root, keep_last=1)
    assert old.claim("controller A").number == 1
    save(old, 1, token="a")
    slices = write(old, 2, token="a")
    assert new.claim("controller B").number == 2
    before = place.names()
    with pytest.raises(Fenced, match=r"controller A \(epoch 1\).*controller B took over with epoch 2"):
        old.writer(2, "a").commit(slices, {})
    old.writer(2, "a").abort()
    assert place.names() == before
    save(new, 3, token="b")
    assert place.names() == ["step-00000003"]  # what the old one left went, too


def test_no_deletion_by_one_that_is_superseded_in_mid_commit(place, monkeypatch):
    old, new = Vault(place.root, keep_last=1), Vault(place.root)
    old.claim("A")
    save(old, 1)
    sound = Vault._sound

    def interrupted(self, name, identity):
        if self is old and name.step == 2:
            new.claim("B")
        return sound(self, name, identity)

    monkeypatch.setattr(Vault, "_sound", interrupted)
    with pytest.raises(Fenced, match="B took over"):
        save(old, 2)
    assert place.names() == ["step-00000001", "step-00000002"]  # both whole
    assert [info.intact for info in new.list("deep")] == [True, True]


def test_one_whose_attempt_was_swept_away_in_mid_write_is_told_why(tmp_path, monkeypatch):
    old, new = Vault(str(tmp_path)), Vault(str(tmp_path))
    old.claim("A")
    write_file = old._storage.write

    def swept_before_the_end(folder, name, chunks):
        def interrupted():
            yield from chunks
            new.claim("B")
            save(new, 2, token="b")

        write_file(folder, name, interrupted())

    monkeypatch.setattr(old._storage, "write", swept_before_the_end)
    with pytest.raises(Fenced, match="B took over"):
        write(old, 2, token="a")
    assert new.latest_intact(deep=True).step == 2


def test_processes_of_a_holder_share_its_claim(place):
    claim = Vault(place.root).claim("A")
    save(Vault(place.root, claim=pickle.loads(pickle.dumps(claim))), 1)
    Vault(place.root).claim("B")
    with pytest.raises(Fenced):
        save(Vault(place.root, claim=claim), 2)
    save(Vault(place.root), 2)  # without a claim nothing is fenced


def test_a_race_for_the_claim_has_one_winner(place):
    vaults = [Vault(place.root) for _ in range(4)]
    threads = [threading.Thread(target=vault.claim, args=(f"controller {at}",)) for at, vault in enumerate(vaults)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(vault._claim.number for vault in vaults) == [1, 2, 3, 4]
    done, fenced = [], []

    def race(vault, token):
        try:
            save(vault, 5, token=token, value=int(token))
            done.append(int(token))
        except Fenced as error:
            fenced.append(error)

    threads = [threading.Thread(target=race, args=(vault, str(at))) for at, vault in enumerate(vaults)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fenced) == 3 and len(done) == 1
    found = vaults[0].latest_intact(deep=True)
    assert torch.equal(found.read("model/a"), state(done[0])["model/a"])


def test_old_claims_are_pruned(place):
    for number in range(1, 7):
        assert Vault(place.root).claim("A").number == number
    storage = Vault(place.root)._storage
    assert sorted(storage.names("claims")) == ["epoch-00000004", "epoch-00000005", "epoch-00000006"]


def test_a_store_that_ignores_conditions(tmp_path):
    class Careless(LocalStorage):
        def create(self, folder, name, data):
            self.write(folder, name, [data])
            return True

    told = []
    storage = Careless(tmp_path)
    first = claims.take(storage, "A", told.append)
    assert "ignores If-None-Match" in told[0]
    claims.check(storage, first)
    rival = claims.Claim(first.number, "B", "now", "another")
    storage.write("claims", rival.name, [rival.encode()])
    claims.check(storage, rival)
    with pytest.raises(Fenced, match="B took over with epoch 1"):
        claims.check(storage, first)


def test_claims_that_are_gone_or_half_written(tmp_path):
    vault = Vault(tmp_path)
    vault.claim("A")
    (tmp_path / "checkpoints/claims/epoch-00000002").write_text("")
    with pytest.raises(Fenced, match="has not told its name"):
        save(vault, 1)
    for file in (tmp_path / "checkpoints/claims").iterdir():
        file.unlink()
    with pytest.raises(Fenced, match="is gone"):
        save(vault, 1)
    (tmp_path / "blocked").write_text("")
    with pytest.raises(CheckpointError, match="cannot be"):
        Vault(tmp_path / "blocked").claim("A")
