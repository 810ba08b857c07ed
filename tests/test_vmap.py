"""torch.func.vmap, alone and over grad, vjp and jacrev: equal to a loop, in one kernel call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap

import softcap_ops
from softcap_ops.backends import cpu

B, S, SK, HQ, HKV, D = 2, 7, 9, 4, 2, 8
LENGTHS_Q, LENGTHS_K = [0, 3, 7], [0, 5, 8]  # one row of k and v is past the end


def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return softcap_ops.softcap_attention(q, k, v, softcap=1.0, causal=True, window=(5, -1), return_lse=True)


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (LENGTHS_Q, LENGTHS_K))
    return softcap_ops.softcap_attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=4, max_seqlen_k=5,
        softcap=1.0, causal=True, return_lse=True,
    )  # fmt: skip


each_layout = pytest.mark.parametrize("attention", [dense, packed])
MIXED = [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0), (1, 0, 2), (-1, None, 0)]


def mapped(attention: Callable[..., Any], in_dims: tuple[int | None, ...], *sizes: int) -> tuple[Tensor, ...]:
    """q, k, v with the mapped axes of `sizes` where `in_dims` puts them (all in front of it for several sizes)."""
    q_shape, k_shape = ((S, HQ, D), (SK, HKV, D)) if attention is packed else ((B, S, HQ, D), (B, SK, HKV, D))
    tensors = []
    for shape, dim in zip((q_shape, k_shape, k_shape), in_dims, strict=True):
        t = torch.randn(*sizes, *shape, dtype=torch.float64) if dim is not None else torch.randn(shape).double()
        tensors.append(t if dim is None else t.movedim(0, dim))
    return tuple(tensors)


def loop(f: Callable[..., Any], in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    size = next(t.shape[d] for t, d in zip(tensors, in_dims, strict=True) if d is not None)
    items = [
        f(*(t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True))) for i in range(size)
    ]
    return tuple(torch.stack(outputs) for outputs in zip(*items, strict=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernel calls of a test; its warnings are errors (vmap warns when it falls back to a loop)."""
    seen: list[str] = []
    for name in ("forward", "backward"):
        kernel = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *a, _k=kernel, _n=name: (seen.append(_n), _k(*a))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield seen


@each_layout
@pytest.mark.parametrize("in_dims", MIXED, ids=str)
def test_equals_a_loop_in_one_call(attention, in_dims, calls) -> None:
    tensors = mapped(attention, in_dims, 3)
    expected = loop(attention, in_dims, *tensors)
    calls.clear()
    actual = vmap(attention, in_dims)(*tensors)
    assert calls == ["forward"]
    torch.testing.assert_close(actual, expected)


@each_layout
@pytest.mark.parametrize("in_dims", MIXED, ids=str)
def test_gradients_of_each_item(attention, in_dims, calls) -> None:
    """vmap(grad): one forward and one backward call; a tensor that is not mapped gets a gradient for each item."""
    tensors = mapped(attention, in_dims, 3)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v)
        return out.pow(2).sum() + lse.nan_to_num(neginf=0.0).sum()

    gradients = grad(loss, argnums=(0, 1, 2))
    expected = loop(gradients, in_dims, *tensors)
    calls.clear()
    torch.testing.assert_close(vmap(gradients, in_dims)(*tensors), expected)
    assert calls == ["forward", "backward"]


@each_layout
def test_gradient_of_a_map(attention, calls) -> None:
    """grad(vmap) and plain autograd through vmap: an unmapped tensor's gradient is the sum over the items."""
    in_dims = (0, None, 0)
    tensors = mapped(attention, in_dims, 3)

    def through(f: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *qkv: f(*qkv)[0].pow(2).sum()

    expected = grad(through(lambda *qkv: loop(attention, in_dims, *qkv)), argnums=(0, 1, 2))(*tensors)
    calls.clear()
    torch.testing.assert_close(grad(through(vmap(attention, in_dims)), argnums=(0, 1, 2))(*tensors), expected)
    assert calls == ["forward", "backward"]
    leaves = [t.clone().requires_grad_() for t in tensors]
    through(vmap(attention, in_dims))(*leaves).backward()
    torch.testing.assert_close(tuple(t.grad for t in leaves), expected)


@each_layout
def test_nested_maps(attention, calls) -> None:
    q, k, v = (torch.randn(n, *t.shape, dtype=torch.float64) for n, t in
               zip((3, 3, 1), mapped(attention, (0, None, None), 2), strict=True))  # fmt: skip
    nested = vmap(vmap(attention, (0, None, None)), (0, 0, None))
    actual = nested(q, k, v[0])
    assert calls == ["forward"]
    for i in range(3):
        torch.testing.assert_close(tuple(t[i] for t in actual), loop(attention, (0, None, None), q[i], k[i], v[0]))


def test_jacobian(calls) -> None:
    q, k, v = mapped(dense, (None, None, None))
    jacobian = jacrev(lambda x: dense(x, k, v)[0][0, -1])(q)
    assert calls == ["forward", "backward"]  # all rows of the Jacobian in one backward call
    assert jacobian.shape == (HQ, D, *q.shape)
    _, pull = vjp(lambda x: dense(x, k, v)[0][0, -1], q)
    for h, d in ((0, 0), (3, 7)):
        one = torch.zeros(HQ, D, dtype=q.dtype)
        one[h, d] = 1.0
        torch.testing.assert_close(jacobian[h, d], pull(one)[0])
    chunked = jacrev(lambda x: dense(x, k, v)[0][0, -1], chunk_size=5)(q)
    torch.testing.assert_close(chunked, jacobian)


@each_layout
def test_chunks_and_randomness(attention, calls) -> None:
    tensors = mapped(attention, (0, 0, 0), 5)
    expected = vmap(attention)(*tensors)
    calls.clear()
    torch.testing.assert_close(vmap(attention, chunk_size=2)(*tensors), expected)
    assert calls == ["forward"] * 3
    for randomness in ("same", "different"):
        torch.testing.assert_close(vmap(attention, randomness=randomness)(*tensors), expected)


@each_layout
def test_empty_map(attention, calls) -> None:
    tensors = mapped(attention, (0, None, None), 0)
    out, lse = vmap(attention, (0, None, None))(*tensors)
    one_out, one_lse = attention(tensors[0].new_zeros(tensors[0].shape[1:]), *tensors[1:])
    assert out.shape == (0, *one_out.shape)
    assert lse.shape == (0, *one_lse.shape)


def test_empty_batch_in_a_map() -> None:
    q, k, v = (t[:, :0] for t in mapped(dense, (0, 0, 0), 3))
    assert vmap(dense)(q, k, v)[0].shape == (3, 0, S, HQ, D)


@each_layout
def test_compiled(attention, calls) -> None:
    tensors = mapped(attention, (0, None, 0), 3)
    expected = vmap(attention, (0, None, 0))(*tensors)
    compiled = torch.compile(vmap(attention, (0, None, 0)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), expected)


def test_autocast_under_a_map() -> None:
    tensors = [t.float() for t in mapped(dense, (0, 0, 0), 3)]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = vmap(dense)(*tensors)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out, vmap(dense)(*(t.bfloat16() for t in tensors))[0])


def test_ensemble_of_modules(calls) -> None:
    """The use that vmap is for: one call for many sets of weights."""
    models = [torch.nn.Linear(16, 3 * 16, dtype=torch.float64) for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def block(projection: Callable[[Tensor], Tensor]) -> Tensor:
        q, k, v = projection(x).view(2, 5, 3, 2, 8).unbind(2)
        return dense(q, k, v)[0]

    def one(weights: Any, buffers: Any) -> Tensor:
        return block(lambda x: torch.func.functional_call(models[0], (weights, buffers), (x,)))

    out = vmap(one)(weights, buffers)
    assert calls == ["forward"]
    torch.testing.assert_close(out, torch.stack([block(m) for m in models]))


@pytest.mark.parametrize("what", ["cu_seqlens", "softcap_tensor"])
def test_refusals(what) -> None:
    ops = torch.ops.softcap_ops
    q, k, v = mapped(packed, (None, None, None))
    cu = torch.tensor([[0, 3, 7], [0, 4, 7]], dtype=torch.int32)
    caps = torch.tensor([1.0, 2.0], dtype=torch.float64)
    if what == "cu_seqlens":
        f, x = (lambda c: ops.varlen_attention_fwd(q, k, v, c, c, 7, 7, 1.0)), cu
    else:
        f, x = (lambda c: ops.attention_fwd(q[None], k[None], v[None], None, softcap_tensor=c)), caps
    with pytest.raises(softcap_ops.UnsupportedError, match="vmap over cu_seqlens, softcap or scale is not offered"):
        vmap(f)(x)


def test_more_heads_than_a_call_takes() -> None:
    """A packed map joins the heads, and there may be 65535: what to do is said in terms of the map."""
    q, k, v = mapped(packed, (None, None, None))
    maps = q.expand(20000, *q.shape)
    with pytest.raises(softcap_ops.UnsupportedError, match=r"map over 20000 .* chunk_size of at most 16383"):
        vmap(packed, (0, None, None))(maps, k, v)
    out, _ = vmap(packed, (0, None, None), chunk_size=16383)(maps, k, v)
    assert torch.equal(out[-1], out[0])


@each_layout
def test_forward_mode_is_refused_under_a_map(attention) -> None:
    tensors = mapped(attention, (0, 0, 0), 3)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(vmap(attention), tensors, tensors)
    q, k, v = (t[0] for t in tensors)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jacfwd(lambda x: attention(x, k, v)[0])(q)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.hessian(lambda x: attention(x, k, v)[0].sum())(q)
