"""Outputs and gradients against the float64 formula: every sample, cold and hot, every dtype, every loss."""

from __future__ import annotations

import pytest
import torch
from helpers import check_parity
from samples import Sample, each_dtype, each_sample, each_sample_and_heat


@each_dtype()
@each_sample_and_heat()
def test_outputs_and_gradients(sample: Sample, hot: bool, dtype: torch.dtype) -> None:
    check_parity(sample, sample.inputs(dtype, hot=hot), hot=hot)


@pytest.mark.parametrize("loss", ["out", "lse"])
@each_dtype((torch.float64, torch.bfloat16))
@each_sample_and_heat()
def test_loss_on_one_output(sample: Sample, hot: bool, dtype: torch.dtype, loss: str) -> None:
    """case 37: a loss on lse alone, or on out alone, has its own right gradient."""
    check_parity(sample, sample.inputs(dtype, hot=hot), hot=hot, loss=loss)


@each_sample()
def test_outputs_are_contiguous(sample: Sample) -> None:
    """case 34: whatever strides come in, out, lse and the gradients are contiguous."""
    x = sample.inputs()
    for t in (*sample.op(*sample.op_args(*x.qkv)), *sample.op_bwd(*sample.op_bwd_args(x))):
        assert t.is_contiguous()
