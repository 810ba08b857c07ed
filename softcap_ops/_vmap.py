"""torch.func.vmap: the mapped axis joins the batch axis, or the heads of a packed batch: one kernel call a map."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _schema
from .errors import UnsupportedError

_NO_VMAP = (
    "softcap_ops: vmap over {what} is not offered. Map q, k and v only; a map over packed batches of different "
    "lengths is itself a packed batch: join the sequences and their cu_seqlens."
)


def _join(t: Tensor | None, in_dim: int | None, axis: int, size: int) -> Tensor | None:
    """Put the mapped axis in front of `axis` and merge the two; what is not mapped is repeated."""
    if t is None:
        return None
    t = t.unsqueeze(axis).expand(*t.shape[:axis], size, *t.shape[axis:]) if in_dim is None else t.movedim(in_dim, axis)
    return t.flatten(axis, axis + 1)


def _split(t: Tensor, axis: int, size: int, inner: int) -> tuple[Tensor, int | None]:
    if t.dim() == 1:  # a gradient that was not asked for has no elements and nothing to map
        return t, None
    return t.unflatten(axis, (size, inner)), axis


def _batch(
    op: Any, axes: tuple[int, ...], out_axes: tuple[int, ...], info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[Any, Any]:
    """`axes`: for each of the leading tensors, the axis that takes in the mapped one; for the results `out_axes`."""
    leading = len(axes)
    # A bool list among the arguments comes with a list of in_dims of its own.
    if any(dim is not None for dim in in_dims[leading:] if not isinstance(dim, (list, tuple))):
        raise UnsupportedError(_NO_VMAP.format(what="cu_seqlens, softcap or scale"))
    size = info.batch_size
    tensors = [
        _join(t, dim, axis, size) for t, dim, axis in zip(args[:leading], in_dims[:leading], axes, strict=True)
    ]
    results = op(*tensors, *args[leading:])
    inner = _inner_sizes(args[:leading], in_dims[:leading], axes)
    # The forward returns out and lse, which have q's batch and heads; the backward dq, dk, dv, those of q, k, v.
    likes = inner[:1] * 2 if len(results) == 2 else inner[2:5]
    values, dims = zip(
        *(_split(t, axis, size, like) for t, axis, like in zip(results, out_axes, likes, strict=True)), strict=True
    )
    return values, dims


def _inner_sizes(tensors: tuple[Any, ...], in_dims: tuple[Any, ...], axes: tuple[int, ...]) -> list[int]:
    """The size that each tensor's joined axis has without the map."""
    sizes = []
    for t, dim, axis in zip(tensors, in_dims, axes, strict=True):
        shape = [] if t is None else [n for i, n in enumerate(t.shape) if i != dim]
        sizes.append(shape[axis] if shape else 0)
    return sizes


# Tensors in front: q, k, v, and for the backward dout, dlse, q, k, v, out, lse; heads come first in a packed lse.
for _op, _axes, _out_axes in (
    (_schema.attention_fwd, (0, 0, 0), (0, 0)),
    (_schema.attention_bwd, (0,) * 7, (0, 0, 0)),
    (_schema.varlen_attention_fwd, (1, 1, 1), (1, 0)),
    (_schema.varlen_attention_bwd, (1, 0, 1, 1, 1, 1, 0), (1, 1, 1)),
):
    torch.library.register_vmap(_op, partial(_batch, _op, _axes, _out_axes))
