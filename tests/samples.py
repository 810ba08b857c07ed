"""The table of named cases that every suite runs, and the tensors to run them on.

A `Sample` is one call: its layout, shapes, options and the strides its tensors have. Its values come in two heats:

- cold: N(0, 1). The cap of a trained model (30, 50) changes next to nothing, so a kernel without it would pass;
- hot: q is scaled until the largest visible score is 2.5 times the cap, where dropping the cap, capping in the
  wrong place or leaving 1 - tanh^2 out of the gradient all show.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import softcap_ops
from softcap_ops import reference

HOT = 2.5  # largest visible score of a hot sample, in caps
HOT_UNCAPPED = 30.0  # the same where the cap is off, in units of the score

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def double(self) -> Inputs:
        return Inputs(*(t.double() for t in self))


@dataclass(frozen=True)
class Sample:
    """One named call. Dense by default; packed when `lengths_q` and `lengths_k` are given."""

    name: str
    batch: int = 2
    seqlen_q: int = 48
    seqlen_k: int | None = None  # None = seqlen_q
    heads_q: int = 2
    heads_kv: int | None = None  # None = heads_q
    head_dim: int = 32
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    tail_q: int = 0  # rows past cu_seqlens_q[-1]
    tail_k: int = 0
    slack: int = 0  # max_seqlen_* above the longest sequence
    softcap: float | None = 5.0
    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    strides: str = "contiguous"  # see `restride`

    def __str__(self) -> str:
        return self.name

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None

    @property
    def q_shape(self) -> tuple[int, ...]:
        if self.lengths_q is not None:
            return (sum(self.lengths_q) + self.tail_q, self.heads_q, self.head_dim)
        return (self.batch, self.seqlen_q, self.heads_q, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        heads = self.heads_q if self.heads_kv is None else self.heads_kv
        if self.lengths_k is not None:
            return (sum(self.lengths_k) + self.tail_k, heads, self.head_dim)
        seqlen = self.seqlen_q if self.seqlen_k is None else self.seqlen_k
        return (self.batch, seqlen, heads, self.head_dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        shape = self.q_shape
        return (shape[1], shape[0]) if self.packed else (shape[0], shape[2], shape[1])

    @property
    def empty(self) -> bool:
        """No query meets any key at all (whatever the mask)."""
        if self.lengths_q is not None:
            return not any(a and b for a, b in zip(self.lengths_q, self.lengths_k, strict=True))
        return 0 in (self.batch, self.q_shape[1], self.k_shape[1])

    @property
    def heats(self) -> tuple[bool, ...]:
        """Cold and hot; without a score, or with every score 0, there is no heat."""
        return (False,) if self.empty or self.scale == 0 else (False, True)

    @property
    def options(self) -> dict[str, Any]:
        return {"softcap": self.softcap, "scale": self.scale, "causal": self.causal, "window": self.window}

    # ---- tensors -------------------------------------------------------------------------------------------

    def inputs(
        self, dtype: torch.dtype = torch.float32, *, hot: bool = False, device: str = "cpu", seed: int = 0
    ) -> Inputs:
        """q, k, v, dout, dlse of this sample; the same values for every dtype, up to rounding."""
        g = torch.Generator().manual_seed(seed + zlib.crc32(self.name.encode()))
        q, k, v, dout = (torch.randn(s, generator=g, dtype=torch.float64) for s in self._shapes)
        dlse = torch.randn(self.lse_shape, generator=g, dtype=torch.float64)
        if self.strides == "expanded":  # what the expanded tensors will hold, so that `hot` scales the real scores
            q, k, v, dout = (_expanded(t) for t in (q, k, v, dout))
        if hot:
            q = q * self._heat(q, k)
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = (restride(t.to(device, dtype), self.strides) for t in (q, k, v, dout))
        return Inputs(*tensors, dlse.to(device, lse_dtype))

    @property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.q_shape, self.k_shape, self.k_shape, self.q_shape

    def _heat(self, q: Tensor, k: Tensor) -> float:
        """The factor (of either sign) taking the largest visible score to HOT caps, q staying in float16's range."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        scores = [s for q_i, k_i in self.sequences(q, k) if (s := self._visible_scores(q_i, k_i)).numel()]
        largest = max((s.flatten()[s.abs().argmax()].item() for s in scores), key=abs, default=0.0) * scale
        target = HOT * self.softcap if self.softcap else HOT_UNCAPPED
        return max(-1e3, min(1e3, target / largest)) if largest else 1.0

    def sequences(self, q: Tensor, k: Tensor, *more: Tensor) -> list[tuple[Tensor, ...]]:
        """The (seqlen, heads, head_dim) parts of tensors of q, k, v, dout order, a sequence at a time."""
        by_query = (True, False, False, True)
        if self.lengths_q is None:
            return list(zip(*(t.unbind(0) for t in (q, k, *more)), strict=True))
        parts = []
        for t, is_query in zip((q, k, *more), by_query, strict=False):
            lengths = self.lengths_q if is_query else self.lengths_k
            parts.append(t[: sum(lengths)].split(lengths))
        return list(zip(*parts, strict=True))

    def _visible_scores(self, q: Tensor, k: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
        seen = reference.visible(q.shape[0], k.shape[0], self.causal, self.window)
        return scores if seen is None else scores[:, seen]

    def cu_seqlens(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        return tuple(
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
            for lengths in (self.lengths_q, self.lengths_k)
        )

    # ---- calls ---------------------------------------------------------------------------------------------

    def bind(self, device: str = "cpu", **overrides: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """The public function with everything but q, k, v filled in; returns (out, lse)."""
        options = {**self.options, **overrides}
        if self.lengths_q is None:
            return partial(softcap_ops.softcap_attention, return_lse=True, **options)
        return partial(softcap_ops.softcap_attention_varlen, return_lse=True, **self.packing(device), **options)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **overrides: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) through the public function."""
        return self.bind(q.device, **overrides)(q, k, v)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, **overrides: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) by the eager formula, in the dtype of q."""
        options = {**self.options, **overrides}
        if self.lengths_q is None:
            return reference.attention(q, k, v, **options)
        cu_q, cu_k = self.cu_seqlens(q.device)
        return reference.attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)

    def packing(self, device: str = "cpu") -> dict[str, Any]:
        """The arguments that only the packed functions take."""
        cu_q, cu_k = self.cu_seqlens(device)
        return {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": max(self.lengths_q, default=0) + self.slack,
            "max_seqlen_k": max(self.lengths_k, default=0) + self.slack,
        }

    @property
    def op(self) -> Any:
        ops = torch.ops.softcap_ops
        return ops.varlen_attention_fwd.default if self.packed else ops.attention_fwd.default

    @property
    def op_bwd(self) -> Any:
        ops = torch.ops.softcap_ops
        return ops.varlen_attention_bwd.default if self.packed else ops.attention_bwd.default

    def op_options(self, q: Tensor) -> tuple[Any, ...]:
        """What both ops of this layout take after their leading tensors."""
        packing = tuple(self.packing(q.device).values()) if self.packed else ()
        return (*packing, self.softcap, self.scale, self.causal, *self.window)

    def op_args(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        return (q, k, v, *self.op_options(q))

    def op_bwd_args(self, x: Inputs) -> tuple[Any, ...]:
        with torch.no_grad():
            out, lse = self.op(*self.op_args(*x.qkv))
        return (x.dout, x.dlse, *x.qkv, out, lse, *self.op_options(x.q))


def _expanded(t: Tensor) -> Tensor:
    """The first head, expanded over all of them (stride 0)."""
    return t[..., :1, :].expand(t.shape)


def restride(t: Tensor, strides: str) -> Tensor:
    """The values of t under other strides. What lies between them is NaN, so that reading past a row shows."""
    if strides == "contiguous":
        return t.contiguous()
    if strides == "bhsd":  # a (batch, heads, seqlen, head_dim) tensor seen as (batch, seqlen, heads, head_dim)
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if strides == "last_dim":  # head_dim is not the fastest axis
        return t.transpose(-3, -1).contiguous().transpose(-3, -1)
    if strides == "sliced":  # every second head and row of a larger tensor, a part of its head_dim
        *batch, seqlen, heads, head_dim = t.shape
        buffer = t.new_full((*batch, 2 * seqlen, 2 * heads, head_dim + 3), float("nan"))
        view = buffer[..., ::2, 1::2, 2 : 2 + head_dim]
    elif strides == "fused":  # a third of a projection that holds q, k and v
        *lead, heads, head_dim = t.shape
        view = t.new_full((*lead, 3 * heads, head_dim), float("nan"))[..., heads : 2 * heads, :]
    elif strides == "offset":  # contiguous, from an odd storage offset: no vector load is aligned
        view = t.new_full((t.numel() + 6,), float("nan"))[3 : 3 + t.numel()].view(t.shape)
    elif strides == "expanded":
        return _expanded(t.contiguous())
    else:
        raise ValueError(strides)
    return view.copy_(t)


STRIDES = ("bhsd", "last_dim", "sliced", "fused", "offset", "expanded")

# ---- the table ---------------------------------------------------------------------------------------------

_DENSE = (
    Sample("mha"),
    Sample("gqa", heads_q=6, heads_kv=2, causal=True),
    Sample("mqa", heads_q=4, heads_kv=1),
    Sample("more_keys", seqlen_q=33, seqlen_k=70),
    Sample("more_queries", seqlen_q=70, seqlen_k=33),
    Sample("causal", causal=True),
    Sample("causal_more_keys", seqlen_q=33, seqlen_k=70, causal=True),
    Sample("causal_more_queries", seqlen_q=70, seqlen_k=33, causal=True),  # 37 rows see nothing
    Sample("decode", seqlen_q=1, seqlen_k=129, causal=True),
    Sample("decode_gqa", seqlen_q=1, seqlen_k=257, heads_q=8, heads_kv=2, head_dim=64, softcap=50.0),
    Sample("window_left", window=(7, -1)),
    Sample("window_right", window=(-1, 5)),
    Sample("window_both", window=(6, 3), seqlen_q=70),
    Sample("window_self", window=(0, 0)),  # each query sees its own key alone
    Sample("window_wider_than_keys", window=(500, 500)),
    Sample("window_more_queries", window=(4, 2), seqlen_q=60, seqlen_k=20),  # rows see nothing at the top
    Sample("causal_window", causal=True, window=(9, -1), seqlen_q=130),
    Sample("causal_window_right_ignored", causal=True, window=(9, 4)),
    Sample("causal_window_more_keys", causal=True, window=(20, -1), seqlen_q=40, seqlen_k=150),
    Sample("gemma2_local", heads_q=4, heads_kv=2, head_dim=256, seqlen_q=96, softcap=50.0, scale=1 / 16, causal=True,
           window=(31, -1)),
    Sample("gemma2_global", heads_q=4, heads_kv=2, head_dim=128, seqlen_q=96, softcap=50.0, scale=1 / 12, causal=True),
    Sample("grok1", heads_q=6, heads_kv=1, head_dim=128, seqlen_q=64, softcap=30.0, causal=True),
    *(Sample(f"head_dim_{d}", head_dim=d, seqlen_q=37, seqlen_k=41, causal=True, softcap=3.0)
      for d in (1, 20, 33, 40, 64, 72, 104, 128, 256)),
    *(Sample(f"seqlen_{s}", seqlen_q=s, causal=True, batch=1) for s in (1, 127, 128, 129, 196, 257)),
    Sample("cap_1", softcap=1.0),
    Sample("cap_30", softcap=30.0, causal=True),
    Sample("cap_50", softcap=50.0, head_dim=64),
    Sample("off", softcap=None),
    Sample("off_causal_window", softcap=0.0, causal=True, window=(9, -1)),
    Sample("scale", scale=0.37, causal=True),
    Sample("scale_negative", scale=-0.2),
    Sample("scale_zero", scale=0.0, causal=True),
    *(Sample(f"strides_{s}", strides=s, heads_q=4, heads_kv=2, seqlen_q=33, seqlen_k=45, causal=True, softcap=2.0)
      for s in STRIDES),
    Sample("batch_0", batch=0),
    Sample("no_queries", seqlen_q=0, seqlen_k=9),
    Sample("no_keys", seqlen_q=9, seqlen_k=0),
    Sample("no_keys_causal", seqlen_q=9, seqlen_k=0, causal=True),
    Sample("nothing", seqlen_q=0, seqlen_k=0),
)  # fmt: skip

_LENGTHS = {"lengths_q": (17, 40, 3), "lengths_k": (17, 40, 3)}

_PACKED = (
    Sample("packed_mha", **_LENGTHS),
    Sample("packed_gqa", **_LENGTHS, heads_q=6, heads_kv=2, causal=True),
    Sample("packed_mqa", **_LENGTHS, heads_q=4, heads_kv=1, window=(5, 5)),
    Sample("packed_cross", lengths_q=(5, 33, 20), lengths_k=(40, 12, 20)),
    Sample("packed_cross_causal", lengths_q=(5, 33, 20), lengths_k=(40, 12, 20), causal=True),
    Sample("packed_decode", lengths_q=(1, 1, 1), lengths_k=(129, 7, 64), heads_q=4, heads_kv=2, causal=True),
    Sample("packed_one_sequence", lengths_q=(129,), lengths_k=(129,), causal=True),
    Sample("packed_many_sequences", lengths_q=(1,) * 20, lengths_k=(2,) * 20),
    Sample("packed_window", **_LENGTHS, causal=True, window=(4, -1)),
    Sample("packed_gemma2", lengths_q=(70, 58), lengths_k=(70, 58), heads_q=4, heads_kv=2, head_dim=256, softcap=50.0,
           causal=True, window=(31, -1)),
    Sample("packed_head_dim_33", **_LENGTHS, head_dim=33, causal=True),
    Sample("packed_cap_1", **_LENGTHS, softcap=1.0),
    Sample("packed_off", **_LENGTHS, softcap=None, causal=True),
    Sample("packed_empty_sequences", lengths_q=(0, 5, 4, 0), lengths_k=(4, 5, 0, 3), heads_q=4, heads_kv=1, head_dim=64,
           causal=True),
    Sample("packed_tail", **_LENGTHS, tail_q=5, tail_k=9, causal=True),
    Sample("packed_slack", **_LENGTHS, slack=100, causal=True),
    *(Sample(f"packed_strides_{s}", lengths_q=(9, 24), lengths_k=(13, 24), heads_q=4, heads_kv=2, strides=s,
             causal=True, softcap=2.0) for s in STRIDES),
    Sample("packed_all_sequences_empty", lengths_q=(0, 0), lengths_k=(0, 0)),
    Sample("packed_no_keys", lengths_q=(3, 2), lengths_k=(0, 0)),
    Sample("packed_only_tail", lengths_q=(0,), lengths_k=(0,), tail_q=4, tail_k=3),
    Sample("packed_batch_0", lengths_q=(), lengths_k=()),
)  # fmt: skip

SAMPLES = _DENSE + _PACKED
BY_NAME = {s.name: s for s in SAMPLES}


def named(*names: str) -> tuple[Sample, ...]:
    """These rows of the table, for a suite that is too dear to run on all of them."""
    return tuple(BY_NAME[name] for name in names)


def each_sample(samples: tuple[Sample, ...] = SAMPLES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sample", samples, ids=str)


def each_sample_and_heat(samples: tuple[Sample, ...] = SAMPLES) -> pytest.MarkDecorator:
    rows = [pytest.param(s, hot, id=f"{s}-{'hot' if hot else 'cold'}") for s in samples for hot in s.heats]
    return pytest.mark.parametrize(("sample", "hot"), rows)


def each_dtype(dtypes: tuple[torch.dtype, ...] = DTYPES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda d: str(d).removeprefix("torch."))


def with_strides(sample: Sample, strides: str) -> Sample:
    return replace(sample, name=f"{sample.name}_{strides}", strides=strides)
