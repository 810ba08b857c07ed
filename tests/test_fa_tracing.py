"""The CUDA path as a compiler traces it, on fake CUDA tensors: no GPU, and no backend is asked anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import Sample, each_sample, named
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from softcap_ops import backends

# Tensors that autocast or a graph would hand over: half precision, on the GPU.
TRACED = named(
    "gqa", "causal_more_queries", "window_both", "head_dim_20", "head_dim_256", "seqlen_1", "strides_bhsd",
    "strides_sliced", "batch_0", "no_keys", "packed_gqa", "packed_empty_sequences", "packed_tail", "packed_batch_0",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _ask_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: Any) -> Any:
        raise AssertionError("a backend was selected while tracing")

    monkeypatch.setattr(backends, "choose", asked)
    monkeypatch.setattr(backends, "select", asked)


def fake_inputs(sample: Sample, mode: FakeTensorMode) -> tuple[list[Tensor], tuple[Any, ...]]:
    """q, k, v, dout, dlse and the options after them, as fake CUDA tensors of the sample's strides."""
    x = sample.inputs(torch.bfloat16)
    options = sample.op_options(x.q)

    def cuda(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")

    with mode:
        return [cuda(t) for t in x], tuple(cuda(o) for o in options)


@each_sample(TRACED)
def test_metadata(sample: Sample) -> None:
    mode = FakeTensorMode()
    (q, k, v, dout, dlse), options = fake_inputs(sample, mode)
    with mode:
        out, lse = sample.op(q, k, v, *options)
        grads = sample.op_bwd(dout, dlse, q, k, v, out, lse, *options)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, dlse.shape, torch.float32)
    for t in (out, lse, *grads):
        assert t.device.type == "cuda"
        assert t.is_contiguous()
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.skipif(torch.version.cuda is None, reason="autograd asks a CPU-only torch for the CUDA stream and aborts")
@each_sample(TRACED)
def test_autograd(sample: Sample) -> None:
    """The graph is recorded; without a GPU torch's engine cannot walk it, even over fake tensors."""
    mode = FakeTensorMode()
    (q, k, v, dout, dlse), options = fake_inputs(sample, mode)
    with mode:
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out, lse = sample.op(*leaves, *options)
        assert out.grad_fn is lse.grad_fn is not None
        if torch.cuda.is_available():
            grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
            assert [(g.shape, g.device.type) for g in grads] == [(t.shape, "cuda") for t in leaves]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_graph_holds_the_two_ops(packed: bool) -> None:
    """case 56: a traced forward and backward is one op each, whatever the backend will be."""
    (sample,) = named("packed_gqa" if packed else "gqa")
    mode = FakeTensorMode()
    (q, k, v, dout, dlse), options = fake_inputs(sample, mode)

    def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = (*tensors, *options[2:]) if packed else options
        out, lse = sample.op(q, k, v, *rest)
        return sample.op_bwd(dout, dlse, q, k, v, out, lse, *rest)

    tensors = options[:2] if packed else ()
    with mode:
        graph = make_fx(step)(q, k, v, dout, dlse, *tensors)
    names = [str(n.target) for n in graph.graph.nodes if "softcap_ops" in str(n.target)]
    prefix = "softcap_ops.varlen_" if packed else "softcap_ops."
    assert names == [f"{prefix}attention_fwd.default", f"{prefix}attention_bwd.default"]
