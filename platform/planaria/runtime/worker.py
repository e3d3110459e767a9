"""The training worker: one living process that plays a rank in one generation after another."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import psutil
import ray
import torch

from planaria.config import JobConfig, vault_root
from planaria.data.batches import Batches
from planaria.engine.initial import build, first_state
from planaria.engine.make import make_engine
from planaria.engine.protocol import Engine
from planaria.engine.zero.library import load as load_deepspeed
from planaria.memory.recall import MemorySource, MemoryState
from planaria.memory.snapshots import Snapshots
from planaria.memory.wire import KeeperAddress, KeeperLink
from planaria.recipe import MetaRecipe, Recipe
from planaria.runtime.beacon import Beacon, BeaconAddress
from planaria.runtime.feed import LoaderFeed
from planaria.runtime.groups import Groups, Rendezvous
from planaria.runtime.hello import Hello
from planaria.runtime.keeping import Keeping, describe
from planaria.runtime.loop import Report, Requests, train
from planaria.runtime.meters import Meters, bytes_sent, usage
from planaria.runtime.notices import Notices
from planaria.runtime.outcome import End, Outcome
from planaria.runtime.progress import Progress
from planaria.runtime.stacks import stacks
from planaria.state.vault import Vault


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is told once, at its birth."""

    ident: str
    beacon: BeaconAddress
    recipe: Recipe
    job: JobConfig
    run_dir: str
    use_gpu: bool
    standby: bool = False
    """Whether it waits for a place, and has no device until then."""


@dataclass(frozen=True)
class Order:
    """What a worker is told for one generation."""

    rendezvous: Rendezvous
    token: str
    """Unique name of this generation's checkpoint attempts."""
    loaders: Sequence[Any]
    nodes: tuple[str, ...]
    """Node of every rank."""
    keeper: KeeperAddress
    """Of this worker's node."""
    step: int
    """Steps done in the state to start from."""
    source: MemorySource | int | None
    """Where that state is: in the nodes' memory, or the checkpoint of that step; None: the initial weights."""
    durable: int | None
    """Step that durable storage holds, if it is that of ``source``."""
    strict: bool
    """Whether to fail where there is too little memory for all snapshots."""
    skips: tuple[tuple[int, int], ...] = ()
    """Windows of the data that are left out, as (first, last) batch; see :mod:`planaria.data.skips`."""
    gpus: str = ""
    """Devices that a standby takes over from the worker whose place it has."""


class Worker:
    """Body of the Ray actor.

    ``run`` occupies the training thread for the length of a generation; the other methods answer meanwhile.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.device = torch.device("cuda", 0) if spec.use_gpu else torch.device("cpu")
        if self.device.type == "cuda":
            # The abort of a broken communicator is ours to order; torch's watchdog must not end the process.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
            if not spec.standby:
                torch.cuda.set_device(self.device)
        bind_gloo(ray.util.get_node_ip_address())
        self._groups: Groups | None = None
        self._batches = Batches(spec.recipe, spec.job)
        self._feed: LoaderFeed | None = None
        self._loaders: tuple[int, Sequence[Any]] = (0, ())
        self._aborted_upto = self._generation = 0
        self._requests: dict[int, Requests] = {}
        self._lock = threading.Lock()
        warm_up(spec)
        # A process that the controller gave up, and that it could not reach to end it, must not train on; one whose
        # controller is gone trains on until that returns.
        self._beacon = Beacon(spec.beacon, spec.ident, lease_s=spec.job.elastic.orphan_s)
        self._notices = Notices(lambda why: self._beacon.send({"t": "notice", "why": why}))
        self._training: tuple[int, int, Progress] | None = None

    def ready(self) -> Hello:
        """Who this is, once the process has imported everything that training needs."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "") if self.spec.use_gpu else ""
        return Hello(os.getpid(), ray.get_runtime_context().get_node_id(), generation=self._generation, gpus=gpus)

    def adopt(self, beacon: BeaconAddress) -> Hello:
        """Belong to the controller at ``beacon``, which has returned; the generation that runs goes on."""
        self._beacon.adopt(beacon)
        return self.ready()

    def run(self, order: Order) -> None:
        """Play one generation from forming its groups to its end; never raises.

        How it ended is told over the line to the controller, after all that was told before: the caller may be
        gone by then.
        """
        generation = self._generation = order.rendezvous.generation
        if self.spec.standby and self.device.type == "cuda" and not torch.cuda.is_initialized():
            os.environ["CUDA_VISIBLE_DEVICES"] = order.gpus
            torch.cuda.set_device(self.device)
        outcome = Outcome(End.FAILED)
        groups = Groups(order.rendezvous, self.device)
        with self._lock:
            self._groups = groups
            requests = self._requests.setdefault(generation, Requests())
            if generation <= self._aborted_upto:
                groups.interrupt()  # the abort came before the order: forming ends at once
        try:
            self._play(order, groups, outcome, requests)
        except BaseException as error:
            outcome.kind, outcome.error = type(error).__name__, _first_lines(error)
            outcome.trace = traceback.format_exc()
            outcome.end = End.ABORTED if groups.aborted else End.FAILED
            # A traceback keeps the frames, and these the model, alive: the groups could not be torn down.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
        self._close_feed()
        groups.close()
        with self._lock:
            self._groups = None
            self._requests.pop(generation, None)
        rank = order.rendezvous.rank
        self._beacon.send({"t": "end", "gen": generation, "rank": rank, "outcome": asdict(outcome)})

    def _play(self, order: Order, groups: Groups, outcome: Outcome, requests: Requests) -> None:
        rendezvous = order.rendezvous

        def report(message: dict[str, Any]) -> None:
            self._beacon.send(message | {"gen": rendezvous.generation, "rank": rendezvous.rank})

        progress = Progress(report, order.step)
        self._training = (threading.get_ident(), rendezvous.generation, progress)
        try:
            self._train(order, groups, outcome, requests, report, progress)
        finally:
            self._training = None
            progress.close()

    def _train(
        self,
        order: Order,
        groups: Groups,
        outcome: Outcome,
        requests: Requests,
        report: Report,
        progress: Progress,
    ) -> None:
        spec, rendezvous = self.spec, order.rendezvous
        feed = self._open_feed(order, groups)
        feed.ask(order.step)  # the loaders build the first batch while the groups form and the state arrives
        clock = time.monotonic()
        mesh = groups.form()
        clock = _lap(outcome, "form", clock)
        progress.at(order.step, "building")
        engine = make_engine(spec.recipe, spec.job, rendezvous.layout, mesh, self.device)
        clock = _lap(outcome, "build", clock)
        progress.at(order.step, "restoring")
        self._restore(engine, order)
        _lap(outcome, "restore", clock)
        report({"t": "ready", "step": engine.step_done, "phases": outcome.phases})
        meters = Meters(progress.at, lambda: usage(self.device) | {"queue": feed.ready()}, partial(bytes_sent, engine))
        keeping = self._open_keeping(engine, order, report, lambda: groups.aborted, meters.at)
        try:
            outcome.end = train(engine, feed, keeping, spec.job, requests, report, meters.at, meters.take)
        finally:
            outcome.step = engine.step_done
            keeping.close()

    def _restore(self, engine: Engine, order: Order) -> None:
        spec = self.spec
        if isinstance(order.source, MemorySource):
            node = order.nodes[order.rendezvous.rank]
            engine.load(MemoryState(order.source, node, order.rendezvous.rank, engine.wanted()))
        elif order.source is None:
            engine.load(first_state(spec.recipe, spec.job))
        else:
            with Vault(vault_root(spec.job, spec.run_dir)).at(order.source) as checkpoint:
                engine.load(checkpoint)

    def _open_keeping(
        self,
        engine: Engine,
        order: Order,
        report: Report,
        interrupted: Callable[[], bool],
        at: Callable[[int, str], None],
    ) -> Keeping:
        rank = order.rendezvous.rank
        table = describe(engine, rank, order.nodes)
        snapshots = Snapshots(
            KeeperLink(order.keeper), order.rendezvous.generation, self.spec.ident, table, self.device, order.strict
        )
        return Keeping(snapshots, table, engine, self.spec.job, order.token, order.durable, report, interrupted, at=at)

    def _open_feed(self, order: Order, groups: Groups) -> LoaderFeed:
        rendezvous = order.rendezvous
        with self._lock:  # the loaders may have changed since the order, while the groups were formed
            generation, changed = self._loaders
            loaders = changed if generation == rendezvous.generation else order.loaders
            feed = LoaderFeed(
                self.spec.job,
                rendezvous.layout,
                rendezvous.rank,
                loaders,
                self._batches,
                lambda: groups.aborted,
                order.skips,
            )
            self._feed = feed
        return feed

    def _close_feed(self) -> None:
        with self._lock:
            feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def stacks(self) -> str:
        """Where this rank is, and the stacks of all Python threads of this process, the training thread first.

        Answers while the training thread waits in a collective.
        """
        training = self._training
        if training is None:
            return f"{self.spec.ident}, process {os.getpid()}: in no generation\n" + stacks()
        thread, generation, progress = training
        place, seconds = progress.where()
        at = f"generation {generation}, {place}, for {seconds:.1f} s"
        return f"{self.spec.ident}, process {os.getpid()}: {at}\n" + stacks(thread)

    def set_loaders(self, generation: int, loaders: Sequence[Any]) -> None:
        """Use these loaders from now on in ``generation``."""
        with self._lock:
            if generation < self._loaders[0]:
                return
            self._loaders = (generation, loaders)
            if self._feed is not None:
                self._feed.set_loaders(loaders)

    def abort(self, generation: int) -> int:
        """End ``generation`` here at once; its ``run`` then returns. Returns the connections cut."""
        with self._lock:
            self._aborted_upto = max(self._aborted_upto, generation)
            groups = self._groups
        if groups is None or groups.rendezvous.generation > generation:
            return 0
        return groups.interrupt()

    def request(self, generation: int, *, pause: bool = False, stop: bool = False) -> None:
        """Ask for an end of ``generation`` at the next common step boundary."""
        with self._lock:  # the request may come before the generation has begun here
            requests = self._requests.setdefault(generation, Requests())
        requests.pause |= pause
        requests.stop |= stop


def warm_up(spec: WorkerSpec) -> None:
    """Import what the first generation will, and take what stays out of the garbage collector's sight.

    Tearing a generation down needs a full collection; over all that the libraries have built it would take longer
    than every other part of a recovery.
    """
    if spec.job.engine.name == "deepspeed":
        load_deepspeed("cuda" if spec.use_gpu else "cpu")
    if isinstance(spec.recipe, MetaRecipe):
        build(spec.recipe, spec.job)  # takes no memory, and transformers loads its model classes when they are used
    gc.collect()
    gc.freeze()


def bind_gloo(address: str) -> None:
    """Make gloo use the interface that carries the node's Ray address, not what the host name resolves to."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            return


def _lap(outcome: Outcome, phase: str, since: float) -> float:
    now = time.monotonic()
    outcome.phases[phase] = now - since
    return now


def _first_lines(error: BaseException, limit: int = 2000) -> str:
    return str(error)[:limit] or type(error).__name__
