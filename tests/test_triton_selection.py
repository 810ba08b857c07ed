"""When our Triton kernels serve: Problem objects, no GPU and no Triton needed."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import fake_flash
import pytest
import torch

from softcap_ops import UnsupportedError, available_backends, backends
from softcap_ops.backends import Problem, select, triton

GPU = Problem(
    device_type="cuda", device_index=0, capability=(9, 0), dtype=torch.bfloat16, head_dim=128, heads_q=4, heads_kv=2,
    packed=False, softcap=50.0, causal=True, window=(-1, -1), deterministic=False, needs_backward=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_else_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_error = triton.install_error
    fake_flash.forget(monkeypatch)
    monkeypatch.setattr(triton, "install_error", install_error)
    yield
    monkeypatch.undo()
    fake_flash.clear_caches()


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is there and its trial call succeeds."""
    monkeypatch.setattr(triton, "install_error", lambda: None)
    monkeypatch.setattr(triton, "probe_error", lambda problem: None)


def but(**changes: Any) -> Problem:
    return dataclasses.replace(GPU, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"head_dim": 1},
        {"head_dim": 33},
        {"head_dim": 256},
        {"capability": (8, 0)},
        {"capability": (12, 0)},
        {"packed": True},
        {"window": (63, 0)},
        {"deterministic": True},
        {"softcap": 0.0},
        {"over_grid": True},
    ],
    ids=str,
)
def test_serves_where_nothing_else_is_installed(works: None, changes: dict[str, Any]) -> None:
    assert select(but(**changes)).NAME == "triton"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "bfloat16, float16 and float32 only, got float64"),
        ({"head_dim": 257}, "head_dim up to 256, got 257"),
        ({"capability": (7, 5)}, "8.0 (Ampere) or newer, this GPU has 7.5"),
        ({"device_type": "cpu", "device_index": None, "capability": None}, "CUDA tensors only, got cpu"),
        ({"softcap": 1e35}, "float32's range"),
    ],
)
def test_limits(works: None, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        select(but(**changes), "triton")
    assert reason in str(caught.value)


def test_flash_attention_2_is_preferred(works: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    assert select(GPU).NAME == "fa2"
    assert select(but(dtype=torch.float32)).NAME == "triton"
    assert select(GPU, "triton").NAME == "triton"


def test_explain_says_what_would_be_preferred(works: None) -> None:
    text = backends.explain(GPU)
    assert text.startswith("would run on: triton\n")
    assert "preferred where installed: fa2 (pip install flash-attn" in text
    assert "preferred" not in backends.explain(but(dtype=torch.float32)), "they would not serve float32"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    triton._load.cache_clear()
    try:
        assert "pip install triton" in str(available_backends()["triton"])
        with pytest.raises(UnsupportedError, match="pip install triton") as caught:
            select(GPU, "triton")
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    finally:
        triton._load.cache_clear()


def test_a_broken_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is kept; nothing is raised."""

    def refuse(name: str) -> types.ModuleType:
        raise ImportError("libtriton.so: undefined symbol")

    monkeypatch.setattr(triton.importlib, "import_module", refuse)
    triton._load.cache_clear()
    try:
        assert "undefined symbol" in str(triton.install_error())
    finally:
        triton._load.cache_clear()
