"""How results are computed and compared: the error measure of the whole suite.

An error is ||x - ref|| / ||ref|| against the formula in float64. It may be twice that of the same-dtype eager formula
(softmax in float32), or the floor below, which no float32 computation of exp(score - lse) can go under.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from samples import Inputs, Sample
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import softcap_ops
from softcap_ops import reference
from softcap_ops._arguments import Options, Packing, resolve

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
    eps = torch.finfo(torch.float64 if x.q.dtype == torch.float64 else torch.float32).eps
    floors = dict.fromkeys(Result._fields, accumulator_floor(x, ref))
    if x.q.dtype not in (torch.float32, torch.float64):  # rounding the result once
        half_ulp = torch.finfo(x.q.dtype).eps / 2
        floors |= {name: floor + half_ulp for name, floor in floors.items() if name != "lse"}
    bounds = {}
    for name in Result._fields:
        r, e = _finite(getattr(ref, name)), _finite(getattr(eager, name))
        bounds[name] = max(2 * norm(e.double() - r), floors[name] * norm(r))
    # dP - rowsum(dout * out) cancels. Where a query sees one key, nothing but its rounding is left.
    for name, terms in zip(("dq", "dk"), gradient_terms(sample, x), strict=True):
        if norm(getattr(ref, name)) <= 1e-6 * terms or sample.k_shape[-3] == 1:
            bounds[name] = max(bounds[name], eps * terms)
    return Result(*bounds.values())


def accumulator_floor(x: Inputs, ref: Result) -> float:
    """The relative error of exp(score - lse): a few ulps of the largest lse, in the dtype that the kernel sums in.

    Far more for float64, where the reference is no more exact than the kernel.
    """
    finite = ref.lse[ref.lse.isfinite()]
    largest_lse = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
    if x.q.dtype == torch.float64:
        return 64 * torch.finfo(torch.float64).eps * largest_lse
    return 4 * torch.finfo(torch.float32).eps * largest_lse


def gradient_terms(sample: Sample, x: Inputs) -> tuple[float, float]:
    """Norms that dq and dk would have if nothing cancelled in them: eps times these is rounding.

    That is, with absolute values in every sum, and with 1 in place of 1 - tanh^2, which is itself a difference.
    """
    terms_q, terms_k = 0.0, 0.0
    scale = abs(sample.head_dim**-0.5 if sample.scale is None else sample.scale)
    lse_of = x.dlse.unbind(0) if not sample.packed else x.dlse[:, : sum(sample.lengths_q)].split(sample.lengths_q, 1)
    sequences = sample.sequences(*(t.double() for t in (x.q, x.k, x.v, x.dout)))
    for (q, k, v, dout), dlse in zip(sequences, lse_of, strict=True):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = scale * torch.einsum("qhd,khd->hqk", q, k)
        if sample.scale is not None and sample.scale < 0:
            scores = -scores
        if sample.softcap:
            scores = sample.softcap * torch.tanh(scores / sample.softcap)
        seen = reference.visible(q.shape[0], k.shape[0], sample.causal, sample.window, q.device)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        p = scores.softmax(-1).nan_to_num(0.0)
        ds = scale * p * (torch.einsum("qhd,khd->hqk", dout.abs(), v.abs()) + dlse.double().abs().unsqueeze(-1))
        terms_q += norm(torch.einsum("hqk,khd->qhd", ds, k.abs())) ** 2
        terms_k += norm(torch.einsum("hqk,qhd->khd", ds, q.abs())) ** 2
    return terms_q**0.5, terms_k**0.5


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


def through(backend: ModuleType, sample: Sample) -> Attention:
    """The backend's forward and backward as a differentiable function."""

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            packing = Packing(**sample.packing()) if sample.packed else None
            options = Options(sample.softcap, sample.scale, sample.causal, *sample.window)
            ctx.call = packing, resolve(options, q.shape[-1])
            out, lse = backend.forward(q, k, v, *ctx.call)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            dout = torch.zeros_like(out) if dout is None else dout
            grads = backend.backward(dout, dlse, q, k, v, out, lse, *ctx.call, (True, True, True))
            for t in (out, lse, *grads):
                assert t.is_contiguous()
            return grads

    return Call.apply  # type: ignore[return-value]


def metadata(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.dtype, t.stride(), t.storage_offset(), t.device.type


def must_save_attention() -> Any:
    """A checkpoint's context_fn that keeps the attention outputs and recomputes the rest."""
    ops = torch.ops.softcap_ops
    saved = {ops.attention_fwd.default, ops.varlen_attention_fwd.default}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def run_python(
    script: str, *args: object, cwd: Path | None = None, paths: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that looks in `paths` first, and else finds softcap_ops where this one did."""
    root = str(Path(softcap_ops.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    with tempfile.TemporaryDirectory() as empty:  # -c looks in the working directory before anything else
        return subprocess.run(command, env=env, cwd=cwd or empty, capture_output=True, text=True, timeout=240)
