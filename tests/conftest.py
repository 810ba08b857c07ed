"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
# The same draws on every machine; `make fuzz` draws others every time.
settings.register_profile("default", max_examples=300, deadline=None, derandomize=True, suppress_health_check=_CHECKS)
settings.register_profile("fuzz", max_examples=10_000, deadline=None, print_blob=True, suppress_health_check=_CHECKS)
settings.load_profile("fuzz" if os.environ.get("SOFTCAP_OPS_FUZZ") == "1" else "default")


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    """Every test starts from the same seed, without graphs of another test, in the default modes."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    assert torch.is_grad_enabled(), "a test left grad mode off"
    assert not torch.are_deterministic_algorithms_enabled(), "a test left deterministic algorithms on"
