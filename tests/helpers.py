"""How results are computed and compared: the error measure of the whole suite.

An error is ||x - ref|| / ||ref|| against the formula in float64. It may be twice that of the same-dtype eager formula
(softmax in float32), or the floor below, which no float32 computation of exp(score - lse) can go under.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samples import Inputs, Sample

Attention = Callable[..., tuple[Tensor, Tensor]]


class Result(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def evaluate(attention: Attention, x: Inputs, loss: str = "both") -> Result:
    """Outputs and gradients of `attention`; `loss` says which outputs have a gradient: "out", "lse" or "both"."""
    q, k, v = leaves = tuple(t.detach().requires_grad_() for t in x.qkv)
    out, lse = attention(q, k, v)
    used = [(y, g) for name, y, g in (("out", out, x.dout), ("lse", lse, x.dlse)) if loss in (name, "both")]
    used = [(y, g) for y, g in used if y.requires_grad]  # the formula's lse over no key at all is a constant
    if used:
        grads = torch.autograd.grad([y for y, _ in used], leaves, [g for _, g in used], allow_unused=True)
    else:
        grads = (None, None, None)
    grads = (torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True))
    return Result(out.detach(), lse.detach(), *grads)


def norm(t: Tensor) -> float:
    return torch.linalg.vector_norm(t.double()).item()


def tolerances(x: Inputs, ref: Result, eager: Result, sample: Sample) -> Result:
    """The largest ||x - ref|| that each output may have."""
    accumulator = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    eps = torch.finfo(accumulator).eps
    finite = ref.lse[ref.lse.isfinite()]
    largest_lse = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
    floors = dict.fromkeys(Result._fields, 4 * eps * largest_lse)
    if x.q.dtype != accumulator:  # rounding the result once
        half_ulp = torch.finfo(x.q.dtype).eps / 2
        floors |= {name: floor + half_ulp for name, floor in floors.items() if name != "lse"}
    bounds = {}
    for name in Result._fields:
        r, e = _finite(getattr(ref, name)), _finite(getattr(eager, name))
        bounds[name] = max(2 * norm(e.double() - r), floors[name] * norm(r))
    # dP - rowsum(dout * out) cancels; where next to nothing is left of it, its own rounding is the measure.
    terms = _gradient_terms(x, sample)
    for name in ("dq", "dk"):
        if norm(getattr(ref, name)) <= 1e-6 * terms:
            bounds[name] = max(bounds[name], 8 * eps * terms)
    return Result(*bounds.values())  # type: ignore[arg-type]


def _gradient_terms(x: Inputs, sample: Sample) -> float:
    """A bound on the size of the terms that dq and dk sum."""
    if sample.empty:
        return 0.0
    scale = abs(sample.head_dim**-0.5 if sample.scale is None else sample.scale)
    q, k, v, dout = (t.double().norm(dim=-1) for t in (x.q, x.k, x.v, x.dout))
    return scale * dout.norm().item() * v.max().item() * max(q.max().item(), k.max().item())


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, 0.0, 0.0)


def misfits(actual: Result, ref: Result, bounds: Result) -> list[str]:
    """The outputs of `actual` that are not those of `ref`: wrong infinities, or an error above its bound."""
    wrong = []
    for name in Result._fields:
        a, r, bound = getattr(actual, name), getattr(ref, name), getattr(bounds, name)
        if not torch.equal(a.isneginf(), r.isneginf()) or not torch.equal(a.isfinite(), r.isfinite()):
            wrong.append(f"{name}: non-finite where the reference is not, or the other way round")
        elif (error := norm(_finite(a).double() - _finite(r))) > bound:
            size = norm(_finite(r)) or 1.0
            wrong.append(f"{name}: error {error / size:.3g}, allowed {bound / size:.3g}")
    return wrong


def check_parity(
    sample: Sample,
    x: Inputs,
    *,
    hot: bool,
    loss: str = "both",
    attention: Attention | None = None,
    factor: float = 1.0,
) -> Result:
    """Assert that `attention` (by default the public function) agrees with the float64 formula on sample and x.

    Hot, assert also that the answer without the cap would have been refused. `factor` widens the bounds.
    """
    actual = evaluate(attention or sample.attention, x, loss)
    ref = evaluate(sample.reference, x.double(), loss)
    eager = evaluate(sample.reference, x, loss)
    bounds = Result(*(factor * b for b in tolerances(x, ref, eager, sample)))
    assert not (wrong := misfits(actual, ref, bounds)), "; ".join(wrong)
    if hot and sample.softcap:
        uncapped = evaluate(lambda q, k, v: sample.reference(q, k, v, softcap=None), x.double(), loss)
        assert misfits(uncapped, ref, Result(*(4 * b for b in bounds))), "this sample cannot tell that the cap is on"
    return actual


def metadata(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.dtype, t.stride(), t.storage_offset(), t.device.type
