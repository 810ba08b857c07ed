"""Jagged torch.nested q, k, v: each item is a sequence of its own, computed packed, without a copy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import softcap_ops
from softcap_ops.backends import cpu

LENGTHS = (3, 7, 1, 5)
OPTIONS: dict[str, Any] = {"softcap": 1.0, "causal": True}


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def jagged(values: Tensor, offsets: Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def data(lengths: tuple[int, ...] = LENGTHS, heads_q: int = 6, heads_kv: int = 2) -> tuple[Any, ...]:
    """q, k, v with one offsets tensor, and so one ragged dimension."""
    offsets = offsets_of(lengths)
    return tuple(
        jagged(torch.randn(sum(lengths), h, 8, dtype=torch.float64, requires_grad=True), offsets)
        for h in (heads_q, heads_kv, heads_kv)
    )


def attention(q: Any, k: Any, v: Any) -> Any:
    return softcap_ops.softcap_attention(q, k, v, return_lse=True, **OPTIONS)


def items_of(*tensors: Any) -> list[tuple[Tensor, ...]]:
    return [tuple(t[None] for t in item) for item in zip(*(t.unbind() for t in tensors), strict=True)]


def test_equals_each_item_alone() -> None:
    qkv = data()
    out, lse = attention(*qkv)
    assert out.shape == qkv[0].shape
    assert lse.shape == qkv[0].shape[:3]
    for (q, k, v), (o, stats) in zip(items_of(*qkv), items_of(out, lse), strict=True):
        expected = attention(q, k, v)
        torch.testing.assert_close(o, expected[0])
        torch.testing.assert_close(stats.transpose(1, 2), expected[1])


def test_explained() -> None:
    """As the packed call that it is."""
    q, k, v = (t.detach() for t in data())
    lengths = {"max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS)}
    packing = {"cu_seqlens_q": q.offsets().int(), "cu_seqlens_k": k.offsets().int()} | lengths
    explained = softcap_ops.explain(q, k, v, **OPTIONS)
    assert explained == softcap_ops.explain(q.values(), k.values(), v.values(), **packing, **OPTIONS)


def test_gradients() -> None:
    leaves = [t.values().detach().requires_grad_() for t in data()]
    offsets = offsets_of(LENGTHS)
    out, lse = attention(*(jagged(t, offsets) for t in leaves))
    actual = torch.autograd.grad(out.values().pow(2).sum() + lse.values().sum(), leaves)
    expected = [torch.zeros_like(t) for t in leaves]
    starts = offsets_of(LENGTHS).tolist()
    for a, b in itertools.pairwise(starts):
        item = [t[a:b].detach()[None].requires_grad_() for t in leaves]
        o, stats = attention(*item)
        for e, g in zip(expected, torch.autograd.grad(o.pow(2).sum() + stats.sum(), item), strict=True):
            e[a:b] = g[0]
    torch.testing.assert_close(list(actual), expected)


def test_queries_and_keys_of_different_lengths() -> None:
    offsets_q, offsets_k = offsets_of(LENGTHS), offsets_of((4, 7, 9, 0))
    q = jagged(torch.randn(16, 4, 8), offsets_q)
    k, v = (jagged(torch.randn(20, 2, 8), offsets_k) for _ in range(2))
    out, _ = attention(q, k, v)
    for item, o in zip(items_of(q, k, v), out.unbind(), strict=True):
        torch.testing.assert_close(o[None], attention(*item)[0])


def test_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads the values where they are and its outputs are the result's values, eager and compiled."""
    q, k, v = data()
    projected = torch.randn(16, 3, 4, 8)
    q2, k2, v2 = (jagged(projected[:, i], q.offsets()) for i in range(3))  # views of one projection
    seen: list[list[int]] = []
    kernel = cpu.forward

    def spy(*args: Any) -> Any:
        results = kernel(*args)
        seen.append([t.data_ptr() for t in (*args[:3], *results)])
        return results

    monkeypatch.setattr(cpu, "forward", spy)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    # torch 2.11 fails on jagged tensors that leave a compiled graph (docs/pytorch.md).
    functions = (attention, compiled) if torch.__version__ >= "2.12" else (attention,)
    for f in functions:
        for tensors in ((q, k, v), (q2, k2, v2)):
            with torch.no_grad():
                out, lse = f(*tensors)
            assert seen.pop() == [t.values().data_ptr() for t in (*tensors, out, lse)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_step(backend: str) -> None:
    """Projection, attention and loss in one graph; other lengths, other numbers of tokens and items reuse it."""
    weights = [torch.randn(16, 32, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def loss(x: Any) -> Tensor:
        q, k, v = ((x @ weight).unflatten(-1, (4, 8)) for weight in weights)
        out, lse = attention(q, k, v)
        return out.values().pow(2).sum() + lse.values().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=True)
    for lengths in (LENGTHS, (2, 2, 9), (6, 1, 1, 1, 30)):
        x = jagged(torch.randn(sum(lengths), 16, dtype=torch.float64), offsets_of(lengths))
        expected = torch.autograd.grad(loss(x), weights)
        actual = torch.autograd.grad(compiled(x), weights)
        torch.testing.assert_close(actual, expected)


def test_no_recompiles() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")  # a batch is never as large as another size: such would be a guard
    compiled = torch.compile(attention, fullgraph=True, backend=counter, dynamic=True)
    for lengths in (LENGTHS, (2, 2, 9), (6, 2, 3, 2, 30), (8, 8, 8)):
        q, k, v = data(lengths)
        torch.testing.assert_close(compiled(q, k, v)[0].values(), attention(q, k, v)[0].values())
    assert counter.frame_count == 1


def test_autocast_and_nested_arithmetic() -> None:
    qkv = [t.float() for t in data()]
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention(*qkv)
    assert out.dtype == torch.bfloat16
    residual = qkv[0] + out  # q's ragged dimension: the result composes with q
    assert residual.shape == qkv[0].shape


def test_empty_items_and_known_lengths() -> None:
    offsets = offsets_of((0, 4, 0))
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(torch.randn(4, 2, 8), offsets, min_seqlen=0, max_seqlen=4)
        for _ in range(3)
    )
    out, _ = attention(q, k, v)
    torch.testing.assert_close(out.values()[None], attention(*(t.values()[None] for t in (q, k, v)))[0])


def test_refusals() -> None:
    q, k, v = data()
    with pytest.raises(TypeError, match=r"k must be a jagged nested tensor like the others, got a plain tensor"):
        attention(q, k.values()[None], v)
    with pytest.raises(TypeError, match=r"q must be a jagged nested tensor like the others, got a plain tensor"):
        attention(q.values()[None], k.values()[None], v)
    strided = torch.nested.nested_tensor([torch.randn(3, 4, 8)], layout=torch.strided)
    with pytest.raises(TypeError, match=r"q must be a jagged nested tensor .* layout torch.strided"):
        attention(strided, strided, strided)
    with pytest.raises(ValueError, match=r"q must have shape \(batch, ragged, heads, head_dim\)"):
        attention(*(t.transpose(1, 2) for t in (q, k, v)))
    holes = torch.nested.nested_tensor_from_jagged(q.values(), q.offsets(), lengths=torch.tensor([2, 3, 1, 4]))
    with pytest.raises(ValueError, match=r"q must be contiguous, got a jagged tensor with holes"):
        attention(holes, k, v)
    fewer = [jagged(t.values(), offsets_of((10, 6))) for t in (k, v)]
    with pytest.raises(ValueError, match=r"k must have the batch of q, 4, got shape \(2, "):
        attention(q, *fewer)
    with pytest.raises(TypeError, match=r"k must have the dtype of q"):
        attention(q, k.float(), v)
