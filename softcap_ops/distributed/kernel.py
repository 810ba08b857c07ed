"""The single-device kernel of a context-parallel call: the package's own selection, once a kernel call."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _validation, backends
from .._arguments import Parameters
from .tiles import Call, take


class Kernel(NamedTuple):
    """What all kernel calls of one context-parallel call share. Their masks are their own."""

    parameters: Parameters  # causal and window are those of the whole sequences, and are not used
    backend: str | None
    needs_backward: bool
    # Whether to give kernels float32 copies of half-precision rows. Our CPU kernel computes in float32 either way, and
    # partial results that are not rounded before they meet keep the accuracy of one process.
    in_float32: bool

    def _select(self, q: Tensor, k: Tensor, call: Call) -> tuple[ModuleType, Parameters]:
        parameters = self.parameters._replace(causal=call.causal, window=call.window)
        facts = backends.facts(q, k, call.packing, parameters, self.needs_backward)
        return backends.choose(self.backend, *facts), parameters

    def _wide(self, *tensors: Tensor) -> list[Tensor]:
        return [t.float() for t in tensors] if self.in_float32 else list(tensors)

    def sum_dtype(self, t: Tensor, parts: int) -> torch.dtype:
        """The narrowest dtype that holds the sum of `parts` of the kernel's gradients of t without rounding again."""
        return t.dtype if parts <= 1 and not self.in_float32 else _validation.lse_dtype_of(t)

    def check(self, q: Tensor, k: Tensor, call: Call) -> None:
        """Raise UnsupportedError if no backend can serve the call."""
        self._select(q, k, call)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """out and lse of the call's rows of q."""
        q, k, v = self._wide(take(q, call.q_rows), take(k, call.k_rows), take(v, call.k_rows))
        backend, parameters = self._select(q, k, call)
        return backend.forward(q, k, v, call.packing, parameters)

    def backward(self, g: Gradients, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """dq of the call's rows of q, dk and dv of its rows of k and v, from the merged out and lse."""
        dout, q, out = self._wide(*(take(t, call.q_rows) for t in (g.dout, g.q, g.out)))
        k, v = self._wide(take(k, call.k_rows), take(v, call.k_rows))
        lse = take(g.lse, call.q_rows, -1)
        dlse = None if g.dlse is None else take(g.dlse, call.q_rows, -1)
        backend, parameters = self._select(q, k, call)
        return backend.backward(dout, dlse, q, k, v, out, lse, call.packing, parameters, (True, True, True))


class Gradients(NamedTuple):
    """What a backward is given of the queries: every kernel call takes its rows of these."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    out: Tensor
    lse: Tensor
