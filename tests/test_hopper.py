"""The Hopper backend without a Hopper GPU: which problems it takes, and what its adapter hands to the library."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_flash
import fake_hopper
import pytest
import torch
from helpers import check_parity, norm, through
from samples import SAMPLES, Sample, each_dtype, each_sample_and_heat, named

from softcap_ops import UnsupportedError, available_backends, backends
from softcap_ops._arguments import Options, Packing, resolve
from softcap_ops.backends import Problem, _flash, hopper, select

INFERENCE = Problem(
    device_type="cuda",
    device_index=0,
    capability=(9, 0),
    dtype=torch.bfloat16,
    head_dim=128,
    heads_q=4,
    heads_kv=2,
    packed=False,
    softcap=50.0,
    causal=True,
    window=(-1, -1),
    deterministic=False,
    needs_backward=False,
)


def but(**changes: Any) -> Problem:
    return dataclasses.replace(INFERENCE, **changes)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hopper.FakeLibrary]:
    fake_flash.forget(monkeypatch)
    monkeypatch.setattr(hopper, "_prober", _flash.Prober(hopper._launch, hopper._launch_backward))
    yield fake_hopper.install(monkeypatch)
    monkeypatch.undo()
    fake_flash.clear_caches()


# ---- selection ---------------------------------------------------------------------------------------------------


def test_it_is_preferred_where_it_serves(library: fake_hopper.FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash.install_fa2(monkeypatch)
    fake_flash.install_fa3(monkeypatch)
    monkeypatch.setenv("SOFTCAP_OPS_FA3", "1")
    for packed in (False, True):
        for dtype in (torch.bfloat16, torch.float16):
            for window in ((-1, -1), (7, -1)):
                for needs_backward in (False, True):
                    problem = but(packed=packed, dtype=dtype, window=window, needs_backward=needs_backward)
                    assert select(problem) is hopper
    assert select(but(needs_backward=True, deterministic=True, head_dim=256)) is hopper
    assert select(but(head_dim=96)).NAME == "fa3"
    assert select(but(softcap=0.0)).NAME == "fa3"


def test_few_queries_go_to_a_kernel_that_splits_the_keys(
    library: fake_hopper.FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert select(but(few_queries=True)) is hopper  # nothing else is there
    fake_flash.install_fa2(monkeypatch)
    fake_flash.clear_caches()
    assert select(but(few_queries=True)).NAME == "fa2"
    assert select(but(few_queries=True), "hopper") is hopper
    order = list(backends.refusals(but(few_queries=True)))
    assert set(order[:2]) == {"fa2", "fa3"}


def test_what_counts_as_few_queries() -> None:
    p = resolve(Options(50.0), 8)
    cu = torch.tensor([0, 5, 40], dtype=torch.int32)
    for heads, rows, keys, few in (
        (4, 1, 1024, True),
        (4, 1, 1023, False),
        (64, 1, 5000, True),
        (4, 7 * 128, 5000, True),
        (4, 7 * 128 + 1, 5000, False),
        (4, 7 * 128, 1000, False),
    ):
        q, k = torch.empty(2, rows, heads, 8), torch.empty(2, keys, 2, 8)
        assert Problem.of(q, k, None, p, needs_backward=False).few_queries is few
        q, k = torch.empty(40, heads, 8), torch.empty(40, 2, 8)
        assert Problem.of(q, k, Packing(cu, cu, rows, keys), p, needs_backward=False).few_queries is few


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu", "device_index": None, "capability": None}, "CUDA tensors only, got cpu"),
        ({"capability": (8, 0)}, "needs compute capability 9.0 (Hopper), this GPU has 8.0"),
        ({"capability": (10, 0)}, "this GPU has 10.0"),
        ({"dtype": torch.float32}, "bfloat16 and float16 only, got float32"),
        ({"head_dim": 96}, "head_dim 64, 128 and 256, got 96"),
        ({"softcap": 0.0}, "soft-capped attention only"),
        ({"softcap": 1e35}, "float32's range"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_limits(library: fake_hopper.FakeLibrary, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        select(but(**changes), "hopper")
    assert reason in str(caught.value)
    assert not library.calls


def test_one_trial_a_kind(library: fake_hopper.FakeLibrary) -> None:
    for softcap in (5.0, 30.0, 50.0):
        select(but(softcap=softcap))
    assert len(library.calls) == 1
    select(but(head_dim=64, needs_backward=True))
    assert len(library.calls) == 3


def test_a_library_that_drops_the_cap(library: fake_hopper.FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    right = library.softcap_hopper_fwd

    def uncapped(arguments: bytes) -> int:
        a = fake_hopper.FwdArgs.from_buffer_copy(arguments)
        a.softcap = 1e6
        return right(bytes(a))

    monkeypatch.setattr(library, "softcap_hopper_fwd", uncapped)
    with pytest.raises(UnsupportedError, match="this build drops softcap"):
        select(INFERENCE)


def test_no_trial_in_a_graph_capture(library: fake_hopper.FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flash, "_capturing", lambda probe: True)
    with pytest.raises(UnsupportedError, match="Warm up: run the call once before the capture"):
        select(INFERENCE)
    assert not library.calls


# ---- the library -------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh() -> Iterator[None]:
    fake_flash.clear_caches()
    yield
    fake_flash.clear_caches()


@pytest.mark.usefixtures("_fresh")
def test_a_missing_library_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hopper, "LIBRARY", tmp_path / "libsoftcap_hopper.so")
    assert available_backends()["hopper"] == (
        "libsoftcap_hopper.so was not built for this installation (nvcc builds it)"
    )
    with pytest.raises(UnsupportedError, match="was not built"):
        select(INFERENCE, "hopper")


@pytest.mark.usefixtures("_fresh")
def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libsoftcap_hopper.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(hopper, "LIBRARY", broken)
    with pytest.raises(UnsupportedError, match=r"libsoftcap_hopper\.so cannot be loaded: .*") as caught:
        select(INFERENCE, "hopper")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.usefixtures("_fresh")
def test_the_built_library_loads_without_a_gpu() -> None:
    if not hopper.LIBRARY.exists():
        pytest.skip(hopper.install_error())
    assert hopper.install_error() is None
    assert hopper._load().softcap_hopper_error_string(0) == b"ok"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_header_is_read_as_c_reads_it(direction: str, tmp_path: Path) -> None:
    """The layout that these tests decode is the compiler's."""
    kind = fake_hopper.FwdArgs if direction == "fwd" else fake_hopper.BwdArgs
    fields = [name for name, _ in kind._fields_]
    lines = "".join(f'printf("%zu ", offsetof(softcap_hopper_{direction}_args, {name}));' for name in fields)
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{fake_hopper.HEADER}"\n'
        f'int main(void) {{ {lines} printf("%zu", sizeof(softcap_hopper_{direction}_args)); return 0; }}'
    )
    subprocess.run(["cc", str(source), "-o", str(tmp_path / "layout")], check=True)
    printed = subprocess.run([str(tmp_path / "layout")], check=True, capture_output=True, text=True).stdout
    offsets = [getattr(kind, name).offset for name in fields]
    assert [int(n) for n in printed.split()] == [*offsets, ctypes.sizeof(kind)]


# ---- the adapter -------------------------------------------------------------------------------------------------


def resized(head_dim: int) -> tuple[Sample, ...]:
    """The table of samples at a head_dim of the kernel, without those that are about another one or about no cap."""
    capped = (s for s in SAMPLES if s.softcap and not s.name.startswith("head_dim"))
    return tuple(dataclasses.replace(s, head_dim=head_dim) for s in capped)


@each_sample_and_heat(resized(64))
def test_forward(library: fake_hopper.FakeLibrary, sample: Sample, hot: bool) -> None:
    """Every row of the table, whatever its strides, reaches the library and comes back as the contract says."""
    x = sample.inputs(torch.bfloat16, hot=hot)
    packing = Packing(**sample.packing()) if sample.packed else None
    p = resolve(Options(sample.softcap, sample.scale, sample.causal, *sample.window), sample.head_dim)
    out, lse = hopper.forward(*x.qkv, packing, p)
    expected_out, expected_lse = sample.reference(*(t.float() for t in x.qkv))
    assert out.is_contiguous()
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (x.q.shape, x.q.dtype, sample.lse_shape, torch.float32)
    torch.testing.assert_close(lse, expected_lse)
    assert norm(out.float() - expected_out) <= 4e-3 * norm(expected_out)
    (call,) = library.calls
    assert call.stream == 0x5757
    if hot:
        _, uncapped = sample.reference(*(t.float() for t in x.qkv), softcap=None)
        assert (lse - uncapped).nan_to_num(0.0, 0.0, 0.0).abs().max() > 0.1 * sample.softcap


@each_sample_and_heat(resized(64))
def test_parity(library: fake_hopper.FakeLibrary, sample: Sample, hot: bool) -> None:
    """Outputs and gradients of a loss on both outputs."""
    x = sample.inputs(torch.bfloat16, hot=hot)
    check_parity(sample, x, hot=hot, attention=through(hopper, sample))


@pytest.mark.parametrize("loss", ["out", "lse"])
@pytest.mark.parametrize("sample", named("decode_gqa", "gemma2_local", "packed_empty_sequences"), ids=str)
def test_loss_on_one_output(library: fake_hopper.FakeLibrary, sample: Sample, loss: str) -> None:
    x = sample.inputs(torch.bfloat16)
    x.dlse[torch.isneginf(sample.reference(*x.qkv)[1])] = float("nan")  # rows without a key
    check_parity(sample, x, hot=False, loss=loss, attention=through(hopper, sample))


def test_gradients_not_asked_for_have_no_elements(library: fake_hopper.FakeLibrary) -> None:
    """case 40."""
    (sample,) = named("gemma2_global")
    x = sample.inputs(torch.bfloat16)
    p = resolve(Options(sample.softcap, deterministic=True), sample.head_dim)
    out, lse = hopper.forward(*x.qkv, None, p)
    grads = hopper.backward(x.dout, None, *x.qkv, out, lse, None, p, (False, True, False))
    assert [g.numel() for g in grads] == [0, x.k.numel(), 0]
    assert (library.calls[-1].deterministic, library.calls[-1].dlse, library.calls[-1].stream) == (1, None, 0x5757)


@each_dtype((torch.bfloat16, torch.float16))
def test_what_can_be_read_is_not_copied(library: fake_hopper.FakeLibrary, dtype: torch.dtype) -> None:
    """Fused projections and (batch, heads, seqlen, head_dim) tensors go to the kernel where they lie."""
    qkv = torch.randn(2, 9, 3 * 4, 64).to(dtype)
    q, k, v = qkv.split(4, dim=2)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    hopper.forward(q, k, v, None, resolve(Options(50.0), 64))
    (call,) = library.calls
    assert (call.q, call.k, call.v) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert call.dtype == (0 if dtype is torch.bfloat16 else 1)


def test_a_window_of_any_size(library: fake_hopper.FakeLibrary) -> None:
    (sample,) = (dataclasses.replace(s, head_dim=64) for s in named("gqa"))
    q, k, v = sample.inputs(torch.bfloat16).qkv
    hopper.forward(q, k, v, None, resolve(Options(5.0, None, False, 2**40, 3), 64))
    assert (library.calls[-1].window_left, library.calls[-1].window_right) == (2**30, 3)


def test_an_error_of_the_library_is_raised(library: fake_hopper.FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "softcap_hopper_fwd", lambda arguments: 14)
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="the Hopper kernel failed: the driver refused a tensor map"):
        hopper.forward(q, q, q, None, resolve(Options(5.0), 64))
