"""Our Triton kernels without a GPU: their arithmetic in Triton's interpreter, their machine code compiled beforehand.

The interpreter has to be asked for before anything imports Triton: it runs in a process of its own, one for the file.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import check_parity, evaluate
from samples import Sample, each_dtype, each_sample, each_sample_and_heat, named
from torch import Tensor

from softcap_ops.backends import triton

pytestmark = pytest.mark.skipif(triton.install_error() is not None, reason=str(triton.install_error()))


# ---- the interpreter -----------------------------------------------------------------------------------------------


def _serve_the_cpu() -> None:
    from triton.runtime import interpreter

    _mend_bfloat16(interpreter)
    patch = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6's range() calls int() on an array of one element, which NumPy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
    triton.support_error = lambda problem: None
    triton.probe_error = lambda problem: None


def _mend_bfloat16(interpreter: Any) -> None:
    """Triton multiplies the bits of bfloat16 numbers as integers, and cuts off where a GPU rounds."""
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def widen(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest)

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        if (x.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, to)
        rounded = torch.from_numpy(x.data.copy()).bfloat16().view(torch.int16)
        return handle(rounded.numpy().view(np.uint16), tl.bfloat16)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Call a function of this module with these arguments where backend="triton" runs on CPU tensors."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_serve_the_cpu) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result()  # the process has started, in this environment
        yield lambda function, *args: pool.submit(function, *args).result()


def _attention(sample: Sample, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, v: sample.attention(q, k, v, backend="triton", **options)


def _parity(sample: Sample, dtype: torch.dtype, hot: bool, loss: str = "both") -> None:
    check_parity(sample, sample.inputs(dtype, hot=hot), hot=hot, loss=loss, attention=_attention(sample))


def _small(*names: str) -> tuple[Sample, ...]:
    """Rows of the table with one batch entry and two query heads: the interpreter takes a second for 20 tiles."""
    return tuple(
        replace(s, batch=1, heads_q=2, heads_kv=1 if s.heads_kv not in (None, s.heads_q) else None)
        for s in named(*names)
    )


@each_sample_and_heat(
    _small("gqa", "more_queries", "causal_more_keys", "causal_more_queries", "window_both", "window_more_queries",
           "off_causal_window", "head_dim_20", "scale_negative", "packed_gqa", "packed_cross_causal", "packed_window")
)  # fmt: skip
def test_float32(interpreter: Any, sample: Sample, hot: bool) -> None:
    interpreter(_parity, sample, torch.float32, hot)


@each_sample(
    _small("causal_window", "head_dim_33", "head_dim_256", "scale_zero", "strides_sliced", "strides_last_dim",
           "strides_offset", "packed_empty_sequences", "packed_tail", "packed_slack", "packed_strides_bhsd",
           "packed_head_dim_33")
)  # fmt: skip
def test_float32_layouts(interpreter: Any, sample: Sample) -> None:
    interpreter(_parity, sample, torch.float32, False)


@each_dtype((torch.bfloat16, torch.float16))
@each_sample_and_heat(_small("causal_more_queries", "seqlen_1", "window_self", "packed_cross_causal", "off"))
def test_half_precision(interpreter: Any, sample: Sample, hot: bool, dtype: torch.dtype) -> None:
    """Rows that see one key, too: their out is that key's value, to the bit."""
    interpreter(_parity, sample, dtype, hot)


@pytest.mark.parametrize(
    ("dtype", "softcap"),
    [(torch.float16, cap) for cap in (4.0, 9.0, 50.0)] + [(torch.float32, cap) for cap in (60.0, 72.0, 90.0, 1e4)],
    ids=str,
)
def test_every_way_to_keep_exp_in_range(interpreter: Any, dtype: torch.dtype, softcap: float) -> None:
    """No maximum, a constant shift, a running maximum: all the same, at scores of both ends of [-cap, cap]."""
    interpreter(_saturated, dtype, softcap)


def _saturated(dtype: torch.dtype, softcap: float) -> None:
    sample = Sample("saturated", batch=1, seqlen_q=40, heads_q=1, head_dim=16, softcap=softcap, causal=True)
    check_parity(sample, sample.inputs(dtype, hot=True), hot=softcap < 1e3, attention=_attention(sample))
    x = sample.inputs(dtype)
    ones = torch.ones_like(x.k)
    for sign in (1, -1):  # rows whose scores are all cap, or all -cap: out is the mean of v
        q = sign * min(100.0, softcap) * ones
        out, lse = sample.attention(q, ones, x.v, backend="triton")
        ref_out, ref_lse = sample.reference(q.double(), ones.double(), x.v.double())
        torch.testing.assert_close(out.double(), ref_out, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("loss", ["out", "lse"])
@each_sample(_small("causal_more_queries", "packed_empty_sequences"))
def test_loss_on_one_output(interpreter: Any, sample: Sample, loss: str) -> None:
    interpreter(_parity, sample, torch.float32, True, loss)


@each_sample(named("batch_0", "no_queries", "no_keys_causal", "packed_no_keys", "packed_only_tail", "packed_batch_0"))
def test_nothing_to_compute(interpreter: Any, sample: Sample) -> None:
    interpreter(_parity, sample, torch.float32, False)


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)])
def test_only_the_gradients_asked_for(interpreter: Any, mask: tuple[bool, bool, bool]) -> None:
    interpreter(_masked_gradients, mask)


def _masked_gradients(mask: tuple[bool, bool, bool]) -> None:
    (sample,) = _small("gqa")
    x = sample.inputs()
    expected = evaluate(_attention(sample), x)
    out, lse = sample.attention(*x.qkv, backend="triton")
    options = (*sample.op_options(x.q), None, "triton")
    grads = torch.ops.softcap_ops.attention_bwd(x.dout, x.dlse, *x.qkv, out, lse, *options, output_mask=mask)
    for wanted, g, e in zip(mask, grads, expected[2:], strict=True):
        if wanted:
            assert torch.equal(g, e)
        else:
            assert g.numel() == 0


def test_nan_stays_in_its_row(interpreter: Any) -> None:
    interpreter(_nan_rows)


def _nan_rows() -> None:
    (sample,) = _small("causal")
    x = sample.inputs()
    x.q[0, 5, 0] = float("nan")
    out, lse = sample.attention(*x.qkv, backend="triton")
    expected = torch.zeros_like(lse, dtype=torch.bool)
    expected[0, 0, 5] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().any(-1).transpose(1, 2), expected)


# ---- launches ---------------------------------------------------------------------------------------------------


def test_what_one_call_compiled_serves_all() -> None:
    """A launch keeps its first compilation: nothing may be compiled in that another call of its kind could change."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    from softcap_ops.kernels import attend, differentiate

    for kernel in (attend.attend, differentiate.prepare, differentiate.differentiate_keys,
                   differentiate.differentiate_queries):  # fmt: skip
        integers = [p for p in kernel.params if not p.is_constexpr and p.name[0].islower() and "scale" not in p.name]
        specialised = {p.name for p in integers if not p.do_not_specialize}
        assert specialised <= {"shift"}, kernel


# ---- machine code ---------------------------------------------------------------------------------------------------

GPUS = {(8, 0): 99, (9, 0): 227, (10, 0): 227}  # KiB of shared memory; 8.0 has 163, but its table serves 8.9 too


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("capability", GPUS, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_compiled_without_spills(capability: tuple[int, int], head_dim: int) -> None:
    """The chosen configurations, for GPUs that are not here: they compile, fit, and keep everything in registers.

    They were chosen with Triton 3.6. Another release shares registers out otherwise, and may spill a few numbers.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    import triton as compiler
    from triton.backends.compiler import GPUTarget

    from softcap_ops.kernels.ahead import compile_for, resources

    spills = 0 if compiler.__version__.startswith("3.6.") else 128
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    plan = triton._Plan(
        capability, torch.bfloat16, head_dim, packed=False, capped=True, running_max=False, fast_tanh=True
    )
    for name, launch in (("forward", plan.forward), *plan.backward):
        used = resources(compile_for(launch, torch.bfloat16, target))
        assert used.stack <= spills, f"{name}: {used}"
        assert used.shared <= GPUS[capability] * 1024, f"{name}: {used}"
