"""Every argument mistake: its exact type and message, by each route, and before any kernel runs.

`MISTAKES` is the list. The last test proves that it reaches every `raise` of the validation.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import softcap_ops
from softcap_ops import (
    _nested,
    _validation,
    softcap_attention,
    softcap_attention_decode,
    softcap_attention_varlen,
)
from softcap_ops.backends import cpu

NAN, INF = float("nan"), float("inf")


def rand(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return (
        torch.zeros(shape, dtype=dtype, device=device)
        if not dtype.is_floating_point
        else torch.rand(shape, device=device).to(dtype)
    )


def ints(*values: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def jagged(*lengths: int, heads: int = 2) -> Tensor:
    return torch.nested.nested_tensor([rand(n, heads, 8) for n in lengths], layout=torch.jagged)


# A right call of each kind; a mistake changes some of it.
DENSE: dict[str, Any] = {"q": rand(2, 6, 4, 8), "k": rand(2, 6, 2, 8), "v": rand(2, 6, 2, 8), "softcap": 5.0}
PACKED: dict[str, Any] = {
    "q": rand(9, 4, 8),
    "k": rand(9, 2, 8),
    "v": rand(9, 2, 8),
    "cu_seqlens_q": ints(0, 4, 9),
    "cu_seqlens_k": ints(0, 4, 9),
    "max_seqlen_q": 5,
    "max_seqlen_k": 5,
    "softcap": 5.0,
}
DENSE_BWD: dict[str, Any] = {
    **DENSE,
    "dout": rand(2, 6, 4, 8),
    "dlse": rand(2, 4, 6),
    "out": rand(2, 6, 4, 8),
    "lse": rand(2, 4, 6),
}
PACKED_BWD: dict[str, Any] = {
    **PACKED,
    "dout": rand(9, 4, 8),
    "dlse": rand(4, 9),
    "out": rand(9, 4, 8),
    "lse": rand(4, 9),
}

DECODE: dict[str, Any] = {
    "q": rand(2, 1, 4, 8),
    "k_cache": rand(2, 6, 2, 8),
    "v_cache": rand(2, 6, 2, 8),
    "cache_seqlens": ints(6, 3),
    "cache_leftpad": ints(1, 0),
    "block_table": None,
    "softcap": 5.0,
}
PAGED: dict[str, Any] = {
    **DECODE,
    "k_cache": rand(5, 4, 2, 8),
    "v_cache": rand(5, 4, 2, 8),
    "block_table": ints(4, 1, 0, 99).view(2, 2),
}


def public(base: dict[str, Any], changes: dict[str, Any]) -> Any:
    call = {**base, **changes}
    if "k_cache" in call:
        return softcap_attention_decode(**call)
    qkv = [call.pop(name) for name in "qkv"]
    return (softcap_attention_varlen if "max_seqlen_q" in call else softcap_attention)(*qkv, **call)


def bare_op(base: dict[str, Any], changes: dict[str, Any]) -> Any:
    call = {**base, **changes}
    if "window" in call:
        call["window_left"], call["window_right"] = call.pop("window")
    kind = "varlen_" if "max_seqlen_q" in call else "decode_" if "k_cache" in call else ""
    name = kind + ("attention_bwd" if "dout" in call else "attention_fwd")
    return getattr(torch.ops.softcap_ops, name)(**call)


BOTH, PUBLIC, OP = (public, bare_op), (public,), (bare_op,)


@dataclass(frozen=True)
class Mistake:
    name: str
    base: dict[str, Any]
    changes: dict[str, Any]
    error: type[Exception]
    message: str
    routes: tuple[Callable[..., Any], ...] = BOTH
    reads_data: bool = field(default=False)  # only real tensors show it


# fmt: off
def mistakes() -> list[Mistake]:
    rows: list[Mistake] = []

    def row(
        name: str,
        base: dict[str, Any],
        changes: dict[str, Any],
        error: type[Exception],
        message: str,
        routes: Any = BOTH,
        reads_data: bool = False,
    ) -> None:
        rows.append(Mistake(name, base, changes, error, message, routes, reads_data))

    dense, packed = "(batch, seqlen, heads, head_dim)", "(tokens, heads, head_dim)"

    # Shapes.
    for name in "qkv":
        row(f"{name} of rank 3", DENSE, {name: rand(6, 2, 8)}, ValueError,
            f"{name} must have shape {dense}, got (6, 2, 8)")
        row(f"packed {name} of rank 4", PACKED, {name: rand(1, 9, 2, 8)}, ValueError,
            f"{name} must have shape {packed}, got (1, 9, 2, 8)")
    row("another batch", DENSE, {"k": rand(3, 6, 2, 8), "v": rand(3, 6, 2, 8)}, ValueError,
        "k must have the batch of q, 2, got shape (3, 6, 2, 8)")
    row("v longer than k", DENSE, {"v": rand(2, 7, 2, 8)}, ValueError,
        "v must have the shape of k, (2, 6, 2, 8), got (2, 7, 2, 8)")
    row("packed v longer than k", PACKED, {"v": rand(8, 2, 8)}, ValueError,
        "v must have the shape of k, (9, 2, 8), got (8, 2, 8)")
    row("another head_dim of v", DENSE, {"v": rand(2, 6, 2, 4)}, ValueError,
        "v must have the shape of k, (2, 6, 2, 8), got (2, 6, 2, 4)")
    row("another head_dim of k", DENSE, {"k": rand(2, 6, 2, 4), "v": rand(2, 6, 2, 4)}, ValueError,
        "k must have the head_dim of q, 8 (at least 1), got shape (2, 6, 2, 4)")
    row("head_dim 0", DENSE, {n: rand(2, 6, 2, 0) for n in "qkv"}, ValueError,
        "k must have the head_dim of q, 0 (at least 1), got shape (2, 6, 2, 0)")
    row("heads not a multiple", DENSE, {"k": rand(2, 6, 3, 8), "v": rand(2, 6, 3, 8)}, ValueError,
        "the heads of q must be a positive multiple of those of k, got 4 and 3 from q (2, 6, 4, 8), k (2, 6, 3, 8): "
        f"the layout is {dense}; these look like (batch, heads, seqlen, head_dim): transpose axes 1 and 2")
    row("fewer heads than k", PACKED, {"q": rand(9, 1, 8)}, ValueError,
        "the heads of q must be a positive multiple of those of k, got 1 and 2 from q (9, 1, 8), k (9, 2, 8): "
        f"the layout is {packed}")
    row("no heads", DENSE, {"k": rand(2, 6, 0, 8), "v": rand(2, 6, 0, 8)}, ValueError,
        "the heads of q must be a positive multiple of those of k, got 4 and 0 from q (2, 6, 4, 8), k (2, 6, 0, 8): "
        f"the layout is {dense}; these look like (batch, heads, seqlen, head_dim): transpose axes 1 and 2")
    row("case 29, axes 1 and 2 swapped", DENSE, {"q": rand(2, 4, 6, 8), "k": rand(2, 2, 9, 8), "v": rand(2, 2, 9, 8)},
        ValueError,
        "the heads of q must be a positive multiple of those of k, got 6 and 9 from q (2, 4, 6, 8), k (2, 2, 9, 8): "
        f"the layout is {dense}; these look like (batch, heads, seqlen, head_dim): transpose axes 1 and 2")
    row("heads not a multiple either way", DENSE, {"q": rand(2, 5, 4, 8), "k": rand(2, 6, 3, 8), "v": rand(2, 6, 3, 8)},
        ValueError,
        "the heads of q must be a positive multiple of those of k, got 4 and 3 from q (2, 5, 4, 8), k (2, 6, 3, 8): "
        f"the layout is {dense}")
    row("case 29, sequence on the heads axis", DENSE, {n: rand(1, 3, 71280, 1) for n in "qkv"}, ValueError,
        f"q has 71280 heads (at most 65535) in shape (1, 3, 71280, 1): the layout is {dense}; transpose axes 1 and "
            "2 of a (batch, heads, seqlen, head_dim) tensor")

    # Dtypes and devices.
    for dtype in (torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn):
        row(f"q of {dtype}", DENSE, {"q": torch.zeros(2, 6, 4, 8, dtype=dtype)}, TypeError,
            f"q must be float32, float64, bfloat16 or float16, got {dtype}")
    for name, base in (("k", DENSE), ("v", DENSE), ("k", PACKED), ("v", PACKED)):
        kind = "packed " if base is PACKED else ""
        shape = base[name].shape
        row(f"{kind}{name} of another dtype", base, {name: rand(*shape, dtype=torch.bfloat16)}, TypeError,
            f"{name} must have the dtype of q, torch.float32, got torch.bfloat16")
        row(f"{kind}{name} on another device", base, {name: rand(*shape, device="meta")}, ValueError,
            f"{name} must be on the device of q, cpu, got meta")

    # Values.
    for value in (-50.0, -1, NAN, INF, -INF):
        row(f"case 10, softcap {value}", DENSE, {"softcap": value}, ValueError,
            f"softcap must be finite and positive, or 0.0 or None for off, got {value}")
    row("case 10, packed softcap", PACKED, {"softcap": -50.0}, ValueError,
        "softcap must be finite and positive, or 0.0 or None for off, got -50.0")
    for value in (NAN, INF, -INF):
        row(f"scale {value}", DENSE, {"scale": value}, ValueError,
            f"scale must be finite, or None for head_dim ** -0.5, got {value}")
    row("window[0] below -1", DENSE, {"window": (-2, 0)}, ValueError,
        "window[0] must be -1 (unlimited) or at least 0, got -2")
    row("window[1] below -1", PACKED, {"window": (3, -7)}, ValueError,
        "window[1] must be -1 (unlimited) or at least 0, got -7")
    row("unknown backend", DENSE, {"backend": "fa4"}, ValueError,
        f"backend must be None or one of {list(softcap_ops.available_backends())}, got 'fa4'", BOTH, True)

    # The scalars of compiled graphs.
    for name in ("softcap", "scale"):
        expected = f"{name}_tensor must be a 0-d float64 CPU tensor, got "
        row(f"{name}_tensor of rank 1", DENSE, {f"{name}_tensor": rand(1, dtype=torch.float64)}, ValueError,
            expected + "shape (1,), torch.float64 on cpu", OP)
        row(f"{name}_tensor float32", DENSE, {f"{name}_tensor": rand()}, ValueError,
            expected + "shape (), torch.float32 on cpu", OP)
        row(f"{name}_tensor elsewhere", DENSE, {f"{name}_tensor": rand(dtype=torch.float64, device="meta")}, ValueError,
            expected + "shape (), torch.float64 on meta", OP)
    row("softcap_tensor NaN", DENSE, {"softcap_tensor": torch.tensor(NAN, dtype=torch.float64)}, ValueError,
        "softcap must be finite and positive, or 0.0 or None for off, got nan", OP, True)
    for name in ("softcap", "scale"):
        row(f"{name} of an endless int", DENSE, {name: 10**400}, ValueError,
            f"{name} must fit into 64 bits, got an int of 1329 bits", PUBLIC)
    row("an endless window", DENSE, {"window": (2**63, -1)}, ValueError,
        "window[0] must fit into 64 bits, got an int of 64 bits", PUBLIC)
    row("scale_tensor inf", DENSE, {"scale_tensor": torch.tensor(INF, dtype=torch.float64)}, ValueError,
        "scale must be finite, or None for head_dim ** -0.5, got inf", OP, True)

    # Packed lengths.
    for side in "qk":
        cu, longest = f"cu_seqlens_{side}", f"max_seqlen_{side}"
        row(f"{cu} int64", PACKED, {cu: ints(0, 4, 9, dtype=torch.int64)}, TypeError,
            f"{cu} must be int32, got torch.int64")
        row(f"{cu} of rank 2", PACKED, {cu: ints(0, 4, 9)[None]}, ValueError,
            f"{cu} must have shape (batch + 1,), got (1, 3)")
        row(f"{cu} without entries", PACKED, {cu: ints()}, ValueError, f"{cu} must have shape (batch + 1,), got (0,)")
        row(f"{cu} on another device", PACKED, {cu: ints(0, 4, 9, device="meta")}, ValueError,
            f"{cu} must be on the device of q, cpu, got meta")
        row(f"{cu} strided", PACKED, {cu: ints(0, 1, 4, 1, 9)[::2]}, ValueError,
            f"{cu} must be contiguous, got stride (2,)")
        row(f"{cu} starting late", PACKED, {cu: ints(1, 4, 9)}, ValueError, f"{cu} must start at 0, got 1", BOTH, True)
        row(f"{cu} decreasing", PACKED, {cu: ints(0, 9, 4)}, ValueError,
            f"{cu} must not decrease, got 9 then 4 at entry 2", BOTH, True)
        row(f"{cu} past the tokens", PACKED, {cu: ints(0, 5, 10)}, ValueError,
            f"{cu} must end within the 9 tokens it indexes, got 10", BOTH, True)
        row(f"{longest} too small", PACKED, {longest: 4}, ValueError,
            f"{longest} must be at least the longest sequence, 5, got 4", BOTH, True)
        row(f"{longest} negative", PACKED, {longest: -1}, ValueError, f"{longest} must be at least 0, got -1")
        for value, got in ((torch.tensor(5), "a Tensor: pass {}.item()"), (5.0, "float"), (True, "bool")):
            row(f"case 54, {longest} {type(value).__name__}", PACKED, {longest: value}, TypeError,
                f"{longest} must be an int, got {got.format(longest)}", PUBLIC)
    row("another batch of cu_seqlens", PACKED, {"cu_seqlens_k": ints(0, 9)}, ValueError,
        "cu_seqlens_k must have as many entries as cu_seqlens_q, 3, got 2")

    # What the backward op takes beside the forward's inputs.
    for base, kind, q_shape, lse_shape in (
        (DENSE_BWD, "dense", (2, 6, 4, 8), (2, 4, 6)),
        (PACKED_BWD, "packed", (9, 4, 8), (4, 9)),
    ):
        for name, shape in (("dout", q_shape), ("out", q_shape), ("lse", lse_shape), ("dlse", lse_shape)):
            wrong = (*shape[:-1], 3)
            row(f"{kind} {name} of another shape", base, {name: rand(*wrong)}, ValueError,
                f"{name} must have shape {shape}, got {wrong}", OP)
            row(f"{kind} {name} of another dtype", base, {name: rand(*shape, dtype=torch.float16)}, TypeError,
                f"{name} must be torch.float32, got torch.float16", OP)
            row(f"{kind} {name} on another device", base, {name: rand(*shape, device="meta")}, ValueError,
                f"{name} must be on the device of q, cpu, got meta", OP)
        row(f"{kind} backward, v of another dtype", base, {"v": base["v"].double()}, TypeError,
            "v must have the dtype of q, torch.float32, got torch.float64", OP)
        row(f"{kind} backward, bad softcap", base, {"softcap": -1.0}, ValueError,
            "softcap must be finite and positive, or 0.0 or None for off, got -1.0", OP)

    # Python types, which the public functions check.
    for name in "qkv":
        for value, kind in ((None, "NoneType"), ([1.0], "list"), (DENSE[name].numpy(), "ndarray")):
            row(f"{name} a {kind}", DENSE, {name: value}, TypeError, f"{name} must be a Tensor, got {kind}", PUBLIC)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        row(f"{name} a list", PACKED, {name: [0, 4, 9]}, TypeError, f"{name} must be a Tensor, got list", PUBLIC)
        row(f"{name} None", PACKED, {name: None}, TypeError, f"{name} must be a Tensor, got NoneType", PUBLIC)
    number = "a number or None (0.0 or None turns the cap off)"
    for base, kind in ((DENSE, "dense"), (PACKED, "packed")):
        row(f"{kind}, softcap a string", base, {"softcap": "50"}, TypeError, f"softcap must be {number}, got str",
            PUBLIC)
        row(f"{kind}, softcap a complex number", base, {"softcap": 1j}, TypeError,
            "softcap must be a real number or None, got 1j", OP)
        row(f"{kind}, softcap a bool", base, {"softcap": True}, TypeError, f"softcap must be {number}, got bool",
            PUBLIC)
        row(f"{kind}, case 54, softcap a 0-d tensor", base, {"softcap": torch.tensor(50.0)}, TypeError,
            "softcap must be a Python number or None, got a Tensor: pass softcap.item()", PUBLIC)
        row(f"{kind}, scale a list", base, {"scale": [1.0]}, TypeError,
            "scale must be a number or None (None means head_dim ** -0.5), got list", PUBLIC)
        row(f"{kind}, case 54, scale a 0-d tensor", base, {"scale": torch.tensor(0.1)}, TypeError,
            "scale must be a Python number or None, got a Tensor: pass scale.item()", PUBLIC)
        for value in (4, None, (4,), (1, 2, 3), {4, 0}):
            row(f"{kind}, window {value}", base, {"window": value}, TypeError,
                f"window must be a pair (left, right) of ints, -1 = unlimited, got {value!r}", PUBLIC)
        for value, got in ((1, "int"), (None, "NoneType"), (torch.tensor(True), "Tensor")):
            row(f"{kind}, causal {got}", base, {"causal": value}, TypeError, f"causal must be a bool, got {got}",
                PUBLIC, got == "Tensor")
        row(f"{kind}, deterministic an int", base, {"deterministic": 1}, TypeError,
            "deterministic must be a bool or None, got int", PUBLIC)
        row(f"{kind}, backend an int", base, {"backend": 2}, TypeError, "backend must be a str or None, got int",
            PUBLIC)
        row(f"{kind}, window of floats", base, {"window": (4.0, 0)}, TypeError, "window[0] must be an int, got float",
            PUBLIC)
        row(f"{kind}, window of tensors", base, {"window": (4, torch.tensor(0))}, TypeError,
            "window[1] must be an int, got a Tensor: pass window[1].item()", PUBLIC)
        row(f"{kind}, window of bools", base, {"window": (False, 0)}, TypeError, "window[0] must be an int, got bool",
            PUBLIC)

    # Caches.
    cached, in_blocks = "(batch, cache_len, heads, head_dim)", "(blocks, block_size, heads, head_dim)"
    row("decode, q of rank 3", DECODE, {"q": rand(2, 4, 8)}, ValueError,
        f"q must have shape {dense}, got (2, 4, 8)")
    for base, layout in ((DECODE, cached), (PAGED, in_blocks)):
        kind = "blocks" if base is PAGED else "decode"
        for name in ("k_cache", "v_cache"):
            shape = tuple(base[name].shape)
            row(f"{kind}, {name} of rank 3", base, {name: rand(6, 2, 8)}, ValueError,
                f"{name} must have shape {layout}, got (6, 2, 8)")
            row(f"{kind}, {name} of another dtype", base, {name: rand(*shape, dtype=torch.bfloat16)}, TypeError,
                f"{name} must have the dtype of q, torch.float32, got torch.bfloat16")
            row(f"{kind}, {name} on another device", base, {name: rand(*shape, device="meta")}, ValueError,
                f"{name} must be on the device of q, cpu, got meta")
            row(f"{kind}, {name} None", base, {name: None}, TypeError, f"{name} must be a Tensor, got NoneType", PUBLIC)
        row(f"{kind}, v_cache of another shape", base, {"v_cache": rand(*shape[:3], 4)}, ValueError,
            f"v_cache must have the shape of k_cache, {shape}, got {(*shape[:3], 4)}")
        row(f"{kind}, another head_dim", base, {n: rand(*shape[:3], 4) for n in ("k_cache", "v_cache")}, ValueError,
            f"k_cache must have the head_dim of q, 8 (at least 1), got shape {(*shape[:3], 4)}")
        row(f"{kind}, heads not a multiple", base, {n: rand(*shape[:2], 3, 8) for n in ("k_cache", "v_cache")},
            ValueError, "the heads of q must be a positive multiple of those of k_cache, got 4 and 3 from q "
            f"(2, 1, 4, 8), k_cache {(*shape[:2], 3, 8)}: the layout is {layout}")
        row(f"{kind}, softcap", base, {"softcap": -50.0}, ValueError,
            "softcap must be finite and positive, or 0.0 or None for off, got -50.0")
    row("decode, another batch", DECODE, {"k_cache": rand(3, 6, 2, 8), "v_cache": rand(3, 6, 2, 8)}, ValueError,
        "k_cache must have the batch of q, 2, got shape (3, 6, 2, 8)")
    for name in ("cache_seqlens", "cache_leftpad"):
        row(f"{name} int64", DECODE, {name: ints(1, 1, dtype=torch.int64)}, TypeError,
            f"{name} must be int32, got torch.int64")
        for wrong in (ints(1, 1, 1), ints(1, 1)[None]):
            row(f"{name} of shape {tuple(wrong.shape)}", DECODE, {name: wrong}, ValueError,
                f"{name} must have shape (batch,) with the batch of q, 2, got {tuple(wrong.shape)}")
        row(f"{name} on another device", DECODE, {name: ints(1, 1, device="meta")}, ValueError,
            f"{name} must be on the device of q, cpu, got meta")
        row(f"{name} strided", DECODE, {name: ints(1, 1, 1, 1)[::2]}, ValueError,
            f"{name} must be contiguous, got stride (2,)")
        for base, capacity in ((DECODE, 6), (PAGED, 8)):
            for value in (-1, capacity + 1):
                row(f"{name} {value} of {capacity}", base, {name: ints(2, value)}, ValueError,
                    f"{name} must lie between 0 and the {capacity} keys that the cache holds of a sequence, "
                    f"got {value} for sequence 1", BOTH, True)
    row("cache_seqlens an int", DECODE, {"cache_seqlens": 6}, TypeError,
        "cache_seqlens must be an int32 Tensor of shape (batch,), got the int 6: "
        "torch.full((batch,), n, dtype=torch.int32, device=q.device)", PUBLIC)
    for name in ("cache_seqlens", "cache_leftpad", "block_table"):
        row(f"{name} a list", DECODE, {name: [6, 3]}, TypeError, f"{name} must be a Tensor, got list", PUBLIC)
    row("block_table int64", PAGED, {"block_table": torch.zeros(2, 2, dtype=torch.int64)}, TypeError,
        "block_table must be int32, got torch.int64")
    for wrong in (ints(1, 1), ints(1, 2, 3).view(3, 1)):
        row(f"block_table of shape {tuple(wrong.shape)}", PAGED, {"block_table": wrong}, ValueError,
            f"block_table must have shape (batch, blocks) with the batch of q, 2, got {tuple(wrong.shape)}")
    row("block_table on another device", PAGED, {"block_table": ints(1, 1, 1, 1, device="meta").view(2, 2)},
        ValueError, "block_table must be on the device of q, cpu, got meta")
    for value in (-1, 5):
        row(f"block {value}", PAGED, {"block_table": ints(4, value, 0, 99).view(2, 2)}, ValueError,
            "block_table must name blocks 0 to 4 of the cache wherever a sequence has keys, "
            f"got {value} for sequence 0", BOTH, True)
    row("decode, causal None", DECODE, {"causal": None}, TypeError, "causal must be a bool, got NoneType", PUBLIC)
    row("decode, unknown backend", DECODE, {"backend": "fa4"}, ValueError,
        f"backend must be None or one of {list(softcap_ops.available_backends())}, got 'fa4'", BOTH, True)

    # Jagged tensors.
    nested: dict[str, Any] = {n: jagged(3, 5) for n in "qkv"} | {"softcap": 5.0}
    row("jagged q, plain k", nested, {"k": rand(2, 6, 2, 8)}, TypeError,
        "k must be a jagged nested tensor like the others, got a plain tensor of shape (2, 6, 2, 8)", PUBLIC, True)
    three = jagged(3, 5, 1)
    row("jagged k of another batch", nested, {"k": three}, ValueError,
        f"k must have the batch of q, 2, got shape {tuple(three.shape)}", PUBLIC, True)
    strided = torch.nested.nested_tensor([rand(3, 2, 8), rand(5, 2, 8)])
    row("strided nested v", nested, {"v": strided}, TypeError,
        "v must be a jagged nested tensor like the others, got a nested tensor of layout torch.strided", PUBLIC, True)
    flat = torch.nested.nested_tensor([rand(3, 8), rand(5, 8)], layout=torch.jagged)
    row("jagged q without heads", nested, {"q": flat}, ValueError,
        f"q must have shape (batch, ragged, heads, head_dim), got {tuple(flat.shape)}", PUBLIC, True)
    holes = torch.nested.nested_tensor_from_jagged(rand(9, 2, 8), ints(0, 4, 9), lengths=ints(3, 5))
    row("jagged k with holes", nested, {"k": holes}, ValueError,
        "k must be contiguous, got a jagged tensor with holes (lengths)", PUBLIC, True)
    for base, name in ((PACKED, "q"), (PACKED, "v"), (DECODE, "k_cache")):
        row(f"jagged {name} where the lengths are arguments", base, {name: jagged(3, 5)}, TypeError,
            f"{name} must be a plain tensor, got a nested one: softcap_attention takes jagged tensors as they are",
            PUBLIC, True)
    return rows
# fmt: on


MISTAKES = mistakes()
assert len({m.name for m in MISTAKES}) == len(MISTAKES)


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("a kernel ran before the mistake was found")

    monkeypatch.setattr(cpu, "forward", fail)
    monkeypatch.setattr(cpu, "backward", fail)
    monkeypatch.setattr(cpu, "decode", fail)


def each_mistake(rows: list[Mistake]) -> pytest.MarkDecorator:
    cases = [pytest.param(m, r, id=f"{m.name}-{r.__name__}") for m in rows for r in m.routes]
    return pytest.mark.parametrize(("mistake", "route"), cases)


def check(mistake: Mistake, route: Callable[..., Any], base: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(mistake.error) as caught:
        route(base, changes)
    assert type(caught.value) is mistake.error
    assert str(caught.value) == mistake.message


@each_mistake(MISTAKES)
def test_message(mistake: Mistake, route: Callable[..., Any]) -> None:
    check(mistake, route, mistake.base, mistake.changes)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
@each_mistake(MISTAKES)
def test_message_without_grad(mistake: Mistake, route: Callable[..., Any], mode: Any) -> None:
    with mode():
        check(mistake, route, mistake.base, mistake.changes)


@each_mistake([m for m in MISTAKES if "dout" not in m.base and "k_cache" not in m.base and not m.base["q"].is_nested])
def test_message_with_grad(mistake: Mistake, route: Callable[..., Any]) -> None:
    """The Autograd kernel passes the mistake on as it is."""

    def grad(call: dict[str, Any]) -> dict[str, Any]:
        floating = lambda a: isinstance(a, Tensor) and a.dim() > 1 and (a.is_floating_point() or a.is_complex())  # noqa: E731
        return {n: a.detach().requires_grad_() if floating(a) else a for n, a in call.items()}

    check(mistake, route, grad(mistake.base), grad(mistake.changes))


@each_mistake([m for m in MISTAKES if not m.reads_data])
def test_message_while_tracing(mistake: Mistake, route: Callable[..., Any]) -> None:
    """The fakes refuse the same calls, in the same words."""
    with FakeTensorMode() as mode:

        def fake(call: dict[str, Any]) -> dict[str, Any]:
            return {n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in call.items()}

        check(mistake, route, fake(mistake.base), fake(mistake.changes))


@pytest.mark.parametrize("function", [softcap_attention, softcap_attention_varlen], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["dropout", "dropout_p", "alibi_slopes", "attn_mask", "attn_bias", "is_causal"])
def test_not_offered(function: Callable[..., Any], name: str) -> None:
    """Dropout, ALiBi and biases are refused by name."""
    call = dict(DENSE if function is softcap_attention else PACKED)
    qkv = [call.pop(n) for n in "qkv"]
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        function(*qkv, **call, **{name: 0.1})


@pytest.mark.parametrize("function", [softcap_attention, softcap_attention_varlen], ids=lambda f: f.__name__)
def test_softcap_is_required(function: Callable[..., Any]) -> None:
    """Nobody runs uncapped because an argument was forgotten."""
    call = dict(DENSE if function is softcap_attention else PACKED)
    del call["softcap"]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'softcap'"):
        function(**call)
    op = getattr(torch.ops.softcap_ops, "attention_fwd" if function is softcap_attention else "varlen_attention_fwd")
    with pytest.raises(RuntimeError, match="missing value for argument 'softcap'"):
        op(**call)


def test_right_calls_reach_the_kernel() -> None:
    """The calls that the mistakes start from have no mistake of their own."""
    for base in (DENSE, PACKED, DENSE_BWD, PACKED_BWD, DECODE, PAGED):
        with pytest.raises(AssertionError, match="a kernel ran"):
            bare_op(base, {})


@pytest.mark.parametrize("softcap", [None, 0, 0.0, 5, 50.0, torch.finfo(torch.float64).tiny, 1e300])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), [3, 4], (2**40, -1)])
def test_right_values_reach_the_kernel(softcap: Any, window: Any) -> None:
    """case 10: ints are numbers, None and 0 are off, a list is a pair."""
    with pytest.raises(AssertionError, match="a kernel ran"):
        public(DENSE, {"softcap": softcap, "window": window})


def raises_of(module: ModuleType) -> set[int]:
    """The lines on which a module raises."""
    return {n.lineno for n in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(n, ast.Raise)}


@pytest.mark.parametrize("module", [_validation, _nested], ids=lambda m: m.__name__)
def test_every_message_has_a_mistake(module: ModuleType) -> None:
    reached = set()
    for mistake in MISTAKES:
        try:
            mistake.routes[0](mistake.base, mistake.changes)
        except mistake.error as error:
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code.co_filename == module.__file__:
                    reached.add(trace.tb_lineno)
                trace = trace.tb_next
    lines = inspect.getsource(module).splitlines()
    missed = [f"line {n}: {lines[n - 1].strip()}" for n in sorted(raises_of(module)) if not reached & _span(module, n)]
    assert not missed, "no mistake of the list leads to: " + "; ".join(missed)


def _span(module: ModuleType, lineno: int) -> set[int]:
    """The lines of the raise statement that starts at lineno."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Raise) and node.lineno == lineno:
            return set(range(lineno, (node.end_lineno or lineno) + 1))
    return {lineno}
