"""torch.func.vmap: the mapped axis joins the batch axis, or the heads of a packed batch: one kernel call a map."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _schema, _validation
from .errors import UnsupportedError

_NO_VMAP = (
    "softcap_ops: vmap over {what} is not offered. Map q, k and v only; a map over packed batches of different "
    "lengths is itself a packed batch: join the sequences and their cu_seqlens."
)
_TOO_MANY_HEADS = (
    "softcap_ops: a map over {size} packed calls is one call of {heads} heads, and at most {most} are possible: give "
    "vmap or jacrev a chunk_size of at most {chunk}"
)


def _join(t: Tensor | None, in_dim: int | None, axis: int, size: int) -> Tensor | None:
    """Put the mapped axis in front of `axis` and merge the two; what is not mapped is repeated."""
    if t is None:
        return None
    t = t.unsqueeze(axis).expand(*t.shape[:axis], size, *t.shape[axis:]) if in_dim is None else t.movedim(in_dim, axis)
    return t.flatten(axis, axis + 1)


def _split(t: Tensor, axis: int, size: int) -> tuple[Tensor, int | None]:
    if t.dim() == 1:  # a gradient that was not asked for has no elements and nothing to map
        return t, None
    return t.unflatten(axis, (size, -1)), axis


def _batch(
    op: Any, axes: tuple[int, ...], out_axes: tuple[int, ...], info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[Any, Any]:
    """`axes`: for each of the leading tensors, the axis that takes in the mapped one; for the results `out_axes`."""
    leading = len(axes)
    # A bool list among the arguments comes with a list of in_dims of its own.
    if any(dim is not None for dim in in_dims[leading:] if not isinstance(dim, (list, tuple))):
        raise UnsupportedError(_NO_VMAP.format(what="cu_seqlens, softcap or scale"))
    size = info.batch_size
    tensors, dims = args[:leading], in_dims[:leading]
    if size == 0:  # one item of zeros has the shapes that the results of none have
        items = (
            t if d is None else t.new_zeros(t.shape[:d] + t.shape[d + 1 :]) for t, d in zip(tensors, dims, strict=True)
        )
        results = op(*items, *args[leading:])
        none = [
            (r, None) if r.dim() == 1 else (r.unsqueeze(a).narrow(a, 0, 0), a)
            for r, a in zip(results, out_axes, strict=True)
        ]
        values, out_dims = zip(*none, strict=True)
        return values, out_dims
    joined: list[Any] = [_join(t, d, axis, size) for t, d, axis in zip(tensors, dims, axes, strict=True)]
    heads, most = joined[0].shape[axes[0]], _validation.MAX_HEADS  # of q, or of dout
    if axes[0] == _PACKED_HEADS and heads > most:
        chunk = most // (heads // size)
        raise UnsupportedError(_TOO_MANY_HEADS.format(size=size, heads=heads, most=most, chunk=chunk))
    results = op(*joined, *args[leading:])
    values, out_dims = zip(*(_split(r, axis, size) for r, axis in zip(results, out_axes, strict=True)), strict=True)
    return values, out_dims


def _batch_decode(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """The mapped axis joins the batch. Blocks are shared by all sequences: a map over them has no batch to join."""
    if args[5] is not None and (in_dims[1] is not None or in_dims[2] is not None):
        raise UnsupportedError(
            "softcap_ops: vmap over k_cache or v_cache with a block_table is not offered: put all blocks into one "
            "cache and map q, cache_seqlens and block_table."
        )
    caches = () if args[5] is not None else (1, 2)
    batched = [i for i in (0, *caches, 3, 4, 5) if args[i] is not None]
    others = [d for i, d in enumerate(in_dims) if i not in batched]
    if any(d is not None for d in others):
        raise UnsupportedError(_NO_VMAP.format(what="softcap or scale"))
    order = [*batched, *(i for i in range(len(args)) if i not in batched)]

    def op(*moved: Any) -> Any:
        return _schema.decode_attention_fwd(*(moved[order.index(i)] for i in range(len(args))))

    axes = (0,) * len(batched)
    (out, lse), (out_dim, lse_dim) = _batch(
        op, axes, (0, 0), info, tuple(in_dims[i] for i in order), *(args[i] for i in order)
    )
    return (out, lse), (out_dim, lse_dim)


torch.library.register_vmap(_schema.decode_attention_fwd, _batch_decode)

_PACKED_HEADS = 1  # their axis in packed tensors

# Tensors in front: q, k, v, and for the backward dout, dlse, q, k, v, out, lse; heads come first in a packed lse.
for _op, _axes, _out_axes in (
    (_schema.attention_fwd, (0, 0, 0), (0, 0)),
    (_schema.attention_bwd, (0,) * 7, (0, 0, 0)),
    (_schema.varlen_attention_fwd, (1, 1, 1), (1, 0)),
    (_schema.varlen_attention_bwd, (1, 0, 1, 1, 1, 1, 0), (1, 1, 1)),
):
    torch.library.register_vmap(_op, partial(_batch, _op, _axes, _out_axes))
