"""Padded batches as packed ones and back: every shape stays what it was, so that nothing is read from a device.

The rows of a batch are permuted so that the tokens come first, sequence by sequence, and the padding last: rows past
`cu_seqlens[-1]`, which the packed ops leave at 0, in out and in gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Where the tokens of one side (q, or k and v) of a padded batch are."""

    cu_seqlens: Tensor  # int32 (batch + 1,): sequence b is entries cu_seqlens[b] to cu_seqlens[b + 1] of `order`
    order: Tensor | None  # int64 (rows,): the rows of the batch, tokens first; None: they already are

    def pack(self, x: Tensor) -> Tensor:
        """(rows, ...) in packed order."""
        return x if self.order is None else x.index_select(0, self.order)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of `pack`."""
        if self.order is None:
            return x
        inverse = torch.empty_like(self.order).scatter_(
            0, self.order, torch.arange(self.order.shape[0], device=x.device)
        )
        return x.index_select(0, inverse)


def from_mask(is_token: Tensor) -> Packed:
    """From bool (batch, seqlen), True = token, wherever in its row the padding is."""
    return Packed(cumulative(is_token.sum(1)), _tokens_first(is_token.flatten()))


def from_lengths(cu_seqlens: Tensor, seqlen: int) -> Packed:
    """From the lengths of the sequences in rows of `seqlen`, padded at their ends."""
    position = torch.arange(seqlen, device=cu_seqlens.device)
    is_token = position < cu_seqlens.diff().unsqueeze(1)
    return Packed(cu_seqlens, _tokens_first(is_token.flatten()))


def from_offsets(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, rows: int) -> Packed:
    """From packed rows in which sequence b begins at row cu_seqlens_padded[b]; what is before the first is padding."""
    if cu_seqlens_padded is None or cu_seqlens_padded is cu_seqlens:
        return Packed(cu_seqlens, None)
    row = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens_padded.dtype)
    # The last sequence that begins at or before the row: those of no rows at all begin where the next one does.
    sequence = torch.searchsorted(cu_seqlens_padded[:-1].contiguous(), row, right=True) - 1
    position = row - cu_seqlens_padded[sequence]
    return Packed(cu_seqlens, _tokens_first((row >= cu_seqlens_padded[0]) & (position < cu_seqlens.diff()[sequence])))


def _tokens_first(is_token: Tensor) -> Tensor:
    return (~is_token).to(torch.uint8).argsort(stable=True)


def cumulative(lengths: Tensor) -> Tensor:
    """cu_seqlens, int32 (batch + 1,), of sequences of these lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
