"""The oracle itself, against loops over Python floats that share no code with it."""

from __future__ import annotations

import math

import pytest
import torch
from samples import Sample, each_sample

from softcap_ops import reference


def sees(i: int, j: int, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> bool:
    distance = j - (i + seqlen_k - seqlen_q)
    left, right = window
    if causal and distance > 0:
        return False
    return (left < 0 or distance >= -left) and (right < 0 or distance <= right)


def loops(sample: Sample, q: list, k: list, v: list) -> tuple[list, list]:
    """(out, lse) of one head of one sequence: q, k, v as lists of rows."""
    scale = sample.scale if sample.scale is not None else 1 / math.sqrt(sample.head_dim)
    outs, lses = [], []
    for i, row in enumerate(q):
        weights, total, out = {}, 0.0, [0.0] * sample.head_dim
        for j, key in enumerate(k):
            if not sees(i, j, len(q), len(k), sample.causal, sample.window):
                continue
            score = scale * sum(a * b for a, b in zip(row, key, strict=True))
            if sample.softcap:
                score = sample.softcap * math.tanh(score / sample.softcap)
            weights[j] = math.exp(score)
        total = sum(weights.values())
        for j, w in weights.items():
            out = [o + w / total * x for o, x in zip(out, v[j], strict=True)]
        outs.append(out)
        lses.append(math.log(total) if weights else -math.inf)
    return outs, lses


_SMALL = {"batch": 2, "seqlen_q": 6, "head_dim": 3, "softcap": 1.5}


@each_sample(
    (
        Sample("plain", **_SMALL),
        Sample("off", **_SMALL | {"softcap": None}),
        Sample("scale", **_SMALL, scale=-0.7),
        Sample("gqa", **_SMALL, heads_q=4, heads_kv=2),
        Sample("causal", **_SMALL, causal=True),
        Sample("causal_more_keys", **_SMALL, seqlen_k=9, causal=True),
        Sample("causal_more_queries", **_SMALL, seqlen_k=3, causal=True),
        Sample("window", **_SMALL, window=(2, 1)),
        Sample("window_left", **_SMALL, seqlen_k=9, window=(2, -1)),
        Sample("window_right", **_SMALL, seqlen_k=3, window=(-1, 0)),
        Sample("causal_window", **_SMALL, causal=True, window=(1, 4)),
        Sample("no_keys", **_SMALL, seqlen_k=0),
    )
)
def test_against_loops(sample: Sample) -> None:
    q, k, v = sample.inputs(torch.float64, hot=not sample.empty).qkv
    out, lse = sample.reference(q, k, v)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            head = (q[b, :, h], k[b, :, h // group], v[b, :, h // group])
            expected_out, expected_lse = loops(sample, *(t.tolist() for t in head))
            torch.testing.assert_close(out[b, :, h], torch.tensor(expected_out, dtype=torch.float64))
            torch.testing.assert_close(lse[b, h], torch.tensor(expected_lse, dtype=torch.float64))


def test_visible_counts() -> None:
    for seqlen_q in range(5):
        for seqlen_k in range(5):
            for causal in (False, True):
                for window in ((-1, -1), (0, 0), (1, -1), (-1, 1), (2, 1), (2**63 - 1, 2**63 - 1)):
                    seen = reference.visible(seqlen_q, seqlen_k, causal, window)
                    for i in range(seqlen_q):
                        for j in range(seqlen_k):
                            expected = sees(i, j, seqlen_q, seqlen_k, causal, window)
                            assert expected == (seen is None or seen[i, j].item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """out in q's dtype, lse and the softmax in float32."""
    q = torch.randn(1, 4, 2, 8).to(dtype)
    out, lse = reference.attention(q, q, q, softcap=5.0)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
