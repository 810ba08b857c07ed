"""What the kernels are made of: sequences of a batch, tiles of rows, the capped score, what a row sees.

Strides come in units of STEP elements: the compiler then knows that rows are aligned, and loads 16 bytes at a time.
Offsets of a tile's first element are 64-bit, those within it 32-bit.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Not to be specialised on: what is compiled for one call's strides serves all calls (launch.py).
STRIDES = [f"{tensor}_{axis}" for tensor in "qkvdo" for axis in ("batch", "row", "head")]


@triton.jit
def sequence(cu_seqlens, i, rows, PACKED: tl.constexpr):
    """First row and length of sequence i: of a packed batch, or dense with `rows` rows each."""
    if PACKED:
        first = tl.load(cu_seqlens + i)
        return first, tl.load(cu_seqlens + i + 1) - first
    else:
        return i * 0, rows


@triton.jit
def load_tile(
    start, row_stride, rows_left,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """(BLOCK, BLOCK_D) of the rows from pointer `start` on; zeros past head_dim and, if MASKED, past rows_left."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = start + row * (row_stride.to(tl.int32) * STEP) + column
    if MASKED:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=row < rows_left, other=0.0)
        else:
            return tl.load(pointers, mask=(row < rows_left) & (column < HEAD_DIM), other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=column < HEAD_DIM, other=0.0)


@triton.jit
def rows_from(
    start, rows, row_stride,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Where `tile_of` finds `rows` rows from pointer `start` on: a descriptor for bulk copies, or the pointer."""
    if TMA:
        return tl.make_tensor_descriptor(start, [rows, HEAD_DIM], [row_stride * STEP, 1], [BLOCK, BLOCK_D])
    else:
        return start


@triton.jit
def tile_of(
    source, first, rows, row_stride, MASKED: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The (BLOCK, BLOCK_D) tile at row `first` of what `rows_from` gave; zeros past `rows` (if MASKED) and head_dim."""
    if TMA:
        return source.load([first, 0])
    else:
        return load_tile(
            source + first * (row_stride * STEP), row_stride, rows - first, MASKED, BLOCK, HEAD_DIM, BLOCK_D, STEP
        )


@triton.jit
def store_tile(
    start, row_stride, rows_left, tile, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Write the first rows_left rows of a tile, rounded to the pointer's dtype."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = start + row * row_stride + column
    tl.store(pointers, tile.to(start.dtype.element_ty), mask=(row < rows_left) & (column < HEAD_DIM))


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """FAST: the instruction of NVIDIA GPUs, 1e-5 off; else within 3 ulps, from what every GPU has."""
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        # Near 0, where 1 - 2 / (1 + e^2|x|) would cancel: x + x s p(s), s = x^2, p a least maximum on s <= 0.37.
        s = x * x
        p = -0.0058437656
        p = p * s + 0.0207558535
        p = p * s - 0.0537732467
        p = p * s + 0.1333181709
        p = p * s - 0.3333329558
        size = tl.abs(x)
        far = 1.0 - 2.0 / (1.0 + tl.exp2(size * (2 * LOG2E)))
        return tl.where(size < 0.6, x + x * s * p, tl.where(x < 0, -far, far))


def _exp2_assembly(by_arithmetic: int) -> str:
    """PTX for 2^x of four numbers: so many of them by arithmetic, the rest by the special-function unit.

    x = n + f with n whole and |f| <= 1/2; 2^f by a cubic of least relative error, n added to the exponent.
    """
    lines = ["{ .reg .f32 z, w, f, p; .reg .b32 e, b;"]
    for i in range(4):
        out, x = f"${i}", f"${i + 4}"
        if i >= by_arithmetic:
            lines.append(f"ex2.approx.ftz.f32 {out}, {x};")
            continue
        lines.append(f"add.rn.f32 z, {x}, 0f4B400000; sub.rn.f32 w, z, 0f4B400000; sub.rn.f32 f, {x}, w;")
        lines.append("fma.rn.f32 p, f, 0f3D61FB26, 0f3E786ECB; fma.rn.f32 p, p, f, 0f3F31798D;")
        lines.append("fma.rn.f32 p, p, f, 0f3F7FFB4A; mov.b32 e, z; shl.b32 e, e, 23; mov.b32 b, p; add.s32 b, b, e;")
        lines.append(f"mov.b32 {out}, b;")
    return " ".join([*lines, "}"])


_EXP2_1 = tl.constexpr(_exp2_assembly(1))
_EXP2_2 = tl.constexpr(_exp2_assembly(2))
_EXP2_3 = tl.constexpr(_exp2_assembly(3))
_EXP2_CONSTRAINTS = tl.constexpr("=&f,=&f,=&f,=&f,f,f,f,f")


@triton.jit
def exp2(x, ARITHMETIC: tl.constexpr):
    """2^x. ARITHMETIC of every 4 numbers, 0 to 3, are not left to the special-function unit, which tanh keeps busy.

    Those are 8e-5 off, and need -126 <= x < 127. NVIDIA only.
    """
    if ARITHMETIC == 0:
        return tl.exp2(x)
    else:
        assembly: tl.constexpr = _EXP2_1 if ARITHMETIC == 1 else _EXP2_2 if ARITHMETIC == 2 else _EXP2_3
        return tl.inline_asm_elementwise(assembly, _EXP2_CONSTRAINTS, args=[x], dtype=tl.float32, is_pure=True, pack=4)


@triton.jit
def log2_score(product, tanh_scale, score_scale, CAPPED: tl.constexpr, FAST_TANH: tl.constexpr):
    """(score in units of log2(e), tanh) of q kT; without a cap the second is the first again, and unused."""
    if CAPPED:
        t = tanh(product * tanh_scale, FAST_TANH)
        return t * score_scale, t
    else:
        score = product * score_scale
        return score, score


@triton.jit
def visible(i, j, seqlen_q, seqlen_k, left, right):
    """Whether query i sees key j; `left` and `right` are 2^30 where unlimited. Broadcasts."""
    diagonal = i + (seqlen_k - seqlen_q)
    return (j < seqlen_k) & (i < seqlen_q) & (j <= diagonal + right) & (j >= diagonal - left)


@triton.jit
def keys_of(first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, seqlen_q, seqlen_k, left, right):
    """Keys that the BLOCK_M queries from `first` on see: (lo, full_lo, full_hi, hi), multiples of BLOCK_N but hi.

    Some see keys in [lo, hi), all see all of [full_lo, full_hi); lo <= full_lo <= full_hi.
    """
    last = tl.minimum(first + BLOCK_M, seqlen_q) - 1
    offset = seqlen_k - seqlen_q
    lo = tl.maximum(first + offset - left, 0) // BLOCK_N * BLOCK_N
    hi = tl.minimum(last + offset + right + 1, seqlen_k)
    full_lo = tl.cdiv(tl.maximum(last + offset - left, 0), BLOCK_N) * BLOCK_N
    full_lo = tl.maximum(tl.minimum(full_lo, tl.cdiv(tl.maximum(hi, 0), BLOCK_N) * BLOCK_N), lo)
    full_hi = tl.maximum(tl.minimum(first + offset + right + 1, seqlen_k), 0) // BLOCK_N * BLOCK_N
    return lo, full_lo, tl.maximum(full_lo, full_hi), hi


@triton.jit
def queries_of(first, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, seqlen_q, seqlen_k, left, right):
    """Queries that see the BLOCK_N keys from `first` on: as `keys_of`. A block past the last key has no full ones."""
    last = tl.minimum(first + BLOCK_N, seqlen_k) - 1
    offset = seqlen_k - seqlen_q
    lo = tl.maximum(first - offset - right, 0) // BLOCK_M * BLOCK_M
    hi = tl.minimum(last - offset + left + 1, seqlen_q)
    full_lo = tl.cdiv(tl.maximum(last - offset - right, 0), BLOCK_M) * BLOCK_M
    full_lo = tl.maximum(tl.minimum(full_lo, tl.cdiv(tl.maximum(hi, 0), BLOCK_M) * BLOCK_M), lo)
    full_hi = tl.maximum(tl.minimum(first - offset + left + 1, seqlen_q), 0) // BLOCK_M * BLOCK_M
    full_hi = tl.where(first + BLOCK_N > seqlen_k, 0, full_hi)
    return lo, full_lo, tl.maximum(full_lo, full_hi), hi
