"""all_gather: every rank gathers all keys and values, and computes its own queries on the part that they see.

The backward gathers again rather than keep them, and sends each rank the gradients of its own keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _validation
from . import transport
from .interleave import Interleave
from .kernel import Gradients, Kernel
from .merge import Merged, RowSum
from .tiles import Hop


class Gathering(NamedTuple):
    group: dist.ProcessGroup
    order: Interleave  # of the keys
    hop: Hop  # this rank's queries against all keys
    chunks: int  # pieces of each sequence that a rank holds

    def _gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.order.join(transport.all_gather(self.group, torch.stack((k, v)))).unbind(0)
        return k, v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
        """out and lse of this rank's queries."""
        k, v = self._gather(k, v)
        result = Merged(q)
        for call in self.hop.calls:
            result.add(call.q_rows, *kernel.forward(q, k, v, call))
        return result.result()

    def backward(self, g: Gradients, k: Tensor, v: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this rank's rows."""
        k, v = self._gather(k, v)
        dq, dk, dv = RowSum(g.q), RowSum(k), RowSum(v)
        for call in self.hop.calls:
            dq_part, dk_part, dv_part = kernel.backward(g, k, v, call)
            dq.add(call.q_rows, dq_part)
            dk.add(call.k_rows, dk_part)
            dv.add(call.k_rows, dv_part)
        # One kernel call a chunk, so a key may have as many gradients here.
        dtype = kernel.sum_dtype(k, self.chunks)
        by_rank = [self.order.split(t.result(dtype)) for t in (dk, dv)]
        accumulator = _validation.lse_dtype_of(k)
        dk_own, dv_own = (t.sum(0, dtype=accumulator).to(k.dtype) for t in transport.all_to_all(self.group, by_rank))
        return dq.result(), dk_own, dv_own
