"""Outputs and gradients of every CUDA backend against the float64 formula: the table of samples, cold and hot."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from helpers import check_parity, evaluate, norm
from samples import BY_NAME, Inputs, Sample, each_dtype, each_sample, each_sample_and_heat, named
from torch import Tensor

import softcap_ops

HALF = (torch.bfloat16, torch.float16)


def on(backend: str, sample: Sample):  # type: ignore[no-untyped-def]
    return lambda q, k, v: sample.attention(q, k, v, backend=backend)


def inputs(sample: Sample, dtype: torch.dtype = torch.bfloat16, hot: bool = True) -> Inputs:
    return sample.inputs(dtype, hot=hot, device="cuda")


@each_dtype(HALF)
@each_sample_and_heat()
def test_outputs_and_gradients(backend: str, sample: Sample, hot: bool, dtype: torch.dtype) -> None:
    check_parity(sample, inputs(sample, dtype, hot), hot=hot, attention=on(backend, sample))


@pytest.mark.parametrize("loss", ["out", "lse"])
@each_sample_and_heat(
    named("gqa", "causal_more_queries", "window_both", "head_dim_20", "gemma2_local", "gemma2_global", "cap_1", "off",
          "packed_gqa", "packed_cross_causal", "packed_empty_sequences", "packed_tail", "packed_gemma2")
)  # fmt: skip
def test_loss_on_one_output(backend: str, sample: Sample, hot: bool, loss: str) -> None:
    """case 37."""
    check_parity(sample, inputs(sample, hot=hot), hot=hot, loss=loss, attention=on(backend, sample))


@each_dtype(HALF)
@each_sample_and_heat()
def test_inference(backend: str, sample: Sample, hot: bool, dtype: torch.dtype) -> None:
    """Without a gradient to come, a forward-only build serves too; the result is that of training."""
    x = inputs(sample, dtype, hot)
    with torch.no_grad():
        out, lse = sample.attention(*x.qkv, backend=backend)
        ref_out, ref_lse = sample.reference(*x.double().qkv)
        eager_out, _ = sample.reference(*x.qkv)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert torch.equal(lse.isneginf(), ref_lse.isneginf())
    assert out.isfinite().all()
    floor = torch.finfo(dtype).eps / 2 * norm(ref_out)
    assert norm(out.double() - ref_out) <= max(2 * norm(eager_out.double() - ref_out), floor)


@pytest.mark.parametrize("softcap", [50.0, 30.0, 1.0])
@each_sample(named("mha", "gqa", "decode_gqa", "window_both", "packed_gqa", "packed_decode", "packed_window"))
def test_the_cap_is_applied(backend: str, sample: Sample, softcap: float) -> None:
    """case 4: three caps and none give four results, prefill and decode, dense and packed."""
    x = sample.inputs(torch.bfloat16, device="cuda")
    scale = 100 * sample.head_dim**-0.5
    results = [
        sample.attention(*x.qkv, softcap=cap, scale=scale, backend=backend)[1] for cap in (None, softcap, softcap / 2)
    ]
    for i, a in enumerate(results):
        for b in results[:i]:
            assert (a - b).nan_to_num(0.0, 0.0, 0.0).abs().max() > 0.2


@pytest.mark.parametrize("factor", [1.0, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("softcap", [50.0, 30.0, None])
@each_dtype(HALF)
def test_large_inputs(backend: str, dtype: torch.dtype, softcap: float | None, factor: float) -> None:
    """cases 6 and 17: saturated scores give finite, right gradients."""
    sample = Sample("large", batch=1, seqlen_q=1024, heads_q=1, head_dim=128, softcap=softcap, causal=True)
    x = sample.inputs(dtype, device="cuda")
    check_parity(sample, Inputs(*(t * factor for t in x[:3]), *x[3:]), hot=False, attention=on(backend, sample))


def test_backward_of_many_heads_ends(backend: str) -> None:
    """case 9: it hung on one GPU generation. In its own process, with a time limit."""
    code = (
        "import torch, softcap_ops\n"
        "q, k, v = (torch.randn(2, 1024, 32, 128, device='cuda', dtype=torch.bfloat16, requires_grad=True)"
        " for _ in range(3))\n"
        "try:\n"
        f"    out = softcap_ops.softcap_attention(q, k, v, softcap=10.0, causal=True, backend='{backend}')\n"
        "except softcap_ops.UnsupportedError as error:\n"
        "    print('refused', error); raise SystemExit\n"
        "out.sum().backward()\n"
        "assert all(t.grad.isfinite().all() for t in (q, k, v))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("seqlen_q", [1, 3, 8])
@pytest.mark.parametrize("seqlen_k", [257, 1000, 8192])
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("batch", [1, 4])
def test_decode(backend: str, batch: int, head_dim: int, seqlen_k: int, seqlen_q: int) -> None:
    """case 86: splitting the keys must neither give NaN nor mix the sequences up."""
    sample = Sample(
        "decode", batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=8, heads_kv=1, head_dim=head_dim,
        softcap=50.0, causal=True,
    )  # fmt: skip
    x = inputs(sample)
    out, lse = sample.attention(*x.qkv, backend=backend)
    ref_out, ref_lse = sample.reference(*x.double().qkv)
    eager_out, _ = sample.reference(*x.qkv)
    assert norm(out.double() - ref_out) <= max(2 * norm(eager_out.double() - ref_out), 4e-3 * norm(ref_out))
    assert (lse.double() - ref_lse).abs().max() < 1e-3 * ref_lse.abs().max()


@pytest.mark.parametrize("kind", ["sum", "wide", "transposed", "row"])
@each_sample(named("gqa", "packed_gqa"))
def test_gradients_of_any_layout(backend: str, sample: Sample, kind: str) -> None:
    """case 26: an expanded, sliced or transposed upstream gradient is read as its values."""
    x = inputs(sample)
    dout: Tensor
    if kind == "sum":
        dout = x.dout.new_ones(()).expand(x.dout.shape)
    elif kind == "wide":
        dout = torch.cat([x.dout, x.dout.new_full(x.dout.shape, math.nan)], dim=-1)[..., : x.dout.shape[-1]]
    elif kind == "transposed":
        dout = x.dout.transpose(-3, -2).contiguous().transpose(-3, -2)
    else:  # one row for every token and head: last stride 1, the others 0
        dout = torch.randn(x.dout.shape[-1], device="cuda", dtype=x.dout.dtype).expand(x.dout.shape)
    check_parity(sample, x._replace(dout=dout), hot=True, attention=on(backend, sample))


@each_sample(
    named("causal_more_queries", "window_more_queries", "head_dim_20", "decode_gqa", "packed_empty_sequences",
          "packed_tail", "packed_slack", "packed_only_tail", "packed_cross_causal", "packed_mqa", "no_keys")
)  # fmt: skip
def test_every_element_is_written(backend: str, sample: Sample) -> None:
    """case 18: with every fresh allocation full of NaN, an element that nothing wrote shows."""
    x = inputs(sample, hot=not sample.empty)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        actual = evaluate(lambda q, k, v: sample.attention(q, k, v, backend=backend, deterministic=False), x)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
    plain = evaluate(on(backend, sample), x)
    for a, b in zip(actual, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients_repeat(backend: str, head_dim: int, packed: bool) -> None:
    layout = {"lengths_q": (700, 1300), "lengths_k": (700, 1300)} if packed else {"seqlen_q": 1000}
    sample = Sample("repeat", heads_q=8, heads_kv=2, head_dim=head_dim, softcap=50.0, causal=True, **layout)  # type: ignore[arg-type]
    x = inputs(sample)
    first, *others = (
        evaluate(lambda q, k, v: sample.attention(q, k, v, backend=backend, deterministic=True), x) for _ in range(4)
    )
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.large  # 40 GB
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_more_elements_than_31_bits_count(backend: str, packed: bool) -> None:
    """The last rows of the last head, found at offsets past 2^31, are those of a call on just these rows."""
    shape_q, shape_k = (1, 140_000, 64, 256), (1, 140_000, 8, 256)
    assert math.prod(shape_q) > 2**31
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in (shape_q, shape_k, shape_k, shape_q))
    q *= 8
    options = {"softcap": 20.0, "causal": True, "window": (127, -1), "backend": backend}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if packed:
        cu = torch.tensor([0, 100, 140_000], dtype=torch.int32, device="cuda")
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 139_900, "max_seqlen_k": 139_900}
        out = softcap_ops.softcap_attention_varlen(*(t.squeeze(0) for t in leaves), **lengths, **options).unsqueeze(0)
    else:
        out = softcap_ops.softcap_attention(*leaves, **options)
    grads = torch.autograd.grad(out, leaves, dout)
    rows = slice(-512, None)  # a key is seen by the 127 rows after it: the last 384 keys by rows from here on
    sample = Sample("rows", batch=1, seqlen_q=512, seqlen_k=1024, heads_q=8, heads_kv=1, head_dim=256, softcap=20.0,
                    causal=True, window=(127, -1))  # fmt: skip
    x = Inputs(q[:, rows, 56:], k[:, -1024:, 7:], v[:, -1024:, 7:], dout[:, rows, 56:], torch.empty(0))
    small = evaluate(on(backend, sample), Inputs(*(t.detach().contiguous() for t in x[:4]), x.dlse), loss="out")
    for big, expected in (
        (out[:, rows, 56:], small.out),
        (grads[0][:, rows, 56:], small.dq),
        (grads[1][:, -384:, 7:], small.dk[:, -384:]),
        (grads[2][:, -384:, 7:], small.dv[:, -384:]),
    ):
        assert norm(big - expected) <= 1e-2 * norm(expected)


def test_layout_mistaken_for_bhsd() -> None:
    """case 29: 71280 heads are refused by a message that says which axis is which."""
    q = torch.zeros(1, 3, 71280, 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"71280 heads .* transpose axes 1 and 2"):
        softcap_ops.softcap_attention(q, q, q, softcap=50.0)


def test_float64_is_refused_with_each_reason() -> None:
    q = torch.zeros(1, 8, 2, 64, device="cuda", dtype=torch.float64)
    with pytest.raises(softcap_ops.UnsupportedError, match=r"bfloat16 and float16 only, got float64"):
        softcap_ops.softcap_attention(q, q, q, softcap=50.0)


@each_sample_and_heat()
def test_float32(backend: str, sample: Sample, hot: bool) -> None:
    """Where it is offered: no reduced precision in the products, and an exact tanh."""
    check_parity(sample, inputs(sample, torch.float32, hot), hot=hot, attention=on(backend, sample))


def test_requires_grad_in_is_requires_grad_out(backend: str) -> None:
    """case 40."""
    sample = BY_NAME["gqa"]
    q, k, v = inputs(sample).qkv
    with torch.inference_mode():
        assert not sample.attention(q, k, v, backend=backend)[0].requires_grad
    k.requires_grad_()
    out, _ = sample.attention(q, k, v, backend=backend)
    assert out.requires_grad
    out.sum().backward()
    assert k.grad is not None
    assert q.grad is None
