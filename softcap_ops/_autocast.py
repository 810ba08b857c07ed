"""Autocast: q, k, v of mixed float dtypes reach one dtype; gradients return in each input's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import _C, Tensor

from . import _schema
from ._schema import lib

# What torch's own autocast casts: float64 is left alone, so that a reference run stays one.
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


def attention_fwd(op: Any, device: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.get_autocast_dtype(device)
    # The casts are ordinary differentiable ops above autograd, which is what returns each gradient in its
    # input's dtype. Autocast is off below: a kernel's own arithmetic is not autocast's business.
    with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_KEYS[device])):
        return op(*(t.to(dtype) if t.dtype in _CASTABLE else t for t in (q, k, v)), *rest)


_KEYS = {"cpu": _C.DispatchKey.AutocastCPU, "cuda": _C.DispatchKey.AutocastCUDA}
for _op in (_schema.attention_fwd, _schema.varlen_attention_fwd, _schema.decode_attention_fwd):
    for _device, _key in _KEYS.items():
        lib.impl(_op, partial(attention_fwd, _op, _device), _key.name)
