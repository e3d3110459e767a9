"""A real Prometheus watches a real run that loses nodes: every query of dashboards and rules has an answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.dashboards import queries
from tests.support import prometheus
from tests.support.forms import long_form
from tests.support.prometheus import Prometheus
from tests.support.runs import ENDLESS, Run, job, node_of_worker, train_with

from planaria.runtime.local_cluster import LocalCluster

QUICK = {", 300)": ", 5)", "for: 1m": "for: 1s"}
"""The patience with a stalled run, which this test drives into a stall: seconds instead of minutes."""

EMPTY_HERE = {
    "Training: Loss scale": "the job trains in fp32",
    "mark Planned change": "nothing was planned",
    "Recovery: Recoveries and planned changes planned change": "nothing was planned",
    "Data: Bad samples": "no sample is damaged",
    "Efficiency and energy: Power": "not every machine has a meter",
    "Efficiency and energy: Energy per token": "not every machine has a meter",
}
"""What this run need not have data for, by a part of the panel's name, and why. Alerts need not fire."""


@long_form
@pytest.mark.skipif(prometheus.MISSING is not None, reason=str(prometheus.MISSING))
def test_every_query_has_an_answer_and_a_stall_is_noticed(tmp_path: Path) -> None:
    """Three nodes; one dies, and the job goes on; another dies, and it has to wait until one joins."""
    seen: dict[str, float] = {}
    with LocalCluster(3) as cluster, Prometheus(tmp_path / "prometheus", queries.RULES, QUICK) as server:
        config = job(
            tmp_path,
            train={"steps": ENDLESS, "global_batch": 12, "micro_batch": 4},
            elastic={"min_workers": 2, "max_workers": 3, "wait_s": 120.0},
            metrics={"port": 0},
        )

        def advance(run: Run) -> bool:
            """The next thing that happens, once the one before has been seen to the end; whether all has."""
            now, generations = time.time(), run.of("generation")
            since = now - max(seen.values(), default=now)
            match len(seen):
                case 0 if run.of("metrics"):
                    server.scrape(run.of("metrics")[-1]["address"])
                    seen["scraped"] = now
                case 1 | 2 if since > 10 and run.trains_in(len(seen), 20):  # long enough to be scraped
                    cluster.kill_node(node_of_worker(cluster, run, generations[-1]["workers"][-1]))
                    seen[f"killed {len(seen)}"] = now
                case 3 if "PlanariaStalled" in server.firing():
                    seen["stalled"] = now
                    cluster.add_node()
                case 4 if run.trains_in(3) and "PlanariaStalled" not in server.firing():
                    seen["goes on"] = now
            if len(seen) == 5 and since > 10:
                seen["over"] = now
            return "over" in seen

        train_with(config, {}, until=advance)
        begin, end = seen["scraped"], seen["over"]
        assert server.problems() == []
        for query in queries.everything():
            found = server.over(query.expr, begin, end) if query.ranged else server.now(query.expr, end)
            may_be_empty = query.place.startswith("rule Planaria") or any(part in query.place for part in EMPTY_HERE)
            assert found or may_be_empty, f"{query.place} has no data: {query.expr}"
        nodes = {event["member"]: event["node"][:8] for event in Run(tmp_path).of("joined")}
        worked = [{nodes[member] for member in event["workers"]} for event in Run(tmp_path).of("generation")]
        assert _nodes(server, f"count_over_time(planaria_rank_step_seconds[{int(end - begin)}s])", end) == set().union(
            *worked
        )
        assert _nodes(server, "planaria_rank_step_seconds", end) == worked[-1], "the series of lost nodes end"
        counters = server.now('{__name__=~"planaria_.*(_total|_count|_bucket)"}', end)
        for name in {sample["metric"]["__name__"] for sample in counters}:
            falls = server.now(f"resets({name}[{int(end - begin)}s]) > 0", end)
            assert not falls, falls


def _nodes(server: Prometheus, expr: str, at: float) -> set[str]:
    return {sample["metric"]["node"] for sample in server.now(expr, at)}
