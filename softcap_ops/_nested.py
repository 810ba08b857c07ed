"""torch.nested: jagged q, k, v go through the packed op as they are, values and offsets, without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _schema
from ._arguments import Options, Packing


def attention(q: Any, k: Any, v: Any, options: Options) -> tuple[Tensor, Tensor]:
    """Dense attention of jagged (batch, ragged, heads, head_dim) tensors: each item is a sequence of its own.

    Returns out and lse as jagged tensors with q's ragged structure: (batch, ragged, heads_q, head_dim) and
    (batch, ragged, heads_q).
    """
    *qkv, packing = packed(q, k, v)
    out, lse = _schema.varlen_attention_fwd(*qkv, *packing, *options)
    return _jagged_like(q, out), _jagged_like(q, lse.transpose(0, 1))


def packed(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor, Packing]:
    """The same call as the packed op takes it."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not t.is_nested or t.layout != torch.jagged:
            raise TypeError(f"{name} must be a jagged nested tensor like the others, got {_kind(t)}")
        if t.dim() != 4 or getattr(t, "_ragged_idx", 1) != 1:
            raise ValueError(f"{name} must have shape (batch, ragged, heads, head_dim), got {tuple(t.shape)}")
        if t.lengths() is not None:
            raise ValueError(f"{name} must be contiguous, got a jagged tensor with holes (lengths)")
        if t.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have the batch of q, {q.shape[0]}, got shape {tuple(t.shape)}")
    packing = Packing(q.offsets().to(torch.int32), k.offsets().to(torch.int32), _max_seqlen(q), _max_seqlen(k))
    return q.values(), k.values(), v.values(), packing


def _kind(t: Tensor) -> str:
    return f"a nested tensor of layout {t.layout}" if t.is_nested else f"a plain tensor of shape {tuple(t.shape)}"


def _max_seqlen(t: Any) -> Any:
    known = t._maybe_max_seqlen
    if known is not None:
        return known
    # Finding it reads the offsets, which a graph cannot; all the tokens are a bound that needs no reading.
    return t.values().shape[0] if torch.compiler.is_compiling() else t._get_max_seqlen()


def _jagged_like(t: Any, values: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(
        values, t.offsets(), min_seqlen=t._maybe_min_seqlen, max_seqlen=t._maybe_max_seqlen
    )
