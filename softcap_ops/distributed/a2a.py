"""a2a: ranks trade their share of the sequence for a share of the heads, and back (Ulysses; Jacobs et al. 2023)."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from .interleave import Interleave
from .transport import all_to_all


class Part(NamedTuple):
    """A tensor (..., rows, heads, head_dim), and how its ranks' rows make a sequence."""

    tensor: Tensor
    order: Interleave


def to_heads(group: dist.ProcessGroup, *parts: Part) -> list[Tensor]:
    """(..., rows, heads, head_dim) of each rank -> (..., ranks * rows, heads / ranks, head_dim), one message."""
    ranks = group.size()
    by_rank = [t.unflatten(-2, (ranks, t.shape[-2] // ranks)).movedim(-3, 0) for t, _ in parts]
    return [part.order.join(t) for part, t in zip(parts, all_to_all(group, by_rank), strict=True)]


def to_rows(group: dist.ProcessGroup, *parts: Part) -> list[Tensor]:
    """The inverse of `to_heads`; contiguous."""
    received = all_to_all(group, [order.split(t) for t, order in parts])
    return [t.movedim(0, -3).flatten(-3, -2).contiguous() for t in received]


def as_rows(lse: Tensor) -> Tensor:
    """lse (..., heads, rows) as a tensor with the axes of q: (..., rows, heads, 1)."""
    return lse.transpose(-1, -2).unsqueeze(-1)


def as_lse(rows: Tensor) -> Tensor:
    """The inverse of `as_rows`; contiguous."""
    return rows.squeeze(-1).transpose(-1, -2).contiguous()
