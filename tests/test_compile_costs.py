"""What compiling costs: max_seqlen in every form without a new graph, and no break in a model (see test_compile.py)."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gemma2 as gemma
import torch
from samples import Sample
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import softcap_ops


def counted(f: Any, **kwargs: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(f, fullgraph=True, backend=counter, **kwargs), counter


def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Any:
    return softcap_ops.softcap_attention_varlen(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, softcap=5.0,
        causal=True, return_lse=True,
    )  # fmt: skip


# No two sizes alike in the first: torch would take them for the same symbol, and compile again when they differ.
LENGTHS = [(9, 20, 4), (4, 30), (11, 12, 13, 14, 15), (2, 2, 40, 2), (50, 1, 1, 1, 1, 1)]


def packed_inputs(lengths: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    sample = Sample("packed", lengths_q=lengths, lengths_k=lengths)
    return [t.requires_grad_() for t in sample.inputs(torch.float64).qkv], sample.cu_seqlens()[0]


def test_max_seqlen_alone() -> None:
    """Only max_seqlen changes: the second value makes it symbolic, no later one compiles."""
    f, counter = counted(packed)
    qkv, cu = packed_inputs(LENGTHS[0])
    for longest in (20, 21, 25, 64, 1000):
        torch.testing.assert_close(f(*qkv, cu, longest), packed(*qkv, cu, longest))
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_max_seqlen_read_in_the_graph(backend: str) -> None:
    """The `.item()` pattern: max_seqlen is computed from cu_seqlens inside the compiled function."""

    def attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Any:
        return packed(q, k, v, cu, cu.diff().max().item())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        counter = CompileCounterWithBackend(backend)
        f = torch.compile(attention, fullgraph=True, backend=counter, dynamic=True)
        for lengths in LENGTHS[:3]:
            qkv, cu = packed_inputs(lengths)
            expected, actual = packed(*qkv, cu, max(lengths)), f(*qkv, cu)
            torch.testing.assert_close(actual, expected)
            gradients = [torch.autograd.grad(out.sum(), qkv) for out, _ in (actual, expected)]
            torch.testing.assert_close(*gradients)
    assert counter.frame_count == 1


def test_max_seqlen_export() -> None:
    """The same pattern through torch.export."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
            return packed(q, k, v, cu, cu.diff().max().item())[0]

    tokens, items = torch.export.Dim("tokens", min=2, max=4096), torch.export.Dim("items", min=3, max=512)
    qkv, cu = packed_inputs(LENGTHS[0])
    program = torch.export.export(
        Model(), (*qkv, cu), dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}, {0: items})
    )
    for lengths in LENGTHS[1:]:
        qkv, cu = packed_inputs(lengths)
        torch.testing.assert_close(program.module()(*qkv, cu), packed(*qkv, cu, max(lengths))[0])


def test_whole_model_is_one_graph() -> None:
    """Both kinds of layer; other sizes add the dynamic graph and no more. Training: test_checkpoint_fsdp.py."""
    model = gemma.build()
    f, counter = counted(model)
    with torch.no_grad():
        for items, seqlen in ((3, 9), (2, 6), (4, 7)):
            x = gemma.batch(items, seqlen)
            torch.testing.assert_close(f(x), model(x))
    assert counter.frame_count == 2
