"""The cost model counts what is sent and computed."""

from __future__ import annotations

import cp_counting
import pytest
import torch
from cp_cases import BY_NAME, Case
from cp_ranks import Ranks

from softcap_ops import distributed as cp
from softcap_ops._flops import visible_pairs

each_layout = pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
each_comm = pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
_GEMMA = {"seqlen_q": 131072, "heads_q": 16, "heads_kv": 8, "head_dim": 256}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal_gqa", "sliding", "cross_causal", "full"])
@each_layout
@each_comm
def test_bytes_sent(four: Ranks, comm: str, layout: str, name: str, dtype: torch.dtype) -> None:
    four.run(cp_counting.check_bytes, Case(BY_NAME[name], comm, layout), dtype)


@each_layout
@each_comm
@pytest.mark.parametrize("name", ["causal_gqa", "sliding", "packed_causal_gqa"])
def test_flop_counts_add_up(four: Ranks, comm: str, layout: str, name: str) -> None:
    case = Case(BY_NAME[name], comm, layout)
    s = case.sample
    counted = sum(four.run(cp_counting.check_flops, case))
    lengths = s.lengths_q or (s.seqlen_q,) * s.batch
    assert counted == 4 * s.heads_q * s.head_dim * sum(visible_pairs(n, n, s.causal, s.window) for n in lengths)


def test_zigzag_gives_every_rank_the_same_causal_work() -> None:
    costs = [cp.cost(r, 8, comm="p2p", causal=True, **_GEMMA) for r in range(8)]
    assert len({c.forward_flops for c in costs}) == 1
    contiguous = [cp.cost(r, 8, comm="p2p", layout="contiguous", causal=True, **_GEMMA) for r in range(8)]
    assert contiguous[7].forward_flops > 14 * contiguous[0].forward_flops


def test_a_window_sends_only_what_it_reaches() -> None:
    window = {"causal": True, "window": (4095, 0)}
    sliding = cp.cost(3, 8, comm="p2p", layout="contiguous", **window, **_GEMMA)
    assert len(sliding.steps) == 2
    assert sliding.sent_forward == 4095 * 2 * 8 * 256 * 2  # one window of keys and values, to one neighbour
    assert cp.cost(3, 8, comm="all_gather", **window, **_GEMMA).sent_forward > 20 * sliding.sent_forward


@pytest.mark.parametrize(("layout", "part"), [("zigzag", 3 / 4), ("contiguous", 1 / 2)])
def test_a_causal_ring_sends_a_part_of_a_full_one(layout: str, part: float) -> None:
    full, causal = (
        sum(cp.cost(r, 8, comm="p2p", layout=layout, causal=c, **_GEMMA).sent_forward for r in range(8))
        for c in (False, True)
    )
    assert causal == part * full


def test_time_is_the_larger_of_work_and_message_in_every_step() -> None:
    c = cp.cost(0, 4, comm="p2p", seqlen_q=1024, heads_q=8, heads_kv=8, head_dim=64)
    assert c.seconds(1e12, float("inf")) == pytest.approx(c.forward_flops / 1e12)
    assert c.seconds(float("inf"), 1e9) == pytest.approx(c.sent_forward / 1e9)
