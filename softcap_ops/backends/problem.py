"""Problem: the facts that decide which backend may serve a call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .._arguments import Cache, Packing, Parameters

# Below this many tiles of 128 queries, half a large GPU has nothing to do unless the keys are split over blocks, which
# pays from this many keys on.
_FEW_TILES, _MANY_KEYS = 64, 1024

# The y and z sides of a CUDA grid, where FlashAttention puts the sequences of a batch.
_MAX_GRID = 65535


class Refusal(str):
    """Why a backend cannot serve, with the exception it was learnt from (None: it is known without trying)."""

    cause: BaseException | None

    def __new__(cls, reason: str, cause: BaseException | None = None) -> Refusal:
        refusal = super().__new__(cls, reason)
        refusal.cause = cause
        return refusal


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of call. Hashable: selection is cached on it."""

    device_type: str  # "cpu" or "cuda"
    device_index: int | None
    capability: tuple[int, int] | None  # CUDA compute capability
    dtype: torch.dtype
    head_dim: int
    heads_q: int
    heads_kv: int
    packed: bool
    softcap: float  # 0.0 = off
    causal: bool
    window: tuple[int, int]  # what is left of it on these lengths: (-1, -1) if it hides no key that causal does not
    deterministic: bool
    needs_backward: bool
    over_grid: bool = False  # more sequences than one CUDA grid takes
    few_queries: bool = False  # so little to do that only splitting the keys fills a GPU
    cached: bool = False  # a decode call: keys and values lie in a cache
    block_size: int = 0  # of a cache in blocks, else 0
    leftpad: bool = False  # a cache whose sequences do not start at 0
    more_queries: bool = False  # than keys that fit into the cache

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, packing: Packing | None, parameters: Parameters, *, needs_backward: bool
    ) -> Problem:
        """The problem that these tensors and parameters pose."""
        return cls(*facts(q, k, packing, parameters, needs_backward))


def facts(q: Tensor, k: Tensor, packing: Packing | None, p: Parameters, needs_backward: bool) -> tuple[Any, ...]:
    """The fields of a Problem, as a tuple: cheaper to hash than the Problem is to build."""
    if packing is None:
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    else:
        batch, queries, keys = packing.cu_seqlens_q.shape[0] - 1, packing.max_seqlen_q, packing.max_seqlen_k
    few = keys >= _MANY_KEYS and (queries == 1 or batch * q.shape[-2] * (queries + 127 >> 7) < _FEW_TILES)
    return *_common_facts(q, k, packing is not None, p, needs_backward, batch, queries, keys), few


def decode_facts(q: Tensor, k_cache: Tensor, cache: Cache, p: Parameters) -> tuple[Any, ...]:
    """`facts` of a decode call. The lengths are on the device: what is known of them is that they fit the cache."""
    batch, queries, capacity = q.shape[0], q.shape[1], cache.capacity(k_cache)
    few_queries = cached = True
    block_size = 0 if cache.block_table is None else k_cache.shape[1]
    return (
        *_common_facts(q, k_cache, False, p, False, batch, queries, capacity),
        few_queries,
        cached,
        block_size,
        cache.cache_leftpad is not None,
        queries > capacity,
    )


def _common_facts(
    q: Tensor, k: Tensor, packed: bool, p: Parameters, needs_backward: bool, batch: int, queries: int, keys: int
) -> tuple[Any, ...]:
    """Those up to over_grid, of a call of `batch` sequences of at most so many queries and keys."""
    device = q.device
    causal, window = p.causal, p.window
    if window != (-1, -1):
        causal, window = effective_mask(causal, window, queries, keys)
    return (
        device.type,
        device.index,
        _capability(device.index) if device.type == "cuda" else None,
        q.dtype,
        q.shape[-1],
        q.shape[-2],
        k.shape[-2],
        packed,
        p.softcap,
        causal,
        window,
        p.deterministic,
        needs_backward,
        batch > _MAX_GRID,
    )


def effective_mask(causal: bool, window: tuple[int, int], seqlen_q: int, seqlen_k: int) -> tuple[bool, tuple[int, int]]:
    """(causal, window) of the same mask, a side that hides nothing being -1: (W, 0) is causal and (W, -1)."""
    left, right = window
    if causal or right == 0:
        causal, right = True, -1
    return causal, (-1 if left >= seqlen_k - 1 else left, -1 if right >= seqlen_q - 1 else right)
