"""A wrong call raises on every rank, and nothing hangs: the pool's watchdog fails a test that would."""

from __future__ import annotations

import cp_misuse
import pytest
from cp_misuse import DISAGREEMENTS, MISUSES
from cp_ranks import Ranks

SECONDS = 60  # a hang is longer


@pytest.mark.parametrize("name", MISUSES)
def test_a_mistake_of_all_ranks_raises_on_all(two: Ranks, name: str) -> None:
    for result in two.run(cp_misuse.everywhere, name, timeout=SECONDS):
        assert MISUSES[name][1] in result
        errors = ("ValueError: ", "TypeError: ", "UnsupportedError: ", "NotImplementedError: ")
        assert result.startswith(errors), result


@pytest.mark.parametrize("name", MISUSES)
def test_a_mistake_of_one_rank_raises_on_all(two: Ranks, name: str) -> None:
    right, wrong = two.run(cp_misuse.on_one_rank, name, 1, False, timeout=SECONDS)
    assert MISUSES[name][1] in wrong
    assert right.startswith("ValueError: softcap_ops: rank 1 refused this call: ")
    assert MISUSES[name][1] in right


@pytest.mark.parametrize("name", ["odd length", "softcap", "batches differ"])
def test_a_mistake_of_one_rank_raises_on_all_compiled(two: Ranks, name: str) -> None:
    right, wrong = two.run(cp_misuse.on_one_rank, name, 0, True, timeout=SECONDS)
    for result in (right, wrong):
        assert result.startswith("ValueError: ")
        assert MISUSES[name][1] in result


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_raises_on_all_ranks(two: Ranks, name: str) -> None:
    for result in two.run(cp_misuse.disagreeing, name, False, timeout=SECONDS):
        assert isinstance(result, str), "the call went through"
        assert result.startswith("ValueError: softcap_ops: the ranks of the group disagree on")
        assert DISAGREEMENTS[name][1] in result


@pytest.mark.parametrize("name", ["softcap", "length"])
def test_disagreement_raises_on_all_ranks_compiled(two: Ranks, name: str) -> None:
    for result in two.run(cp_misuse.disagreeing, name, True, timeout=SECONDS):
        assert DISAGREEMENTS[name][1] in result


@pytest.mark.parametrize("wrong_rank", range(4))
def test_disagreement_reaches_every_rank_of_two_levels(four: Ranks, wrong_rank: int) -> None:
    for result in four.run(cp_misuse.two_level_disagreement, wrong_rank, timeout=SECONDS):
        assert "ValueError: softcap_ops: the ranks of the group disagree on softcap" in result


def test_a_rank_outside_the_group_is_refused(two: Ranks) -> None:
    inside, outside = two.run(cp_misuse.outside_the_group, timeout=SECONDS)
    assert not isinstance(inside, str)
    assert outside == "ValueError: group: this rank is not a member of the process group"


def test_a_mesh_dimension_that_is_not_this_ranks_is_refused(two: Ranks) -> None:
    outside, inside = two.run(cp_misuse.wrong_mesh_dimensions, timeout=SECONDS)
    for results in (outside, inside):
        assert results[0].startswith("ValueError: group: the DeviceMesh has no dimension 'dp'")
        assert results[1].startswith("ValueError: group: the DeviceMesh has no dimension 1")
    assert outside[2] == "ValueError: group: this rank is not a member of the DeviceMesh"
    assert not isinstance(inside[2], str)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_group_that_dtensors_are_not_sharded_over_is_refused(four: Ranks, compiled: bool) -> None:
    for result in four.run(cp_misuse.another_mesh_dimension, compiled, timeout=SECONDS):
        assert "group must be the mesh dimension over which q is sharded" in result


def test_two_levels_after_other_groups(four: Ranks) -> None:
    results = four.run(cp_misuse.two_levels_after_other_groups, timeout=SECONDS)
    assert results[0] == [[0, 1], [0, 2], [0, 1, 3], [0], [0], [0, 1, 3]]
    assert results[2] == [[2, 3], [0, 2], [], [], [], []]
    assert results[3] == [[2, 3], [1, 3], [0, 1, 3], [3], [3], [0, 1, 3]]


def test_what_is_no_group_is_refused(two: Ranks) -> None:
    for none, number, unknown, triple in two.run(cp_misuse.wrong_groups, timeout=SECONDS):
        assert none.startswith("TypeError: group must be a ProcessGroup")
        assert number.startswith("TypeError: group must be a ProcessGroup")
        assert unknown == "ValueError: group: this rank knows no process group named 'no such group'"
        assert triple.startswith("TypeError: group must be a ProcessGroup")


def test_agreement_is_one_message(two: Ranks) -> None:
    for first, second in two.run(cp_misuse.collectives_of_repeated_calls):
        assert (first, second) == (1, 1)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_lengths_that_the_ranks_do_not_share(four: Ranks, layout: str) -> None:
    """case 67"""
    expected = "disagree on the shape of q" if layout == "contiguous" else "must hold an even number of positions"
    for result in four.run(cp_misuse.uneven_lengths, layout, timeout=SECONDS):
        assert result.startswith("ValueError: ")
        assert expected in result
