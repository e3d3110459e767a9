"""Trust in nodes: rest after a loss, quarantine after many, and what survives a change of name."""

from __future__ import annotations

from planaria.control.nodes import LONGEST_REST_S, NodeTrust
from planaria.control.policies.quarantine import LONGEST_S, WINDOW_S, Blame, Fault, Quarantine, Tolerate

PLACES = {"a": 2, "b": 2, "c": 2}


def condemned(trust: NodeTrust, node: str = "a", now: float = 0.0) -> Quarantine | Tolerate | None:
    trust.blame(node, Blame(now, Fault.HANG, "worker-3 stood still"))
    return trust.decide(node, PLACES, 3, 2, now)


def test_rest_grows_until_a_worker_comes_up():
    trust = NodeTrust()
    assert trust.usable("a", 0)
    trust.failed("a", 0)
    assert not trust.usable("a", 0.9) and trust.usable("a", 1.0)
    trust.failed("a", 10)
    assert not trust.usable("a", 11.9) and trust.usable("a", 12)
    assert trust.suspects() == {"a"}
    for _ in range(2000):
        trust.failed("a", 20)
    assert trust.usable("a", 20 + LONGEST_REST_S)
    trust.proved("a")
    assert trust.suspects() == set() and trust.usable("a", 20)


def test_failures_add_up_although_workers_come_up_between_them():
    trust = NodeTrust()
    for at in (0.0, 50.0, 100.0):
        trust.failed("a", at, "worker lost")
        assert trust.decide("a", PLACES, 3, 2, at) is None or at == 100
        trust.proved("a")
    assert not trust.usable("a", 110)
    assert trust.usable("b", 110)
    (row,) = trust.listing(110)
    assert (row["node"], row["quarantined"], row["times"], row["seconds_left"]) == ("a", True, 1, 50.0)
    assert row["reason"].startswith("3 failures within")


def test_nodes_in_quarantine_are_no_places_that_are_left():
    trust = NodeTrust()
    assert isinstance(condemned(trust, "a"), Quarantine)
    assert isinstance(condemned(trust, "b", 1), Quarantine)
    found = condemned(trust, "c", 2)
    assert found == Tolerate("c", "worker-3 stood still", 0)
    assert trust.usable("c", 2)
    assert [(row["node"], row["quarantined"]) for row in trust.listing(2)] == [("a", True), ("b", True), ("c", False)]
    assert trust.listing(2)[2]["blames"] == [{"fault": "hang", "reason": "worker-3 stood still", "seconds_ago": 0.0}]


def test_nobody_is_condemned_without_a_blame():
    assert NodeTrust().decide("a", PLACES, 3, 2, 0) is None


def test_a_machine_keeps_its_record_under_a_new_name():
    trust = NodeTrust()
    assert not trust.arrived("a", "10.0.0.1", 0)
    assert isinstance(condemned(trust), Quarantine)
    trust.left("a", 5)
    assert trust.usable("a", 5)  # the name alone means nothing
    assert trust.arrived("a2", "10.0.0.1", 10)
    assert not trust.usable("a2", 10)
    assert not trust.arrived("b", "10.0.0.2", 10)


def test_one_failure_is_forgotten_with_the_name():
    trust = NodeTrust()
    trust.arrived("a", "10.0.0.1", 0)
    trust.failed("a", 1)
    trust.left("a", 2)
    assert not trust.arrived("a2", "10.0.0.1", 3)
    assert trust.listing(3) == [] and trust.usable("a2", 3)


def test_an_address_of_several_nodes_names_no_machine():
    trust = NodeTrust()
    trust.arrived("a", "127.0.0.1", 0)
    trust.arrived("b", "127.0.0.1", 0)
    condemned(trust)
    trust.left("a", 5)
    trust.left("b", 5)
    assert not trust.arrived("c", "127.0.0.1", 10)


def test_departed_machines_are_forgotten_in_the_end():
    trust = NodeTrust()
    for number in range(100):
        node, now = f"n{number}", number * 100.0
        trust.arrived(node, f"10.0.0.{number}", now)
        trust.failed(node, now)
        trust.left(node, now)
    assert 1 < len(trust._departed) <= (LONGEST_S + WINDOW_S) / 100 + 1
