"""Our Hopper kernel on the whole table of samples, at each head_dim that it has."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import check_parity, norm
from samples import SAMPLES, Sample, each_dtype

import softcap_ops
from softcap_ops.backends import hopper

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _installed() -> None:
    if (reason := hopper.install_error()) is not None:
        pytest.skip(f"hopper: {reason}")


def resized(head_dim: int) -> list[Sample]:
    return [
        dataclasses.replace(s, name=f"{s.name}_{head_dim}", head_dim=head_dim)
        for s in SAMPLES
        if s.softcap and not s.name.startswith("head_dim")
    ]


EVERY = [
    pytest.param(s, hot, id=f"{s}-{'hot' if hot else 'cold'}")
    for head_dim in hopper.HEAD_DIMS
    for s in resized(head_dim)
    for hot in s.heats
]
each = pytest.mark.parametrize(("sample", "hot"), EVERY)


@each_dtype(HALF)
@each
def test_inference(sample: Sample, hot: bool, dtype: torch.dtype) -> None:
    x = sample.inputs(dtype, hot=hot, device="cuda")
    with torch.no_grad():
        out, lse = sample.attention(*x.qkv, backend="hopper")
        ref_out, ref_lse = sample.reference(*x.double().qkv)
        eager_out, _ = sample.reference(*x.qkv)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert torch.equal(lse.isneginf(), ref_lse.isneginf())
    floor = torch.finfo(dtype).eps / 2 * norm(ref_out)
    assert norm(out.double() - ref_out) <= max(2 * norm(eager_out.double() - ref_out), floor)
    finite = lse.isfinite()
    # tanh.approx and the polynomial are off by at most 2e-5, which is that many caps of a score; of the exponentials a
    # quarter are by up to 1e-4.
    assert norm((lse.double() - ref_lse)[finite]) <= (2e-5 * sample.softcap + 5e-5) * math.sqrt(int(finite.sum()))


@each_dtype(HALF)
@each
def test_outputs_and_gradients(sample: Sample, hot: bool, dtype: torch.dtype) -> None:
    x = sample.inputs(dtype, hot=hot, device="cuda")
    check_parity(sample, x, hot=hot, attention=lambda q, k, v: sample.attention(q, k, v, backend="hopper"))


def test_it_serves_inference_unasked() -> None:
    q = torch.randn(1, 64, 4, 128, device="cuda", dtype=torch.bfloat16)
    assert softcap_ops.explain(q, q, q, softcap=50.0).startswith("would run on: hopper\n")


def test_one_query_a_sequence_is_right_too() -> None:
    """Selection sends decoding elsewhere when it can; asked for by name, it is served."""
    sample = Sample("decode", batch=3, seqlen_q=1, seqlen_k=999, heads_q=8, heads_kv=2, head_dim=128, softcap=30.0)
    x = sample.inputs(torch.bfloat16, hot=True, device="cuda")
    with torch.no_grad():
        out, _ = sample.attention(*x.qkv, backend="hopper")
    expected, _ = sample.reference(*x.double().qkv)
    assert norm(out.double() - expected) <= 4e-3 * norm(expected)
