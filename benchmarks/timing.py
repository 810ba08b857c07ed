"""Device time of several calls side by side.

A busy card runs at its power limit, at a clock that the work itself decides and that takes a while to get there: what
follows something light, or something heavy, is timed at the clock of its neighbour. So each call runs for a while
before it is timed, and no two follow each other in every round.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch


def in_rounds(
    calls: dict[str, Callable[[], object]], rounds: int = 7, settle_ms: float = 80.0, burst_ms: float = 30.0
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round: the mean over a burst of it, after a longer one to settle."""
    once = {name: burst(call, 2) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(calls), len(calls)):
            burst(calls[name], _repeats(settle_ms, once[name]))
            times[name].append(burst(calls[name], _repeats(burst_ms, once[name])))
    return times


def _repeats(milliseconds: float, once: float) -> int:
    return max(1, min(200, int(milliseconds / once)))  # the short ones need not fill the time


def burst(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a call, the mean over so many after one that is not timed."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # about 1 ms, for the host to get ahead: its cost is bench_overhead.py's matter
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats
