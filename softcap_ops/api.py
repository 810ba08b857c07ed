"""The public functions: check the Python types, fill in the defaults, call the op."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from . import _nested, _onnx, _schema, _validation, backends
from ._arguments import Options, resolve
from .errors import OnnxExportError


@overload
def softcap_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softcap: float | None,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def softcap_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softcap: float | None,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def softcap_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softcap: float | None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Soft-capped attention, `softmax(mask(softcap * tanh(scale * q kT / softcap))) v`.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float32, float64, bfloat16 or float16, any strides; or, with k and
            v, a jagged torch.nested tensor (batch, ragged, heads, head_dim), which runs packed without a copy.
        k, v: (batch, seqlen_k, heads_kv, head_dim), dtype and device of q; heads_q is a multiple of heads_kv
            (GQA: query head h reads key head h // (heads_q // heads_kv)).
        softcap: bound of the scores, in units of the scaled score (Gemma 2: 50, Grok-1: 30); None or 0.0 = off.
        scale: factor of q kT; None = head_dim ** -0.5.
        causal: query i sees key j when j <= i + seqlen_k - seqlen_q (aligned bottom right).
        window: (left, right) tokens seen around the same diagonal, inclusive, -1 = unlimited. A model's
            "sliding_window = W" is (W - 1, 0).
        return_lse: also return the log-sum-exp of the capped, masked scores.
        deterministic: bitwise repeatable gradients; None follows torch.are_deterministic_algorithms_enabled().
        backend: name of the backend to use, an error if it cannot; None selects (see `explain`).

    Returns:
        out, shape and dtype of q, contiguous; with return_lse (out, lse), lse (batch, heads_q, seqlen_q) in
        natural log, float32 (float64 for float64 input). Both are differentiable, once. A query that sees no key
        has out 0, lse -inf and gives no gradient.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was expected and what came.
        UnsupportedError: no backend can serve the call, or the one asked for cannot.
        errors.OnnxExportError: a soft-capped call is being exported to ONNX, which has no such operator.
    """
    _validation.types(q, k, v, causal, deterministic, backend, may_be_nested=True)
    left, right = _validation.scalars(softcap, scale, window)
    if _onnx.exporting_torchscript():
        out, lse = _onnx.attention(q, k, v, softcap, scale, causal, (left, right))
    elif q.is_nested or k.is_nested or v.is_nested:
        options = Options(softcap, scale, causal, left, right, deterministic, backend)
        out, lse = _nested.attention(q, k, v, options)
    else:
        out, lse = _schema.attention_fwd(q, k, v, softcap, scale, causal, left, right, deterministic, backend)
    return (out, lse) if return_lse else out


@overload
def softcap_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softcap: float | None,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def softcap_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softcap: float | None,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def softcap_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softcap: float | None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`softcap_attention` on a packed batch: sequences of several lengths end to end, no padding.

    Args:
        q: (tokens_q, heads_q, head_dim).
        k, v: (tokens_k, heads_kv, head_dim).
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), contiguous, on q's device: sequence b is the rows from
            entry b up to entry b + 1. They start at 0, never decrease and end within the tokens.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, in tokens; an int, never a tensor.
        The others: see `softcap_attention`; causal and window apply within each sequence.

    Returns:
        out (tokens_q, heads_q, head_dim), or with return_lse (out, lse), lse (heads_q, tokens_q). Rows past
        cu_seqlens_q[-1] are 0 in out and in every gradient, -inf in lse.

    Raises:
        As `softcap_attention`. What cu_seqlens hold is checked on the CPU only.
    """
    _validation.types(q, k, v, causal, deterministic, backend)
    left, right = _validation.scalars(softcap, scale, window)
    _validation.lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if _onnx.exporting_torchscript():
        raise OnnxExportError(_onnx.message("varlen_attention_fwd", _onnx.capped(softcap)))
    out, lse = _schema.varlen_attention_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softcap, scale, causal, left, right, deterministic, backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


@overload
def softcap_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    cache_leftpad: Tensor | None = ...,
    block_table: Tensor | None = ...,
    softcap: float | None,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def softcap_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    cache_leftpad: Tensor | None = ...,
    block_table: Tensor | None = ...,
    softcap: float | None,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def softcap_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softcap: float | None,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`softcap_attention` of the latest queries on a KV cache. No gradient, and nothing is written to the cache.

    Write the new keys and values first, then call: cache_seqlens counts them in. (flash_attn_with_kvcache counts the
    same way where it is not given new keys; where it is, it appends them, and its cache_seqlens leaves them out.)

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), any seqlen_q: one step, several (speculative decoding), a chunk of a
            prompt. dtypes, strides and GQA as in `softcap_attention`.
        k_cache, v_cache: (batch, cache_len, heads_kv, head_dim); with block_table (blocks, block_size, heads_kv,
            head_dim). What lies beyond a sequence's keys is not read on the CPU; a GPU kernel may read it and then
            needs it finite.
        cache_seqlens: int32, (batch,), contiguous, on q's device: the keys of sequence b end before this row of its
            cache. It stays on the device, so that one graph serves every step.
        cache_leftpad: the same kind: they start at this row (left padding); None = 0.
        block_table: int32, (batch, blocks of one sequence), on q's device: row b lists the blocks of sequence b, which
            count as lying end to end; entries past its last key may be anything.
        causal: query i of sequence b sees its key j when j <= i + n - seqlen_q, n = cache_seqlens[b] -
            cache_leftpad[b] keys (aligned bottom right). True by default, unlike that of `softcap_attention`.
        return_lse: also return the log-sum-exp of the capped, masked scores.
        softcap, scale, window, backend: see `softcap_attention`.

    Returns:
        out, shape and dtype of q, contiguous; with return_lse (out, lse), lse (batch, heads_q, seqlen_q). A query that
        sees no key, as every one of an empty sequence, has out 0 and lse -inf.

    Raises:
        As `softcap_attention`; what the lengths and block_table hold is checked on the CPU only. UnsupportedError also
        where q, k_cache or v_cache requires a gradient and grad mode is on.
    """
    _validation.types(q, k_cache, v_cache, causal, None, backend, _validation.CACHES)
    cache = _validation.cache(cache_seqlens, cache_leftpad, block_table)
    left, right = _validation.scalars(softcap, scale, window)
    if _onnx.exporting_torchscript():
        raise OnnxExportError(_onnx.message("decode_attention_fwd", _onnx.capped(softcap)))
    out, lse = _schema.decode_attention_fwd(
        q, k_cache, v_cache, *cache, softcap, scale, causal, left, right, backend, None, None, return_lse
    )
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softcap: float | None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    deterministic: bool | None = None,
    backend: str | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    cache_seqlens: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
) -> str:
    """Which backend would run this call, and why each other one would not. Nothing is computed.

    Arguments are those of `softcap_attention`, with the cu_seqlens of `softcap_attention_varlen`, or with cache_seqlens
    those of `softcap_attention_decode` (k and v are the caches then, and causal is said, not implied), and are checked
    the same way. A gradient is taken to be needed when grad mode is on and q, k or v requires one.
    """
    may_be_nested = cu_seqlens_q is None and cache_seqlens is None
    _validation.types(q, k, v, causal, deterministic, backend, may_be_nested=may_be_nested)
    left, right = _validation.scalars(softcap, scale, window)
    packing_arguments = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if cache_seqlens is None and (cache_leftpad is not None or block_table is not None):
        raise ValueError("cache_seqlens must be given with cache_leftpad or block_table")
    if cache_seqlens is not None:
        if any(a is not None for a in packing_arguments):
            raise ValueError("cache_seqlens is for calls on a KV cache, cu_seqlens for packed ones: not both")
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            return "would be refused: attention on a KV cache has no gradient, and q, k or v requires one"
        cache = _validation.cache(cache_seqlens, cache_leftpad, block_table)
        options = Options(softcap, scale, causal, left, right, deterministic, backend)
        _validation.decode(q, k, v, cache, options)
        facts = backends.decode_facts(q, k, cache, resolve(options, q.shape[-1]))
        return backends.explain(backends.Problem(*facts), backend)
    packing = None
    if any(a is not None for a in packing_arguments):
        packing = _validation.lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    elif q.is_nested or k.is_nested or v.is_nested:
        q, k, v, packing = _nested.packed(q, k, v)
    options = Options(softcap, scale, causal, left, right, deterministic, backend)
    _validation.inputs(q, k, v, packing, options)
    needs_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    problem = backends.Problem.of(q, k, packing, resolve(options, q.shape[-1]), needs_backward=needs_backward)
    return backends.explain(problem, backend)
