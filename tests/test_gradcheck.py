"""torch.autograd.gradcheck in float64: the gradients against finite differences, no formula of ours involved.

At cap 1 with scores of a few units, where every factor of the gradient counts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import Sample, each_sample
from torch.autograd import gradcheck

_SMALL: dict[str, Any] = {"batch": 1, "seqlen_q": 5, "heads_q": 2, "head_dim": 3, "softcap": 1.0, "scale": 1.3}
_PACKED: dict[str, Any] = {**_SMALL, "lengths_q": (2, 3, 0), "lengths_k": (4, 2, 1)}

SAMPLES = (
    Sample("dense", **_SMALL),
    Sample("off", **_SMALL | {"softcap": None}),
    Sample("causal", **_SMALL, causal=True),
    Sample("more_keys", **_SMALL, seqlen_k=7, causal=True),
    Sample("more_queries", **_SMALL, seqlen_k=3),
    Sample("window", **_SMALL, window=(1, 1)),
    Sample("gqa_window", **_SMALL | {"heads_q": 4}, heads_kv=2, causal=True, window=(2, -1)),
    Sample("permuted", **_SMALL, strides="last_dim"),
    Sample("packed", **_PACKED),
    Sample("packed_gqa_causal", **_PACKED | {"heads_q": 4}, heads_kv=2, causal=True, tail_q=1, tail_k=2),
    Sample("packed_window", **_PACKED, window=(1, 0)),
)


@pytest.mark.parametrize("output", ["out", "lse", "both"])
@each_sample(SAMPLES)
def test_gradcheck(sample: Sample, output: str) -> None:
    """cases 6, 37"""

    def attention(*qkv: torch.Tensor) -> Any:
        out, lse = sample.attention(*qkv)
        lse = lse[lse.isfinite()]  # -inf has no finite difference
        return {"out": out, "lse": lse, "both": (out, lse)}[output]

    qkv = tuple(t.detach().requires_grad_() for t in sample.inputs(torch.float64).qkv)
    assert gradcheck(attention, qkv, check_forward_ad=False, check_batched_grad=False)


def test_batched_gradients() -> None:
    """The backward op under vmap, as jacobians and is_grads_batched run it."""
    sample = SAMPLES[0]
    qkv = tuple(t.detach().requires_grad_() for t in sample.inputs(torch.float64).qkv)
    assert gradcheck(lambda *qkv: sample.attention(*qkv), qkv, check_batched_grad=True)


def test_slope_at_one_key() -> None:
    """case 37: one key, score 100, cap 50: d lse / d score = 1 - tanh(2)^2."""
    q, k = torch.full((1, 1, 1, 1), 100.0, dtype=torch.float64), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    q.requires_grad_()
    _, lse = torch.ops.softcap_ops.attention_fwd(q, k, k, 50.0, 1.0)
    (slope,) = torch.autograd.grad(lse.sum(), q)
    assert slope.item() == pytest.approx(0.070651, abs=1e-6)
