"""softcap_attention_decode on the CPU kernel: the table of cases, and its contract.

CASES rows 5 and 86; what PyTorch makes of the op is in test_decode_transforms.py, mistakes in its arguments in
test_errors.py, its schema in test_schemas.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_samples import DECODE_SAMPLES, DecodeSample, check_decode, each_sample, each_sample_and_heat, named
from helpers import run_python
from samples import each_dtype
from torch import Tensor

from softcap_ops import reference, softcap_attention, softcap_attention_decode

OP = torch.ops.softcap_ops.decode_attention_fwd.default
NAN = float("nan")


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- against the formula ---------------------------------------------------------------------------------------


@each_dtype()
@each_sample_and_heat()
def test_parity(sample: DecodeSample, hot: bool, dtype: torch.dtype) -> None:
    """Whatever belongs to no sequence is NaN here, and must not be read."""
    check_decode(sample, sample.inputs(dtype, hot=hot), hot=hot)


ISA_SCRIPT = """
    import sys, torch
    sys.path[:0] = sys.argv[2:]
    torch.set_num_threads(1)
    from decode_samples import DECODE_SAMPLES, check_decode
    assert torch.ops.softcap_ops._cpu_isa() == sys.argv[1]
    for sample in DECODE_SAMPLES:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            check_decode(sample, sample.inputs(dtype, hot=sample.heats[-1]), hot=sample.heats[-1])
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """case 84: machines without AVX-512."""
    best = torch.ops.softcap_ops._cpu_isa()
    if best == "baseline":
        pytest.skip("this machine has the baseline only, which every other test runs on")
    monkeypatch.setenv("SOFTCAP_OPS_CPU_ISA", isa)
    from pathlib import Path

    done = run_python(ISA_SCRIPT, isa, Path(__file__).parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 257), (3, 1000), (8, 1000), (1, 8192)])
def test_splits_neither_mix_nor_lose_sequences(batch: int, head_dim: int, seqlen_q: int, seqlen_k: int) -> None:
    """case 86: eight query heads on one key head, lengths of many splits, the cap of a model."""
    lengths = (seqlen_k, seqlen_k - 100, seqlen_k - 200, 3)[:batch]
    sample = DecodeSample(
        f"case86_{head_dim}_{seqlen_k}", lengths=lengths, seqlen_q=seqlen_q, heads_q=8, heads_kv=1, head_dim=head_dim,
        softcap=50.0,
    )  # fmt: skip
    check_decode(sample, sample.inputs(hot=True), hot=True)


@pytest.mark.parametrize("name", ["split", "split_queries", "split_many_queries", "paged_split", "prefill"])
def test_threads_change_no_bit(name: str) -> None:
    (sample,) = named(name)
    x = sample.inputs(torch.bfloat16, hot=True)
    alone = sample.decode(x)
    try:
        torch.set_num_threads(4)
        for _ in range(3):
            for a, b in zip(sample.decode(x), alone, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(1)


def paged(cache: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(B, S, H, D) as blocks in reverse order, and their table."""
    batch, seqlen = cache.shape[:2]
    blocks = cache.unflatten(1, (-1, block_size)).flatten(0, 1).flip(0)
    table = torch.arange(blocks.shape[0] - 1, -1, -1, dtype=torch.int32).view(batch, seqlen // block_size)
    return blocks.contiguous(), table


@pytest.mark.parametrize("window", [(-1, -1), (40, 0)], ids=["global", "local"])
@pytest.mark.parametrize("block_size", [0, 16], ids=["dense", "paged"])
def test_prefill_chunks_and_steps_agree(block_size: int, window: tuple[int, int]) -> None:
    """case 5: a prompt of 128 at once, in chunks of 32 and in 128 steps, through one growing cache."""
    q, k, v = (6 * torch.randn(2, 128, heads, 32, dtype=torch.float64) for heads in (4, 2, 2))
    options: dict[str, Any] = {"softcap": 50.0, "window": window}
    whole = softcap_attention(q, k, v, causal=True, **options)
    assert (whole - softcap_attention(q, k, v, causal=True, softcap=None, window=window)).abs().max() > 1
    for step in (32, 1):
        k_cache, v_cache = torch.full_like(k, NAN), torch.full_like(v, NAN)
        outs = []
        for end in range(step, 129, step):
            k_cache[:, end - step : end], v_cache[:, end - step : end] = k[:, end - step : end], v[:, end - step : end]
            caches, table = (k_cache, v_cache), None
            if block_size:
                (k_blocks, table), (v_blocks, _) = paged(k_cache, block_size), paged(v_cache, block_size)
                caches = (k_blocks, v_blocks)
            outs.append(
                softcap_attention_decode(
                    q[:, end - step : end], *caches, lengths(end, end), block_table=table, **options
                )
            )
        torch.testing.assert_close(torch.cat(outs, 1), whole)


def test_paged_is_dense_bit_for_bit() -> None:
    """Where blocks hold whole steps of the kernel, the sums are even the same."""
    q, k, v = torch.randn(2, 1, 4, 32), torch.randn(2, 256, 2, 32), torch.randn(2, 256, 2, 32)
    (k_blocks, table), (v_blocks, _) = paged(k, 64), paged(v, 64)
    seqlens = lengths(256, 100)
    dense = softcap_attention_decode(q, k, v, seqlens, softcap=5.0)
    assert torch.equal(softcap_attention_decode(q, k_blocks, v_blocks, seqlens, block_table=table, softcap=5.0), dense)


@each_sample(named("three_queries", "more_queries_than_keys", "window_both", "not_causal", "off", "cap_30"))
def test_each_sequence_alone(sample: DecodeSample) -> None:
    """A sequence of a batch is a dense call on its keys, masks aligned to its own length."""
    x = sample.inputs(torch.float64, hot=True)
    out, lse = sample.decode(x)
    for b, n in enumerate(sample.lengths):
        q, k, v = x.q[b, None], x.k_cache[b, None, :n], x.v_cache[b, None, :n]
        expected = softcap_attention(q, k, v, return_lse=True, **sample.options)
        torch.testing.assert_close((out[b, None], lse[b, None]), expected)


# ---- the contract ----------------------------------------------------------------------------------------------


def test_causal_is_the_default_and_matters() -> None:
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    options = {"softcap": 5.0}
    default = softcap_attention_decode(q, k, v, lengths(9), **options)
    assert torch.equal(default, softcap_attention_decode(q, k, v, lengths(9), causal=True, **options))
    assert torch.equal(default, OP(q, k, v, lengths(9), None, None, 5.0)[0])
    full = softcap_attention_decode(q, k, v, lengths(9), causal=False, **options)
    assert (full[:, :3] - default[:, :3]).abs().max() > 1e-2
    torch.testing.assert_close(full[:, 3], default[:, 3])


@pytest.mark.parametrize("path", ["dense", "paged", "split", "queries"])
def test_the_cap_reaches_the_kernel(path: str) -> None:
    """case 4: at scores of about 130, caps 50, 30 and none differ by more than 1."""
    seqlen_q, n = (20, 64) if path == "queries" else (1, 1200 if path == "split" else 64)
    q, k, v = 6 * torch.randn(1, seqlen_q, 2, 32), 6 * torch.randn(1, n, 2, 32), 10 * torch.randn(1, n, 2, 32)
    table = None
    if path == "paged":
        (k, table), (v, _) = paged(k, 16), paged(v, 16)
    outs = [
        softcap_attention_decode(q, k, v, lengths(n), block_table=table, softcap=softcap)
        for softcap in (50.0, 30.0, 0.0)
    ]
    for i in range(3):
        assert (outs[i] - outs[i - 1]).abs().max() > 1


@each_sample(named("one_query", "split_many_queries", "paged"))
def test_off_is_off(sample: DecodeSample) -> None:
    """case 10: None, 0 and 0.0 are one and the same, bit for bit."""
    x = sample.inputs(hot=True)
    off = sample.decode(x, softcap=None)
    for zero in (0, 0.0):
        for a, b in zip(sample.decode(x, softcap=zero), off, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(sample.decode(x)[0], off[0])


@each_dtype()
@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
def test_nothing_to_see(seqlen_q: int, dtype: torch.dtype) -> None:
    """An empty sequence, one that is nothing but padding, and queries before the first key: 0 and -inf."""
    q = torch.randn(3, seqlen_q, 2, 8).to(dtype)
    cache = torch.full((3, 9, 2, 8), NAN).to(dtype)
    cache[2, 0] = 1
    out, lse = softcap_attention_decode(
        q, cache, cache, lengths(0, 4, 1), cache_leftpad=lengths(0, 4, 0), softcap=5.0, return_lse=True
    )
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert lse[:2].isneginf().all()
    assert lse[2, :, :-1].isneginf().all()
    assert torch.equal(out[2, :-1], torch.zeros_like(out[2, :-1]))
    assert torch.equal(out[2, -1], torch.ones_like(out[2, -1]))


@pytest.mark.parametrize("seqlen_q", [1, 2, 20])
def test_masked_keys_do_not_leak(seqlen_q: int) -> None:
    """NaN at keys that one query sees and another does not stays with those that see it."""
    q, k = torch.randn(1, seqlen_q, 2, 8), torch.randn(1, 600, 2, 8)
    v = torch.randn(1, 600, 2, 8)
    v[:, 600 - 5 - seqlen_q] = NAN  # seen by the first query alone
    out = softcap_attention_decode(q, k, v, lengths(600), softcap=5.0, window=(5, -1))
    assert out[:, 0].isnan().all()
    assert out[:, 1:].isfinite().all()
    k[:, -1] = NAN  # seen by the last query alone
    out, lse = softcap_attention_decode(q, k, v.nan_to_num(), lengths(600), softcap=5.0, return_lse=True)
    assert out[:, -1].isnan().all()
    assert lse[..., -1].isnan().all()
    assert out[:, :-1].isfinite().all()


def test_one_key_gives_the_capped_score() -> None:
    """case 2"""
    q, k = torch.full((1, 1, 1, 1), 10.0), torch.full((1, 3, 1, 1), 10.0)
    _, lse = softcap_attention_decode(q, k, k, lengths(1), softcap=50.0, scale=1.0, return_lse=True)
    assert lse.item() == pytest.approx(48.201379, rel=1e-6)


def test_lse_only_where_asked() -> None:
    (sample,) = named("one_query")
    x = sample.inputs()
    out, lse = OP(*sample.op_args(x), return_lse=False)
    assert lse.shape == (0,)
    assert torch.equal(out, sample.decode(x)[0])
    assert isinstance(sample.decode(x, return_lse=False), Tensor)


def test_the_cache_is_read_only_and_out_is_fresh() -> None:
    """case 49"""
    (sample,) = named("one_query")
    x = sample.inputs(poison=0.0)
    before = [t.clone() for t in x[:4]]
    first = sample.decode(x)[0]
    second = sample.decode(x)[0]
    assert first.data_ptr() != second.data_ptr()
    for t, b in zip(x[:4], before, strict=True):
        assert torch.equal(t, b)


def test_blocks_may_be_shared_and_unused_entries_may_be_anything() -> None:
    """Two sequences with one prefix; entries past the last key would be out of bounds."""
    k = torch.randn(3, 4, 1, 8)
    table = torch.tensor([[2, 0, 10**9], [2, 1, -1]], dtype=torch.int32)
    q = torch.randn(2, 1, 1, 8)
    out = softcap_attention_decode(q, k, k, lengths(7, 8), block_table=table, softcap=5.0)
    for b, order in enumerate(([2, 0], [2, 1])):
        whole = k[order].flatten(0, 1)[None]
        expected = softcap_attention_decode(q[b, None], whole, whole, lengths((7, 8)[b]), softcap=5.0)
        torch.testing.assert_close(out[b, None], expected)


def test_the_reference_is_the_formula_on_each_sequence() -> None:
    """The oracle itself, by hand: one query, two keys of a block each, the second half of a block unused."""
    k = torch.tensor([[[[1.0]], [[NAN]]], [[[3.0]], [[2.0]]]])
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    out, lse = reference.attention_decode(
        torch.ones(1, 1, 1, 1), k, k, lengths(3), block_table=table, softcap=None, scale=1.0
    )
    weights = [math.exp(x) for x in (3, 2, 1)]
    assert lse.item() == pytest.approx(math.log(sum(weights)))
    assert out.item() == pytest.approx(sum(w * x for w, x in zip(weights, (3, 2, 1), strict=True)) / sum(weights))


def test_the_table_has_every_layout() -> None:
    assert len({(s.block_size > 0, s.leftpad is not None) for s in DECODE_SAMPLES}) == 4
