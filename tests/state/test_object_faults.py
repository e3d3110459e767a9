"""What networks and stores do to an object store's clients; behind a proxy of ours, before a real store."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from tests.state.saved import Bucket, save, state, write
from tests.support.faulty_proxy import Fault
from tests.support.object_stores import BUCKET

from planaria.state import s3_client
from planaria.state.boxes import Box
from planaria.state.errors import CheckpointError, StorageUnavailable
from planaria.state.object_storage import ObjectStorage, split_url
from planaria.state.retry import RetryPolicy
from planaria.state.s3_client import Timeouts
from planaria.state.vault import Vault
from planaria.state.writer import Piece

QUICK = RetryPolicy(attempts=4, first_s=0.02, longest_s=0.1)
PART = 5 << 20


def vault_at(url, problems=None, **options):
    storage = ObjectStorage(f"{url}/checkpoints", QUICK, Timeouts(2, 1.0), part_bytes=PART)
    return Vault(url, on_problem=None if problems is None else problems.append, storage=storage, **options)


def big_pieces(mebibytes=22):
    data = torch.arange(mebibytes << 18, dtype=torch.int32)
    return [Piece("w", tuple(data.shape), Box.whole(tuple(data.shape)), data)]


PASSING = {
    "busy at a shard": Fault("status", "PUT .*shard", times=3),
    "busy at the manifest": Fault("status", "PUT .*manifest", times=3),
    "broken at a listing": Fault("status", "GET .*list-type", times=3, status=500, code="InternalError"),
    "throttled at reading": Fault("status", "GET .*shard", times=3, status=429, code="TooManyRequestsException"),
    "refused with no time": Fault("status", "PUT", times=2, status=400, code="RequestTimeout"),
    "reset before an answer": Fault("reset", "PUT .*shard", times=2),
    "reset in mid-answer": Fault("reset", "GET .*shard", times=3, after=20),
    "answer cut short": Fault("short", "GET .*manifest", times=3, after=100),
    "listing cut short": Fault("short", "GET .*list-type", times=2, after=150),
    "reset in mid-request": Fault("cut", "PUT .*shard", times=2, after=100),
    "silence before an answer": Fault("stall", "PUT .*shard"),
    "silence in mid-answer": Fault("stall", "GET .*shard", after=30),
    "shard written, answer lost": Fault("lose", "PUT .*shard", times=2),
    "manifest written, answer lost": Fault("lose", "PUT .*manifest", times=1),
    "removal done, answer lost": Fault("lose", "DELETE", times=2),
}


@pytest.mark.parametrize("case", PASSING)
def test_what_passes_is_ridden_out(real_store, proxy, url, case):
    fault, problems = PASSING[case], []
    vault = vault_at(url, problems, keep_last=1)
    save(vault, 1)
    fault.hits = 0
    proxy.faults.append(fault)
    save(vault, 2)
    found = vault.latest_intact(deep=True)
    assert found.step == 2 and not problems and fault.hits == fault.times
    assert torch.equal(found.read("model/b"), state(2)["model/b"])
    assert Bucket(real_store, url).names() == ["step-00000002"]


def test_replaced_manifest_written_but_the_answer_lost(real_store, proxy, url):
    vault = vault_at(url)
    save(vault, 1)
    proxy.faults.append(Fault("lose", r"PUT .*/manifest\.json"))
    save(vault, 1, token="again", value=5)
    assert torch.equal(vault.latest_intact(deep=True).read("model/a"), state(5)["model/a"])
    assert Bucket(real_store, url).names() == ["step-00000001"]


def test_a_store_that_stays_down_is_told_and_costs_nothing(real_store, proxy, url):
    problems = []
    vault = vault_at(url, problems)
    save(vault, 1)
    proxy.faults.append(Fault("status", times=10**6))
    with pytest.raises(StorageUnavailable, match=rf"{url}.*after 4 tries.*SlowDown.*AWS_ENDPOINT_URL") as caught:
        save(vault, 2)
    assert "secret" not in str(caught.value)
    for look in (vault.latest_intact, vault.list):
        with pytest.raises(StorageUnavailable):
            look()
    proxy.faults.clear()
    assert vault.latest_intact().step == 1 and not problems
    proxy.faults.append(Fault("status", "GET .*shard", times=10**6))
    with pytest.raises(StorageUnavailable):  # not: damaged, take an older one
        vault.latest_intact()
    proxy.faults.clear()
    save(vault, 2, token="next")
    assert Bucket(real_store, url).names() == ["step-00000001", "step-00000002"]


def test_a_manifest_whose_fate_is_unknown_keeps_its_shards(real_store, proxy, url):
    vault = vault_at(url)
    # Put, answer lost; and no later try, nor a look at it, gets through.
    proxy.faults += [Fault("lose", "PUT .*manifest"), Fault("status", r"/manifest\.json", times=10**6)]
    with pytest.raises(StorageUnavailable):
        save(vault, 1)
    proxy.faults.clear()
    assert vault_at(url).latest_intact(deep=True).step == 1


def test_multipart(real_store, proxy, url, monkeypatch):
    monkeypatch.setattr(s3_client, "RANGE_BYTES", 3 << 20)
    vault = vault_at(url)
    proxy.faults += [
        Fault("status", "PUT .*partNumber=2"),
        Fault("cut", "PUT .*partNumber=3", after=1 << 20),
        Fault("lose", "POST .*uploadId"),
        Fault("reset", "GET .*shard", times=3, after=1 << 20),
    ]
    pieces = big_pieces()
    vault.writer(1, "t").commit(vault.writer(1, "t").write_shard(0, pieces), {})
    assert torch.equal(vault.latest_intact().read("w"), pieces[0].data)
    assert sum("partNumber" in line for line in proxy.seen) == 5 + 2
    assert all(fault.hits for fault in proxy.faults)
    assert not real_store.uploads(url.removeprefix(f"s3://{BUCKET}/"))


def test_a_failed_multipart_upload_is_aborted(real_store, proxy, url):
    vault = vault_at(url)
    proxy.faults.append(Fault("status", "PUT .*partNumber=3", times=99))
    with pytest.raises(StorageUnavailable, match="shard-00000-t-"):
        vault.writer(1, "t").write_shard(0, big_pieces())
    assert Bucket(real_store, url).names() == []


WRITER = """
import sys, torch
from planaria.state.boxes import Box
from planaria.state.object_storage import ObjectStorage
from planaria.state.vault import Vault
from planaria.state.writer import Piece
vault = Vault("", storage=ObjectStorage(sys.argv[1] + "/checkpoints", part_bytes=5 << 20))
small, data = torch.tensor(1.0), torch.zeros(22 << 18, dtype=torch.int32)
vault.writer(2, "dead").write_shard(0, [Piece("s", (), Box.whole(()), small)])
vault.writer(2, "dead").write_shard(1, [Piece("w", tuple(data.shape), Box.whole(tuple(data.shape)), data)])
"""


def test_a_writer_that_is_killed_in_mid_upload(real_store, proxy, url):
    vault, reached = vault_at(url), threading.Event()
    save(vault, 1)
    proxy.faults.append(Fault("stall", "PUT .*partNumber=4"))
    proxy.delay = lambda line: reached.set() if "partNumber=4" in line else None
    writer = subprocess.Popen([sys.executable, "-c", WRITER, url])
    try:
        assert reached.wait(60)
        time.sleep(0.3)
    finally:
        writer.kill()
        writer.wait()
    place = Bucket(real_store, url)
    assert [info.step for info in vault.list()] == [1] and vault.latest_intact(deep=True).step == 1
    assert len(place.names()) == 3  # the checkpoint, an orphaned shard, an unfinished upload
    save(vault, 3, token="next")
    assert place.names() == ["step-00000001", "step-00000003"]


def test_wrong_keys(real_store, url, monkeypatch):
    save(vault_at(url), 1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret-key")
    began = time.monotonic()
    for act in (lambda vault: vault.latest_intact(), lambda vault: save(vault, 2), lambda vault: vault.claim("A")):
        with pytest.raises(StorageUnavailable, match=rf"{url}.*permission denied.*AWS_ACCESS_KEY_ID") as caught:
            act(vault_at(url))
        assert "not-the-secret-key" not in str(caught.value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageUnavailable, match="credentials"):
        vault_at(url).latest_intact()
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StorageUnavailable, match=r"nobody.*AWS_PROFILE"):
        vault_at(url).latest_intact()
    assert time.monotonic() - began < 10  # none of it was tried again


def test_no_such_bucket_and_no_such_store(mock, url, monkeypatch):
    for name, value in mock.environment().items():
        monkeypatch.setenv(name, value)
    for act in (lambda vault: vault.latest_intact(), lambda vault: save(vault, 2)):
        with pytest.raises(StorageUnavailable, match="no such bucket"):
            act(vault_at("s3://planaria-nowhere/run"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageUnavailable, match=r"after 4 tries.*127\.0\.0\.1:9"):
        vault_at(url).latest_intact()


def test_clock_skew_is_named(real_store, url, monkeypatch):
    import datetime

    import botocore.auth

    now = botocore.auth.get_current_datetime
    ahead = datetime.timedelta(hours=2)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *args, **kw: now(*args, **kw) + ahead)
    with pytest.raises(StorageUnavailable, match=r"clock of this machine.*store's.*NTP"):
        vault_at(url).latest_intact()


def test_two_writers_of_one_step_at_the_same_moment(real_store, proxy, url):
    """Unfenced, of different attempts: one of the two is there, whole; the other is told, or was replaced."""
    vaults, meeting, outcomes = [vault_at(url), vault_at(url)], threading.Barrier(2, timeout=20), []
    slices = [write(vault, 1, token, value) for vault, token, value in zip(vaults, "ab", (5, 6), strict=True)]
    proxy.delay = lambda line: meeting.wait() if line.startswith("PUT") and "manifest" in line else None

    def commit(at):
        try:
            vaults[at].writer(1, "ab"[at]).commit(slices[at], {})
            outcomes.append(5 + at)
        except CheckpointError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=commit, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [item for item in outcomes if isinstance(item, int)]
    lost = [item for item in outcomes if isinstance(item, str)]
    assert len(won) == len(lost) == 1 and "another process has published" in lost[0]
    proxy.delay = lambda line: None
    assert torch.equal(vault_at(url).latest_intact(deep=True).read("model/a"), state(won[0])["model/a"])


def test_reading_while_committing(store, url):
    """Readers never see half of anything; what they open may be removed, which is an error and not wrong data."""
    vault, problems = vault_at(url, keep_last=2), []
    save(vault, 1)
    stop, wrong, looks = threading.Event(), [], []

    def watch():
        reader = vault_at(url, problems)
        while not stop.is_set():
            infos, found = reader.list(), reader.latest_intact(deep=True)
            if any(info.intact is False for info in infos) or found is None:
                wrong.append((infos, found))
                return
            value = found.read("model/b")
            looks.append(found.step)
            if not torch.equal(value, torch.full_like(value, float(value[0, 0]))):
                wrong.append(value)

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for step in range(2, 8):
        save(vault, step)
    stop.set()
    for watcher in watchers:
        watcher.join()
    assert not wrong and not problems and looks


def test_fork_and_threads(real_store, url):
    """A child of a fork has no event-loop thread of its parent's, and must not wait for it."""
    import multiprocessing

    vault = vault_at(url)
    save(vault, 1)
    child = multiprocessing.get_context("fork").Process(target=save, args=(vault, 2))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    threads = [threading.Thread(target=save, args=(vault, step)) for step in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert vault.latest_intact(deep=True).step == 4


@pytest.mark.parametrize("wrong", ["s3://", "s3:///x", "gs://b/x", "s3://key:secret@bucket/x", "s3://bucket/x?y=1"])
def test_wrong_urls(wrong):
    with pytest.raises(ValueError, match="expected s3://bucket/prefix") as caught:
        Vault(wrong)
    assert "secret" not in str(caught.value)
    assert split_url("s3://bucket") == ("bucket", "") and split_url("s3://bucket//a/b/") == ("bucket", "a/b")


def test_a_full_store(real_store, proxy, url):
    proxy.faults.append(Fault("status", "PUT .*shard", status=507, code="InsufficientStorage"))
    with pytest.raises(CheckpointError, match=r"no space: \d+ bytes needed, unknown bytes free"):
        save(vault_at(url), 1)
