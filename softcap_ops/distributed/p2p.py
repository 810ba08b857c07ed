"""p2p: keys and values go round the ring, and every rank merges what its queries see of each rank's.

At step s, of those that any rank needs, rank r works with the keys of rank r - s. It gets them from there directly,
while it computes the step before, and only the rows that its queries see: a causal mask moves half of what a full one
does (three quarters in zigzag), and steps that a window cannot reach are not made at all. The backward makes the same
steps, computes from the merged out and lse, and sends each rank the gradients of the keys it sent. At any time a rank
holds two foreign blocks, the one in use and the one arriving (Ring Attention, Liu et al. 2023).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .kernel import Gradients, Kernel
from .merge import Merged, RowSum
from .tiles import Hop, rows_of, take
from .transport import Exchange


class Step(NamedTuple):
    """One step of the ring, seen from one rank."""

    source: int  # whose keys this rank works with
    hop: Hop  # what it computes with them
    target: int  # who works with this rank's keys
    theirs: Hop  # what it computes with them


class Ring(NamedTuple):
    """The steps of one rank, its own first. All ranks have the same number, though a step may be empty for some."""

    group: dist.ProcessGroup
    rank: int
    steps: tuple[Step, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
        """out and lse of this rank's queries."""
        own = torch.stack((k, v)) if len(self.steps) > 1 else None
        result = Merged(q)
        previous: list[tuple[slice | Tensor, Tensor, Tensor]] = []
        with _Lanes(q.device) as lanes:
            arriving: Exchange | None = None
            for i, step in enumerate(self.steps):
                with lanes.at(i):
                    keys, values = (k, v) if arriving is None else _pair(arriving.wait())
                if i + 1 < len(self.steps):
                    with lanes.at(i + 1):
                        arriving = self._send_keys(self.steps[i + 1], own)
                with lanes.at(i):
                    parts = _step_outputs(q, keys, values, step.hop, kernel)
                lanes.collect(i - 1, *(t for part in previous for t in part[1:]))
                for part in previous:
                    result.add(*part)
                previous = parts
            lanes.collect(len(self.steps) - 1, *(t for part in previous for t in part[1:]))
            for part in previous:
                result.add(*part)
        return result.result()

    def backward(self, g: Gradients, k: Tensor, v: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's rows."""
        own = torch.stack((k, v)) if len(self.steps) > 1 else None
        dq, dk, dv = RowSum(g.q), RowSum(k), RowSum(v)
        previous: _Parts | None = None
        with _Lanes(k.device) as lanes:
            arriving: Exchange | None = None
            for i, step in enumerate(self.steps):
                with lanes.at(i):
                    keys, values = (k, v) if arriving is None else _pair(arriving.wait())
                if i + 1 < len(self.steps):
                    with lanes.at(i + 1):
                        arriving = self._send_keys(self.steps[i + 1], own)
                with lanes.at(i):
                    dq_parts, dk_step, dv_step = _step_gradients(g, keys, values, step.hop, kernel)
                    parts = _Parts(dq_parts)
                    if step.source == self.rank:
                        dtype = kernel.sum_dtype(k, len(step.hop.calls))
                        parts.own = (dk_step.result(dtype), dv_step.result(dtype))
                    else:
                        parts.returning = self._return_gradients(step, dk_step, dv_step, k, kernel)
                        parts.returned_rows = rows_of(step.theirs.k_spans, k.device)
                if previous is not None:
                    previous.add_to(dq, dk, dv, lanes, i - 1)
                previous = parts
            if previous is not None:
                previous.add_to(dq, dk, dv, lanes, len(self.steps) - 1)
        return dq.result(), dk.result(), dv.result()

    def _send_keys(self, step: Step, own: Tensor | None) -> Exchange:
        """Keys and values (2, ..., rows, heads, head_dim) to the step's target and from its source."""
        assert own is not None
        rows = rows_of(step.theirs.k_spans, own.device)
        send = (take(own, rows), step.target) if step.theirs.calls else None
        receive = (_resized(own, step.hop.k_length), own.dtype, step.source) if step.hop.calls else None
        return Exchange(self.group, send, receive, own.device)

    def _return_gradients(self, step: Step, dk: RowSum, dv: RowSum, k: Tensor, kernel: Kernel) -> Exchange:
        """Those of the keys that came, to where they came from; those of the keys sent, from where they went."""
        send = receive = None
        if step.hop.calls:
            dtype = kernel.sum_dtype(k, len(step.hop.calls))
            send = (torch.stack((dk.result(dtype), dv.result(dtype))), step.source)
        if step.theirs.calls:
            dtype = kernel.sum_dtype(k, len(step.theirs.calls))
            receive = ((2, *_resized(k, step.theirs.k_length)), dtype, step.target)
        return Exchange(self.group, send, receive, k.device)


class _Parts:
    """The gradients of one step: those of q, and of this rank's own keys here or on their way back."""

    def __init__(self, dq: list[tuple[slice | Tensor, Tensor]]) -> None:
        self.dq = dq
        self.own: tuple[Tensor, Tensor] | None = None
        self.returning: Exchange | None = None
        self.returned_rows: slice | Tensor = slice(0, 0)

    def add_to(self, dq: RowSum, dk: RowSum, dv: RowSum, lanes: _Lanes, step: int) -> None:
        returned = self.returning.wait() if self.returning is not None else None
        tensors = [t for _, t in self.dq]
        tensors += [*(self.own or ()), *(() if returned is None else (returned,))]
        lanes.collect(step, *tensors)
        for part in self.dq:
            dq.add(*part)
        if self.own is not None:
            whole = slice(0, self.own[0].shape[-3])
            dk.add(whole, self.own[0])
            dv.add(whole, self.own[1])
        if returned is not None:
            dk.add(self.returned_rows, returned[0])
            dv.add(self.returned_rows, returned[1])


def _step_outputs(
    q: Tensor, k: Tensor | None, v: Tensor | None, hop: Hop, kernel: Kernel
) -> list[tuple[slice | Tensor, Tensor, Tensor]]:
    if k is None or v is None:  # nothing came, as nothing is seen
        return []
    return [(call.q_rows, *kernel.forward(q, k, v, call)) for call in hop.calls]


def _step_gradients(
    g: Gradients, k: Tensor | None, v: Tensor | None, hop: Hop, kernel: Kernel
) -> tuple[list[tuple[slice | Tensor, Tensor]], RowSum, RowSum]:
    dq_parts: list[tuple[slice | Tensor, Tensor]] = []
    if k is None or v is None:
        return dq_parts, RowSum(g.q), RowSum(g.q)
    dk, dv = RowSum(k), RowSum(v)
    for call in hop.calls:
        dq, dk_part, dv_part = kernel.backward(g, k, v, call)
        dq_parts.append((call.q_rows, dq))
        dk.add(call.k_rows, dk_part)
        dv.add(call.k_rows, dv_part)
    return dq_parts, dk, dv


def _pair(kv: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if kv is None else (kv[0], kv[1])


def _resized(t: Tensor, rows: int) -> tuple[int, ...]:
    """The shape of t (..., rows, heads, head_dim) with other rows."""
    return (*t.shape[:-3], rows, *t.shape[-2:])


@functools.cache
def _second_stream(device_index: int | None) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


class _Lanes:
    """Two CUDA streams taking turns, so that the tail of one step's kernels overlaps the head of the next's.

    Lane 0 is the current stream, which also does all sums. On the CPU there is nothing to take turns.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if device.type == "cuda":
            self._streams = (torch.cuda.current_stream(device), _second_stream(device.index))

    def __enter__(self) -> _Lanes:
        if self._streams:
            self._streams[1].wait_stream(self._streams[0])
        return self

    def __exit__(self, *exception: object) -> None:
        if self._streams:
            self._streams[0].wait_stream(self._streams[1])

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[step % 2]):
            yield

    def collect(self, step: int, *tensors: Tensor) -> None:
        """The current stream may use `tensors`, which step `step` made, from here on."""
        if not self._streams or step % 2 == 0:
            return
        self._streams[0].wait_stream(self._streams[1])
        for t in tensors:
            t.record_stream(self._streams[0])
