"""The ops' argument lists as Python tuples, in schema order (see _schema.py)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class Options(NamedTuple):
    """What all four ops take after their tensors: names, order and defaults of the schema."""

    softcap: Any  # float | int | torch.SymFloat | None
    scale: Any = None
    causal: bool = False
    window_left: Any = -1  # int | torch.SymInt
    window_right: Any = -1
    deterministic: bool | None = None
    backend: str | None = None
    softcap_tensor: torch.Tensor | None = None
    scale_tensor: torch.Tensor | None = None


class Packing(NamedTuple):
    """Where the sequences of a packed batch lie (rows of q and of k, v)."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: Any  # int | torch.SymInt
    max_seqlen_k: Any


class Cache(NamedTuple):
    """Where the keys of each sequence lie in a cache: rows cache_leftpad[b] up to cache_seqlens[b]."""

    cache_seqlens: torch.Tensor
    cache_leftpad: torch.Tensor | None  # None = zeros
    block_table: torch.Tensor | None  # None = row b of the caches is sequence b

    def to(self, device: torch.device) -> Cache:
        return Cache(*(None if t is None else t.to(device) for t in self))  # type: ignore[arg-type]

    def capacity(self, k_cache: torch.Tensor) -> Any:
        """How many keys a sequence can have."""
        return k_cache.shape[1] if self.block_table is None else k_cache.shape[1] * self.block_table.shape[1]


class Sharding(NamedTuple):
    """What the context-parallel ops take before the options: packing of the whole sequences, ranks and scheme."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    cu_seqlens_q_padded: torch.Tensor | None
    cu_seqlens_k_padded: torch.Tensor | None
    max_seqlen_q: Any  # int | torch.SymInt | None
    max_seqlen_k: Any
    groups: list[str]  # names: one, or (a2a, p2p)
    comm: str
    layout: str


class Parameters(NamedTuple):
    """Options with every value known: what a kernel is called with."""

    softcap: float  # 0.0 = off
    scale: float
    causal: bool
    window: tuple[int, int]  # (left, right), inclusive, -1 = unlimited
    deterministic: bool


def split(rest: tuple[Any, ...], packed: bool) -> tuple[Packing | None, Options, tuple[Any, ...]]:
    """Name what an op was given after its leading tensors; the third part is what only that op takes."""
    packing = None
    if packed:
        packing, rest = Packing(*rest[: len(Packing._fields)]), rest[len(Packing._fields) :]
    return packing, Options(*rest[: len(Options._fields)]), rest[len(Options._fields) :]


def split_sharded(rest: tuple[Any, ...]) -> tuple[Sharding, Options, tuple[Any, ...]]:
    """`split` for the context-parallel ops."""
    sharding, rest = Sharding(*rest[: len(Sharding._fields)]), rest[len(Sharding._fields) :]
    return sharding, Options(*rest[: len(Options._fields)]), rest[len(Options._fields) :]


# Of decode_attention_fwd, from `scale` on: the dispatcher leaves out trailing arguments that have their default.
_DECODE_DEFAULTS = (None, True, -1, -1, None, None, None, True)


def split_decode(rest: tuple[Any, ...]) -> tuple[Cache, Options, bool]:
    """Name what decode_attention_fwd was given after q, k_cache and v_cache; the third part is return_lse."""
    given = rest[len(Cache._fields) :]
    softcap, scale, causal, left, right, backend, *tensors, return_lse = given + _DECODE_DEFAULTS[len(given) - 1 :]
    return Cache(*rest[:3]), Options(softcap, scale, causal, left, right, None, backend, *tensors), return_lse


def join_decode(cache: Cache, o: Options, return_lse: bool) -> tuple[Any, ...]:
    """The other way round."""
    return (*cache, *o[:5], o.backend, o.softcap_tensor, o.scale_tensor, return_lse)


# float32 kernels would read a larger cap as infinite, and inf * tanh(0) is NaN. No score comes near it.
_LARGEST_SOFTCAP = 1e38
# The GPU kernels count tokens in 32 bits. A window side as large as this hides nothing.
LARGEST_WINDOW = 2**30


def resolve(options: Options, head_dim: int) -> Parameters:
    """Fill in the defaults and read the scalars that a compiled graph carries as tensors."""
    softcap = options.softcap if options.softcap_tensor is None else options.softcap_tensor.item()
    scale = options.scale if options.scale_tensor is None else options.scale_tensor.item()
    deterministic = options.deterministic
    return Parameters(
        0.0 if softcap is None else min(float(softcap), _LARGEST_SOFTCAP),
        1.0 / math.sqrt(head_dim) if scale is None else float(scale),
        options.causal,
        (min(options.window_left, LARGEST_WINDOW), min(options.window_right, LARGEST_WINDOW)),
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
    )
