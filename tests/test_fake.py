"""Fake against real metadata: shape, dtype, strides and offset of every output, for every sample.

opcheck compares no strides on the CPU, and a fake that inherits those of a permuted q is the commonest fault.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import metadata
from samples import DTYPES, STRIDES, Sample, each_dtype, each_sample, named, with_strides
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def as_fake(mode: FakeTensorMode, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)


def assert_fake_is_real(op: Any, args: tuple[Any, ...], shape_env: ShapeEnv | None = None) -> None:
    real = op(*args)
    with FakeTensorMode(shape_env=shape_env) as mode:
        fake = op(*as_fake(mode, args))
    assert len(real) == len(fake)
    for r, f in zip(real, fake, strict=True):
        assert metadata(f) == metadata(r)


@each_dtype()
@each_sample()
def test_forward(sample: Sample, dtype: torch.dtype) -> None:
    """case 46"""
    assert_fake_is_real(sample.op, sample.op_args(*sample.inputs(dtype).qkv))


@each_dtype()
@each_sample()
def test_backward(sample: Sample, dtype: torch.dtype) -> None:
    """cases 34, 46"""
    assert_fake_is_real(sample.op_bwd, sample.op_bwd_args(sample.inputs(dtype)))


@pytest.mark.parametrize("mask", list(itertools.product((True, False), repeat=3)), ids=str)
@each_sample(named("gqa", "strides_bhsd", "packed_gqa", "packed_strides_last_dim", "batch_0"))
def test_backward_mask(sample: Sample, mask: tuple[bool, bool, bool]) -> None:
    """A gradient that is not asked for comes back without elements, fake and real alike."""
    args = (*sample.op_bwd_args(sample.inputs()), None, None, None, None, list(mask))
    assert_fake_is_real(sample.op_bwd, args)
    wanted = [g.numel() > 0 for g in sample.op_bwd(*args)]
    assert wanted == [m and sample.batch > 0 for m in mask]


@pytest.mark.parametrize("strides", STRIDES)
@each_sample(named("gqa", "packed_gqa", "seqlen_1", "head_dim_1", "no_keys", "packed_batch_0"))
def test_strides(sample: Sample, strides: str) -> None:
    """Sizes 0 and 1, where strides carry no meaning and are easily copied by mistake, included."""
    sample = with_strides(sample, strides)
    x = sample.inputs()
    assert_fake_is_real(sample.op, sample.op_args(*x.qkv))
    assert_fake_is_real(sample.op_bwd, sample.op_bwd_args(x))


@each_sample(named("mha", "gqa", "strides_bhsd", "packed_gqa"))
def test_symbolic_sizes(sample: Sample) -> None:
    """Sizes stay symbols: the fake guards on none of them."""
    x = sample.inputs()
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env) as mode:
        fake = as_fake(mode, sample.op_args(*x.qkv))
        for t in sample.op(*fake):
            assert all(isinstance(n, torch.SymInt) for n in t.shape)


@each_dtype(DTYPES[2:])
def test_meta_device(dtype: torch.dtype) -> None:
    """Shapes can be asked for on the meta device, at sizes that no machine holds."""
    q = torch.empty(64, 2**20, 16, 256, dtype=dtype, device="meta")
    k = torch.empty(64, 2**20, 8, 256, dtype=dtype, device="meta")
    out, lse = torch.ops.softcap_ops.attention_fwd(q, k, k, 50.0)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "meta")
    assert (lse.shape, lse.dtype, lse.device.type) == ((64, 16, 2**20), torch.float32, "meta")
