"""The compiled CPU kernels called directly, against a float64 reference written out here."""

import itertools
import math

import pytest
import torch

from softcap_ops import _extension

_extension.load()
pytestmark = pytest.mark.skipif(_extension.LOAD_ERROR is not None, reason=str(_extension.LOAD_ERROR))
INF = float("inf")


def visible(sq, skv, causal, window):
    diagonal = torch.arange(sq)[:, None] + skv - sq
    j = torch.arange(skv)[None, :]
    mask = torch.ones(sq, skv, dtype=torch.bool)
    if causal:
        mask &= j <= diagonal
    if window[0] >= 0:
        mask &= j >= diagonal - window[0]
    if window[1] >= 0:
        mask &= j <= diagonal + window[1]
    return mask


def reference(q, k, v, softcap=0.0, scale=None, causal=False, window=(-1, -1)):
    """Out and lse in the dtype of the inputs, differentiable; rows that see nothing give 0 and -inf."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    mask = visible(q.shape[1], k.shape[1], causal, window)
    some = mask.any(-1)
    s = s.masked_fill(~mask, -INF).masked_fill(~some[:, None], 0.0)
    lse = s.logsumexp(-1).masked_fill(~some, -INF)
    p = s.softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(s.dtype).masked_fill(~mask, 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def lse_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def forward(q, k, v, softcap=0.0, scale=None, causal=False, window=(-1, -1), cu=(None, None)):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    shape = (q.shape[0], q.shape[2], q.shape[1]) if cu[0] is None else (q.shape[1], q.shape[0])
    lse = torch.full(shape, math.nan, dtype=lse_dtype(q))
    torch.ops.softcap_ops._cpu_attention_fwd(q, k, v, *cu, softcap, scale, causal, *window, out, lse)
    return out, lse


def backward(
    dout,
    dlse,
    q,
    k,
    v,
    out,
    lse,
    softcap=0.0,
    scale=None,
    causal=False,
    window=(-1, -1),
    cu=(None, None),
    need=(True, True, True),
):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    grads = [torch.full(x.shape, math.nan, dtype=x.dtype) if n else None for x, n in zip((q, k, v), need, strict=True)]
    torch.ops.softcap_ops._cpu_attention_bwd(
        dout, dlse, q, k, v, out, lse, *cu, softcap, scale, causal, *window, *grads
    )
    return grads


def error(x, ref):
    norm = ref.double().norm()
    return ((x.double() - ref.double()).norm() / (norm if norm > 0 else 1)).item()


def inputs(b, sq, skv, hq, hkv, d, dtype=torch.float64, factor=1.0, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = [(b, sq, hq, d), (b, skv, hkv, d), (b, skv, hkv, d), (b, sq, hq, d)]
    q, k, v, dout = (torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes)
    return [(q * factor).to(dtype), (k * factor).to(dtype), v.to(dtype), dout.to(dtype)]


MASKS = [
    {"causal": False, "window": (-1, -1)},
    {"causal": True, "window": (-1, -1)},
    {"causal": True, "window": (7, -1)},
    {"causal": False, "window": (5, 3)},
    {"causal": False, "window": (-1, 2)},
    {"causal": False, "window": (0, 0)},
    {"causal": True, "window": (2**62, 2**62)},
]
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 5, 5, 2, 1, 8),
    (1, 2, 5, 2, 2, 20),
    (1, 5, 2, 2, 2, 16),
    (2, 67, 131, 4, 2, 33),
    (1, 200, 70, 3, 1, 64),
    (1, 130, 300, 6, 2, 40),
    (1, 1, 300, 8, 2, 72),
    (3, 64, 128, 1, 1, 104),
    (1, 300, 300, 5, 5, 16),
]


@pytest.mark.parametrize("softcap", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, mask, softcap):
    q, k, v, dout = inputs(*shape, factor=3.0)
    for x in (q, k, v):
        x.requires_grad_()
    ref, ref_lse = reference(q, k, v, softcap, **mask)
    dlse = torch.randn(ref_lse.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = torch.isfinite(ref_lse)
    loss = (ref * dout).sum() + (ref_lse.masked_fill(~seen, 0.0) * dlse).sum()
    ref_grads = torch.autograd.grad(loss, (q, k, v))
    for dtype, tol in ((torch.float64, 1e-13), (torch.float32, 3e-5)):
        args = [x.detach().to(dtype) for x in (q, k, v)]
        out, lse = forward(*args, softcap, **mask)
        assert error(out, ref.detach()) < tol
        assert torch.equal(torch.isfinite(lse), seen)
        assert error(lse[seen], ref_lse.detach()[seen]) < tol
        assert (lse[~seen] == -INF).all()
        grads = backward(dout.to(dtype), dlse.to(dtype), *args, out, lse, softcap, **mask)
        for grad, ref_grad in zip(grads, ref_grads, strict=True):
            assert error(grad, ref_grad) < 10 * tol
        for need in itertools.product((True, False), repeat=3):
            some = backward(dout.to(dtype), dlse.to(dtype), *args, out, lse, softcap, **mask, need=need)
            for n, a, b in zip(need, some, grads, strict=True):
                assert torch.equal(a, b) if n else a is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layouts(dtype):
    q, k, v, dout = inputs(2, 70, 90, 4, 2, 24, dtype, 2.0)
    dlse = torch.randn(2, 4, 70, dtype=lse_dtype(q))

    def last_first(x):
        return x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)

    def in_wide(x):
        wide = torch.full((*x.shape[:-1], 3 * x.shape[-1] + 1), math.nan, dtype=x.dtype)
        wide[..., 1::3][..., : x.shape[-1]] = x
        return wide[..., 1::3][..., : x.shape[-1]]

    def run(q, k, v, dout, dlse, move=lambda x: x):
        out, lse = forward(q, k, v, 5.0, causal=True)
        return out, lse, *backward(dout, dlse, q, k, v, move(out), lse, 5.0, causal=True)

    expected = run(q, k, v, dout, dlse)
    for move in (last_first, in_wide, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        got = run(*(move(x) for x in (q, k, v, dout)), dlse.permute(2, 0, 1).contiguous().permute(1, 2, 0), move)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
    ones = torch.ones((), dtype=dtype).expand(q.shape)
    for a, b in zip(run(q, k, v, ones, dlse), run(q, k, v, ones.contiguous(), dlse), strict=True):
        assert torch.equal(a, b)
    one_key = k[:, :1].expand(-1, 90, -1, -1)
    for a, b in zip(run(q, one_key, v, ones, dlse), run(q, one_key.contiguous(), v, ones, dlse), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("d", [64, 256, 20])
def test_packed(d):
    cu_q = torch.tensor([0, 0, 5, 9, 9, 150], dtype=torch.int32)
    cu_k = torch.tensor([0, 4, 9, 9, 12, 300], dtype=torch.int32)
    gen = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(157, 4, d, generator=gen) for _ in range(2))
    k, v = (torch.randn(310, 1, d, generator=gen) for _ in range(2))
    dlse = torch.randn(4, 157, generator=gen)
    for mask in MASKS:
        out, lse = forward(q, k, v, 2.0, **mask, cu=(cu_q, cu_k))
        dq, dk, dv = backward(dout, dlse, q, k, v, out, lse, 2.0, **mask, cu=(cu_q, cu_k))
        expected = [torch.zeros_like(x) for x in (out, dq, dk, dv)]
        expected_lse = torch.full_like(lse, -INF)
        for b in range(5):
            rq, rk = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            one = [x[None] for x in (q[rq], k[rk], v[rk])]
            o, s = forward(*one, 2.0, **mask)
            g = backward(dout[rq][None], dlse[None, :, rq], *one, o, s, 2.0, **mask)
            expected[0][rq], expected_lse[:, rq] = o[0], s[0]
            expected[1][rq], expected[2][rk], expected[3][rk] = (x[0] for x in g)
        for a, b in zip((out, dq, dk, dv), expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
            assert torch.isfinite(a).all()
        assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize(
    ("b", "sq", "skv", "h"), [(0, 4, 4, 2), (2, 0, 4, 2), (2, 4, 0, 2), (2, 0, 0, 2), (2, 3, 3, 0)]
)
def test_empty(b, sq, skv, h):
    q, k, v, dout = inputs(b, sq, skv, h, h, 16, torch.float32)
    out, lse = forward(q, k, v, 5.0)
    grads = backward(dout, None, q, k, v, out, lse, 5.0)
    for x in (out, *grads):
        assert (x == 0).all()
    assert (lse == -INF).all()


def test_empty_packed():
    cu = torch.zeros(1, dtype=torch.int32)
    q = torch.randn(3, 2, 8)
    out, lse = forward(q, q, q, 5.0, cu=(cu, cu))
    grads = backward(q, None, q, q, q, out, lse, 5.0, cu=(cu, cu))
    assert all((x == 0).all() for x in (out, *grads))
    assert (lse == -INF).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("mask", [MASKS[1], MASKS[3]], ids=str)
def test_non_finite_stays_where_it_is_seen(name, bad, dtype, mask):
    b, sq, skv, d = 1, 150, 140, 16
    tol = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    q, k, v, dout = inputs(b, sq, skv, 2, 1, d, dtype)
    clean_out, clean_lse = forward(q, k, v, 5.0, **mask)
    clean = backward(dout, None, q, k, v, clean_out, clean_lse, 5.0, **mask)
    sees = visible(sq, skv, **mask)
    row = 100
    {"q": q, "k": k, "v": v, "dout": dout}[name][0, row, 0, 3] = bad
    out, lse = forward(q, k, v, 5.0, **mask)
    dq, dk, dv = backward(dout, None, q, k, v, out, lse, 5.0, **mask)
    if name in ("q", "dout"):
        rows = torch.arange(sq) == row
        keys = sees[row]
    else:
        rows = sees[:, row]
        keys = sees[rows].any(0)
    if name != "dout":
        assert error(out[:, ~rows], clean_out[:, ~rows]) < tol
        assert torch.equal(lse[..., ~rows], clean_lse[..., ~rows])
        if not math.isnan(bad) and name != "v":
            assert torch.isfinite(lse[..., rows][clean_lse[..., rows] > -INF]).all()
    if math.isnan(bad):
        assert not torch.isfinite(out[0, rows, 0]).any() or name == "dout" or name == "v"
        if name == "v":
            assert torch.isnan(out[0, rows, 0, 3]).all()
    assert error(dq[:, ~rows], clean[0][:, ~rows]) < tol
    assert error(dk[:, ~keys], clean[1][:, ~keys]) < tol
    assert error(dv[:, ~keys], clean[2][:, ~keys]) < tol


def test_plain_scores_below_any_sentinel():
    q, k = torch.full((1, 1, 1, 1), -66000.0), torch.ones(1, 1, 1, 1)
    out, lse = forward(q, k, torch.full_like(k, 3.0), 0.0, scale=1.0)
    assert out.item() == 3.0
    assert lse.item() == -66000.0


@pytest.mark.parametrize("softcap", [1.0, 30.0, 50.0])
def test_poisoned_values(softcap):
    q = torch.zeros(1, 4, 1, 8)
    v = torch.full((1, 4, 1, 8), 1e4)
    v[:, 0] = 0
    out, _ = forward(q, q, v, softcap, causal=True)
    assert (out[:, 0] == 0).all()


def test_closed_form():
    for cap, value in ((50.0, 48.201379), (30.0, 29.923739)):
        q, k = torch.full((1, 1, 1, 1), 100.0), torch.ones(1, 1, 1, 1)
        assert forward(q, k, k, cap, scale=1.0)[1].item() == pytest.approx(value, abs=1e-5)
        assert forward(-q, k, k, cap, scale=1.0)[1].item() == pytest.approx(-value, abs=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads(threads):
    q, k, v, dout = inputs(1, 500, 500, 3, 1, 20, torch.bfloat16)
    before = torch.get_num_threads()
    out, lse = forward(q, k, v, 5.0, causal=True)
    expected = backward(dout, None, q, k, v, out, lse, 5.0, causal=True)
    try:
        torch.set_num_threads(threads)
        again = forward(q, k, v, 5.0, causal=True)
        grads = backward(dout, None, q, k, v, out, lse, 5.0, causal=True)
        same = backward(dout, None, q, k, v, out, lse, 5.0, causal=True)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)
    for a, b, c in zip(grads, same, expected, strict=True):
        assert torch.equal(a, b)
        assert error(a, c) < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversions_are_exact(dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    if dtype == torch.bfloat16:
        # Machines that multiply bfloat16 take its subnormals (below 1.2e-38) for zero.
        x = torch.where(x.abs() < torch.finfo(dtype).tiny, 0.0, x)
    x = x.view(1, -1, 1, 16)
    out, _ = forward(torch.zeros_like(x), torch.zeros_like(x), x, 0.0, window=(0, 0))
    assert torch.equal(torch.isnan(out), torch.isnan(x))
    assert torch.equal(out[~torch.isnan(x)], x[~torch.isnan(x)])


def test_refuses_what_memory_cannot_bear():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="must have size"):
        forward(q, q[:, :, :, :4], q, 1.0)
    with pytest.raises(RuntimeError, match="multiple of heads"):
        forward(q, q[:, :, :0], q[:, :, :0], 1.0)
    x = q[0]
    for cu in ([0, 5], [1, 4], [0, 3, 2], [0, -1, 4]):
        bad = torch.tensor(cu, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="cu_seqlens_q must"):
            forward(x, x, x, 1.0, cu=(bad, bad))
    with pytest.raises(RuntimeError, match="must be contiguous"):
        torch.ops.softcap_ops._cpu_attention_fwd(
            q,
            q,
            q,
            None,
            None,
            1.0,
            1.0,
            False,
            -1,
            -1,
            q.transpose(1, 2).contiguous().transpose(1, 2),
            torch.empty(1, 2, 4),
        )
