"""The one shape, dtype, device and value contract of the ops: one message for each mistake.

`types`, `scalars` and `lengths` check what Python types alone decide and run in the public functions. All else runs
inside the ops, on real tensors (before any kernel) and on fake ones (while tracing), so that the bare op and the public
function refuse the same calls. A wrong type or dtype is a TypeError, a wrong shape, device or value a ValueError.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ._arguments import Cache, Options, Packing

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The FlashAttentions launch one grid row a head; past this they could not run what a CPU could.
MAX_HEADS = 65535

_DENSE = "(batch, seqlen, heads, head_dim)"
_PACKED = "(tokens, heads, head_dim)"
_CACHED = "(batch, cache_len, heads, head_dim)"
_PAGED = "(blocks, block_size, heads, head_dim)"


def types(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    deterministic: Any,
    backend: Any,
    names: tuple[str, str] = ("k", "v"),
    *,
    may_be_nested: bool = False,
) -> None:
    """Check the Python types of the public functions' tensors and switches."""
    for name, value in zip(("q", *names), (q, k, v), strict=True):
        tensor(name, value)
        if not may_be_nested and value.is_nested:
            raise TypeError(
                f"{name} must be a plain tensor, got a nested one: softcap_attention takes jagged tensors as they are"
            )
    if not isinstance(causal, (bool, torch.SymBool)):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool or None, got {type(deterministic).__name__}")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be a str or None, got {type(backend).__name__}")


def tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")


def scalars(softcap: Any, scale: Any, window: Any) -> tuple[Any, Any]:
    """Check the Python types of the public functions' scalars; returns (left, right) of the window."""
    number("softcap", softcap, "0.0 or None turns the cap off")
    number("scale", scale, "None means head_dim ** -0.5")
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right) of ints, -1 = unlimited, got {window!r}")
    left, right = window
    integer("window[0]", left)
    integer("window[1]", right)
    return left, right


def number(name: str, value: Any, note: str) -> None:
    if value is None or (isinstance(value, (float, int)) and not isinstance(value, bool)):
        if isinstance(value, int):
            _fits(name, value)
        return
    if isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Python number or None, got a Tensor: pass {name}.item()")
    if not isinstance(value, (torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be a number or None ({note}), got {type(value).__name__}")


def integer(name: str, value: Any) -> None:
    """Refuse what is not an int, a 0-d tensor above all: it works eagerly and breaks once compiled."""
    if isinstance(value, Tensor):
        raise TypeError(f"{name} must be an int, got a Tensor: pass {name}.item()")
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if isinstance(value, int):
        _fits(name, value)


def _fits(name: str, value: int) -> None:
    """The dispatcher takes no larger ints, and says so without the argument's name."""
    if torch.compiler.is_compiling():  # an int may be one that only the data knows
        return
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got an int of {value.bit_length()} bits")


def lengths(cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any) -> Packing:
    """Check the Python types of what only the packed functions take."""
    tensor("cu_seqlens_q", cu_seqlens_q)
    tensor("cu_seqlens_k", cu_seqlens_k)
    integer("max_seqlen_q", max_seqlen_q)
    integer("max_seqlen_k", max_seqlen_k)
    return Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


CACHES = ("k_cache", "v_cache")


def cache(cache_seqlens: Any, cache_leftpad: Any, block_table: Any) -> Cache:
    """Check the Python types of what only decoding takes."""
    if isinstance(cache_seqlens, int):
        raise TypeError(
            f"cache_seqlens must be an int32 Tensor of shape (batch,), got the int {cache_seqlens}: "
            "torch.full((batch,), n, dtype=torch.int32, device=q.device)"
        )
    tensor("cache_seqlens", cache_seqlens)
    if cache_leftpad is not None:
        tensor("cache_leftpad", cache_leftpad)
    if block_table is not None:
        tensor("block_table", block_table)
    return Cache(cache_seqlens, cache_leftpad, block_table)


def options(o: Options) -> None:
    """Check the values that are known now; symbolic ones are checked when the graph runs."""
    softcap, scale = o.softcap, o.scale
    if o.softcap_tensor is not None:
        softcap = _scalar_tensor("softcap_tensor", o.softcap_tensor)
    if o.scale_tensor is not None:
        scale = _scalar_tensor("scale_tensor", o.scale_tensor)
    for name, value in (("softcap", softcap), ("scale", scale)):
        if isinstance(value, complex):
            raise TypeError(f"{name} must be a real number or None, got {value!r}")
    if isinstance(softcap, (float, int)) and not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and positive, or 0.0 or None for off, got {softcap}")
    if isinstance(scale, (float, int)) and not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, or None for head_dim ** -0.5, got {scale}")
    for name, value in (("window[0]", o.window_left), ("window[1]", o.window_right)):
        if type(value) is int and value < -1:
            raise ValueError(f"{name} must be -1 (unlimited) or at least 0, got {value}")


def _scalar_tensor(name: str, value: Tensor) -> float | None:
    if value.dim() != 0 or value.dtype != torch.float64 or value.device.type != "cpu":
        raise ValueError(
            f"{name} must be a 0-d float64 CPU tensor, got shape {tuple(value.shape)}, {value.dtype} on {value.device}"
        )
    return None if is_fake(value) else value.item()


def is_fake(t: Tensor) -> bool:
    return isinstance(t, FakeTensor) or t.is_meta


def inputs(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, o: Options) -> None:
    """All that a forward op can check without reading tensor data."""
    if packing is None:
        dense(q, k, v)
    else:
        packed(q, k, v, packing)
    options(o)


def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q (B, Sq, Hq, D); k, v (B, Skv, Hkv, D); one dtype, one device, Hq % Hkv == 0."""
    _rank("q", q, 4, _DENSE)
    _rank("k", k, 4, _DENSE)
    _rank("v", v, 4, _DENSE)
    _same_kind(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have the batch of q, {q.shape[0]}, got shape {_s(k)}")
    _heads(q, k, v, _DENSE)


def packed(q: Tensor, k: Tensor, v: Tensor, p: Packing) -> None:
    """q (Tq, Hq, D); k, v (Tkv, Hkv, D); cu_seqlens int32, contiguous, (B + 1,), on q's device."""
    _rank("q", q, 3, _PACKED)
    _rank("k", k, 3, _PACKED)
    _rank("v", v, 3, _PACKED)
    _same_kind(q, k, v)
    _heads(q, k, v, _PACKED)
    for name, cu in (("cu_seqlens_q", p.cu_seqlens_q), ("cu_seqlens_k", p.cu_seqlens_k)):
        cu_seqlens(name, cu, q.device)
        if not cu.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got stride {cu.stride()}")
    if p.cu_seqlens_k.shape[0] != p.cu_seqlens_q.shape[0]:
        raise ValueError(
            f"cu_seqlens_k must have as many entries as cu_seqlens_q, {p.cu_seqlens_q.shape[0]}, "
            f"got {p.cu_seqlens_k.shape[0]}"
        )
    for name, length in (("max_seqlen_q", p.max_seqlen_q), ("max_seqlen_k", p.max_seqlen_k)):
        if type(length) is int and length < 0:
            raise ValueError(f"{name} must be at least 0, got {length}")


def cu_seqlens(name: str, cu: Tensor, device: torch.device, *, batch: int | None = None, query: str = "q") -> None:
    """int32 (batch + 1,) on the device of the queries, which the caller's argument `query` holds; batch None: any."""
    if cu.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {cu.dtype}")
    if cu.dim() != 1 or (cu.shape[0] < 1 if batch is None else cu.shape[0] != batch + 1):
        expected = "(batch + 1,)" if batch is None else f"({batch + 1},)"
        raise ValueError(f"{name} must have shape {expected}, got {_s(cu)}")
    if cu.device != device:
        raise ValueError(f"{name} must be on the device of {query}, {device}, got {cu.device}")


def packed_values(q: Tensor, k: Tensor, p: Packing) -> None:
    """Check what cu_seqlens hold. On the CPU only: on a GPU reading them would stop the stream."""
    for name, cu, tokens, length_name, length in (
        ("cu_seqlens_q", p.cu_seqlens_q, q.shape[0], "max_seqlen_q", p.max_seqlen_q),
        ("cu_seqlens_k", p.cu_seqlens_k, k.shape[0], "max_seqlen_k", p.max_seqlen_k),
    ):
        offsets = cu.tolist()
        if offsets[0] != 0:
            raise ValueError(f"{name} must start at 0, got {offsets[0]}")
        longest = 0
        for i in range(1, len(offsets)):
            step = offsets[i] - offsets[i - 1]
            if step < 0:
                raise ValueError(f"{name} must not decrease, got {offsets[i - 1]} then {offsets[i]} at entry {i}")
            longest = max(longest, step)
        if offsets[-1] > tokens:
            raise ValueError(f"{name} must end within the {tokens} tokens it indexes, got {offsets[-1]}")
        if longest > length:
            raise ValueError(f"{length_name} must be at least the longest sequence, {longest}, got {length}")


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, c: Cache, o: Options) -> None:
    """All that decode_attention_fwd can check without reading tensor data.

    q (B, Sq, Hq, D); k_cache, v_cache (B, Smax, Hkv, D), or with block_table (blocks, block_size, Hkv, D);
    cache_seqlens, cache_leftpad int32, contiguous, (B,); block_table int32, (B, blocks of one sequence).
    """
    layout = _CACHED if c.block_table is None else _PAGED
    _rank("q", q, 4, _DENSE)
    _rank("k_cache", k_cache, 4, layout)
    _rank("v_cache", v_cache, 4, layout)
    _same_kind(q, k_cache, v_cache, CACHES)
    if c.block_table is None and k_cache.shape[0] != q.shape[0]:
        raise ValueError(f"k_cache must have the batch of q, {q.shape[0]}, got shape {_s(k_cache)}")
    _heads(q, k_cache, v_cache, layout, CACHES)
    for name, t, rank, shape in (
        ("cache_seqlens", c.cache_seqlens, 1, "(batch,)"),
        ("cache_leftpad", c.cache_leftpad, 1, "(batch,)"),
        ("block_table", c.block_table, 2, "(batch, blocks)"),
    ):
        if t is None:
            continue
        if t.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {t.dtype}")
        if t.dim() != rank or t.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have shape {shape} with the batch of q, {q.shape[0]}, got {_s(t)}")
        if t.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")
        if rank == 1 and not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got stride {t.stride()}")
    options(o)


def decode_values(k_cache: Tensor, c: Cache) -> None:
    """Check what the lengths and the block table hold. On the CPU only: on a GPU reading them would stop the stream."""
    capacity, seqlens = c.capacity(k_cache), c.cache_seqlens.tolist()
    leftpads = [0] * len(seqlens) if c.cache_leftpad is None else c.cache_leftpad.tolist()
    for name, lengths in (("cache_seqlens", seqlens), ("cache_leftpad", leftpads)):
        for b, length in enumerate(lengths):
            if not 0 <= length <= capacity:
                raise ValueError(
                    f"{name} must lie between 0 and the {capacity} keys that the cache holds of a sequence, "
                    f"got {length} for sequence {b}"
                )
    if c.block_table is None:
        return
    blocks, block_size = k_cache.shape[:2]
    for b, (first, end) in enumerate(zip(leftpads, seqlens, strict=True)):
        if first >= end:
            continue
        used = c.block_table[b, first // block_size : -(-end // block_size)]
        low, high = (int(x) for x in used.aminmax())
        if low < 0 or high >= blocks:
            raise ValueError(
                f"block_table must name blocks 0 to {blocks - 1} of the cache wherever a sequence has keys, "
                f"got {low if low < 0 else high} for sequence {b}"
            )


def gradients(dout: Tensor, dlse: Tensor | None, q: Tensor, out: Tensor, lse: Tensor) -> None:
    """The backward ops' own inputs: what the forward returned and gradients of the same shapes."""
    lse_shape, lse_dtype = lse_shape_of(q), lse_dtype_of(q)
    for name, t, shape, dtype in (
        ("dout", dout, tuple(q.shape), q.dtype),
        ("out", out, tuple(q.shape), q.dtype),
        ("lse", lse, lse_shape, lse_dtype),
        ("dlse", dlse, lse_shape, lse_dtype),
    ):
        if t is None:
            continue
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {_s(t)}")
        if t.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")


def lse_shape_of(q: Tensor) -> tuple[Any, ...]:
    """(B, Hq, Sq) for dense q, (Hq, Tq) for packed q."""
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def lse_dtype_of(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _s(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape)


def _rank(name: str, t: Tensor, rank: int, layout: str) -> None:
    if t.dim() != rank:
        raise ValueError(f"{name} must have shape {layout}, got {_s(t)}")


def _same_kind(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = ("k", "v")) -> None:
    if q.dtype not in FLOAT_DTYPES:
        raise TypeError(f"q must be float32, float64, bfloat16 or float16, got {q.dtype}")
    for name, t in zip(names, (k, v), strict=True):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")


def _heads(q: Tensor, k: Tensor, v: Tensor, layout: str, names: tuple[str, str] = ("k", "v")) -> None:
    """The checks on the axes that all layouts share: the last two, and k against v."""
    key, value = names
    if v.shape != k.shape:
        raise ValueError(f"{value} must have the shape of {key}, {_s(k)}, got {_s(v)}")
    heads_q, heads_kv, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    if head_dim < 1 or k.shape[-1] != head_dim:
        raise ValueError(f"{key} must have the head_dim of q, {head_dim} (at least 1), got shape {_s(k)}")
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv != 0:
        raise ValueError(
            f"the heads of q must be a positive multiple of those of {key}, got {heads_q} and {heads_kv} "
            f"from q {_s(q)}, {key} {_s(k)}: the layout is {layout}{_transposed_hint(q, k)}"
        )
    if heads_q > MAX_HEADS:
        raise ValueError(
            f"q has {heads_q} heads (at most {MAX_HEADS}) in shape {_s(q)}: the layout is {layout}; "
            "transpose axes 1 and 2 of a (batch, heads, seqlen, head_dim) tensor"
        )


def _transposed_hint(q: Tensor, k: Tensor) -> str:
    """Say so when the same tensors read as (batch, heads, seqlen, head_dim) would have been valid."""
    if q.dim() == 4 and k.shape[1] > 0 and q.shape[1] > 0 and q.shape[1] % k.shape[1] == 0:
        return "; these look like (batch, heads, seqlen, head_dim): transpose axes 1 and 2"
    return ""
