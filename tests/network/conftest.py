"""One cluster over a network of namespaces for all tests here; mended after each."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.network.cluster import NetworkCluster
from tests.support.netns import require

WORKERS = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/network" in str(item.path):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.xdist_group("network"))  # one cluster for all of them


@pytest.fixture(scope="module")
def whole_cluster() -> Iterator[NetworkCluster]:
    require()
    temporary = set(Path(tempfile.gettempdir()).glob("pln*"))
    before = _namespaces()
    with NetworkCluster(WORKERS) as cluster:
        yield cluster
    assert _namespaces() <= before
    assert set(Path(tempfile.gettempdir()).glob("pln*")) <= temporary


@pytest.fixture
def cluster(whole_cluster: NetworkCluster) -> Iterator[NetworkCluster]:
    yield whole_cluster
    whole_cluster.mend()


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}
