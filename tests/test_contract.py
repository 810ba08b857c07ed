"""The rows of the contract that a comparison at random inputs would not settle, each as the smallest case.

Where the right value is known in closed form it is written out; nothing here goes through the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Result, evaluate, run_python
from samples import Inputs, Sample, each_dtype, each_sample, named
from torch import Tensor

from softcap_ops import softcap_attention, softcap_attention_varlen

NAN, INF = float("nan"), float("inf")
BOTH_LAYOUTS = named("gqa", "packed_gqa")


def full(*shape: int, value: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


def randn(*shape: int, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (factor * torch.randn(shape, dtype=torch.float64)).to(dtype)


def cu(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return softcap_attention(q, k, v, return_lse=True, **options)


# ---- order: scale, cap, mask, softmax ------------------------------------------------------------------------


@each_dtype()
@pytest.mark.parametrize("poison", [1e4, INF, -INF, NAN])
@pytest.mark.parametrize("softcap", [1.0, 30.0, 50.0, None])
def test_masked_keys_have_no_weight(softcap: float | None, poison: float, dtype: torch.dtype) -> None:
    """case 1: capping after the mask would turn -inf into -cap and let masked values through."""
    q = full(1, 4, 1, 8, dtype=dtype)
    v = full(1, 4, 1, 8, value=poison, dtype=dtype)
    v[:, 0] = 0
    out, lse = attend(q, q, v, softcap=softcap, causal=True)
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))
    torch.testing.assert_close(lse[0, 0], torch.tensor([1, 2, 3, 4], dtype=lse.dtype).log())


@pytest.mark.parametrize("window", [(2, 1), (0, 0), (3, -1), (-1, 2)])
@pytest.mark.parametrize("softcap", [1.0, 50.0])
def test_the_window_masks_the_same_way(softcap: float, window: tuple[int, int]) -> None:
    """case 1: v is 1 where seen and NaN where not, row by row."""
    left, right = window
    for i in range(9):
        v = full(1, 9, 1, 4, value=NAN)
        v[:, max(0, i - left) if left >= 0 else 0 : i + right + 1 if right >= 0 else 9] = 1
        out, _ = attend(randn(1, 9, 1, 4), randn(1, 9, 1, 4), v, softcap=softcap, window=window)
        torch.testing.assert_close(out[0, i], torch.ones_like(out[0, i]))


@pytest.mark.parametrize(("softcap", "lse_at_100"), [(50.0, 48.201379), (30.0, 29.923739), (1.0, 1.0), (None, 100.0)])
@pytest.mark.parametrize("sign", [1, -1])
@each_dtype()
def test_one_key_gives_the_capped_score(
    dtype: torch.dtype, sign: int, softcap: float | None, lse_at_100: float
) -> None:
    """case 2: with one key lse is the capped score; the formula's factor is the cap, not the score."""
    q, k = full(1, 1, 1, 1, value=10.0 * sign, dtype=dtype), full(1, 1, 1, 1, value=10.0, dtype=dtype)
    out, lse = attend(q, k, full(1, 1, 1, 1, value=3.0, dtype=dtype), softcap=softcap, scale=1.0)
    assert lse.item() == pytest.approx(sign * lse_at_100, rel=1e-6)
    assert out.item() == 3.0


@pytest.mark.parametrize("factor", [1.0, 6.0, 1e3, 1e15])
@pytest.mark.parametrize("softcap", [0.5, 1.0, 30.0, 50.0])
@each_dtype((torch.float64, torch.float32, torch.bfloat16))
def test_lse_is_bounded(dtype: torch.dtype, softcap: float, factor: float) -> None:
    """case 2: every lse lies within cap + log(visible keys), however large the scores."""
    seqlen = 65
    q, k = randn(2, seqlen, 4, 32, factor=factor, dtype=dtype), randn(2, seqlen, 2, 32, factor=factor, dtype=dtype)
    out, lse = attend(q, k, k.clamp(-9, 9), softcap=softcap, causal=True)
    log_visible = torch.arange(1, seqlen + 1, dtype=lse.dtype).log()
    slack = 1e-5 * (softcap + 5)
    assert (lse <= softcap + log_visible + slack).all()
    assert (lse >= -softcap + log_visible - slack).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("path", ["prefill", "decode", "packed", "compiled"])
def test_the_cap_reaches_the_kernel(path: str) -> None:
    """case 4: at scores of about 130, caps 50, 30 and none differ by more than 1 on every path."""
    q, k, v = randn(1, 64, 2, 32, factor=6), randn(1, 64, 2, 32, factor=6), randn(1, 64, 2, 32)
    lengths = cu(40, 24)

    def run(softcap: float) -> Tensor:
        if path == "decode":
            return torch.cat([softcap_attention(q[:, i : i + 1], k, v, softcap=softcap) for i in range(64)], 1)
        if path == "packed":
            return softcap_attention_varlen(
                q[0], k[0], v[0], cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=40, max_seqlen_k=40,
                softcap=softcap,
            )  # fmt: skip
        if path == "compiled":
            compiled = torch.compile(softcap_attention, fullgraph=True, backend="aot_eager")
            return compiled(q, k, v, softcap=softcap)
        return softcap_attention(q, k, v, softcap=softcap)

    outs = [run(softcap) for softcap in (50.0, 30.0, 0.0)]
    for i in range(3):
        assert (outs[i] - outs[i - 1]).abs().max() > 1


@each_sample(BOTH_LAYOUTS)
@each_dtype()
def test_off_is_off(sample: Sample, dtype: torch.dtype) -> None:
    """case 10: None, 0 and 0.0 are one and the same, bit for bit, and an int cap is its float."""
    x = sample.inputs(dtype, hot=True)
    off = evaluate(sample.bind(softcap=None), x)
    for zero in (0, 0.0, -0.0):
        assert_equal(evaluate(sample.bind(softcap=zero), x), off)
    assert_equal(evaluate(sample.bind(softcap=50), x), evaluate(sample.bind(softcap=50.0), x))
    assert not torch.equal(off.out, evaluate(sample.bind(softcap=5.0), x).out)


@each_sample(BOTH_LAYOUTS)
@pytest.mark.parametrize("softcap", [1e4, 1e30, 1e300])
def test_a_huge_cap_is_nearly_off(sample: Sample, softcap: float) -> None:
    """case 10: no overflow on the way, though 1e300 is infinite in float32."""
    x = sample.inputs()
    capped, off = evaluate(sample.bind(softcap=softcap), x), evaluate(sample.bind(softcap=None), x)
    for a, b in zip(capped, off, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@each_dtype((torch.float64, torch.float32))
def test_a_tiny_cap_weighs_all_keys_alike(dtype: torch.dtype) -> None:
    """The other end: scores of at most 1e-30 leave the mean of the values."""
    q, k, v = randn(1, 7, 1, 8, dtype=dtype), randn(1, 7, 1, 8, dtype=dtype), randn(1, 7, 1, 8, dtype=dtype)
    out, lse = attend(q, k, v, softcap=1e-30)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(7)))


@each_dtype()
def test_default_scale(dtype: torch.dtype) -> None:
    """case 30: head_dim ** -0.5 of the head_dim that was passed, not of a padded one."""
    for head_dim in (1, 20, 24, 33, 104, 256):
        q, k = randn(1, 5, 2, head_dim, dtype=dtype), randn(1, 9, 2, head_dim, factor=3, dtype=dtype)
        implied = attend(q, k, k, softcap=5.0)
        given = attend(q, k, k, softcap=5.0, scale=head_dim**-0.5)
        for a, b in zip(implied, given, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_scale_is_inside_the_cap() -> None:
    """(scale, q) and (1, scale * q) are one; a scale outside of the cap would not be."""
    q, k, v = randn(1, 9, 2, 8, factor=6), randn(1, 9, 2, 8), randn(1, 9, 2, 8)
    for a, b in zip(attend(q, k, v, softcap=2.0, scale=0.25), attend(q / 4, k, v, softcap=2.0, scale=1.0), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_query_heads_share_key_heads_in_blocks(group: int) -> None:
    """Query head h reads key head h // group, not h % group."""
    heads_kv = 3
    q, k = randn(1, 5, heads_kv * group, 8), randn(1, 5, heads_kv, 8)
    v = torch.arange(heads_kv, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 5, heads_kv, 8)
    out = softcap_attention(q, k, v, softcap=5.0)
    expected = torch.arange(heads_kv).repeat_interleave(group).float()
    torch.testing.assert_close(out[0, 0, :, 0], expected)


# ---- masks -------------------------------------------------------------------------------------------------------


def weights(seqlen_q: int, seqlen_k: int, **options: Any) -> Tensor:
    """(seqlen_q, seqlen_k) attention weights at equal scores, read off one-hot values."""
    q, k = full(1, seqlen_q, 1, seqlen_k), full(1, seqlen_k, 1, seqlen_k)
    v = torch.eye(seqlen_k).view(1, seqlen_k, 1, seqlen_k)
    return softcap_attention(q, k, v, softcap=1.0, **options)[0, :, 0]


def rows(*lines: str) -> Tensor:
    """Equal weights over the keys marked x."""
    seen = torch.tensor([[c == "x" for c in line] for line in lines], dtype=torch.float32)
    return seen / seen.sum(-1, keepdim=True).clamp(min=1)


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"causal": True}, ("x....", "xx...", "xxx..", "xxxx.", "xxxxx")),
        ({"causal": True, "window": (1, -1)}, ("x....", "xx...", ".xx..", "..xx.", "...xx")),
        ({"causal": True, "window": (1, 3)}, ("x....", "xx...", ".xx..", "..xx.", "...xx")),
        ({"window": (1, 0)}, ("x....", "xx...", ".xx..", "..xx.", "...xx")),
        ({"window": (0, 0)}, ("x....", ".x...", "..x..", "...x.", "....x")),
        ({"window": (0, -1)}, ("xxxxx", ".xxxx", "..xxx", "...xx", "....x")),
        ({"window": (-1, 1)}, ("xx...", "xxx..", "xxxx.", "xxxxx", "xxxxx")),
        ({"window": (2, 1)}, ("xx...", "xxx..", "xxxx.", ".xxxx", "..xxx")),
    ],
    ids=str,
)
def test_square_masks(options: dict[str, Any], lines: tuple[str, ...]) -> None:
    torch.testing.assert_close(weights(5, 5, **options), rows(*lines))


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"causal": True}, ("xxxx.", "xxxxx")),
        ({"window": (1, 0)}, ("..xx.", "...xx")),
        ({"window": (1, 1)}, ("..xxx", "...xx")),
        ({"window": (2, -1)}, (".xxxx", "..xxx")),
    ],
    ids=str,
)
def test_more_keys_than_queries(options: dict[str, Any], lines: tuple[str, ...]) -> None:
    """case 14: aligned bottom right, the last query at the last key."""
    torch.testing.assert_close(weights(2, 5, **options), rows(*lines))


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"causal": True}, ("..", "..", "..", "x.", "xx")),
        ({"window": (0, 0)}, ("..", "..", "..", "x.", ".x")),
        ({"window": (0, 2)}, ("..", "x.", "xx", "xx", ".x")),
        ({"window": (-1, 1)}, ("..", "..", "x.", "xx", "xx")),
        ({"window": (0, -1)}, ("xx", "xx", "xx", "xx", ".x")),
    ],
    ids=str,
)
def test_more_queries_than_keys(options: dict[str, Any], lines: tuple[str, ...]) -> None:
    """case 14: the first queries of a causal call see nothing."""
    torch.testing.assert_close(weights(5, 2, **options), rows(*lines))


def test_packed_masks_are_those_of_each_sequence() -> None:
    """case 14, packed: each sequence is aligned by its own lengths."""
    v = torch.cat([torch.eye(7)[:5], torch.eye(7)[5:]]).view(7, 1, 7)
    out = softcap_attention_varlen(
        full(7, 1, 7), full(7, 1, 7), v, cu_seqlens_q=cu(2, 5), cu_seqlens_k=cu(5, 2), max_seqlen_q=5, max_seqlen_k=5,
        softcap=1.0, causal=True,
    )  # fmt: skip
    expected = rows("xxxx...", "xxxxx..", ".......", ".......", ".......", ".....x.", ".....xx")
    torch.testing.assert_close(out[:, 0], expected)


def test_sliding_window_of_a_model() -> None:
    """case 23: a model's sliding_window = 5 is window (4, 0): the last row sees 5 keys, the sixth is poisoned."""
    v = full(1, 10, 1, 10, value=NAN)
    v[:, 5:] = torch.eye(10)[5:].view(5, 1, 10)
    out = softcap_attention(full(1, 10, 1, 10), full(1, 10, 1, 10), v, softcap=50.0, window=(4, 0))
    torch.testing.assert_close(out[0, 9, 0], rows(".....xxxxx")[0])
    wider = softcap_attention(full(1, 10, 1, 10), full(1, 10, 1, 10), v, softcap=50.0, window=(5, 0))
    assert wider[0, 9].isnan().all()


@pytest.mark.parametrize("window", [(2**31 - 1, 2**31 - 1), (2**31, 2**31), (2**62, 2**62), (2**63 - 1, 2**63 - 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_window_overflows_nowhere(window: tuple[int, int], causal: bool) -> None:
    q = randn(1, 40, 2, 8)
    for a, b in zip(
        attend(q, q, q, softcap=5.0, causal=causal, window=window),
        attend(q, q, q, softcap=5.0, causal=causal),
        strict=True,
    ):
        assert torch.equal(a, b)


# ---- nothing to see --------------------------------------------------------------------------------------------


@each_dtype()
@pytest.mark.parametrize("softcap", [1.0, 50.0, None])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_rows_that_see_nothing(packed: bool, softcap: float | None, dtype: torch.dtype) -> None:
    """cases 14, 15: out 0, lse -inf, dq 0 and not a trace in dk and dv, though their dout is huge and their q hot."""
    q, k, v = randn(5, 2, 8, factor=9, dtype=dtype), randn(2, 2, 8, dtype=dtype), randn(2, 2, 8, dtype=dtype)
    dout, dlse = randn(5, 2, 8, dtype=dtype), randn(2, 5, dtype=_lse_dtype(dtype))

    def gradients(dout: Tensor, dlse: Tensor) -> Result:
        if packed:
            lengths = {"cu_seqlens_q": cu(5), "cu_seqlens_k": cu(2), "max_seqlen_q": 5, "max_seqlen_k": 2}
            return evaluate(
                lambda *qkv: softcap_attention_varlen(*qkv, softcap=softcap, causal=True, return_lse=True, **lengths),
                Inputs(q, k, v, dout, dlse),
            )
        result = evaluate(
            lambda *qkv: attend(*qkv, softcap=softcap, causal=True),
            Inputs(q[None], k[None], v[None], dout[None], dlse[None]),
        )
        return Result(*(t[0] for t in result))

    result = gradients(dout, dlse)
    assert torch.equal(result.out[:3], torch.zeros_like(result.out[:3]))
    assert result.lse[:, :3].isneginf().all()
    assert torch.equal(result.out[3], v[0])
    assert result.lse[:, 3:].isfinite().all()
    assert torch.equal(result.dq[:3], torch.zeros_like(result.dq[:3]))
    dout[:3], dlse[:, :3] = 1e4, 1e4
    again = gradients(dout, dlse)
    assert torch.equal(again.dk, result.dk)
    assert torch.equal(again.dv, result.dv)
    assert result.dv.abs().max() > 0


def test_scores_below_any_sentinel() -> None:
    """case 15: a score of -66000 is a score, not a mask."""
    q, k, v = full(1, 1, 1, 1, value=-66000.0), full(1, 1, 1, 1, value=1.0), full(1, 1, 1, 1, value=3.0)
    out, lse = attend(q, k, v, softcap=None, scale=1.0)
    assert (out.item(), lse.item()) == (3.0, -66000.0)
    out, lse = attend(1e30 * q, k, v, softcap=None, scale=1.0)
    assert out.item() == 3.0
    assert lse.item() == pytest.approx(-6.6e34)


def test_zero_length_sequences() -> None:
    """case 18: rows of sequences whose other side is empty; nothing leaks from one sequence into the next."""
    cu_q = torch.tensor([0, 0, 5, 9, 9], dtype=torch.int32)
    cu_k = torch.tensor([0, 4, 9, 9, 12], dtype=torch.int32)
    for head_dim in (64, 256):
        x = Inputs(*(randn(n, h, head_dim, factor=3) for n, h in ((9, 4), (12, 1), (12, 1), (9, 4))), randn(4, 9))
        for causal in (False, True):
            result = evaluate(
                lambda *qkv: softcap_attention_varlen(
                    *qkv, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=5, softcap=5.0,
                    causal=causal, return_lse=True,  # noqa: B023
                ),
                x,
            )  # fmt: skip
            for t, empty in ((result.out, slice(5, 9)), (result.dq, slice(5, 9))):
                assert torch.equal(t[empty], torch.zeros_like(t[empty]))
                assert (t[:5] != 0).any(-1).all()
            for t in (result.dk, result.dv):
                assert torch.equal(t[:4], torch.zeros_like(t[:4]))
                assert torch.equal(t[9:], torch.zeros_like(t[9:]))
                assert (t[4:9] != 0).any(-1).all()
            assert result.lse[:, 5:].isneginf().all()
            assert result.lse[:, :5].isfinite().all()


def test_tail_rows() -> None:
    """Rows past cu_seqlens[-1] are 0 in outputs and gradients, and what they hold (NaN, say) goes nowhere."""
    sample = named("packed_tail")[0]
    x = sample.inputs(hot=True)
    clean = evaluate(sample.attention, x)
    n_q, n_k = sum(sample.lengths_q), sum(sample.lengths_k)
    for t, n in ((x.q, n_q), (x.dout, n_q), (x.k, n_k), (x.v, n_k)):
        t[n:] = NAN
    x.dlse[:, n_q:] = NAN
    dirty = evaluate(sample.attention, x)
    assert_equal(dirty, clean)
    for t, n in ((clean.out, n_q), (clean.dq, n_q), (clean.dk, n_k), (clean.dv, n_k)):
        assert torch.equal(t[n:], torch.zeros_like(t[n:]))
    assert clean.lse[:, n_q:].isneginf().all()


EMPTIES = """
    import torch, softcap_ops
    from softcap_ops import softcap_attention, softcap_attention_varlen

    def check(run, q, k, v):
        torch._dynamo.reset()
        for t in (q, k, v):
            t.requires_grad_()
        out, lse = run(q, k, v)
        assert out.shape == q.shape and not out.any() and lse.isneginf().all(), (out, lse)
        for t, g in zip((q, k, v), torch.autograd.grad((out, lse), (q, k, v), (out + 1, lse.exp() + 1))):
            assert g.shape == t.shape and not g.any()

    for compiled in (False, True):
        wrap = (lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")) if compiled else (lambda f: f)
        for causal in (True,) if compiled else (False, True):
            for b, sq, sk in ((0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0), (0, 0, 0), (0, 0, 4)):
                for dtype in (torch.float32,) if compiled else (torch.float32, torch.bfloat16):
                    q = torch.randn(b, sq, 4, 16, dtype=dtype)
                    k, v = (torch.randn(b, sk, 2, 16, dtype=dtype) for _ in "kv")
                    check(wrap(lambda *x: softcap_attention(*x, softcap=5.0, causal=causal, return_lse=True)), q, k, v)
            for cu_q, cu_k, tq, tk in (
                ([0], [0], 0, 0), ([0, 0], [0, 0], 0, 0), ([0], [0], 3, 2), ([0, 0, 3], [0, 2, 2], 3, 2)
            ):
                cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in (cu_q, cu_k))
                q, k, v = (torch.randn(t, h, 16) for t, h in ((tq, 4), (tk, 2), (tk, 2)))
                check(wrap(lambda *x: softcap_attention_varlen(
                    *x, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=3, max_seqlen_k=2, softcap=5.0,
                    causal=causal, return_lse=True)), q, k, v)
    print("fine")
"""


def test_empty_inputs_do_not_end_the_process() -> None:
    """case 21: in a process of its own, for a division by zero would be a signal."""
    done = run_python(EMPTIES)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


# ---- one answer however the keys are fed ------------------------------------------------------------------------


@each_dtype()
@pytest.mark.parametrize("window", [(-1, -1), (40, -1)], ids=["full", "window"])
def test_prefill_chunks_and_decode_agree(window: tuple[int, int], dtype: torch.dtype) -> None:
    """cases 5, 86: one prefill, four chunks, and 128 decode steps over the same keys."""
    seqlen, chunk = 128, 32
    q, k, v = (randn(2, seqlen, h, 32, factor=f, dtype=dtype) for h, f in ((8, 6), (1, 6), (1, 1)))
    options = {"softcap": 50.0, "causal": True, "window": window}
    prefill, lse = attend(q, k, v, **options)

    def parts(step: int) -> tuple[Tensor, Tensor]:
        steps = [
            attend(q[:, i : i + step], k[:, : i + step], v[:, : i + step], **options) for i in range(0, seqlen, step)
        ]
        return torch.cat([s[0] for s in steps], 1), torch.cat([s[1] for s in steps], 2)

    eps = torch.finfo(dtype).eps
    for step in (chunk, 1):
        out_parts, lse_parts = parts(step)
        torch.testing.assert_close(out_parts, prefill, rtol=8 * eps, atol=8 * eps)
        torch.testing.assert_close(lse_parts, lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 8])
@pytest.mark.parametrize("seqlen_k", [257, 1024, 4099])
def test_decode_batches(seqlen_q: int, seqlen_k: int) -> None:
    """case 86: short queries on long keys, GQA 8:1; each batch entry has its own keys."""
    for head_dim in (32, 256):
        q, k, v = randn(3, seqlen_q, 8, head_dim, factor=3), *(randn(3, seqlen_k, 1, head_dim) for _ in "kv")
        out, lse = attend(q, k, v, softcap=50.0, causal=True)
        for b in range(3):
            one_out, one_lse = attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], softcap=50.0, causal=True)
            torch.testing.assert_close(out[b : b + 1], one_out, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(lse[b : b + 1], one_lse, rtol=1e-6, atol=1e-5)
        ref = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2).double() for t in (q, k, v)), enable_gqa=True,
            attn_mask=torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q),
        )  # fmt: skip
        uncapped = softcap_attention(q, k, v, softcap=None, causal=True)
        torch.testing.assert_close(uncapped.double(), ref.transpose(1, 2), rtol=1e-4, atol=1e-5)


@each_dtype()
def test_packed_equals_dense(dtype: torch.dtype) -> None:
    """case 78: equal lengths, packed and dense, with every option away from its default."""
    x = Sample("dense", batch=3, seqlen_q=37, heads_q=6, heads_kv=2).inputs(dtype, hot=True)
    options = {"softcap": 3.0, "scale": 0.3, "causal": True, "window": (11, 5), "deterministic": True}
    dense = evaluate(lambda *qkv: attend(*qkv, **options), x)
    packed_x = Inputs(*(t.flatten(0, 1) for t in x[:4]), x.dlse.transpose(0, 1).flatten(1))
    lengths = cu(37, 37, 37)
    packed = evaluate(
        lambda *qkv: softcap_attention_varlen(
            *qkv, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=37, max_seqlen_k=37, return_lse=True,
            **options,
        ),
        packed_x,
    )  # fmt: skip
    eps = torch.finfo(dtype).eps
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(
            getattr(packed, name).view_as(getattr(dense, name)), getattr(dense, name), rtol=4 * eps, atol=4 * eps
        )
    torch.testing.assert_close(packed.lse.view(6, 3, 37).transpose(0, 1), dense.lse, rtol=1e-6, atol=1e-6)


@each_sample(named("causal", "gqa", "packed_gqa", "head_dim_33"))
@each_dtype()
def test_keys_and_queries_have_no_memory_of_order(sample: Sample, dtype: torch.dtype) -> None:
    """Appending keys that the mask hides, and batch entries beside it, changes no value of a sequence."""
    if sample.packed:
        alone = Sample("alone", lengths_q=(40,), lengths_k=(40,), heads_q=6, heads_kv=2, causal=True)
        x = sample.inputs(dtype, hot=True)
        part = Inputs(*(t[17:57] for t in x[:4]), x.dlse[:, 17:57])
        whole, own = evaluate(sample.attention, x), evaluate(alone.attention, part)
        pairs = [(getattr(whole, n)[17:57], getattr(own, n)) for n in ("out", "dq", "dk", "dv")]
        pairs.append((whole.lse[:, 17:57], own.lse))
    else:
        x = sample.inputs(dtype, hot=True)
        whole = evaluate(sample.attention, x)
        own = evaluate(sample.attention, Inputs(*(t[1:] for t in x)))
        pairs = [(getattr(whole, n)[1:], getattr(own, n)) for n in Result._fields]
    eps = torch.finfo(dtype).eps
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps)


# ---- NaN and inf in the data ------------------------------------------------------------------------------------


SEQLEN, ROW = 150, 100  # a few blocks of any kernel; a row in the middle of one


def _visible(options: dict[str, Any]) -> Tensor:
    i, j = torch.arange(SEQLEN)[:, None], torch.arange(SEQLEN)
    left, right = options.get("window", (-1, -1))
    seen = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool)
    if options.get("causal"):
        seen &= j <= i
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": True, "window": (20, -1)}, {"window": (3, 5)}], ids=str
)
@pytest.mark.parametrize("poisoned", ["q", "k", "v", "dout", "dlse"])
@each_dtype()
def test_nan_stays_where_it_is_seen(dtype: torch.dtype, poisoned: str, options: dict[str, Any], packed: bool) -> None:
    """A NaN in q or its gradients stays in its row and the keys of that row; one in a key or value reaches the rows
    that see it, and through them the keys that they see; one head apart nothing changes."""
    x = Inputs(*(randn(SEQLEN, 2, 16, dtype=dtype) for _ in range(4)), randn(2, SEQLEN, dtype=_lse_dtype(dtype)))
    lengths = cu(SEQLEN)

    def run() -> Result:
        if packed:
            return evaluate(
                lambda *qkv: softcap_attention_varlen(
                    *qkv, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=SEQLEN, max_seqlen_k=SEQLEN,
                    softcap=1.0, return_lse=True, **options,
                ),
                x,
            )  # fmt: skip
        result = evaluate(lambda *qkv: attend(*qkv, softcap=1.0, **options), Inputs(*(t[None] for t in x)))
        return Result(*(t[0] for t in result))

    clean = run()
    tensor = getattr(x, poisoned)
    if poisoned == "dlse":
        tensor[0, ROW] = NAN
    else:
        tensor[ROW, 0, 3] = NAN
    dirty = run()

    seen = _visible(options)
    rows_hit = seen[:, ROW] if poisoned in "kv" else torch.arange(SEQLEN) == ROW
    keys_hit = seen[rows_hit].any(0)
    forward_hit = poisoned in "qkv"
    eps = torch.finfo(dtype).eps

    def same_elsewhere(name: str, hit: Tensor) -> None:
        a, b = getattr(dirty, name), getattr(clean, name)
        if name == "lse":
            a, b = a.T, b.T
        torch.testing.assert_close(a[:, 1], b[:, 1], rtol=0, atol=0)  # the other head
        torch.testing.assert_close(a[~hit, 0], b[~hit, 0], rtol=8 * eps, atol=8 * eps)

    nothing = torch.zeros(SEQLEN, dtype=torch.bool)
    same_elsewhere("out", rows_hit if forward_hit else nothing)
    same_elsewhere("lse", rows_hit if poisoned in "qk" else nothing)
    same_elsewhere("dq", rows_hit)
    same_elsewhere("dk", keys_hit)
    same_elsewhere("dv", keys_hit)
    # And where it is seen, it is seen: a NaN that turns into a number hides a fault of the model.
    if poisoned in "qk":
        assert dirty.out[rows_hit, 0].isnan().all()
        assert dirty.lse[0, rows_hit].isnan().all()
        assert dirty.dq[rows_hit, 0].isnan().all()
    if poisoned == "v":
        assert dirty.out[rows_hit, 0, 3].isnan().all()
        torch.testing.assert_close(dirty.out[:, 0, :3], clean.out[:, 0, :3], rtol=8 * eps, atol=8 * eps)
    if poisoned in ("dout", "dlse", "v"):
        assert dirty.dq[rows_hit, 0].isnan().all()
        assert dirty.dk[keys_hit, 0].isnan().all()


@pytest.mark.parametrize("sign", [1, -1])
@each_dtype()
def test_infinite_scores_are_capped(dtype: torch.dtype, sign: int) -> None:
    """cap * tanh(inf) is the cap: an overflowing score is as good as a large one."""
    q, k, v = (
        full(1, 1, 1, 1, value=INF, dtype=dtype),
        full(1, 2, 1, 1, value=1.0, dtype=dtype),
        randn(1, 2, 1, 1, dtype=dtype),
    )
    k[0, 1] = -1
    out, lse = attend(sign * q, k, v, softcap=2.0, scale=1.0)
    e = math.exp(-4.0)
    heavy, light = (v[0, 0], v[0, 1]) if sign > 0 else (v[0, 1], v[0, 0])
    torch.testing.assert_close(out[0, 0], (heavy + e * light) / (1 + e), rtol=1e-2, atol=1e-2)
    assert lse.item() == pytest.approx(2 + math.log1p(e), rel=1e-6)


@each_dtype((torch.float32, torch.bfloat16))
def test_scores_that_overflow_float32(dtype: torch.dtype) -> None:
    """Products of 1e20 times 1e20 are infinite in float32; out and the gradients of v stay finite.

    The products of one query and key have one sign: infinities of both would add up to NaN where there is no FMA.
    """
    q, k, v, dout = (randn(1, 9, 2, 8, factor=f, dtype=dtype) for f in (1e20, 1e20, 1.0, 1.0))
    k = k.abs() * torch.tensor([1, -1], dtype=dtype).repeat(5)[:9, None, None]
    x = Inputs(q.abs(), k, v, dout, randn(1, 2, 9))
    result = evaluate(lambda *qkv: attend(*qkv, softcap=5.0), x)
    for name in ("out", "lse", "dv"):
        assert getattr(result, name).isfinite().all(), name
    assert (result.lse.abs() <= 5 + math.log(9) + 1e-4).all()


# ---- saturation --------------------------------------------------------------------------------------------------


@each_dtype()
@pytest.mark.parametrize("factor", [1.0, 6.0, 30.0, 1e3])
def test_gradients_are_finite_when_saturated(factor: float, dtype: torch.dtype) -> None:
    """case 6: 1 - tanh^2 goes to 0, not to NaN, and takes dq and dk with it."""
    x = Inputs(
        *(randn(1, 64, 2, 32, factor=f, dtype=dtype) for f in (factor, factor, 1, 1)),
        full(1, 2, 64, dtype=_lse_dtype(dtype)),
    )
    result = evaluate(lambda *qkv: attend(*qkv, softcap=1.0, causal=True), x)
    for name in Result._fields:
        assert getattr(result, name).isfinite().all(), name
    assert result.dv.abs().max() > 0
    if factor == 1e3:
        others = result.dq[:, 1:].abs().double()
        assert others.median() < 1e-12


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """Fresh memory is filled with NaN, so that an element nobody writes shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@each_dtype()
@each_sample()
def test_every_element_is_written(sample: Sample, dtype: torch.dtype, filled_memory: None) -> None:
    """cases 18, 21, 30, 48: no output holds memory as it came."""
    x = sample.inputs(dtype)
    out, lse = sample.attention(*x.qkv)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    for mask in ([True, True, True], [True, False, False], [False, True, False], [False, False, True]):
        grads = sample.op_bwd(*sample.op_bwd_args(x), None, None, None, None, mask)
        for g, wanted, t in zip(grads, mask, x.qkv, strict=True):
            assert g.shape == (t.shape if wanted else (0,))
            assert not g.isnan().any()


@each_sample(named("gqa", "causal_window", "packed_gqa", "seqlen_257"))
@each_dtype()
def test_repeatable(sample: Sample, dtype: torch.dtype) -> None:
    """deterministic=True is bit for bit repeatable, and for this kernel so is every call."""
    x = sample.inputs(dtype, hot=True)
    first = evaluate(sample.bind(deterministic=True), x)
    for deterministic in (True, True, None, False):
        assert_equal(evaluate(sample.bind(deterministic=deterministic), x), first)


@pytest.fixture
def any_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@each_sample(named("gqa", "mqa", "decode_gqa", "seqlen_257", "packed_gqa", "packed_many_sequences", "batch_0"))
def test_threads(sample: Sample, any_threads: Callable[[int], None]) -> None:
    x = sample.inputs(torch.float64, hot=not sample.empty)
    one = evaluate(sample.attention, x)
    for threads in (2, 3, 8):
        any_threads(threads)
        for a, b in zip(evaluate(sample.attention, x), one, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@each_sample(BOTH_LAYOUTS)
def test_inputs_are_not_written(sample: Sample) -> None:
    """case 49: nothing is written to, and no output shares an input's memory, contiguous or not, empty or not."""
    for strides in ("contiguous", "bhsd", "last_dim"):
        for hot in (False, True):
            s = Sample(**{**sample.__dict__, "name": f"{sample}_{strides}", "strides": strides})
            x = s.inputs(hot=hot)
            args = s.op_bwd_args(x)
            before = [a.clone() for a in args if isinstance(a, Tensor)]
            outputs = (*s.op(*s.op_args(*x.qkv)), *s.op_bwd(*args))
            tensors = [a for a in args if isinstance(a, Tensor)]
            for a, b in zip(tensors, before, strict=True):
                assert torch.equal(a, b)
            inputs_memory = {t.untyped_storage().data_ptr() for t in tensors}
            outputs_memory = [t.untyped_storage().data_ptr() for t in outputs]
            assert not inputs_memory & set(outputs_memory)
            assert len(set(outputs_memory)) == len(outputs_memory)


@each_sample(named("batch_0", "no_queries", "no_keys", "packed_batch_0"))
def test_empty_outputs_are_no_views(sample: Sample) -> None:
    """case 49: an empty result is not an input handed back."""
    x = sample.inputs()
    outputs = (*sample.op(*sample.op_args(*x.qkv)), *sample.op_bwd(*sample.op_bwd_args(x)))
    assert all(o is not i and not o._is_view() for o in outputs for i in x)


@pytest.mark.parametrize("role", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("axis", ["batch", "seqlen", "heads", "head_dim"])
def test_strides_beyond_32_bits(role: str, axis: str) -> None:
    """Offsets of more than 2^31 elements, in memory that is reserved but never touched."""
    shape = (3, 3, 3, 3)
    x = Inputs(*(randn(*shape, dtype=torch.float16) for _ in range(4)), randn(3, 3, 3))
    dim = ("batch", "seqlen", "heads", "head_dim").index(axis)
    strides = [27, 9, 3, 1]
    strides[dim] = 2**30 + 64
    storage = torch.empty(2 * (2**30 + 64) + 128, dtype=torch.float16)  # 4 GiB of address space, three pages of memory
    far = storage.as_strided(shape, strides)
    far.copy_(getattr(x, role))
    assert far.storage_offset() + sum((n - 1) * s for n, s in zip(shape, far.stride(), strict=True)) > 2**31
    near = evaluate(lambda *qkv: attend(*qkv, softcap=2.0), x)
    assert_equal(evaluate(lambda *qkv: attend(*qkv, softcap=2.0), x._replace(**{role: far})), near)


def test_offset_beyond_32_bits() -> None:
    """The same for a storage offset, as the last of many layers in one buffer has."""
    q = randn(2, 9, 2, 8, dtype=torch.float16)
    storage = torch.empty(2**31 + 4096, dtype=torch.float16)
    far = storage[2**31 + 3 :][: q.numel()].view(q.shape)
    far.copy_(q)
    for a, b in zip(attend(far, far, far, softcap=2.0), attend(q, q, q, softcap=2.0), strict=True):
        assert torch.equal(a, b)


def test_expanded_batch() -> None:
    """One sequence of keys for a large batch of queries costs no copy of them, and has the same answer."""
    q, k, v = randn(64, 5, 2, 8, factor=3), *(randn(1, 33, 2, 8).expand(64, -1, -1, -1) for _ in "kv")
    for a, b in zip(attend(q, k, v, softcap=2.0), attend(q, k.contiguous(), v.contiguous(), softcap=2.0), strict=True):
        assert torch.equal(a, b)


def test_memory_is_linear() -> None:
    """The score matrix of 16k x 16k (1 GiB in float32) is never held."""
    script = """
        import resource, torch
        from softcap_ops import softcap_attention
        torch.set_num_threads(1)
        q, k, v = (torch.randn(1, 16384, 1, 8, requires_grad=True) for _ in "qkv")
        softcap_attention(q[:, :64], k[:, :64], v[:, :64], softcap=5.0, causal=True).sum().backward()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        softcap_attention(q, k, v, softcap=5.0, window=(200, 200)).sum().backward()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 1024  # KiB


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_equal(actual: Result, expected: Result) -> None:
    for name in Result._fields:
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True, msg=name
        )
