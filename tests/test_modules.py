"""DotProductAttention: TransformerEngine's conventions, against a mask written out in full and the formula in float64.

CASES of the field that it settles: top-left against bottom-right diagonals, windows around either, padding anywhere.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import softcap_ops
from softcap_ops import DotProductAttention, UnsupportedError

CAP, HEADS, GROUPS, HEAD_DIM = 5.0, 4, 2, 8
CAUSAL = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")


@dataclass(frozen=True)
class Case:
    """One call: its mask arguments and the lengths of each sequence, in rows of `rows_q` and `rows_k`."""

    name: str
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    rows_q: int = 13
    rows_k: int = 13
    lengths_q: tuple[int, ...] = ()  # () = full rows
    lengths_k: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("attn_mask_type", "window_size", "bottom_right_diagonal")
        return {name: getattr(self, name) for name in names}

    def visible(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """bool (seqlen_q, seqlen_k) of one sequence, from TransformerEngine's description of its arguments."""
        kind = self.attn_mask_type.replace(",", "_")
        causal = "causal" in kind
        bottom_right = "bottom_right" in kind if causal else self.bottom_right_diagonal in (None, True)
        i = torch.arange(seqlen_q).unsqueeze(1) + (seqlen_k - seqlen_q if bottom_right else 0)
        j = torch.arange(seqlen_k)
        left, right = self.window_size or (-1, -1)
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        if causal:
            seen &= j <= i
        elif right >= 0 and left >= 0:
            seen &= j <= i + right
        if left >= 0:
            seen &= j >= i - left
        return seen


_MORE_KEYS = {"rows_q": 7, "rows_k": 19}
_MORE_QUERIES = {"rows_q": 19, "rows_k": 7}
_PAD = {"lengths_q": (9, 13, 4), "lengths_k": (9, 13, 4)}
_CROSS = {"rows_q": 13, "rows_k": 17, "lengths_q": (9, 13, 4), "lengths_k": (17, 2, 6)}

DENSE = (
    Case("no_mask", "no_mask"),
    Case("no_mask_cross", "no_mask", **_MORE_KEYS),
    Case("no_mask_window", "no_mask", (3, 2)),
    Case("no_mask_window_bottom_right", "no_mask", (3, 2), **_MORE_KEYS),
    Case("no_mask_window_top_left", "no_mask", (3, 2), False, **_MORE_KEYS),
    Case("no_mask_window_top_left_more_queries", "no_mask", (3, 2), False, **_MORE_QUERIES),
    Case("no_mask_window_wide_top_left", "no_mask", (9, 9), False, **_MORE_KEYS),
    Case("causal"),
    Case("causal_more_keys", **_MORE_KEYS),
    Case("causal_more_queries", **_MORE_QUERIES),
    Case("causal_window", window_size=(4, 0)),
    Case("causal_window_more_keys", window_size=(4, 0), **_MORE_KEYS),
    Case("causal_window_more_queries", window_size=(4, 0), **_MORE_QUERIES),
    Case("causal_window_wide_more_queries", window_size=(30, 0), **_MORE_QUERIES),
    Case("causal_window_self", window_size=(0, 0), **_MORE_QUERIES),
    Case("causal_bottom_right", "causal_bottom_right", **_MORE_KEYS),
    Case("causal_bottom_right_more_queries", "causal_bottom_right", **_MORE_QUERIES),
    Case("causal_bottom_right_window", "causal_bottom_right", (4, 0), **_MORE_KEYS),
    Case("causal_decode_bottom_right", "causal_bottom_right", rows_q=1, rows_k=19),
    Case("causal_decode_top_left", "causal", rows_q=1, rows_k=19),
)
PADDED = (
    Case("padding", "padding", **_PAD),
    Case("padding_cross", "padding", **_CROSS),
    Case("padding_window_cross", "padding", (3, 2), **_CROSS),
    Case("padding_causal", "padding_causal", **_PAD),
    Case("padding_causal_by_another_name", "causal,padding", **_PAD),
    Case("padding_causal_window", "padding_causal", (4, 0), **_PAD),
    Case("padding_causal_bottom_right", "padding_causal_bottom_right", **_CROSS),
    Case("padding_causal_bottom_right_window", "padding_causal_bottom_right", (4, 0), **_CROSS),
    Case("padding_window_top_left", "padding", (3, 2), False, **_PAD),
    Case("padding_empty", "padding_causal", lengths_q=(0, 13, 0), lengths_k=(0, 13, 0)),
)
each_dense = pytest.mark.parametrize("case", DENSE, ids=str)
each_padded = pytest.mark.parametrize("case", PADDED, ids=str)
each_heat = pytest.mark.parametrize("hot", [False, True], ids=["cold", "hot"])
each_dense_format = pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])


def tensors(case: Case, hot: bool, batch: int = 3) -> list[Tensor]:
    """q, k, v, dout in float64, batch first, dout flattened. Hot: the largest score is 2.5 caps."""
    q = torch.randn(batch, case.rows_q, HEADS, HEAD_DIM, dtype=torch.float64)
    k, v = (torch.randn(batch, case.rows_k, GROUPS, HEAD_DIM, dtype=torch.float64) for _ in range(2))
    if hot:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(HEADS // GROUPS, 2)) / HEAD_DIM**0.5
        q = q * (2.5 * CAP / scores.abs().max())
    return [q, k, v, torch.randn(batch, case.rows_q, HEADS * HEAD_DIM, dtype=torch.float64)]


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float = CAP) -> Tensor:
    """One sequence: (seqlen_q, heads, head_dim) -> (seqlen_q, heads * head_dim); rows that see nothing are 0."""
    k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.where(seen, scores, -1e300).softmax(-1) * seen
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def expected(case: Case, x: list[Tensor], where: Any = None, softcap: float = CAP) -> list[Tensor]:
    """out, dq, dk, dv of the padded batch: at the tokens what the formula gives, elsewhere 0.

    where: bool (batch, rows) for q and for k, True = token; None: the first `length` of each row.
    """
    q, k, v, dout = (t.detach().clone().requires_grad_() for t in x)
    tokens_q, tokens_k = where or token_masks(case, q.shape[0])
    out = torch.zeros_like(dout)
    for b in range(q.shape[0]):
        at_q, at_k = tokens_q[b], tokens_k[b]
        seen = case.visible(int(at_q.sum()), int(at_k.sum()))
        part = formula(q[b, at_q], k[b, at_k], v[b, at_k], seen, softcap)
        out = out.index_put((torch.tensor(b), at_q.nonzero()[:, 0]), part)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())]


def token_masks(case: Case, batch: int) -> tuple[Tensor, Tensor]:
    return tuple(
        torch.arange(rows) < torch.tensor(lengths or (rows,) * batch).unsqueeze(1)
        for rows, lengths in ((case.rows_q, case.lengths_q), (case.rows_k, case.lengths_k))
    )


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def evaluate(attend: Any, x: list[Tensor], qkv_format: str = "bshd", **arguments: Any) -> list[Tensor]:
    """out, dq, dk, dv of the module, batch first."""
    sequence_first = qkv_format == "sbhd"
    q, k, v, dout = (t.transpose(0, 1).contiguous() if sequence_first else t for t in x)
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, qkv_format=qkv_format, **arguments)
    assert out.shape == dout.shape
    assert out.is_contiguous()
    result = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    return [t.transpose(0, 1) if sequence_first else t for t in result]


def check(actual: list[Tensor], ref: list[Tensor], allowed: float = 1e-11) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), actual, ref, strict=True):
        size = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        assert torch.allclose(a.double(), b, rtol=0.0, atol=allowed * size), f"{name}: {(a - b).abs().max().item()}"


def module(**overrides: Any) -> DotProductAttention:
    return DotProductAttention(HEADS, HEAD_DIM, **{"num_gqa_groups": GROUPS, "softcap": CAP, **overrides})


@each_dense_format
@each_heat
@each_dense
def test_dense(case: Case, hot: bool, qkv_format: str) -> None:
    x = tensors(case, hot)
    ref = expected(case, x)
    check(evaluate(module(), x, qkv_format, **case.arguments), ref)
    if (
        hot and case.visible(case.rows_q, case.rows_k).sum(1).max() > 1
    ):  # one key has all the weight, whatever its score
        assert (expected(case, x, softcap=0.0)[0] - ref[0]).abs().max() > 0.1


@each_dense_format
@each_heat
@each_padded
def test_padding_by_cu_seqlens(case: Case, hot: bool, qkv_format: str) -> None:
    x = tensors(case, hot)
    cu_q, cu_k = cumulative(case.lengths_q), cumulative(case.lengths_k)
    actual = evaluate(module(), x, qkv_format, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k, **case.arguments)
    check(actual, expected(case, x))
    if hot:
        assert (expected(case, x, softcap=0.0)[0] - actual[0]).abs().max() > 0.1


@each_dense_format
@pytest.mark.parametrize("where", ["left", "right", "anywhere"])
@each_padded
def test_padding_by_mask(case: Case, qkv_format: str, where: str) -> None:
    x = tensors(case, hot=True)
    masks = list(token_masks(case, 3))
    if where == "left":
        masks = [m.flip(1) for m in masks]
    elif where == "anywhere":
        masks = [torch.stack([row[torch.randperm(len(row))] for row in m]) for m in masks]
    if case.lengths_q == case.lengths_k:
        masks[1] = masks[0]
    padding = tuple(~m.unflatten(1, (1, 1, -1)) for m in masks)
    for t, m in zip(x, (masks[0], masks[1], masks[1], masks[0]), strict=True):
        t[~m] = float("nan")  # whatever padding holds, it does not come out
    clean = [t.nan_to_num(0.0) for t in x]
    given = padding[0] if case.lengths_q == case.lengths_k else padding
    actual = evaluate(module(attention_type="cross"), x, qkv_format, attention_mask=given, **case.arguments)
    check(actual, expected(case, clean, masks))


@pytest.mark.parametrize("gaps", [(0, 0), (3, 2)], ids=["tight", "padded"])
@each_heat
@each_padded
def test_packed(case: Case, hot: bool, gaps: tuple[int, int]) -> None:
    x = tensors(case, hot)
    lengths = (case.lengths_q, case.lengths_k)
    rows_of = [tuple(n + gap * (i + 1) for i, n in enumerate(ls)) for ls, gap in zip(lengths, gaps, strict=True)]

    def pack(t: Tensor, side: int) -> Tensor:
        """The tokens of each row, and after them as much padding as the case asks for."""
        parts = []
        for row, length, rows in zip(t, lengths[side], rows_of[side], strict=True):
            parts += [row[:length], torch.full((rows - length, *row.shape[1:]), float("nan"))]
        return torch.cat([*parts, torch.full((2, *t.shape[2:]), float("nan"))])  # and a tail

    packed = [pack(t, side) for t, side in zip(x, (0, 1, 1, 0), strict=True)]
    cu_q, cu_k = (cumulative(ls) for ls in lengths)
    arguments = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_k, **case.arguments}
    if gaps != (0, 0):
        arguments |= {"cu_seqlens_q_padded": cumulative(rows_of[0]), "cu_seqlens_kv_padded": cumulative(rows_of[1])}
    actual = evaluate(module(), packed, "thd", **arguments)
    for a, r, side in zip(actual, expected(case, x), (0, 0, 1, 1), strict=True):
        wanted = pack(r, side).nan_to_num(0.0)
        assert torch.allclose(a, wanted, rtol=0.0, atol=1e-11 * max(1.0, wanted.abs().max().item()))


def test_packed_longest_may_be_given() -> None:
    case = next(c for c in PADDED if c.name == "padding_causal_bottom_right")
    cu_q, cu_k = cumulative(case.lengths_q), cumulative(case.lengths_k)
    q = torch.randn(int(cu_q[-1]), HEADS, HEAD_DIM)
    k = torch.randn(int(cu_k[-1]), GROUPS, HEAD_DIM)
    attend = module(qkv_format="thd", attn_mask_type=case.attn_mask_type)
    out = attend(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k)
    assert torch.equal(out, attend(q, k, k, None, None, cu_q, cu_k, None, None, 13, 17))


# ---- softcap, and the arguments that have two places ----------------------------------------------------------


def test_the_cap_of_the_forward_wins_and_zero_is_off() -> None:
    case = DENSE[7]
    x = tensors(case, hot=True)
    attend = module(softcap=3.0)
    check(evaluate(attend, x, softcap=CAP), expected(case, x))
    check(evaluate(attend, x), expected(case, x, softcap=3.0))
    off = expected(case, x, softcap=0.0)
    check(evaluate(attend, x, softcap=0.0), off)
    check(evaluate(module(softcap=None), x), off)
    check(evaluate(DotProductAttention(HEADS, HEAD_DIM, GROUPS), x), off)
    assert (off[0] - expected(case, x)[0]).abs().max() > 0.1


def test_the_constructor_holds_what_the_forward_leaves_out() -> None:
    case = next(c for c in DENSE if c.name == "no_mask_window_top_left")
    x = tensors(case, hot=True)
    attend = module(**case.arguments, qkv_format="bshd", softmax_scale=HEAD_DIM**-0.5)
    q, k, v, _ = x
    assert torch.allclose(attend(q, k, v), expected(case, x)[0])
    scaled = module(**case.arguments, softmax_scale=2 * HEAD_DIM**-0.5)
    assert torch.allclose(scaled(q / 2, k, v, qkv_format="bshd"), expected(case, x)[0])


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_one_tensor_for_several(qkv_format: str, dim: int) -> None:
    shape = (11,) if qkv_format == "thd" else (3, 11)
    cu = cumulative((4, 7))
    arguments = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "attn_mask_type": "padding_causal"}
    arguments = {"qkv_format": qkv_format, **(arguments if qkv_format == "thd" else {})}
    attend = module(num_gqa_groups=HEADS)
    q, k, v = (torch.randn(*shape, HEADS, HEAD_DIM) for _ in range(3))
    out = attend(q, k, v, **arguments)
    at = dim + 1 if dim == -2 else dim  # stack counts axes of the result
    packed = {"qkv_interleave_dim": dim, **arguments}
    assert torch.equal(attend(qkv_layer=torch.stack((q, k, v), at if dim == -3 else -2), **packed), out)
    assert torch.equal(attend(q, kv_layer=torch.stack((k, v), at if dim == -3 else -2), **packed), out)


@each_heat
def test_checkpointed(hot: bool) -> None:
    case = DENSE[7]
    x = tensors(case, hot)
    with torch.profiler.profile() as profile:
        check(evaluate(module(), x, checkpoint_core_attention=True), expected(case, x))
    calls = [e.count for e in profile.key_averages() if e.key == "softcap_ops::attention_fwd"]
    assert calls == [2]


def test_tensor_parallel_ranks_hold_their_heads() -> None:
    case = DENSE[7]
    q, k, v, _ = tensors(case, hot=True)
    whole = module(qkv_format="bshd")(q, k, v)
    half = module(qkv_format="bshd", tp_size=2)
    parts = [half(q[:, :, 2 * r : 2 * r + 2], k[:, :, r : r + 1], v[:, :, r : r + 1]) for r in range(2)]
    assert torch.equal(torch.cat(parts, -1), whole)
    with pytest.raises(ValueError, match="query_layer must have 2 heads of 8"):
        half(q, k, v)


def test_deterministic_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module().deterministic is None
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert module().deterministic is True


def test_state_of_transformer_engine_loads() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), module())
    state = {**model.state_dict(), "1._extra_state": torch.zeros(3)}
    model.load_state_dict(state)
    assert set(model.state_dict()) == {"0.weight", "0.bias"}


def test_autocast() -> None:
    q, k, v, _ = (t.float() for t in tensors(DENSE[7], hot=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert module()(q, k, v, qkv_format="bshd").dtype == torch.bfloat16


# ---- compiled ----------------------------------------------------------------------------------------------------

COMPILED = {
    "causal_window": ("bshd", {}),
    "causal_more_queries": ("sbhd", {}),
    "no_mask_window_top_left": ("bshd", {}),
    "causal": ("sbhd", {"checkpoint_core_attention": True}),
    "padding_causal": ("sbhd", {}),
    "padding_causal_bottom_right_window": ("bshd", {}),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name: str, dynamic: bool) -> None:
    case = next(c for c in DENSE + PADDED if c.name == name)
    qkv_format, arguments = COMPILED[name]
    if case in PADDED:
        arguments = {"cu_seqlens_q": cumulative(case.lengths_q), "cu_seqlens_kv": cumulative(case.lengths_k)}
    compiled = torch.compile(module(), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x = tensors(case, hot=True)
    check(evaluate(compiled, x, qkv_format, **arguments, **case.arguments), expected(case, x))


def test_compiles_by_inductor_packed_with_padding_and_by_mask() -> None:
    cu, cu_padded = cumulative((9, 4)), cumulative((11, 7))
    q, k = torch.randn(20, HEADS, HEAD_DIM) * 6, torch.randn(20, GROUPS, HEAD_DIM)
    attend = module(qkv_format="thd", attn_mask_type="padding_causal")
    compiled = torch.compile(attend, fullgraph=True)
    arguments = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "cu_seqlens_q_padded": cu_padded}
    arguments |= {"cu_seqlens_kv_padded": cu_padded, "max_seqlen_q": 9, "max_seqlen_kv": 9}
    assert torch.allclose(compiled(q, k, k, **arguments), attend(q, k, k, **arguments), atol=1e-6)
    q, k = q.unflatten(0, (2, 10)), k.unflatten(0, (2, 10))
    mask = torch.rand(2, 1, 1, 10) < 0.3
    arguments = {"attention_mask": mask, "qkv_format": "bshd"}
    assert torch.allclose(compiled(q, k, k, **arguments), attend(q, k, k, **arguments), atol=1e-6)
    with pytest.raises(Exception, match="max_seqlen_q must be given in a compiled model"):
        compiled(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), cu_seqlens_q=cu, cu_seqlens_kv=cu)


# ---- refusals ------------------------------------------------------------------------------------------------------

NOT_OFFERED = {
    "attention_dropout": 0.1,
    "softmax_type": "off-by-one",
    "return_max_logit": True,
    "attn_mask_type": "arbitrary",
    "kv_channels": (8, 4),
}
NOT_OFFERED_FORWARD = {
    "core_attention_bias_type": "alibi",
    "core_attention_bias": torch.zeros(1, HEADS, 13, 13),
    "alibi_slopes": torch.zeros(HEADS),
    "attn_mask_type": "arbitrary",
    "fp8_output": True,
    "bf16_backward": True,
    "inference_params": object(),
    "score_mod": lambda graph, score, tensors: score,
    "score_mod_bprop": lambda graph, score, tensors: score,
    "score_mod_tensors": {},
    "score_mod_bprop_tensors": {},
}
WRONG = {
    "qkv_format": "bhsd",
    "attn_mask_type": "prefix",
    "window_size": (-2, 0),
    "softcap": -1.0,
    "attention_type": "both",
    "cp_comm_type": "ring",
    "num_gqa_groups": 3,
    "tp_size": 3,
}


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_constructor_refuses_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        DotProductAttention(**{"num_attention_heads": HEADS, "kv_channels": HEAD_DIM, name: NOT_OFFERED[name]})


@pytest.mark.parametrize("name", NOT_OFFERED_FORWARD)
def test_forward_refuses_by_name(name: str) -> None:
    q, k, v, _ = tensors(DENSE[7], hot=False)
    with pytest.raises(UnsupportedError, match=name):
        module()(q, k, v, qkv_format="bshd", **{name: NOT_OFFERED_FORWARD[name]})


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DotProductAttention(**{"num_attention_heads": HEADS, "kv_channels": HEAD_DIM, name: WRONG[name]})


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("query_layer must be given", {"query_layer": None}),
        ("query_layer must have 3 dimensions", {"qkv_format": "thd"}),
        ("needs attention_mask", {"attn_mask_type": "padding"}),
        ("cu_seqlens_kv must be given", {"attn_mask_type": "padding", "cu_seqlens_q": cumulative((1, 1, 1))}),
        ("attention_mask must have shape", {"attn_mask_type": "padding", "attention_mask": torch.zeros(3, 13).bool()}),
        ("cu_seqlens_q_padded", {"cu_seqlens_q_padded": cumulative((1, 1, 1))}),
        ("softcap must be finite", {"softcap": float("inf")}),
        ("window_size must be", {"attn_mask_type": "no_mask", "window_size": (3, -1)}),
    ],
)
def test_wrong_arguments_are_named(message: str, arguments: dict[str, Any]) -> None:
    q, k, v, _ = tensors(DENSE[7], hot=False)
    with pytest.raises(ValueError, match=message):
        module()(**{"query_layer": q, "key_layer": k, "value_layer": v, "qkv_format": "bshd", **arguments})


def test_a_diagonal_at_the_top_left_of_unequal_packed_sequences_is_refused() -> None:
    q, k = torch.randn(9, HEADS, HEAD_DIM), torch.randn(9, GROUPS, HEAD_DIM)
    arguments = {"cu_seqlens_q": cumulative((4, 5)), "cu_seqlens_kv": cumulative((5, 4)), "qkv_format": "thd"}
    with pytest.raises(UnsupportedError, match="padding_causal_bottom_right"):
        module()(q, k, k, attn_mask_type="padding_causal", **arguments)
    module()(q, k, k, attn_mask_type="padding_causal_bottom_right", **arguments)
    compiled = torch.compile(module(), fullgraph=True)
    arguments |= {"max_seqlen_q": 5, "max_seqlen_kv": 5}
    with pytest.raises(RuntimeError, match="different lengths of q and k"):
        compiled(q, k, k, attn_mask_type="padding_causal", **arguments)


def _padding_q(*offsets: int, dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    """Two sequences, of 3 and 3 tokens in 8 rows, with these offsets on the side of q."""
    cu = cumulative((3, 3))
    good = torch.tensor([0, 4, 8], dtype=torch.int32)
    return {
        "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "cu_seqlens_kv_padded": good,
        "cu_seqlens_q_padded": torch.tensor(offsets, dtype=dtype),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "cu_seqlens_q_padded must leave", _padding_q(0, 2, 8)),
        (ValueError, "cu_seqlens_q_padded must rise", _padding_q(-1, 4, 8)),
        (ValueError, "cu_seqlens_q_padded must rise", _padding_q(4, 0, 8)),
        (ValueError, "cu_seqlens_q_padded must rise", _padding_q(0, 4, 9)),
        (ValueError, "cu_seqlens_q_padded must have shape", _padding_q(0, 8)),
        (ValueError, "cu_seqlens_q_padded must have shape", _padding_q(0, 4, 8, 8)),
        (TypeError, "cu_seqlens_q_padded must be int32", _padding_q(0, 4, 8, dtype=torch.float32)),
        (TypeError, "cu_seqlens_q_padded must be a Tensor", {**_padding_q(0, 4, 8), "cu_seqlens_q_padded": [0, 4, 8]}),
        (TypeError, "cu_seqlens_kv must be a Tensor", {**_padding_q(0, 4, 8), "cu_seqlens_kv": [0, 3, 6]}),
        (ValueError, "cu_seqlens_kv must have shape", {**_padding_q(0, 4, 8), "cu_seqlens_kv": cumulative((6,))}),
    ],
)
def test_offsets_of_packed_padding_are_checked(error: Any, message: str, arguments: dict[str, Any]) -> None:
    q, k = torch.randn(8, HEADS, HEAD_DIM), torch.randn(8, GROUPS, HEAD_DIM)
    attend = module(qkv_format="thd", attn_mask_type="padding")
    attend(q, k, k, **_padding_q(0, 4, 8))
    with pytest.raises(error, match=message):
        attend(q, k, k, **arguments)


def test_rows_before_the_first_packed_sequence_are_padding() -> None:
    case = Case("one", "padding_causal", rows_q=4, rows_k=4, lengths_q=(4,), lengths_k=(4,))
    x = tensors(case, hot=True, batch=1)
    rows = [torch.cat([torch.full_like(t[0, :2], float("nan")), t[0]]) for t in x]
    cu, padded = cumulative((4,)), torch.tensor([2, 6], dtype=torch.int32)
    arguments = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    actual = evaluate(module(), rows, "thd", **arguments, **case.arguments)
    assert all((t[:2] == 0).all() for t in actual)
    check([t[2:].unsqueeze(0) for t in actual], expected(case, x))


_BATCH = {"attn_mask_type": "padding", "cu_seqlens_q": cumulative((4, 4)), "cu_seqlens_kv": cumulative((2, 2))}
_MASK = torch.zeros(2, 1, 1, 4, dtype=torch.bool)


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
@pytest.mark.parametrize(
    ("error", "message", "batch_k", "arguments"),
    [
        (ValueError, "key_layer must have the batch of query_layer, 2", 4, _BATCH),
        (ValueError, "key_layer must have the batch of query_layer, 2", 4, {"attn_mask_type": "no_mask"}),
        (ValueError, "cu_seqlens_q must have shape", 2, {**_BATCH, "cu_seqlens_q": cumulative((4, 4, 4))}),
        (ValueError, "cu_seqlens_kv must have shape", 2, {**_BATCH, "cu_seqlens_kv": cumulative((4,))}),
        (
            ValueError,
            "cu_seqlens_q must hold sequences of at most 4",
            2,
            {**_BATCH, "cu_seqlens_q": cumulative((5, 1))},
        ),
        (TypeError, "cu_seqlens_q must be a Tensor", 2, {**_BATCH, "cu_seqlens_q": [0, 4, 8]}),
        (TypeError, "cu_seqlens_q must be int32", 2, {**_BATCH, "cu_seqlens_q": cumulative((4, 4)).long()}),
        (ValueError, "attention_mask must have shape", 2, {"attention_mask": _MASK[:1]}),
        (ValueError, "attention_mask must have shape", 2, {"attention_mask": (_MASK, _MASK.repeat(2, 1, 1, 1))}),
        (TypeError, "attention_mask must be a Tensor", 2, {"attention_mask": (None, _MASK)}),
        (ValueError, "attention_mask must be a Tensor or a pair", 2, {"attention_mask": (_MASK, _MASK, _MASK)}),
    ],
)
def test_padding_is_compared_with_the_batch(
    error: Any, message: str, batch_k: int, arguments: dict[str, Any], qkv_format: str
) -> None:
    q, k = torch.randn(2, 4, HEADS, HEAD_DIM), torch.randn(batch_k, 4, GROUPS, HEAD_DIM)
    if qkv_format == "sbhd":
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    with pytest.raises(error, match=message):
        module(attn_mask_type="padding")(q, k, k, qkv_format=qkv_format, **arguments)


def test_value_layer_is_named() -> None:
    q, k, v, _ = tensors(DENSE[7], hot=False)
    attend = module(qkv_format="bshd")
    with pytest.raises(ValueError, match="value_layer must have the shape of key_layer"):
        attend(q, k, v[:, 1:])
    with pytest.raises(TypeError, match="value_layer must be a Tensor"):
        attend(q, k, v.tolist())
    with pytest.raises(ValueError, match="qkv_layer must have size 3"):
        attend(qkv_layer=q[0, 0])
    with pytest.raises(ValueError, match="kv_layer must have size 2"):
        attend(q, kv_layer=k[0, 0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_mask_type", None), ("attn_mask_type", 3), ("window_size", 3), ("window_size", (3.0, 0)),
        ("softcap", "50"), ("softcap", torch.tensor(50.0)), ("softmax_scale", "1"), ("kv_channels", "8"),
        ("kv_channels", (8, 8, 8)),
    ],
)  # fmt: skip
def test_wrong_types_are_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        DotProductAttention(**{"num_attention_heads": HEADS, "kv_channels": HEAD_DIM, name: value})


# ---- the interface ---------------------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
# Names, order and defaults of TransformerEngine's module (2.x, August 2026).
CONSTRUCTOR = {
    "num_attention_heads": REQUIRED, "kv_channels": REQUIRED, "num_gqa_groups": None, "attention_dropout": 0.0,
    "qkv_format": "sbhd", "attn_mask_type": "causal", "window_size": None, "bottom_right_diagonal": None,
    "sequence_parallel": False, "tp_size": 1, "get_rng_state_tracker": None, "tp_group": None, "layer_number": None,
    "attention_type": "self", "cp_group": None, "cp_global_ranks": None, "cp_stream": None, "cp_comm_type": "p2p",
    "softmax_scale": None, "softmax_type": "vanilla", "return_max_logit": False, "name": None,
}  # fmt: skip
FORWARD = {
    "query_layer": None, "key_layer": None, "value_layer": None, "attention_mask": None, "qkv_format": None,
    "cu_seqlens_q": None, "cu_seqlens_kv": None, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None,
    "max_seqlen_q": None, "max_seqlen_kv": None, "attn_mask_type": None, "window_size": None,
    "bottom_right_diagonal": None, "checkpoint_core_attention": False, "core_attention_bias_type": "no_bias",
    "core_attention_bias": None, "alibi_slopes": None, "fast_zero_fill": True, "inference_params": None,
    "pad_between_seqs": None, "fp8_output": False, "bf16_backward": False, "num_splits": 1, "score_mod": None,
    "score_mod_bprop": None, "score_mod_tensors": None, "score_mod_bprop_tensors": None, "qkv_layer": None,
    "kv_layer": None, "qkv_interleave_dim": -3,
}  # fmt: skip
GROUP = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")


def defaults(function: Any) -> dict[str, Any]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name != "self"}


def test_signatures_are_those_of_transformer_engine() -> None:
    constructor, forward = defaults(DotProductAttention.__init__), defaults(DotProductAttention.forward)
    assert list(constructor.items()) == [*CONSTRUCTOR.items(), ("softcap", 0.0)]
    assert list(forward.items()) == [*FORWARD.items(), ("softcap", None)]
    assert tuple(defaults(DotProductAttention.set_context_parallel_group)) == GROUP


def test_signatures_are_those_of_the_transformer_engine_here() -> None:
    engine = pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")
    for name in ("__init__", "forward", "set_context_parallel_group"):
        theirs = defaults(getattr(engine.DotProductAttention, name))
        ours = defaults(getattr(DotProductAttention, name))
        missing = {k: v for k, v in theirs.items() if k not in ours or (v is not REQUIRED and ours[k] != v)}
        assert not missing, f"{name}: {missing}"


def test_it_is_exported() -> None:
    assert softcap_ops.DotProductAttention is DotProductAttention
    assert "softcap=5.0" in repr(module())
