"""Megatron-Core with softcap_ops as core_attention trains as with its own unfused attention, capped.

The rest of Megatron is as it comes, on a CPU with a few of its calls of CUDA answered (tests/tiny_megatron.py).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from cp_ranks import Ranks
from megatron_ranks import (
    HALF,
    check_context_parallel_masks,
    check_gemma2_layers,
    check_layers,
    check_packed,
    check_packed_group_of_the_batch,
    check_refusals,
    check_static_inference,
    check_training,
)

pytestmark = pytest.mark.filterwarnings("ignore")
each_heat = pytest.mark.parametrize("hot", [False, True], ids=["cold", "hot"])
WINDOWS: dict[str, dict[str, Any]] = {"full": {}, "half_sliding": HALF}


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.kill()


def _check(ranks: Ranks, tp: int, cp: int, hot: bool, **overrides: Any) -> None:
    distances = ranks.run(check_training, tp, cp, hot, overrides)
    assert not hot or min(distances) > 1e-3, "the cap does not bite"


@each_heat
@pytest.mark.parametrize("window", WINDOWS)
def test_training(one: Ranks, window: str, hot: bool) -> None:
    _check(one, 1, 1, hot, **WINDOWS[window])


def test_training_with_core_attention_recomputed(one: Ranks) -> None:
    _check(one, 1, 1, True, recompute_granularity="selective", recompute_modules=["core_attn"])


@each_heat
def test_two_way_tensor_parallel(two: Ranks, hot: bool) -> None:
    _check(two, 2, 1, hot, **HALF)


@each_heat
def test_two_way_context_parallel(two: Ranks, hot: bool) -> None:
    _check(two, 1, 2, hot, **HALF)


def test_layers(one: Ranks) -> None:
    one.run(check_layers)


def test_packed_sequences(one: Ranks) -> None:
    one.run(check_packed)


def test_packed_sequences_with_a_group_of_their_own(two: Ranks) -> None:
    two.run(check_packed_group_of_the_batch)


def test_masks_under_context_parallelism(two: Ranks) -> None:
    two.run(check_context_parallel_masks)


def test_static_inference(one: Ranks) -> None:
    one.run(check_static_inference)


def test_refusals(one: Ranks) -> None:
    one.run(check_refusals)


def test_gemma2_layers_are_those_of_transformers(one: Ranks) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    one.run(check_gemma2_layers)


def test_gemma2_layer_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Bridge needs a GPU to be imported: a stand-in gives the spec that ours is made of."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from softcap_ops.integrations import megatron

    name = "megatron.bridge.models.gemma"
    for module in ("megatron.bridge", "megatron.bridge.models", name):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    provider = types.ModuleType(f"{name}.gemma2_provider")
    original = get_gpt_layer_local_spec()
    provider.gemma2_layer_spec = lambda config: original  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{name}.gemma2_provider", provider)
    monkeypatch.setattr(sys.modules[name], "gemma2_provider", provider, raising=False)
    spec = megatron.gemma2_layer_spec(None)
    core = spec.submodules.self_attention.submodules.core_attention
    assert core is megatron.SoftcapGemma2DotProductAttention
    assert original.submodules.self_attention.submodules.core_attention is not core
