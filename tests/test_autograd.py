"""Autograd: every way a gradient is asked for, and each refusal, through the bare ops and the public functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Result, check_parity, evaluate, must_save_attention
from samples import Sample, each_sample, named
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from softcap_ops import UnsupportedError, reference, softcap_attention
from softcap_ops._arguments import Options
from softcap_ops.backends import cpu

BOTH_LAYOUTS = named("gqa", "packed_gqa")
DENSE = named("gqa")[0]


def bare_op(sample: Sample) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, v: sample.op(*sample.op_args(q, k, v))


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels run, in order; the backward's with the gradients asked for."""
    calls: list[str] = []
    forward, backward = cpu.forward, cpu.backward

    def counting_forward(*args: Any) -> Any:
        calls.append("forward")
        return forward(*args)

    def counting_backward(*args: Any) -> Any:
        mask = args[-1]
        calls.append("backward " + "".join(name for name, wanted in zip("qkv", mask, strict=True) if wanted))
        return backward(*args)

    monkeypatch.setattr(cpu, "forward", counting_forward)
    monkeypatch.setattr(cpu, "backward", counting_backward)
    return calls


# ---- through the bare op -----------------------------------------------------------------------------------


@each_sample(named("mha", "gqa", "causal_window", "strides_bhsd", "packed_gqa", "packed_tail"))
def test_bare_op_is_differentiable(sample: Sample) -> None:
    """case 40"""
    check_parity(sample, sample.inputs(hot=True), hot=True, attention=bare_op(sample))


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize("requires_grad", range(3), ids=["q", "k", "v"])
def test_requires_grad_in_requires_grad_out(sample: Sample, requires_grad: int) -> None:
    """case 40: the graph is never lost silently, whichever input starts it."""
    qkv = list(sample.inputs().qkv)
    assert not any(t.requires_grad for t in sample.attention(*qkv))
    qkv[requires_grad].requires_grad_()
    for out, lse in (sample.attention(*qkv), bare_op(sample)(*qkv)):
        assert out.requires_grad
        assert lse.requires_grad


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize(
    ("frozen", "asked"),
    [
        ("", "qkv"),
        ("q", "kv"),
        ("k", "qv"),
        ("v", "qk"),
        ("kv", "q"),
        ("qv", "k"),
        ("qk", "v"),
    ],
)
def test_frozen_inputs_cost_nothing(sample: Sample, frozen: str, asked: str, kernel_calls: list[str]) -> None:
    """case 40: only the gradients that are needed are computed, and they are those of the whole."""
    x = sample.inputs()
    whole = evaluate(sample.attention, x)
    kernel_calls.clear()
    leaves = {name: t.detach().requires_grad_(name not in frozen) for name, t in zip("qkv", x.qkv, strict=True)}
    out, _ = sample.attention(*leaves.values())
    torch.autograd.backward(out, x.dout)
    assert kernel_calls == ["forward", f"backward {asked}"]
    only_out = evaluate(sample.attention, x, "out")
    for name, leaf in leaves.items():
        if name in frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, getattr(only_out, f"d{name}"), rtol=0, atol=0)
    assert not torch.equal(whole.dk, only_out.dk)  # the loss on lse counts


@each_sample(BOTH_LAYOUTS)
def test_one_tensor_as_q_k_and_v(sample: Sample) -> None:
    """The three gradients of one input add up."""
    sample = Sample("self", heads_q=2, causal=True) if not sample.packed else named("packed_mha")[0]
    x = sample.inputs(torch.float64)
    q = x.q.detach().requires_grad_()
    out, _ = sample.attention(q, q, q)
    (grad,) = torch.autograd.grad(out, q, x.dout)
    ref_out, _ = sample.reference(q, q, q)
    (expected,) = torch.autograd.grad(ref_out, q, x.dout)
    torch.testing.assert_close(grad, expected)


@each_sample(BOTH_LAYOUTS)
def test_gradients_accumulate(sample: Sample) -> None:
    x = sample.inputs()
    q, k, v = (t.detach().requires_grad_() for t in x.qkv)
    for _ in range(2):
        sample.attention(q, k, v)[0].backward(x.dout)
    once = evaluate(sample.attention, x, "out")
    for leaf, grad in ((q, once.dq), (k, once.dk), (v, once.dv)):
        torch.testing.assert_close(leaf.grad, 2 * grad, rtol=0, atol=0)


# ---- upstream gradients of any layout ------------------------------------------------------------------------


@each_sample(named("gqa", "strides_bhsd", "packed_gqa", "packed_strides_bhsd"))
def test_sum_backward(sample: Sample) -> None:
    """case 26: out.sum() sends a gradient of strides 0."""
    x = sample.inputs()
    q, k, v = (t.detach().requires_grad_() for t in x.qkv)
    out, lse = sample.attention(q, k, v)
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    ones = x._replace(dout=torch.ones_like(x.dout).contiguous(), dlse=torch.ones_like(x.dlse))
    expected = evaluate(sample.attention, ones)
    for leaf, grad in ((q, expected.dq), (k, expected.dk), (v, expected.dv)):
        torch.testing.assert_close(leaf.grad, grad, rtol=0, atol=0)


def _column_of_a_cat(out: Tensor, weight: Tensor) -> Tensor:
    wide = torch.cat([out, out, out], dim=-1)
    return (wide[..., out.shape[-1] : 2 * out.shape[-1]] * weight).sum()


def _transposed(out: Tensor, weight: Tensor) -> Tensor:
    return (out.transpose(-3, -2) * weight.transpose(-3, -2).contiguous()).sum()


def _flipped(out: Tensor, weight: Tensor) -> Tensor:
    return (out.movedim(-1, 0).contiguous() * weight.movedim(-1, 0).contiguous()).sum()


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize("consumer", [_column_of_a_cat, _transposed, _flipped])
def test_upstream_layouts(sample: Sample, consumer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """case 26: what consumes out decides the strides of its gradient, never its value."""
    x = sample.inputs()
    q, k, v = (t.detach().requires_grad_() for t in x.qkv)
    consumer(sample.attention(q, k, v)[0], x.dout).backward()
    expected = evaluate(sample.attention, x, "out")
    for leaf, grad in ((q, expected.dq), (k, expected.dk), (v, expected.dv)):
        torch.testing.assert_close(leaf.grad, grad, rtol=0, atol=0)


@each_sample(BOTH_LAYOUTS)
def test_dlse_of_any_strides(sample: Sample) -> None:
    x = sample.inputs()
    permuted = x.dlse.movedim(-1, 0).contiguous().movedim(0, -1)
    assert permuted.stride() != x.dlse.stride()
    for a, b in zip(evaluate(sample.attention, x), evaluate(sample.attention, x._replace(dlse=permuted)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---- twice, forward mode, functorch ----------------------------------------------------------------------------


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize("call", ["public", "op"])
@pytest.mark.parametrize("loss", ["out", "lse"])
def test_double_backward_is_refused(sample: Sample, call: str, loss: str) -> None:
    """case 39"""
    attention = sample.attention if call == "public" else bare_op(sample)
    q, k, v = (t.detach().requires_grad_() for t in sample.inputs().qkv)
    out, lse = attention(q, k, v)
    value = (out if loss == "out" else lse).pow(2).sum()
    (dq,) = torch.autograd.grad(value, q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"not twice differentiable.*Use softcap_ops\.reference\.attention"):
        dq.pow(2).sum().backward()


def test_double_backward_by_the_reference() -> None:
    """What the refusal recommends works."""
    sample = Sample("small", batch=1, seqlen_q=3, heads_q=1, head_dim=2, softcap=1.0)
    qkv = tuple(t.detach().requires_grad_() for t in sample.inputs(torch.float64).qkv)
    assert torch.autograd.gradgradcheck(lambda *qkv: reference.attention(*qkv, softcap=1.0), qkv)


@each_sample(BOTH_LAYOUTS)
def test_create_graph_alone_is_fine(sample: Sample) -> None:
    """A gradient that keeps its graph but is not differentiated again has the plain gradient's value."""
    x = sample.inputs()
    q, k, v = (t.detach().requires_grad_() for t in x.qkv)
    grads = torch.autograd.grad(sample.attention(q, k, v)[0], (q, k, v), x.dout, create_graph=True)
    expected = evaluate(sample.attention, x, "out")
    for grad, wanted in zip(grads, expected[2:], strict=True):
        torch.testing.assert_close(grad.detach(), wanted, rtol=0, atol=0)


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize("argument", range(3), ids=["q", "k", "v"])
def test_forward_mode_is_refused(sample: Sample, argument: int) -> None:
    qkv = list(sample.inputs().qkv)
    with forward_ad.dual_level():
        qkv[argument] = forward_ad.make_dual(qkv[argument], torch.ones_like(qkv[argument]))
        for attention in (sample.attention, bare_op(sample)):
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                attention(*qkv)


def _jvp(f: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    return torch.func.jvp(f, (q,), (torch.ones_like(q),))


def _jvp_of_grad(f: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    return torch.func.jvp(torch.func.grad(f), (q,), (torch.ones_like(q),))


def _grad_of_jvp(f: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    return torch.func.grad(lambda q: _jvp(f, q)[1])(q)


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize("transform", [_jvp, _jvp_of_grad, _grad_of_jvp])
def test_func_forward_mode_is_refused(sample: Sample, transform: Callable[..., Any]) -> None:
    q, k, v = sample.inputs().qkv
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        transform(lambda q: sample.attention(q, k, v)[0].sum(), q)


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize("name", ["softcap_tensor", "scale_tensor"])
def test_a_gradient_of_cap_or_scale_is_refused(sample: Sample, name: str) -> None:
    """They are constants to the gradient: a learned one would never learn."""
    args = list(sample.op_args(*sample.inputs().qkv))
    at = [a.name for a in sample.op._schema.arguments].index("softcap")

    def attention(value: Tensor) -> Tensor:
        options = Options(*args[at:])._replace(**{name: value})
        return sample.op(*args[:at], *options)[0].sum()

    value = torch.tensor(5.0, dtype=torch.float64)
    learned = value.clone().requires_grad_()
    for ask in (lambda: attention(learned), lambda: torch.func.grad(attention)(value)):
        with pytest.raises(UnsupportedError, match=f"{name} requires a gradient"):
            ask()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(attention, (value,), (value,))
    with torch.no_grad():
        assert torch.equal(attention(learned), attention(value))


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
def test_jacfwd_is_refused(transform: Any) -> None:
    q, k, v = DENSE.inputs().qkv
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        transform(lambda q: DENSE.attention(q, k, v)[0].sum())(q)


@each_sample(named("gqa", "strides_bhsd", "packed_gqa"))
def test_func_grad(sample: Sample) -> None:
    """case 38"""
    x = sample.inputs(hot=True)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = sample.attention(q, k, v)
        return (out * x.dout).sum() + (lse.masked_fill(lse.isneginf(), 0) * x.dlse).sum()

    grads = torch.func.grad(loss, argnums=(0, 1, 2))(*x.qkv)
    for grad, wanted in zip(grads, evaluate(sample.attention, x)[2:], strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=0)


@each_sample(BOTH_LAYOUTS)
def test_func_grad_of_the_bare_op(sample: Sample) -> None:
    """case 38"""
    x = sample.inputs()
    grads = torch.func.grad(lambda *qkv: (bare_op(sample)(*qkv)[0] * x.dout).sum(), argnums=(0, 1, 2))(*x.qkv)
    for grad, wanted in zip(grads, evaluate(sample.attention, x, "out")[2:], strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=0)


@each_sample(BOTH_LAYOUTS)
def test_func_vjp(sample: Sample) -> None:
    """case 38"""
    x = sample.inputs()
    _, vjp = torch.func.vjp(sample.attention, *x.qkv)
    for grad, wanted in zip(vjp((x.dout, x.dlse)), evaluate(sample.attention, x)[2:], strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=0)


def test_func_jacrev() -> None:
    """case 38: every row of the jacobian, by vmap over the backward op."""
    sample = Sample("small", batch=1, seqlen_q=3, seqlen_k=4, heads_q=2, head_dim=2, softcap=1.0)
    q, k, v = sample.inputs(torch.float64).qkv
    jacobian = torch.func.jacrev(lambda q: sample.attention(q, k, v)[0])(q)
    expected = torch.autograd.functional.jacobian(lambda q: sample.reference(q, k, v)[0], q)
    torch.testing.assert_close(jacobian, expected)


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize("outer", ["func.grad", "autograd"])
def test_func_grad_twice_is_refused(sample: Sample, outer: str) -> None:
    """case 39: also where the second derivative is taken by another level than the first."""
    q, k, v = sample.inputs().qkv

    def squared_gradient(q: Tensor) -> Tensor:
        return torch.func.grad(lambda q: sample.attention(q, k, v)[0].pow(2).sum())(q).pow(2).sum()

    with pytest.raises(RuntimeError, match="not twice differentiable"):  # noqa: PT012
        if outer == "func.grad":
            torch.func.grad(squared_gradient)(q)
        else:
            squared_gradient(q.requires_grad_()).backward()


@each_sample(BOTH_LAYOUTS)
def test_func_levels_do_not_hide_each_other(sample: Sample) -> None:
    """The value inside torch.func.grad by q stays differentiable by k outside of it."""
    x = sample.inputs()
    expected = evaluate(sample.attention, x, "out")

    def value(k: Tensor) -> Tensor:
        return torch.func.grad_and_value(lambda q: (sample.attention(q, k, x.v)[0] * x.dout).sum())(x.q)[1]

    torch.testing.assert_close(torch.func.grad(value)(x.k), expected.dk, rtol=0, atol=0)
    k = x.k.detach().requires_grad_()
    value(k).backward()
    torch.testing.assert_close(k.grad, expected.dk, rtol=0, atol=0)


# ---- modes -------------------------------------------------------------------------------------------------


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(sample: Sample, mode: Any) -> None:
    """case 40: the same numbers, and no graph, though the inputs require a gradient."""
    x = sample.inputs()
    expected = sample.attention(*(t.detach() for t in x.qkv))
    leaves = [t.detach().requires_grad_() for t in x.qkv]
    with mode():
        for attention in (sample.attention, bare_op(sample)):
            for a, b in zip(attention(*leaves), expected, strict=True):
                assert not a.requires_grad
                assert torch.equal(a, b)


@each_sample(BOTH_LAYOUTS)
def test_inference_tensors(sample: Sample) -> None:
    with torch.inference_mode():
        qkv = [t.clone() for t in sample.inputs().qkv]
        inside = sample.attention(*qkv)
    for a, b in zip(inside, sample.attention(*sample.inputs().qkv), strict=True):
        assert torch.equal(a, b)


@each_sample(BOTH_LAYOUTS)
def test_hooks_and_retain_grad(sample: Sample) -> None:
    q, k, v = (t.detach().requires_grad_() for t in sample.inputs().qkv)
    out, _ = sample.attention(q, k, v)
    out.retain_grad()
    seen = []
    out.register_hook(lambda g: seen.append(g.shape))
    out.sum().backward()
    assert seen == [out.shape]
    assert torch.equal(out.grad, torch.ones_like(out))


@each_sample(BOTH_LAYOUTS)
def test_a_changed_input_is_noticed(sample: Sample) -> None:
    """Saved tensors are version-checked: changing one in place before backward raises."""
    q, k, v = (t.detach().requires_grad_() for t in sample.inputs().qkv)
    q2 = q * 1
    out, _ = sample.attention(q2, k, v)
    q2.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each_sample(BOTH_LAYOUTS)
def test_saved_tensor_hooks(sample: Sample) -> None:
    """case 42: what is saved does not depend on grad mode or on warm-up, so that offloading and checkpoints agree."""
    saved: list[list[tuple[Any, ...]]] = []
    for _ in range(2):
        packed: list[tuple[Any, ...]] = []

        def pack(t: Tensor, packed: list[tuple[Any, ...]] = packed) -> Tensor:
            packed.append((tuple(t.shape), t.dtype))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            q, k, v = (t.detach().requires_grad_() for t in sample.inputs().qkv)
            sample.attention(q, k, v)[0].sum().backward()
        saved.append(packed)
    assert saved[0] == saved[1]
    cu_seqlens = 2 if sample.packed else 0
    assert len(saved[0]) == 5 + cu_seqlens  # q, k, v, out, lse


# ---- checkpointing -------------------------------------------------------------------------------------------


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize(("selective", "forwards"), [(False, 2), (True, 1)], ids=["plain", "selective"])
def test_checkpoint(sample: Sample, selective: bool, forwards: int, kernel_calls: list[str]) -> None:
    """case 41: a plain checkpoint runs the forward kernel again, a selective one that saves the op does not."""
    x = sample.inputs()
    expected = evaluate(sample.attention, x)
    kernel_calls.clear()

    def block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = sample.attention(q * 1.0, k * 1.0, v * 1.0)
        return out * 1.0, lse * 1.0

    options = {"context_fn": must_save_attention} if selective else {}
    actual = evaluate(partial(checkpoint, block, use_reentrant=False, **options), x)
    assert kernel_calls == ["forward"] * forwards + ["backward qkv"]
    _assert_equal(actual, expected)


def test_reentrant_checkpoint() -> None:
    x = DENSE.inputs()
    q, k, v = (t.detach().requires_grad_() for t in x.qkv)
    checkpoint(DENSE.attention, q, k, v, use_reentrant=True)[0].backward(x.dout)
    for leaf, grad in zip((q, k, v), evaluate(DENSE.attention, x, "out")[2:], strict=True):
        assert torch.equal(leaf.grad, grad)


@each_sample(BOTH_LAYOUTS)
def test_compiled_autograd(sample: Sample) -> None:
    """An eager forward whose whole backward is captured: the graph holds the backward op."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph

    torch.compiler.reset()
    for softcap in (sample.softcap, 0.5):
        capped = replace(sample, softcap=softcap)
        x = capped.inputs()
        expected = evaluate(capped.attention, x)
        with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
            _assert_equal(evaluate(capped.attention, x), expected)
    op = "varlen_attention_bwd" if sample.packed else "attention_bwd"
    assert len(graphs) == 2
    assert all(f"torch.ops.softcap_ops.{op}.default" in graph for graph in graphs)


def _assert_equal(actual: Result, expected: Result) -> None:
    for name in Result._fields:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def test_deterministic_is_asked_for_at_the_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.use_deterministic_algorithms says when a gradient is computed is what its kernel is told."""

    told = []
    original = cpu.backward

    def backward(*args: Any) -> Any:
        told.append(args[8].deterministic)
        return original(*args)

    monkeypatch.setattr(cpu, "backward", backward)
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    try:
        for before, after in ((False, False), (False, True), (True, False)):
            torch.use_deterministic_algorithms(before)
            out = softcap_attention(q, q, q, softcap=1.0)
            torch.use_deterministic_algorithms(after)
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert told == [False, True, False]


def test_what_a_saved_tensor_hook_gives_back_is_checked() -> None:
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t):
        out = softcap_attention(q, q, q, softcap=1.0)
    with pytest.raises(TypeError, match=r"dout must be torch\.bfloat16"):
        out.sum().backward()
