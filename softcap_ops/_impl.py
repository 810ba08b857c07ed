"""The CPU and CUDA kernels of the ops, on real tensors: validate, select a backend, run it."""

from __future__ import annotations

import contextlib
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _validation, backends
from ._arguments import Cache, Options, Packing, Parameters, resolve, split, split_decode
from ._schema import lib


class Call(NamedTuple):
    """A call found valid: the backend that serves it, and what that is given."""

    backend: ModuleType
    parameters: Parameters


# Calls seen, by all that decides on them: one of the same shapes and options is valid again, and is served the same.
_calls: dict[tuple[Any, ...], Call] = {}


def _remember(key: tuple[Any, ...], call: Call) -> Call:
    if len(_calls) >= 4096:
        _calls.clear()
    _calls[key] = call
    return call


def forget() -> None:
    """Drop every decision, for when what is installed or opted into has changed."""
    _calls.clear()
    backends.select.cache_clear()
    backends.choose.cache_clear()


def prepare(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options, needs_backward: bool) -> Call:
    """Check the inputs and select a backend: once for each kind of call."""
    if options[-2:] != (None, None):
        return _prepare_now(q, k, v, packing, options, needs_backward)
    kinds = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = (q.shape, k.shape, v.shape, kinds, options, deterministic, needs_backward, packing and _kind(packing))
    call = _calls.get(key)
    if call is None:
        call = _remember(key, _prepare_now(q, k, v, packing, options, needs_backward))
    elif packing is not None and q.device.type == "cpu":
        _validation.packed_values(q, k, packing)
    return call


def _prepare_now(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options, needs_backward: bool
) -> Call:
    _validation.inputs(q, k, v, packing, options)
    if packing is not None and q.device.type == "cpu":
        _validation.packed_values(q, k, packing)
    parameters = resolve(options, q.shape[-1])
    backend = backends.choose(options.backend, *backends.facts(q, k, packing, parameters, needs_backward))
    return Call(backend, parameters)


def _kind(packing: Packing) -> tuple[Any, ...]:
    """All of a packing but what its cu_seqlens hold."""
    q, k, max_seqlen_q, max_seqlen_k = packing
    return (
        (q.shape, q.dtype, q.device, q.stride()), (k.shape, k.dtype, k.device, k.stride()), max_seqlen_q, max_seqlen_k
    )  # fmt: skip


def prepare_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: Cache, options: Options) -> Call:
    """`prepare` of a decode call; what its lengths and block table hold is checked every time, on the CPU."""
    kinds = q.dtype, k_cache.dtype, v_cache.dtype, q.device, k_cache.device, v_cache.device
    facts = tuple(None if t is None else (t.shape, t.dtype, t.device, t.stride()) for t in cache)
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = (q.shape, k_cache.shape, v_cache.shape, kinds, options, deterministic, "decode", facts)
    cacheable = options[-2:] == (None, None)
    call = _calls.get(key) if cacheable else None
    if call is None:
        _validation.decode(q, k_cache, v_cache, cache, options)
        parameters = resolve(options, q.shape[-1])
        call = Call(backends.choose(options.backend, *backends.decode_facts(q, k_cache, cache, parameters)), parameters)
        if cacheable:
            _remember(key, call)
    if q.device.type == "cpu":
        _validation.decode_values(k_cache, cache)
    return call


def _profiled(op: str, packing: Packing | None, backend: ModuleType) -> contextlib.AbstractContextManager[Any]:
    """A range for profilers (torch.profiler, emit_nvtx) that says which backend serves the op."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"softcap_ops::{'varlen_' if packing else ''}{op} [{backend.NAME}]")


_NOTHING = contextlib.nullcontext()


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that is prepared."""
    with _profiled("attention_fwd", packing, call.backend):
        return call.backend.forward(q, k, v, packing, call.parameters)


def backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing | None,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a call that is prepared."""
    with _profiled("attention_bwd", packing, call.backend):
        return call.backend.backward(dout, dlse, q, k, v, out, lse, packing, call.parameters, output_mask)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache: Cache, options: Options, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse); lse has no elements if it is not asked for."""
    backend, parameters = prepare_decode(q, k_cache, v_cache, cache, options)
    with _profiled("decode_attention_fwd", None, backend):
        return backend.decode(q, k_cache, v_cache, cache, parameters, return_lse)


def decode_attention_fwd(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return decode(q, k_cache, v_cache, *split_decode(rest))


def attention_fwd(packed: bool, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    packing, options, tail = split(rest, packed)
    call = prepare(q, k, v, packing, options, bool(tail and tail[0]))
    return forward(call, q, k, v, packing)


def attention_bwd(
    packed: bool,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    packing, options, tail = split(rest, packed)
    call = prepare(q, k, v, packing, options, True)
    _validation.gradients(dout, dlse, q, out, lse)
    output_mask = tuple(tail[0]) if tail else (True, True, True)
    return backward(call, dout, dlse, q, k, v, out, lse, packing, output_mask)


for _key in ("CPU", "CUDA"):
    for _prefix, _packed in (("", False), ("varlen_", True)):
        lib.impl(f"{_prefix}attention_fwd", partial(attention_fwd, _packed), _key)
        lib.impl(f"{_prefix}attention_bwd", partial(attention_bwd, _packed), _key)
    lib.impl("decode_attention_fwd", decode_attention_fwd, _key)
