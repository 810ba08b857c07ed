"""The CPU and CUDA kernels of the ops, on real tensors: validate, select a backend, run it."""

from __future__ import annotations

import contextlib
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import _validation, backends
from ._arguments import Options, Packing, Parameters, resolve, split
from ._schema import lib

# Dense calls found valid, with what they resolve to: one of the same shapes and options is valid again.
_valid: dict[tuple[Any, ...], Parameters] = {}


def _check(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options) -> Parameters:
    if packing is not None or options[-2:] != (None, None):
        return _check_now(q, k, v, packing, options)
    kinds = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    key = (q.shape, k.shape, v.shape, kinds, options, torch.are_deterministic_algorithms_enabled())
    parameters = _valid.get(key)
    if parameters is None:
        if len(_valid) >= 4096:
            _valid.clear()
        parameters = _valid[key] = _check_now(q, k, v, packing, options)
    return parameters


def _check_now(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options) -> Parameters:
    _validation.inputs(q, k, v, packing, options)
    if packing is not None and q.device.type == "cpu":
        _validation.packed_values(q, k, packing)
    return resolve(options, q.shape[-1])


def _profiled(op: str, packing: Packing | None, backend: ModuleType) -> contextlib.AbstractContextManager[Any]:
    """A range for profilers (torch.profiler, emit_nvtx) that says which backend serves the op."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"softcap_ops::{'varlen_' if packing else ''}{op} [{backend.NAME}]")


_NOTHING = contextlib.nullcontext()


def forward(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options, needs_backward: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse), once the inputs are checked."""
    parameters = _check(q, k, v, packing, options)
    backend = backends.choose(options.backend, *backends.facts(q, k, packing, parameters, needs_backward))
    with _profiled("attention_fwd", packing, backend):
        return backend.forward(q, k, v, packing, parameters)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing | None,
    options: Options,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of inputs that `forward` has checked."""
    parameters = resolve(options, q.shape[-1])
    backend = backends.choose(options.backend, *backends.facts(q, k, packing, parameters, True))
    with _profiled("attention_bwd", packing, backend):
        return backend.backward(dout, dlse, q, k, v, out, lse, packing, parameters, output_mask)


def attention_fwd(packed: bool, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    packing, options, tail = split(rest, packed)
    return forward(q, k, v, packing, options, bool(tail and tail[0]))


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
    _check(q, k, v, packing, options)
    _validation.gradients(dout, dlse, q, out, lse)
    output_mask = tuple(tail[0]) if tail else (True, True, True)
    return backward(dout, dlse, q, k, v, out, lse, packing, options, output_mask)


for _key in ("CPU", "CUDA"):
    for _prefix, _packed in (("", False), ("varlen_", True)):
        lib.impl(f"{_prefix}attention_fwd", partial(attention_fwd, _packed), _key)
        lib.impl(f"{_prefix}attention_bwd", partial(attention_bwd, _packed), _key)
