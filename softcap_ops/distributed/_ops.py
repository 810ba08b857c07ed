"""cp_attention_fwd and cp_attention_bwd: their kernels, fakes, gradients and transforms.

torch.distributed is imported by the kernels, when they run.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .. import _autocast, _autograd, _fake, _onnx, _schema, _validation
from .._arguments import Options, Sharding, split_sharded
from .._late import when_imported
from .._schema import lib

_NO_VMAP = "softcap_ops: vmap over context_parallel_attention is not offered: its ranks would have to agree on it."


# ---- kernels -------------------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from . import schemes

    sharding, options, tail = split_sharded(rest)
    flags = dict(zip(("needs_backward", "return_lse"), tail, strict=False))
    plan = schemes.plan(q, k, v, sharding, options, **flags)
    return plan.forward(q, k, v)


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from . import schemes

    sharding, options, tail = split_sharded(rest)
    _validation.gradients(dout, dlse, q, out, lse)
    plan = schemes.plan(q, k, v, sharding, options, needs_backward=True, is_backward=True)
    # All three always: the other ranks wait for what this one computes of their keys.
    grads = plan.backward(dout, dlse, q, k, v, out, lse)
    mask = tail[0] if tail else (True, True, True)
    dq, dk, dv = (g if wanted else g.new_empty(0) for g, wanted in zip(grads, mask, strict=True))
    return dq, dk, dv


for _key in ("CPU", "CUDA"):
    lib.impl("cp_attention_fwd", _forward, _key)
    lib.impl("cp_attention_bwd", _backward, _key)


# ---- fakes ---------------------------------------------------------------------------------------------------
# They check next to nothing: a mistake of one rank has to reach the others, and only the running op can tell them.


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _onnx.refuse_if_exporting("cp_attention_fwd", split_sharded(rest)[1])
    if q.dim() not in (3, 4):
        raise ValueError(f"q must have 4 dimensions, or 3 where it is packed, got shape {tuple(q.shape)}")
    return _fake.empty_outputs(q)


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, options, tail = split_sharded(rest)
    _onnx.refuse_if_exporting("cp_attention_bwd", options)
    return _fake.empty_gradients(q, k, v, *tail)


lib._register_fake("cp_attention_fwd", _fake_forward)
lib._register_fake("cp_attention_bwd", _fake_backward)


# ---- gradients -----------------------------------------------------------------------------------------------


class _Forward(_autograd._Function):
    """cp_attention_fwd, remembering this rank's q, k, v, the merged out and lse, each once."""

    @staticmethod
    def forward(
        ctx: Any, keyset: Any, q: Tensor, k: Tensor, v: Tensor, sharding: Sharding, options: Options, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        args = (_schema.cp_attention_fwd, keyset, q, k, v, *sharding, *options, True, return_lse)
        out, lse = _autograd._inside_function(_autograd._below_autograd, *args)
        ctx.save_for_backward(q, k, v, out, lse, *sharding[:4], options.softcap_tensor, options.scale_tensor)
        ctx.set_materialize_grads(False)
        if not return_lse:  # the others would not expect a gradient of it
            ctx.mark_non_differentiable(lse)
        ctx.sharding = sharding[4:]
        ctx.sends_dlse = return_lse and sharding.comm.startswith("a2a")
        ctx.options = options._replace(softcap_tensor=None, scale_tensor=None)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *cu_seqlens, softcap_tensor, scale_tensor = ctx.saved_tensors
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        if dlse is None and ctx.sends_dlse:  # another rank's loss may reach its lse
            dlse = torch.zeros_like(lse)
        options = ctx.options._replace(softcap_tensor=softcap_tensor, scale_tensor=scale_tensor)
        mask = list(ctx.needs_input_grad[1:4])
        grads = _schema.cp_attention_bwd(dout, dlse, q, k, v, out, lse, *cu_seqlens, *ctx.sharding, *options, mask)
        dq, dk, dv = (g if wanted else None for g, wanted in zip(grads, mask, strict=True))
        return None, dq, dk, dv, None, None, None


def _autograd_forward(keyset: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    sharding, options, tail = split_sharded(rest)
    options = _autograd._scalars_as_tensors(options)
    _autograd._refuse_forward_mode(q, k, v)
    if _autograd._any_requires_grad(q, k, v):
        return _autograd._apply(_Forward, keyset, q, k, v, sharding, options, tail[1] if len(tail) > 1 else True)
    return _autograd._below_autograd(_schema.cp_attention_fwd, keyset, q, k, v, *sharding, *options, *tail)


def _autograd_backward(keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensors, rest = args[:7], args[7:]
    sharding, options, tail = split_sharded(rest)
    args = (*tensors, *sharding, *_autograd._scalars_as_tensors(options), *tail)
    _autograd._refuse_forward_mode(*tensors)
    op = _schema.cp_attention_bwd
    if _autograd._any_requires_grad(*tensors):
        return _autograd._apply(_autograd._Backward, op, keyset, *args)
    return _autograd._below_autograd(op, keyset, *args)


lib.impl("cp_attention_fwd", _autograd_forward, "Autograd", with_keyset=True)
lib.impl("cp_attention_bwd", _autograd_backward, "Autograd", with_keyset=True)


# ---- transforms ----------------------------------------------------------------------------------------------

for _device, _autocast_key in _autocast._KEYS.items():
    lib.impl(
        "cp_attention_fwd", partial(_autocast.attention_fwd, _schema.cp_attention_fwd, _device), _autocast_key.name
    )


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotImplementedError(_NO_VMAP)


for _op in (_schema.cp_attention_fwd, _schema.cp_attention_bwd):
    torch.library.register_vmap(_op, _refuse_vmap)


# ---- FLOP counts ---------------------------------------------------------------------------------------------


def _count(leading: int, factor: int, *args: Any, out_val: Any = None) -> int:
    """`factor` operations a visible pair, head and element: this rank's queries with all the keys they see.

    a2a works on other pairs, and as many. What a FakeTensor's cu_seqlens hold is unknown: the rows are taken to be
    one sequence.
    """
    from . import groups
    from .cost import rank_pairs
    from .layout import Rows
    from .tiles import Mask

    q, k = args[0:2] if leading == 3 else args[2:4]
    sharding, options, _ = split_sharded(args[leading:])
    members = groups.resolve(sharding.groups)
    rank, ranks = members[-1].rank() * members[0].size() + members[0].rank(), math.prod(g.size() for g in members)
    if len(members) == 1:
        rank = members[0].rank()
    mask = Mask(options.causal, (int(options.window_left), int(options.window_right)))
    sides = []
    for t, cu, padded in (
        (q, sharding.cu_seqlens_q, sharding.cu_seqlens_q_padded),
        (k, sharding.cu_seqlens_k, sharding.cu_seqlens_k_padded),
    ):
        if cu is None or isinstance(cu, FakeTensor):
            rows = (int(t.shape[-3]) * ranks,)
            sides.append(Rows(rows, rows))
        else:
            lengths = tuple(cu.diff().tolist())
            sides.append(Rows(lengths, lengths if padded is None else tuple(padded.diff().tolist())))
    rows_q, rows_k = sides
    pairs = rank_pairs(rows_q, rows_k, mask, sharding.layout, rank, ranks)
    batch = int(q.shape[0]) if q.dim() == 4 else 1
    return factor * batch * pairs * int(q.shape[-2]) * int(q.shape[-1])


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for op, leading, factor in ((_schema.cp_attention_fwd, 3, 4), (_schema.cp_attention_bwd, 7, 10)):
        register_flop_formula(op.overloadpacket, get_raw=True)(partial(_count, leading, factor))


when_imported("torch.utils.flop_counter", _register_flops)
