"""torch.library.opcheck on the four ops, with and without requires_grad, under several strides.

It is necessary, not sufficient: it compares no strides on the CPU (test_fake.py does) and its autograd checks pass
without looking when nothing requires a gradient.
"""

from __future__ import annotations

import pytest
import torch
from samples import Sample, each_sample, named
from torch.library import opcheck

SAMPLED = named(
    "gqa",
    "causal_more_queries",
    "causal_window",
    "head_dim_33",
    "off",
    "strides_bhsd",
    "strides_last_dim",
    "strides_expanded",
    "batch_0",
    "no_keys",
    "packed_gqa",
    "packed_empty_sequences",
    "packed_tail",
    "packed_strides_bhsd",
)
LENGTHS = named("seqlen_1", "seqlen_127", "seqlen_128", "seqlen_129", "seqlen_196", "seqlen_257")
HEAD_DIMS = named("head_dim_1", "head_dim_20", "head_dim_40", "head_dim_72", "head_dim_104")

# A gradient of the backward op is refused, so there is nothing for these to run.
BACKWARD_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("requires_grad", [True, False], ids=["grad", "no_grad"])
@each_sample(SAMPLED)
def test_forward(sample: Sample, requires_grad: bool) -> None:
    """cases 46, 49"""
    qkv = (t.detach().requires_grad_(requires_grad) for t in sample.inputs().qkv)
    opcheck(sample.op, sample.op_args(*qkv))


@each_sample(LENGTHS + HEAD_DIMS)
def test_forward_sizes(sample: Sample) -> None:
    """cases 30, 48: no output is rounded up to a tile."""
    qkv = (t.detach().requires_grad_() for t in sample.inputs().qkv)
    opcheck(sample.op, sample.op_args(*qkv), test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("requires_grad", [True, False], ids=["grad", "no_grad"])
@each_sample(SAMPLED)
def test_backward(sample: Sample, requires_grad: bool) -> None:
    args = sample.op_bwd_args(sample.inputs())
    if requires_grad:
        args = tuple(
            a.detach().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
        )
        opcheck(sample.op_bwd, args, test_utils=BACKWARD_CHECKS)
    else:
        opcheck(sample.op_bwd, args)


@each_sample(LENGTHS + HEAD_DIMS)
def test_backward_sizes(sample: Sample) -> None:
    """cases 30, 48"""
    opcheck(sample.op_bwd, sample.op_bwd_args(sample.inputs()), test_utils=("test_schema", "test_faketensor"))
