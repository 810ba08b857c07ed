"""The ops under torch.compile, checkpointing, autocast, DTensor and opcheck."""

from __future__ import annotations

import cp_compiled
import pytest
from cp_cases import BY_NAME, Case
from cp_ranks import Ranks

each_comm = pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])


@each_comm
@pytest.mark.parametrize("name", ["causal_gqa", "sliding", "padded_causal"])
def test_compiled_whole_with_one_node(two: Ranks, comm: str, name: str) -> None:
    two.run(cp_compiled.check_compiled, Case(BY_NAME[name], comm, "zigzag"))


def test_compiled_two_level(four: Ranks) -> None:
    four.run(cp_compiled.check_compiled, Case(BY_NAME["causal_gqa"], "a2a+p2p", "zigzag"))


def test_another_cap_makes_no_new_graph(two: Ranks) -> None:
    two.run(cp_compiled.check_recompiles_for_no_cap)


@each_comm
def test_checkpointed(two: Ranks, comm: str) -> None:
    two.run(cp_compiled.check_checkpointed, Case(BY_NAME["sliding_gqa"], comm, "zigzag"))


def test_lse_that_was_not_asked_for_has_no_gradient(two: Ranks) -> None:
    two.run(cp_compiled.check_lse_that_was_not_asked_for)


def test_each_tensor_is_saved_once(two: Ranks) -> None:
    two.run(cp_compiled.check_saved_once)


@each_comm
def test_opcheck(two: Ranks, comm: str) -> None:
    two.run(cp_compiled.check_opcheck, comm)


def test_autocast(two: Ranks) -> None:
    two.run(cp_compiled.check_autocast)


def test_what_is_not_offered_is_refused(two: Ranks) -> None:
    two.run(cp_compiled.check_refusals)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_form_of_group(two: Ranks, compiled: bool) -> None:
    two.run(cp_compiled.check_groups, compiled)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@each_comm
def test_dtensors_sharded_on_the_sequence(two: Ranks, comm: str, compiled: bool) -> None:
    two.run(cp_compiled.check_dtensor, comm, compiled)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_gathered_shards_join(four: Ranks, layout: str) -> None:
    four.run(cp_compiled.roundtrip, layout)
