"""The ordered table of backends, and selection.

A backend is a module with `NAME`, `forward`, `backward` and four questions, asked in this order until one gives a
reason for not serving:

- `opt_in_error()`: it must be asked for and was not (skipped when the caller names it);
- `support_error(problem)`: the problem is outside what it offers, whatever the installation;
- `install_error()`: it cannot run here at all;
- `probe_error(problem)`: this build, on this device, fails at such a problem; settled by one tiny real call.

and, where a person can add it, `INSTALL`: how, in a few words.

Adding a backend is a file here and a row in `_TABLE`.
"""

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import Any

from ..errors import UnsupportedError
from . import cpu, fa2, fa3, hopper, triton
from .problem import Problem, decode_facts, facts

__all__ = ["Problem", "available_backends", "choose", "decode_facts", "explain", "facts", "refusals", "select"]

# In order of preference: the first that supports a problem serves it (see _ordered).
_TABLE: tuple[ModuleType, ...] = (hopper, fa3, fa2, triton, cpu)


def _ordered(problem: Problem) -> list[ModuleType]:
    """The table in order of preference for `problem`.

    With few queries only splitting the keys over blocks fills a GPU: the FlashAttentions do, our own kernels do not.
    """
    return sorted(_TABLE, key=lambda backend: problem.few_queries and backend not in (fa2, fa3))


def _named(name: str) -> ModuleType:
    for backend in _TABLE:
        if name == backend.NAME:
            return backend
    raise ValueError(f"backend must be None or one of {[b.NAME for b in _TABLE]}, got {name!r}")


def _refusal(backend: ModuleType, problem: Problem, *, forced: bool) -> str | None:
    reason = None if forced else backend.opt_in_error()
    return reason or _support_error(backend, problem) or backend.install_error() or backend.probe_error(problem)


def _support_error(backend: ModuleType, problem: Problem) -> str | None:
    if problem.cached and not hasattr(backend, "decode"):
        return "has no kernel that reads a KV cache"
    return backend.support_error(problem)


def refusals(problem: Problem) -> dict[str, str | None]:
    """Every backend's name, in order of preference, with its reason for not serving; None = it can."""
    return {b.NAME: _refusal(b, problem, forced=False) for b in _ordered(problem)}


@functools.lru_cache(maxsize=4096)
def select(problem: Problem, name: str | None = None) -> ModuleType:
    """The backend that serves `problem`: the first of the table that can, or the one named.

    Raises ValueError for an unknown name, UnsupportedError where nothing can serve.
    """
    if name is not None:
        backend = _named(name)
        reason = _refusal(backend, problem, forced=True)
        if reason is not None:
            raise UnsupportedError(f"softcap_ops: backend {name!r} cannot serve this call: {reason}") from _cause(
                reason
            )
        return backend
    reasons: dict[str, str] = {}
    for backend in _ordered(problem):
        reason = _refusal(backend, problem, forced=False)
        if reason is None:
            return backend
        reasons[backend.NAME] = reason
    lines = "".join(f"\n  {candidate}: {reason}" for candidate, reason in reasons.items())
    causes = filter(None, map(_cause, reasons.values()))
    raise UnsupportedError(f"softcap_ops: no backend can serve this call ({problem}):{lines}") from next(causes, None)


@functools.lru_cache(maxsize=4096)
def choose(name: str | None, *problem_facts: Any) -> ModuleType:
    """`select` on the tuple of a problem's facts: a hit costs one hash."""
    return select(Problem(*problem_facts), name)


def _cause(reason: str) -> BaseException | None:
    return getattr(reason, "cause", None)


def available_backends() -> dict[str, str | None]:
    """Each backend's name, in order of preference, with the reason why it is not installed; None = it is.

    An installed backend may still need another device than the machine has: `explain` says what serves a call.
    """
    return {b.NAME: b.install_error() for b in _TABLE}


def explain(problem: Problem, name: str | None = None) -> str:
    """The decision and each backend's verdict, as text; and what would be preferred if it were installed."""
    rows = [(b, reason or "supported") for b, reason in refusals(problem).items()]
    chosen = None
    try:
        chosen = select(problem, name)
        decision = f"would run on: {chosen.NAME}"
    except UnsupportedError as error:
        decision = str(error).splitlines()[0]
    width = max(len(b) for b, _ in rows)
    hints = []
    for backend in itertools.takewhile(lambda b: b is not chosen, _ordered(problem)):
        how = getattr(backend, "INSTALL", None)
        if how and _support_error(backend, problem) is None and backend.install_error() is not None:
            hints.append(f"preferred where installed: {backend.NAME} ({how})")
    return "\n".join([decision, *(f"  {b:<{width}}  {verdict}" for b, verdict in rows), *hints])
