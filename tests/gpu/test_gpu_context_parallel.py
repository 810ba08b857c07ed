"""Context parallelism on GPU kernels.

Four ranks share one GPU, their messages going through gloo and host memory; with two GPUs, two ranks of NCCL as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

from cp_cases import (
    BY_NAME,
    Case,
    check_as_exact_as_one_process,
    check_same_compiled,
    errors,
    uncapped_distance,
)
from cp_ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes at a time

NAMES = (
    "full", "causal", "causal_gqa", "sliding", "sliding_gqa", "window_both", "cross_causal", "cross_more_queries",
    "packed_causal_gqa", "packed_sliding", "padded_causal", "padded_cross_causal",
)  # fmt: skip


_GROUPS = ["four over gloo", "two over nccl"]


@pytest.fixture(scope="module", params=_GROUPS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param == _GROUPS[1] and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(4) if request.param == _GROUPS[0] else Ranks(2, "nccl")
    yield ranks
    ranks.kill()


def _case(name: str, comm: str, layout: str, backend: str, head_dim: int = 64) -> Case:
    sample = BY_NAME[name]
    scale = 8  # sequences long enough for several tiles of a kernel
    longer = {
        field: None if value is None else value * scale if isinstance(value, int) else tuple(n * scale for n in value)
        for field in ("seqlen_q", "seqlen_k", "lengths_q", "lengths_k")
        for value in (getattr(sample, field),)
    }
    return Case(replace(sample, name=f"{name}_gpu", head_dim=head_dim, **longer), comm, layout, "cuda", backend)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("name", NAMES)
def test_as_exact_as_one_process(ranks: Ranks, backend: str, name: str, comm: str, layout: str) -> None:
    per_rank = ranks.run(errors, _case(name, comm, layout, backend), True, torch.bfloat16)
    check_as_exact_as_one_process(per_rank)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("comm", ["p2p", "a2a"])
def test_head_dims_of_gemma(ranks: Ranks, backend: str, comm: str, head_dim: int) -> None:
    for name in ("causal_gqa", "sliding_gqa"):
        case = _case(name, comm, "zigzag", backend, head_dim)
        check_as_exact_as_one_process(ranks.run(errors, case, True, torch.bfloat16))


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_the_cap_is_on(ranks: Ranks, backend: str, comm: str) -> None:
    if backend == "hopper":
        pytest.skip("hopper refuses the call without a cap that this compares with")
    assert min(ranks.run(uncapped_distance, _case("causal", comm, "zigzag", backend))) > 0.1


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_compiled(ranks: Ranks, backend: str, comm: str) -> None:
    ranks.run(check_same_compiled, _case("causal_gqa", comm, "zigzag", backend), torch.bfloat16)
