"""torch.compile: whole graphs, one node an op, few rebuilds, and the eager numbers whatever the layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_compiler
from helpers import Result, evaluate, must_save_attention
from samples import Sample, each_sample, named
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import checkpoint

import softcap_ops
from softcap_ops.backends import cpu

BOTH_LAYOUTS = named("gqa", "packed_gqa")
BREADTH = named(
    "mha",
    "gqa",
    "causal_more_queries",
    "causal_window",
    "head_dim_33",
    "off",
    "strides_bhsd",
    "strides_last_dim",
    "strides_sliced",
    "strides_fused",
    "strides_offset",
    "strides_expanded",
    "batch_0",
    "no_queries",
    "no_keys",
    "packed_gqa",
    "packed_empty_sequences",
    "packed_tail",
    "packed_strides_bhsd",
    "packed_strides_expanded",
    "packed_batch_0",
)


class Graphs:
    """An AOT backend that runs the captured graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        def keep(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
            def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
                graphs.append(graph)
                return graph

            return compiler

        return aot_module_simplified(
            gm,
            example_inputs,
            fw_compiler=make_boxed_compiler(keep(self.forward)),
            bw_compiler=make_boxed_compiler(keep(self.backward)),
        )

    @staticmethod
    def ops(graphs: list[torch.fx.GraphModule]) -> list[str]:
        """Every softcap_ops node of the graphs."""
        nodes = [node for g in graphs for node in g.graph.nodes if node.op == "call_function"]
        return [str(n.target) for n in nodes if str(n.target).startswith("softcap_ops")]


def assert_same(actual: Result, expected: Result) -> None:
    for name in Result._fields:
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=0, msg=name)


# ---- one node an op ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@each_sample(BREADTH)
def test_graph(sample: Sample, dynamic: bool) -> None:
    """Full graph, eager numbers, and one op node forward and one backward: cases 26, 34, 43, 46."""
    x = sample.inputs(hot=not sample.empty)
    graphs = Graphs()
    compiled = torch.compile(sample.bind(), fullgraph=True, dynamic=dynamic, backend=graphs)
    assert_same(evaluate(compiled, x), evaluate(sample.attention, x))
    prefix = "softcap_ops.varlen_attention" if sample.packed else "softcap_ops.attention"
    assert graphs.ops(graphs.forward) == [f"{prefix}_fwd.default"]
    assert graphs.ops(graphs.backward) == [f"{prefix}_bwd.default"]


@each_sample(BOTH_LAYOUTS)
def test_inference_graph(sample: Sample) -> None:
    x = sample.inputs()
    graphs = Graphs()
    compiled = torch.compile(sample.bind(), fullgraph=True, backend=graphs)
    with torch.no_grad():
        for a, b in zip(compiled(*x.qkv), sample.attention(*x.qkv), strict=True):
            assert torch.equal(a, b)
    assert len(graphs.ops(graphs.forward)) == 1
    assert not graphs.backward


@each_sample(BOTH_LAYOUTS)
def test_only_out_is_used(sample: Sample) -> None:
    """The usual call: lse is dropped, and the graph holds no zeros in place of its gradient."""
    x = sample.inputs()
    graphs = Graphs()
    attention = sample.bind()
    compiled = torch.compile(lambda *qkv: attention(*qkv)[0], fullgraph=True, backend=graphs)
    q, k, v = (t.detach().requires_grad_() for t in x.qkv)
    compiled(q, k, v).backward(x.dout)
    expected = evaluate(sample.attention, x, "out")
    for leaf, grad in ((q, expected.dq), (k, expected.dk), (v, expected.dv)):
        assert torch.equal(leaf.grad, grad)
    (node,) = (n for n in graphs.backward[0].graph.nodes if "attention_bwd" in str(n.target))
    assert node.args[1] is None


# ---- inductor ------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A projection into fused q, k, v, attention on permuted views of it, and a projection out: a model's layer."""

    def __init__(self, heads_q: int = 4, heads_kv: int = 2, head_dim: int = 16, **options: Any) -> None:
        super().__init__()
        self.heads = (heads_q, heads_kv, heads_kv)
        width = heads_q * head_dim
        self.qkv = torch.nn.Linear(width, sum(self.heads) * head_dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.options = {"softcap": 2.0, "causal": True, "window": (5, -1), **options}

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, _ = x.shape
        # As transformers has it: (batch, heads, seqlen, head_dim), transposed back for the kernel.
        q, k, v = self.qkv(x).view(batch, seqlen, sum(self.heads), -1).transpose(1, 2).split(self.heads, dim=1)
        out = softcap_ops.softcap_attention(*(t.transpose(1, 2) for t in (3 * q, k, v)), **self.options)
        return self.out(out.view(batch, seqlen, -1))  # a view: wrong strides of the fake would show here


def block_results(block: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = block(x)
    return [y.detach(), *torch.autograd.grad(y.pow(2).sum(), [x, *parameters])]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor_block(dynamic: bool) -> None:
    """cases 26, 46: a layer of a model through Inductor, at three lengths."""
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for seqlen in (24, 33) if dynamic else (24,):
        x = torch.randn(2, seqlen, 64)
        parameters = list(block.parameters())
        for a, b in zip(block_results(compiled, parameters, x), block_results(block, parameters, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@each_sample(named("strides_last_dim", "strides_expanded", "packed_strides_bhsd", "no_keys"))
def test_inductor_layouts(sample: Sample) -> None:
    """case 46: Inductor asserts the sizes and strides that the fakes promised."""
    x = sample.inputs(hot=not sample.empty)
    attention = sample.bind()

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q * 1.5, k.sin(), v + 1)
        return out.flatten(-2).cos().view(out.shape), lse * 2

    compiled = torch.compile(step, fullgraph=True)
    for name, a, b in zip(Result._fields, evaluate(compiled, x), evaluate(step, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


# ---- few rebuilds ------------------------------------------------------------------------------------------------


def counting(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def test_one_graph_for_all_lengths() -> None:
    """Eight lengths with dynamic=True: one graph."""
    compiled, counter = counting(lambda q, k, v: Sample("any", causal=True).attention(q, k, v), dynamic=True)
    for seqlen in (17, 32, 48, 64, 100, 128, 129, 200):
        sample = Sample(f"seqlen_{seqlen}", seqlen_q=seqlen, causal=True)
        x = sample.inputs(hot=True)
        assert_same(evaluate(compiled, x), evaluate(sample.attention, x))
    assert counter.frame_count == 1


def test_lengths_become_dynamic_by_themselves() -> None:
    compiled, counter = counting(lambda q, k, v: Sample("any", causal=True).attention(q, k, v))
    for seqlen in (17, 32, 48, 64, 100):
        x = Sample(f"seqlen_{seqlen}", seqlen_q=seqlen, causal=True).inputs()
        assert_same(evaluate(compiled, x), evaluate(Sample("any", causal=True).attention, x))
    assert counter.frame_count == 2


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_packed_lengths(dynamic: bool | None) -> None:
    """case 54: new lengths, token counts and max_seqlen: no rebuild after the second."""

    def attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        return softcap_ops.softcap_attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, softcap=5.0,
            causal=True, return_lse=True,
        )  # fmt: skip

    compiled, counter = counting(attention, dynamic=dynamic)
    for lengths in ((17, 40), (30, 12), (5, 6), (64, 3), (33, 33), (2, 90)):
        sample = Sample(f"packed_{lengths}", lengths_q=lengths, lengths_k=lengths, causal=True)
        cu, _ = sample.cu_seqlens()
        x = sample.inputs(hot=True)
        actual = evaluate(lambda *qkv: compiled(*qkv, cu, max(lengths)), x)  # noqa: B023
        assert_same(actual, evaluate(sample.attention, x))
    assert counter.frame_count <= (1 if dynamic else 2)


def test_number_of_sequences() -> None:
    """One graph also when the batch of a packed call grows."""

    def attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
        return softcap_ops.softcap_attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=64, max_seqlen_k=64, softcap=5.0, return_lse=True
        )

    compiled, counter = counting(attention, dynamic=True)
    for lengths in ((17, 40), (30, 12, 6), (5, 6, 7, 8)):
        sample = Sample(f"packed_{lengths}", lengths_q=lengths, lengths_k=lengths)
        cu, _ = sample.cu_seqlens()
        x = sample.inputs()
        assert_same(evaluate(lambda *qkv: compiled(*qkv, cu), x), evaluate(sample.attention, x))  # noqa: B023
    assert counter.frame_count == 1


def test_causal_by_length() -> None:
    """`causal = seqlen > 1`, as transformers has it, is a symbolic bool while tracing."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return softcap_ops.softcap_attention(q, k, v, softcap=5.0, causal=q.shape[1] > 1, return_lse=True)

    compiled, _ = counting(attention, dynamic=True)
    for seqlen_q in (17, 32, 1):
        x = Sample("any", seqlen_q=seqlen_q, seqlen_k=32).inputs(hot=True)
        assert_same(evaluate(compiled, x), evaluate(attention, x))


# ---- caps and scales -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vary", ["softcap", "scale", "both"])
@each_sample(BOTH_LAYOUTS)
def test_twenty_caps_and_scales(sample: Sample, vary: str) -> None:
    """case 51: at most two frames, and each value has its own right numbers."""
    x = sample.inputs(hot=True)
    attention = sample.bind()

    def step(q: Tensor, k: Tensor, v: Tensor, softcap: float, scale: float) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, softcap=softcap, scale=scale)

    compiled, counter = counting(step)
    for i in range(20):
        softcap = 1.0 + 0.5 * i if vary != "scale" else 5.0
        scale = 0.1 + 0.01 * i if vary != "softcap" else 0.2
        actual = evaluate(functools.partial(compiled, softcap=softcap, scale=scale), x)
        assert_same(actual, evaluate(functools.partial(step, softcap=softcap, scale=scale), x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_cap_and_scale_feed_other_arithmetic(backend: str) -> None:
    """Python floats that the graph also computes with: a temperature, a product, a comparison with a constant."""
    sample = BOTH_LAYOUTS[0]
    x = sample.inputs(hot=True)
    attention = sample.bind()

    def step(q: Tensor, k: Tensor, v: Tensor, softcap: float, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = attention(q / softcap, k, v * scale, softcap=softcap / 2 + 1, scale=2 * scale)
        return out * softcap - scale, lse + softcap * scale

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for i in range(4):
        values = {"softcap": 2.0 + 1.5 * i, "scale": 0.9 + 0.3 * i}
        actual, expected = (evaluate(functools.partial(f, **values), x) for f in (compiled, step))
        for name, a, b in zip(Result._fields, actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f"{name} at {values}")
    assert counter.frame_count <= 2


def test_cap_as_attribute() -> None:
    """Modules with different caps share code; each has its own cap."""
    blocks = [Block(softcap=c, window=(-1, -1)) for c in (1.0, 5.0, 50.0, None)]
    x = torch.randn(2, 24, 64) * 8
    outs = []
    for block in blocks:
        block.load_state_dict(blocks[0].state_dict())
        out = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(out, block(x))
        outs.append(out)
    assert all(not torch.allclose(a, b, rtol=0.05) for i, a in enumerate(outs) for b in outs[:i])


@pytest.mark.parametrize("softcap", [None, 0, 0.0, 5, 5.0, 50])
@each_sample(BOTH_LAYOUTS)
def test_kinds_of_number(sample: Sample, softcap: float | None) -> None:
    """case 52: int, float and None, each as the first value that the compiled function sees."""
    x = sample.inputs(hot=True)
    attention = sample.bind()
    compiled = torch.compile(
        lambda q, k, v, softcap: attention(q, k, v, softcap=softcap), fullgraph=True, backend="aot_eager"
    )
    assert_same(evaluate(functools.partial(compiled, softcap=softcap), x), evaluate(sample.bind(softcap=softcap), x))


def test_kinds_of_number_in_turn() -> None:
    """case 52: the same function over every kind, off included; no kind is served by another's graph."""
    sample = BOTH_LAYOUTS[0]
    x = sample.inputs(hot=True)
    attention = sample.bind()
    compiled, counter = counting(lambda q, k, v, c: attention(q, k, v, softcap=c))
    for softcap in (50.0, 30.0, None, 5, 7, 0.0, 2.5, 0, 50.0, 1.0):
        actual = evaluate(lambda *qkv: compiled(*qkv, softcap), x)  # noqa: B023
        assert_same(actual, evaluate(sample.bind(softcap=softcap), x))
    assert counter.frame_count <= 5  # two of floats, two of ints, None


@pytest.mark.parametrize("bad", [-50.0, float("nan"), float("inf")])
@pytest.mark.parametrize("after", [0, 1, 3], ids=["first", "second", "fourth"])
@each_sample(BOTH_LAYOUTS)
def test_bad_cap_raises(sample: Sample, bad: float, after: int) -> None:
    """case 52: a bad cap is refused by name, as a constant and once the cap has become symbolic."""
    x = sample.inputs()
    attention = sample.bind()
    compiled = torch.compile(
        lambda q, k, v, softcap: attention(q, k, v, softcap=softcap), fullgraph=True, backend="aot_eager"
    )
    for i in range(after):
        compiled(*x.qkv, 30.0 + i)
    with pytest.raises(Exception, match=r"softcap must be finite and positive, or 0\.0 or None for off"):
        compiled(*x.qkv, bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_scale_raises(bad: float) -> None:
    x = BOTH_LAYOUTS[0].inputs()
    compiled = torch.compile(
        lambda q, k, v, scale: BOTH_LAYOUTS[0].attention(q, k, v, scale=scale), fullgraph=True, backend="aot_eager"
    )
    for scale in (0.1, 0.2, 0.3):
        compiled(*x.qkv, scale)
    with pytest.raises(Exception, match="scale must be finite"):
        compiled(*x.qkv, bad)


def test_shape_errors_are_readable() -> None:
    """While tracing, the message is that of the eager call, with the sizes that were passed."""
    q, k, v = BOTH_LAYOUTS[0].inputs().qkv
    compiled = torch.compile(
        lambda q, k, v: softcap_ops.softcap_attention(q, k, v, softcap=5.0), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=r"v must have the shape of k, \(2, 48, 2, 32\), got \(2, 48, 1, 32\)"):
        compiled(q, k, v[:, :, :1])


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_tensor_as_max_seqlen(name: str) -> None:
    """case 54: refused with the eager message when compiled too."""
    sample = named("packed_gqa")[0]
    q, k, v = sample.inputs().qkv
    packing = {**sample.packing(), name: torch.tensor(40)}

    def attention(q: Tensor, k: Tensor, v: Tensor, packing: dict[str, Any]) -> Tensor:
        return softcap_ops.softcap_attention_varlen(q, k, v, softcap=5.0, **packing)

    message = rf"{name} must be an int, got a Tensor: pass {name}\.item\(\)"
    with pytest.raises(TypeError, match=message):
        attention(q, k, v, packing)
    with pytest.raises(Exception, match=message):
        torch.compile(attention, fullgraph=True, backend="aot_eager")(q, k, v, packing)


# ---- what tracing must not do ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@each_sample(BOTH_LAYOUTS)
def test_no_fake_tensor_reaches_a_kernel(sample: Sample, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """case 56: a kernel sees real memory only."""
    calls = []
    forward, backward = cpu.forward, cpu.backward

    def checked(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            tensors = [a for a in args if isinstance(a, Tensor)]
            assert not any(isinstance(t, FakeTensor) for t in tensors)
            assert all(t.data_ptr() for t in tensors)
            calls.append(kernel.__name__)
            return kernel(*args)

        return call

    monkeypatch.setattr(cpu, "forward", checked(forward))
    monkeypatch.setattr(cpu, "backward", checked(backward))
    compiled = torch.compile(sample.bind(), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    evaluate(compiled, sample.inputs())
    assert calls == ["forward", "backward"]


def test_double_backward_is_refused() -> None:
    """case 39"""
    sample = BOTH_LAYOUTS[0]
    compiled = torch.compile(sample.bind(), fullgraph=True, backend="aot_eager")
    q, k, v = (t.detach().requires_grad_() for t in sample.inputs().qkv)
    out, _ = compiled(q, k, v)
    with pytest.raises(RuntimeError, match=r"does not currently support double backward|not twice differentiable"):  # noqa: PT012
        (dq,) = torch.autograd.grad(out.pow(2).sum(), q, create_graph=True)
        dq.pow(2).sum().backward()


@pytest.mark.parametrize("outermost", ["compile", "checkpoint"])
@pytest.mark.parametrize("selective", [False, True], ids=["plain", "selective"])
@each_sample(BOTH_LAYOUTS)
def test_checkpoint(sample: Sample, selective: bool, outermost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """case 41: compile(checkpoint) and checkpoint(compile) give the eager gradients; the selective one runs the
    forward kernel once."""
    x = sample.inputs()
    expected = evaluate(sample.attention, x)
    calls = []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *args: (calls.append(1), forward(*args))[1])
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = must_save_attention
    attention = sample.bind()

    def block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q * 1.0, k * 1.0, v * 1.0)
        return out * 1.0, lse * 1.0

    if outermost == "compile":
        step = torch.compile(lambda *qkv: checkpoint(block, *qkv, **options), fullgraph=True, backend="aot_eager")
    else:
        step = functools.partial(checkpoint, torch.compile(block, fullgraph=True, backend="aot_eager"), **options)
    assert_same(evaluate(step, x), expected)
    if outermost == "compile":
        assert len(calls) == (1 if selective else 2)


@each_sample(BOTH_LAYOUTS)
def test_func_grad_inside_compile(sample: Sample) -> None:
    """case 38"""
    x = sample.inputs()
    attention = sample.bind()

    def gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *qkv: (attention(*qkv)[0] * x.dout).sum(), argnums=(0, 1, 2))(q, k, v)

    compiled = torch.compile(gradients, fullgraph=True, backend="aot_eager")
    for grad, wanted in zip(compiled(*x.qkv), evaluate(sample.attention, x, "out")[2:], strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=0)


def test_deterministic_mode_is_read_when_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """deterministic=None follows torch's global switch, not the state at compile time."""
    seen = []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *args: (seen.append(args[4].deterministic), forward(*args))[1])
    sample = BOTH_LAYOUTS[0]
    compiled = torch.compile(sample.bind(), fullgraph=True, backend="aot_eager")
    qkv = sample.inputs().qkv
    try:
        for mode in (False, True, False):
            torch.use_deterministic_algorithms(mode)
            compiled(*qkv)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True, False]
