"""A pool of processes of one group (gloo, or NCCL with a GPU each) that run functions together, with a watchdog.

Starting a process costs seconds (importing torch), so one pool serves every test of its size. A function that does not
return in time kills the pool and fails the test; the next test gets a fresh one.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("spawn")
START_SECONDS = 180
# Above what any one case takes on a busy machine, far below "for ever".
CASE_SECONDS = 120


def _serve(connection: Any, rank: int, size: int, backend: str, rendezvous: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=CASE_SECONDS),
    )
    connection.send((True, None))
    while True:
        function, args = connection.recv()
        try:
            torch.manual_seed(0)
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Ranks:
    """`size` processes of one group. `run` calls a module-level function on all of them."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CASE_SECONDS) -> list[Any]:
        """What the function returned on each rank. Fails with the tracebacks of the ranks where it raised."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        return self._collect(timeout)

    def _start(self) -> None:
        directory = tempfile.mkdtemp()
        rendezvous = str(Path(directory, "rendezvous"))
        for rank in range(self.size):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(there, rank, self.size, self.backend, rendezvous), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        self._collect(START_SECONDS)

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: list[Any] = []
        failures = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    failures.append(f"rank {rank} did not return within {timeout} s")
                    continue
                succeeded, result = connection.recv()
            except (EOFError, ConnectionError):
                failures.append(f"rank {rank} died")
                continue
            results.append(result)
            if not succeeded:
                failures.append(f"rank {rank}:\n{result}")
        if len(results) < self.size:
            self.kill()
        assert not failures, "\n".join(failures)
        return results

    def kill(self) -> None:
        """End the processes. Nothing they hold is worth an orderly end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._connections = [], []
