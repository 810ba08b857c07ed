"""FlashAttention-2 and -3 as they behave, faults included, written out in PyTorch so that they run on a CPU.

Emulated: what the real kernels refuse (unaligned pointers, head_dim % 8, float32), what they do wrong at the edges
(lse +inf on rows that see nothing, windows widened when seqlen_q > seqlen_k + 1, the cap lost at scale <= 0, rows of
other sequences at max_seqlen_q = 1) and what they leave unwritten (NaN here). `Faults` makes the builds in the wild.
"""

from __future__ import annotations

import math
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from softcap_ops import _impl, reference
from softcap_ops.backends import _flash, fa2, fa3, hopper, triton
from softcap_ops.backends.problem import Refusal


@dataclass
class Faults:
    """How a build differs from a full one, and a record of the calls it got."""

    version: str = "2.8"  # "2.5": no softcap; "2.6": another order and window; "2.8"
    softcap: str = "yes"  # "yes", "ignored", "raises"
    backward: str = "yes"  # "yes", "raises", "no_factor": without 1 - tanh^2
    max_backward_head_dim: int = 256
    lse: str = "exact"  # "exact", "padded"
    decode: str = "yes"  # "yes", "first sequence": all on the cache of sequence 0, "absent", "no softcap"
    calls: list[str] = field(default_factory=list)


# ---- the arithmetic --------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, scale: float, cap: float, window: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(H, Sq, Sk): capped masked scores, tanh, visible; of one sequence, float32."""
    q, k = q.float().transpose(0, 1), k.float().transpose(0, 1)
    s = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(-1, -2)
    # The kernels test scale / cap, and then scale by cap * tanh: at scale <= 0 there is no tanh.
    if cap > 0 and scale / cap > 0:
        t = torch.tanh(s * (scale / cap))
        s = cap * t
    else:
        t = torch.zeros_like(s)
        s = s * (cap if cap > 0 else scale)
    seen = reference.visible(s.shape[1], s.shape[2], False, window)
    seen = torch.ones_like(s, dtype=torch.bool) if seen is None else seen.expand(s.shape)
    return s.masked_fill(~seen, -math.inf), t, seen


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, window: tuple[int, int]) -> Any:
    s, _, _ = _scores(q, k, scale, cap, window)
    lse = s.logsumexp(-1) if s.shape[2] else s.new_full(s.shape[:2], -math.inf)
    p = torch.where(lse.isneginf().unsqueeze(-1), 0.0, (s - lse.unsqueeze(-1)).exp())
    v = v.float().transpose(0, 1)
    return (p @ v.repeat_interleave(q.shape[1] // v.shape[0], 0)).transpose(0, 1).to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, cap: float,
    window: tuple[int, int], factor: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    s, t, seen = _scores(q, k, scale, cap, window)
    p = torch.where(seen, (s - lse.unsqueeze(-1)).exp(), 0.0)
    group = q.shape[1] // k.shape[1]
    qf, kf, vf, df, of = (x.float().transpose(0, 1) for x in (q, k, v, dout, out))
    dp = df @ vf.repeat_interleave(group, 0).transpose(-1, -2)
    ds = p * (dp - (df * of).sum(-1, keepdim=True)) * scale
    if factor:
        ds = ds * (1 - t * t)
    dq = ds @ kf.repeat_interleave(group, 0)
    dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in (ds.transpose(-1, -2) @ qf, p.transpose(-1, -2) @ df))
    return tuple(x.transpose(0, 1).to(q.dtype) for x in (dq, dk, dv))  # type: ignore[return-value]


def _check(faults: Faults, softcap: float, *tensors: Tensor, broadcast: bool) -> float:
    """Refuse what the real kernels refuse or read wrongly; returns the cap that this build applies."""
    for t in tensors:
        assert t.dtype in (torch.float16, torch.bfloat16), "FlashAttention only supports fp16 and bf16 data type"
        assert t.shape[-1] % 8 == 0, "head_size should be a multiple of 8"
        assert t.shape[-1] <= 256, "head dimension at most 256"
        assert t.stride(-1) == 1, "last dimension must be contiguous"
        assert t.data_ptr() % 16 == 0, "misaligned address"
        assert all(s % 8 == 0 for s in t.stride()[:-1]), "misaligned address"
        assert broadcast or 0 not in t.stride(), "stride 0 in a bulk copy"
        assert t.shape[0] > 0, "batch size must be positive"
    if softcap > 0 and faults.softcap == "raises":
        raise RuntimeError("This flash attention build does not support tanh softcapping.")
    return 0.0 if faults.softcap == "ignored" else softcap


def _check_backward(faults: Faults, q: Tensor) -> None:
    if faults.backward == "raises" or q.shape[-1] > faults.max_backward_head_dim:
        raise RuntimeError("This flash attention build does not support backward.")


# ---- FlashAttention-2 ------------------------------------------------------------------------------------------


def _fa2_window(causal: bool, window: tuple[int, int], max_seqlen_k: int) -> tuple[int, int]:
    """FlashAttention-2's own treatment of the window (csrc/flash_attn/flash_api.cpp)."""
    left, right = window
    left, right = (-1 if left >= max_seqlen_k else left), (-1 if right >= max_seqlen_k else right)
    if causal:
        right = 0
    if left < 0 and right >= 0:
        left = max_seqlen_k
    if left >= 0 and right < 0:
        right = max_seqlen_k
    return left, right


class FakeFA2:
    """The functions of flash_attn.flash_attn_interface."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def dense_forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Any, cap: float
    ) -> Any:
        self.faults.calls.append("forward")
        cap = _check(self.faults, cap, q, k, v, broadcast=True)
        window = _fa2_window(causal and q.shape[1] > 1, window, k.shape[1])
        results = [_forward(*x, scale, cap, window) for x in zip(q, k, v, strict=True)]
        out = torch.empty_like(q).copy_(torch.stack([o for o, _ in results]))
        lse = torch.stack([s for _, s in results]).nan_to_num(neginf=math.inf)
        if self.faults.lse == "padded":
            lse = torch.nn.functional.pad(lse, (0, -q.shape[1] % 128))
        return out, lse

    def varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float,
        causal: bool, window: Any, cap: float, zero: bool,
    ) -> Any:  # fmt: skip
        self.faults.calls.append("varlen_forward")
        cap = _check(self.faults, cap, q, k, v, broadcast=True)
        assert not (max_q == 1 and q.shape[1] > k.shape[1]), "takes row b of q for sequence b"
        window = _fa2_window(causal and max_q > 1, window, max_k)
        out = torch.empty_like(q).fill_(0.0 if zero else math.nan)
        lse = torch.full((q.shape[1], q.shape[0]), -math.inf if zero else math.nan)
        for rows_q, rows_k in _rows(cu_q, cu_k):
            o, s = _forward(q[rows_q], k[rows_k], v[rows_k], scale, cap, window)
            out[rows_q], lse[:, rows_q] = o, s.nan_to_num(neginf=math.inf)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, scale: float, causal: bool, window: Any, cap: float, deterministic: bool,
        packing: Any = None, zero: bool = False,
    ) -> None:  # fmt: skip
        self.faults.calls.append("backward deterministic" if deterministic else "backward")
        cap = _check(self.faults, cap, dout, q, k, v, out, broadcast=True)
        _check_backward(self.faults, q)
        factor = self.faults.backward != "no_factor"
        if packing is None:
            window = _fa2_window(causal, window, k.shape[1])
            for i in range(q.shape[0]):
                grads = _backward(dout[i], q[i], k[i], v[i], out[i], lse[i], scale, cap, window, factor)
                dq[i], dk[i], dv[i] = grads
            return
        cu_q, cu_k, _, max_k = packing
        window = _fa2_window(causal, window, max_k)
        for t in (dq, dk, dv):
            t.fill_(0.0 if zero else math.nan)
        for a, b in _rows(cu_q, cu_k):
            grads = _backward(dout[a], q[a], k[b], v[b], out[a], lse[:, a], scale, cap, window, factor)
            dq[a], dk[b], dv[b] = grads

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
        block_table: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
        softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:  # fmt: skip
        self.faults.calls.append("decode")
        assert k is v is rotary_cos is cache_batch_idx is alibi_slopes is None
        assert block_table is None or (k_cache.shape[1] % 256 == 0 and cache_leftpad is None)
        cap = _check(self.faults, softcap, q, k_cache, v_cache, broadcast=True)
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        window = _fa2_window(causal and q.shape[1] > 1, window_size, capacity)
        out, lse = _decode(
            self.faults, q, k_cache, v_cache, cache_seqlens, cache_leftpad, block_table, softmax_scale, cap, window
        )
        lse = lse.nan_to_num(neginf=math.inf)
        return (out, lse) if return_softmax_lse else out

    def module(self) -> types.ModuleType:
        interface = types.ModuleType("flash_attn.flash_attn_interface")
        functions = {"2.5": self._version_2_5, "2.6": self._version_2_6, "2.8": self._version_2_8}[self.faults.version]
        for function in functions():
            setattr(interface, function.__name__, function)
        if self.faults.decode == "no softcap":
            interface.flash_attn_with_kvcache = lambda q, k_cache, v_cache, cache_seqlens, causal: None  # type: ignore[attr-defined]
        elif self.faults.decode != "absent":
            interface.flash_attn_with_kvcache = self.flash_attn_with_kvcache  # type: ignore[attr-defined]
        return interface

    def _version_2_5(self) -> Any:
        def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_softmax):  # type: ignore[no-untyped-def]
            raise AssertionError("called a FlashAttention without softcap")

        def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal):  # type: ignore[no-untyped-def]
            raise AssertionError("called a FlashAttention without softcap")

        return _flash_attn_forward, _flash_attn_backward

    def _version_2_6(self) -> Any:
        """window_size is a pair, the order is another, and the forwards return eight tensors."""

        def eight(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return out, q, k, v, out, lse, None, None

        def _flash_attn_forward(  # type: ignore[no-untyped-def]
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        ):
            return eight(*self.dense_forward(q, k, v, softmax_scale, causal, window_size, softcap), q, k, v)

        def _flash_attn_varlen_forward(  # type: ignore[no-untyped-def]
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
        ):  # fmt: skip
            outputs = self.varlen_forward(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
                softcap, False,
            )  # fmt: skip
            return eight(*outputs, q, k, v)

        def _flash_attn_backward(  # type: ignore[no-untyped-def]
            dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, softcap,
            alibi_slopes, deterministic, rng_state=None,
        ):  # fmt: skip
            self.backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size, softcap,
                          deterministic)  # fmt: skip

        def _flash_attn_varlen_backward(  # type: ignore[no-untyped-def]
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state=None,
        ):  # fmt: skip
            self.backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size, softcap,
                          deterministic, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))  # fmt: skip

        return _flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward

    def _version_2_8(self) -> Any:
        def _flash_attn_forward(  # type: ignore[no-untyped-def]
            q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            return_softmax,
        ):  # fmt: skip
            window = (window_size_left, window_size_right)
            return *self.dense_forward(q, k, v, softmax_scale, causal, window, softcap), None, None

        def _flash_attn_varlen_forward(  # type: ignore[no-untyped-def]
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
            block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
        ):  # fmt: skip
            outputs = self.varlen_forward(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                (window_size_left, window_size_right), softcap, zero_tensors,
            )  # fmt: skip
            return *outputs, None, None

        def _flash_attn_backward(  # type: ignore[no-untyped-def]
            dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
        ):  # fmt: skip
            self.backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal,
                          (window_size_left, window_size_right), softcap, deterministic)  # fmt: skip

        def _flash_attn_varlen_backward(  # type: ignore[no-untyped-def]
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            deterministic, rng_state=None, zero_tensors=False,
        ):  # fmt: skip
            self.backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal,
                          (window_size_left, window_size_right), softcap, deterministic,
                          (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), zero_tensors)  # fmt: skip

        return _flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward


def _decode(
    faults: Faults, q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Tensor, leftpad: Tensor | None,
    table: Tensor | None, scale: float, cap: float, window: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each sequence on its keys; windows are counted from its own length."""
    assert seqlens.dtype == torch.int32
    assert seqlens.is_contiguous()
    outs, lses = [], []
    for b, end in enumerate(seqlens.tolist()):
        b_cache = 0 if faults.decode == "first sequence" else b
        first = 0 if leftpad is None else int(leftpad[b])
        if table is None:
            k, v = k_cache[b_cache, first:end], v_cache[b_cache, first:end]
        else:
            blocks = table[b_cache, : -(-end // k_cache.shape[1])]
            k, v = (t[blocks].flatten(0, 1)[first:end] for t in (k_cache, v_cache))
        out, lse = _forward(q[b], k, v, scale, cap, window)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _rows(cu_q: Tensor, cu_k: Tensor) -> Any:
    q, k = cu_q.tolist(), cu_k.tolist()
    return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]


# ---- FlashAttention-3 ------------------------------------------------------------------------------------------


def _fa3_window(causal: bool, left: int, right: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    left, right = (-1 if left >= seqlen_k - 1 else left), (-1 if right >= seqlen_q - 1 else right)
    return left, 0 if causal else right


class FakeOp:
    """A torch.ops packet with the two things that are read of it: `default` and its schema."""

    def __init__(self, function: Any, arguments: str) -> None:
        self._schema = types.SimpleNamespace(arguments=[types.SimpleNamespace(name=n) for n in arguments.split()])
        self._function = function

    @property
    def default(self) -> FakeOp:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class FakeFA3:
    """The operators fwd and bwd of flash_attn_3 or fa3_fwd."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def namespace(self) -> types.SimpleNamespace:
        fwd = (
            "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale is_causal "
            "window_size_left window_size_right softcap num_splits"
        )
        if self.faults.decode != "absent":
            fwd += " seqused_k page_table leftpad_k"
        bwd = (
            "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale "
            "is_causal window_size_left window_size_right softcap deterministic"
        )
        return types.SimpleNamespace(fwd=FakeOp(self.fwd, fwd), bwd=FakeOp(self.bwd, bwd))

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0, softmax_scale: float = 0.0,
        is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
        num_splits: int = 0, seqused_k: Any = None, page_table: Any = None, leftpad_k: Any = None,
    ) -> Any:  # fmt: skip
        self.faults.calls.append("forward" if seqused_k is None else "decode")
        assert num_splits == (1 if seqused_k is None else 0)
        cap = _check(self.faults, softcap, q, k, v, broadcast=False)
        if seqused_k is not None:
            capacity = k.shape[1] * (1 if page_table is None else page_table.shape[1])
            window = _fa3_window(is_causal, window_size_left, window_size_right, q.shape[1], capacity)
            out, lse = _decode(self.faults, q, k, v, seqused_k, leftpad_k, page_table, softmax_scale, cap, window)
            return out, lse, None, None
        if cu_seqlens_q is None:
            window = _fa3_window(is_causal, window_size_left, window_size_right, q.shape[1], k.shape[1])
            results = [_forward(*x, softmax_scale, cap, window) for x in zip(q, k, v, strict=True)]
            return torch.stack([o for o, _ in results]), torch.stack([s for _, s in results]), None, None
        assert out is not None
        window = _fa3_window(is_causal, window_size_left, window_size_right, max_seqlen_q, max_seqlen_k)
        lse = torch.full((q.shape[1], q.shape[0]), math.nan)
        for a, b in _rows(cu_seqlens_q, cu_seqlens_k):
            out[a], lse[:, a] = _forward(q[a], k[b], v[b], softmax_scale, cap, window)
        return out, lse, None, None

    def bwd(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, dq: Tensor, dk: Tensor,
        dv: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
        softmax_scale: float = 0.0, is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
        softcap: float = 0.0, deterministic: bool = False,
    ) -> Any:  # fmt: skip
        self.faults.calls.append("backward deterministic" if deterministic else "backward")
        cap = _check(self.faults, softcap, dout, q, k, v, out, broadcast=False)
        _check_backward(self.faults, q)
        assert not (deterministic and q.shape[-1] > 192), "Deterministic backward not supported for hdim 256."
        factor = self.faults.backward != "no_factor"
        if cu_seqlens_q is None:
            window = _fa3_window(is_causal, window_size_left, window_size_right, q.shape[1], k.shape[1])
            for i in range(q.shape[0]):
                grads = _backward(dout[i], q[i], k[i], v[i], out[i], lse[i], softmax_scale, cap, window, factor)
                dq[i], dk[i], dv[i] = grads
            return
        window = _fa3_window(is_causal, window_size_left, window_size_right, max_seqlen_q, max_seqlen_k)
        for a, b in _rows(cu_seqlens_q, cu_seqlens_k):
            grads = _backward(dout[a], q[a], k[b], v[b], out[a], lse[:, a], softmax_scale, cap, window, factor)
            dq[a], dk[b], dv[b] = grads


# ---- installing them -------------------------------------------------------------------------------------------


def clear_caches() -> None:
    for cached in (fa2._load, fa3._load, hopper._load):
        cached.cache_clear()
    _impl.forget()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed and nothing has been tried yet; call `clear_caches` once that is undone."""
    clear_caches()
    for module in (fa2, fa3):
        prober = _flash.Prober(module._launch, module._launch_backward, module._launch_decode)
        monkeypatch.setattr(module, "_prober", prober)
    monkeypatch.setattr(hopper, "LIBRARY", hopper.LIBRARY.with_name("no library"))
    monkeypatch.setattr(triton, "install_error", lambda: Refusal("triton is not installed"))
    monkeypatch.setattr(_flash, "_device", lambda probe: torch.device("cpu"))
    monkeypatch.setattr(_flash, "_capturing", lambda probe: False)
    for name in ("flash_attn", "flash_attn.flash_attn_interface", *fa3._BUILDS, *fa3._BUILDS.values()):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ModuleNotFoundError


def install_fa2(monkeypatch: pytest.MonkeyPatch, **faults: Any) -> Faults:
    state = Faults(**faults)
    package = types.ModuleType("flash_attn")
    package.flash_attn_interface = FakeFA2(state).module()  # type: ignore[attr-defined]
    package.__version__ = f"{state.version}.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package.flash_attn_interface)
    return state


def install_fa3(
    monkeypatch: pytest.MonkeyPatch,
    namespace: str = "flash_attn_3",
    flags: dict[str, bool] | None = None,
    **faults: Any,
) -> Faults:
    state = Faults(**faults)
    package, extension = types.ModuleType(namespace), types.ModuleType(f"{namespace}._C")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, namespace, package)
    monkeypatch.setitem(sys.modules, f"{namespace}._C", extension)
    monkeypatch.setattr(torch.ops, namespace, FakeFA3(state).namespace(), raising=False)
    if flags is not None:
        config = types.ModuleType(fa3._BUILDS[namespace])
        config.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{n}": v for n, v in flags.items()}}  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, config.__name__, config)
    return state
