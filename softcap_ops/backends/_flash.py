"""What FlashAttention-2 and -3 leave to their caller, so that both meet the contract of DESIGN.md.

A backend hands `forward` and `backward` here its two raw calls (`Launch`, `LaunchBackward`); they see tensors that the
kernels can read as they are: aligned, head_dim a multiple of 8, scale > 0, at least one query and one key. Done here:

- strides and storage offsets that 16-byte loads cannot take: copied;
- head_dim padded to a multiple of 8, the scale staying that of the real head_dim;
- scale <= 0: the kernels test scale / softcap > 0 and would run *uncapped*; the sign moves into q, which is exact;
- rows that see no key: never sent to a dense kernel (out 0, lse -inf, no gradient);
- a loss on lse, which their backward does not take: see `_add_lse_gradient`;
- the tiny real call that proves a build: `probe_error`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _fake, reference
from .._arguments import Cache, Packing, Parameters
from ..errors import UnsupportedError
from .problem import Problem, Refusal

# (q, k, v, packing, parameters) -> (out, lse)
Launch = Callable[[Tensor, Tensor, Tensor, "Packing | None", Parameters], "tuple[Tensor, Tensor]"]
# (dout, q, k, v, out, lse, packing, parameters, dq, dk, dv): writes the last three
LaunchBackward = Callable[..., None]
# (q, k_cache, v_cache, cache, parameters) -> (out, lse)
LaunchDecode = Callable[[Tensor, Tensor, Tensor, Cache, Parameters], "tuple[Tensor, Tensor]"]

HEAD_DIM_STEP = 8
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16)


def support_error(problem: Problem) -> str | None:
    """What both FlashAttentions refuse, whatever the build."""
    if problem.device_type != "cuda":
        return f"CUDA tensors only, got {problem.device_type}"
    if problem.dtype not in DTYPES:
        return f"computes in bfloat16 and float16 only, got {_name(problem.dtype)}"
    if problem.head_dim > MAX_HEAD_DIM:
        return f"head_dim up to {MAX_HEAD_DIM}, got {problem.head_dim}"
    if problem.softcap and not 1e-30 <= problem.softcap <= 1e30:
        return f"scale / softcap leaves float32's range at softcap {problem.softcap}"
    if problem.over_grid:
        return "more sequences in the batch than one CUDA grid takes (65535)"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- forward and backward --------------------------------------------------------------------------------------


def forward(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, p: Parameters
) -> tuple[Tensor, Tensor]:
    blind = _blind_rows(q, k, packing, p)
    if blind:
        out, lse = q.new_zeros(q.shape), _fake.empty_outputs(q)[1].fill_(-math.inf)
        if packing is None and blind < q.shape[1]:
            out[:, blind:], lse[:, :, blind:] = forward(launch, q[:, blind:], k, v, None, p)
        return out, lse
    head_dim = q.shape[-1]
    if p.scale <= 0:
        q, p, _ = _positive_scale(q, p)
    out, lse = launch(_readable(q), _readable(k), _readable(v), packing, p)
    return _unpad(out, head_dim), lse


def backward(
    launch: LaunchBackward,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing | None,
    p: Parameters,
    output_mask: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    blind = _blind_rows(q, k, packing, p)
    if blind:
        grads = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        if packing is None and blind < q.shape[1]:
            seen_q, seen_out, seen_dout, seen_lse = q[:, blind:], out[:, blind:], dout[:, blind:], lse[:, :, blind:]
            seen_dlse = None if dlse is None else dlse[:, :, blind:]
            every = (True, True, True)
            dq, dk, dv = backward(launch, seen_dout, seen_dlse, seen_q, k, v, seen_out, seen_lse, None, p, every)
            grads[0][:, blind:] = dq
            grads = grads[0], dk, dv
    else:
        head_dim, sign = q.shape[-1], 1
        if p.scale <= 0:
            q, p, sign = _positive_scale(q, p)
        dout, q, k, v, out = _readable(dout), _readable(q), _readable(k), _readable(v), _readable(out)
        lse = lse.contiguous()
        dq, dk, dv = _new_gradients(q, k, v, packing)
        launch(dout, q, k, v, out, lse, packing, p, dq, dk, dv)
        if dlse is not None:
            _add_lse_gradient(launch, dlse, q, k, v, lse, packing, p, dq, dk)
        if sign != 1:
            dq.mul_(sign)
        grads = _unpad(dq, head_dim), _unpad(dk, head_dim), _unpad(dv, head_dim)
    return only(grads, output_mask)


def only(grads: tuple[Tensor, Tensor, Tensor], output_mask: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients asked for; the others without elements."""
    if False in output_mask:
        dq, dk, dv = (g if wanted else g.new_empty(0) for g, wanted in zip(grads, output_mask, strict=True))
        return dq, dk, dv
    return grads


def decode(
    launch: LaunchDecode, q: Tensor, k: Tensor, v: Tensor, cache: Cache, p: Parameters, return_lse: bool
) -> tuple[Tensor, Tensor]:
    if 0 in q.shape or 0 in k.shape or cache.capacity(k) == 0:
        out, lse = _fake.empty_outputs(q, return_lse)
        return out.zero_(), lse.fill_(-math.inf)
    head_dim = q.shape[-1]
    if p.scale <= 0:
        q, p, _ = _positive_scale(q, p)
    table = cache.block_table
    if table is not None and table.stride(1) != 1:
        cache = cache._replace(block_table=table.contiguous())
    out, lse = launch(_readable(q), _readable(k), _readable(v), cache, p)
    # A row that sees nothing has lse +inf in some builds. Where nobody asked, not even that costs a kernel.
    lse = lse.masked_fill_(lse == math.inf, -math.inf) if return_lse else lse.new_empty(0)
    return _unpad(out, head_dim), lse


def _new_gradients(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous dq, dk, dv to write into. Packed kernels do not touch rows past cu_seqlens[-1]: zeros there."""
    if packing is None:
        return _new(q), _new(k), _new(v)
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


def _new(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _add_lse_gradient(
    launch: LaunchBackward,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    packing: Packing | None,
    p: Parameters,
    dq: Tensor,
    dk: Tensor,
) -> None:
    """Add what a loss on lse gives: dS = P * dlse * (1 - t^2) * scale, by a second call of the same kernel.

    The kernel computes dS = P * (dout vT - rowsum(dout * out)) * (1 - t^2) * scale. With out = 0 the second term is
    gone, and with v = 1 and dout = dlse in one column (0 elsewhere) the first is dlse. Two columns carry dlse as a
    sum of two numbers of the kernel's dtype, 16 bits of it or more. lse being its own output, nothing reaches v.
    """
    dlse = dlse.masked_fill(lse == -math.inf, 0.0).transpose(-1, -2)
    high = dlse.to(q.dtype)
    dout, ones = q.new_zeros(q.shape), v.new_zeros(v.shape)
    dout[..., 0], dout[..., 1] = high, dlse - high
    ones[..., :2] = 1
    dq_lse, dk_lse, unused = _new_gradients(q, k, v, packing)
    launch(dout, q, k, ones, q.new_zeros(q.shape), lse, packing, p, dq_lse, dk_lse, unused)
    dq += dq_lse
    dk += dk_lse


def _blind_rows(q: Tensor, k: Tensor, packing: Packing | None, p: Parameters) -> int:
    """How many leading rows of each sequence see no key; in a packed batch, all rows or 0."""
    if 0 in q.shape or 0 in k.shape:
        return max(1, q.shape[-3])
    if packing is not None:
        empty = packing.cu_seqlens_q.shape[0] == 1 or packing.max_seqlen_q == 0 or packing.max_seqlen_k == 0
        return q.shape[0] if empty else 0
    right = 0 if p.causal else p.window[1]
    return 0 if right < 0 else max(0, q.shape[1] - k.shape[1] - right)


def _positive_scale(q: Tensor, p: Parameters) -> tuple[Tensor, Parameters, int]:
    """For a scale <= 0: q and scale of the same scores, the scale > 0, and the factor that q took: -1 or 0."""
    sign = -1 if p.scale < 0 else 0
    return q * sign, p._replace(scale=-p.scale or 1.0), sign


def _readable(t: Tensor) -> Tensor:
    """t, or a copy that 16-byte loads and bulk copies can read: head_dim % 8 == 0, last stride 1, no stride 0."""
    if padding := -t.shape[-1] % HEAD_DIM_STEP:
        t = F.pad(t, (0, padding))
    strides = t.stride()
    if (
        strides[-1] == 1
        and (strides[0] | strides[1] | strides[-2]) % HEAD_DIM_STEP == 0
        and 0 not in strides
        and t.data_ptr() % 16 == 0
    ):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _unpad(t: Tensor, head_dim: int) -> Tensor:
    return t.contiguous() if t.shape[-1] == head_dim else t[..., :head_dim].contiguous()


def past_the_end(t: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which rows of a packed tensor belong to no sequence: bool (tokens,), without reading cu_seqlens here."""
    return torch.arange(t.shape[0], device=t.device) >= cu_seqlens[-1]


# ---- the probe -------------------------------------------------------------------------------------------------


class Probe(NamedTuple):
    """What one tiny real call settles: everything that picks another kernel of the build."""

    device_type: str
    device_index: int | None
    dtype: torch.dtype
    head_dim: int
    packed: bool
    capped: bool
    mask: str  # "full", "causal" or "window"
    deterministic: bool
    backward: bool
    cached: bool = False
    block_size: int = 0
    leftpad: bool = False


def probe_of(problem: Problem) -> Probe:
    windowed = problem.window != (-1, -1)
    return Probe(
        problem.device_type,
        problem.device_index,
        problem.dtype,
        problem.head_dim + -problem.head_dim % HEAD_DIM_STEP,
        problem.packed,
        bool(problem.softcap),
        "window" if windowed else "causal" if problem.causal else "full",
        problem.deterministic and problem.needs_backward,
        problem.needs_backward,
        problem.cached,
        problem.block_size,
        problem.leftpad,
    )


def _device(probe: Probe) -> torch.device:
    return torch.device(probe.device_type, probe.device_index or 0)


def _capturing(probe: Probe) -> bool:
    return probe.device_type == "cuda" and torch.cuda.is_current_stream_capturing()


class Prober:
    """The probes of one backend and their outcomes, each taken once a process."""

    def __init__(
        self, launch: Launch, launch_backward: LaunchBackward, launch_decode: LaunchDecode | None = None
    ) -> None:
        self._launch, self._launch_backward, self._launch_decode = launch, launch_backward, launch_decode
        self._outcomes: dict[Probe, Refusal | None] = {}

    def error(self, problem: Problem) -> Refusal | None:
        """Why this build fails at such a problem on its device; None = a real call gave the right result."""
        probe = probe_of(problem)
        if probe not in self._outcomes:
            if _capturing(probe):
                raise UnsupportedError(
                    "softcap_ops: this kind of call has not run on this device yet, and a backend cannot be tried "
                    "while a CUDA graph is captured. Warm up: run the call once before the capture."
                )
            # A new thread has none of the caller's modes: no autocast, functorch, fake tensors, inference mode.
            with ThreadPoolExecutor(1) as pool:
                self._outcomes[probe] = pool.submit(self._run, probe).result()
        return self._outcomes[probe]

    def _run(self, probe: Probe) -> Refusal | None:
        try:
            with torch.no_grad():
                return self._decode_mismatch(probe) if probe.cached else self._mismatch(probe)
        except torch.OutOfMemoryError:
            raise  # says nothing about the build: tried again by the next call
        except Exception as error:
            return Refusal(f"a trial call failed: {_first_line(error)}", error)

    def _mismatch(self, probe: Probe) -> Refusal | None:
        device, p = _device(probe), _probe_parameters(probe)
        x = _probe_inputs(probe)
        packing = None
        on_device = tuple(t.to(device) for t in x)
        q, k, v, dout = on_device if not probe.packed else (t.flatten(0, 1) for t in on_device)
        if probe.packed:
            cu_q, cu_k = (
                torch.arange(0, 2 * n + 1, n, dtype=torch.int32, device=device) for n in (x[0].shape[1], x[1].shape[1])
            )
            packing = Packing(cu_q, cu_k, x[0].shape[1], x[1].shape[1])
        out, lse = forward(self._launch, q, k, v, packing, p)
        if lse.shape != _fake.empty_outputs(q)[1].shape or lse.dtype != torch.float32:
            shape = tuple(lse.shape)
            return Refusal(f"a trial call returned lse as {_name(lse.dtype)} {shape}: another FlashAttention's layout")
        results = {"out": out, "lse": lse}
        if probe.backward:
            every = (True, True, True)
            grads = backward(self._launch_backward, dout, None, q, k, v, out, lse, packing, p, every)
            results |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        expected, uncapped = _expected(x, p), _expected(x, p._replace(softcap=0.0))
        for name, result in results.items():
            result = result.float().cpu().view(-1)
            if probe.packed and name == "lse":
                result = result.view(x[0].shape[2], 2, -1).transpose(0, 1).reshape(-1)
            error = _distance(result, expected[name])
            if not error < 0.05:
                if probe.capped and _distance(result, uncapped[name]) < 0.05:
                    return Refusal(f"a trial call returned {name} as if uncapped: this build drops softcap")
                return Refusal(f"a trial call returned a wrong {name} (relative error {error:.2g})")
        return None

    def _decode_mismatch(self, probe: Probe) -> Refusal | None:
        """One query a sequence, and several: kernels differ in it. Long, short and empty sequences."""
        assert self._launch_decode is not None  # selection asked for a decode kernel
        device, p = _device(probe), _probe_parameters(probe)
        for seqlen_q in (1, 8):
            q, k, v, cache = _probe_cache(probe, seqlen_q)
            there = (q.to(device), k.to(device), v.to(device), cache.to(device))
            out, lse = decode(self._launch_decode, *there, p, True)
            lse_shape = _fake.empty_outputs(q)[1].shape
            if lse.shape != lse_shape or lse.dtype != torch.float32:
                return Refusal(f"a trial call returned lse as {_name(lse.dtype)} {tuple(lse.shape)}, not {lse_shape}")
            if not _decoded((q, k, v), cache, p, out, lse):
                if _decoded((q, k, v), cache, p._replace(softcap=0.0), out, lse):
                    return Refusal(
                        "a trial call on a cache returned its result as if uncapped: this build drops softcap"
                    )
                return Refusal(f"a trial call at {seqlen_q} queries on a cache returned a wrong result")
        return None


def _decoded(qkv: tuple[Tensor, ...], cache: Cache, p: Parameters, out: Tensor, lse: Tensor) -> bool:
    """Whether these are the results of the formula."""
    q, k, v = (t.float() for t in qkv)
    expected = reference.attention_decode(
        q, k, v, **cache._asdict(), softcap=p.softcap, scale=p.scale, causal=p.causal, window=p.window
    )
    return all(_agree(a.float().cpu(), b) for a, b in zip((out, lse), expected, strict=True))


def _agree(a: Tensor, b: Tensor) -> bool:
    """Infinite in the same places, near elsewhere."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    return _distance(a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)) < 0.05


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _probe_parameters(probe: Probe) -> Parameters:
    return Parameters(
        1.0 if probe.capped else 0.0,
        2 * probe.head_dim**-0.5,
        probe.mask == "causal",
        (9, 3) if probe.mask == "window" else (-1, -1),
        probe.deterministic,
    )


def _probe_cache(probe: Probe, seqlen_q: int) -> tuple[Tensor, Tensor, Tensor, Cache]:
    """q, k_cache, v_cache and lengths: two query heads on one key head; a cache long enough to be split."""
    g = torch.Generator().manual_seed(0)
    capacity = 2 * probe.block_size or 600
    seqlens = torch.tensor([capacity - 7, 5, 0], dtype=torch.int32)
    leftpad = torch.tensor([3, 2, 0], dtype=torch.int32) if probe.leftpad else None
    table = torch.tensor([[4, 1], [0, 3], [5, 2]], dtype=torch.int32) if probe.block_size else None
    shape = (6, probe.block_size, 1, probe.head_dim) if probe.block_size else (3, capacity, 1, probe.head_dim)
    shapes = ((3, seqlen_q, 2, probe.head_dim), shape, shape)
    q, k, v = (torch.randn(s, generator=g).to(probe.dtype) for s in shapes)
    return q, k, v, Cache(seqlens, leftpad, table)


def _probe_inputs(probe: Probe) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout: two sequences, two query heads on one key head, lengths that fill no tile."""
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 20, 2, probe.head_dim), (2, 28, 1, probe.head_dim), (2, 28, 1, probe.head_dim))
    q, k, v, dout = (torch.randn(s, generator=g).to(probe.dtype) for s in (*shapes, shapes[0]))
    return q, k, v, dout


def _expected(x: tuple[Tensor, Tensor, Tensor, Tensor], p: Parameters) -> dict[str, Tensor]:
    """The float32 results of the formula on the CPU."""
    with torch.enable_grad():
        q, k, v = (t.float().requires_grad_() for t in x[:3])
        out, lse = reference.attention(q, k, v, softcap=p.softcap, scale=p.scale, causal=p.causal, window=p.window)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), x[3].float())
    return {n: t.detach().reshape(-1) for n, t in (("out", out), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv))}


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
