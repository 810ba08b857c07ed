"""What PyTorch does to a call, on the CUDA backends: autocast, torch.func, checkpointing, nested tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import Result, evaluate, norm
from samples import Inputs, Sample, each_sample, named
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import softcap_ops

LAYOUTS = named("gqa", "packed_gqa")


def close(a: Tensor, b: Tensor) -> None:
    """The same up to the order of a backward's float32 sums."""
    assert a.dtype == b.dtype
    assert norm(a.double() - b.double()) <= 1e-2 * norm(b)


def autocast(sample: Sample, backend: str, dtype: torch.dtype) -> Any:
    def attention(*qkv: Tensor) -> Any:
        with torch.autocast("cuda", dtype):
            return sample.attention(*qkv, backend=backend)

    return attention


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", list(itertools.product((True, False), repeat=3)), ids=str)
@each_sample(LAYOUTS)
def test_autocast(backend: str, sample: Sample, wide: tuple[bool, bool, bool], low: torch.dtype) -> None:
    """case 43: mixed dtypes meet in the autocast dtype; gradients return in each input's own."""
    x = sample.inputs(low, hot=True, device="cuda")
    expected = evaluate(lambda *qkv: sample.attention(*qkv, backend=backend), x)
    dtypes = [torch.float32 if w else low for w in wide]
    q, k, v = (t.to(d) for t, d in zip(x.qkv, dtypes, strict=True))
    mixed = Inputs(q, k, v, x.dout, x.dlse)
    for attention in (
        autocast(sample, backend, low),
        torch.compile(autocast(sample, backend, low), fullgraph=True, backend="aot_eager"),
    ):
        actual = evaluate(attention, mixed)
        assert (actual.out.dtype, actual.lse.dtype) == (low, torch.float32)
        assert [g.dtype for g in actual[2:]] == dtypes
        for name in Result._fields:
            a = getattr(actual, name)
            close(a, getattr(expected, name).to(a.dtype))


def test_backward_outside_autocast(backend: str) -> None:
    def gradient(q: Tensor, dtype: torch.dtype | None) -> Tensor:
        q = q.requires_grad_()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            out = softcap_ops.softcap_attention(q, q, q, softcap=1.0, causal=True, backend=backend)
        return torch.autograd.grad(out.float().square().sum(), q)[0]

    q = torch.randn(1, 64, 4, 64, device="cuda")
    close(gradient(q.clone(), torch.bfloat16), gradient(q.bfloat16(), None).float())


def test_vmap_and_grad(backend: str) -> None:
    """The batch of vmap joins that of the kernel: one call, equal to a loop over it."""
    q, k, v = (torch.randn(3, 2, 32, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = softcap_ops.softcap_attention(q, k, v, softcap=1.0, causal=True, backend=backend)
        return out.float().square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    batched = torch.func.vmap(gradient, in_dims=(0, 0, 0))(q, k, v)
    for i in range(3):
        for a, b in zip(batched, gradient(q[i], k[i], v[i]), strict=True):
            close(a[i], b)


def test_selective_checkpoint_saves_the_kernel(backend: str) -> None:
    """case 41: forward kernel calls are 2 under plain checkpointing, 1 with the op among those to save."""
    op = torch.ops.softcap_ops.attention_fwd.default
    q = torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def block(q: Tensor) -> Tensor:
        return softcap_ops.softcap_attention(q * 2, q, q, softcap=1.0, causal=True, backend=backend).sin()

    def calls(**options: Any) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            checkpoint(block, q, use_reentrant=False, **options).sum().backward()
        return sum(e.count for e in profile.key_averages() if e.key == f"softcap_ops::attention_fwd [{backend}]")

    assert calls() == 2
    assert calls(context_fn=lambda: create_selective_checkpoint_contexts([op])) == 1


def test_nested(backend: str) -> None:
    """Jagged tensors run packed; each item as if it were alone."""
    lengths = (30, 64, 1, 50)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    values = [torch.randn(sum(lengths), h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2)]
    q, k, v = (torch.nested.nested_tensor_from_jagged(t, offsets) for t in values)
    options: dict[str, Any] = {"softcap": 1.0, "causal": True, "backend": backend}
    out = softcap_ops.softcap_attention(q, k, v, **options)
    for items in zip(*(t.unbind() for t in (q, k, v, out)), strict=True):
        *qkv, o = (t[None] for t in items)
        close(o, softcap_ops.softcap_attention(*qkv, **options))


def test_flops(backend: str) -> None:
    """2 products forward and 5 backward of the visible pairs, as on the CPU."""
    q = torch.randn(1, 128, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        softcap_ops.softcap_attention(q, q, q, softcap=1.0, causal=True, backend=backend).sum().backward()
    assert counter.get_total_flops() == (2 + 5) * 2 * 4 * 64 * (128 * 129 // 2)
