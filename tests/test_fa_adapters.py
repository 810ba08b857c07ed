"""What the FlashAttention backends make of the kernels' raw results: the table of samples, on emulated kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import fake_flash
import pytest
import torch
from decode_samples import DECODE_SAMPLES, DecodeSample, check_decode
from decode_samples import Inputs as DecodeInputs
from decode_samples import each_sample_and_heat as each_decode_sample_and_heat
from helpers import check_parity, through
from samples import SAMPLES, Sample, each_sample_and_heat, named
from torch import Tensor

from softcap_ops._arguments import Cache, Options, Packing, resolve
from softcap_ops.backends import fa2, fa3

BUILDS = {"fa2-2.8": (fa2, "2.8"), "fa2-2.6": (fa2, "2.6"), "fa3": (fa3, "")}


@pytest.fixture(params=BUILDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    fake_flash.forget(monkeypatch)
    module, version = BUILDS[request.param]
    if module is fa2:
        fake_flash.install_fa2(monkeypatch, version=version)
    else:
        fake_flash.install_fa3(monkeypatch)
    yield module
    monkeypatch.undo()
    fake_flash.clear_caches()


@each_sample_and_heat()
def test_parity(backend: ModuleType, sample: Sample, hot: bool) -> None:
    """cases 15, 18, 21, 26, 30, 48, 86: every row of the table comes out as the contract says."""
    check_parity(sample, sample.inputs(torch.bfloat16, hot=hot), hot=hot, attention=through(backend, sample))


@each_sample_and_heat(named("gqa", "causal_more_queries", "window_both", "head_dim_20", "packed_gqa", "packed_tail"))
def test_parity_in_float16(backend: ModuleType, sample: Sample, hot: bool) -> None:
    check_parity(sample, sample.inputs(torch.float16, hot=hot), hot=hot, attention=through(backend, sample))


@pytest.mark.parametrize("loss", ["out", "lse"])
@each_sample_and_heat(
    named("gqa", "causal_more_queries", "cap_1", "head_dim_20", "packed_gqa", "packed_empty_sequences")
)
def test_loss_on_one_output(backend: ModuleType, sample: Sample, hot: bool, loss: str) -> None:
    """case 37: the kernels take no gradient of lse; it is added."""
    x = sample.inputs(torch.bfloat16, hot=hot)
    check_parity(sample, x, hot=hot, loss=loss, attention=through(backend, sample))


def test_gradient_of_lse_ignores_rows_that_see_nothing(backend: ModuleType) -> None:
    sample = next(s for s in SAMPLES if s.name == "packed_empty_sequences")
    x = sample.inputs(torch.bfloat16)
    x.dlse[:, 5:] = float("nan")  # four rows without a key
    q, k, v = (t.requires_grad_() for t in x.qkv)
    _, lse = through(backend, sample)(q, k, v)
    for grad in torch.autograd.grad(lse, (q, k), x.dlse):
        assert grad.isfinite().all()


def test_gradients_not_asked_for_have_no_elements(backend: ModuleType) -> None:
    """case 40."""
    sample = next(s for s in SAMPLES if s.name == "gqa")
    x = sample.inputs(torch.bfloat16)
    p = resolve(Options(sample.softcap), sample.head_dim)
    out, lse = backend.forward(*x.qkv, None, p)
    grads = backend.backward(x.dout, None, *x.qkv, out, lse, None, p, (False, True, False))
    assert [g.numel() for g in grads] == [0, x.k.numel(), 0]


def test_deterministic_reaches_the_kernel(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """case 78: nothing that the caller set is lost on the way."""
    install = fake_flash.install_fa2 if backend is fa2 else fake_flash.install_fa3
    backend._load.cache_clear()
    calls = install(monkeypatch).calls
    sample = next(s for s in SAMPLES if s.name == "packed_gqa")
    x = sample.inputs(torch.bfloat16)
    packing, p = Packing(**sample.packing()), resolve(Options(sample.softcap, deterministic=True), sample.head_dim)
    out, lse = backend.forward(*x.qkv, packing, p)
    backend.backward(x.dout, None, *x.qkv, out, lse, packing, p, (True, True, True))
    assert calls[-1] == "backward deterministic"


def decode_through(backend: ModuleType, sample: DecodeSample) -> Any:
    def decode(x: DecodeInputs) -> tuple[Tensor, Tensor]:
        options = Options(sample.softcap, sample.scale, sample.causal, *sample.window)
        return backend.decode(*x[:3], Cache(*x[3:]), resolve(options, sample.head_dim), True)

    return decode


# FA2 leaves out blocks of other sizes, and left padding in blocks; both are refused by its support_error.
DECODED = tuple(s for s in DECODE_SAMPLES if not (s.block_size and s.leftpad))


@each_decode_sample_and_heat(DECODED)
def test_decode_parity(backend: ModuleType, sample: DecodeSample, hot: bool) -> None:
    """cases 15, 21, 26, 30, 86, in a cache that is finite throughout: the kernels read whole tiles."""
    if backend is fa2 and sample.block_size:
        sample = replace(sample, block_size=256)
    x = sample.inputs(torch.bfloat16, hot=hot, poison=0.0)
    check_decode(sample, x, hot=hot, decode=decode_through(backend, sample))


def test_decode_lse_costs_nothing_unasked(backend: ModuleType) -> None:
    sample = next(s for s in DECODE_SAMPLES if s.name == "one_query")
    x = sample.inputs(torch.bfloat16, poison=0.0)
    p = resolve(Options(5.0), sample.head_dim)
    out, lse = backend.decode(*x[:3], Cache(*x[3:]), p, False)
    assert lse.shape == (0,)
    assert torch.equal(out, backend.decode(*x[:3], Cache(*x[3:]), p, True)[0])
