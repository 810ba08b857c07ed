"""Activation checkpointing that recomputes everything but attention: `attention_fwd` runs once, not twice."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from softcap_ops import softcap_attention

KEPT = (torch.ops.softcap_ops.attention_fwd.default, torch.ops.softcap_ops.varlen_attention_fwd.default)


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def block(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).unflatten(-1, (3, 4, 8)).unbind(-3)
    return torch.nn.functional.gelu(softcap_attention(q, k, v, softcap=50.0, causal=True).flatten(-2))


def attention_calls(profiler: Any) -> int:
    return sum(event.name.startswith("softcap_ops::attention_fwd [") for event in profiler.events())


x, w = torch.randn(2, 64, 32), torch.randn(32, 96, requires_grad=True)
selective = functools.partial(create_selective_checkpoint_contexts, policy)
settings: dict[str, dict[str, Any]] = {"plain": {}, "selective": {"context_fn": selective}}
for name, options in settings.items():
    with torch.profiler.profile() as profiler:
        checkpoint(block, x, w, use_reentrant=False, **options).sum().backward()
    print(f"{name}: the forward kernel ran {attention_calls(profiler)} times")
    assert attention_calls(profiler) == (2 if name == "plain" else 1)
