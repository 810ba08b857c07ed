"""The backward: `prepare`, `differentiate_keys` for dk and dv, together or apart, `differentiate_queries` for dq.

With P the probabilities, t the tanh and dS = P * (dout vT - delta) * (1 - t^2):

    dv = PT dout,  dk = scale dST q,  dq = scale dS k,  delta = rowsum(dout * out) - dlse

`differentiate_keys` walks over queries, one program for each block of keys of one key head: GQA's sums over query heads
stay in its registers. `differentiate_queries` walks over keys, and computes P and dS once more. Every sum has one
order, so the gradients repeat to the bit. Adding dS k atomically to a float32 dq in the first walk saves two of seven
products, and took longer on an H200.
"""

import triton
import triton.language as tl

from .pieces import (
    LOG2E,
    STRIDES,
    exp2,
    keys_of,
    load_tile,
    log2_score,
    queries_of,
    rows_from,
    sequence,
    store_tile,
    tile_of,
    visible,
)

_INTEGERS = ["rows_q", "rows_k", "heads_q", "heads_kv", "group", "blocks", "left", "right", *STRIDES]
_UNALIGNED = ["Lse", "Delta", "CuQ", "CuK"]


@triton.jit(do_not_specialize=["rows", "heads", *STRIDES], do_not_specialize_on_alignment=["Lse", "DLse", "Delta"])
def prepare(
    Out, DOut, Lse, DLse, Delta, o_batch: tl.int64, o_row: tl.int64, o_head: tl.int64, d_batch: tl.int64,
    d_row: tl.int64, d_head: tl.int64, rows, heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
    HAS_DLSE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Delta (batch, head, row) = rowsum(dout * out) - dlse, and 0 for rows that see nothing.

    Grid: blocks of rows, heads, batch entries. Lse and DLse as Delta.
    """
    blocks = tl.cdiv(rows, BLOCK_M)
    program = tl.program_id(0)
    first = program % blocks * BLOCK_M
    head = program // blocks % heads
    batch = (program // blocks // heads).to(tl.int64)
    rows_left = rows - first
    row = first.to(tl.int64)
    Out += (batch * o_batch + head * o_head + row * o_row) * STEP
    DOut += (batch * d_batch + head * d_head + row * d_row) * STEP
    out = load_tile(Out, o_row, rows_left, True, BLOCK_M, HEAD_DIM, BLOCK_D, STEP).to(tl.float32)
    dout = load_tile(DOut, d_row, rows_left, True, BLOCK_M, HEAD_DIM, BLOCK_D, STEP).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    i = tl.arange(0, BLOCK_M)
    at = (batch * heads + head) * rows + first + i
    if HAS_DLSE:
        delta -= tl.load(DLse + at, mask=i < rows_left, other=0.0)
    lse = tl.load(Lse + at, mask=i < rows_left, other=0.0)
    tl.store(Delta + at, tl.where(lse == float("-inf"), 0.0, delta), mask=i < rows_left)


@triton.jit
def _step_keys(
    start, k, v, dk, dv, Q, DOut, Lse, Delta, q_row, d_row, first, seqlen_q, seqlen_k, left, right,
    tanh_scale, score_scale, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, STEP: tl.constexpr, CAPPED: tl.constexpr, FAST_TANH: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, EXP2: tl.constexpr,
):  # fmt: skip
    """One tile of queries: (dk, dv) with its part added. Scores lie transposed, (keys, queries)."""
    rows_left = seqlen_q - start
    q = tile_of(Q, start, seqlen_q, q_row, MASKED, BLOCK_M, HEAD_DIM, BLOCK_D, STEP, TMA)
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    score, t = log2_score(product, tanh_scale, score_scale, CAPPED, FAST_TANH)
    i = tl.arange(0, BLOCK_M)
    lse = tl.load(Lse + start + i, mask=i < rows_left, other=0.0) if MASKED else tl.load(Lse + start + i)
    exponent = score - (lse * LOG2E)[None, :]
    if MASKED:
        p = tl.exp2(exponent)
        j = first + tl.arange(0, BLOCK_N)[:, None]
        seen = visible((start + i)[None, :], j, seqlen_q, seqlen_k, left, right)
        p = tl.where(seen, p, 0.0)
    else:
        p = exp2(tl.maximum(exponent, -126.0) if EXP2 else exponent, EXP2)
    dout = tile_of(DOut, start, seqlen_q, d_row, MASKED, BLOCK_M, HEAD_DIM, BLOCK_D, STEP, TMA)
    if DV:
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    if DK:
        delta = tl.load(Delta + start + i, mask=i < rows_left, other=0.0) if MASKED else tl.load(Delta + start + i)
        minus_delta = tl.broadcast_to(-delta[None, :], (BLOCK_N, BLOCK_M))
        dp = tl.dot(v, tl.trans(dout), minus_delta, input_precision=PRECISION)
        if CAPPED:
            p = p * (1.0 - t * t)
        dk = tl.dot((p * dp).to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_UNALIGNED)
def differentiate_keys(
    Q, K, V, DOut, Lse, Delta, Dk, Dv, CuQ, CuK,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64, d_batch: tl.int64, d_row: tl.int64, d_head: tl.int64,
    rows_q, rows_k, heads_kv, group, blocks, left, right, tanh_scale, score_scale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr,
    FAST_TANH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXP2: tl.constexpr,
):  # fmt: skip
    """Dk if DK, Dv if DV, of `blocks` blocks of keys, each of heads_kv heads, each of the batch's sequences: the grid.

    Layouts and numbers as in `attend`; DOut like Q. Dk, Dv contiguous (batch, row, head, head_dim).
    """
    program = tl.program_id(0)
    first = program % blocks * BLOCK_N  # the first keys of a causal sequence are seen by most queries: they start first
    head = program // blocks % heads_kv
    batch = program // blocks // heads_kv
    start_q, seqlen_q = sequence(CuQ, batch, rows_q, PACKED)
    start_k, seqlen_k = sequence(CuK, batch, rows_k, PACKED)
    if first >= seqlen_k:
        return
    entry = batch.to(tl.int64) * (0 if PACKED else 1)
    row = (start_k + first).to(tl.int64)
    row_q = start_q.to(tl.int64)
    heads_q = heads_kv * group
    K += (entry * k_batch + head * k_head + row * k_row) * STEP
    V += (entry * v_batch + head * v_head + row * v_row) * STEP
    rows_left = seqlen_k - first

    k = load_tile(K, k_row, rows_left, True, BLOCK_N, HEAD_DIM, BLOCK_D, STEP)
    v = load_tile(V, v_row, rows_left, True, BLOCK_N, HEAD_DIM, BLOCK_D, STEP)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    lo, full_lo, full_hi, hi = queries_of(first, BLOCK_N, BLOCK_M, seqlen_q, seqlen_k, left, right)
    edges = (full_lo - lo) // BLOCK_M
    # Registers are short: what one head needs is not worked out before all of them, nor before the tiles at the edges.
    for h in tl.range(head * group, head * group + group, disable_licm=True):
        q = Q + (entry * q_batch + row_q * q_row + h * q_head) * STEP
        q = rows_from(q, seqlen_q, q_row, BLOCK_M, HEAD_DIM, BLOCK_D, STEP, TMA)
        dout = DOut + (entry * d_batch + row_q * d_row + h * d_head) * STEP
        dout = rows_from(dout, seqlen_q, d_row, BLOCK_M, HEAD_DIM, BLOCK_D, STEP, TMA)
        lse = Lse + (entry * heads_q + h) * rows_q + row_q
        delta = Delta + (entry * heads_q + h) * rows_q + row_q
        for i in tl.range(edges + tl.cdiv(hi - full_hi, BLOCK_M), disable_licm=True):
            start = tl.where(i < edges, lo + i * BLOCK_M, full_hi + (i - edges) * BLOCK_M)
            dk, dv = _step_keys(
                start, k, v, dk, dv, q, dout, lse, delta, q_row, d_row, first, seqlen_q,
                seqlen_k, left, right, tanh_scale, score_scale, True, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, CAPPED,
                FAST_TANH, DK, DV, PRECISION, TMA, EXP2,
            )  # fmt: skip
        for start in tl.range(full_lo, full_hi, BLOCK_M, disable_licm=True):
            dk, dv = _step_keys(
                start, k, v, dk, dv, q, dout, lse, delta, q_row, d_row, first, seqlen_q,
                seqlen_k, left, right, tanh_scale, score_scale, False, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, STEP,
                CAPPED, FAST_TANH, DK, DV, PRECISION, TMA, EXP2,
            )  # fmt: skip

    offset = ((entry * rows_k + row) * heads_kv + head) * HEAD_DIM
    if DK:
        store_tile(Dk + offset, heads_kv * HEAD_DIM, rows_left, dk * scale, BLOCK_N, HEAD_DIM, BLOCK_D)
    if DV:
        store_tile(Dv + offset, heads_kv * HEAD_DIM, rows_left, dv, BLOCK_N, HEAD_DIM, BLOCK_D)


@triton.jit
def _step_queries(
    start, q, dout, lse, delta, dq, K, V, k_row, v_row, first, seqlen_q, seqlen_k, left, right, tanh_scale, score_scale,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    STEP: tl.constexpr, CAPPED: tl.constexpr, FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    EXP2: tl.constexpr,
):  # fmt: skip
    """One tile of keys: dq with its part added."""
    k = tile_of(K, start, seqlen_k, k_row, MASKED, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, TMA)
    v = tile_of(V, start, seqlen_k, v_row, MASKED, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, TMA)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    score, t = log2_score(product, tanh_scale, score_scale, CAPPED, FAST_TANH)
    exponent = score - lse[:, None]
    if MASKED:
        p = tl.exp2(exponent)
        i = first + tl.arange(0, BLOCK_M)[:, None]
        j = start + tl.arange(0, BLOCK_N)[None, :]
        p = tl.where(visible(i, j, seqlen_q, seqlen_k, left, right), p, 0.0)
    else:
        p = exp2(tl.maximum(exponent, -126.0) if EXP2 else exponent, EXP2)
    minus_delta = tl.broadcast_to(-delta[:, None], (BLOCK_M, BLOCK_N))
    dp = tl.dot(dout, tl.trans(v), minus_delta, input_precision=PRECISION)
    if CAPPED:
        p = p * (1.0 - t * t)
    return tl.dot((p * dp).to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_UNALIGNED)
def differentiate_queries(
    Q, K, V, DOut, Lse, Delta, Dq, CuQ, CuK,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64, d_batch: tl.int64, d_row: tl.int64, d_head: tl.int64,
    rows_q, rows_k, heads_q, group, blocks, left, right, tanh_scale, score_scale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr,
    FAST_TANH: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EXP2: tl.constexpr,
):  # fmt: skip
    """Dq, contiguous (batch, row, head, head_dim), of the grid of `attend`."""
    program = tl.program_id(0)
    first = (blocks - 1 - program % blocks) * BLOCK_M
    head = program // blocks % heads_q
    batch = program // blocks // heads_q
    start_q, seqlen_q = sequence(CuQ, batch, rows_q, PACKED)
    start_k, seqlen_k = sequence(CuK, batch, rows_k, PACKED)
    if first >= seqlen_q:
        return
    entry = batch.to(tl.int64) * (0 if PACKED else 1)
    row = (start_q + first).to(tl.int64)
    row_k = start_k.to(tl.int64)
    Q += (entry * q_batch + head * q_head + row * q_row) * STEP
    DOut += (entry * d_batch + head * d_head + row * d_row) * STEP
    K += (entry * k_batch + head // group * k_head + row_k * k_row) * STEP
    V += (entry * v_batch + head // group * v_head + row_k * v_row) * STEP
    K = rows_from(K, seqlen_k, k_row, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, TMA)
    V = rows_from(V, seqlen_k, v_row, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, TMA)
    rows_left = seqlen_q - first

    q = load_tile(Q, q_row, rows_left, True, BLOCK_M, HEAD_DIM, BLOCK_D, STEP)
    dout = load_tile(DOut, d_row, rows_left, True, BLOCK_M, HEAD_DIM, BLOCK_D, STEP)
    i = tl.arange(0, BLOCK_M)
    at = (entry * heads_q + head) * rows_q + row + i
    lse = tl.load(Lse + at, mask=i < rows_left, other=0.0) * LOG2E
    delta = tl.load(Delta + at, mask=i < rows_left, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    lo, full_lo, full_hi, hi = keys_of(first, BLOCK_M, BLOCK_N, seqlen_q, seqlen_k, left, right)
    for start in range(full_lo, full_hi, BLOCK_N):
        dq = _step_queries(
            start, q, dout, lse, delta, dq, K, V, k_row, v_row, first, seqlen_q, seqlen_k, left, right, tanh_scale,
            score_scale, False, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, CAPPED, FAST_TANH, PRECISION, TMA, EXP2,
        )  # fmt: skip
    edges = (full_lo - lo) // BLOCK_N
    for n in tl.range(edges + tl.cdiv(hi - full_hi, BLOCK_N), disable_licm=True):
        start = tl.where(n < edges, lo + n * BLOCK_N, full_hi + (n - edges) * BLOCK_N)
        dq = _step_queries(
            start, q, dout, lse, delta, dq, K, V, k_row, v_row, first, seqlen_q, seqlen_k, left, right, tanh_scale,
            score_scale, True, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, STEP, CAPPED, FAST_TANH, PRECISION, TMA, EXP2,
        )  # fmt: skip
    row = entry * rows_q + row
    store_tile(
        Dq + (row * heads_q + head) * HEAD_DIM, heads_q * HEAD_DIM, rows_left, dq * scale, BLOCK_M, HEAD_DIM, BLOCK_D
    )
