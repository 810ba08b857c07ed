"""Problem: the facts that decide which backend may serve a call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .._arguments import Packing, Parameters


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of call. Hashable: selection is cached on it."""

    device_type: str  # "cpu" or "cuda"
    device_index: int | None
    capability: tuple[int, int] | None  # CUDA compute capability
    dtype: torch.dtype
    head_dim: int
    heads_q: int
    heads_kv: int
    packed: bool
    softcap: float  # 0.0 = off
    causal: bool
    window: tuple[int, int]
    deterministic: bool
    needs_backward: bool

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, packing: Packing | None, parameters: Parameters, *, needs_backward: bool
    ) -> Problem:
        """The problem that these tensors and parameters pose."""
        device = q.device
        return cls(
            device.type,
            device.index,
            _capability(device.index) if device.type == "cuda" else None,
            q.dtype,
            q.shape[-1],
            q.shape[-2],
            k.shape[-2],
            packing is not None,
            parameters.softcap,
            parameters.causal,
            parameters.window,
            parameters.deterministic,
            needs_backward,
        )
