"""From the arguments of a context-parallel op to what this rank does: checks, agreement, plan.

Every scheme is an optional exchange of heads (a2a) around one of two ways to meet the keys of other ranks: the ring
(p2p) or gathering (all_gather). Plain a2a is the exchange around a ring of one rank.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _validation
from .._arguments import Options, Packing, Sharding, resolve
from . import agreement, groups
from .a2a import Part, as_lse, as_rows, to_heads, to_rows
from .all_gather import Gathering
from .cost import is_needed
from .interleave import Interleave
from .kernel import Gradients, Kernel
from .layout import Rows, check_layout, chunks_per_rank, required_multiple
from .p2p import Ring, Step
from .tiles import Mask, hop

COMMS = ("p2p", "all_gather", "a2a", "a2a+p2p")


class Exchange(NamedTuple):
    """Heads for rows: the group that trades them, and how its rows of q and of k, v go together."""

    group: dist.ProcessGroup
    order_q: Interleave
    order_k: Interleave


class Plan(NamedTuple):
    """All that one rank does for one configuration."""

    exchange: Exchange | None
    inner: Ring | Gathering
    kernel: Kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.exchange is None:
            return self.inner.forward(q, k, v, self.kernel)
        group, order_q, order_k = self.exchange
        q, k, v = to_heads(group, Part(q, order_q), Part(k, order_k), Part(v, order_k))
        out, lse = self.inner.forward(q, k, v, self.kernel)
        out, lse_rows = to_rows(group, Part(out, order_q), Part(as_rows(lse), order_q))
        return out, as_lse(lse_rows)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.exchange is None:
            return self.inner.backward(Gradients(dout, dlse, q, out, lse), k, v, self.kernel)
        group, order_q, order_k = self.exchange
        # Every rank has a gradient of lse or none has (return_lse in _schema.py).
        of_q = (dout, q, out, as_rows(lse), *(() if dlse is None else (as_rows(dlse),)))
        parts = [*(Part(t, order_k) for t in (k, v)), *(Part(t, order_q) for t in of_q)]
        k, v, dout, q, out, lse, *rest = to_heads(group, *parts)
        g = Gradients(dout, as_lse(rest[0]) if rest else None, q, out, as_lse(lse))
        dq, dk, dv = self.inner.backward(g, k, v, self.kernel)
        dq, dk, dv = to_rows(group, Part(dq, order_q), Part(dk, order_k), Part(dv, order_k))
        return dq, dk, dv


_plans: dict[Any, tuple[list[dist.ProcessGroup], Plan]] = {}
_MAX_PLANS = 512


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharding: Sharding,
    options: Options,
    *,
    needs_backward: bool = False,
    return_lse: bool = True,
    is_backward: bool = False,
) -> Plan:
    """What this rank does for the call. A forward call first settles with the other ranks that they make it too.

    Raises:
        ValueError: on every rank if any rank's arguments are wrong or the ranks' calls differ.
        TypeError, UnsupportedError: on the ranks whose own call has that fault (ValueError on the others).
    """
    members = groups.resolve(sharding.groups)
    error: Exception | None = None
    result: Plan | None = None
    facts: dict[str, Any] = {}
    try:
        facts = _facts(q, k, sharding, options, needs_backward)
        key = (tuple(sharding.groups), str(q.device), *facts.values())
        cached_groups, result = _plans.get(key, (None, None))
        if cached_groups is None or any(a is not b for a, b in zip(cached_groups, members, strict=True)):
            result = _make(q, k, v, members, sharding, options, needs_backward)
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = (members, result)
        else:
            _check(q, k, v, sharding, options)
    except Exception as caught:  # whatever it is, the other ranks wait for this one to tell
        error = caught
    if not is_backward:
        agreement.agree(members, {**facts, "return_lse": return_lse}, error, q.device)
    elif error is not None:
        raise error
    assert result is not None
    return result


def refuse(names: list[str], error: Exception, device: torch.device) -> None:
    """Raise `error`, found before the op was called, and let the other ranks raise too."""
    agreement.agree(groups.resolve(names), {}, error, device)


def _facts(q: Tensor, k: Tensor, s: Sharding, options: Options, needs_backward: bool) -> dict[str, Any]:
    """What all ranks must agree on, under the names that a message gives it."""
    p = resolve(options, max(q.shape[-1], 1) if q.dim() else 1)
    return {
        "the shape of q": tuple(q.shape),
        "the shape of k": tuple(k.shape),
        "the dtype of q": q.dtype,
        "comm": s.comm,
        "layout": s.layout,
        "softcap": p.softcap,
        "scale": p.scale,
        "causal": p.causal,
        "window": p.window,
        "deterministic": p.deterministic,
        "backend": options.backend,
        "whether a gradient is needed": needs_backward,
        "max_seqlen_q": s.max_seqlen_q,
        "max_seqlen_k": s.max_seqlen_k,
        "cu_seqlens_q": _on_host(s.cu_seqlens_q),
        "cu_seqlens_k": _on_host(s.cu_seqlens_k),
        "cu_seqlens_q_padded": _on_host(s.cu_seqlens_q_padded),
        "cu_seqlens_k_padded": _on_host(s.cu_seqlens_k_padded),
    }


_host_copies: Any = None


def _on_host(cu_seqlens: Tensor | None) -> tuple[int, ...] | None:
    """The values of cu_seqlens. From a GPU they are read once: all layers of a step share the tensor."""
    global _host_copies
    if cu_seqlens is None:
        return None
    cu_seqlens = cu_seqlens.reshape(-1) if cu_seqlens.dim() != 1 else cu_seqlens  # (_check refuses it)
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():
        return tuple(cu_seqlens.tolist())
    if _host_copies is None:
        from torch.utils.weak import WeakTensorKeyDictionary

        _host_copies = WeakTensorKeyDictionary()
    version, values = _host_copies.get(cu_seqlens, (None, None))
    if version != cu_seqlens._version:
        values = tuple(cu_seqlens.tolist())
        _host_copies[cu_seqlens] = (cu_seqlens._version, values)
    return values


def _check(q: Tensor, k: Tensor, v: Tensor, s: Sharding, options: Options) -> None:
    """The checks that no other rank's arguments enter."""
    if s.cu_seqlens_q is None and s.cu_seqlens_k is None:
        for name, value in (
            ("cu_seqlens_q_padded", s.cu_seqlens_q_padded),
            ("cu_seqlens_k_padded", s.cu_seqlens_k_padded),
            ("max_seqlen_q", s.max_seqlen_q),
            ("max_seqlen_k", s.max_seqlen_k),
        ):
            if value is not None:
                raise ValueError(f"{name} is for packed sequences: give cu_seqlens_q and cu_seqlens_k too")
        _validation.inputs(q, k, v, None, options)
        return
    if s.cu_seqlens_q is None or s.cu_seqlens_k is None:
        missing = "cu_seqlens_q" if s.cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} must be given where the other is: both sides are packed or none")
    packing = Packing(s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q or 0, s.max_seqlen_k or 0)
    _validation.inputs(q, k, v, packing, options)
    for name, padded, cu in (
        ("cu_seqlens_q_padded", s.cu_seqlens_q_padded, s.cu_seqlens_q),
        ("cu_seqlens_k_padded", s.cu_seqlens_k_padded, s.cu_seqlens_k),
    ):
        if padded is None:
            continue
        if padded.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {padded.dtype}")
        if padded.shape != cu.shape or padded.device != q.device:
            raise ValueError(
                f"{name} must have the shape {tuple(cu.shape)} of {name.removesuffix('_padded')}, on {q.device}, "
                f"got {tuple(padded.shape)} on {padded.device}"
            )


def _rows(
    side: str, t: Tensor, cu: Tensor | None, cu_padded: Tensor | None, longest: Any, ranks: int, layout: str
) -> Rows:
    """The sequences of q (side "q") or of k and v (side "k"), all ranks together."""
    multiple = required_multiple(ranks, layout)
    why = f"for {ranks} ranks in layout {layout!r}"
    if cu is None:
        local = t.shape[1]
        if local * ranks % multiple:
            raise ValueError(
                f"{side} must hold an even number of positions on each rank {why}, that is, the whole sequence must be "
                f"a multiple of {multiple}, got shape {tuple(t.shape)}: pad it, or use layout='contiguous'"
            )
        return Rows((local * ranks,), (local * ranks,))
    lengths = _differences(f"cu_seqlens_{side}", _on_host(cu))
    name = f"cu_seqlens_{side}" if cu_padded is None else f"cu_seqlens_{side}_padded"
    padded = lengths if cu_padded is None else _differences(name, _on_host(cu_padded))
    for i, (length, rows) in enumerate(zip(lengths, padded, strict=True)):
        if rows < length:
            raise ValueError(f"{name} must leave sequence {i} room for its {length} tokens, got {rows} rows")
        if rows % multiple:
            raise ValueError(
                f"{name}: the rows of sequence {i}, {rows}, must be a multiple of {multiple} {why}: pad the sequences "
                f"and give cu_seqlens_{side}_padded (see softcap_ops.distributed.pad_sequences)"
            )
    if sum(padded) > t.shape[0] * ranks:
        raise ValueError(
            f"{name} must end within the {t.shape[0]} x {ranks} rows of all ranks' {side}, got {sum(padded)} "
            "(cu_seqlens are those of the whole sequences, not of a rank's part)"
        )
    if longest is not None and max(lengths, default=0) > longest:
        raise ValueError(f"max_seqlen_{side} must be at least the longest sequence, {max(lengths)}, got {longest}")
    return Rows(lengths, padded)


def _differences(name: str, values: tuple[int, ...] | None) -> tuple[int, ...]:
    assert values is not None
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}")
    result = tuple(b - a for a, b in pairwise(values))
    if min(result, default=0) < 0:
        raise ValueError(f"{name} must not decrease, got {list(values)}")
    return result


def _make(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    members: list[dist.ProcessGroup],
    s: Sharding,
    options: Options,
    needs_backward: bool,
) -> Plan:
    if s.comm not in COMMS:
        raise ValueError(f"comm must be one of {list(COMMS)}, got {s.comm!r}")
    check_layout(s.layout)
    two_level = s.comm == "a2a+p2p"
    if len(members) != (2 if two_level else 1):
        wanted = "a pair (a2a group, p2p group) (see two_level_groups)" if two_level else "one group"
        raise ValueError(f"group: comm={s.comm!r} needs {wanted}, got {len(members)} process groups")
    _check(q, k, v, s, options)
    a2a = members[0] if "a2a" in s.comm else None
    outer = members[-1] if s.comm != "a2a" else None
    a2a_ranks = 1 if a2a is None else a2a.size()
    rank, ranks = (0, 1) if outer is None else (outer.rank(), outer.size())
    _check_heads(q, k, a2a_ranks)
    everyone = a2a_ranks * ranks
    rows_q = _rows("q", q, s.cu_seqlens_q, s.cu_seqlens_q_padded, s.max_seqlen_q, everyone, s.layout)
    rows_k = _rows("k", k, s.cu_seqlens_k, s.cu_seqlens_k_padded, s.max_seqlen_k, everyone, s.layout)
    packed = s.cu_seqlens_q is not None

    def order(side: Rows, t: Tensor, members: int, outer_rank: int, outer_ranks: int) -> Interleave:
        return Interleave.of(side.padded, t.shape[-3], s.layout, members, outer_rank, outer_ranks, packed)

    exchange = None
    if a2a is not None and a2a_ranks > 1:
        exchange = Exchange(a2a, order(rows_q, q, a2a_ranks, rank, ranks), order(rows_k, k, a2a_ranks, rank, ranks))
    parameters = resolve(options, q.shape[-1])
    in_float32 = ranks > 1 and q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    kernel = Kernel(parameters, options.backend, needs_backward, in_float32)
    where = _Where(rows_q, rows_k, Mask(parameters.causal, parameters.window), packed, s.layout, q.device)
    inner: Ring | Gathering
    if s.comm == "all_gather":
        assert outer is not None
        gathered, chunks = order(rows_k, k, ranks, 0, 1), chunks_per_rank(s.layout)
        inner = Gathering(outer, gathered, where.gathered_hop(rank, ranks), chunks)
        calls = inner.hop.calls
    else:
        inner = Ring(outer or members[0], rank, _steps(where, rank, ranks))
        calls = tuple(call for step in inner.steps for call in step.hop.calls)
    per_rank = (t.narrow(-2, 0, t.shape[-2] // a2a_ranks) for t in (q, k))
    q_heads, k_heads = per_rank
    for call in calls:
        kernel.check(q_heads, k_heads, call)
    return Plan(exchange, inner, kernel)


def _check_heads(q: Tensor, k: Tensor, ranks: int) -> None:
    for name, t in (("q", q), ("k", k)):
        if t.shape[-2] % ranks:
            raise ValueError(
                f"{name}: comm with a2a deals the heads out to the {ranks} ranks of its group, so they must divide by "
                f"{ranks}, got {t.shape[-2]} heads in shape {tuple(t.shape)}: use p2p, all_gather, or fewer a2a ranks"
            )


class _Where(NamedTuple):
    """Where everything lies: what hops are made from."""

    rows_q: Rows
    rows_k: Rows
    mask: Mask
    packed: bool
    layout: str
    device: torch.device

    def hop(self, rank: int, source: int, ranks: int) -> Any:
        """`rank` working with the keys of `source`: its own as they lie, another's as they come in a message."""
        q = self.rows_q.segments(self.layout, rank, ranks)
        k = self.rows_k.segments(self.layout, source, ranks)
        return hop(q, k, self.rows_q, self.rows_k, self.mask, self.packed, rank != source, self.device)

    def gathered_hop(self, rank: int, ranks: int) -> Any:
        """`rank` working with all keys, in their order."""
        q = self.rows_q.segments(self.layout, rank, ranks)
        k = self.rows_k.segments("contiguous", 0, 1)
        return hop(q, k, self.rows_q, self.rows_k, self.mask, self.packed, False, self.device)


def _steps(where: _Where, rank: int, ranks: int) -> tuple[Step, ...]:
    result = []
    for shift in range(ranks):
        # Left out only where it is empty on all ranks: they must post their messages in one order.
        if shift and not is_needed(*where[:3], where.layout, shift, ranks):
            continue
        source, target = (rank - shift) % ranks, (rank + shift) % ranks
        result.append(Step(source, where.hop(rank, source, ranks), target, where.hop(target, rank, ranks)))
    return tuple(result)
