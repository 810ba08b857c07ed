"""CUDA graphs by hand: capture and replay of forward and backward, dense and packed, and of a whole training step.

The packed replay with other lengths of test_gpu_compile.py is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softcap_ops

DTYPE = torch.bfloat16


def warm_up(step: Callable[[], Any], times: int = 3) -> None:
    """On a side stream, as capture wants it: allocations settle and backends are tried out."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def close(a: Tensor, b: Tensor) -> None:
    a, b = (t.detach().double().nan_to_num(neginf=0.0) for t in (a, b))
    assert (a - b).norm() <= 1e-2 * b.norm() + 1e-6


def inputs(*shape: int, heads_q: int = 8, heads_kv: int = 2, head_dim: int = 64) -> list[Tensor]:
    return [
        torch.randn(*shape, heads, head_dim, device="cuda", dtype=DTYPE).requires_grad_()
        for heads in (heads_q, heads_kv, heads_kv)
    ]


@pytest.mark.parametrize("window", [(-1, -1), (31, 0)], ids=["global", "local"])
def test_dense_forward_and_backward(backend: str, window: tuple[int, int]) -> None:
    """Replays read the values that q, k, v and the gradient have then, hot and cold."""
    leaves = inputs(2, 96)
    dout = torch.randn_like(leaves[0])

    def step() -> tuple[Tensor, ...]:
        out, lse = softcap_ops.softcap_attention(
            *leaves, softcap=5.0, causal=True, window=window, return_lse=True, backend=backend
        )
        return (out, lse, *torch.autograd.grad(out, leaves, dout))

    graph, captured = capture(step)
    for scale in (1.0, 6.0):
        with torch.no_grad():
            for t in (*leaves, dout):
                t.normal_()
            leaves[0].mul_(scale)
        graph.replay()
        results = [t.detach().clone() for t in captured]
        for a, b in zip(results, step(), strict=True):
            close(a, b)


def test_results_stay_where_they_were_captured(backend: str) -> None:
    """A replay writes the same memory: no allocation of its own, and a result kept by reference changes with it."""
    leaves = inputs(1, 64)
    graph, out = capture(lambda: softcap_ops.softcap_attention(*leaves, softcap=5.0, backend=backend).detach())
    graph.replay()
    before, address, held = out.clone(), out.data_ptr(), torch.cuda.memory_allocated()
    with torch.no_grad():
        leaves[2].mul_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (out.data_ptr(), torch.cuda.memory_allocated() - held) == (address, 0)
    close(out, 2.0 * before)


def test_scalars_are_constants_of_the_graph(backend: str) -> None:
    """The documented limit: a Python number is what it was at capture; a graph for each cap is right for its own."""
    leaves = inputs(1, 64)
    with torch.no_grad():
        leaves[0].mul_(6.0)
    for cap in (1.0, 50.0):
        graph, out = capture(
            lambda cap=cap: softcap_ops.softcap_attention(*leaves, softcap=cap, backend=backend).detach()
        )
        graph.replay()
        close(out, softcap_ops.softcap_attention(*leaves, softcap=cap, backend=backend))


def test_packed_from_many_sequences_to_few(backend: str) -> None:
    """cu_seqlens keeps its length: a batch of fewer sequences ends in empty ones; rows past the end are zero."""
    leaves = inputs(128)
    cu = torch.tensor([0, 16, 40, 64, 128], dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, ...]:
        out, lse = softcap_ops.softcap_attention_varlen(
            *leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=128, max_seqlen_k=128, softcap=2.0, causal=True,
            return_lse=True, backend=backend,
        )  # fmt: skip
        return (out, lse, *torch.autograd.grad(out.float().pow(2).sum(), leaves))

    graph, captured = capture(step)
    for starts in ([0, 100, 100, 100, 100], [0, 1, 2, 3, 4], [0, 0, 0, 0, 128]):
        cu.copy_(torch.tensor(starts, dtype=torch.int32))
        graph.replay()
        results = [t.detach().clone() for t in captured]
        for a, b in zip(results, step(), strict=True):
            close(a, b)
        out, lse, *gradients = results
        assert not out[starts[-1] :].any()
        assert (lse[:, starts[-1] :] == float("-inf")).all()
        assert not any(g[starts[-1] :].any() for g in gradients)


class Block(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.projection = nn.Linear(256, 3 * 256)
        self.out = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 64)).unbind(-3)
        return self.out(
            softcap_ops.softcap_attention(q, k, v, softcap=5.0, causal=True, backend=self.backend).flatten(-2)
        )


def test_make_graphed_callables(backend: str) -> None:
    torch.manual_seed(0)
    block = Block(backend).cuda().to(DTYPE)
    x = torch.randn(2, 64, 256, device="cuda", dtype=DTYPE, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(block, (x,))
    fresh = torch.randn_like(x).requires_grad_()
    expected = torch.autograd.grad(Block.forward(block, fresh).float().pow(2).sum(), [fresh, *block.parameters()])
    actual = torch.autograd.grad(graphed(fresh).float().pow(2).sum(), [fresh, *block.parameters()])
    for a, b in zip(actual, expected, strict=True):
        close(a, b)


def test_whole_training_step(backend: str) -> None:
    """Forward, backward and optimizer in one graph follow the same training without one."""
    losses = {}
    for captured in (False, True):
        torch.manual_seed(0)
        block = Block(backend).cuda().to(DTYPE)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
        x, target = (torch.randn(2, 64, 256, device="cuda", dtype=DTYPE) for _ in range(2))

        def step(block: Block = block, optimizer: Any = optimizer, x: Tensor = x, target: Tensor = target) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = F.mse_loss(block(x).float(), target.float())
            loss.backward()
            optimizer.step()
            return loss.detach()

        warm_up(step)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step()
            losses[captured] = [(graph.replay(), loss.item())[1] for _ in range(5)]
        else:
            losses[captured] = [step().item() for _ in range(5)]
    assert losses[True] == pytest.approx(losses[False], rel=2e-2)
    assert losses[True][-1] < losses[True][0]
