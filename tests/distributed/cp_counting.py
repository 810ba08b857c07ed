"""What each rank really sends and computes, beside what `cost` says."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cp_cases import Case, Split, group_for
from torch.utils.flop_counter import FlopCounterMode

import softcap_ops
from softcap_ops import distributed as cp
from softcap_ops.distributed import agreement, transport


class Meter:
    """Adds up the bytes that leave this rank."""

    def __init__(self) -> None:
        self.sent = 0

    def __enter__(self) -> Meter:
        self._saved = dist.P2POp, dist.all_to_all_single, transport._all_gather_single
        p2p_op, all_to_all, all_gather = self._saved

        def count_p2p(op: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if op is dist.isend:
                self.sent += tensor.nbytes
            return p2p_op(op, tensor, *args, **kwargs)

        def count_all_to_all(received: torch.Tensor, sent: torch.Tensor, group: Any) -> Any:
            self.sent += sent.nbytes * (group.size() - 1) // group.size()
            return all_to_all(received, sent, group=group)

        def count_all_gather(received: torch.Tensor, sent: torch.Tensor, group: Any) -> Any:
            if sent.nbytes != 8 * (1 + agreement._WORDS):  # not the agreement's
                self.sent += sent.nbytes * (group.size() - 1)
            return all_gather(received, sent, group=group)

        dist.P2POp, dist.all_to_all_single = count_p2p, count_all_to_all
        transport._all_gather_single = count_all_gather
        return self

    def __exit__(self, *exception: object) -> None:
        dist.P2POp, dist.all_to_all_single, transport._all_gather_single = self._saved


def _expected(case: Case, dtype: torch.dtype) -> cp.Cost:
    s = case.sample
    return cp.cost(
        dist.get_rank(), dist.get_world_size(), comm=case.comm, layout=case.layout, batch=s.batch,
        seqlen_q=s.seqlen_q, seqlen_k=s.seqlen_k, heads_q=s.heads_q, heads_kv=s.heads_kv or s.heads_q,
        head_dim=s.head_dim, causal=s.causal, window=s.window, a2a_size=2, element_size=dtype.itemsize,
        rounds_partials=False,
    )  # fmt: skip


def check_bytes(case: Case, dtype: torch.dtype) -> None:
    x, split, expected = case.sample.inputs(dtype), Split(case), _expected(case, dtype)
    q, k, v = (t.requires_grad_() for t in (split.of_q(x.q), split.of_k(x.k), split.of_k(x.v)))
    with Meter() as forward:
        out = softcap_ops.context_parallel_attention(q, k, v, **{**split.options, "return_lse": False})
    with Meter() as backward:
        out.sum().backward()
    assert (forward.sent, backward.sent) == (expected.sent_forward, expected.sent_backward)


def check_flops(case: Case) -> int:
    """The counter agrees with the cost model; returns the forward's count."""
    x, split = case.sample.inputs(torch.float32), Split(case)
    q, k, v = (t.requires_grad_() for t in (split.of_q(x.q), split.of_k(x.k), split.of_k(x.v)))
    group_for(case.comm)
    with FlopCounterMode(display=False) as forward:
        out, _ = softcap_ops.context_parallel_attention(q, k, v, **split.options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() * 2 == forward.get_total_flops() * 5
    if "a2a" not in case.comm and not case.sample.packed:
        assert forward.get_total_flops() == _expected(case, torch.float32).forward_flops
    return forward.get_total_flops()
