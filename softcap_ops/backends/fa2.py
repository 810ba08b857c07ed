"""FlashAttention-2 (flash-attn >= 2.6), by its low-level functions.

Its parameters changed order and its window changed form between versions, so it is called by keyword, with the
keywords that the installed functions have. flash_attn is imported when the first CUDA call asks for it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._arguments import Cache, Packing, Parameters
from . import _flash
from .problem import Problem, Refusal

NAME = "fa2"
INSTALL = "pip install flash-attn, an hour's build"


# ---- the installed functions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    """One low-level function of flash_attn and the keywords it takes."""

    call: Callable[..., Any]
    parameters: frozenset[str]
    constant: dict[str, Any]  # what never changes: no dropout, no ALiBi

    def __call__(self, *, window: tuple[int, int], **arguments: Any) -> Any:
        if "window_size_left" in self.parameters:
            arguments["window_size_left"], arguments["window_size_right"] = window
        else:  # flash-attn 2.6
            arguments["window_size"] = window
        return self.call(**arguments, **self.constant)


_CONSTANTS = {"dropout_p": 0.0, "alibi_slopes": None, "return_softmax": False, "rng_state": None, "zero_tensors": True}
_DECODE = "flash_attn_with_kvcache"
_BLOCK_STEP = 256  # a block of its paged caches holds a multiple of so many keys
_NAMES = ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward")


@functools.cache
def _load() -> dict[str, _Function] | Refusal:
    """The four functions by name and, where it is there, that for caches; or why there are none. Never raises."""
    try:
        from flash_attn import flash_attn_interface
    except Exception as error:  # not installed, or one of its libraries does not load (undefined symbol)
        return Refusal(f"flash_attn cannot be imported: {type(error).__name__}: {error}", error)
    functions = {}
    for name in _NAMES:
        found = getattr(flash_attn_interface, name, None) or getattr(flash_attn_interface, f"_wrapped{name}", None)
        if found is None:
            return Refusal(f"flash_attn {_version()} has no {name}: flash-attn >= 2.6 is needed")
        # Since 2.7 these are custom ops; inside our own op, their function is all that is needed of them.
        call = getattr(found, "_init_fn", found)
        parameters = _parameters_of(call)
        if "softcap" not in parameters:
            return Refusal(f"flash_attn {_version()} has no softcap in {name}: flash-attn >= 2.6 is needed")
        constant = {n: value for n, value in _CONSTANTS.items() if n in parameters}
        functions[name] = _Function(call, parameters, constant)
    decode = getattr(flash_attn_interface, _DECODE, None)
    if decode is not None and "softcap" in (parameters := _parameters_of(decode)):
        functions[_DECODE] = _Function(decode, parameters, {"return_softmax_lse": True})
    return functions


def _parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    if isinstance(function, torch._ops.OpOverloadPacket):
        return frozenset(argument.name for argument in function.default._schema.arguments)
    return frozenset(inspect.signature(function).parameters)


def _version() -> str:
    import flash_attn

    return getattr(flash_attn, "__version__", "of unknown version")


def _function(name: str) -> _Function:
    functions = _load()
    assert not isinstance(functions, Refusal)  # selection asked
    return functions[name]


# ---- what it can do --------------------------------------------------------------------------------------------


def opt_in_error() -> str | None:
    return None


def support_error(problem: Problem) -> str | None:
    reason = _flash.support_error(problem)
    if reason is None and problem.capability is not None and problem.capability < (8, 0):
        major, minor = problem.capability
        return f"needs compute capability 8.0 (Ampere) or newer, this GPU has {major}.{minor}"
    return reason or _cache_error(problem)


def _cache_error(problem: Problem) -> str | None:
    if problem.block_size % _BLOCK_STEP != 0:
        return f"caches in blocks of a multiple of {_BLOCK_STEP} keys, got {problem.block_size}"
    if problem.block_size and problem.leftpad:
        return "no cache_leftpad in a cache in blocks"
    if problem.cached and problem.more_queries and problem.window != (-1, -1) and not problem.causal:
        return "more queries than the cache has keys, under a window that is not causal"
    return None


def install_error() -> str | None:
    functions = _load()
    return functions if isinstance(functions, Refusal) else None


def probe_error(problem: Problem) -> str | None:
    if problem.cached:
        functions = _load()
        decode = None if isinstance(functions, Refusal) else functions.get(_DECODE)
        if decode is None or (problem.leftpad and "cache_leftpad" not in decode.parameters):
            return f"flash_attn {_version()} has no {_DECODE} with softcap{' and cache_leftpad' * problem.leftpad}"
    error = _prober.error(problem)
    if error is None:
        return None
    kind = f"{problem.dtype}, head_dim {problem.head_dim}{', with backward' if problem.needs_backward else ''}"
    return Refusal(f"flash_attn {_version()} fails at {kind} on compute capability {problem.capability}: {error}",
                   error.cause)  # fmt: skip


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
    given = {name: t for name, t in cache._asdict().items() if t is not None}
    out, lse = _function(_DECODE)(
        window=p.window, q=q, k_cache=k, v_cache=v, **given,
        softmax_scale=p.scale, causal=p.causal, softcap=p.softcap,
    )  # fmt: skip
    return out, lse


def _launch(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, p: Parameters) -> tuple[Tensor, Tensor]:
    arguments = {"q": q, "k": k, "v": v, "softmax_scale": p.scale, "causal": p.causal, "softcap": p.softcap}
    if packing is None:
        if not _window_is_kept(q.shape[1], k.shape[1], p):
            out, lse = _launch(_pack(q), _pack(k), _pack(v), _packing_of(q, k), p)
            return out.view(q.shape), _unpack_lse(lse, q.shape[0])
        out, lse = _out_and_lse(_function("_flash_attn_forward")(window=p.window, **arguments))
        return out, lse
    function = _function("_flash_attn_varlen_forward")
    out, lse = _out_and_lse(function(window=p.window, **arguments, **_lengths(packing, p)))
    if "zero_tensors" not in function.constant:
        out = out.masked_fill(_flash.past_the_end(q, packing.cu_seqlens_q)[:, None, None], 0.0)
        lse = lse.masked_fill(_flash.past_the_end(q, packing.cu_seqlens_q), -math.inf)
    # A row that sees nothing has lse +inf here, and -inf everywhere else in the world.
    return out, lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)


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
    if packing is None and not _window_is_kept(q.shape[1], k.shape[1], p):
        return _launch_backward(
            _pack(dout), _pack(q), _pack(k), _pack(v), _pack(out), lse.transpose(0, 1).flatten(1),
            _packing_of(q, k), p, _pack(dq), _pack(dk), _pack(dv),
        )  # fmt: skip
    name = "_flash_attn_backward" if packing is None else "_flash_attn_varlen_backward"
    function = _function(name)
    function(
        window=p.window, dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv,
        softmax_scale=p.scale, causal=p.causal, softcap=p.softcap, deterministic=p.deterministic,
        **({} if packing is None else _lengths(packing, p)),
    )  # fmt: skip
    if packing is not None and "zero_tensors" not in function.constant:
        for grad, cu_seqlens in ((dq, packing.cu_seqlens_q), (dk, packing.cu_seqlens_k), (dv, packing.cu_seqlens_k)):
            grad.masked_fill_(_flash.past_the_end(grad, cu_seqlens)[:, None, None], 0.0)
    return None


def _out_and_lse(results: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(out, lse, ...) since 2.7; 2.6 puts q, k, v and out again between the two."""
    return results[0], results[5] if len(results) == 8 else results[1]


def _lengths(packing: Packing, p: Parameters) -> dict[str, Any]:
    """cu_seqlens and max_seqlens. The latter only bound the lengths, and larger bounds avoid two faults:

    - at max_seqlen_q = 1 with GQA the kernel takes row b of q for sequence b, whatever cu_seqlens_q say;
    - it widens a right side of -1, or of max_seqlen_k and more, to max_seqlen_k (see `_window_is_kept`).
    """
    max_seqlen_q, max_seqlen_k = max(packing.max_seqlen_q, 2), packing.max_seqlen_k
    if not _window_is_kept(max_seqlen_q, max_seqlen_k, p):
        max_seqlen_k = max_seqlen_q
    return {
        "cu_seqlens_q": packing.cu_seqlens_q,
        "cu_seqlens_k": packing.cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }


def _window_is_kept(seqlen_q: int, seqlen_k: int, p: Parameters) -> bool:
    """Whether FlashAttention-2 applies p.window as given.

    It replaces a right side of -1 beside a left one, and every right side >= seqlen_k, by seqlen_k. The first of
    seqlen_q > seqlen_k + 1 queries stand so far left of the keys that this hides some they should see; and
    without a left side the window is dropped altogether.
    """
    left, right = p.window
    if p.causal or (left < 0 and right < 0) or seqlen_q <= seqlen_k + 1:
        return True
    return 0 <= right < seqlen_k


def _pack(t: Tensor) -> Tensor:
    return t.flatten(0, 1)


def _packing_of(q: Tensor, k: Tensor) -> Packing:
    cu_q, cu_k = (
        torch.arange(0, (q.shape[0] + 1) * n, n, dtype=torch.int32, device=q.device) for n in (q.shape[1], k.shape[1])
    )
    return Packing(cu_q, cu_k, q.shape[1], k.shape[1])


def _unpack_lse(lse: Tensor, batch: int) -> Tensor:
    """(Hq, B * Sq) to (B, Hq, Sq)."""
    return lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


_prober = _flash.Prober(_launch, _launch_backward, _launch_decode)
