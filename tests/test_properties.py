"""Random calls against float64: shapes, lengths, masks, caps, dtypes, and a layout for every tensor of its own.

300 draws, the same ones everywhere; with SOFTCAP_OPS_FUZZ=1 (`make fuzz`) 10,000 new ones. A failure prints what
reproduces it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from helpers import Result, accumulator_floor, evaluate, gradient_terms, metadata, misfits, tolerances
from hypothesis import event, given
from hypothesis import strategies as st
from samples import DTYPES, Inputs, Sample
from torch import Tensor
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.timeout(0)  # ten thousand draws take as long as they take


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory: axes from slowest to fastest, gaps along each, and where it starts."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    offset: int
    expanded: frozenset[int]

    def values(self, t: Tensor) -> Tensor:
        """What a tensor of this layout can hold: the same along an expanded axis."""
        for dim in self.expanded:
            t = t.narrow(dim, 0, min(1, t.shape[dim])).expand(t.shape)
        return t

    def apply(self, t: Tensor) -> Tensor:
        """t's values in this layout; all memory around them is NaN."""
        core = t
        for dim in self.expanded:
            core = core.narrow(dim, 0, min(1, core.shape[dim]))
        core = core.permute(self.order)
        room = [n * step + pad for n, step, pad in zip(core.shape, self.steps, self.pads, strict=True)]
        buffer = t.new_full((self.offset + math.prod(room),), float("nan"))[self.offset :].view(room)
        cells = tuple(
            slice(pad, pad + n * step, step) for n, step, pad in zip(core.shape, self.steps, self.pads, strict=True)
        )
        view = buffer[cells].copy_(core)
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return view.permute(inverse).expand(t.shape)


def layout(rank: int, seed: int) -> Layout:
    """A layout for each seed; 0 is contiguous, which is what a failure shrinks to where layouts do not matter."""
    random = Random(seed)
    order = list(range(rank))
    if seed == 0:
        return Layout(tuple(order), (1,) * rank, (0,) * rank, 0, frozenset())
    if random.random() < 0.7:
        random.shuffle(order)
    return Layout(
        tuple(order),
        tuple(random.choices((1, 2, 3), (6, 1, 1), k=rank)),
        tuple(random.choices((0, 1, 5), (6, 1, 1), k=rank)),
        random.choice((0, 0, 1, 7)),
        frozenset(random.sample(range(rank), random.choice((0, 0, 0, 1, 2)))),
    )


lengths = st.one_of(
    st.integers(1, 12), st.integers(1, 70), st.integers(1, 70), st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 200])
)
sides = st.one_of(st.just(-1), st.integers(0, 6), st.integers(0, 150))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    heads_kv = draw(st.integers(1, 3))
    shape: dict[str, Any] = {}
    if draw(st.booleans()):
        pairs = draw(st.one_of(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4), st.just([])))
        shape = {
            "lengths_q": tuple(a for a, _ in pairs),
            "lengths_k": tuple(b for _, b in pairs),
            "tail_q": draw(st.sampled_from([0, 0, 3])),
            "tail_k": draw(st.sampled_from([0, 0, 5])),
            "slack": draw(st.sampled_from([0, 0, 9])),
        }
    else:
        seqlen_q = draw(lengths)
        seqlen_k = draw(st.one_of(st.just(seqlen_q), lengths))
        shape = {"batch": draw(st.sampled_from([1, 1, 2, 3, 0])), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return Sample(
        "drawn",
        **shape,
        heads_q=heads_kv * draw(st.integers(1, 4)),
        heads_kv=heads_kv,
        head_dim=draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 72, 104, 128, 256]))),
        softcap=draw(st.one_of(st.sampled_from([None, 0.0, 1.0, 30.0, 50.0]), st.floats(0.1, 100.0))),
        scale=draw(st.one_of(st.none(), st.just(0.0), st.floats(1e-3, 2.0), st.floats(-2.0, -1e-3))),
        causal=draw(st.booleans()),
        window=(draw(sides), draw(sides)),
    )


@given(
    sample=samples(),
    dtype=st.sampled_from(DTYPES),
    hot=st.booleans(),
    seed=st.integers(0, 2**16),
    loss=st.sampled_from(["both", "both", "out", "lse"]),
    threads=st.sampled_from([1, 1, 2, 3]),
    layouts=st.tuples(*[st.integers(0, 2**16)] * 5),
)
def test_any_call(
    sample: Sample, dtype: torch.dtype, hot: bool, seed: int, loss: str, threads: int, layouts: tuple[int, ...]
) -> None:
    rank = 3 if sample.packed else 4
    placed = [layout(n, seed) for n, seed in zip((rank, rank, rank, rank, rank - 1), layouts, strict=True)]
    values = sample.inputs(dtype, hot=hot and sample.scale != 0, seed=seed)
    x = Inputs(*(at.values(t) for at, t in zip(placed, values, strict=True)))
    given_x = Inputs(*(at.apply(t) for at, t in zip(placed, x, strict=True)))
    event(f"{'packed' if sample.packed else 'dense'}, {'empty' if sample.empty else 'hot' if hot else 'cold'}")

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        actual = evaluate(sample.attention, given_x, loss)
    finally:
        torch.set_num_threads(before)

    ref, eager = evaluate(sample.reference, x.double(), loss), evaluate(sample.reference, x, loss)
    assert not (wrong := misfits(actual, ref, bounds(sample, x, ref, eager))), "; ".join(wrong)
    check_metadata(sample, given_x)


def bounds(sample: Sample, x: Inputs, ref: Result, eager: Result) -> Result:
    """Those of the named samples, twice as wide and never below the rounding of what was summed.

    Of ten thousand draws, in some the eager formula happens to be exact, or dP cancels (all values alike, say), or lse
    does: it is a sum of logarithms of about 1.
    """
    named = tolerances(x, ref, eager, sample)
    low = x.q.dtype not in (torch.float32, torch.float64)
    rounding = accumulator_floor(x, ref) + (torch.finfo(x.q.dtype).eps / 2 if low else 0.0)
    terms_q, terms_k = gradient_terms(sample, x)
    return Result(
        2 * named.out,
        2 * named.lse + rounding * ref.lse.numel() ** 0.5,
        2 * named.dq + rounding * terms_q,
        2 * named.dk + rounding * terms_k,
        2 * named.dv,
    )


def check_metadata(sample: Sample, x: Inputs) -> None:
    for op, args in ((sample.op, sample.op_args(*x.qkv)), (sample.op_bwd, sample.op_bwd_args(x))):
        real = op(*args)
        with FakeTensorMode() as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        assert [metadata(t) for t in fake] == [metadata(t) for t in real]


@given(
    sample=samples(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
    mask=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_frozen_inputs(sample: Sample, dtype: torch.dtype, seed: int, mask: tuple[bool, ...]) -> None:
    """A gradient is the same number whichever others are asked for."""
    x = sample.inputs(dtype, seed=seed)
    args = sample.op_bwd_args(x)
    whole = sample.op_bwd(*args)
    part = sample.op_bwd(*args, None, None, None, None, list(mask))
    for a, b, wanted in zip(part, whole, mask, strict=True):
        assert torch.equal(a, b) if wanted else a.shape == (0,)


@given(sample=samples(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**16))
def test_lse_bound(sample: Sample, dtype: torch.dtype, seed: int) -> None:
    """case 2: |lse| <= cap + log(keys) for every row that sees a key, whatever the scores."""
    sample = replace(sample, softcap=sample.softcap or 1.0)
    q, k, v = sample.inputs(dtype, seed=seed).qkv
    _, lse = sample.attention(1e3 * q, k, v)
    limit = sample.softcap + math.log(max(1, sample.k_shape[-3]))
    assert (lse[lse.isfinite()].abs() <= limit * (1 + 1e-5)).all()
    assert not lse.isnan().any()
    assert not lse.isposinf().any()
