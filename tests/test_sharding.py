"""DTensor on 2 and 4 gloo processes: the ops on shards of the batch and of the heads, and the refusals."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import textwrap
from typing import Any

import gloo
import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor

import softcap_ops

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")

OPTIONS: dict[str, Any] = {"softcap": 1.0, "causal": True}


def data(batch: int = 4, heads_q: int = 8, heads_kv: int = 4, seqlen: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """The same on every process, whatever it drew before."""
    shapes = ((batch, seqlen, heads_q, 8), *[(batch, seqlen, heads_kv, 8)] * 2)
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)  # type: ignore[return-value]


@functools.cache
def mesh_of(*shape: int) -> Any:
    """A mesh of the first processes. Every process makes it; those outside have no coordinate in it.

    Made once: torch.compile fails on a mesh that equals, but is not, the one DTensor has cached a decision for.
    """
    from torch.distributed.device_mesh import DeviceMesh

    size = torch.Size(shape).numel()
    return DeviceMesh("cpu", torch.arange(size).view(shape))


def compare(mesh: Any, tensors: tuple[Tensor, ...], placements: list[Any], attention: Any = None) -> list[Any]:
    """Outputs and gradients of the sharded call equal those of the whole one; returns their placements."""
    from torch.distributed.tensor import distribute_tensor

    attention = attention or (lambda q, k, v: softcap_ops.softcap_attention(q, k, v, return_lse=True, **OPTIONS))
    if mesh.get_coordinate() is None:
        return []
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = attention(*leaves)
    expected = [*expected, *torch.autograd.grad(expected[0].pow(2).sum() + expected[1].sum(), leaves)]
    shards = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(tensors, placements, strict=True)]
    actual = attention(*shards)
    actual = [*actual, *torch.autograd.grad(actual[0].pow(2).sum() + actual[1].sum(), shards)]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach())
    return [a.placements for a in actual]


def refused(match: str, f: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(softcap_ops.UnsupportedError, match=match):
        f(*args, **kwargs)


# ---- what the processes run, in this order -------------------------------------------------------------------------


def check_late_import() -> None:
    """The strategies arrive with torch.distributed.tensor; inference mode, which skips our Autograd kernels, first."""
    from softcap_ops import _sharding

    from torch.distributed.tensor import Shard, distribute_tensor  # isort: skip

    assert _sharding._registered
    q, k, v = data()
    expected = softcap_ops.softcap_attention(q, k, v, **OPTIONS)
    with torch.inference_mode():
        shards = [distribute_tensor(t, mesh_of(4), [Shard(0)]) for t in (q, k, v)]
        out = softcap_ops.softcap_attention(*shards, **OPTIONS)
        assert out.placements == (Shard(0),)
        torch.testing.assert_close(out.full_tensor(), expected)


def check_batch_and_heads() -> None:
    from torch.distributed.tensor import Replicate, Shard

    batch, heads, whole = [Shard(0)], [Shard(2)], [Replicate()]
    for world in (2, 4):
        mesh = mesh_of(world)
        for placement, lse in ((batch, Shard(0)), (heads, Shard(1)), (whole, Replicate())):
            placements = compare(mesh, data(), [placement] * 3)
            if placements:
                x = tuple(placement)
                assert placements == [x, (lse,), x, x, x]


def check_mixed_placements() -> None:
    """DTensor redistributes what does not fit: a replicated tensor to the shards of the others without a message."""
    from torch.distributed.tensor import Replicate, Shard

    batch, heads, whole = [Shard(0)], [Shard(2)], [Replicate()]
    mesh = mesh_of(4)
    for q, k, v in itertools.product((batch, heads, whole), repeat=3):
        compare(mesh, data(), [q, k, v])
    # Nothing that DTensor may do unasked turns a batch shard of q into something else when k, v are whole.
    assert compare(mesh, data(), [batch, whole, whole])[0] == (Shard(0),)
    assert compare(mesh, data(), [heads, whole, whole])[0] == (Shard(2),)


def check_decode() -> None:
    """Batch and heads of a cache; blocks are shared, so of those only the heads."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(2)
    if mesh.get_coordinate() is None:
        return
    q, k, v = data()
    q = q[:, -2:]
    seqlens = torch.tensor([9, 4, 0, 7], dtype=torch.int32)
    blocks = k.unflatten(1, (3, 3)).flatten(0, 1), v.unflatten(1, (3, 3)).flatten(0, 1)
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    batch, heads, whole = [Shard(0)], [Shard(2)], [Replicate()]

    def shards(*placed: Any) -> list[Any]:
        return [distribute_tensor(t, mesh, p) for t, p in placed]

    for p in (batch, heads, whole):
        lengths = batch if p == batch else whole
        for table_of, caches in ((None, (k, v)), (table, blocks)):
            expected = softcap_ops.softcap_attention_decode(
                q, *caches, seqlens, block_table=table_of, return_lse=True, softcap=1.0
            )
            c = whole if table_of is not None and p == batch else p
            args = shards((q, p), (caches[0], c), (caches[1], c), (seqlens, lengths))
            tables = None if table_of is None else shards((table_of, lengths))[0]
            out, lse = softcap_ops.softcap_attention_decode(*args, block_table=tables, return_lse=True, softcap=1.0)
            assert out.placements == tuple(p)
            torch.testing.assert_close((out.full_tensor(), lse.full_tensor()), expected)
            alone = softcap_ops.softcap_attention_decode(*args, block_table=tables, softcap=1.0)
            torch.testing.assert_close(alone.full_tensor(), expected[0])
    args = shards((q, whole), (blocks[0], batch), (blocks[1], batch), (seqlens, whole), (table, whole))
    refused("k_cache is sharded over its blocks", softcap_ops.softcap_attention_decode, *args[:4], block_table=args[4],
            softcap=1.0)  # fmt: skip
    args = shards((q, whole), (k, [Shard(1)]), (v, whole), (seqlens, whole))
    refused("sharded over its sequence", softcap_ops.softcap_attention_decode, *args, softcap=1.0)


def check_two_dimensional_mesh() -> None:
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(2, 2)
    for placement in ([Shard(0), Shard(2)], [Shard(2), Shard(0)], [Replicate(), Shard(2)], [Shard(0), Replicate()],
                      [Shard(2), Shard(2)], [Shard(0), Shard(0)]):  # fmt: skip
        assert compare(mesh, data(), [placement] * 3)[0] == tuple(placement)
    compare(mesh, data(), [[Shard(0), Shard(2)], [Shard(0), Replicate()], [Replicate(), Shard(2)]])


def check_uneven_batch() -> None:
    """A batch of 3 on 2 processes is 2 and 1; of 5 on 4: 2, 2, 1, 0."""
    from torch.distributed.tensor import Shard

    compare(mesh_of(2), data(batch=3), [[Shard(0)]] * 3)
    compare(mesh_of(4), data(batch=5), [[Shard(0)]] * 3)
    compare(mesh_of(4), data(batch=2), [[Shard(0)]] * 3)  # less than the processes: DTensor gathers


def check_uneven_heads_are_refused() -> None:
    """DTensor would split 3 key heads 2 and 1: refused on every process alike, before any of them computes."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for world, heads_q, heads_kv in ((2, 6, 3), (2, 4, 1), (4, 8, 2), (4, 5, 5)):
        mesh = mesh_of(world)
        if mesh.get_coordinate() is None:
            continue
        tensors = data(heads_q=heads_q, heads_kv=heads_kv)
        for q, kv in (([Shard(2)], [Replicate()]), ([Replicate()], [Shard(2)]), ([Shard(2)], [Shard(2)])):
            for needs_grad in (False, True):
                shards = [distribute_tensor(t, mesh, p).requires_grad_(needs_grad) for t, p in
                          zip(tensors, (q, kv, kv), strict=True)]  # fmt: skip
                refused(f"heads sharded {world} ways need", softcap_ops.softcap_attention, *shards, **OPTIONS)


def check_refusals() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, tensors = mesh_of(4), data(seqlen=8)
    whole = [distribute_tensor(t, mesh, [Replicate()]) for t in tensors]
    for i, name in enumerate("qkv"):
        mixed = list(whole)
        mixed[i] = distribute_tensor(tensors[i], mesh, [Shard(1)])
        refused(f"{name} is sharded over its sequence.*context", softcap_ops.softcap_attention, *mixed, **OPTIONS)
        mixed[i] = DTensor.from_local(tensors[i], mesh, [Partial()])
        refused(f"{name} is a partial sum", softcap_ops.softcap_attention, *mixed, **OPTIONS)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    packing = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), distribute_tensor(cu, mesh, [Replicate()]))
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 5}
    rows = [distribute_tensor(t[0], mesh, [Shard(0)]) for t in tensors]
    refused("sharded over its tokens.*shard the heads", softcap_ops.softcap_attention_varlen, *rows, **packing,
            **lengths, **OPTIONS)  # fmt: skip


def check_sharded_upstream_gradient() -> None:
    """A gradient that comes in with other placements than the output has is redistributed, never misread."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, tensors = mesh_of(4), data(seqlen=8)
    dout = torch.randn_like(tensors[0])
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(softcap_ops.softcap_attention(*leaves, **OPTIONS), leaves, dout)
    for placement in (Shard(0), Shard(1), Shard(2), Shard(3), Replicate()):
        shards = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in tensors]
        out = softcap_ops.softcap_attention(*shards, **OPTIONS)
        gradients = torch.autograd.grad(out, shards, distribute_tensor(dout, mesh, [placement]))
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a.full_tensor(), b)


def check_frozen_inputs() -> None:
    """Where a gradient is not asked for, its empty stand-in is not taken for a shard."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, tensors = mesh_of(4), data()
    for wanted in itertools.product((True, False), repeat=3):
        if not any(wanted):
            continue
        leaves = [t.clone().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
        shards = [
            distribute_tensor(t, mesh, [Shard(0)]).requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)
        ]
        for x in (leaves, shards):
            softcap_ops.softcap_attention(*x, **OPTIONS).pow(2).sum().backward()
        for a, b in zip(shards, leaves, strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def check_the_options_of_each_call() -> None:
    """DTensor caches its decision: a later call with another cap, scale, mask or window must not get the first's."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, (q, k, v) = mesh_of(2), data()
    if mesh.get_coordinate() is None:
        return
    q = 6 * q
    shards = [distribute_tensor(t, mesh, [p]) for t, p in ((q, Shard(2)), (k, Replicate()), (v, Replicate()))]
    for cap, scale, causal, window in itertools.product(
        (1.0, 5.0, None), (None, 0.1), (True, False), ((-1, -1), (2, 0))
    ):
        options: Any = {"softcap": cap, "scale": scale, "causal": causal, "window": window}
        actual = softcap_ops.softcap_attention(*shards, **options).full_tensor()
        torch.testing.assert_close(actual, softcap_ops.softcap_attention(q, k, v, **options))


def check_packed_heads() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    for world in (2, 4):
        mesh = mesh_of(world)
        if mesh.get_coordinate() is None:
            continue
        on_mesh = distribute_tensor(cu, mesh, [Replicate()])

        def attention(q: Any, k: Any, v: Any, cu: Tensor = on_mesh) -> Any:
            starts = cu if type(q) is not Tensor else cu.full_tensor()  # type: ignore[attr-defined]
            return softcap_ops.softcap_attention_varlen(
                q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=5, max_seqlen_k=5, return_lse=True,
                **OPTIONS,
            )  # fmt: skip

        tensors = tuple(t[0] for t in data())
        heads = [Shard(1)]
        assert compare(mesh, tensors, [heads] * 3, attention)[:2] == [(Shard(1),), (Shard(0),)]
        compare(mesh, tensors, [[Replicate()]] * 3, attention)


def check_autocast() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    tensors = tuple(t.float() for t in data())
    shards = [distribute_tensor(t, mesh_of(4), [Shard(2)]).requires_grad_() for t in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        out = softcap_ops.softcap_attention(*shards, **OPTIONS)
        torch.testing.assert_close(out.full_tensor(), softcap_ops.softcap_attention(*tensors, **OPTIONS))
    out.sum().backward()
    assert {t.grad.dtype for t in shards} == {torch.float32}


def check_compiled() -> None:
    """fullgraph, forward and backward; one graph a placement."""
    from torch.distributed.tensor import Shard

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: softcap_ops.softcap_attention(q, k, v, return_lse=True, **OPTIONS),
        fullgraph=True, backend=counter, dynamic=False,
    )  # fmt: skip

    def attention(q: Any, k: Any, v: Any) -> Any:
        on_mesh = type(q) is not Tensor
        return compiled(q, k, v) if on_mesh else softcap_ops.softcap_attention(q, k, v, return_lse=True, **OPTIONS)

    for placement in (Shard(0), Shard(2)):
        compare(mesh_of(4), data(), [[placement]] * 3, attention)
    assert counter.frame_count == 2


# ---- tests ---------------------------------------------------------------------------------------------------------

CHECKS = [name for name in globals() if name.startswith("check_")]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return gloo.run(__name__, CHECKS, world=4)


def test_dtensor_is_not_imported_but_awaited() -> None:
    """Importing softcap_ops leaves torch.distributed.tensor alone; importing that, whenever, brings the strategies."""
    script = """
        import sys, torch, softcap_ops
        from softcap_ops import _sharding
        assert "torch.distributed.tensor" not in sys.modules and not _sharding._registered
        import torch.distributed.fsdp, torch.distributed.tensor
        strategies = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        assert all(getattr(torch.ops.softcap_ops, name).default in strategies for name in
                   ("attention_fwd", "attention_bwd", "varlen_attention_fwd", "varlen_attention_bwd",
                    "decode_attention_fwd"))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@pytest.mark.parametrize("check", CHECKS)
def test_on_processes(check: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[check] is None, outcomes[check]
