"""FLOP counts: the pairs a mask lets through, forward and backward, eager and traced."""

from __future__ import annotations

import random

import pytest
import torch
from samples import SAMPLES, Sample, each_sample
from torch.utils.flop_counter import FlopCounterMode

import softcap_ops
from softcap_ops import reference
from softcap_ops._flops import visible_pairs


def count(f) -> int:
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_total_flops()


def pairs_of(sample: Sample) -> int:
    """By counting the mask's elements."""
    if sample.lengths_q is None:
        lengths = [(sample.q_shape[1], sample.k_shape[1])] * sample.batch
    else:
        lengths = list(zip(sample.lengths_q, sample.lengths_k, strict=True))
    total = 0
    for seqlen_q, seqlen_k in lengths:
        seen = reference.visible(seqlen_q, seqlen_k, sample.causal, sample.window)
        total += seqlen_q * seqlen_k if seen is None else int(seen.sum())
    return total


def test_visible_pairs_are_those_of_the_mask() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        sq, sk, causal = draw.randint(0, 9), draw.randint(0, 9), draw.random() < 0.5
        window = (draw.randint(-1, 11), draw.randint(-1, 11))
        seen = reference.visible(sq, sk, causal, window)
        expected = sq * sk if seen is None else int(seen.sum())
        assert visible_pairs(sq, sk, causal, window) == expected, (sq, sk, causal, window)


@each_sample(tuple(s for s in SAMPLES if s.strides == "contiguous"))
def test_every_sample(sample: Sample) -> None:
    """4 head_dim a pair and query head forward, 10 head_dim backward."""
    x = sample.inputs()
    q, k, v = (t.requires_grad_() for t in x.qkv)
    unit = pairs_of(sample) * sample.heads_q * sample.head_dim
    results = []
    assert count(lambda: results.append(sample.attention(q, k, v)[0])) == 4 * unit
    assert count(lambda: results[0].backward(x.dout)) == 10 * unit


def test_by_hand() -> None:
    """(1, 4, 1, 8), causal: 1 + 2 + 3 + 4 pairs; window (1, 0): 1 + 2 + 2 + 2."""
    q = torch.randn(1, 4, 1, 8)
    assert count(lambda: softcap_ops.softcap_attention(q, q, q, softcap=5.0)) == 16 * 4 * 8
    assert count(lambda: softcap_ops.softcap_attention(q, q, q, softcap=5.0, causal=True)) == 10 * 4 * 8
    assert count(lambda: softcap_ops.softcap_attention(q, q, q, softcap=5.0, window=(1, 0))) == 7 * 4 * 8


def test_the_formula_counts_the_same_without_a_mask() -> None:
    """Unmasked, the count is that of the matrix products of the eager formula, which torch counts itself."""
    q, k, v = (torch.randn(2, 16, 2, 8) for _ in range(3))
    expected = count(lambda: reference.attention(q, k, v, softcap=5.0))
    assert count(lambda: softcap_ops.softcap_attention(q, k, v, softcap=5.0)) == expected


def test_module_breakdown() -> None:
    """Counts reach FlopCounterMode's table of modules and of operators."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.projection(x).view(2, 12, 3, 2, 8).unbind(2)
            return softcap_ops.softcap_attention(q, k, v, softcap=5.0, causal=True)

    block, x = Block(), torch.randn(2, 12, 16)
    with FlopCounterMode(display=False) as counter:
        block(x).sum().backward()
    forward = 4 * 2 * (12 * 13 // 2) * 2 * 8
    counts = counter.get_flop_counts()
    assert counts["Block"][torch.ops.softcap_ops.attention_fwd] == forward
    assert counts["Global"][torch.ops.softcap_ops.attention_bwd] == forward * 5 // 2


@pytest.mark.parametrize("lengths", [(17, 40, 3), (8, 8)])
def test_packed_on_fake_tensors(lengths) -> None:
    """Lengths that cannot be read are taken as the longest, as often as they fit: exact when all are equal."""
    from torch._subclasses import FakeTensorMode

    sample = Sample("fake", lengths_q=lengths, lengths_k=lengths, causal=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v = (mode.from_tensor(t) for t in sample.inputs().qkv)
        cu = mode.from_tensor(sample.cu_seqlens()[0])
        longest = max(lengths)
        fake = count(
            lambda: softcap_ops.softcap_attention_varlen(
                q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, softcap=5.0,
                causal=True,
            )
        )  # fmt: skip
    real = count(lambda: sample.attention(*sample.inputs().qkv))
    assert fake == real if len(set(lengths)) == 1 else fake >= real
