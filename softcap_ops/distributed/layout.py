"""How sequences lie over the ranks, and helpers to split, reorder and restore them.

With `layout="contiguous"` rank r of n holds the r-th n-th of each sequence. With `layout="zigzag"` each sequence is
cut into 2n chunks and rank r holds chunks r and 2n - 1 - r: under a causal mask every rank then has the same work
(Zhu, ring-flash-attention 2024; the order Megatron-Core and TransformerEngine use). Packed batches are laid out
sequence by sequence, each in rows of its own on every rank, so each sequence's rows must divide by n or 2n: pad them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LAYOUTS = ("zigzag", "contiguous")


def check_layout(layout: str) -> None:
    """Refuse an unknown layout by name."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {list(LAYOUTS)}, got {layout!r}")


def chunks_per_rank(layout: str) -> int:
    """How many chunks of each sequence a rank holds."""
    return 2 if layout == "zigzag" else 1


def required_multiple(ranks: int, layout: str = "zigzag") -> int:
    """What the length in tokens of every sequence must be a multiple of: 2 * ranks for zigzag, else ranks."""
    check_layout(layout)
    return chunks_per_rank(layout) * ranks


def _chunks_of(rank: int, ranks: int, layout: str) -> tuple[int, ...]:
    """The chunks of a sequence that a rank holds, in the order of its rows."""
    return (rank, 2 * ranks - 1 - rank) if layout == "zigzag" else (rank,)


def holder_of(chunk: int, ranks: int, layout: str) -> tuple[int, int]:
    """(rank, which of its chunks) that holds a chunk."""
    if layout == "zigzag" and chunk >= ranks:
        return 2 * ranks - 1 - chunk, 1
    return chunk, 0


class Segment(NamedTuple):
    """Consecutive positions [start, stop) of a sequence, and the row where they begin in the tensor that holds them."""

    start: int
    stop: int
    row: int


class Rows(NamedTuple):
    """One side's sequences (those of q, or those of k and v) before they are split over ranks."""

    lengths: tuple[int, ...]  # tokens of each sequence
    padded: tuple[int, ...]  # rows each sequence takes, padding included

    def segments(self, layout: str, rank: int, ranks: int) -> tuple[tuple[Segment, ...], ...]:
        """For each sequence, the segments that a rank holds; padding is left out, empty segments are kept."""
        result, row = [], 0
        for length, padded in zip(self.lengths, self.padded, strict=True):
            size = padded // (chunks_per_rank(layout) * ranks)
            of_sequence = []
            for chunk in _chunks_of(rank, ranks, layout):
                start = chunk * size
                of_sequence.append(Segment(min(start, length), min(start + size, length), row))
                row += size
            result.append(tuple(of_sequence))
        return tuple(result)


def _padded_lengths(cu_seqlens_padded: Tensor, ranks: int, layout: str) -> tuple[int, ...]:
    lengths = tuple(cu_seqlens_padded.diff().tolist())
    multiple = required_multiple(ranks, layout)
    for i, length in enumerate(lengths):
        if length % multiple:
            raise ValueError(
                f"cu_seqlens_padded: the rows of sequence {i}, {length}, must be a multiple of {multiple} for {ranks} "
                f"ranks in layout {layout!r} (see pad_sequences)"
            )
    return lengths


@functools.lru_cache(maxsize=256)
def _shard_rows(padded: tuple[int, ...], rank: int, ranks: int, layout: str) -> tuple[Tensor, Tensor]:
    """(row in the whole tensor, position in its sequence) of every row of a rank's shard."""
    rows, positions, base = [], [], 0
    for length in padded:
        size = length // (chunks_per_rank(layout) * ranks)
        for chunk in _chunks_of(rank, ranks, layout):
            position = torch.arange(chunk * size, (chunk + 1) * size)
            positions.append(position)
            rows.append(position + base)
        base += length
    if not rows:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    return torch.cat(rows), torch.cat(positions)


def _lengths(seqlen: int, ranks: int, layout: str, cu_seqlens_padded: Tensor | None) -> tuple[int, ...]:
    check_layout(layout)
    if cu_seqlens_padded is not None:
        lengths = _padded_lengths(cu_seqlens_padded, ranks, layout)
        if sum(lengths) != seqlen:
            raise ValueError(f"cu_seqlens_padded must end at the {seqlen} rows of the tensor, got {sum(lengths)}")
        return lengths
    multiple = required_multiple(ranks, layout)
    if seqlen % multiple:
        raise ValueError(
            f"the sequence length must be a multiple of {multiple} for {ranks} ranks in layout {layout!r}, got {seqlen}"
        )
    return (seqlen,)


def split_sequence(
    x: Tensor, *, rank: int, ranks: int, layout: str = "zigzag", dim: int = 1, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """The rows of `x` that one rank holds.

    Args:
        x: a whole tensor with the sequence (or the packed tokens) at `dim`.
        rank, ranks: which shard, of how many.
        layout: "zigzag" or "contiguous".
        dim: 1 for (batch, seqlen, ...), 0 for packed (tokens, ...).
        cu_seqlens_padded: for packed tensors, (sequences + 1,): the first row of each sequence.

    Raises:
        ValueError: a length is not a multiple of `required_multiple(ranks, layout)`.
    """
    rows, _ = _shard_rows(_lengths(x.shape[dim], ranks, layout, cu_seqlens_padded), rank, ranks, layout)
    return x.index_select(dim, rows.to(x.device))


def join_sequence(
    shards: Sequence[Tensor], *, layout: str = "zigzag", dim: int = 1, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """The whole tensor from every rank's shard, in rank order: the inverse of `split_sequence`."""
    ranks = len(shards)
    joined = torch.cat(list(shards), dim)
    lengths = _lengths(joined.shape[dim], ranks, layout, cu_seqlens_padded)
    order = torch.cat([_shard_rows(lengths, rank, ranks, layout)[0] for rank in range(ranks)])
    return joined.index_select(dim, order.argsort().to(joined.device))


def shard_positions(
    *, rank: int, ranks: int, layout: str = "zigzag", seqlen: int | None = None, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """The position in its sequence of every row that a rank holds, int64: what rotary embeddings and labels need.

    Give `seqlen`, the whole length of a dense sequence, or `cu_seqlens_padded` of a packed batch.
    """
    if (seqlen is None) == (cu_seqlens_padded is None):
        raise ValueError("give either seqlen or cu_seqlens_padded")
    total = seqlen if cu_seqlens_padded is None else int(cu_seqlens_padded[-1])
    assert total is not None
    return _shard_rows(_lengths(total, ranks, layout, cu_seqlens_padded), rank, ranks, layout)[1].clone()


def pad_sequences(
    x: Tensor, cu_seqlens: Tensor, *, ranks: int, layout: str = "zigzag", value: float = 0
) -> tuple[Tensor, Tensor]:
    """Pad every sequence of a packed tensor to a length that splits evenly.

    Args:
        x: (tokens, ...).
        cu_seqlens: int32, (sequences + 1,).
        value: what the padding rows hold; attention does not look at them.

    Returns:
        (padded x, cu_seqlens_padded), the latter int32 like cu_seqlens.
    """
    multiple = required_multiple(ranks, layout)
    lengths = cu_seqlens.diff()
    cu_padded = torch.zeros_like(cu_seqlens)
    cu_padded[1:] = ((lengths + multiple - 1) // multiple * multiple).cumsum(0)
    result = x.new_full((int(cu_padded[-1]), *x.shape[1:]), value)
    rows = _token_rows(cu_seqlens, cu_padded).to(x.device)
    return result.index_copy(0, rows, x[: rows.shape[0]]), cu_padded


def unpad_sequences(x: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
    """The rows of a padded packed tensor that are tokens: the inverse of `pad_sequences`."""
    return x.index_select(0, _token_rows(cu_seqlens, cu_seqlens_padded).to(x.device))


def _token_rows(cu_seqlens: Tensor, cu_padded: Tensor) -> Tensor:
    """The row of every token in the padded tensor."""
    lengths = cu_seqlens.diff().long()
    shift = (cu_padded[:-1] - cu_seqlens[:-1]).long()
    return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device) + shift.repeat_interleave(lengths)
