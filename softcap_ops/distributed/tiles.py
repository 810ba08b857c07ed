"""Which kernel calls compute the attention between the rows of one rank and those of another.

A mask of this package is a band: query i sees key j when low <= j - i <= high. Between a segment of queries and one of
keys the band is a band again, and one kernel call can do it: a call's own mask is aligned at its last query and last
key, so dropping keys that no query sees, and queries that see no key, leaves a rectangle whose last row and column
lie in the band, that is, a window (left, right) with both ends >= 0 around the call's own diagonal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import Packing
from .layout import Rows, Segment

Span = tuple[int, int]  # (first row, number of rows)


class Mask(NamedTuple):
    """The mask of the whole sequences, as the user gave it."""

    causal: bool
    window: tuple[int, int]

    def band(self, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
        """(low, high) of j - i, aligned bottom right; None = unlimited."""
        left, right = self.window
        if self.causal:
            right = 0
        diagonal = seqlen_k - seqlen_q
        return (diagonal - left if left >= 0 else None, diagonal + right if right >= 0 else None)


class Tile(NamedTuple):
    """A rectangle of queries and keys of one sequence with its window, -1 = unlimited."""

    q: Span
    k: Span
    left: int
    right: int

    @property
    def is_full(self) -> bool:
        return self.left < 0 and self.right < 0


def touches(q: Segment, k: Segment, low: int | None, high: int | None) -> bool:
    """Whether any query of q sees any key of k."""
    if q.start >= q.stop or k.start >= k.stop:
        return False
    return (high is None or k.start - (q.stop - 1) <= high) and (low is None or k.stop - 1 - q.start >= low)


def tile(q: Segment, k: Segment, low: int | None, high: int | None) -> Tile | None:
    """The part of q x k that the band touches; None if it touches nothing."""
    if not touches(q, k, low, high):
        return None
    q_start, q_stop, k_start, k_stop = q.start, q.stop, k.start, k.stop
    if high is not None:
        q_start, k_stop = max(q.start, k.start - high), min(k.stop, q.stop + high)
    if low is not None:
        k_start, q_stop = max(k.start, q.start + low), min(q.stop, k.stop - low)
    diagonal = k_stop - q_stop
    left = -1 if low is None or diagonal - low >= k_stop - k_start - 1 else diagonal - low
    right = -1 if high is None or high - diagonal >= q_stop - q_start - 1 else high - diagonal
    return Tile(
        (q.row + q_start - q.start, q_stop - q_start), (k.row + k_start - k.start, k_stop - k_start), left, right
    )


def _beside(a: Tile, b: Tile) -> Tile | None:
    """One tile for two of the same queries, b's keys behind a's."""
    if a.q != b.q or a.k[0] + a.k[1] != b.k[0] or not a.is_full or b.left >= 0:
        return None
    if b.right >= 0 and b.right < b.q[1] - b.k[1] - 1:  # a key of `a` would fall right of the window
        return None
    return Tile(a.q, (a.k[0], a.k[1] + b.k[1]), -1, b.right)


def _above(a: Tile, b: Tile) -> Tile | None:
    """One tile for two whose keys begin at the same row, b's queries behind a's."""
    if a.q[0] + a.q[1] != b.q[0] or a.k[0] != b.k[0] or a.left >= 0 or b.left >= 0:
        return None
    same_keys = a.is_full and b.is_full and a.k == b.k
    # a.right == 0: a's last query sees its last key and would see no further one.
    same_diagonal = a.right == 0 and b.right >= 0 and b.k[1] - b.q[1] + b.right == a.k[1]
    if not (same_keys or same_diagonal):
        return None
    return Tile((a.q[0], a.q[1] + b.q[1]), b.k, -1, b.right)


def _merged(tiles: Iterable[Tile], merge: object) -> list[Tile]:
    result: list[Tile] = []
    for t in tiles:
        joined = merge(result[-1], t) if result else None  # type: ignore[operator]
        if joined is None:
            result.append(t)
        else:
            result[-1] = joined
    return result


def tiles_of(q: tuple[Segment, ...], k: tuple[Segment, ...], low: int | None, high: int | None) -> list[Tile]:
    """The tiles between the segments of one sequence, as few as the rules above make them.

    A zigzag rank's causal attention to itself becomes one causal tile; to any other rank, one full tile.
    """
    by_query: list[Tile] = []
    for segment in q:
        row = [t for other in k if (t := tile(segment, other, low, high)) is not None]
        by_query += _merged(row, _beside)
    return _merged(by_query, _above)


class Call(NamedTuple):
    """One kernel call: the rows it takes, its packing (None for dense tensors) and its mask."""

    q_rows: slice | Tensor
    k_rows: slice | Tensor
    packing: Packing | None
    causal: bool
    window: tuple[int, int]


class Hop(NamedTuple):
    """What a rank computes with the keys and values of another, and which of their rows it needs for it."""

    k_spans: tuple[Span, ...]  # rows of the other rank's shard, ascending
    calls: tuple[Call, ...]  # `compact`: their k_rows count within those spans, laid end to end

    @property
    def k_length(self) -> int:
        return sum(n for _, n in self.k_spans)


def _disjoint(a: Span, b: Span) -> bool:
    return a[0] + a[1] <= b[0] or b[0] + b[1] <= a[0]


def _spans_of(tiles: list[Tile]) -> list[Span]:
    """The keys that the tiles of one sequence need: the hull of each run of overlapping or touching ones."""
    result: list[Span] = []
    for start, length in sorted(t.k for t in tiles):
        if result and start <= result[-1][0] + result[-1][1]:
            first = result[-1][0]
            result[-1] = (first, max(result[-1][0] + result[-1][1], start + length) - first)
        else:
            result.append((start, length))
    return result


@functools.lru_cache(maxsize=256)
def rows_of(spans: tuple[Span, ...], device: torch.device) -> slice | Tensor:
    """Rows as a slice where they are consecutive, else as an index."""
    merged: list[Span] = []
    for start, length in spans:
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    if not merged:
        return slice(0, 0)
    if len(merged) == 1:
        return slice(merged[0][0], merged[0][0] + merged[0][1])
    return torch.cat([torch.arange(start, start + length) for start, length in merged]).to(device)


def take(t: Tensor, rows: slice | Tensor, dim: int = -3) -> Tensor:
    """The rows of a tensor (..., rows, heads, head_dim): a view for a slice."""
    if isinstance(rows, slice):
        return t.narrow(dim, rows.start, rows.stop - rows.start)
    return t.index_select(dim, rows)


def _call(tiles: list[Tile], packed: bool, device: torch.device) -> Call:
    causal = tiles[0].right == 0
    window = (tiles[0].left, -1 if causal else tiles[0].right)
    packing = None
    if packed:
        lengths_q, lengths_k = [t.q[1] for t in tiles], [t.k[1] for t in tiles]
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device) for lengths in (lengths_q, lengths_k)
        )
        packing = Packing(cu_q, cu_k, max(lengths_q), max(lengths_k))
    q_rows, k_rows = (rows_of(spans, device) for spans in (tuple(t.q for t in tiles), tuple(t.k for t in tiles)))
    return Call(q_rows, k_rows, packing, causal, window)


class _Bucket(NamedTuple):
    """Tiles that may share a call, and those of the sequence being placed."""

    tiles: list[Tile]
    latest: list[tuple[int, Tile]]

    def has_room(self, sequence: int, t: Tile) -> bool:
        """No row of a call may come twice: its results could not be written in one go."""
        return all(s != sequence or (_disjoint(o.q, t.q) and _disjoint(o.k, t.k)) for s, o in self.latest)


@functools.lru_cache(maxsize=1024)
def hop(
    q: tuple[tuple[Segment, ...], ...],
    k: tuple[tuple[Segment, ...], ...],
    rows_q: Rows,
    rows_k: Rows,
    mask: Mask,
    packed: bool,
    compact: bool,
    device: torch.device,
) -> Hop:
    """The hop between the queries in segments `q` and the keys in segments `k`, one tuple a sequence."""
    spans: list[Span] = []
    buckets: dict[tuple[int, int], list[_Bucket]] = {}
    offset = 0
    for sequence, (of_q, of_k) in enumerate(zip(q, k, strict=True)):
        low, high = mask.band(rows_q.lengths[sequence], rows_k.lengths[sequence])
        tiles = tiles_of(of_q, of_k, low, high)
        for start, length in _spans_of(tiles):
            for t in tiles:
                if start <= t.k[0] < start + length:
                    moved = t._replace(k=(t.k[0] - start + offset, t.k[1])) if compact else t
                    _place(buckets, sequence, moved, packed)
            spans.append((start, length))
            offset += length
    calls = tuple(_call(bucket.tiles, packed, device) for of_window in buckets.values() for bucket in of_window)
    return Hop(tuple(spans), calls)


def _place(buckets: dict[tuple[int, int], list[_Bucket]], sequence: int, t: Tile, packed: bool) -> None:
    of_window = buckets.setdefault((t.left, t.right), [])
    if packed:
        for bucket in of_window:
            if bucket.has_room(sequence, t):
                bucket.tiles.append(t)
                bucket.latest[:] = [(s, o) for s, o in bucket.latest if s == sequence]
                bucket.latest.append((sequence, t))
                return
    of_window.append(_Bucket([t], [(sequence, t)]))
