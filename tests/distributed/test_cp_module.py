"""DotProductAttention over sequences that are split over ranks, in TransformerEngine's order."""

from __future__ import annotations

from typing import Any

import pytest
from cp_module import check_checkpointed, check_compiled, check_dense, check_packed, check_refusals
from cp_ranks import Ranks

each_comm = pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
each_heat = pytest.mark.parametrize("hot", [False, True], ids=["cold", "hot"])
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "causal_window": {"window_size": (5, 0)},
    "no_mask": {"attn_mask_type": "no_mask"},
    "no_mask_window": {"attn_mask_type": "no_mask", "window_size": (4, 3)},
}


@each_comm
@each_heat
@pytest.mark.parametrize("mask", MASKS)
def test_dense(four: Ranks, comm: str, mask: str, hot: bool) -> None:
    distances = four.run(check_dense, comm, "sbhd" if hot else "bshd", MASKS[mask], hot)
    assert not hot or min(distances) > 0.1


@each_comm
@each_heat
@pytest.mark.parametrize("window", [None, (4, 0)], ids=["causal", "window"])
def test_packed_with_padding(four: Ranks, comm: str, window: Any, hot: bool) -> None:
    arguments = {"attn_mask_type": "padding_causal", "window_size": window}
    distances = four.run(check_packed, comm, arguments, hot)
    assert not hot or max(distances) > 0.1  # a rank may hold padding alone


def test_checkpointed(two: Ranks) -> None:
    assert min(two.run(check_checkpointed)) > 0.1


def test_compiled(two: Ranks) -> None:
    two.run(check_compiled)


def test_refusals(two: Ranks) -> None:
    two.run(check_refusals)
