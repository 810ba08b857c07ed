"""What each rank runs for the tests of compilation, checkpointing and DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cp_cases import Case, Split, check_float64
from torch import Tensor

import softcap_ops
from softcap_ops import distributed as cp


def _nodes(graphs: list[Any], name: str) -> int:
    return sum(name in str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function")


def check_compiled(case: Case) -> None:
    """Compiled whole, forward and backward, it gives the same numbers from one node each."""
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    forwards: list[Any] = []
    backwards: list[Any] = []

    def keep(graphs: list[Any]) -> Any:
        def compiler(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward if hasattr(graph, "forward") else graph

        return compiler

    backend = aot_autograd(fw_compiler=keep(forwards), bw_compiler=keep(backwards))
    group = Split(case).options["group"]

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return softcap_ops.context_parallel_attention(q, k, v, **{**options, "group": group})

    check_float64(case, True, torch.compile(attention, backend=backend, fullgraph=True))
    assert (_nodes(forwards, "cp_attention_fwd"), _nodes(backwards, "cp_attention_bwd")) == (1, 1)


def check_lse_that_was_not_asked_for() -> None:
    """The bare op with return_lse=False: a loss on its lse, which the other ranks would not expect, is an error."""
    q = torch.randn(2, 8, 4, 8, requires_grad=True)
    group = dist.group.WORLD
    assert group is not None
    args = (None,) * 6, [group.group_name], "a2a", "zigzag", 5.0
    out, lse = torch.ops.softcap_ops.cp_attention_fwd(q, q, q, *args[0], *args[1:], return_lse=False)
    assert out.requires_grad
    assert not lse.requires_grad


def check_recompiles_for_no_cap() -> None:
    """Two caps, then a third: at most two graphs, as the cap becomes an input of the second."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    q = torch.randn(2, 8, 4, 8, dtype=torch.float64)

    @torch.compile(backend=counter, fullgraph=True)
    def attention(q: Tensor, softcap: float) -> Tensor:
        return softcap_ops.context_parallel_attention(
            q, q, q, group=dist.group.WORLD, softcap=softcap, causal=True, comm="all_gather"
        )

    for softcap in (5.0, 7.0, 9.0, 11.0):
        expected = softcap_ops.context_parallel_attention(
            q, q, q, group=dist.group.WORLD, softcap=softcap, causal=True, comm="all_gather"
        )
        torch.testing.assert_close(attention(q, softcap), expected)
    assert counter.frame_count <= 2


def check_checkpointed(case: Case) -> None:
    from torch.utils.checkpoint import checkpoint

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return checkpoint(
            lambda *qkv: softcap_ops.context_parallel_attention(*qkv, **options), q, k, v, use_reentrant=False
        )

    check_float64(case, True, attention)


def check_saved_once() -> None:
    """Autograd keeps this rank's q, k, v, out and lse, and nothing else."""
    saved: list[Tensor] = []
    q, k, v = (torch.randn(2, 8, 4, 8, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out, lse = softcap_ops.context_parallel_attention(
            q, k, v, group=dist.group.WORLD, softcap=5.0, causal=True, return_lse=True
        )
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (q, k, v, out, lse)}
    assert len(saved) == 5


def check_opcheck(comm: str) -> None:
    q, k, v = (torch.randn(2, 8, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    args = (q, k, v, None, None, None, None, None, None, [dist.group.WORLD.group_name], comm, "zigzag", 5.0, None, True)
    torch.library.opcheck(torch.ops.softcap_ops.cp_attention_fwd.default, args)


def check_autocast() -> None:
    q = torch.randn(2, 8, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, 8, 4, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        out = softcap_ops.context_parallel_attention(q, k, v, group=dist.group.WORLD, softcap=5.0)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert (q.grad.dtype, k.grad.dtype) == (torch.float32, torch.bfloat16)


def check_refusals() -> None:
    """Double backward, forward mode and vmap are refused by name, on every rank."""
    q = torch.randn(2, 8, 4, 8, requires_grad=True)

    def attention(q: Tensor) -> Tensor:
        return softcap_ops.context_parallel_attention(q, q, q, group=dist.group.WORLD, softcap=5.0)

    (dq,) = torch.autograd.grad(attention(q).sum(), q, create_graph=True)
    for refused, call in (
        ("not twice differentiable", lambda: dq.sum().backward()),
        ("no forward-mode derivative", lambda: torch.func.jvp(attention, (q.detach(),), (torch.ones_like(q),))),
        ("vmap", lambda: torch.func.vmap(attention)(q.detach()[None])),
    ):
        with pytest.raises((RuntimeError, NotImplementedError), match=refused):
            call()


def check_groups(compiled: bool) -> None:
    """A group, its name, a mesh and a dimension of a mesh are all accepted, and give the same."""
    from torch.distributed.device_mesh import init_device_mesh

    torch._dynamo.reset()
    ranks = dist.get_world_size()
    mesh, square = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "cp"))
    q = torch.randn(2, 8, 4, 8)

    def attention(group: Any, comm: str = "p2p") -> Tensor:
        return softcap_ops.context_parallel_attention(q, q, q, group=group, comm=comm, softcap=5.0, causal=True)

    expected = attention(dist.group.WORLD)
    call = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    for group in (dist.group.WORLD.group_name, mesh, (square, 1), (square, "cp"), square["cp"]):
        torch.testing.assert_close(call(group), expected)
    torch.testing.assert_close(call(square, "a2a+p2p"), expected)


def check_dtensor(comm: str, compiled: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = [torch.randn(2, 8, 4, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    options = {"comm": comm, "softcap": 5.0, "causal": True, "return_lse": True}
    expected = softcap_ops.context_parallel_attention(*local, group=mesh, **options)
    expected_grads = torch.autograd.grad(expected[0].sin().sum() + expected[1].sum(), local)

    def attention(*qkv: Tensor) -> Any:
        return softcap_ops.context_parallel_attention(*qkv, group=None, **options)

    call = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    sharded = [DTensor.from_local(t, mesh, [Shard(1)]) for t in local]
    out, lse = call(*sharded)
    assert (out.placements, lse.placements) == ((Shard(1),), (Shard(2),))
    torch.testing.assert_close(out.to_local(), expected[0])
    torch.testing.assert_close(lse.to_local(), expected[1])
    # Of both outputs: a compiled graph cannot be told that one DTensor output of several has no gradient.
    grads = torch.autograd.grad(out.to_local().sin().sum() + lse.to_local().sum(), local)
    torch.testing.assert_close(grads, expected_grads)


def roundtrip(layout: str) -> None:
    """Every rank's shard, gathered, is the whole again."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(64.0).view(1, 64, 1)
    mine = cp.split_sequence(whole, rank=rank, ranks=ranks, layout=layout)
    shards = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(shards, mine)
    assert torch.equal(cp.join_sequence(shards, layout=layout), whole)
