"""Our own C++ kernel (csrc/cpu): any layout, head_dim and float dtype, O(seqlen) memory, deterministic."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _extension, _fake
from .._arguments import Cache, Packing, Parameters
from .problem import Problem

NAME = "cpu"


def opt_in_error() -> str | None:
    return None


def support_error(problem: Problem) -> str | None:
    if problem.device_type != "cpu":
        return f"CPU tensors only, got {problem.device_type}"
    return None


def install_error() -> str | None:
    return _extension.LOAD_ERROR


def probe_error(problem: Problem) -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, p: Parameters) -> tuple[Tensor, Tensor]:
    out, lse = _fake.empty_outputs(q)
    torch.ops.softcap_ops._cpu_attention_fwd(
        q, k, v, *_cu_seqlens(packing), p.softcap, p.scale, p.causal, *p.window, out, lse
    )
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing | None,
    p: Parameters,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _fake.empty_gradients(q, k, v, output_mask)
    wanted = (g if w else None for g, w in zip(grads, output_mask, strict=True))
    torch.ops.softcap_ops._cpu_attention_bwd(
        dout, dlse, q, k, v, out, lse, *_cu_seqlens(packing), p.softcap, p.scale, p.causal, *p.window, *wanted
    )
    return grads


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: Cache, p: Parameters, return_lse: bool
) -> tuple[Tensor, Tensor]:
    out, lse = _fake.empty_outputs(q, return_lse)
    torch.ops.softcap_ops._cpu_decode_attention_fwd(
        q, k_cache, v_cache, *cache, p.softcap, p.scale, p.causal, *p.window, out, lse if return_lse else None
    )
    return out, lse


def _cu_seqlens(packing: Packing | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
