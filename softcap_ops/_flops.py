"""FLOP counts for torch.utils.flop_counter.FlopCounterMode.

Convention: two FLOPs a multiply-add, matrix products only, and only (query, key) pairs that the mask lets through:
4 * head_dim a visible pair forward (q kT and P v), 10 * head_dim backward (five products: q kT again, dout vT, and
the three gradients). tanh and exp are not counted. FlopCounterMode counts PyTorch's own attention as if nothing
were masked: compare causal counts with half of its.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensor

from ._arguments import Packing, split, split_decode
from ._late import when_imported


def _clamped_sum(first: int, terms: int, top: int) -> int:
    """Sum of min(max(first + i, 0), top) over i in range(terms), in closed form."""
    start = min(max(-first, 0), terms)  # terms below 0
    stop = min(max(top - first, start), terms)  # terms from here on are at the top
    rising = stop - start
    return rising * (first + start) + rising * (rising - 1) // 2 + (terms - stop) * top


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> int:
    """How many (query, key) pairs the mask lets through; alignment and windows as in `softcap_attention`."""
    left, right = window
    right = 0 if causal else right
    diagonal = seqlen_k - seqlen_q
    up_to_right = seqlen_q * seqlen_k if right < 0 else _clamped_sum(diagonal + right + 1, seqlen_q, seqlen_k)
    before_left = 0 if left < 0 else _clamped_sum(diagonal - left, seqlen_q, seqlen_k)
    return up_to_right - before_left


def _lengths(packing: Packing, tokens_q: int, tokens_k: int) -> list[tuple[int, int]]:
    """Each sequence's (seqlen_q, seqlen_k). While tracing they are unknown: as many of the longest as fit."""
    cu_q, cu_k = packing.cu_seqlens_q, packing.cu_seqlens_k
    if isinstance(cu_q, FakeTensor) or isinstance(cu_k, FakeTensor) or cu_q.is_meta or cu_k.is_meta:
        batch = cu_q.shape[0] - 1
        longest_q, longest_k = int(packing.max_seqlen_q), int(packing.max_seqlen_k)
        fitting = min(batch, -(-tokens_q // max(longest_q, 1)), -(-tokens_k // max(longest_k, 1)))
        return [(longest_q, longest_k)] * fitting
    return list(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True))


def _count(packed: bool, leading: int, factor: int, *args: Any, out_val: Any = None) -> int:
    """The formula of one op, whose first `leading` arguments are its tensors."""
    q, k = args[0:2] if leading == _FORWARD else args[2:4]
    packing, options, _ = split(args[leading:], packed)
    window = (int(options.window_left), int(options.window_right))
    if packing is None:
        lengths = Counter({(int(q.shape[1]), int(k.shape[1])): int(q.shape[0])})
    else:
        lengths = Counter(_lengths(packing, int(q.shape[0]), int(k.shape[0])))
    pairs = sum(n * visible_pairs(*both, options.causal, window) for both, n in lengths.items())
    return factor * pairs * int(q.shape[-2]) * int(q.shape[-1])


def _count_decode(q: Any, k_cache: Any, v_cache: Any, *rest: Any, out_val: Any = None) -> int:
    """Each sequence by its own length. While tracing it is unknown: taken as all that the cache holds."""
    cache, options, _ = split_decode(rest)
    seqlens, leftpad = cache.cache_seqlens, cache.cache_leftpad
    if isinstance(seqlens, FakeTensor) or seqlens.is_meta:
        lengths = [int(cache.capacity(k_cache))] * int(q.shape[0])
    else:
        lengths = (seqlens if leftpad is None else seqlens - leftpad).clamp(min=0).tolist()
    window = (int(options.window_left), int(options.window_right))
    pairs = sum(n * visible_pairs(int(q.shape[1]), s, options.causal, window) for s, n in Counter(lengths).items())
    return 4 * pairs * int(q.shape[-2]) * int(q.shape[-1])


_FORWARD, _BACKWARD = 3, 7  # tensors in front: q, k, v; dout, dlse, q, k, v, out, lse


def register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for prefix, packed in (("", False), ("varlen_", True)):
        for suffix, leading, factor in (("fwd", _FORWARD, 4), ("bwd", _BACKWARD, 10)):
            op = getattr(torch.ops.softcap_ops, f"{prefix}attention_{suffix}")
            register_flop_formula(op, get_raw=True)(partial(_count, packed, leading, factor))
    register_flop_formula(torch.ops.softcap_ops.decode_attention_fwd, get_raw=True)(_count_decode)


# It imports Triton where that is installed.
when_imported("torch.utils.flop_counter", register)
