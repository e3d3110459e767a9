"""Traces of faults, reproducible by their seed.

``random`` draws kind, place and time of every fault independently. ``spot`` has the shape of what fleets of spot
machines report: waves in which one zone is reclaimed with two minutes' notice and comes back later, whole racks that
lose power, a few machines that come and go all day, and a thin drizzle of single faults.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ZONES = 10
RACK = 16
"""Nodes that lose power together."""
RESTLESS = 2
"""Machines that come and go all the time."""
NOTICE_S = 120.0


@dataclass(frozen=True)
class Fault:
    """Something happens to a machine; whoever names one that is gone, or is there already, means nothing."""

    at: float
    """Seconds since the beginning."""
    kind: str
    """``lost``, ``back``, ``notice``, ``crash`` (one process), ``stuck`` (one process), ``slow``, ``well``, ``wrong``
    (its numbers)."""
    machine: int


def trace(name: str, machines: int, faults: int, seconds: float, seed: int) -> list[Fault]:
    """About ``faults`` faults (and the returns that belong to them), in order."""
    chosen = {"random": _random, "spot": _spot}[name](machines, faults, seconds, random.Random(seed))
    return sorted((fault for fault in chosen if fault.at < seconds), key=lambda fault: (fault.at, fault.machine))


def _random(machines: int, faults: int, seconds: float, rng: random.Random) -> list[Fault]:
    kinds = {"lost": 6, "notice": 4, "crash": 5, "stuck": 3, "slow": 3, "wrong": 1}
    found = []
    for kind in rng.choices(list(kinds), list(kinds.values()), k=faults):
        at, machine = rng.uniform(0, seconds), rng.randrange(machines)
        found.append(Fault(at, kind, machine))
        found += _aftermath(found[-1], rng)
    return found


def _aftermath(fault: Fault, rng: random.Random) -> list[Fault]:
    match fault.kind:
        case "lost":
            return [Fault(fault.at + rng.expovariate(1 / 60), "back", fault.machine)]
        case "notice":
            gone = fault.at + NOTICE_S
            return [Fault(gone, "lost", fault.machine), Fault(gone + rng.expovariate(1 / 60), "back", fault.machine)]
        case "slow":
            return [Fault(fault.at + rng.expovariate(1 / 300), "well", fault.machine)]
    return []


def _spot(machines: int, faults: int, seconds: float, rng: random.Random) -> list[Fault]:
    found: list[Fault] = []
    zones = min(ZONES, machines)
    zone = machines // zones
    size = max(1, zone // 10)
    for _ in range(max(1, round(0.5 * faults / size))):  # waves: a tenth of a zone, staggered over ten seconds
        at, first = rng.uniform(0, seconds), rng.randrange(zones) * zone
        for machine in rng.sample(range(first, first + zone), size):
            found.append(Fault(at + rng.uniform(0, 10), "notice", machine))
            found += _aftermath(found[-1], rng)
    for _ in range(max(1, round(0.2 * faults / RACK))):  # racks
        at, first = rng.uniform(0, seconds), rng.randrange(machines)
        for machine in range(first, min(first + RACK, machines)):
            found.append(Fault(at + rng.uniform(0, 0.2), "lost", machine))
            found += _aftermath(found[-1], rng)
    for machine in rng.sample(range(machines), min(RESTLESS, machines)):  # machines that come and go
        period = rng.uniform(60, 180)
        at = rng.uniform(0, period)
        while at < seconds:
            found += [Fault(at, "lost", machine), Fault(at + period / 2, "back", machine)]
            at += period
    return found + _random(machines, max(1, round(0.3 * faults)), seconds, rng)
