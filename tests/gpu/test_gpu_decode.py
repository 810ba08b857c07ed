"""softcap_attention_decode on every CUDA backend: the table of cases, no synchronisation, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_samples import BY_NAME, DecodeSample, Inputs, check_decode, each_sample, each_sample_and_heat, named
from samples import each_dtype
from test_decode_transforms import Decoder, lengths
from torch import Tensor

import softcap_ops

HALF = (torch.bfloat16, torch.float16)


def at_home(backend: str, sample: DecodeSample) -> DecodeSample:
    """FA2's blocks hold a multiple of 256 keys."""
    return replace(sample, block_size=256) if sample.block_size and backend == "fa2" else sample


def inputs(sample: DecodeSample, dtype: torch.dtype = torch.bfloat16, hot: bool = True) -> Inputs:
    return sample.inputs(dtype, hot=hot, device="cuda", poison=0.0)


@each_dtype(HALF)
@each_sample_and_heat()
def test_parity(backend: str, sample: DecodeSample, hot: bool, dtype: torch.dtype) -> None:
    sample = at_home(backend, sample)
    decode = lambda x: sample.decode(x, backend=backend)  # noqa: E731
    check_decode(sample, inputs(sample, dtype, hot), hot=hot, decode=decode)


@pytest.mark.parametrize("block_size", [0, 256], ids=["dense", "paged"])
@pytest.mark.parametrize("seqlen_q", [1, 3, 8])
@pytest.mark.parametrize("seqlen_k", [257, 1000, 8192])
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("batch", [1, 4])
def test_splits(backend: str, batch: int, head_dim: int, seqlen_k: int, seqlen_q: int, block_size: int) -> None:
    """case 86: splitting the keys must neither give NaN nor mix the sequences up, and gives the same every time."""
    each = (seqlen_k, seqlen_k - 100, seqlen_k // 2, 3)[:batch]
    sample = DecodeSample(
        f"case86_{batch}_{head_dim}_{seqlen_k}_{seqlen_q}", lengths=each, seqlen_q=seqlen_q, heads_q=8, heads_kv=1,
        head_dim=head_dim, softcap=50.0, block_size=block_size,
    )  # fmt: skip
    x = inputs(sample)
    check_decode(sample, x, hot=True, decode=lambda x: sample.decode(x, backend=backend))
    first = sample.decode(x, backend=backend)
    for a, b in zip(sample.decode(x, backend=backend), first, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("softcap", [50.0, 30.0, 1.0])
@each_sample(named("one_query", "three_queries", "split", "window", "leftpad", "paged"))
def test_the_cap_is_applied(backend: str, sample: DecodeSample, softcap: float) -> None:
    """case 4"""
    sample = at_home(backend, sample)
    x, scale = inputs(sample, hot=False), 100 * sample.head_dim**-0.5
    results = [sample.decode(x, softcap=cap, scale=scale, backend=backend)[1] for cap in (None, softcap, softcap / 2)]
    for i, a in enumerate(results):
        for b in results[:i]:
            assert (a - b).nan_to_num(0.0, 0.0, 0.0).abs().max() > 0.2


@each_sample(named("one_query", "window_queries", "leftpad", "paged", "empty_sequences"))
def test_nothing_waits_for_the_device(backend: str, sample: DecodeSample) -> None:
    sample = at_home(backend, sample)
    x = inputs(sample)
    sample.decode(x, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample.decode(x, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_sample(named("one_query", "three_queries", "paged"))
def test_a_captured_step_follows_the_lengths(backend: str, sample: DecodeSample) -> None:
    sample = at_home(backend, replace(sample, lengths=(200, 150, 90)))
    x = inputs(sample)
    for _ in range(2):
        sample.decode(x, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = sample.decode(x, backend=backend)
    for step in range(4):
        x.cache_seqlens.fill_(50 * step).clamp_(max=90)
        graph.replay()
        for a, b in zip((out, lse), sample.decode(x, backend=backend), strict=True):
            torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_steps_share_one_graph(mode: str) -> None:
    eager, model = Decoder().cuda().bfloat16(), Decoder().cuda().bfloat16()
    model.load_state_dict(eager.state_dict())
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    seqlens = lengths(0, 3).cuda()
    for i in range(12):
        x = torch.randn(2, 1, 16, dtype=torch.bfloat16, device="cuda")
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            torch.testing.assert_close(compiled(x, seqlens), eager(x, seqlens), atol=3e-2, rtol=3e-2)
        seqlens += 1


def test_the_public_function_picks_a_backend() -> None:
    sample = BY_NAME["one_query"]
    x = inputs(sample)
    text = softcap_ops.explain(*x[:3], cache_seqlens=x.cache_seqlens, softcap=5.0, causal=True)
    assert text.splitlines()[0].startswith("would run on: "), text
    out: Tensor = sample.decode(x)[0]
    assert out.is_cuda
