"""Moving tensors between ranks, as bytes: every dtype travels on every backend, and several tensors in one message.

NCCL moves GPU tensors by itself, in the background. gloo moves host memory only: GPU tensors are copied through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ALIGNMENT = 16  # bytes: a part of a message can then be viewed as any dtype


def wire_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where a tensor of `device` must lie for this group to send it.

    Raises ValueError if the group cannot send such tensors at all.
    """
    cpu = torch.device("cpu")
    backend = _backend_name(group, device)
    if device.type == "cuda" and backend in (None, "gloo"):
        device, backend = cpu, _backend_name(group, cpu)
    if backend is None:
        raise ValueError(
            f"group: process group {group.group_name!r} has no backend for {device.type} tensors "
            '(init_process_group("gloo") for the CPU, "nccl" for GPUs)'
        )
    return device


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str | None:
    try:
        return group._get_backend(torch.device(device.type)).name()
    except RuntimeError:
        return None


def _as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


class Exchange:
    """A message to one rank and one from another, under way."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        send: tuple[Tensor, int] | None,
        receive: tuple[Sequence[int], torch.dtype, int] | None,
        device: torch.device,
    ) -> None:
        """send: (tensor, rank in the group); receive: (shape, dtype, rank in the group); None = no message."""
        wire = wire_device(group, device)
        self._device = device
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        operations = []
        if send is not None:
            tensor, to = send
            self._sent = tensor.contiguous().to(wire)
            operations.append(dist.P2POp(dist.isend, _as_bytes(self._sent), group=group, group_peer=to))
        if receive is not None:
            shape, dtype, source = receive
            self._received = torch.empty(tuple(shape), dtype=dtype, device=wire)
            operations.append(dist.P2POp(dist.irecv, _as_bytes(self._received), group=group, group_peer=source))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor | None:
        """What came, on the device it was asked for. On a GPU the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], None
        return None if self._received is None else self._received.to(self._device)


def _layout_of(tensors: Sequence[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """(first byte, bytes) of each tensor (ranks, ...) in a rank's message, and the message's size."""
    spans, offset = [], 0
    for t in tensors:
        size = math.prod(t.shape[1:]) * t.element_size()
        spans.append((offset, size))
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return spans, offset


def _part(buffer: Tensor, span: tuple[int, int], like: Tensor) -> Tensor:
    """The view of `buffer` (ranks, bytes) that holds a tensor of the shape and dtype of `like`, (any, ...)."""
    first, size = span
    if size == 0:
        return torch.empty(like.shape, dtype=like.dtype, device=buffer.device)
    return buffer[:, first : first + size].view(like.dtype).view(buffer.shape[0], *like.shape[1:])


def all_to_all(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors (ranks, ...): entry r goes to rank r, and entry r of what comes back is from rank r. One message each."""
    device = tensors[0].device
    wire = wire_device(group, device)
    spans, size = _layout_of(tensors)
    message = torch.empty((tensors[0].shape[0], size), dtype=torch.uint8, device=device)
    for t, span in zip(tensors, spans, strict=True):
        _part(message, span, t).copy_(t)
    message = message.to(wire)
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    received = received.to(device)
    return [_part(received, span, t) for t, span in zip(tensors, spans, strict=True)]


def all_gather(group: dist.ProcessGroup, t: Tensor) -> Tensor:
    """(ranks, *t.shape): every rank's tensor."""
    wire = wire_device(group, t.device)
    t_wire = t.contiguous().to(wire)
    result = torch.empty((group.size(), *t.shape), dtype=t.dtype, device=wire)
    _all_gather_single(_as_bytes(result), _as_bytes(t_wire), group=group)
    return result.to(t.device)
