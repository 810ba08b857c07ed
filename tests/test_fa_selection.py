"""Which FlashAttention serves which problem: Problem objects and emulated builds, no GPU."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import fake_flash
import pytest
import torch

from softcap_ops import UnsupportedError, available_backends, backends
from softcap_ops._arguments import Options, Packing, resolve
from softcap_ops.backends import Problem, _flash, fa2, fa3, select

HOPPER = Problem(
    device_type="cuda",
    device_index=0,
    capability=(9, 0),
    dtype=torch.bfloat16,
    head_dim=64,
    heads_q=4,
    heads_kv=2,
    packed=False,
    softcap=50.0,
    causal=True,
    window=(-1, -1),
    deterministic=False,
    needs_backward=True,
)
TOKENSPEED = {"SOFTCAP": True, "BACKWARD": True, "FP16": False, "LOCAL": False}
FA3_FWD = {"SOFTCAP": False, "BACKWARD": True, "FP16": True, "LOCAL": True, "VARLEN": False}


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake_flash.forget(monkeypatch)
    monkeypatch.delenv("SOFTCAP_OPS_FA3", raising=False)
    yield
    monkeypatch.undo()
    fake_flash.clear_caches()


def but(**changes: Any) -> Problem:
    return dataclasses.replace(HOPPER, **changes)


def selected(problem: Problem, name: str | None = None) -> str:
    return select(problem, name).NAME


def refusal(problem: Problem, name: str | None = None) -> str:
    with pytest.raises(UnsupportedError) as caught:
        select(problem, name)
    return str(caught.value)


# ---- opting in -------------------------------------------------------------------------------------------------


def test_fa2_serves_where_fa3_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    calls = fake_flash.install_fa3(monkeypatch).calls
    assert selected(HOPPER) == "fa2"
    assert not calls, "FA3 was tried without being asked for"
    assert selected(HOPPER, "fa3") == "fa3"


def test_the_variable_opts_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    fake_flash.install_fa3(monkeypatch)
    monkeypatch.setenv("SOFTCAP_OPS_FA3", "1")
    assert selected(HOPPER) == "fa3"
    assert selected(but(capability=(8, 0))) == "fa2"
    assert "compute capability 9.0" in refusal(but(capability=(10, 0)), "fa3")


# ---- what is outside every build -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "bfloat16 and float16 only, got float32"),
        ({"dtype": torch.float64}, "bfloat16 and float16 only, got float64"),
        ({"head_dim": 264}, "head_dim up to 256, got 264"),
        ({"device_type": "cpu", "device_index": None, "capability": None}, "CUDA tensors only, got cpu"),
        ({"softcap": 1e35}, "float32's range"),
        ({"over_grid": True}, "65535"),
    ],
)
@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_limits(monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any], reason: str) -> None:
    fake_flash.install_fa2(monkeypatch)
    fake_flash.install_fa3(monkeypatch)
    assert reason in refusal(but(**changes), name)


def test_limits_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    fake_flash.install_fa3(monkeypatch)
    assert "8.0 (Ampere) or newer, this GPU has 7.5" in refusal(but(capability=(7, 5)), "fa2")
    assert "not deterministic at head_dim above 192" in refusal(but(head_dim=256, deterministic=True), "fa3")
    assert selected(but(head_dim=256, deterministic=True, needs_backward=False), "fa3") == "fa3"
    assert selected(but(head_dim=256, deterministic=True)) == "fa2"


def test_a_cpu_problem_imports_no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn_3"):
        monkeypatch.setitem(sys.modules, name, _Bomb(name))
    problem = but(device_type="cpu", device_index=None, capability=None)
    assert set(backends.refusals(problem)) == {"hopper", "fa3", "fa2", "triton", "cpu"}


class _Bomb:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        raise AssertionError(f"{self.__name__} was imported")


# ---- builds in the wild ----------------------------------------------------------------------------------------


def test_nothing_installed() -> None:
    message = refusal(HOPPER)
    assert "fa2: flash_attn cannot be imported: ModuleNotFoundError" in message
    assert "cpu: CPU tensors only" in message
    assert "not installed (neither flash_attn_3 nor fa3_fwd can be imported)" in refusal(HOPPER, "fa3")


def test_fa2_older_than_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    """case 79: a version without the keyword is refused at selection, with the version needed."""
    calls = fake_flash.install_fa2(monkeypatch, version="2.5").calls
    assert "flash_attn 2.5.0 has no" in (message := refusal(HOPPER))
    assert "flash-attn >= 2.6 is needed" in message
    assert not calls
    assert "2.6" in str(available_backends()["fa2"])


@pytest.mark.parametrize("version", ["2.6", "2.8"])
def test_both_parameter_orders(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """case 78."""
    fake_flash.install_fa2(monkeypatch, version=version)
    for packed in (False, True):
        assert selected(but(packed=packed, window=(7, 3))) == "fa2"


def test_fa2_built_without_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    """case 80: only a real call tells; it is made once, and the cap turned off is still served."""
    calls = fake_flash.install_fa2(monkeypatch, softcap="raises").calls
    message = refusal(HOPPER)
    assert "does not support tanh softcapping" in message
    refusal(HOPPER)
    assert len(calls) == 1, "tried again"
    assert selected(but(softcap=0.0)) == "fa2"


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_a_build_that_ignores_softcap(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """case 4: the keyword is taken and dropped."""
    fake_flash.install_fa2(monkeypatch, softcap="ignored")
    fake_flash.install_fa3(monkeypatch, softcap="ignored")
    assert "this build drops softcap" in refusal(HOPPER, name)
    assert "this build drops softcap" in refusal(but(packed=True, needs_backward=False), name)


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_a_build_without_backward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """case 7: refused before the forward when a gradient will be needed; inference still works."""
    fake_flash.install_fa2(monkeypatch, backward="raises")
    fake_flash.install_fa3(monkeypatch, backward="raises")
    assert "does not support backward" in refusal(HOPPER, name)
    assert selected(but(needs_backward=False), name) == name


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_a_backward_that_forgets_the_factor(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """case 6: 1 - tanh^2 left out of the gradient."""
    fake_flash.install_fa2(monkeypatch, backward="no_factor")
    fake_flash.install_fa3(monkeypatch, backward="no_factor")
    assert "wrong dq" in refusal(HOPPER, name)


def test_head_dim_256_backward_on_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """case 31: the message names GPU, head_dim and what works."""
    fake_flash.install_fa2(monkeypatch, max_backward_head_dim=192)
    gpu = but(capability=(8, 6), head_dim=256)
    message = refusal(gpu)
    assert "head_dim 256, with backward on compute capability (8, 6)" in message
    assert selected(dataclasses.replace(gpu, needs_backward=False)) == "fa2"
    assert selected(dataclasses.replace(gpu, head_dim=192)) == "fa2"


def test_lse_in_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """case 69."""
    fake_flash.install_fa2(monkeypatch, lse="padded")
    assert "another FlashAttention's layout" in refusal(HOPPER)


def test_an_installation_that_dies_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name in ("flash_attn", "flash_attn_3"):
                raise ImportError(f"{name}.so: undefined symbol: _ZN3c105ErrorC2E")

    for name in ("flash_attn", "flash_attn_3"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    for name in ("fa2", "fa3"):
        with pytest.raises(UnsupportedError, match="undefined symbol") as caught:
            select(HOPPER, name)
        assert isinstance(caught.value.__cause__, ImportError)
    assert "undefined symbol" in refusal(HOPPER)
    assert "undefined symbol" in str(available_backends()["fa2"])


def test_tokenspeed_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import names of FA3, softcap and backward compiled out: known from its flags, without a call."""
    calls = fake_flash.install_fa3(monkeypatch, flags=TOKENSPEED, softcap="raises", backward="raises").calls
    message = refusal(HOPPER, "fa3")
    assert "no softcap and no backward (FLASHATTENTION_DISABLE_SOFTCAP and FLASHATTENTION_DISABLE_BACKWARD)" in message
    assert not calls


def test_tokenspeed_fa3_without_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa3(monkeypatch, softcap="raises", backward="raises")
    assert "does not support tanh softcapping" in refusal(HOPPER, "fa3")


def test_fa3_fwd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward only, bfloat16 only, no window; inside those limits it serves."""
    fake_flash.install_fa3(monkeypatch, "fa3_fwd", FA3_FWD, backward="raises")
    for packed in (False, True):
        assert selected(but(needs_backward=False, packed=packed), "fa3") == "fa3"
    assert "no backward (FLASHATTENTION_DISABLE_BACKWARD)" in refusal(HOPPER, "fa3")
    assert "no float16" in refusal(but(needs_backward=False, dtype=torch.float16), "fa3")
    assert "no window" in refusal(but(needs_backward=False, window=(7, -1)), "fa3")
    assert fa3._build().namespace == "fa3_fwd"


def test_fa3_fwd_beside_tokenspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa3(monkeypatch, flags=TOKENSPEED)
    fake_flash.install_fa3(monkeypatch, "fa3_fwd", FA3_FWD)
    assert selected(but(needs_backward=False), "fa3") == "fa3"
    assert fa3._build().namespace == "fa3_fwd"


def test_another_schema_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa3(monkeypatch)
    monkeypatch.setattr(torch.ops.flash_attn_3, "fwd", fake_flash.FakeOp(None, "q k v softmax_scale"))
    assert "lacks arguments that FlashAttention-3 has" in refusal(HOPPER, "fa3")


# ---- probing ---------------------------------------------------------------------------------------------------


def test_one_probe_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_flash.install_fa2(monkeypatch).calls
    for softcap in (30.0, 50.0):
        for heads in (2, 4):
            select(but(softcap=softcap, heads_q=heads))
    assert calls == ["forward", "backward"]
    select(but(needs_backward=False))
    select(but(packed=True))
    assert calls[2:] == ["forward", "varlen_forward", "backward"]


def test_no_probe_in_a_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """case 80: what is known serves; what is not is refused with the remedy, and tried once the capture is over."""
    calls = fake_flash.install_fa2(monkeypatch).calls
    select(HOPPER)
    known = len(calls)
    monkeypatch.setattr(_flash, "_capturing", lambda probe: True)
    assert selected(but(softcap=30.0)) == "fa2"
    assert "Warm up: run the call once before the capture" in refusal(but(packed=True))
    assert len(calls) == known
    monkeypatch.setattr(_flash, "_capturing", lambda probe: False)
    assert selected(but(packed=True)) == "fa2"


def test_out_of_memory_says_nothing_about_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    backend_forward = _flash.forward

    def out_of_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(_flash, "forward", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        select(HOPPER)
    monkeypatch.setattr(_flash, "forward", backend_forward)
    assert selected(HOPPER) == "fa2"


def test_the_probe_is_blind_to_the_callers_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        assert selected(HOPPER) == "fa2"


def test_the_probe_leaves_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    before = torch.get_rng_state()
    select(HOPPER)
    assert torch.equal(torch.get_rng_state(), before)


# ---- the problem -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [
        (False, (-1, -1), (False, (-1, -1))),
        (False, (3, 2), (False, (3, 2))),
        (False, (-1, 0), (True, (-1, -1))),
        (False, (4, 0), (True, (4, -1))),
        (True, (4, 7), (True, (4, -1))),
        (True, (19, -1), (True, (-1, -1))),
        (False, (18, 9), (False, (18, -1))),
        (False, (500, 500), (False, (-1, -1))),
    ],
)
def test_a_window_that_hides_nothing_is_none(causal: bool, window: tuple[int, int], expected: Any) -> None:
    q, k = torch.zeros(2, 10, 4, 8), torch.zeros(2, 20, 2, 8)
    p = resolve(Options(50.0, None, causal, *window), 8)
    problem = Problem.of(q, k, None, p, needs_backward=False)
    assert (problem.causal, problem.window) == expected
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = Problem.of(q.flatten(0, 1), k.flatten(0, 1), Packing(cu, cu, 10, 20), p, needs_backward=False)
    assert (packed.causal, packed.window, packed.packed) == (*expected, True)


def test_no_window_is_too_wide_for_a_kernel() -> None:
    """FlashAttention takes its sides as 32-bit integers."""
    assert resolve(Options(50.0, None, False, 2**31, 2**62), 8).window == (2**30, 2**30)
    assert resolve(Options(50.0, None, False, -1, 7), 8).window == (-1, 7)


def test_explain_names_each_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    text = backends.explain(HOPPER)
    assert text.splitlines()[0] == "would run on: fa2"
    assert "opt-in: set SOFTCAP_OPS_FA3=1" in text
    assert "would run on: fa3" not in backends.explain(HOPPER, "fa3")


# ---- decoding --------------------------------------------------------------------------------------------------


DECODE = dataclasses.replace(HOPPER, cached=True, needs_backward=False)


def but_decode(**changes: Any) -> Problem:
    return dataclasses.replace(DECODE, **changes)


@pytest.mark.parametrize("changes", [{}, {"block_size": 256}, {"leftpad": True}, {"window": (9, -1)}], ids=str)
def test_decode_is_tried_once_a_kind(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    calls = fake_flash.install_fa2(monkeypatch).calls
    for _ in range(2):
        assert selected(but_decode(**changes)) == "fa2"
        backends.select.cache_clear()
    assert calls == ["decode"] * 2, "one query, and several"


@pytest.mark.parametrize("name", ["fa2", "fa3"])
@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"softcap": "ignored"}, "drops softcap"),
        ({"softcap": "raises"}, "does not support tanh softcapping"),
        ({"decode": "first sequence"}, "a trial call at 1 queries on a cache returned a wrong result"),
        ({"decode": "absent"}, "has no flash_attn_with_kvcache with softcap|lacks the arguments of a cache"),
    ],
    ids=["ignored", "raises", "first_sequence", "absent"],
)
def test_decode_builds_that_fail(
    monkeypatch: pytest.MonkeyPatch, faults: dict[str, Any], reason: str, name: str
) -> None:
    """cases 79, 80, 86: a build that drops the cap, or folds all sequences onto the first, is found out."""
    (fake_flash.install_fa2 if name == "fa2" else fake_flash.install_fa3)(monkeypatch, **faults)
    assert re.search(reason, refusal(DECODE, name))
    if "decode" in faults:
        assert selected(but(needs_backward=False), name) == name, "the other calls are not touched"


def test_decode_without_softcap_in_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_flash.install_fa2(monkeypatch, decode="no softcap").calls
    assert "has no flash_attn_with_kvcache with softcap" in refusal(DECODE, "fa2")
    assert not calls


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 16}, "blocks of a multiple of 256 keys, got 16"),
        ({"block_size": 256, "leftpad": True}, "no cache_leftpad in a cache in blocks"),
        ({"more_queries": True, "window": (3, -1), "causal": False}, "more queries than the cache has keys"),
        ({"dtype": torch.float32}, "bfloat16 and float16 only"),
    ],
)
def test_decode_limits_of_fa2(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str) -> None:
    calls = fake_flash.install_fa2(monkeypatch).calls
    assert reason in refusal(but_decode(**changes), "fa2")
    assert not calls


@pytest.mark.parametrize(
    ("flag", "changes"),
    [("SPLIT", {}), ("VARLEN", {}), ("PAGEDKV", {"block_size": 64}), ("LOCAL", {"window": (9, -1)})],
)
def test_decode_flags_of_fa3(monkeypatch: pytest.MonkeyPatch, flag: str, changes: dict[str, Any]) -> None:
    """A build that lacks a feature is refused by its flag, before any call, where the feature is needed."""
    calls = fake_flash.install_fa3(monkeypatch, flags={flag: True}).calls
    assert f"FLASHATTENTION_DISABLE_{flag}" in refusal(but_decode(**changes), "fa3")
    assert not calls
    if changes:
        assert selected(DECODE, "fa3") == "fa3"


def test_a_backend_without_a_decode_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    monkeypatch.delattr(fa2, "decode")
    assert "has no kernel that reads a KV cache" in refusal(DECODE, "fa2")
    assert selected(but()) == "fa2"
