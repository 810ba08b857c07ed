"""Autocast: mixed float dtypes meet in the autocast dtype, and each gradient returns in its input's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import Result, evaluate
from samples import Inputs, Sample, each_sample, named

LOW = (torch.bfloat16, torch.float16)
BOTH_LAYOUTS = named("gqa", "packed_gqa")


def mixed(x: Inputs, *dtypes: torch.dtype) -> Inputs:
    q, k, v = (t.to(d) for t, d in zip(x.qkv, dtypes, strict=True))
    return Inputs(q, k, v, x.dout, x.dlse)


def autocast(sample: Sample, dtype: torch.dtype, enabled: bool = True) -> Any:
    def attention(*qkv: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype, enabled=enabled):
            return sample.attention(*qkv)

    return attention


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("wide", list(itertools.product((True, False), repeat=3)), ids=str)
@each_sample(BOTH_LAYOUTS)
def test_mixed_dtypes(sample: Sample, wide: tuple[bool, bool, bool], low: torch.dtype) -> None:
    """case 43: float32 q and k (after a norm or rotary embedding) with v in the low dtype, and every other mix."""
    x = sample.inputs(low, hot=True)
    expected = evaluate(sample.attention, x)
    dtypes = [torch.float32 if w else low for w in wide]
    actual = evaluate(autocast(sample, low), mixed(x, *dtypes))
    assert actual.out.dtype == low
    assert actual.lse.dtype == torch.float32
    assert [g.dtype for g in actual[2:]] == dtypes
    for name in Result._fields:  # the values are exact in the low dtype: nothing may be computed differently
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name).to(getattr(actual, name).dtype), rtol=0, atol=0
        )


@pytest.mark.parametrize("low", LOW, ids=str)
def test_float32_is_rounded_once(low: torch.dtype) -> None:
    sample = BOTH_LAYOUTS[0]
    x = sample.inputs(torch.float32)
    actual = autocast(sample, low)(*x.qkv)
    expected = sample.attention(*(t.to(low) for t in x.qkv))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@each_sample(BOTH_LAYOUTS)
def test_float64_is_left_alone(sample: Sample) -> None:
    x = sample.inputs(torch.float64)
    actual, expected = evaluate(autocast(sample, torch.bfloat16), x), evaluate(sample.attention, x)
    for name in Result._fields:
        assert torch.equal(getattr(actual, name), getattr(expected, name))


@each_sample(BOTH_LAYOUTS)
def test_disabled(sample: Sample) -> None:
    x = sample.inputs()
    out, _ = autocast(sample, torch.bfloat16, enabled=False)(*x.qkv)
    assert out.dtype == torch.float32


@each_sample(BOTH_LAYOUTS)
def test_mixed_dtypes_without_autocast_are_refused(sample: Sample) -> None:
    q, k, v = mixed(sample.inputs(), torch.float32, torch.float32, torch.bfloat16).qkv
    with pytest.raises(TypeError, match=r"v must have the dtype of q, torch\.float32, got torch\.bfloat16"):
        sample.attention(q, k, v)


@each_sample(BOTH_LAYOUTS)
def test_mixed_dtypes_with_float64_are_refused(sample: Sample) -> None:
    """Autocast leaves float64 alone, so there is nothing that float64 and float32 could meet in."""
    q, k, v = mixed(sample.inputs(), torch.float64, torch.float32, torch.float32).qkv
    with pytest.raises(TypeError, match=r"k must have the dtype of q, torch\.float64"):
        autocast(sample, torch.bfloat16)(q, k, v)


@each_sample(BOTH_LAYOUTS)
def test_backward_outside_the_context(sample: Sample) -> None:
    """The usual training loop: forward under autocast, backward after it."""
    x = sample.inputs()
    q, k, v = (t.detach().requires_grad_() for t in x.qkv)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = sample.attention(q, k, v)
    out.backward(x.dout.to(out.dtype))
    expected = evaluate(sample.attention, sample.inputs(torch.bfloat16), "out")
    for leaf, grad in ((q, expected.dq), (k, expected.dk), (v, expected.dv)):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, grad.float(), rtol=0, atol=0)


@each_sample(BOTH_LAYOUTS)
def test_compiled_as_eager(sample: Sample) -> None:
    """case 43: the fake knows the autocast dtype, so the compiled program has the eager one's dtypes and numbers."""
    x = mixed(sample.inputs(torch.bfloat16), torch.float32, torch.float32, torch.bfloat16)
    step = torch.compile(autocast(sample, torch.bfloat16), fullgraph=True, backend="aot_eager")
    actual, expected = evaluate(step, x), evaluate(autocast(sample, torch.bfloat16), x)
    for name in Result._fields:
        a, e = getattr(actual, name), getattr(expected, name)
        assert a.dtype == e.dtype
        assert torch.equal(a, e)
