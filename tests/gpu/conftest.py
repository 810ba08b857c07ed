"""The GPU suite: every CUDA backend that this machine has. Without a GPU, all of it is skipped with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import softcap_ops
from softcap_ops import UnsupportedError

BACKENDS = [name for name in softcap_ops.available_backends() if name != "cpu"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU; the CUDA path is traced in tests/test_fa_tracing.py")
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(skip)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Each failure is named as it comes: a run that a time limit ends prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", flush=True)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a CUDA backend that is installed here."""
    reason = softcap_ops.available_backends()[request.param]
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A backend may refuse a call (its build lacks the backward, say): skipped with the reason it gave."""
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None  # type: ignore[attr-defined]
    if isinstance(error, UnsupportedError):
        outcome.force_exception(pytest.skip.Exception(f"refused: {error}", _use_item_location=True))  # type: ignore[attr-defined]
