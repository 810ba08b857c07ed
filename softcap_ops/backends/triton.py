"""Our own Triton kernels (softcap_ops/kernels): any GPU that Triton serves, with nothing more to install than torch."""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
from torch import Tensor

from .. import _fake
from .._arguments import LARGEST_WINDOW, Packing, Parameters
from ..kernels.configs import Config, Configs, configs_of
from . import _flash
from .problem import Problem, Refusal

NAME = "triton"

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
_LOG2E = math.log2(math.e)


# ---- what it can do --------------------------------------------------------------------------------------------


def opt_in_error() -> str | None:
    return None


def support_error(problem: Problem) -> str | None:
    if problem.device_type != "cuda":
        return f"CUDA tensors only, got {problem.device_type}"
    if problem.dtype not in DTYPES:
        return f"computes in bfloat16, float16 and float32 only, got {_flash._name(problem.dtype)}"
    if problem.head_dim > MAX_HEAD_DIM:
        return f"head_dim up to {MAX_HEAD_DIM}, got {problem.head_dim}"
    if problem.capability is not None and problem.capability < (8, 0) and torch.version.hip is None:
        major, minor = problem.capability
        return f"needs compute capability 8.0 (Ampere) or newer, this GPU has {major}.{minor}"
    if problem.softcap and not 1e-30 <= problem.softcap <= 1e30:
        return f"scale / softcap leaves float32's range at softcap {problem.softcap}"
    return None


@functools.cache
def _load() -> Refusal | None:
    try:
        importlib.import_module("triton")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            return Refusal("triton is not installed: pip install triton (torch's CUDA and ROCm wheels bring it)", error)
        return Refusal(f"triton cannot be imported: {type(error).__name__}: {error}", error)
    return None


def install_error() -> str | None:
    return _load()


def probe_error(problem: Problem) -> str | None:
    return _prober.error(problem)


# ---- plans -----------------------------------------------------------------------------------------------------


class _Plan:
    """The launches of one kind of call: everything that does not depend on shapes and values."""

    def __init__(
        self, capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, packed: bool, capped: bool,
        running_max: bool, fast_tanh: bool, configs: Configs | None = None,
    ) -> None:  # fmt: skip
        from ..kernels import attend, differentiate
        from ..kernels.launch import Launch

        block_d = max(16, 1 << (head_dim - 1).bit_length())
        chosen = configs or configs_of(capability, dtype, block_d)
        self.step = 8 if head_dim % 8 == 0 else 1
        nvidia = (0, 0) if capability is None or torch.version.hip is not None else capability
        precision = "tf32x3" if dtype == torch.float32 and nvidia >= (8, 0) else "ieee"
        tma = nvidia >= (9, 0) and self.step == 8  # whole tiles are copied, where rows are aligned
        shape = head_dim, block_d, self.step

        def launch(kernel: Any, config: Config, *flags: bool) -> Launch:
            blocks = config.block_m, config.block_n, config.exp2
            return Launch(kernel, (*shape, packed, capped, fast_tanh, *flags, precision, tma, *blocks), config)

        def launch_pass(gradients: str, config: Config) -> Launch:
            if gradients == "q":
                return launch(differentiate.differentiate_queries, config)
            return launch(differentiate.differentiate_keys, config, *(name in gradients for name in "kv"))

        self.forward = launch(attend.attend, chosen.forward, running_max)
        self.backward = [(gradients, launch_pass(gradients, config)) for gradients, config in chosen.backward]
        rows = Config(16, 0, 4, 1)
        self.prepare = {
            has_dlse: Launch(differentiate.prepare, (*shape, has_dlse, rows.block_m), rows)
            for has_dlse in (False, True)
        }


@functools.lru_cache(maxsize=1024)
def _plan_and_numbers(
    device: torch.device, dtype: torch.dtype, head_dim: int, packed: bool, p: Parameters
) -> tuple[_Plan, int, int, float, float, float]:
    """The plan, and left, right, tanh_scale, score_scale and shift as the kernels take them."""
    left, right = (LARGEST_WINDOW if side < 0 else side for side in p.window)
    if p.causal:
        right = 0
    running_max, shift = _running_max_and_shift(p.softcap, dtype)
    score_scale = (p.softcap or p.scale) * _LOG2E
    plan = _plan(device, dtype, head_dim, packed, bool(p.softcap), running_max, p.softcap <= 1e3)
    return plan, left, right, p.scale / p.softcap if p.softcap else 0.0, score_scale, shift


@functools.cache
def _plan(
    device: torch.device, dtype: torch.dtype, head_dim: int, packed: bool, capped: bool, running_max: bool,
    moderate: bool,
) -> _Plan:  # fmt: skip
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    # The tanh instruction is 1e-5 off, which float32 and the scores under a huge cap would show.
    fast_tanh = moderate and dtype != torch.float32 and capability is not None and torch.version.hip is None
    return _Plan(capability, dtype, head_dim, packed, capped, running_max, fast_tanh)


def _running_max_and_shift(softcap: float, dtype: torch.dtype) -> tuple[bool, float]:
    """Whether exp2 needs the row's maximum, and else the constant to take from each score, in log2 units.

    Scores lie in [-c, c]. Sums of 2^(score - shift) times values must stay under 2^127, leaving 2^35 for the sum and
    the values, and the least 2^(-c - shift) must be a normal number (or half of one): of float16, where P is.
    """
    c = softcap * _LOG2E
    if dtype == torch.float16:
        return not 0.0 < c <= 14.5, 0.0
    shift = max(0.0, c - 92.0)
    return not 0.0 < c + shift <= 125.0, shift


# ---- tensors ---------------------------------------------------------------------------------------------------


def _readable(t: Tensor) -> Tensor:
    """t, or a copy: head_dim contiguous and rows aligned to 16 bytes where head_dim allows that."""
    *others, row, head, last = t.stride()
    step = 8 if t.shape[-1] % 8 == 0 else 1
    misaligned = (row | head | (others[0] if others else 0)) % step
    if last == 1 and not misaligned and row < 1 << 23 and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _strides(t: Tensor, step: int) -> tuple[int, int, int]:
    """Batch, row and head strides in units of step; a packed tensor is one batch entry."""
    *batch, row, head, _ = t.stride()
    return (batch[0] if batch else 0) // step, row // step, head // step


def _nothing_to_do(q: Tensor, k: Tensor, packing: Packing | None) -> bool:
    if packing is not None and (packing.cu_seqlens_q.shape[0] == 1 or 0 in packing[2:]):
        return True
    return 0 in q.shape or 0 in k.shape


def _grid_of(t: Tensor, cu_seqlens: Tensor | None, max_seqlen: int, block: int) -> tuple[int, int]:
    """Blocks of rows in the longest sequence, and programs in all."""
    if cu_seqlens is None:
        blocks = -(-t.shape[1] // block)
        return blocks, blocks * t.shape[0] * t.shape[2]
    blocks = -(-max_seqlen // block)
    return blocks, blocks * (cu_seqlens.shape[0] - 1) * t.shape[1]


# ---- forward and backward --------------------------------------------------------------------------------------


def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, p: Parameters) -> tuple[Tensor, Tensor]:
    out, lse = _fake.empty_outputs(q)
    nothing = _nothing_to_do(q, k, packing)
    if packing is not None or nothing:  # rows past cu_seqlens[-1] are not written
        out.zero_()
        lse.fill_(-math.inf)
    if nothing:
        return out, lse
    q, k, v = _readable(q), _readable(k), _readable(v)
    packed = packing is not None
    plan, left, right, *numbers = _plan_and_numbers(q.device, q.dtype, q.shape[-1], packed, p)
    cu_q, cu_k, max_q, _ = packing or (None, None, 0, 0)
    blocks, programs = _grid_of(q, cu_q, max_q, plan.forward.config.block_m)
    step, heads = plan.step, q.shape[-2]
    plan.forward(
        q.device, programs, q, k, v, out, lse, cu_q, cu_k, *_strides(q, step), *_strides(k, step), *_strides(v, step),
        q.shape[-3], k.shape[-3], heads, heads // k.shape[-2], blocks, left, right, *numbers,
    )  # fmt: skip
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
    packed = packing is not None
    nothing = _nothing_to_do(q, k, packing)
    dq, dk, dv = grads = _fake.empty_gradients(q, k, v, output_mask)
    if packed or nothing:
        for g in grads:
            g.zero_()
    if nothing:
        return grads
    dout, q, k, v, out = (_readable(t) for t in (dout, q, k, v, out))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    plan, left, right, tanh_scale, score_scale, _ = _plan_and_numbers(q.device, q.dtype, q.shape[-1], packed, p)
    cu_q, cu_k, max_q, max_k = packing or (None, None, 0, 0)
    step, heads, heads_kv = plan.step, q.shape[-2], k.shape[-2]
    group, rows_q, rows_k = heads // heads_kv, q.shape[-3], k.shape[-3]
    delta = torch.empty_like(lse)
    prepare = plan.prepare[dlse is not None]
    blocks = -(-rows_q // prepare.config.block_m)
    prepare(
        q.device, blocks * heads * (1 if packed else q.shape[0]), out, dout, lse, dlse, delta,
        *_strides(out, step), *_strides(dout, step), rows_q, heads,
    )  # fmt: skip
    tensors = q, k, v, dout, lse, delta
    strides = *_strides(q, step), *_strides(k, step), *_strides(v, step), *_strides(dout, step), rows_q, rows_k
    numbers = left, right, tanh_scale, score_scale, p.scale
    wanted = dict(zip("qkv", output_mask, strict=True))
    for gradients, launch in plan.backward:
        if not any(wanted[name] for name in gradients):
            continue
        if gradients == "q":
            blocks, programs = _grid_of(q, cu_q, max_q, launch.config.block_m)
            launch(q.device, programs, *tensors, dq, cu_q, cu_k, *strides, heads, group, blocks, *numbers)
        else:
            # A gradient that is not asked for is computed all the same, beside one that is.
            dk_out, dv_out = (
                g if g.numel() else torch.empty(k.shape, dtype=k.dtype, device=k.device) for g in (dk, dv)
            )
            blocks, programs = _grid_of(k, cu_k, max_k, launch.config.block_n)
            launch(
                q.device, programs, *tensors, dk_out, dv_out, cu_q, cu_k, *strides, heads_kv, group, blocks,
                *numbers,
            )  # fmt: skip
    return grads


def _probe_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> None:
    packing, p, *grads = rest
    for g, computed in zip(grads, backward(dout, None, q, k, v, out, lse, packing, p, (True,) * 3), strict=True):
        g.copy_(computed)


_prober = _flash.Prober(forward, _probe_backward)
