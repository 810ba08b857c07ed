"""The forward: one program for each block of queries of one head, over the keys that the block sees.

With the cap on, a score lies in [-cap, cap], so exp needs no row maximum: exp2(score - shift) with one constant shift
neither overflows nor vanishes up to a cap of 75 (RUNNING_MAX off). No reduction stands before the exponential, and the
accumulator is never rescaled, so a product can run while the next tile's exponentials are taken. Elsewhere, and with
float16 at caps above 10, whose probabilities float16 cannot hold, the maximum is tracked as usual.

Without it the largest probability of a row is not 1 but any number, and is rounded for the product with v like all
others. Out is therefore divided by the sum of the rounded ones, which undoes most of that; lse is of the exact sum.
(The second sum issues beside tanh and exp, which the special-function unit takes longer for.)
"""

import triton
import triton.language as tl

from .pieces import (
    LN2,
    STRIDES,
    exp2,
    keys_of,
    load_tile,
    log2_score,
    rows_from,
    sequence,
    store_tile,
    tile_of,
    visible,
)


@triton.jit
def _step(
    start, q, acc, total, rounded_total, top, K, V, k_row, v_row, first, seqlen_q, seqlen_k, left, right, tanh_scale,
    score_scale, shift, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, STEP: tl.constexpr, CAPPED: tl.constexpr, FAST_TANH: tl.constexpr, RUNNING_MAX: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, EXP2: tl.constexpr,
):  # fmt: skip
    """One tile of keys: (acc, total, rounded_total, top) with its part added."""
    k = tile_of(K, start, seqlen_k, k_row, MASKED, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, TMA)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    score, _ = log2_score(product, tanh_scale, score_scale, CAPPED, FAST_TANH)
    if MASKED:
        i = first + tl.arange(0, BLOCK_M)[:, None]
        j = start + tl.arange(0, BLOCK_N)[None, :]
        score = tl.where(visible(i, j, seqlen_q, seqlen_k, left, right), score, float("-inf"))
    if RUNNING_MAX:
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        p = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink
        acc = acc * shrink[:, None]
        top = new_top
    else:
        p = exp2(score - shift, 0 if MASKED else EXP2)
    total += tl.sum(p, 1)
    rounded = p.to(k.dtype)
    if not RUNNING_MAX:
        rounded_total += tl.sum(rounded.to(tl.float32), 1)
    v = tile_of(V, start, seqlen_k, v_row, MASKED, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, TMA)
    acc = tl.dot(rounded, v, acc, input_precision=PRECISION)
    return acc, total, rounded_total, top


_INTEGERS = ["rows_q", "rows_k", "heads_q", "group", "blocks", "left", "right", *STRIDES]


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=["Lse", "CuQ", "CuK"])
def attend(
    Q, K, V, Out, Lse, CuQ, CuK,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64,
    rows_q, rows_k, heads_q, group, blocks, left, right, tanh_scale, score_scale, shift,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr,
    FAST_TANH: tl.constexpr, RUNNING_MAX: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXP2: tl.constexpr,
):  # fmt: skip
    """Out and Lse of `blocks` blocks of queries, each of heads_q heads, each of the batch's sequences: the grid.

    Q, K, V: elements (batch, row, head, head_dim) at strides of STEP elements, head_dim contiguous; Out contiguous
    (batch, row, head, head_dim), Lse (batch, head, row). A packed batch is one of batch 0 whose sequences CuQ and CuK
    delimit. rows_q, rows_k: rows of a batch entry. Query head h uses key head h // group.
    tanh_scale: scale / softcap. score_scale: softcap, or scale where it is off, times log2(e). shift: in log2 units.
    """
    program = tl.program_id(0)
    # The last queries of a causal sequence see most keys: they start first, and the grid ends on light blocks.
    first = (blocks - 1 - program % blocks) * BLOCK_M
    head = program // blocks % heads_q
    batch = program // blocks // heads_q
    start_q, seqlen_q = sequence(CuQ, batch, rows_q, PACKED)
    start_k, seqlen_k = sequence(CuK, batch, rows_k, PACKED)
    if first >= seqlen_q:
        return
    entry = batch.to(tl.int64) * (0 if PACKED else 1)
    row = (start_q + first).to(tl.int64)
    Q += (entry * q_batch + head * q_head + row * q_row) * STEP
    K += (entry * k_batch + head // group * k_head + start_k.to(tl.int64) * k_row) * STEP
    V += (entry * v_batch + head // group * v_head + start_k.to(tl.int64) * v_row) * STEP
    K = rows_from(K, seqlen_k, k_row, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, TMA)
    V = rows_from(V, seqlen_k, v_row, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, TMA)
    rows_left = seqlen_q - first

    q = load_tile(Q, q_row, rows_left, True, BLOCK_M, HEAD_DIM, BLOCK_D, STEP)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    rounded_total = total
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    lo, full_lo, full_hi, hi = keys_of(first, BLOCK_M, BLOCK_N, seqlen_q, seqlen_k, left, right)
    for start in range(full_lo, full_hi, BLOCK_N):
        acc, total, rounded_total, top = _step(
            start, q, acc, total, rounded_total, top, K, V, k_row, v_row, first, seqlen_q, seqlen_k, left, right,
            tanh_scale, score_scale, shift, False, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, CAPPED, FAST_TANH,
            RUNNING_MAX, PRECISION, TMA, EXP2,
        )  # fmt: skip
    edges = (full_lo - lo) // BLOCK_N
    for i in tl.range(edges + tl.cdiv(hi - full_hi, BLOCK_N), disable_licm=True):
        start = tl.where(i < edges, lo + i * BLOCK_N, full_hi + (i - edges) * BLOCK_N)
        acc, total, rounded_total, top = _step(
            start, q, acc, total, rounded_total, top, K, V, k_row, v_row, first, seqlen_q, seqlen_k, left, right,
            tanh_scale, score_scale, shift, True, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, CAPPED, FAST_TANH,
            RUNNING_MAX, PRECISION, TMA, EXP2,
        )  # fmt: skip

    sees_none = total == 0.0
    weight = total if RUNNING_MAX else rounded_total
    out = tl.where(sees_none[:, None], 0.0, acc / tl.where(sees_none, 1.0, weight)[:, None])
    base = top if RUNNING_MAX else shift
    lse = tl.where(sees_none, float("-inf"), (base + tl.log2(tl.where(sees_none, 1.0, total))) * LN2)
    row = entry * rows_q + row
    store_tile(Out + (row * heads_q + head) * HEAD_DIM, heads_q * HEAD_DIM, rows_left, out, BLOCK_M, HEAD_DIM, BLOCK_D)
    i = tl.arange(0, BLOCK_M)
    tl.store(Lse + (entry * heads_q + head) * rows_q + start_q + first + i, lse, mask=i < rows_left)
