"""Sums over ranks and kernel calls, in float32 (float64 for float64 tensors), rounded once at the end.

Partial attention over disjoint keys merges by its lse (Dao 2022; Rabe and Staats 2021): with
lse = log(exp(lse_a) + exp(lse_b)), out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _validation
from .tiles import take


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial results of the same queries. out (..., rows, heads, head_dim), lse (..., heads, rows).

    A query that sees nothing in either keeps out 0 and lse -inf: no NaN.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # -inf - -inf is NaN: subtract a finite number instead, and the weights of an empty row are exp(-inf) = 0.
    base = lse.masked_fill(lse.isneginf(), 0.0)
    weight_a, weight_b = ((x - base).exp().transpose(-1, -2).unsqueeze(-1) for x in (lse_a, lse_b))
    return out_a * weight_a + out_b * weight_b, lse


def _covers(rows: slice | Tensor, length: int) -> bool:
    return isinstance(rows, slice) and rows.start == 0 and rows.stop == length


class Merged:
    """out and lse of a rank's queries, from partial results of some rows at a time."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
        accumulator = _validation.lse_dtype_of(self._q)
        if self._out is None or self._lse is None:
            if _covers(rows, self._q.shape[-3]):
                self._out, self._lse = out, lse
                return
            self._start(accumulator)
        assert self._out is not None
        assert self._lse is not None
        if self._out.dtype != accumulator:
            self._out = self._out.to(accumulator)
        merged_out, merged_lse = merge(take(self._out, rows), take(self._lse, rows, -1), out.to(accumulator), lse)
        if _covers(rows, self._q.shape[-3]):
            self._out, self._lse = merged_out, merged_lse
        elif isinstance(rows, slice):
            take(self._out, rows).copy_(merged_out)
            take(self._lse, rows, -1).copy_(merged_lse)
        else:
            self._out.index_copy_(-3, rows, merged_out)
            self._lse.index_copy_(-1, rows, merged_lse)

    def _start(self, accumulator: torch.dtype) -> None:
        q = self._q
        self._out = q.new_zeros(q.shape, dtype=accumulator)
        self._lse = q.new_full(_validation.lse_shape_of(q), float("-inf"), dtype=accumulator)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse), contiguous."""
        if self._out is None or self._lse is None:
            self._start(_validation.lse_dtype_of(self._q))
        assert self._out is not None
        assert self._lse is not None
        return self._out.to(self._q.dtype).contiguous(), self._lse.contiguous()


class RowSum:
    """A gradient like `t` (..., rows, heads, head_dim), summed from parts of some rows at a time."""

    def __init__(self, t: Tensor) -> None:
        self._like = t
        self._total: Tensor | None = None

    def add(self, rows: slice | Tensor, part: Tensor) -> None:
        accumulator = _validation.lse_dtype_of(self._like)
        if self._total is None:
            if _covers(rows, self._like.shape[-3]):
                self._total = part
                return
            self._total = self._like.new_zeros(self._like.shape, dtype=accumulator)
        elif self._total.dtype != accumulator:
            self._total = self._total.to(accumulator)
        if isinstance(rows, slice):
            take(self._total, rows).add_(part)
        else:
            self._total.index_add_(self._total.dim() - 3, rows, part.to(accumulator))

    def result(self, dtype: torch.dtype | None = None) -> Tensor:
        """The sum, rounded to `dtype` (None: that of the tensor it is the gradient of); contiguous."""
        dtype = dtype or self._like.dtype
        if self._total is None:
            return self._like.new_zeros(self._like.shape, dtype=dtype)
        return self._total.to(dtype).contiguous()
