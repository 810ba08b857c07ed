"""Our own Hopper kernels (csrc/cuda) for compute capability 9.0: the cap costs next to nothing.

They are a C library beside this package, built where nvcc is, and called through ctypes: no Torch in it, so one build
serves every torch and Python.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _fake, _validation
from .._arguments import Packing, Parameters
from . import _flash
from .problem import Problem, Refusal

NAME = "hopper"
INSTALL = "install softcap_ops anew where nvcc is"
LIBRARY = Path(__file__).parents[1] / "libsoftcap_hopper.so"

HEAD_DIMS = (64, 128, 256)
_LARGEST = 3e38  # of float32, about: a scale beyond it saturates every score just the same
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}

# softcap_hopper_fwd_args of csrc/cuda/softcap_hopper.h: struct_size; pointers; strides and totals; integers; softcap,
# scale; stream. And softcap_hopper_bwd_args, with the place of its workspace, whose size the library has to be asked.
_FORWARD = struct.Struct("=Q7Q14q10i2fQ")
_BACKWARD = struct.Struct("=Q13Q17q12i2fQ")
_WORKSPACE_AT = 88


# ---- the library -----------------------------------------------------------------------------------------------


@functools.cache
def _load() -> Any | Refusal:
    """The library, or why there is none. Never raises, and asks no device anything."""
    if not LIBRARY.exists():
        return Refusal(f"{LIBRARY.name} was not built for this installation (nvcc builds it)")
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for function in (library.softcap_hopper_fwd, library.softcap_hopper_bwd, library.softcap_hopper_bwd_workspace):
            function.argtypes = [ctypes.c_char_p]
        library.softcap_hopper_bwd_workspace.restype = ctypes.c_int64
        library.softcap_hopper_error_string.restype = ctypes.c_char_p
        return library
    except (OSError, AttributeError) as error:
        return Refusal(f"{LIBRARY.name} cannot be loaded: {error}", error)


def _library() -> Any:
    library = _load()
    assert not isinstance(library, Refusal)  # selection asked
    return library


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


# ---- what it can do --------------------------------------------------------------------------------------------


def opt_in_error() -> str | None:
    return None


def support_error(problem: Problem) -> str | None:
    if problem.device_type != "cuda":
        return f"CUDA tensors only, got {problem.device_type}"
    if problem.capability != (9, 0):
        return "needs compute capability 9.0 (Hopper), this GPU has {}.{}".format(*problem.capability or (0, 0))
    if problem.dtype not in _DTYPES:
        return f"computes in bfloat16 and float16 only, got {_flash._name(problem.dtype)}"
    if problem.head_dim not in HEAD_DIMS:
        return f"head_dim 64, 128 and 256, got {problem.head_dim}"
    if not problem.softcap:
        return "soft-capped attention only: without a cap there is no bound for it to use"
    if not 1e-30 <= problem.softcap < 1e30:
        return f"scale / softcap leaves float32's range at softcap {problem.softcap}"
    return None


def install_error() -> str | None:
    library = _load()
    return library if isinstance(library, Refusal) else None


def probe_error(problem: Problem) -> str | None:
    return _prober.error(problem)


# ---- forward and backward --------------------------------------------------------------------------------------


def forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, p: Parameters) -> tuple[Tensor, Tensor]:
    q, k, v = _flash._readable(q), _flash._readable(k), _flash._readable(v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(_validation.lse_shape_of(q), dtype=torch.float32, device=q.device)
    pointers, sizes = _packing(q, k, packing)
    arguments = _FORWARD.pack(
        _FORWARD.size, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), *pointers,
        *_strides(q), *_strides(k), *_strides(v), *_strides(out), *sizes, q.shape[-2], k.shape[-2], q.shape[-1],
        _DTYPES[q.dtype], p.causal, *p.window, p.softcap, _float32(p.scale),
        _stream(q.device),
    )  # fmt: skip
    _call(_library().softcap_hopper_fwd, arguments, q.device)
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
    q, k, v = _flash._readable(q), _flash._readable(k), _flash._readable(v)
    out, dout, lse = _flash._readable(out), _flash._readable(dout), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    grads = dq, dk, dv = _fake.empty_gradients(q, k, v)
    _launch_backward(dout, q, k, v, out, lse, packing, p, dq, dk, dv, dlse)
    return _flash.only(grads, output_mask)


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
    dlse: Tensor | None = None,
) -> None:
    """Writes dq, dk and dv; every tensor as the kernel reads it."""
    pointers, sizes = _packing(q, k, packing)
    arguments = _BACKWARD.pack(
        _BACKWARD.size, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), dout.data_ptr(), lse.data_ptr(),
        0 if dlse is None else dlse.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), 0, *pointers,
        *_strides(q), *_strides(k), *_strides(v), *_strides(out), *_strides(dout), *sizes, q.shape[-2], k.shape[-2],
        q.shape[-1], _DTYPES[q.dtype], p.causal, *p.window, p.deterministic, 0,
        p.softcap, _float32(p.scale), _stream(q.device),
    )  # fmt: skip
    library = _library()
    workspace = torch.empty(library.softcap_hopper_bwd_workspace(arguments), dtype=torch.uint8, device=q.device)
    address = workspace.data_ptr().to_bytes(8, sys.byteorder)
    arguments = arguments[:_WORKSPACE_AT] + address + arguments[_WORKSPACE_AT + 8 :]
    _call(library.softcap_hopper_bwd, arguments, q.device)


def _float32(scale: float) -> float:
    return max(-_LARGEST, min(scale, _LARGEST))


def _strides(t: Tensor) -> tuple[int, ...]:
    """(batch, token, head); a packed tensor has no batch stride."""
    return t.stride()[:3] if t.dim() == 4 else (0, *t.stride()[:2])


def _packing(q: Tensor, k: Tensor, packing: Packing | None) -> tuple[tuple[int, int], tuple[int, ...]]:
    """cu_seqlens_q, cu_seqlens_k; total_q, total_k, batch, seqlen_q, seqlen_k."""
    if packing is None:
        return (0, 0), (0, 0, q.shape[0], q.shape[1], k.shape[1])
    cu_q, cu_k, max_q, max_k = packing
    return (cu_q.data_ptr(), cu_k.data_ptr()), (q.shape[0], k.shape[0], cu_q.shape[0] - 1, max_q, max_k)


def _call(function: Any, arguments: bytes, device: torch.device) -> None:
    """Call into the library with the tensors' device current: it launches there."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            code = function(arguments)
    else:
        code = function(arguments)
    if code:
        reason = _library().softcap_hopper_error_string(code).decode()
        raise RuntimeError(f"softcap_ops: the Hopper kernel failed: {reason}")


_launch = forward
_prober = _flash.Prober(_launch, _launch_backward)
