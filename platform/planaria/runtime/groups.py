"""The life cycle of one generation's process groups: form, interrupt, close.

A generation is one membership on one layout. Its groups live under their own store prefix, so that no key
of an earlier generation can be mistaken for one of this; the store itself is hosted by the controller, never
by a rank. All sub-groups are formed eagerly: a peer that is already gone shows here, not in the first step.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from planaria.engine.zero.library import destroy_process_group, release
from planaria.layout import AXES, Layout
from planaria.runtime.sockets import Address, ConnectionSet, listening_ports, socket_inodes

_OF_GENERATION = re.compile(r"gen-(\d+)/")
ALWAYS = ("dp_replicate", "dp_shard", "tp")
"""Axes that every mesh has: FSDP2 and the engine take a group of one as they take any other."""


def mesh_axes(layout: Layout) -> tuple[str, ...]:
    """Axes of the mesh of ``layout``, slowest first; ``pp`` and ``cp`` only where there are several ranks on them."""
    return tuple(axis for axis in AXES if axis in ALWAYS or getattr(layout, axis) > 1)


@dataclass(frozen=True)
class Rendezvous:
    """What a rank needs to join a generation."""

    generation: int
    rank: int
    layout: Layout
    store_host: str
    store_port: int
    timeout_s: float
    """Limit of one collective, and of forming the groups."""


def host_store(host: str) -> dist.TCPStore:
    """A store that listens on the interface of ``host`` alone, on a free port; torch's own listens on all."""
    listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def forget_generations(store: dist.TCPStore, before: int) -> None:
    """Delete what generations with a number below ``before`` have left in the store."""
    for key in store.list_keys():
        name = _OF_GENERATION.match(key)
        if name is not None and int(name[1]) < before:
            store.delete_key(key)


class Interrupted(RuntimeError):
    """The generation was aborted while this rank was forming or using its groups."""


class Groups:
    """Process groups of one generation in this process. One at a time; :meth:`interrupt` from any thread."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self.rendezvous = rendezvous
        self.device = device
        self._connections = ConnectionSet()
        self._before = socket_inodes()
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        self._open = False
        self._adopted = False
        self._mesh: DeviceMesh | None = None

    @property
    def backend(self) -> str:
        """Collectives of CPU tensors always go through gloo; CUDA tensors through NCCL."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    @property
    def aborted(self) -> bool:
        """Whether :meth:`interrupt` was called."""
        return self._aborted.is_set()

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh with the axes of :func:`mesh_axes`."""
        assert self._mesh is not None, "form() first"
        return self._mesh

    def form(self) -> DeviceMesh:
        """Join the generation; blocks until all ranks have joined.

        Raises:
            Interrupted: :meth:`interrupt` was called meanwhile.
            RuntimeError: a peer did not come within the time limit.
        """
        r = self.rendezvous
        layout = r.layout
        try:
            client = dist.TCPStore(
                r.store_host,
                r.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=r.timeout_s),
            )
            store = dist.PrefixStore(f"gen-{r.generation}", client)
            self._check()
            with self._lock:
                self._open = True
            dist.init_process_group(
                self.backend,
                store=store,
                rank=r.rank,
                world_size=layout.world,
                timeout=timedelta(seconds=r.timeout_s),
                device_id=self.device if self.device.type == "cuda" else None,
            )
            self._check()
            axes = mesh_axes(layout)
            shape = tuple(getattr(layout, axis) for axis in axes)
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=axes)
            if layout.dp_replicate > 1:
                self._mesh["dp_replicate", "dp_shard"]
            self._adopt_connections(store)
            self._adopted = True
            self._check()  # an interrupt that came before knew only some of the connections
            dist.barrier()
        except Exception as error:
            if self._aborted.is_set():
                raise Interrupted(f"generation {r.generation} was aborted while forming") from error
            raise
        self._check()
        return self._mesh

    def _adopt_connections(self, store: dist.Store) -> None:
        """Find gloo's connections by the ports that the ranks of this generation listen on."""
        r = self.rendezvous
        own = listening_ports(self._before)
        store.set(f"ports/{r.rank}", json.dumps(sorted(own)))
        theirs = {port for rank in range(r.layout.world) for port in json.loads(store.get(f"ports/{rank}"))}

        def between_ranks(local: Address, remote: Address) -> bool:
            return local[1] in own or (remote[1] in theirs and remote[1] != r.store_port)

        self._connections.adopt(self._before, between_ranks)

    def _adopt_while_forming(self) -> None:
        """Connections to cut before the ranks know each other's ports: the store client, which is private to
        this generation and in which a rank waits for a peer that may never come, and accepted connections."""
        own = listening_ports(self._before)
        port = self.rendezvous.store_port
        self._connections.adopt(self._before, lambda local, remote: remote[1] == port or local[1] in own)

    def _check(self) -> None:
        if self._aborted.is_set():
            raise Interrupted(f"generation {self.rendezvous.generation} was aborted while forming")

    def interrupt(self) -> int:
        """Make every pending and later collective of this generation fail; returns the connections cut."""
        self._aborted.set()
        if not self._adopted:
            # Still forming: whatever has been connected so far is new since the start.
            self._adopt_while_forming()
        cut = self._connections.interrupt()
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):
                distributed_c10d._abort_process_group()
        return cut

    def close(self) -> None:
        """Tear the groups down in the training thread, after every reference to the model is gone."""
        self._mesh = None
        release()
        _forget_meshes()
        gc.collect()
        with self._lock:
            if self._open and dist.is_initialized():
                with contextlib.suppress(Exception):
                    destroy_process_group()
            if self._open and not dist.is_initialized():
                # Forming that failed leaves torch's group counter advanced; group names (hence store keys)
                # of the next generation would then differ from those of ranks that did not fail.
                distributed_c10d._world.group_count = 0
            self._open = False
        self._connections.close()


def _forget_meshes() -> None:
    """Empty the caches in which DTensor remembers, for this thread, how it sharded what.

    They hold every mesh that it has met, and meshes hold their groups: each layout would leave the threads and
    connections of its groups behind.
    """
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
