"""Output metadata of the ops for tracing: contiguous, symbolic sizes, no device asked anything."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from . import _onnx, _validation
from ._arguments import split, split_decode
from ._schema import lib


def forward(packed: bool, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    packing, options, _ = split(rest, packed)
    _validation.inputs(q, k, v, packing, options)
    _onnx.refuse_if_exporting("varlen_attention_fwd" if packed else "attention_fwd", options)
    return empty_outputs(q)


def backward(
    packed: bool,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    packing, options, tail = split(rest, packed)
    _validation.inputs(q, k, v, packing, options)
    _validation.gradients(dout, dlse, q, out, lse)
    _onnx.refuse_if_exporting("varlen_attention_bwd" if packed else "attention_bwd", options)
    return empty_gradients(q, k, v, *tail)


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    cache, options, return_lse = split_decode(rest)
    _validation.decode(q, k_cache, v_cache, cache, options)
    _onnx.refuse_if_exporting("decode_attention_fwd", options)
    return empty_outputs(q, return_lse)


def empty_outputs(q: Tensor, return_lse: bool = True) -> tuple[Tensor, Tensor]:
    """Contiguous tensors for out and lse; the latter has no elements if it is not asked for."""
    shape = _validation.lse_shape_of(q) if return_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=_validation.lse_dtype_of(q))


def empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, output_mask: tuple[bool, bool, bool] = (True, True, True)
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous tensors for dq, dk, dv; one that is not asked for has no elements."""
    dq, dk, dv = (t.new_empty(t.shape if wanted else (0,)) for t, wanted in zip((q, k, v), output_mask, strict=True))
    return dq, dk, dv


for _prefix, _packed in (("", False), ("varlen_", True)):
    lib._register_fake(f"{_prefix}attention_fwd", partial(forward, _packed))
    lib._register_fake(f"{_prefix}attention_bwd", partial(backward, _packed))
lib._register_fake("decode_attention_fwd", decode)
