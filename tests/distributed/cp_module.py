"""What each rank does in the tests of DotProductAttention under context parallelism: its part against the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cp_cases import group_for
from torch import Tensor

from softcap_ops import DotProductAttention, UnsupportedError
from softcap_ops import distributed as cp

HEADS, GROUPS, HEAD_DIM, CAP = 8, 4, 8, 5.0
LENGTHS = (13, 0, 33, 1)


def module(comm: str = "p2p", group: Any = None, **overrides: Any) -> DotProductAttention:
    result = DotProductAttention(HEADS, HEAD_DIM, **{"num_gqa_groups": GROUPS, "softcap": CAP, **overrides})
    if group is not None:
        group = list(group) if isinstance(group, tuple) else group
        result.set_context_parallel_group(group, list(range(dist.get_world_size())), None, comm)
    return result


def tensors(*shape: int, hot: bool) -> list[Tensor]:
    """q, k, v, dout: the same on all ranks."""
    q, dout = (torch.randn(*shape, HEADS, HEAD_DIM, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(*shape, GROUPS, HEAD_DIM, dtype=torch.float64) for _ in range(2))
    return [6 * q if hot else q, k, v, dout.flatten(-2)]


def evaluate(attend: Any, x: list[Tensor], **arguments: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out = attend(*leaves, **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, x[3])]


def _close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def check_dense(comm: str, qkv_format: str, arguments: dict[str, Any], hot: bool, **call: Any) -> float:
    """This rank's part is that of the whole; returns how far the uncapped one is away."""
    where = {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
    dim = 1 if qkv_format == "bshd" else 0
    x = tensors(*((2, 32) if dim else (32, 2)), hot=hot)
    expected = evaluate(module(**arguments, qkv_format=qkv_format), x)
    mine = [cp.split_sequence(t, **where, dim=dim) for t in x]
    split = module(comm, group_for(comm), **arguments, qkv_format=qkv_format)
    actual = evaluate(split, mine, **call)
    _close(actual, [cp.split_sequence(t, **where, dim=dim) for t in expected])
    return (evaluate(split, mine, softcap=0.0)[0] - actual[0]).abs().max().item()


def check_packed(comm: str, arguments: dict[str, Any], hot: bool) -> float:
    ranks = dist.get_world_size()
    cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x = tensors(sum(LENGTHS), hot=hot)
    whole = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "qkv_format": "thd"}
    expected = evaluate(module(**arguments), x, **whole)
    cu_padded = cp.pad_sequences(x[0], cu, ranks=ranks)[1]

    def part(t: Tensor) -> Tensor:
        padded, _ = cp.pad_sequences(t, cu, ranks=ranks)
        return cp.split_sequence(padded, rank=dist.get_rank(), ranks=ranks, dim=0, cu_seqlens_padded=cu_padded)

    split = module(comm, group_for(comm), **arguments)
    whole |= {"cu_seqlens_q_padded": cu_padded, "cu_seqlens_kv_padded": cu_padded}
    actual = evaluate(split, [part(t) for t in x], **whole)
    _close(actual, [part(t) for t in expected])
    return (evaluate(split, [part(t) for t in x], softcap=0.0, **whole)[0] - actual[0]).abs().max().item()


def check_checkpointed() -> float:
    return check_dense("p2p", "bshd", {}, True, checkpoint_core_attention=True)


def check_compiled() -> None:
    """One graph, with the results of the eager call."""
    torch._dynamo.reset()
    where = {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
    mine = [cp.split_sequence(t, **where) for t in tensors(2, 32, hot=True)]
    split = module("p2p", dist.group.WORLD, qkv_format="bshd")
    _close(evaluate(torch.compile(split, fullgraph=True, backend="aot_eager"), mine), evaluate(split, mine))


def check_refusals() -> None:
    x = tensors(2, 16, hot=False)
    split = module("p2p", dist.group.WORLD, qkv_format="bshd")
    lengths = torch.tensor([0, 16, 32], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="padding_causal"):
        split(*x[:3], attn_mask_type="padding_causal", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    cu = torch.tensor([0, 32], dtype=torch.int32)
    packed = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    for name, theirs in (("max_seqlen_q", "max_seqlen_q"), ("max_seqlen_kv", "max_seqlen_k")):
        with pytest.raises(ValueError, match=f"{theirs} must be at least the longest sequence, 32"):
            split(*(t[0] for t in x[:3]), **packed, **{name: 8})
    with pytest.raises(UnsupportedError, match="different lengths"):
        split(x[0][:, :8], *x[1:3])
    split.set_context_parallel_group(None, None, None)
    assert torch.equal(split(*x[:3]), module(qkv_format="bshd")(*x[:3]))
