"""torch.func.vmap: the mapped axis joins the batch axis, so one kernel call serves the whole map."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _schema

_NO_VMAP = (
    "softcap_ops: vmap over {what} is not offered. Map q, k and v of softcap_attention, "
    "or join the mapped sequences into one packed batch yourself."
)


def _join(t: Tensor | None, in_dim: int | None, size: int) -> Tensor | None:
    """(size, B, ...) -> (size * B, ...), repeating what is not mapped."""
    if t is None:
        return None
    t = t.expand(size, *t.shape) if in_dim is None else t.movedim(in_dim, 0)
    return t.flatten(0, 1)


def _split(t: Tensor, size: int) -> tuple[Tensor, int | None]:
    if t.dim() == 1:  # a gradient that was not asked for has no elements and nothing to map
        return t, None
    return t.unflatten(0, (size, t.shape[0] // size if size else 0)), 0


def _dense(op: Any, tensors: int, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """`tensors` leading arguments may be mapped, the scalars behind them may not."""
    if any(d is not None for d in in_dims[tensors:] if not isinstance(d, (tuple, list))):
        raise NotImplementedError(_NO_VMAP.format(what="softcap or scale"))
    size = info.batch_size
    joined = (_join(t, d, size) for t, d in zip(args[:tensors], in_dims[:tensors], strict=True))
    outputs = op(*joined, *args[tensors:])
    values, dims = zip(*(_split(t, size) for t in outputs), strict=True)
    return values, dims


def _packed(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotImplementedError(_NO_VMAP.format(what="softcap_attention_varlen"))


for _op, _tensors in ((_schema.attention_fwd, 3), (_schema.attention_bwd, 7)):
    torch.library.register_vmap(_op, partial(_dense, _op, _tensors))
for _op in (_schema.varlen_attention_fwd, _schema.varlen_attention_bwd):
    torch.library.register_vmap(_op, _packed)
