"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config
from hypothesis import HealthCheck, Phase, settings

_COMMON = {
    "deadline": None,
    "phases": [phase for phase in Phase if phase is not Phase.explain],
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}
# The same draws on every machine; `make fuzz` draws others every time.
settings.register_profile("default", max_examples=300, derandomize=True, **_COMMON)
settings.register_profile("fuzz", max_examples=10_000, print_blob=True, **_COMMON)
settings.load_profile("fuzz" if os.environ.get("SOFTCAP_OPS_FUZZ") == "1" else "default")

# The tests' tensors are too small to share out, and idle threads that spin slow the whole machine down. Threads have
# tests of their own: test_contract.py, test_properties.py.
torch.set_num_threads(1)

# Trace anew in every run: a cached AOT graph would hide a change of a fake kernel.
torch._functorch.config.enable_autograd_cache = False


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    """Every test starts from the same seed, without graphs of another test, in the default modes."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    assert torch.is_grad_enabled(), "a test left grad mode off"
    assert not torch.are_deterministic_algorithms_enabled(), "a test left deterministic algorithms on"
