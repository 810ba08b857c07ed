"""decode_attention_fwd as PyTorch sees it: tracing, compiling, and each transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_samples import DecodeSample, each_sample, named
from helpers import metadata
from samples import each_dtype
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import softcap_ops
from softcap_ops import UnsupportedError, softcap_attention_decode
from softcap_ops._flops import visible_pairs

OP = torch.ops.softcap_ops.decode_attention_fwd.default


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_no_gradient(name: str) -> None:
    """Refused by the name of what requires one, compiled too; fine where nobody records."""
    (sample,) = named("one_query")
    x = sample.inputs(poison=0.0)
    x = x._replace(**{name: getattr(x, name).requires_grad_()})
    expected = sample.decode(x.map(Tensor.detach))[0]
    with pytest.raises(UnsupportedError, match=f"no gradient, and {name} requires one"):
        sample.decode(x)
    with torch.no_grad():
        assert torch.equal(sample.decode(x)[0], expected)
    with torch.inference_mode():
        assert torch.equal(sample.decode(x)[0], expected)
    with pytest.raises(Exception, match=f"no gradient, and {name} requires one"):
        torch.compile(sample.decode, fullgraph=True, backend="aot_eager")(x)


def test_forward_mode_is_refused() -> None:
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 9, 2, 8)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: softcap_attention_decode(t, k, k, lengths(9), softcap=5.0), (q,), (q,))


TRACED = named(
    "one_query", "three_queries", "empty_sequences", "batch_0", "no_queries", "no_room", "leftpad", "window", "off",
    "head_dim_33", "strides_bhsd", "strides_last_dim", "paged", "paged_leftpad", "paged_bhsd",
)  # fmt: skip


@each_sample(TRACED)
def test_opcheck(sample: DecodeSample) -> None:
    """cases 46, 49"""
    opcheck(OP, sample.op_args(sample.inputs(poison=0.0)))


@each_dtype()
@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "no_lse"])
@each_sample(TRACED)
def test_fake_is_real(sample: DecodeSample, return_lse: bool, dtype: torch.dtype) -> None:
    args = sample.op_args(sample.inputs(dtype))
    real = OP(*args, return_lse=return_lse)
    with FakeTensorMode() as mode:
        fake = OP(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args), return_lse=return_lse)
    for r, f in zip(real, fake, strict=True):
        assert metadata(f) == metadata(r)


def test_symbolic_sizes() -> None:
    """Sizes stay symbols: the fake guards on none of them."""
    for sample in named("three_queries", "paged_queries"):
        args = sample.op_args(sample.inputs())
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            for t in OP(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)):
                assert all(isinstance(n, torch.SymInt) for n in t.shape)


class Decoder(torch.nn.Module):
    """One layer with a static cache, as a serving loop compiles it."""

    def __init__(self, capacity: int = 40) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 4 * 16, bias=False)
        self.register_buffer("k_cache", torch.zeros(2, capacity, 1, 16))
        self.register_buffer("v_cache", torch.zeros(2, capacity, 1, 16))

    def forward(self, x: Tensor, seqlens: Tensor) -> Tensor:
        q, k, v = (6 * self.qkv(x)).unflatten(-1, (4, 16)).split([2, 1, 1], dim=2)
        rows = (
            torch.arange(2, device=x.device).unsqueeze(1),
            seqlens.unsqueeze(1) + torch.arange(x.shape[1], device=x.device),
        )
        self.k_cache.index_put_(rows, k)
        self.v_cache.index_put_(rows, v)
        return softcap_attention_decode(
            q, self.k_cache, self.v_cache, (seqlens + x.shape[1]).int(), softcap=5.0, window=(20, 0)
        )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_steps_share_one_graph(backend: str) -> None:
    """A static cache: the graph of the first step serves all others, whatever the lengths; the prompt has its own."""
    eager, model = Decoder(), Decoder()
    model.load_state_dict(eager.state_dict())
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    seqlens = lengths(0, 3)
    for i in range(12):
        x = torch.randn(2, 1, 16)
        torch.testing.assert_close(compiled(x, seqlens), eager(x, seqlens), atol=1e-5, rtol=1e-5)
        seqlens += 1
        assert counter.frame_count == 1, f"step {i} was compiled again"
    x = torch.randn(2, 4, 16)
    torch.testing.assert_close(compiled(x, seqlens), eager(x, seqlens), atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 2


def test_caps_and_scales_share_a_graph() -> None:
    """case 51: one graph more than the first for all values of cap and scale."""
    (sample,) = named("three_queries")
    x = sample.inputs(hot=True, poison=0.0)
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(lambda softcap, scale: sample.decode(x, softcap=softcap, scale=scale), fullgraph=True,
                      backend=counter)  # fmt: skip
    for softcap, scale in ((5.0, 0.1), (6.0, 0.2), (7.5, 0.3), (30.0, 0.01)):
        torch.testing.assert_close(f(softcap, scale), sample.decode(x, softcap=softcap, scale=scale))
    assert counter.frame_count == 2


def test_export() -> None:
    (sample,) = named("paged_queries")
    x = sample.inputs()

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, seqlens: Tensor, table: Tensor) -> Tensor:
            return softcap_attention_decode(q, k, v, seqlens, block_table=table, softcap=5.0)

    args = (*x[:4], x.block_table)
    program = torch.export.export(Module(), args)
    torch.testing.assert_close(program.module()(*args), Module()(*args))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(low: torch.dtype) -> None:
    """case 43: q in float32 (after rotary embedding) with caches in the low dtype."""
    (sample,) = named("leftpad")
    x = sample.inputs(low, hot=True)
    with torch.autocast("cpu", low):
        out, lse = sample.decode(x._replace(q=x.q.float()))
    expected = sample.decode(x)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("mapped", ["all", "queries", "lengths"])
def test_vmap(mapped: str) -> None:
    (sample,) = named("leftpad")
    one = sample.inputs(poison=0.0)
    x = [torch.stack([t, t.flip(0)]) for t in one[:5]]  # type: ignore[union-attr]
    dims = {"all": (0, 0, 0, 0, 0), "queries": (0, None, None, None, None), "lengths": (None, None, None, 0, 0)}[mapped]

    def decode(*args: Tensor) -> Any:
        return softcap_attention_decode(*args[:4], cache_leftpad=args[4], softcap=5.0, return_lse=True)

    args = [t if d == 0 else t[0] for t, d in zip(x, dims, strict=True)]
    actual = torch.vmap(decode, in_dims=dims)(*args)
    for i in range(2):
        expected = decode(*(t[i] if d == 0 else t for t, d in zip(args, dims, strict=True)))
        torch.testing.assert_close((actual[0][i], actual[1][i]), expected)


@pytest.mark.parametrize("size", [0, 2])
def test_vmap_without_lse(size: int) -> None:
    (sample,) = named("leftpad")
    x = sample.inputs(poison=0.0)
    queries = x.q.expand(size, *x.q.shape)
    op = torch.ops.softcap_ops.decode_attention_fwd
    out, lse = torch.vmap(lambda q: op(q, x.k_cache, x.v_cache, x.cache_seqlens, None, None, 5.0, return_lse=False))(
        queries
    )
    assert out.shape == queries.shape
    assert lse.numel() == 0


def test_vmap_paged() -> None:
    """Blocks are shared: the table may be mapped, the caches may not."""
    (sample,) = named("paged")
    x = sample.inputs()
    tables = torch.stack([x.block_table, x.block_table.roll(1, 0)])
    seqlens = torch.stack([x.cache_seqlens, x.cache_seqlens.roll(1, 0)])

    def decode(table: Tensor, seqlens: Tensor) -> Tensor:
        return softcap_attention_decode(x.q, x.k_cache, x.v_cache, seqlens, block_table=table, softcap=5.0)

    actual = torch.vmap(decode)(tables, seqlens)
    for i in range(2):
        torch.testing.assert_close(actual[i], decode(tables[i], seqlens[i]))
    with pytest.raises(UnsupportedError, match="vmap over k_cache or v_cache with a block_table"):
        torch.vmap(
            lambda k: softcap_attention_decode(x.q, k, k, x.cache_seqlens, block_table=x.block_table, softcap=5.0)
        )(torch.stack([x.k_cache, x.k_cache]))


@each_sample(
    named("one_query", "three_queries", "more_queries_than_keys", "window_queries", "leftpad", "paged",
          "empty_sequences")
)  # fmt: skip
def test_flops(sample: DecodeSample) -> None:
    """4 head_dim a visible pair and query head, each sequence by its own length; what the cache holds, while traced."""

    def count(f: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            f()
        return counter.get_total_flops()

    x = sample.inputs()
    unit = 4 * sample.heads_q * sample.head_dim
    pairs = sum(visible_pairs(sample.seqlen_q, n, sample.causal, sample.window) for n in sample.lengths)
    assert count(lambda: sample.decode(x)) == unit * pairs
    capacity = x.k_cache.shape[1] * (1 if x.block_table is None else x.block_table.shape[1])
    with FakeTensorMode() as mode:
        fake = [None if a is None else mode.from_tensor(a) for a in x]
        traced = count(lambda: OP(*fake, sample.softcap, sample.scale, sample.causal, *sample.window))
    most = visible_pairs(sample.seqlen_q, capacity, sample.causal, sample.window)
    assert traced == unit * most * len(sample.lengths)


def test_profiler_range() -> None:
    (sample,) = named("one_query")
    x = sample.inputs()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        sample.decode(x)
    assert [e.name for e in profiler.events()].count("softcap_ops::decode_attention_fwd [cpu]") == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("softcap", [5.0, None], ids=["capped", "off"])
@pytest.mark.parametrize("bare", [False, True], ids=["function", "op"])
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_onnx_is_refused(dynamo: bool, bare: bool, softcap: float | None, tmp_path: Any) -> None:
    """cases 73, 75"""

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, seqlens: Tensor) -> Tensor:
            if bare:
                return OP(q, k, k, seqlens, None, None, softcap)[0]
            return softcap_attention_decode(q, k, k, seqlens, softcap=softcap)

    args = (torch.randn(1, 1, 2, 8), torch.randn(1, 9, 2, 8), lengths(9))
    path = tmp_path / "model.onnx"
    with pytest.raises(Exception, match=r"softcap_ops\.decode_attention_fwd cannot be exported to ONNX"):
        torch.onnx.export(Module(), args, str(path), dynamo=dynamo)
    assert not path.exists()


def test_explain() -> None:
    (sample,) = named("paged")
    x = sample.inputs()
    text = softcap_ops.explain(
        *x[:3], cache_seqlens=x.cache_seqlens, block_table=x.block_table, softcap=5.0, causal=True
    )
    assert text.startswith("would run on: cpu")
