"""Every scheme, layout and mask gives what one process gives on the whole sequences: values and gradients."""

from __future__ import annotations

import pytest
import torch
from cp_cases import (
    BY_NAME,
    SAMPLES,
    Case,
    check_as_exact_as_one_process,
    check_lse_loss_of_one_rank,
    check_many_float64,
    errors,
    lse_gradients,
    random_case,
    uncapped_distance,
    zeroed_distance,
)
from cp_ranks import Ranks

each_layout = pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
each_comm = pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
GROUPS_OF_SAMPLES = {
    kind: [s for s in SAMPLES if s.name.startswith(kind)] for kind in ("packed", "padded", "cross", "causal", "sliding")
}
GROUPS_OF_SAMPLES["other"] = [s for s in SAMPLES if not any(s in group for group in GROUPS_OF_SAMPLES.values())]
each_kind = pytest.mark.parametrize("kind", GROUPS_OF_SAMPLES)


def _check(ranks: Ranks, kind: str, comm: str, layout: str, hot: bool) -> None:
    samples = [s for s in GROUPS_OF_SAMPLES[kind] if hot in s.heats]
    wrong = ranks.run(check_many_float64, [Case(s, comm, layout) for s in samples], hot)
    assert not any(wrong), wrong


@each_kind
@each_layout
@each_comm
def test_four_ranks_agree_with_one(four: Ranks, comm: str, layout: str, kind: str) -> None:
    _check(four, kind, comm, layout, hot=True)


@each_kind
@each_layout
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_two_ranks_agree_with_one(two: Ranks, comm: str, layout: str, kind: str) -> None:
    _check(two, kind, comm, layout, hot=False)


@each_layout
@each_comm
@pytest.mark.parametrize("name", ["causal_gqa", "sliding", "padded_causal"])
def test_bfloat16_is_as_exact_as_one_process(four: Ranks, comm: str, layout: str, name: str) -> None:
    check_as_exact_as_one_process(four.run(errors, Case(BY_NAME[name], comm, layout), True, torch.bfloat16))


@each_layout
@each_comm
def test_the_cap_is_on(four: Ranks, comm: str, layout: str) -> None:
    assert min(four.run(uncapped_distance, Case(BY_NAME["causal"], comm, layout))) > 0.1


@each_comm
@pytest.mark.parametrize("zeroed", range(4))
def test_gradients_with_the_keys_of_one_rank_zeroed(four: Ranks, comm: str, zeroed: int) -> None:
    four.run(zeroed_distance, Case(BY_NAME["causal_gqa"], comm, "zigzag"), zeroed)


@each_comm
def test_a_loss_on_the_lse_of_one_rank(four: Ranks, comm: str) -> None:
    four.run(check_lse_loss_of_one_rank, Case(BY_NAME["causal_gqa"], comm, "zigzag"))


@each_comm
def test_no_gradient_of_lse_where_none_is_asked_for(four: Ranks, comm: str) -> None:
    case = Case(BY_NAME["causal_gqa"], comm, "zigzag")
    assert four.run(lse_gradients, case, False) == [0] * 4
    with_lse = four.run(lse_gradients, case, True)
    assert min(with_lse) >= 1 if "a2a" in comm else with_lse == [0] * 4


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_random_cases_agree_with_one_process(four: Ranks, first: int) -> None:
    wrong = four.run(check_many_float64, [random_case(seed) for seed in range(first, first + 30)], False)
    assert not any(wrong), wrong
