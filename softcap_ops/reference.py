"""The eager formula: the oracle of the tests and the documentation of the maths.

    out = softmax(mask(cap * tanh(scale * q kT / cap))) v

in this order: scale, cap, mask, softmax. Plain differentiable PyTorch in any float dtype; it holds the whole
(seqlen_q, seqlen_k) score matrix, so it is for checking and for export, not for speed.
The cap is that of Gemma 2 (Gemma Team 2024, section 2) and Grok-1 (cap 30).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def visible(
    seqlen_q: Any, seqlen_k: Any, causal: bool, window: tuple[Any, Any], device: torch.device | None = None
) -> Tensor | None:
    """Which keys each query sees: bool (seqlen_q, seqlen_k), or None where every query sees every key.

    The diagonal is aligned bottom right: query i stands at key i + seqlen_k - seqlen_q. `window` is (left, right)
    in tokens around it, inclusive, -1 = unlimited; causal limits the right to 0.
    """
    left, right = (min(side, 2**62) for side in window)  # the sums below fit into 64 bits
    if causal:
        right = 0
    if left < 0 and right < 0:
        return None
    keys = torch.arange(seqlen_k, device=device)
    diagonal = torch.arange(seqlen_q, device=device).unsqueeze(-1) + (seqlen_k - seqlen_q)
    seen = torch.ones((seqlen_q, seqlen_k), dtype=torch.bool, device=device)
    if right >= 0:
        seen = seen & (keys <= diagonal + right)
    if left >= 0:
        seen = seen & (keys >= diagonal - left)
    return seen


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softcap: float | None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    """Soft-capped attention by the formula.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k, v: (batch, seqlen_k, heads_kv, head_dim), heads_q a multiple of heads_kv.
        softcap: the cap, in units of the scaled score; None or 0.0 = off.
        scale: factor of q kT; None = head_dim ** -0.5.
        causal, window: see `visible`.

    Returns:
        out in q's dtype, shape of q; lse (batch, heads_q, seqlen_q), natural log, float32 (float64 for float64).
        A query that sees nothing has out 0 and lse -inf, and gives no gradient.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    if group > 1:
        kt, vt = kt.repeat_interleave(group, 1), vt.repeat_interleave(group, 1)
    scores = (qt @ kt.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if scores.dtype != torch.float64:
        scores = scores.float()
    seen = visible(q.shape[1], k.shape[1], causal, window, q.device)
    if seen is None and k.shape[1] > 0:
        probabilities, lse = scores.softmax(-1), scores.logsumexp(-1)
    else:
        if seen is None:
            seen = torch.zeros((q.shape[1], 0), dtype=torch.bool, device=q.device)
        sees_any = seen.any(-1)
        # Rows that see nothing get finite scores here and are overwritten below: no NaN in either direction.
        masked = scores.masked_fill(~seen & sees_any.unsqueeze(-1), float("-inf"))
        probabilities = masked.softmax(-1).masked_fill(~seen, 0.0)
        if k.shape[1] == 0:
            lse = scores.new_full(scores.shape[:-1], float("-inf"))
        else:
            lse = masked.logsumexp(-1).masked_fill(~sees_any, float("-inf"))
    out = probabilities.to(v.dtype) @ vt
    return out.transpose(1, 2).contiguous(), lse


def attention_decode(
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
) -> tuple[Tensor, Tensor]:
    """`attention` of each sequence on its keys in a cache; arguments as of `softcap_attention_decode`."""
    outs, lses = [], []
    for b, end in enumerate(cache_seqlens.tolist()):
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        if block_table is None:
            k, v = k_cache[b], v_cache[b]
        else:
            k, v = (cache[block_table[b, : -(-end // cache.shape[1])]].flatten(0, 1) for cache in (k_cache, v_cache))
        rows = slice(min(first, end), end)
        out, lse = attention(
            q[b, None], k[None, rows], v[None, rows], softcap=softcap, scale=scale, causal=causal, window=window
        )
        outs.append(out)
        lses.append(lse)
    if not outs:
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.clone(), q.new_zeros((0, q.shape[2], q.shape[1]), dtype=lse_dtype)
    return torch.cat(outs), torch.cat(lses)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softcap: float | None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    """`attention` on a packed batch: q (tokens_q, heads_q, head_dim), k, v (tokens_k, heads_kv, head_dim).

    cu_seqlens_*: int32 (batch + 1,), the first row of each sequence. Returns out (tokens_q, heads_q, head_dim) and
    lse (heads_q, tokens_q); rows past cu_seqlens_q[-1] are 0 and -inf.
    """
    outs, lses = [], []
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        rows_q, rows_k = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        out, lse = attention(
            q[None, rows_q], k[None, rows_k], v[None, rows_k],
            softcap=softcap, scale=scale, causal=causal, window=window,
        )  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
    tail = torch.zeros_like(q[starts_q[-1] :])
    outs.append(tail)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lses.append(torch.full((q.shape[1], tail.shape[0]), float("-inf"), dtype=lse_dtype, device=q.device))
    return torch.cat(outs), torch.cat(lses, dim=-1)
