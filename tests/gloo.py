"""Runs checks on several gloo processes: one start of the processes for many checks, and none can hang the suite.

A check is a function without arguments that every process calls, in the same order. The first that fails on any
process ends the run, as the others may be waiting for a message that never comes.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist

_COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=120)


def _work(rank: int, world: int, store: str, module: str, checks: list[str], parent: Connection) -> None:
    torch.set_num_threads(1)
    # Ranks compile at the same time: each with its own cache, without a pool of compiler processes.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{store}.inductor{rank}"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                            timeout=_COLLECTIVE_TIMEOUT)  # fmt: skip
    functions = vars(importlib.import_module(module))
    for name in checks:
        error = None
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            functions[name]()
        except BaseException:
            error = traceback.format_exc()
        parent.send((name, error))
    parent.close()
    parent_is_done = store + ".done"
    while not os.path.exists(parent_is_done):  # a rank that leaves early takes its connections with it
        time.sleep(0.05)
    os._exit(0)


def run(module: str, checks: list[str], world: int = 4, timeout: float = 280.0) -> dict[str, str | None]:
    """Call the functions `checks` of `module` on `world` processes; each one's failure, None where it passed.

    Whatever happens, this returns within `timeout` seconds and leaves no process behind.
    """
    context = multiprocessing.get_context("spawn")
    outcomes: dict[str, str | None] = dict.fromkeys(checks, f"did not finish within {timeout} s")
    passed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(rank, world, store, module, checks, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        try:
            failure = _collect(pipes, passed, checks, world, time.monotonic() + timeout)
        finally:
            with open(store + ".done", "w"):
                pass
            for process in processes:
                process.join(0 if failure else 5)
                if process.is_alive():
                    process.kill()
                    process.join()
    for name in checks:
        if passed[name] == world:
            outcomes[name] = None
        elif failure is not None:
            outcomes[name] = failure[1] if name == failure[0] else f"not run, as {failure[0]} failed"
    return outcomes


def _collect(
    pipes: dict[Connection, int], passed: Counter[str], checks: list[str], world: int, deadline: float
) -> tuple[str, str] | None:
    """Read the processes' reports; the first failure as (check, message)."""
    while pipes:
        ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
        running = next((c for c in checks if passed[c] < world), "the end")
        if not ready:
            return running, f"no report in time, after {dict(passed)} reports"
        for pipe in ready:
            rank = pipes[pipe]  # type: ignore[index]
            try:
                name, error = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                del pipes[pipe]  # type: ignore[arg-type]
                if running != "the end" and any(passed[c] < world for c in checks) and not pipes:
                    return running, f"rank {rank} ended without a report"
                continue
            if error is not None:
                return name, f"rank {rank}: {error}"
            passed[name] += 1
    return None
