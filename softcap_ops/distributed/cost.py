"""What a scheme costs before it is run: bytes that a rank sends, matrix operations that it does, step by step.

Counted from the same plans that the ops follow, without a process group; tests compare them with what is sent.
docs/context_parallel.md turns them into time and says which scheme to choose when.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .._flops import visible_pairs
from .layout import Rows, chunks_per_rank, required_multiple
from .tiles import Hop, Mask, hop, tiles_of, touches


class StepCost(NamedTuple):
    """One step of a rank. A step's message travels while the step before it is computed."""

    sent_forward: int  # bytes
    sent_backward: int
    received_forward: int
    received_backward: int
    forward_flops: int  # of matrix products; a backward does 2.5 times as many


class Cost(NamedTuple):
    """What one rank does for one call. All communication of `exposed` waits for nothing else to be done."""

    exposed_forward: int  # bytes sent in exchanges and gathers, which nothing overlaps
    exposed_backward: int
    steps: tuple[StepCost, ...]  # the ring; without one, a single step that sends nothing

    @property
    def sent_forward(self) -> int:
        return self.exposed_forward + sum(s.sent_forward for s in self.steps)

    @property
    def sent_backward(self) -> int:
        return self.exposed_backward + sum(s.sent_backward for s in self.steps)

    @property
    def forward_flops(self) -> int:
        return sum(s.forward_flops for s in self.steps)

    def seconds(self, flops_per_second: float, bytes_per_second: float, *, backward: bool = False) -> float:
        """Time of the forward or the backward of one rank, if kernels and links run at these speeds.

        Ring: a step begins when the step before is computed and its own message has come, so the time is the sum of
        the larger of the two; the backward's gradients travel beside the keys. A link carries both ways at once.
        """
        factor = 2.5 if backward else 1.0
        total = (self.exposed_backward if backward else self.exposed_forward) / bytes_per_second
        work = [s.forward_flops * factor / flops_per_second for s in self.steps]
        if backward:
            messages = [max(s.sent_backward, s.received_backward) / bytes_per_second for s in self.steps]
        else:
            messages = [max(s.sent_forward, s.received_forward) / bytes_per_second for s in self.steps]
        for i, seconds in enumerate(work):
            total += max(seconds, messages[i + 1] if i + 1 < len(messages) else 0.0)
        return total


def cost(
    rank: int,
    ranks: int,
    *,
    comm: str,
    layout: str = "zigzag",
    batch: int = 1,
    seqlen_q: int,
    seqlen_k: int | None = None,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    a2a_size: int = 1,
    element_size: int = 2,
    rounds_partials: bool = True,
) -> Cost:
    """The cost of one call of `context_parallel_attention` for one rank.

    Args:
        rank, ranks: which of how many; for "a2a+p2p", in the order of `two_level_groups`.
        comm, layout, causal, window: as in `context_parallel_attention`.
        batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim: of the whole, unsplit call; seqlen_k None = seqlen_q.
        a2a_size: ranks of an a2a group, for "a2a+p2p".
        element_size: bytes of an element of q; 2 for bfloat16.
        rounds_partials: whether kernels give gradients in the dtype of q, as GPU kernels do. Ours for the CPU gives
            float32 ones where partial results have to be summed.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    for seqlen in (seqlen_q, seqlen_k):
        if seqlen % required_multiple(ranks, layout):
            raise ValueError(f"the sequence must be a multiple of {required_multiple(ranks, layout)}, got {seqlen}")
    a2a = ranks if comm == "a2a" else a2a_size if comm == "a2a+p2p" else 1
    outer = ranks // a2a
    rows_q, rows_k = Rows((seqlen_q,), (seqlen_q,)), Rows((seqlen_k,), (seqlen_k,))
    mask = Mask(causal, window)
    lse_size = max(4, element_size)
    narrow = element_size if rounds_partials else lse_size

    exposed_forward = exposed_backward = 0
    if a2a > 1:
        of_q = batch * seqlen_q // ranks * heads_q
        of_k = batch * seqlen_k // ranks * heads_kv * head_dim
        forward = (2 * of_q * head_dim + 2 * of_k) * element_size + of_q * lse_size
        backward = (4 * of_q * head_dim + 4 * of_k) * element_size + of_q * lse_size
        exposed_forward += forward * (a2a - 1) // a2a
        exposed_backward += backward * (a2a - 1) // a2a
    row = 2 * batch * (heads_kv // a2a) * head_dim  # elements of a row of keys and of values
    pair_flops = 4 * batch * (heads_q // a2a) * head_dim
    me = rank // a2a
    if comm == "all_gather":
        message = row * seqlen_k // ranks * (ranks - 1)
        gradient_size = narrow if chunks_per_rank(layout) == 1 else lse_size
        exposed_forward += message * element_size
        exposed_backward += message * (element_size + gradient_size)
        flops = pair_flops * rank_pairs(rows_q, rows_k, mask, layout, me, outer)
        return Cost(exposed_forward, exposed_backward, (StepCost(0, 0, 0, 0, flops),))

    def between(target: int, source: int) -> Hop:
        q, k = rows_q.segments(layout, target, outer), rows_k.segments(layout, source, outer)
        return hop(q, k, rows_q, rows_k, mask, False, target != source, torch.device("cpu"))

    def keys(h: Hop) -> int:
        return h.k_length * row * element_size

    def gradients(h: Hop) -> int:
        return h.k_length * row * (narrow if len(h.calls) <= 1 else lse_size)

    steps = []
    for shift in range(outer):
        if shift and not is_needed(rows_q, rows_k, mask, layout, shift, outer):
            continue
        source, target = (me - shift) % outer, (me + shift) % outer
        flops = pair_flops * rank_pairs(rows_q, rows_k, mask, layout, me, outer, source)
        if shift == 0:
            steps.append(StepCost(0, 0, 0, 0, flops))
            continue
        mine, theirs = between(me, source), between(target, me)
        sent, received = keys(theirs) + gradients(mine), keys(mine) + gradients(theirs)
        steps.append(StepCost(keys(theirs), sent, keys(mine), received, flops))
    return Cost(exposed_forward, exposed_backward, tuple(steps))


def is_needed(rows_q: Rows, rows_k: Rows, mask: Mask, layout: str, shift: int, ranks: int) -> bool:
    """Whether any rank sees keys of the rank `shift` before it on the ring."""
    for length_q, padded_q, length_k, padded_k in set(zip(*rows_q, *rows_k, strict=True)):
        band = mask.band(length_q, length_k)
        one_q, one_k = Rows((length_q,), (padded_q,)), Rows((length_k,), (padded_k,))
        for rank in range(ranks):
            of_q = one_q.segments(layout, rank, ranks)[0]
            of_k = one_k.segments(layout, (rank - shift) % ranks, ranks)[0]
            if any(touches(a, b, *band) for a in of_q for b in of_k):
                return True
    return False


def rank_pairs(
    rows_q: Rows, rows_k: Rows, mask: Mask, layout: str, rank: int, ranks: int, source: int | None = None
) -> int:
    """Visible pairs of a rank's queries with the keys of `source` (None: with all keys)."""
    of_q = rows_q.segments(layout, rank, ranks)
    of_k = rows_k.segments("contiguous", 0, 1) if source is None else rows_k.segments(layout, source, ranks)
    total = 0
    for q, k, length_q, length_k in zip(of_q, of_k, rows_q.lengths, rows_k.lengths, strict=True):
        for t in tiles_of(q, k, *mask.band(length_q, length_k)):
            total += visible_pairs(t.q[1], t.k[1], False, (t.left, t.right))
    return total


def busiest(costs: list[Cost], flops_per_second: float, bytes_per_second: float, *, backward: bool = False) -> float:
    """Seconds of the slowest rank."""
    return max((c.seconds(flops_per_second, bytes_per_second, backward=backward) for c in costs), default=math.nan)
