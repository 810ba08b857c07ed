"""Activation checkpointing, FSDP2 and tensor parallelism: the same training as without, the kernel calls counted."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import gloo
import pytest
import tiny_gemma2 as gemma
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import softcap_ops
from softcap_ops.backends import cpu

ops = torch.ops.softcap_ops
SAVED = (ops.attention_fwd.default, ops.varlen_attention_fwd.default)


def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


plain = functools.partial(checkpoint, use_reentrant=False)
selective = functools.partial(
    checkpoint, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_attention)
)


def dense_block(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).view(2, 8, 3, 2, 8).unbind(2)
    return softcap_ops.softcap_attention(q, k, v, softcap=1.0, causal=True).flatten(2).sin()


def packed_block(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).view(16, 3, 2, 8).unbind(1)
    cu = torch.arange(0, 17, 8, dtype=torch.int32)
    return softcap_ops.softcap_attention_varlen(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=8, max_seqlen_k=8, softcap=1.0, causal=True
    ).sin()  # fmt: skip


def inputs() -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 8, 16), (16, 48)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    seen: Counter[str] = Counter()
    for name in ("forward", "backward"):
        kernel = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *a, _k=kernel, _n=name: (seen.update([_n]), _k(*a))[1])
    return seen


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(f, backend="aot_eager", fullgraph=True)


NESTINGS: dict[str, Callable[[Any, Any], Any]] = {
    "eager": lambda wrap, block: lambda *x: wrap(block, *x),
    "compile(checkpoint)": lambda wrap, block: compiled(lambda *x: wrap(block, *x)),
    "checkpoint(compile)": lambda wrap, block: functools.partial(wrap, compiled(block)),
}


@pytest.mark.parametrize("block", [dense_block, packed_block])
@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize(("wrap", "forwards"), [(plain, 2), (selective, 1)], ids=["plain", "selective"])
def test_forward_kernel_calls(block, nesting, wrap, forwards, calls) -> None:
    x, w = inputs()
    x = x if block is dense_block else x.detach().flatten(0, 1).requires_grad_()
    expected = torch.autograd.grad(block(x, w).pow(2).sum(), (x, w))
    step = NESTINGS[nesting](wrap, block)
    for _ in range(2):  # the second time without compiling
        calls.clear()
        actual = torch.autograd.grad(step(x, w).pow(2).sum(), (x, w))
        assert calls == {"forward": forwards, "backward": 1}
        torch.testing.assert_close(actual, expected)


def test_saved_tensors_do_not_depend_on_the_call() -> None:
    """Checkpointing needs recomputation to save what the first run saved: the first call of a process included."""
    sizes: list[list[Any]] = []
    x, w = inputs()
    for _ in range(3):
        sizes.append([])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes[-1].append(tuple(t.shape)), t)[1], lambda t: t):
            dense_block(x, w)
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("wrap", [plain, selective], ids=["plain", "selective"])
def test_model_trains_the_same(wrap) -> None:
    tokens = gemma.batch()
    reference, model = gemma.build(), gemma.build(wrap=wrap)
    assert gemma.train(model, tokens) == pytest.approx(gemma.train(reference, tokens), rel=1e-12)


# ---- on gloo processes -----------------------------------------------------------------------------------------------


def mesh_of(*shape: int, names: tuple[str, ...]) -> Any:
    """A mesh of the first processes; None on the others."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).view(shape), mesh_dim_names=names)
    return None if mesh.get_coordinate() is None else mesh


def tensor_parallel(model: Any, mesh: Any, local: bool) -> None:
    """Heads and hidden units over the mesh. `local`: attention sees plain tensors, else DTensors."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers:
        columns = {
            name: ColwiseParallel(use_local_output=local)
            for name in ("attention.q", "attention.k", "attention.v", "gate", "up")
        }
        parallelize_module(layer, mesh, {**columns, "attention.o": RowwiseParallel(), "down": RowwiseParallel()})


def fsdp(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def assert_same_training(model: Any, mine: Tensor, everything: Tensor, group: Any = None) -> None:
    """`model` on this process's items trains as one process does on all of them."""
    reference = gemma.build()
    expected = gemma.train(reference, everything)
    losses = torch.tensor(gemma.train(model, mine), dtype=torch.float64)
    if group is not None:
        dist.all_reduce(losses, op=dist.ReduceOp.SUM, group=group)
        losses /= dist.get_world_size(group)
    torch.testing.assert_close(losses.tolist(), expected, rtol=1e-9, atol=0.0)
    trained = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        actual = trained[name.replace("._orig_mod", "")]
        actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
        torch.testing.assert_close(actual, parameter, rtol=1e-7, atol=1e-9)


def check_tensor_parallel() -> None:
    tokens = gemma.batch()
    for world in (2, 4):
        mesh = mesh_of(world, names=("tp",))
        for local in (True, False):
            if mesh is not None:
                model = gemma.build()
                tensor_parallel(model, mesh, local)
                assert_same_training(model, tokens, tokens)


def check_fsdp() -> None:
    """Plain, checkpointed, and checkpointed and compiled, on 1, 2 and 4 processes."""
    tokens = gemma.batch()
    for world in (1, 2, 4):
        mesh = mesh_of(world, names=("dp",))
        if mesh is None:
            continue
        mine = tokens.chunk(world)[mesh.get_local_rank()]
        for wrap in (None, plain, selective):
            model = gemma.build(wrap=wrap)
            fsdp(model, mesh)
            assert_same_training(model, mine, tokens, mesh.get_group())


def check_fsdp_checkpoint_compile() -> None:
    """Compiled layers inside checkpoints inside FSDP2, and compiled layers that checkpoint themselves."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    tokens = gemma.batch()
    for world in (1, 2):
        mesh = mesh_of(world, names=("dp",))
        if mesh is None:
            continue
        mine = tokens.chunk(world)[mesh.get_local_rank()]
        for inner in (True, False):
            torch._dynamo.reset()
            model = gemma.build(wrap=plain if inner else None)
            for i, layer in enumerate(model.layers):
                if not inner:
                    layer = model.layers[i] = checkpoint_wrapper(layer)
                layer.compile(backend="aot_eager", fullgraph=True)
            fsdp(model, mesh)
            reference = gemma.build()
            expected = gemma.train(reference, tokens)
            losses = torch.tensor(gemma.train(model, mine), dtype=torch.float64)
            dist.all_reduce(losses, group=mesh.get_group())
            torch.testing.assert_close((losses / world).tolist(), expected, rtol=1e-9, atol=0.0)


def check_fsdp_tensor_parallel() -> None:
    tokens = gemma.batch()
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    for local in (True, False):
        model = gemma.build(wrap=plain)
        tensor_parallel(model, mesh["tp"], local)
        fsdp(model, mesh["dp"])
        mine = tokens.chunk(2)[mesh["dp"].get_local_rank()]
        assert_same_training(model, mine, tokens, mesh["dp"].get_group())


CHECKS = [name for name in globals() if name.startswith("check_")]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    if not dist.is_available():
        pytest.skip("this torch is built without distributed")
    return gloo.run(__name__, CHECKS, world=4)


@pytest.mark.parametrize("check", CHECKS)
def test_on_processes(check: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[check] is None, outcomes[check]
