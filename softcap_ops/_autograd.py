"""Gradients: the Autograd kernels of the ops, the same in eager, compiled and torch.func.

The backward op computes dq, dk, dv from the saved q, k, v, out and lse; with S' the capped score,
P = exp(S' - lse), t = tanh(scale * q kT / cap):

    dS = P * (dout vT - rowsum(dout * out) + dlse) * (1 - t^2) * scale
    dq = dS k,  dk = dST q,  dv = PT dout

(FlashAttention-2, Dao 2023, with the cap's factor 1 - t^2 and the gradient of lse added.)
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch
from torch import _C, Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from . import _impl, _onnx, _schema, _sharding
from ._arguments import Options, Packing, join_decode, split, split_decode
from ._schema import lib
from .errors import UnsupportedError

_NO_DOUBLE_BACKWARD = (
    "softcap_ops: soft-capped attention is not twice differentiable (create_graph=True, then a gradient of the "
    "gradient). Use softcap_ops.reference.attention, which autograd differentiates any number of times."
)
_NO_FORWARD_MODE = (
    "softcap_ops: soft-capped attention has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors). "
    "Use reverse mode (grad, vjp, jacrev), or softcap_ops.reference.attention."
)

_NO_DECODE_GRADIENT = (
    "softcap_ops: softcap_attention_decode has no gradient, and {name} requires one. Decode under torch.no_grad() or "
    "torch.inference_mode(); train with softcap_attention."
)


_NO_SCALAR_GRADIENT = (
    "softcap_ops: {name} requires a gradient, and the cap and the scale get none: detach it, or learn them with "
    "softcap_ops.reference.attention."
)

# The keys of a call, below autograd, that nothing but our own kernel looks at: modes, tensor subclasses and torch.func
# add theirs. The kernel is then called directly; another trip through the dispatcher costs more than all checks.
_KERNEL_ONLY = {_C.DispatchKeySet(key).raw_repr() for key in (_C.DispatchKey.CPU, _C.DispatchKey.CUDA)}
# All keys of a tensor that is just a tensor.
_PLAIN = {
    _C._dispatch_keys(torch.empty(0)).raw_repr(),
    functools.reduce(
        _C.DispatchKeySet.add,
        (_C.DispatchKey.ADInplaceOrView, _C.DispatchKey.AutogradCUDA, _C.DispatchKey.AutocastCUDA),
        _C.DispatchKeySet(_C.DispatchKey.CUDA),
    ).raw_repr(),
}


def _forward_below_autograd(
    keyset: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options, needs_backward: bool
) -> tuple[tuple[Tensor, Tensor], _impl.Call | None]:
    """(out, lse), and the call where it went straight to the kernel."""
    keyset = keyset & _C._after_autograd_keyset
    with _C._AutoDispatchBelowAutograd():
        if keyset.raw_repr() in _KERNEL_ONLY:
            call = _impl.prepare(q, k, v, packing, options, needs_backward)
            return _impl.forward(call, q, k, v, packing), call
        op = _schema.attention_fwd if packing is None else _schema.varlen_attention_fwd
        return op.redispatch(keyset, q, k, v, *(packing or ()), *options, needs_backward), None


def _is_kernel_only(*gradients: Tensor | None) -> bool:
    """Whether the backward of a call that went straight to the kernel can do so too, with these gradients."""
    # Compiled autograd traces this function: what it compiles has to be the op.
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.autograd._profiler_enabled():
        return False
    if _C._len_torch_dispatch_stack() or _C._are_functorch_transforms_active():
        return False
    return all(g is None or _C._dispatch_keys(g).raw_repr() in _PLAIN for g in gradients)


def _is_as_deterministic(call: _impl.Call, options: Options) -> bool:
    """Whether torch.use_deterministic_algorithms says what it said at the forward, where it is what counts."""
    now = torch.are_deterministic_algorithms_enabled()
    return options.deterministic is not None or call.parameters.deterministic == now


def _below_autograd(op: Any, keyset: Any, *args: Any) -> Any:
    with _C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & _C._after_autograd_keyset, *args)


def _inside_function(call: Any, *args: Any) -> Any:
    """Call what lies below autograd from a Function's forward, which runs with grad modes off.

    Under nested torch.func transforms the call goes on to the next level, and that one must differentiate it too.
    """
    if not _C._are_functorch_transforms_active():
        return call(*args)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return call(*args)


class _Function(_SingleLevelFunction):
    """Adds what compiled autograd asks of every Function, and only torch.autograd.Function has."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        return (ctx._autograd_function_id,)


class _Forward(_Function):
    """attention_fwd or varlen_attention_fwd, remembering what its backward needs.

    A single-level Function: the dispatcher has already picked the torch.func level (if any) when it calls an
    Autograd kernel, and torch.autograd.Function would pick it a second time and fail.
    """

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        (out, lse), call = _inside_function(_forward_below_autograd, keyset, q, k, v, packing, options, True)
        if _C._autograd._top_saved_tensors_default_hooks(False) is not None:
            call = None  # what a hook gives back may be anything: the op has to look at it
        # Tensors are saved, the rest is kept: most calls have none but the first five.
        if packing is None and options[-2:] == (None, None):
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.call = call, None, options
        else:
            cu_seqlens, lengths = ((None, None), None) if packing is None else (packing[:2], packing[2:])
            ctx.save_for_backward(q, k, v, out, lse, *cu_seqlens, *options[-2:])
            ctx.call = call, lengths, options[:-2]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *others = ctx.saved_tensors
        call, lengths, options = ctx.call
        packing = None
        if others:
            options = Options(*options, *others[2:])
            packing = None if lengths is None else Packing(*others[:2], *lengths)
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        mask = ctx.needs_input_grad[1:4]
        if call is not None and _is_kernel_only(dout, dlse) and _is_as_deterministic(call, options):
            grads = _impl.backward(call, dout, dlse, q, k, v, out, lse, packing, mask)
        else:
            op = _schema.attention_bwd if packing is None else _schema.varlen_attention_bwd
            grads = op(dout, dlse, q, k, v, out, lse, *(packing or ()), *options, mask)
        if all(mask):
            return None, *grads, None, None
        return None, *(g if wanted else None for g, wanted in zip(grads, mask, strict=True)), None, None


class _Backward(_Function):
    """attention_bwd or varlen_attention_bwd: differentiable in name only, so that asking is refused, not wrong."""

    @staticmethod
    def forward(ctx: Any, op: Any, keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _inside_function(_below_autograd, op, keyset, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_NO_DOUBLE_BACKWARD)


def _apply(function: Any, *args: Any) -> Any:
    if not _C._are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


def _as_tensor(value: Any) -> Tensor:
    # A product with a tensor is the form that torch's tensorify pass turns into tensor arithmetic.
    return torch.ones((), dtype=torch.float64) * value


def _scalars_as_tensors(o: Options) -> Options:
    """Give symbolic floats to the graph as tensors: one graph then serves every cap and scale (see _schema.py).

    A gradient of such a tensor would be lost without a word, so that asking for one is refused.
    """
    for name, value in (("softcap_tensor", o.softcap_tensor), ("scale_tensor", o.scale_tensor)):
        if value is not None:
            _refuse_forward_mode(value)
            if _any_requires_grad(value):
                raise UnsupportedError(_NO_SCALAR_GRADIENT.format(name=name))
    if isinstance(o.softcap, torch.SymFloat):
        o = o._replace(softcap=None, softcap_tensor=_as_tensor(o.softcap))
    if isinstance(o.scale, torch.SymFloat):
        o = o._replace(scale=None, scale_tensor=_as_tensor(o.scale))
    return o


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    if forward_ad._current_level < 0:
        return
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(_NO_FORWARD_MODE)


def attention_fwd(packed: bool, keyset: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _sharding.register()
    packing, options, tail = split(rest, packed)
    if packing is None and (plain := _onnx.as_plain(q, k, v, options)) is not None:
        return plain
    options = _scalars_as_tensors(options)
    _refuse_forward_mode(q, k, v)
    if _any_requires_grad(q, k, v):
        return _apply(_Forward, keyset, q, k, v, packing, options)
    return _forward_below_autograd(keyset, q, k, v, packing, options, bool(tail and tail[0]))[0]


def attention_bwd(packed: bool, keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensors, rest = args[:7], args[7:]
    packing, options, tail = split(rest, packed)
    args = (*tensors, *(packing or ()), *_scalars_as_tensors(options), *tail)
    _refuse_forward_mode(*tensors)
    op = _schema.varlen_attention_bwd if packed else _schema.attention_bwd
    if _any_requires_grad(*tensors):
        return _apply(_Backward, op, keyset, *args)
    return _below_autograd(op, keyset, *args)


def decode_attention_fwd(keyset: Any, q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _sharding.register()
    _refuse_forward_mode(q, k_cache, v_cache)
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if _any_requires_grad(t):
            raise UnsupportedError(_NO_DECODE_GRADIENT.format(name=name))
    cache, options, return_lse = split_decode(rest)
    options = _scalars_as_tensors(options)
    keyset = keyset & _C._after_autograd_keyset
    with _C._AutoDispatchBelowAutograd():
        if keyset.raw_repr() in _KERNEL_ONLY:
            return _impl.decode(q, k_cache, v_cache, cache, options, return_lse)
        op = _schema.decode_attention_fwd
        return op.redispatch(keyset, q, k_cache, v_cache, *join_decode(cache, options, return_lse))


lib.impl("decode_attention_fwd", decode_attention_fwd, "Autograd", with_keyset=True)
for _prefix, _packed in (("", False), ("varlen_", True)):
    lib.impl(f"{_prefix}attention_fwd", partial(attention_fwd, _packed), "Autograd", with_keyset=True)
    lib.impl(f"{_prefix}attention_bwd", partial(attention_bwd, _packed), "Autograd", with_keyset=True)
