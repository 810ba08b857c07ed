"""What a profiler sees: a range with the op and the backend, and no memory beyond the results."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from samples import BY_NAME, Sample, with_strides
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile

import softcap_ops


def events(sample: Sample, **kwargs: Any) -> Any:
    x = sample.inputs(torch.float32)
    leaves = [t.detach().requires_grad_() for t in x.qkv]
    with profile(activities=[ProfilerActivity.CPU], **kwargs) as profiler:
        out, _ = sample.attention(*leaves)
        torch.autograd.grad(out, leaves, x.dout)
    return profiler


@pytest.mark.parametrize("name", ["gqa", "packed_gqa"])
def test_ranges_name_the_op_and_the_backend(name: str) -> None:
    sample = BY_NAME[name]
    prefix = "varlen_" if sample.packed else ""
    names = [e.name for e in events(sample).events()]
    forward, backward = (f"softcap_ops::{prefix}attention_{which} [cpu]" for which in ("fwd", "bwd"))
    assert (names.count(forward), names.count(backward)) == (1, 1)
    # In what calls the kernel, so that a trace viewer nests it: the operator, and the autograd node of the backward.
    assert names.index(f"softcap_ops::{prefix}attention_fwd") < names.index(forward)
    assert names.index("_ForwardBackward") < names.index(backward)


def test_ranges_when_compiled() -> None:
    sample = BY_NAME["gqa"]
    f = torch.compile(sample.attention, backend="aot_eager", fullgraph=True)
    x = sample.inputs(torch.float32)
    f(*x.qkv)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        f(*x.qkv)
    assert [e.name for e in profiler.events()].count("softcap_ops::attention_fwd [cpu]") == 1


def test_no_range_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a range is made when nobody looks."""
    from softcap_ops import _impl

    def fail(*args: Any) -> None:
        raise AssertionError("a range without a profiler")

    monkeypatch.setattr(_impl.torch.profiler, "record_function", fail)
    sample = BY_NAME["gqa"]
    sample.attention(*sample.inputs().qkv)


def allocations(profiler: Any) -> list[int]:
    """Sizes in bytes of what was allocated, from the memory events that the memory visualiser draws."""
    sizes: list[int] = []

    def visit(event: Any) -> None:
        if event.tag.name == "Allocation" and event.extra_fields.alloc_size > 0:
            sizes.append(event.extra_fields.alloc_size)
        for child in event.children:
            visit(child)

    for root in profiler.profiler.kineto_results.experimental_event_tree():
        visit(root)
    return sizes


STRIDES = ("contiguous", "bhsd", "sliced", "fused", "last_dim")
CASES = [("gqa", s) for s in STRIDES] + [("packed_gqa", s) for s in ("contiguous", "bhsd", "fused")]


@pytest.mark.parametrize(("name", "strides"), CASES)
def test_no_hidden_copies(name: str, strides: str) -> None:
    """Whatever the layout, forward allocates out and lse, backward dq, dk and dv, and no tensor besides."""
    sample = with_strides(BY_NAME[name], strides)
    x = sample.inputs(torch.float32)
    expected = sorted(4 * t.numel() for t in (x.q, x.dlse, *x.qkv))
    sizes = sorted(s for s in allocations(events(sample, profile_memory=True)) if s > 64)
    assert sizes == expected


def test_no_hidden_copies_compiled() -> None:
    """Compiled, the op takes the transposed views of a projection as they are, and saves no copy for the backward."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(2, 8, 3, 2, 16).unbind(2)
        return softcap_ops.softcap_attention(q, k, v, softcap=5.0)

    nodes: list[str] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        nodes.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return make_boxed_func(graph.forward)

    f = torch.compile(attention, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler), fullgraph=True)
    x = torch.randn(2, 8, 96, requires_grad=True)
    f(x).sum().backward()
    copies = [n for n in nodes if any(word in n for word in ("clone", "contiguous", "_to_copy", "copy_"))]
    assert not copies
    assert {"softcap_ops.attention_fwd.default", "softcap_ops.attention_bwd.default"} <= set(nodes)


def test_every_op_of_the_table_has_a_range() -> None:
    """The table of CONTRIBUTING: four ops, each with a range."""
    from softcap_ops import _impl, backends

    for packed, op in itertools.product((False, True), ("attention_fwd", "attention_bwd")):
        with profile(activities=[ProfilerActivity.CPU]) as profiler, _impl._profiled(op, packed, backends.cpu):
            pass
        assert [e.name for e in profiler.events()] == [f"softcap_ops::{'varlen_' if packed else ''}{op} [cpu]"]
