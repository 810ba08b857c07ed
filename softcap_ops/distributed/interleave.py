"""Putting the shards of several ranks together in the order of the sequence, and taking them apart again.

Ranks p * m .. p * m + m - 1 of a layout over n ranks hold, together and in the right order, what rank p holds of the
same layout over n / m ranks. That makes a2a under p2p possible, and with m = n it is the whole sequence.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import chunks_per_rank, holder_of


class Interleave(NamedTuple):
    """Joins (members, ..., rows, heads, head_dim) into (..., members * rows, heads, head_dim), and splits it."""

    pieces: tuple[tuple[int, int, int], ...]  # (member, its first row, rows), in the joined order
    rows: int  # rows of each member
    members: int
    packed: bool

    @classmethod
    def of(
        cls,
        padded: tuple[int, ...],
        rows: int,
        layout: str,
        members: int,
        outer_rank: int,
        outer_ranks: int,
        packed: bool,
    ) -> Interleave:
        """padded: rows of each whole sequence; rows: of each member, a tail behind the sequences included."""
        ranks, per_rank = members * outer_ranks, chunks_per_rank(layout)
        outer_chunks = (outer_rank, 2 * outer_ranks - 1 - outer_rank) if per_rank == 2 else (outer_rank,)
        pieces, base = [], 0
        for length in padded:
            size = length // (per_rank * ranks)
            for outer_chunk in outer_chunks:
                for chunk in range(outer_chunk * members, (outer_chunk + 1) * members):
                    rank, half = holder_of(chunk, ranks, layout)
                    pieces.append((rank - outer_rank * members, base + half * size, size))
            base += per_rank * size
        if base < rows:
            pieces += [(member, base, rows - base) for member in range(members)]
        return cls(tuple(pieces), rows, members, packed)

    def join(self, x: Tensor) -> Tensor:
        """(members, ..., rows, heads, head_dim) in the order of the sequence."""
        if self.members == 1:
            return x[0]
        if not self.packed:  # a few long pieces: one copy of each
            return torch.cat([x[member].narrow(-3, row, n) for member, row, n in self.pieces], -3)
        member, row, _ = _order(self.pieces, self.rows, x.device)
        return x.movedim(-3, 1)[member, row].movedim(0, -3)

    def split(self, x: Tensor) -> Tensor:
        """The inverse of `join`."""
        if self.members == 1:
            return x.unsqueeze(0)
        if not self.packed:
            parts: list[list[tuple[int, Tensor]]] = [[] for _ in range(self.members)]
            offset = 0
            for member, row, n in self.pieces:
                parts[member].append((row, x.narrow(-3, offset, n)))
                offset += n
            return torch.stack([torch.cat([t for _, t in sorted(p, key=lambda e: e[0])], -3) for p in parts])
        by_row = x.movedim(-3, 0).index_select(0, _order(self.pieces, self.rows, x.device)[2])
        return by_row.unflatten(0, (self.members, self.rows)).movedim(1, -3)


@functools.lru_cache(maxsize=64)
def _order(pieces: tuple[tuple[int, int, int], ...], rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(member, row) of each joined row, and where each member's rows are in the joined order, member by member."""
    nothing = torch.empty(0, dtype=torch.int64)
    member = torch.cat([nothing, *(torch.full((n,), m) for m, _, n in pieces)])
    row = torch.cat([nothing, *(torch.arange(first, first + n) for _, first, n in pieces)])
    return member.to(device), row.to(device), (member * rows + row).argsort().to(device)
