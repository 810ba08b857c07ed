"""The CUDA backends inside torch.compile, CUDA graphs, streams and the profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import evaluate, metadata, norm
from samples import BY_NAME, Sample, each_sample, named
from torch import Tensor

import softcap_ops
from softcap_ops import UnsupportedError, _impl

LAYOUTS = named(
    "gqa", "causal_more_queries", "window_both", "head_dim_20", "gemma2_local", "seqlen_1", "seqlen_129",
    "strides_bhsd", "strides_sliced", "no_keys", "packed_gqa", "packed_empty_sequences", "packed_tail",
    "packed_strides_bhsd",
)  # fmt: skip


def close(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.isfinite(), b.isfinite())
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
    assert norm(a - b) <= 1e-2 * norm(b) + 1e-6


def on(backend: str, sample: Sample) -> Callable[..., tuple[Tensor, Tensor]]:
    """The public function on this sample, its cu_seqlens made beforehand."""
    options: dict[str, Any] = {**sample.options, "return_lse": True, "backend": backend}
    if not sample.packed:
        return lambda q, k, v: softcap_ops.softcap_attention(q, k, v, **options)
    options |= sample.packing("cuda")
    return lambda q, k, v: softcap_ops.softcap_attention_varlen(q, k, v, **options)


@each_sample(LAYOUTS)
def test_opcheck(backend: str, sample: Sample) -> None:
    """cases 46, 48, 49: schema, fake, autograd and AOT dispatch of the ops on CUDA tensors."""
    x = sample.inputs(torch.bfloat16, device="cuda")
    q, k, v = (t.requires_grad_() for t in x.qkv)
    options = (*sample.op_options(q), None, backend)
    sample.op(q, k, v, *options)
    # Their backward sums by atomic adds in an order of its own, so test_aot_dispatch may differ in the last bits.
    torch.library.opcheck(sample.op, (q, k, v, *options), atol=1e-2, rtol=2e-2)
    with torch.no_grad():
        out, lse = sample.op(q, k, v, *options, needs_backward=True)
    q, k, v = (t.detach() for t in (q, k, v))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(sample.op_bwd, (x.dout, x.dlse, q, k, v, out, lse, *options), test_utils=tests)


@each_sample(LAYOUTS)
def test_fake_says_what_the_kernel_returns(backend: str, sample: Sample) -> None:
    from torch._subclasses import FakeTensorMode

    x = sample.inputs(torch.bfloat16, device="cuda")
    options = (*sample.op_options(x.q), None, backend)
    real = sample.op(*x.qkv, *options, needs_backward=True)
    real += sample.op_bwd(x.dout, x.dlse, *x.qkv, *real, *options)
    with FakeTensorMode() as mode:
        f = type(x)(*(mode.from_tensor(t) for t in x))
        fake_options = tuple(mode.from_tensor(o) if isinstance(o, Tensor) else o for o in options)
        fake = sample.op(*f.qkv, *fake_options, needs_backward=True)
        fake += sample.op_bwd(f.dout, f.dlse, *f.qkv, *fake, *fake_options)
    for a, b in zip(real, fake, strict=True):
        assert metadata(a) == metadata(b)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@each_sample(LAYOUTS)
def test_inductor(backend: str, sample: Sample, dynamic: bool) -> None:
    """case 56: one graph, the same results as eager."""
    x = sample.inputs(torch.bfloat16, hot=not sample.empty, device="cuda")
    attention = on(backend, sample)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q * 1.5, k, v)
        return out + 1, lse

    expected = evaluate(layer, x)
    actual = evaluate(torch.compile(layer, fullgraph=True, dynamic=dynamic), x)
    for a, b in zip(actual, expected, strict=True):
        close(a, b)


@each_sample(named("gqa", "packed_gqa", "gemma2_local"))
def test_reduce_overhead(backend: str, sample: Sample) -> None:
    """case 59: CUDA graphs through the compiler; a result is still right after the next call."""
    layer = torch.compile(on(backend, sample), fullgraph=True, mode="reduce-overhead")
    kept = []
    for seed in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = sample.inputs(torch.bfloat16, hot=True, device="cuda", seed=seed)
        kept.append((x, [t.clone() for t in evaluate(layer, x)]))
    for x, results in kept:
        for a, b in zip(results, evaluate(on(backend, sample), x), strict=True):
            close(a, b)


def test_captured_graph_replays_new_lengths(backend: str) -> None:
    """case 59: a packed forward and backward, captured once, serves other cu_seqlens within the same max_seqlen."""
    tokens, heads, head_dim = 96, 4, 64
    q, k, v = (
        torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    dout = torch.randn_like(q)
    cu = torch.tensor([0, 32, 64, 96], dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, ...]:
        out, lse = softcap_ops.softcap_attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=64, max_seqlen_k=64, softcap=2.0, causal=True,
            return_lse=True, backend=backend,
        )  # fmt: skip
        return (out, lse, *torch.autograd.grad(out, (q, k, v), dout))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([0, 32, 64, 96], [0, 10, 64, 90], [0, 0, 33, 33]):
        cu.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        results = [t.detach().clone() for t in captured]
        for a, b in zip(results, step(), strict=True):
            close(a, b.detach())


def test_capture_before_warm_up_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """case 80: nothing is tried while a graph is captured."""
    from softcap_ops.backends import fa2, fa3, hopper, triton

    module = {"fa2": fa2, "fa3": fa3, "hopper": hopper, "triton": triton}.get(backend)
    if module is None:
        pytest.skip(f"{backend} has its own test")
    monkeypatch.setattr(module._prober, "_outcomes", {})
    _impl.forget()
    q = torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.bfloat16)

    def attention() -> Tensor:
        return softcap_ops.softcap_attention(q, q, q, softcap=2.0, backend=backend)

    torch.cuda.synchronize()
    with pytest.raises(UnsupportedError, match="Warm up"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention()
    attention()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention()
    graph.replay()
    close(out, attention())


def test_side_stream(backend: str) -> None:
    """The kernels run on the current stream: behind the work that makes their input."""
    sample = BY_NAME["gemma2_global"]
    x = sample.inputs(torch.bfloat16, device="cuda")
    expected = evaluate(on(backend, sample), x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = type(x)(*(t * 1 for t in x))
        actual = evaluate(on(backend, sample), late)
    stream.synchronize()
    for a, b in zip(actual, expected, strict=True):
        close(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device(backend: str) -> None:
    sample = BY_NAME["packed_gqa"]
    attention = partial(sample.attention, backend=backend)
    expected = evaluate(attention, sample.inputs(torch.bfloat16, device="cuda:0"))
    with torch.cuda.device(0):
        actual = evaluate(attention, sample.inputs(torch.bfloat16, device="cuda:1"))
    for a, b in zip(actual, expected, strict=True):
        close(a.to("cuda:0"), b)


def test_memory(backend: str) -> None:
    """Nothing of seqlen_q x seqlen_k is held, and no gradient twice."""
    shape = (2, 8192, 8, 128)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = tuple(t.requires_grad_() for t in (q, k, v))

    def step() -> None:
        out = softcap_ops.softcap_attention(*leaves, softcap=50.0, causal=True, backend=backend)
        torch.autograd.grad(out, leaves, dout)

    step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    tensor = q.numel() * q.element_size()
    # out, dq, dk, dv, and the kernels' own float32 dq (two tensors' worth); a quarter for lse and row sums.
    assert peak <= 6.25 * tensor, f"{peak / tensor:.2f} tensors"


@each_sample(named("gemma2_global", "packed_gemma2"))
def test_flash_kernels_ran(backend: str, sample: Sample) -> None:
    """By the kernels' names: it was the backend that computed it, forward and backward."""
    if backend not in ("fa2", "fa3", "hopper"):
        pytest.skip(f"{backend} has its own test")
    x = sample.inputs(torch.bfloat16, device="cuda")
    evaluate(on(backend, sample), x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        evaluate(on(backend, sample), x, loss="out")
        torch.cuda.synchronize()
    kernels = [e.key for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    marks = {
        "fa2": ("flash_fwd", "flash_bwd"),
        "fa3": ("FlashAttnFwdSm90", "FlashAttnBwdSm90"),
        "hopper": ("softcap_hopper::forward_kernel", "softcap_hopper::backward_kernel"),
    }[backend]
    for mark in marks:
        assert any(mark in name for name in kernels), kernels
