"""FlashAttention-3 on Hopper, by its raw operators: opt-in, by SOFTCAP_OPS_FA3=1 or backend="fa3".

Two builds are known: FlashAttention's own `hopper/` (namespace flash_attn_3) and PyPI's forward-only fa3-fwd
(namespace fa3_fwd). FA3's Python wrapper is not used: the gradient it registers drops cu_seqlens and deterministic.
Builds leave features out under an unchanged schema: their flags are read, and a real call is made all the same.
"""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._arguments import Cache, Packing, Parameters
from . import _flash
from .problem import Problem, Refusal

NAME = "fa3"
INSTALL = "FlashAttention's hopper/ from source, then SOFTCAP_OPS_FA3=1"
_VARIABLE = "SOFTCAP_OPS_FA3"

# Module that registers the operators, and module with CONFIG["build_flags"].
_BUILDS = {"flash_attn_3": "flash_attn_config", "fa3_fwd": "fa3_fwd_config"}
_FORWARD_KEYWORDS = frozenset(
    ("out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal",
     "window_size_left", "window_size_right", "softcap", "num_splits")
)  # fmt: skip
_CACHE_KEYWORDS = frozenset(("seqused_k", "leftpad_k", "page_table"))
_BACKWARD_KEYWORDS = frozenset(
    ("dq", "dk", "dv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal",
     "window_size_left", "window_size_right", "softcap", "deterministic")
)  # fmt: skip


# ---- the installed build ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Build:
    namespace: str
    flags: dict[str, bool]  # FLASHATTENTION_DISABLE_...; empty where the build does not say
    forward: Any
    backward: Any  # None: not there

    def lacks(self, feature: str) -> bool:
        return self.flags.get(f"FLASHATTENTION_DISABLE_{feature}", False)


@functools.cache
def _load() -> _Build | Refusal:
    """The first installed build that has softcap, or why there is none. Never raises."""
    refusals = []
    for namespace in _BUILDS:
        build = _load_build(namespace)
        if isinstance(build, _Build):
            return build
        refusals.append(build)
    found = [r for r in refusals if not isinstance(r.cause, ModuleNotFoundError)]
    if not found:
        return Refusal(f"not installed (neither {' nor '.join(_BUILDS)} can be imported)", refusals[0].cause)
    return Refusal("; ".join(found), next((r.cause for r in found if r.cause), None))


def _load_build(namespace: str) -> _Build | Refusal:
    try:
        importlib.import_module(f"{namespace}._C")
    except Exception as error:
        return Refusal(f"{namespace} cannot be imported: {type(error).__name__}: {error}", error)
    try:
        flags = dict(importlib.import_module(_BUILDS[namespace]).CONFIG["build_flags"])
    except Exception:  # built without its Python files: only trying tells
        flags = {}
    lacking = [f for f in ("SOFTCAP", "BACKWARD") if flags.get(f"FLASHATTENTION_DISABLE_{f}")]
    if "SOFTCAP" in lacking:
        names = " and ".join(f"FLASHATTENTION_DISABLE_{f}" for f in lacking)
        return Refusal(f"this build of {namespace} has no {' and no '.join(map(str.lower, lacking))} ({names})")
    ops = getattr(torch.ops, namespace)
    forward, backward = getattr(ops, "fwd", None), getattr(ops, "bwd", None)
    if forward is None or not _keywords(forward) >= _FORWARD_KEYWORDS:
        return Refusal(f"{namespace}::fwd is missing or lacks arguments that FlashAttention-3 has")
    if backward is not None and not _keywords(backward) >= _BACKWARD_KEYWORDS:
        backward = None
    return _Build(namespace, flags, forward.default, backward and backward.default)


def _keywords(op: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in getattr(op, "default", op)._schema.arguments)


def _build() -> _Build:
    build = _load()
    assert isinstance(build, _Build)  # selection asked
    return build


# ---- what it can do --------------------------------------------------------------------------------------------


def opt_in_error() -> str | None:
    if os.environ.get(_VARIABLE) == "1":
        return None
    return f'opt-in: set {_VARIABLE}=1 or ask for backend="fa3"'


def support_error(problem: Problem) -> str | None:
    reason = _flash.support_error(problem)
    if reason is None and problem.capability is not None and problem.capability[0] != 9:
        major, minor = problem.capability
        return f"needs a Hopper GPU (compute capability 9.0), this one has {major}.{minor}"
    if reason is None and problem.deterministic and problem.needs_backward and problem.head_dim > 192:
        return f"its backward is not deterministic at head_dim above 192, got {problem.head_dim}"
    return reason


def install_error() -> str | None:
    build = _load()
    return build if isinstance(build, Refusal) else None


def probe_error(problem: Problem) -> str | None:
    build = _build()
    for needed, feature, what in (
        (problem.needs_backward, "BACKWARD", "backward"),
        (problem.dtype == torch.float16, "FP16", "float16"),
        (problem.packed, "VARLEN", "packed sequences"),
        (problem.window != (-1, -1), "LOCAL", "window"),
        (problem.cached, "VARLEN", "lengths of its own for each sequence"),
        (problem.cached, "SPLIT", "split of the keys"),
        (problem.block_size > 0, "PAGEDKV", "caches in blocks"),
    ):
        if needed and build.lacks(feature):
            return f"this build of {build.namespace} has no {what} (FLASHATTENTION_DISABLE_{feature})"
    if problem.cached and not _keywords(build.forward) >= _CACHE_KEYWORDS:
        return f"{build.namespace}::fwd lacks the arguments of a cache"
    if problem.needs_backward and build.backward is None:
        return f"this build of {build.namespace} has no backward operator"
    error = _prober.error(problem)
    return None if error is None else Refusal(f"this build of {build.namespace} fails: {error}", error.cause)


# ---- forward and backward --------------------------------------------------------------------------------------


def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, p: Parameters) -> tuple[Tensor, Tensor]:
    return _flash.forward(_launch, q, k, v, packing, p)


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
    return _flash.backward(_launch_backward, dout, dlse, q, k, v, out, lse, packing, p, output_mask)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: Cache, p: Parameters, return_lse: bool
) -> tuple[Tensor, Tensor]:
    return _flash.decode(_launch_decode, q, k_cache, v_cache, cache, p, return_lse)


def _launch_decode(q: Tensor, k: Tensor, v: Tensor, cache: Cache, p: Parameters) -> tuple[Tensor, Tensor]:
    left, right = p.window
    out, lse, *_ = _build().forward(
        q, k, v, seqused_k=cache.cache_seqlens, leftpad_k=cache.cache_leftpad, page_table=cache.block_table,
        softmax_scale=p.scale, is_causal=p.causal, window_size_left=left, window_size_right=right, softcap=p.softcap,
        num_splits=0,  # as many as fill the GPU: without splits a step of decoding leaves most of it idle
    )  # fmt: skip
    return out, lse


def _launch(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, p: Parameters) -> tuple[Tensor, Tensor]:
    left, right = p.window
    options = {
        "softmax_scale": p.scale,
        "is_causal": p.causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": p.softcap,
        "num_splits": 1,  # the automatic choice depends on the GPU's load and changes the order of the sums
    }
    if packing is None:
        out, lse, *_ = _build().forward(q, k, v, **options)
        return out, lse
    # Rows past cu_seqlens[-1] are not written.
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    _, lse, *_ = _build().forward(q, k, v, out=out, **packing._asdict(), **options)
    return out, lse.masked_fill_(_flash.past_the_end(q, packing.cu_seqlens_q), -torch.inf)


def _launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing | None,
    p: Parameters,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    left, right = p.window
    _build().backward(
        dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **({} if packing is None else packing._asdict()),
        softmax_scale=p.scale, is_causal=p.causal, window_size_left=left, window_size_right=right,
        softcap=p.softcap, deterministic=p.deterministic,
    )  # fmt: skip


_prober = _flash.Prober(_launch, _launch_backward, _launch_decode)
