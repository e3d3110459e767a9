"""What the controller lets Prometheus see: its records, counted, and the state of the job at the moment of a scrape."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from planaria.config import JobConfig
from planaria.control.desk import Desk
from planaria.control.members import Life
from planaria.control.policies.states import FINAL, State
from planaria.metrics.book import Book, Series
from planaria.metrics.catalogue import AXES
from planaria.metrics.collector import registry_of
from planaria.metrics.mirror import RayMirror
from planaria.metrics.server import MetricsServer
from planaria.metrics.tally import RECORDS, Tally

READ_TRIES = 5
SHORT = 8
"""Digits of a node's name that are shown, as in events and tables."""


class Exporter:
    """The job's metrics, from :meth:`begin` to :meth:`close`. Nothing that goes wrong here touches the job."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._book = Book()
        self._tally = Tally(self._book)
        self._began = time.time()
        self._server: MetricsServer | None = None
        self._mirror: RayMirror | None = None
        desk.record.listener = self._take

    def begin(self, began: float, sizes: Mapping[str, int] | None) -> None:
        """Serve from now on.

        Args:
            began: when the job began, as ``time.time()``.
            sizes: where the rows of this run begin in its records, if an earlier life of the controller has written
                some: they are counted again, so that nothing goes back.
        """
        self._began, record = began, self._desk.record
        if sizes is not None:
            with contextlib.suppress(Exception):
                self._tally.replay({name: record.rows(name, sizes.get(name, 0)) for name in RECORDS})
        settings, job = self._desk.job.metrics, self._desk.job
        if not settings.enabled:
            return
        try:
            self._serve(job)
        except OSError as error:
            record.event("metrics_off", f"no metrics can be read of this job: {error}", problem=str(error))
        if settings.ray_mirror:
            with contextlib.suppress(Exception):
                self._mirror = RayMirror(job.name, self.read)

    def close(self) -> None:
        """The job is over."""
        with contextlib.suppress(Exception):
            if self._mirror is not None:
                self._mirror.close()
            if self._server is not None:
                self._server.close()

    def read(self) -> Series:
        """All values at this moment; from any thread."""
        for attempt in range(READ_TRIES):
            try:
                return self._book.values() | live(self._desk, self._tally.checkpoint_at or self._began, self._began)
            except RuntimeError:  # the controller's thread has changed what was being looked through
                if attempt == READ_TRIES - 1:
                    raise
        raise AssertionError

    def _serve(self, job: JobConfig) -> None:
        host, settings = self._desk.host, job.metrics
        registry = registry_of(job.name, self.read)
        self._server = server = MetricsServer(registry, job.name, settings.host or host, settings.port, host)
        text = f"metrics at http://{server.address}/metrics"
        if settings.port not in (0, server.port):
            text += f", since port {settings.port} is taken"
        self._desk.record.event("metrics", text, address=server.address, port=server.port)

    def _take(self, name: str, row: Mapping[str, Any]) -> None:
        with contextlib.suppress(Exception):
            self._tally.take(name, row)


def live(desk: Desk, saved_at: float, began: float) -> Series:
    """What is no count but a state.

    Args:
        desk: the controller's; read only.
        saved_at: when the newest checkpoint became durable, or else the job began, as ``time.time()``.
        began: when the job began, as ``time.time()``.
    """
    book, now = Book(zeros=False), time.time()
    book.set("run_active", float(desk.state not in FINAL))
    for state in State:
        book.set("state", float(desk.state is state), state=state.value)
    book.set("start_timestamp_seconds", began)
    book.set("scrape_timestamp_seconds", now)
    book.set("steps_planned", desk.job.train.steps)
    book.set("tokens_per_second", desk.view.tokens_per_s)
    book.set("checkpoint_age_seconds", max(0.0, now - saved_at))
    if desk.view.checkpoint_step is not None:
        book.set("checkpoint_step", desk.view.checkpoint_step)
    for node, used in list(desk.view.memory.items()):
        book.set("snapshot_bytes", used, node=node[:SHORT])
    for node, meters in list(desk.view.energy.items()):
        for meter, joules in meters.items():
            book.inc("node_energy_joules_total", joules, node=node[:SHORT], meter=meter)
    _account(desk, book)
    _members(desk, book)
    _generation(desk, book)
    return book.values()


def _account(desk: Desk, book: Book) -> None:
    account = desk.chronicle.account.view(time.monotonic())
    book.set("goodput_ratio", account.pop("goodput"))
    account.pop("wall")
    for name, seconds in account.items():
        book.set("goodput_seconds", seconds, **{"class": name})


def _members(desk: Desk, book: Book) -> None:
    ready = [member.ident for member in desk.staff.workers.of(Life.READY)]
    training = set(desk.last.pending) if desk.last is not None else set()
    book.set("workers", sum(1 for _ in desk.staff.workers.of(Life.STARTING)), state="starting")
    book.set("workers", sum(ident in training for ident in ready), state="training")
    book.set("workers", sum(ident not in training for ident in ready), state="spare")
    book.set("workers_wanted", desk.job.elastic.max_workers)
    book.set("loaders", sum(1 for _ in desk.staff.loaders.of(Life.READY)))
    ground, now = desk.staff.ground, time.monotonic()
    nodes = list(ground.capacity)
    quarantined = {node for node in nodes if ground.trust.held(node, now)}
    leaving = {node for node in nodes if node in ground.leaving} - quarantined
    book.set("nodes", len(nodes) - len(quarantined) - len(leaving), state="staying")
    book.set("nodes", len(leaving), state="leaving")
    book.set("nodes", len(quarantined), state="quarantined")


def _generation(desk: Desk, book: Book) -> None:
    generation = desk.last
    if generation is None:
        return
    book.set("generation", generation.number)
    book.set("layout_info", 1.0, layout=str(generation.plan.layout))
    for axis in AXES:
        book.set("layout_degree", getattr(generation.plan.layout, axis), axis=axis)
    training = set(generation.pending)
    readings = {
        "rank_step_seconds": "step_s",
        "rank_compute_seconds": "compute_s",
        "rank_data_wait_seconds": "data_wait_s",
        "rank_loader_queue": "queue",
        "rank_last_step": "step",
    }
    for rank, report in list(generation.reports.items()):
        if generation.members[rank] not in training:
            continue  # it has left or is lost: its series end
        place = {"rank": str(rank), "node": generation.nodes[rank][:SHORT]}
        for name, key in readings.items():
            if report.get(key) is not None:
                book.set(name, report[key], **place)
        for kind, key in (("resident", "rss_bytes"), ("device", "device_bytes")):
            if key in report:
                book.set("rank_memory_bytes", report[key], kind=kind, **place)
