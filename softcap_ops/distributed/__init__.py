"""Context parallelism: attention over sequences that are split over ranks, and helpers to split and restore them.

Importing this imports nothing of torch.distributed; what needs it imports it when called.
"""

from __future__ import annotations

from typing import Any

from . import _ops  # noqa: F401  registers the ops' kernels
from .api import context_parallel_attention
from .cost import Cost, StepCost, busiest, cost
from .layout import (
    join_sequence,
    pad_sequences,
    required_multiple,
    shard_positions,
    split_sequence,
    unpad_sequences,
)


def two_level_groups(group: Any = None, *, a2a_size: int) -> tuple[Any, Any]:
    """Split a group for comm="a2a+p2p": (a2a group of this rank, p2p group of this rank).

    Consecutive ranks share an a2a group, which exchanges heads: make it the GPUs of one node. Creates process groups
    as torch.distributed.new_group does: every rank of the job must call it, each for its own `group`.

    Args:
        group: the ProcessGroup to split; None = all ranks. A rank outside passes, and gets, what `new_group` gave it.
        a2a_size: ranks of each a2a group; divides the size of the group.
    """
    from . import groups

    return groups.two_level_groups(group, a2a_size=a2a_size)


__all__ = [
    "Cost",
    "StepCost",
    "busiest",
    "context_parallel_attention",
    "cost",
    "join_sequence",
    "pad_sequences",
    "required_multiple",
    "shard_positions",
    "split_sequence",
    "two_level_groups",
    "unpad_sequences",
]
