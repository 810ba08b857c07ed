"""The table of decode calls that every suite runs, and the caches to run them on.

A cache holds NaN wherever a sequence has no key: beyond its length, left of its padding, in blocks of nobody. Blocks
lie in random order, and block_table holds nonsense past what is used. Hot and cold are as in samples.py.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from helpers import norm
from samples import HOT, HOT_UNCAPPED, restride
from torch import Tensor

import softcap_ops
from softcap_ops import reference

Decode = Callable[..., tuple[Tensor, Tensor]]


class Inputs(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    cache_leftpad: Tensor | None
    block_table: Tensor | None

    def map(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """f of the floating tensors."""
        return Inputs(*(f(t) for t in self[:3]), *self[3:])

    def double(self) -> Inputs:
        return self.map(lambda t: t.double())

    @property
    def cache(self) -> dict[str, Tensor | None]:
        return {"cache_leftpad": self.cache_leftpad, "block_table": self.block_table}


@dataclass(frozen=True)
class DecodeSample:
    """One named call; `lengths` are those of the sequences, without `leftpad`."""

    name: str
    lengths: tuple[int, ...] = (37, 5, 20)
    seqlen_q: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    spare: int = 3  # rows (or blocks) of the cache beyond the longest sequence
    block_size: int = 0  # 0: not in blocks
    leftpad: tuple[int, ...] | None = None
    softcap: float | None = 5.0
    scale: float | None = None
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    strides: str = "contiguous"

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict[str, Any]:
        return {"softcap": self.softcap, "scale": self.scale, "causal": self.causal, "window": self.window}

    @property
    def heats(self) -> tuple[bool, ...]:
        return (False, True) if any(self.lengths) and self.seqlen_q and self.scale != 0 else (False,)

    def inputs(
        self, dtype: torch.dtype = torch.float32, *, hot: bool = False, device: str = "cpu", poison: float = math.nan
    ) -> Inputs:
        """`poison` fills what belongs to no sequence."""
        g = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64)

        batch, pads = len(self.lengths), self.leftpad or (0,) * len(self.lengths)
        ends = [pad + n for pad, n in zip(pads, self.lengths, strict=True)]
        q = randn(batch, self.seqlen_q, self.heads_q, self.head_dim)
        keys = [(randn(n, self.heads_kv, self.head_dim), randn(n, self.heads_kv, self.head_dim)) for n in self.lengths]
        if hot:
            q = q * self._heat(q, [k for k, _ in keys])
        table = None
        if self.block_size:
            counts = [-(-end // self.block_size) for end in ends]
            columns = max(counts, default=0) + self.spare
            order = torch.randperm(sum(counts) + self.spare, generator=g).tolist()
            table = torch.full((batch, columns), -7, dtype=torch.int32)
            rows = (len(order), self.block_size)
        else:
            rows = (batch, max(ends, default=0) + self.spare)
        caches = [torch.full((*rows, self.heads_kv, self.head_dim), poison, dtype=torch.float64) for _ in "kv"]
        for b, (pad, end) in enumerate(zip(pads, ends, strict=True)):
            if table is None:
                for cache, x in zip(caches, keys[b], strict=True):
                    cache[b, pad:end] = x
                continue
            blocks = [order.pop() for _ in range(counts[b])]
            table[b, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            for j in range(pad, end):
                for cache, x in zip(caches, keys[b], strict=True):
                    cache[blocks[j // self.block_size], j % self.block_size] = x[j - pad]
        q, k, v = (restride(t.to(device, dtype), self.strides) for t in (q, *caches))
        seqlens, leftpad, table = (
            None if t is None else torch.as_tensor(t, dtype=torch.int32).to(device) for t in (ends, self.leftpad, table)
        )
        return Inputs(q, k, v, seqlens, leftpad, table)

    def _heat(self, q: Tensor, keys: list[Tensor]) -> float:
        largest = 0.0
        for q_b, k in zip(q, keys, strict=True):
            scores = torch.einsum("qhd,khd->hqk", q_b, k.repeat_interleave(self.heads_q // self.heads_kv, 1))
            seen = reference.visible(self.seqlen_q, len(k), self.causal, self.window)
            scores = scores.flatten() if seen is None else scores[:, seen].flatten()
            if scores.numel():
                largest = max(largest, scores.abs().max().item())
        scale = abs(self.head_dim**-0.5 if self.scale is None else self.scale)
        target = HOT * self.softcap if self.softcap else HOT_UNCAPPED
        return min(1e3, target / (largest * scale)) if largest else 1.0

    def decode(self, x: Inputs, **overrides: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) through the public function."""
        options = {**self.options, **x.cache, "return_lse": True, **overrides}
        return softcap_ops.softcap_attention_decode(*x[:4], **options)

    def reference(self, x: Inputs, **overrides: Any) -> tuple[Tensor, Tensor]:
        return reference.attention_decode(*x[:4], **{**self.options, **x.cache, **overrides})

    def op_args(self, x: Inputs) -> tuple[Any, ...]:
        return (*x, self.softcap, self.scale, self.causal, *self.window)


def check_decode(sample: DecodeSample, x: Inputs, *, hot: bool, decode: Decode | None = None) -> None:
    """Assert that out and lse are those of the float64 formula: at most twice as far from it as the eager formula in
    the same dtype. Hot, assert also that the answer without the cap would have been refused."""
    results = (decode or sample.decode)(x)
    ref, eager = sample.reference(x.double()), sample.reference(x)
    uncapped = sample.reference(x.double(), softcap=None)
    finite = ref[1][ref[1].isfinite()]
    exact = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    floor = 4 * torch.finfo(exact).eps * max(1.0, finite.abs().max().item() if finite.numel() else 1.0)
    rounding = 0.0 if x.q.dtype == exact else torch.finfo(x.q.dtype).eps / 2
    told_apart = False
    for name, a, r, e, u in zip(("out", "lse"), results, ref, eager, uncapped, strict=True):
        assert a.is_contiguous()
        assert torch.equal(a.isneginf(), r.isneginf()), f"{name}: -inf elsewhere than in the reference"
        assert torch.equal(a.isfinite(), r.isfinite()), f"{name}: not finite where the reference is"
        a, r, e, u = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (a, r, e, u))
        bound = max(2 * norm(e - r), (floor + rounding * (name == "out")) * norm(r))
        assert norm(a - r) <= bound, f"{name}: error {norm(a - r):.3g}, allowed {bound:.3g}"
        told_apart |= norm(u - r) > 4 * bound
    if hot and sample.softcap:
        assert told_apart, "this sample cannot tell that the cap is on"


_PAGED = {"block_size": 16}

DECODE_SAMPLES = (
    DecodeSample("one_query"),
    DecodeSample("mha", heads_kv=4),
    DecodeSample("mqa", heads_q=6, heads_kv=1),
    DecodeSample("three_queries", seqlen_q=3),
    DecodeSample("more_queries_than_keys", seqlen_q=9),
    DecodeSample("not_causal", seqlen_q=3, causal=False),
    DecodeSample("full_cache", lengths=(40, 40), spare=0),
    DecodeSample("empty_sequences", lengths=(0, 7, 0), seqlen_q=2),
    DecodeSample("all_empty", lengths=(0, 0), seqlen_q=2),
    DecodeSample("no_room", lengths=(0, 0), spare=0),
    DecodeSample("batch_0", lengths=()),
    DecodeSample("no_queries", seqlen_q=0),
    DecodeSample("split", lengths=(1500, 513, 512, 1)),
    DecodeSample("split_queries", lengths=(1500, 513, 2), seqlen_q=4),
    DecodeSample("split_many_queries", lengths=(1300, 600), seqlen_q=20),
    DecodeSample("split_window", lengths=(1500, 700), window=(600, -1)),
    DecodeSample("prefill", lengths=(150, 70), seqlen_q=150),
    DecodeSample("window", window=(7, 0)),
    DecodeSample("window_queries", seqlen_q=5, window=(7, -1)),
    DecodeSample("window_both", seqlen_q=5, window=(4, 2), causal=False),
    DecodeSample("window_right", seqlen_q=5, window=(-1, 1), causal=False),
    DecodeSample("leftpad", leftpad=(0, 11, 4), seqlen_q=2),
    DecodeSample("leftpad_window", leftpad=(0, 11, 4), window=(6, -1)),
    DecodeSample("leftpad_split", lengths=(900, 40), leftpad=(100, 960)),
    DecodeSample("leftpad_prefill", lengths=(60, 49, 1), leftpad=(0, 11, 59), seqlen_q=60),
    DecodeSample("off", softcap=None, seqlen_q=2),
    DecodeSample("cap_50", softcap=50.0, lengths=(200, 64), head_dim=64),
    DecodeSample("cap_30", softcap=30.0, heads_q=12, heads_kv=2, head_dim=128),
    DecodeSample("scale_negative", scale=-0.2),
    DecodeSample("scale_zero", scale=0.0),
    *(DecodeSample(f"head_dim_{d}", head_dim=d, seqlen_q=2) for d in (1, 20, 33, 40, 72, 256)),
    *(DecodeSample(f"strides_{s}", strides=s, seqlen_q=2) for s in ("bhsd", "last_dim", "sliced", "fused")),
    DecodeSample("paged", **_PAGED),
    DecodeSample("paged_queries", **_PAGED, seqlen_q=3),
    DecodeSample("paged_blocks_of_1", block_size=1, seqlen_q=2),
    DecodeSample("paged_split", **_PAGED, lengths=(1300, 33, 16)),
    DecodeSample("paged_window", **_PAGED, window=(6, -1), seqlen_q=2),
    DecodeSample("paged_leftpad", **_PAGED, leftpad=(0, 20, 3), seqlen_q=2),
    DecodeSample("paged_prefill", **_PAGED, lengths=(100, 41), seqlen_q=50),
    DecodeSample("paged_empty", **_PAGED, lengths=(0, 17)),
    DecodeSample("paged_bhsd", **_PAGED, strides="bhsd"),
    DecodeSample("paged_head_dim_20", **_PAGED, head_dim=20),
)  # fmt: skip
BY_NAME = {s.name: s for s in DECODE_SAMPLES}


def named(*names: str) -> tuple[DecodeSample, ...]:
    return tuple(BY_NAME[name] for name in names)


def each_sample(samples: tuple[DecodeSample, ...] = DECODE_SAMPLES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sample", samples, ids=str)


def each_sample_and_heat(samples: tuple[DecodeSample, ...] = DECODE_SAMPLES) -> pytest.MarkDecorator:
    rows = [pytest.param(s, hot, id=f"{s}-{'hot' if hot else 'cold'}") for s in samples for hot in s.heats]
    return pytest.mark.parametrize(("sample", "hot"), rows)
