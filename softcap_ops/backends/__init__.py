"""The ordered table of backends, and selection.

A backend is a module with `NAME`; `install_error() -> str | None`, why it cannot run here at all;
`support_error(problem) -> str | None`, why it cannot serve this problem; `forward` and `backward`.
Adding one is a file here and a row in `_TABLE`.
"""

from __future__ import annotations

import functools
from types import ModuleType

from ..errors import UnsupportedError
from . import cpu
from .problem import Problem

__all__ = ["Problem", "available_backends", "refusals", "select"]

# In order of preference: the first that supports a problem serves it.
_TABLE: tuple[ModuleType, ...] = (cpu,)


def _named(name: str) -> ModuleType:
    for backend in _TABLE:
        if name == backend.NAME:
            return backend
    raise ValueError(f"backend must be None or one of {[b.NAME for b in _TABLE]}, got {name!r}")


def refusals(problem: Problem) -> dict[str, str | None]:
    """Every backend's name, in order of preference, with its reason for not serving; None = it can."""
    return {b.NAME: b.install_error() or b.support_error(problem) for b in _TABLE}


@functools.lru_cache(maxsize=4096)
def select(problem: Problem, name: str | None = None) -> ModuleType:
    """The backend that serves `problem`: the first of the table that can, or the one named.

    Raises ValueError for an unknown name, UnsupportedError where nothing can serve.
    """
    if name is not None:
        backend = _named(name)
        reason = backend.install_error() or backend.support_error(problem)
        if reason is not None:
            raise UnsupportedError(f"softcap_ops: backend {name!r} cannot serve this call: {reason}")
        return backend
    reasons = refusals(problem)
    for candidate, reason in reasons.items():
        if reason is None:
            return _named(candidate)
    lines = "".join(f"\n  {candidate}: {reason}" for candidate, reason in reasons.items())
    raise UnsupportedError(f"softcap_ops: no backend can serve this call ({problem}):{lines}")


def available_backends() -> dict[str, str | None]:
    """Each backend's name, in order of preference, with the reason why it cannot run here; None = it can."""
    return {b.NAME: b.install_error() for b in _TABLE}


def explain(problem: Problem, name: str | None = None) -> str:
    """The decision and each backend's verdict, as text."""
    rows = [(b, reason or "supported") for b, reason in refusals(problem).items()]
    try:
        decision = f"would run on: {select(problem, name).NAME}"
    except UnsupportedError as error:
        decision = str(error).splitlines()[0]
    width = max(len(b) for b, _ in rows)
    return "\n".join([decision, *(f"  {b:<{width}}  {verdict}" for b, verdict in rows)])
