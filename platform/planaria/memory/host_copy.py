"""Device memory to shared memory: a plain copy on the CPU, an overlapped one on CUDA."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Copies lists of tensors. On the CPU it returns when done. On CUDA it only starts the copies, on a stream of
    its own and into pinned memory; :meth:`fence` makes the training stream wait for them before it changes what
    they read, and a thread calls ``done`` when the bytes have arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._failure: BaseException | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._last: Any = None
            self._waiting: queue.Queue[tuple[Any, Callable[[], None]] | None] = queue.Queue()
            self._thread = threading.Thread(target=self._finish_copies, name="host-copy", daemon=True)
            self._thread.start()

    def __call__(self, targets: Sequence[Tensor], sources: Sequence[Tensor], done: Callable[[], None]) -> None:
        """Copy ``sources`` to ``targets``, then call ``done``."""
        with torch.no_grad():
            if self._device.type != "cuda":
                if targets:  # a rank may hold nothing that another one of its node does not keep
                    torch._foreach_copy_(list(targets), list(sources))
                done()
                return
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
                self._last = torch.cuda.Event()
                self._last.record(self._stream)
        self._waiting.put((self._last, done))

    def fence(self) -> None:
        """Before the sources change: they must have been read."""
        if self._failure is not None:
            raise self._failure
        if self._device.type == "cuda" and self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def finish(self) -> None:
        """Wait until every copy has arrived and its ``done`` was called."""
        if self._device.type == "cuda":
            self._waiting.join()
        if self._failure is not None:
            raise self._failure

    def register(self, memory: mmap) -> None:
        """Pin shared memory, so that copies into it overlap with computation."""
        if self._device.type == "cuda":
            status = torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)
            torch.cuda.check_error(int(status))

    def release(self, memories: Iterable[mmap]) -> None:
        """Unpin what was pinned, and end the thread."""
        if self._device.type == "cuda":
            self._waiting.put(None)
            self._thread.join()
            for memory in memories:
                torch.cuda.cudart().cudaHostUnregister(_address(memory))

    def _finish_copies(self) -> None:
        while (item := self._waiting.get()) is not None:
            event, done = item
            try:
                event.synchronize()
                done()
            except BaseException as error:
                self._failure = error
            finally:
                self._waiting.task_done()


def _address(memory: mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
