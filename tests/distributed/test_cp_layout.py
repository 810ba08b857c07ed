"""Layouts, tiles and merging, in one process: no group needed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softcap_ops import distributed as cp
from softcap_ops import reference
from softcap_ops.distributed import tiles
from softcap_ops.distributed.interleave import Interleave
from softcap_ops.distributed.layout import Rows, Segment
from softcap_ops.distributed.merge import merge

layouts = st.sampled_from(["zigzag", "contiguous"])


def test_zigzag_gives_rank_r_chunks_r_and_its_mirror() -> None:
    x = torch.arange(16).view(1, 16)
    shards = [cp.split_sequence(x, rank=r, ranks=4).tolist()[0] for r in range(4)]
    assert shards == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_contiguous_gives_rank_r_the_rth_part() -> None:
    x = torch.arange(8).view(1, 8)
    shards = [cp.split_sequence(x, rank=r, ranks=4, layout="contiguous").tolist()[0] for r in range(4)]
    assert shards == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(layouts, st.integers(1, 5), st.lists(st.integers(0, 13), max_size=4))
def test_pad_split_join_unpad_is_the_identity(layout: str, ranks: int, lengths: list[int]) -> None:
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    x = torch.arange(sum(lengths) * 2).view(-1, 2)
    padded, cu_padded = cp.pad_sequences(x, cu, ranks=ranks, layout=layout, value=-1)
    assert all(n % cp.required_multiple(ranks, layout) == 0 for n in cu_padded.diff().tolist())
    options = {"layout": layout, "dim": 0, "cu_seqlens_padded": cu_padded}
    shards = [cp.split_sequence(padded, rank=r, ranks=ranks, **options) for r in range(ranks)]
    assert len({s.shape for s in shards}) == 1
    assert torch.equal(cp.unpad_sequences(cp.join_sequence(shards, **options), cu, cu_padded), x)


def test_positions_are_those_in_each_sequence() -> None:
    assert cp.shard_positions(rank=1, ranks=2, seqlen=8).tolist() == [2, 3, 4, 5]
    cu = torch.tensor([0, 4, 12], dtype=torch.int32)
    assert cp.shard_positions(rank=0, ranks=2, cu_seqlens_padded=cu).tolist() == [0, 3, 0, 1, 6, 7]


def test_lengths_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a multiple of 4 for 2 ranks in layout 'zigzag', got 6"):
        cp.split_sequence(torch.zeros(1, 6), rank=0, ranks=2)
    cu = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="sequence 1, 3, must be a multiple of 2"):
        cp.split_sequence(torch.zeros(5), rank=0, ranks=2, layout="contiguous", dim=0, cu_seqlens_padded=cu)
    with pytest.raises(ValueError, match="layout must be one of"):
        cp.required_multiple(2, "striped")


@given(layouts, st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.data())
def test_consecutive_ranks_make_a_shard_of_the_outer_layout(
    layout: str, members: int, outer: int, lengths: list[int], data: st.DataObject
) -> None:
    padded = tuple(n * 2 * members * outer for n in lengths)
    packed = data.draw(st.booleans()) or len(padded) > 1
    outer_rank = data.draw(st.integers(0, outer - 1))
    cu = torch.tensor([0, *itertools.accumulate(padded)])
    x = torch.arange(sum(padded) * 4.0).view(-1, 2, 2)
    options = {"layout": layout, "dim": 0, "cu_seqlens_padded": cu}
    inner = [
        cp.split_sequence(x, rank=outer_rank * members + i, ranks=members * outer, **options) for i in range(members)
    ]
    rows = inner[0].shape[0]
    order = Interleave.of(padded, rows, layout, members, outer_rank, outer, packed)
    joined = order.join(torch.stack(inner))
    assert torch.equal(joined, cp.split_sequence(x, rank=outer_rank, ranks=outer, **options))
    assert torch.equal(order.split(joined), torch.stack(inner))


# ---- tiles ---------------------------------------------------------------------------------------------------


def _mask_of(t: tiles.Tile) -> torch.Tensor:
    seen = reference.visible(t.q[1], t.k[1], False, (t.left, t.right))
    return torch.ones(t.q[1], t.k[1], dtype=torch.bool) if seen is None else seen


windows = st.sampled_from([-1, 0, 1, 2, 5, 9, 40])


@given(
    layouts, st.integers(1, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 7), st.integers(0, 7),
    st.booleans(), windows, windows,
)  # fmt: skip
def test_the_tiles_of_all_ranks_are_the_mask(
    layout: str, ranks: int, q: int, k: int, cut_q: int, cut_k: int, causal: bool, left: int, right: int
) -> None:
    """Every visible pair lies in exactly one tile, no other pair in any, for padded lengths too."""
    padded_q, padded_k = q * 2 * ranks, k * 2 * ranks
    rows_q = Rows((max(0, padded_q - cut_q),), (padded_q,))
    rows_k = Rows((max(0, padded_k - cut_k),), (padded_k,))
    mask = tiles.Mask(causal, (left, right))
    low, high = mask.band(rows_q.lengths[0], rows_k.lengths[0])
    counted = torch.zeros(padded_q, padded_k, dtype=torch.int64)
    positions_q, positions_k = (
        [cp.shard_positions(rank=r, ranks=ranks, layout=layout, seqlen=n) for r in range(ranks)]
        for n in (padded_q, padded_k)
    )
    for rank, source in itertools.product(range(ranks), repeat=2):
        of_q = rows_q.segments(layout, rank, ranks)[0]
        of_k = rows_k.segments(layout, source, ranks)[0]
        found = tiles.tiles_of(of_q, of_k, low, high)
        assert bool(found) == any(tiles.touches(a, b, low, high) for a in of_q for b in of_k)
        for t in found:
            rows = positions_q[rank][t.q[0] : t.q[0] + t.q[1]]
            columns = positions_k[source][t.k[0] : t.k[0] + t.k[1]]
            counted[rows[:, None], columns[None]] += _mask_of(t).long()
            assert _mask_of(t)[-1].any()
            assert _mask_of(t)[:, -1].any()
    expected = torch.zeros_like(counted)
    seen = reference.visible(rows_q.lengths[0], rows_k.lengths[0], causal, (left, right))
    expected[: rows_q.lengths[0], : rows_k.lengths[0]] = 1 if seen is None else seen.long()
    assert torch.equal(counted, expected)


def test_causal_zigzag_takes_one_call_a_step() -> None:
    rows = Rows((64,), (64,))
    calls = {}
    for rank, source in itertools.product(range(4), repeat=2):
        found = tiles.tiles_of(rows.segments("zigzag", rank, 4)[0], rows.segments("zigzag", source, 4)[0], None, 0)
        calls[rank, source] = [(t.q, t.k, t.right) for t in found]
    assert calls[2, 2] == [((0, 16), (0, 16), 0)]
    assert calls[2, 1] == [((0, 16), (0, 8), -1)]  # all queries, the first half of the keys
    assert calls[1, 2] == [((8, 8), (0, 16), -1)]  # the second half of the queries, all keys


def test_a_window_reaches_few_steps() -> None:
    segments = Rows((64,), (64,)).segments
    reached = {
        (rank, source)
        for rank, source in itertools.product(range(4), repeat=2)
        if tiles.tiles_of(segments("contiguous", rank, 4)[0], segments("contiguous", source, 4)[0], -5, 0)
    }
    assert reached == {(0, 0), (1, 1), (2, 2), (3, 3), (1, 0), (2, 1), (3, 2)}
    (t,) = tiles.tiles_of((Segment(16, 32, 0),), (Segment(0, 16, 0),), -5, 0)
    assert (t.q, t.k) == ((0, 5), (11, 5))  # only the rows that the window reaches


# ---- merging -------------------------------------------------------------------------------------------------


def test_merging_is_attention_over_both_parts() -> None:
    q, k, v = (torch.randn(2, 6, 3, 4, dtype=torch.float64) for _ in range(3))
    parts = [reference.attention(q, k[:, s], v[:, s], softcap=2.0) for s in (slice(0, 2), slice(2, 6))]
    out, lse = merge(*parts[0], *parts[1])
    expected = reference.attention(q, k, v, softcap=2.0)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])


def test_merging_with_nothing() -> None:
    out, lse = torch.randn(1, 3, 1, 2), torch.randn(1, 1, 3)
    nothing = torch.zeros(1, 3, 1, 2), torch.full((1, 1, 3), -math.inf)
    for a, b in ((merge(out, lse, *nothing), (out, lse)), (merge(*nothing, out, lse), (out, lse))):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    both = merge(*nothing, *nothing)
    assert torch.equal(both[0], nothing[0])
    assert torch.equal(both[1], nothing[1])
