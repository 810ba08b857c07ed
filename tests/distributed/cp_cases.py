"""The cases of the context-parallel tests, and what each rank does with one: split, attend, compare with the whole.

A case is a row of its own table of samples (whole sequences, lengths that split over 4 ranks or that padding makes
split), a scheme and a layout.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from helpers import Result, norm
from samples import Inputs, Sample
from torch import Tensor

import softcap_ops
from softcap_ops import distributed as cp

RANKS = 4  # lengths divide by 2 * RANKS

_LOCAL = {"causal": True, "window": (9, -1)}
_GQA = {"heads_q": 8, "heads_kv": 4}
_CROSS = {"seqlen_q": 32, "seqlen_k": 64}
_PACKED = {"lengths_q": (16, 40, 8), "lengths_k": (16, 40, 8)}
_PADDED = {"lengths_q": (13, 0, 33, 1), "lengths_k": (13, 0, 33, 1)}
_PADDED_CROSS = {"lengths_q": (13, 5, 20, 0), "lengths_k": (21, 2, 20, 9)}
_SMALL: dict[str, Any] = {"heads_q": 4, "head_dim": 8, "softcap": 5.0}

SAMPLES = tuple(
    Sample(name, **{**_SMALL, **fields})
    for name, fields in {
        "full": {},
        "causal": {"causal": True},
        "causal_gqa": {"causal": True, **_GQA, "softcap": 2.0},
        "sliding": _LOCAL,
        "sliding_gqa": {**_LOCAL, **_GQA},
        "sliding_wide": {"causal": True, "window": (30, -1)},
        "window_both": {"window": (9, 4), "seqlen_q": 64},
        "window_right": {"window": (-1, 5)},
        "window_self": {"window": (0, 0)},
        "cross_full": _CROSS,
        "cross_causal": {**_CROSS, "causal": True, **_GQA},
        "cross_more_queries": {"seqlen_q": 64, "seqlen_k": 32, "causal": True},  # 32 queries see nothing
        "cross_sliding": {**_CROSS, **_LOCAL},
        "one_position_a_chunk": {"seqlen_q": 8, "causal": True},
        "scale": {"scale": -0.3, "causal": True},
        "off": {"softcap": None, "causal": True},
        "empty": {"seqlen_q": 0},
        "packed_full": _PACKED,
        "packed_causal_gqa": {**_PACKED, "causal": True, **_GQA},
        "packed_sliding": {**_PACKED, **_LOCAL},
        "packed_window_both": {**_PACKED, "window": (6, 3), **_GQA},
        "padded_full": {**_PADDED, **_GQA},
        "padded_causal": {**_PADDED, "causal": True},
        "padded_sliding": {**_PADDED, "causal": True, "window": (4, -1)},
        "padded_cross_causal": {**_PADDED_CROSS, "causal": True},
        "padded_cross_window": {**_PADDED_CROSS, "window": (3, 6)},
    }.items()
)
BY_NAME = {s.name: s for s in SAMPLES}


@dataclass(frozen=True)
class Case:
    sample: Sample
    comm: str
    layout: str
    device: str = "cpu"
    backend: str | None = None

    def __str__(self) -> str:
        return f"{self.comm}-{self.layout}-{self.sample}"


@functools.cache
def two_level(ranks: int, a2a_size: int = 2) -> Any:
    """The pair of groups for a2a+p2p; made once, by all ranks at the same test."""
    return cp.two_level_groups(a2a_size=a2a_size)


def group_for(comm: str) -> Any:
    return two_level(dist.get_world_size()) if comm == "a2a+p2p" else dist.group.WORLD


class Split:
    """A case's tensors cut for this rank, and the call on them."""

    def __init__(self, case: Case) -> None:
        self.case, self.sample = case, case.sample
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._cu_q, self._cu_k = self.sample.cu_seqlens(case.device) if self.sample.packed else (None, None)

    def of_q(self, t: Tensor) -> Tensor:
        return self._of(t, self._cu_q)

    def of_k(self, t: Tensor) -> Tensor:
        return self._of(t, self._cu_k)

    def of_lse(self, lse: Tensor) -> Tensor:
        return self._of(lse.transpose(-1, -2), self._cu_q, value=float("-inf")).transpose(-1, -2)

    def _of(self, t: Tensor, cu: Tensor | None, value: float = 0.0) -> Tensor:
        where = {"rank": self.rank, "ranks": self.ranks, "layout": self.case.layout}
        if cu is None:
            return cp.split_sequence(t, **where)
        padded, cu_padded = cp.pad_sequences(t, cu, ranks=self.ranks, layout=self.case.layout, value=value)
        return cp.split_sequence(padded, **where, dim=0, cu_seqlens_padded=cu_padded)

    def result(self, whole: Result) -> Result:
        return Result(
            self.of_q(whole.out), self.of_lse(whole.lse), self.of_q(whole.dq), self.of_k(whole.dk), self.of_k(whole.dv)
        )

    @property
    def options(self) -> dict[str, Any]:
        options = {**self.sample.options, "group": group_for(self.case.comm)}
        options |= {"comm": self.case.comm, "layout": self.case.layout, "return_lse": True}
        options["backend"] = self.case.backend
        if self._cu_q is not None and self._cu_k is not None:
            options |= {"cu_seqlens_q": self._cu_q, "cu_seqlens_k": self._cu_k}
            for side, cu in (("q", self._cu_q), ("k", self._cu_k)):
                rows = torch.empty(int(cu[-1]), device=cu.device)
                _, padded = cp.pad_sequences(rows, cu, ranks=self.ranks, layout=self.case.layout)
                if not torch.equal(padded, cu):
                    options[f"cu_seqlens_{side}_padded"] = padded
        return options

    def evaluate(self, x: Inputs, attention: Any = None, **overrides: Any) -> Result:
        """This rank's part of out and lse, and of the gradients of a loss over all ranks' parts."""
        leaves = [t.detach().requires_grad_() for t in (self.of_q(x.q), self.of_k(x.k), self.of_k(x.v))]
        options = {**self.options, **overrides}
        attention = attention or softcap_ops.context_parallel_attention
        out, lse = attention(*leaves, **options)
        dlse = self._of(x.dlse.transpose(-1, -2), self._cu_q).transpose(-1, -2)
        dq, dk, dv = torch.autograd.grad((out, lse), leaves, (self.of_q(x.dout), dlse))
        return Result(out.detach(), lse.detach(), dq, dk, dv)


@functools.lru_cache(maxsize=64)
def _whole(sample: Sample, hot: bool, dtype: torch.dtype, device: str = "cpu") -> tuple[Inputs, Result]:
    """Inputs in `dtype`, and the float64 formula on their values."""
    x = sample.inputs(dtype, hot=hot, device=device)
    return x, _evaluate(sample.reference, x.double(), sample)


def _evaluate(attention: Any, x: Inputs, sample: Sample) -> Result:
    leaves = [t.detach().requires_grad_() for t in x.qkv]
    out, lse = attention(*leaves)
    outputs = [(y, g) for y, g in ((out, x.dout), (lse, x.dlse)) if y.requires_grad]
    grads = torch.autograd.grad([y for y, _ in outputs], leaves, [g for _, g in outputs], allow_unused=True)
    grads = (torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True))
    return Result(out.detach(), lse.detach(), *grads)


def _distance(a: Tensor, b: Tensor) -> float:
    assert torch.equal(a.isneginf(), b.isneginf())
    return norm(a.double().nan_to_num(neginf=0.0) - b.nan_to_num(neginf=0.0))


def check_float64(case: Case, hot: bool, attention: Any = None) -> None:
    """Every output of this rank is that of the whole, to 1e-10."""
    x, ref = _whole(case.sample, hot, torch.float64)
    split = Split(case)
    mine, expected = split.evaluate(x, attention), split.result(ref)
    for name in Result._fields:
        a, b = getattr(mine, name), getattr(expected, name)
        assert a.shape == b.shape, name
        assert a.is_contiguous(), name
        size = max(1.0, norm(getattr(ref, name).nan_to_num(neginf=0.0)))
        assert _distance(a, b) <= 1e-10 * size, f"{name}: off by {_distance(a, b)}"


def check_many_float64(cases: list[Case], hot: bool) -> list[str]:
    """`check_float64` of several cases; the names and faults of those that fail."""
    wrong = []
    for case in cases:
        try:
            check_float64(case, hot)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    return wrong


def errors(case: Case, hot: bool, dtype: torch.dtype) -> dict[str, tuple[float, float, float]]:
    """For each output, over this rank's part: (squared error, that of one process, squared size)."""
    x, ref = _whole(case.sample, hot, dtype, case.device)
    split = Split(case)
    mine, expected = split.evaluate(x), split.result(ref)
    single = split.result(_evaluate(partial(case.sample.attention, backend=case.backend), x, case.sample))
    return {
        name: (
            _distance(getattr(mine, name), getattr(expected, name)) ** 2,
            _distance(getattr(single, name), getattr(expected, name)) ** 2,
            norm(getattr(expected, name).nan_to_num(neginf=0.0)) ** 2,
        )
        for name in Result._fields
    }


def check_as_exact_as_one_process(per_rank: list[dict[str, tuple[float, float, float]]]) -> None:
    """What `errors` returned on all ranks: the error against float64 is at most 1.5 times that of one process."""
    for output in per_rank[0]:
        error, single, size = (sum(r[output][i] for r in per_rank) ** 0.5 for i in range(3))
        # Half an ulp of bfloat16 is what rounding the result once costs.
        allowed = max(1.5 * single, (2**-9 if output != "lse" else 2e-7) * size)
        assert error <= allowed, f"{output}: {error / size:.3g}, one process {single / size:.3g}"


def check_same_compiled(case: Case, dtype: torch.dtype) -> None:
    """Compiled, the results are those of the eager call."""
    torch._dynamo.reset()
    x, _ = _whole(case.sample, True, dtype, case.device)
    split = Split(case)
    compiled = torch.compile(softcap_ops.context_parallel_attention, fullgraph=True)
    for a, b in zip(split.evaluate(x, compiled), split.evaluate(x), strict=True):
        torch.testing.assert_close(a, b)


def uncapped_distance(case: Case) -> float:
    """How far the capped out of this rank is from the uncapped one, hot."""
    x, _ = _whole(case.sample, True, torch.bfloat16 if case.device == "cuda" else torch.float64, case.device)
    split = Split(case)
    return norm(split.evaluate(x).out - split.evaluate(x, softcap=None).out)


def check_lse_loss_of_one_rank(case: Case) -> None:
    """A loss on lse on the first rank alone: its gradient reaches every rank's keys, and nothing hangs."""
    x, _ = _whole(case.sample, True, torch.float64)
    split = Split(case)
    leaves = [t.detach().requires_grad_() for t in (split.of_q(x.q), split.of_k(x.k), split.of_k(x.v))]
    out, lse = softcap_ops.context_parallel_attention(*leaves, **split.options)
    grads = torch.autograd.grad((out * split.of_q(x.dout)).sum() + (lse.sum() if split.rank == 0 else 0.0), leaves)
    first = torch.ones_like(x.dlse)
    for rank in range(1, split.ranks):
        rows = cp.split_sequence(torch.arange(first.shape[-1]), rank=rank, ranks=split.ranks, layout=case.layout, dim=0)
        first[..., rows] = 0.0
    expected = split.result(_evaluate(case.sample.reference, x._replace(dlse=first), case.sample))
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert _distance(grad, getattr(expected, name)) < 1e-9, name


def lse_gradients(case: Case, return_lse: bool) -> int:
    """How many kernel calls get a gradient of lse where no loss is on it: some backends run twice for one."""
    from softcap_ops.backends import cpu

    x, _ = _whole(case.sample, True, torch.float64)
    split, with_dlse = Split(case), 0
    original = cpu.backward

    def counting(dout: Tensor, dlse: Tensor | None, *args: Any) -> Any:
        nonlocal with_dlse
        with_dlse += dlse is not None
        return original(dout, dlse, *args)

    cpu.backward = counting
    try:
        leaves = [t.detach().requires_grad_() for t in (split.of_q(x.q), split.of_k(x.k), split.of_k(x.v))]
        result = softcap_ops.context_parallel_attention(*leaves, **{**split.options, "return_lse": return_lse})
        torch.autograd.grad((result[0] if return_lse else result).sum(), leaves)
    finally:
        cpu.backward = original
    return with_dlse


def zeroed_distance(case: Case, zeroed: int) -> None:
    """Gradients where one rank's keys and values are zero: its queries meet all the others' still."""
    x, _ = _whole(case.sample, True, torch.float64)
    split = Split(case)
    k, v = (t.clone() for t in (x.k, x.v))
    rows = cp.split_sequence(torch.arange(k.shape[1]), rank=zeroed, ranks=split.ranks, layout=case.layout, dim=0)
    k[:, rows], v[:, rows] = 0.0, 0.0
    x = x._replace(k=k, v=v)
    expected = split.result(_evaluate(case.sample.reference, x, case.sample))
    mine = split.evaluate(x)
    for name in Result._fields:
        assert _distance(getattr(mine, name), getattr(expected, name)) < 1e-9, name


def random_case(seed: int) -> Case:
    """Any scheme, layout, mask, packing and shape, for four ranks."""
    r = random.Random(seed)
    comm, layout = r.choice(["p2p", "all_gather", "a2a", "a2a+p2p"]), r.choice(["zigzag", "contiguous"])
    heads_kv = {"a2a": 4, "a2a+p2p": 2}.get(comm, 1) * r.randint(1, 2)
    fields: dict[str, Any] = {
        "heads_q": heads_kv * r.randint(1, 3),
        "heads_kv": heads_kv,
        "head_dim": r.choice([3, 8, 16]),
        "softcap": r.choice([None, 1.0, 5.0, 30.0]),
        "scale": r.choice([None, 0.5, -0.1]),
        "causal": r.random() < 0.5,
        "window": (r.choice([-1, 0, 3, 17, 100]), r.choice([-1, 0, 3, 17, 100])),
    }
    if r.random() < 0.5:
        fields |= {"batch": r.randint(1, 3), "seqlen_q": 8 * r.randint(1, 6), "seqlen_k": 8 * r.randint(1, 6)}
    else:
        lengths = tuple(r.randint(0, 40) for _ in range(r.randint(1, 4)))
        crossed = tuple(r.randint(0, 40) for _ in lengths)
        fields |= {"lengths_q": lengths, "lengths_k": lengths if r.random() < 0.6 else crossed}
    return Case(Sample(f"random_{seed}", **fields), comm, layout)
