"""The server answers scrapes whatever other clients do, and never holds its owner up."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from planaria.metrics import server as serving
from planaria.metrics.book import Book, Series
from planaria.metrics.collector import registry_of
from planaria.metrics.server import MetricsServer, PortsTaken

HOST = "127.0.0.1"


def filled() -> Series:
    book = Book()
    book.inc("steps_total", 3)
    book.set("rank_step_seconds", 0.5, rank="0", node="n1")
    book.observe("step_seconds", 0.3, phase="whole")
    book.observe("step_seconds", 500.0, phase="whole")
    return book.values()


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    found = MetricsServer(registry_of("demo", filled), "demo", HOST, 0)
    yield found
    found.close()


def get(server: MetricsServer, path: str, accept: str = "") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=10)
    try:
        connection.request("GET", path, headers={"Accept": accept})
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def test_a_scrape_shows_counters_gauges_and_cumulative_buckets(server: MetricsServer) -> None:
    status, kind, text = get(server, "/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    families = {family.name: family for family in parsed(text)}
    (steps,) = families["planaria_steps"].samples
    assert (steps.name, steps.value, steps.labels) == ("planaria_steps_total", 3.0, {"run": "demo"})
    (rank,) = families["planaria_rank_step_seconds"].samples
    assert rank.labels == {"run": "demo", "rank": "0", "node": "n1"}
    whole = [s for s in families["planaria_step_seconds"].samples if s.labels["phase"] == "whole"]
    buckets = {s.labels["le"]: s.value for s in whole if s.name.endswith("_bucket")}
    assert buckets["0.25"] == 0
    assert buckets["0.5"] == buckets["120"] == 1
    assert buckets["+Inf"] == next(s.value for s in whole if s.name.endswith("_count")) == 2
    assert "python_gc" not in text


def test_openmetrics_is_spoken_to_who_asks_for_it(server: MetricsServer) -> None:
    _, kind, text = get(server, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert "openmetrics" in kind
    assert text.endswith("# EOF\n")


def test_it_is_found_by_http_service_discovery_and_by_a_probe(server: MetricsServer) -> None:
    status, kind, text = get(server, "/sd")
    assert (status, kind) == (200, "application/json")
    assert json.loads(text) == [{"targets": [f"{HOST}:{server.port}"], "labels": {"__meta_planaria_run": "demo"}}]
    assert get(server, "/healthz")[::2] == (200, "ok\n")
    assert get(server, "/nonsense")[0] == 404


def test_clients_that_say_nothing_hold_nobody_up(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        for _ in range(serving.CLIENTS - 1):
            stack.enter_context(socket.create_connection((HOST, server.port)))
        began = time.monotonic()
        assert get(server, "/metrics")[0] == 200
        assert time.monotonic() - began < 2.0
        stack.enter_context(socket.create_connection((HOST, server.port)))
        # The places are taken: who comes now is turned away at once, and does not wait.
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            try:
                assert get(server, "/healthz")[0] == 200
            except (ConnectionError, http.client.HTTPException):
                break
            time.sleep(0.01)
        else:
            pytest.fail("more clients than places were served")
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 2.0, "closing does not wait for clients"


def test_a_client_that_is_silent_too_long_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving._Handler, "timeout", 0.1)
    server = MetricsServer(registry_of("demo", filled), "demo", HOST, 0)
    try:
        with socket.create_connection((HOST, server.port), timeout=5.0) as silent:
            silent.sendall(b"GET /metr")
            assert silent.recv(1) == b""
    finally:
        server.close()


def test_values_that_cannot_be_read_are_an_error_for_the_client_alone() -> None:
    def broken() -> Series:
        raise RuntimeError("changed while it was read")

    server = MetricsServer(registry_of("demo", broken), "demo", HOST, 0)
    try:
        status, _, text = get(server, "/metrics")
        assert status == 500
        assert "changed while it was read" in text
        assert get(server, "/healthz")[0] == 200
    finally:
        server.close()


def test_a_port_that_is_taken_gives_way_to_the_next(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    other = MetricsServer(registry_of("demo", filled), "demo", HOST, server.port)
    assert server.port < other.port < server.port + serving.TRIES
    other.close()
    monkeypatch.setattr(serving, "TRIES", 1)
    with pytest.raises(PortsTaken, match=rf"ports {server.port} to {server.port} .* set metrics\.port"):
        MetricsServer(registry_of("demo", filled), "demo", HOST, server.port)


def test_the_loopback_serves_too() -> None:
    server = MetricsServer(registry_of("demo", filled), "demo", "127.0.0.2", 0)
    try:
        assert server.address == f"127.0.0.2:{server.port}"
        for host in ("127.0.0.2", "127.0.0.1"):
            with urllib.request.urlopen(f"http://{host}:{server.port}/healthz", timeout=5) as answer:
                assert answer.read() == b"ok\n"
    finally:
        server.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=2)
