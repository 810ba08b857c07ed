"""docs/migrating.md: every block runs, and before and after compute the same."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from softcap_ops import reference

TEXT = Path(__file__).parent.parent.joinpath("docs", "migrating.md").read_text()
SECTIONS = {s.split("\n", 1)[0]: re.findall(r"```python\n(.*?)```", s, re.S) for s in TEXT.split("\n## ")[1:]}
CAP = 5.0


def run(block: str, **names: Any) -> Any:
    """`out` of a block that finds q, k, v and what else it needs; it must depend on the cap."""
    exec(compile(block, "docs/migrating.md", "exec"), names)
    return names


def tensors(*shape: int, heads: int = 4, groups: int = 2) -> dict[str, Tensor]:
    """q, k, v (..., heads, 16) whose scores pass the cap."""
    q = torch.randn(*shape, heads, 16) * 6
    return {"q": q, "k": torch.randn(*shape, groups, 16), "v": torch.randn(*shape, groups, 16)}


def check_pair(before: str, after: str, **names: Any) -> None:
    """Both blocks have the same out, and another one without the cap."""
    old, new = (run(block, **names)["out"] for block in (before, after))
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
    assert "5.0" in after
    uncapped = run(after.replace("softcap=5.0", "softcap=None"), **names)["out"]
    assert (uncapped - new).abs().max() > 0.1


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for flash_attn with its signatures, computing the formula."""

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):  # type: ignore[no-untyped-def]
        options = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
        return reference.attention(q, k, v, **options)[0]

    def flash_attn_varlen_func(  # type: ignore[no-untyped-def]
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0,
    ):  # fmt: skip
        options = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return reference.attention_varlen(q, k, v, **options)[0]

    def flash_attn_qkvpacked_func(qkv, *args, **kwargs):  # type: ignore[no-untyped-def]
        return flash_attn_func(*qkv.unbind(2), *args, **kwargs)

    def flash_attn_with_kvcache(  # type: ignore[no-untyped-def]
        q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, window_size=(-1, -1), softcap=0.0
    ):
        for b, n in enumerate(cache_seqlens.tolist()):  # it appends the new keys itself
            k_cache[b, n : n + k.shape[1]], v_cache[b, n : n + k.shape[1]] = k[b], v[b]
        options = {"causal": causal, "window": window_size, "softcap": softcap}
        return reference.attention_decode(q, k_cache, v_cache, cache_seqlens + k.shape[1], **options)[0]

    module = types.ModuleType("flash_attn")
    functions = (flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func, flash_attn_with_kvcache)
    for function in functions:
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", module)


CU = torch.tensor([0, 24, 32], dtype=torch.int32)


@pytest.mark.usefixtures("flash_attn")
def test_from_flash_attn() -> None:
    dense, dense_after, packed, packed_after, qkv, qkv_after, step, step_after = SECTIONS["From flash-attn"]
    check_pair(dense, dense_after, **tensors(2, 32))
    check_pair(packed, packed_after, **tensors(32), cu_seqlens=CU)
    check_pair(qkv, qkv_after, qkv=torch.stack(list(tensors(2, 32, groups=4).values()), 2))
    cache = tensors(2, 32)
    names = {"k_cache": cache["k"], "v_cache": cache["v"], "seqlens": torch.tensor([20, 9], dtype=torch.int32)}
    check_pair(step, step_after, **tensors(2, 2), **names)


@pytest.mark.filterwarnings("ignore")
def test_from_flex_attention() -> None:
    before, after = SECTIONS["From FlexAttention"]
    check_pair(before, after, **{name: t.transpose(1, 2) for name, t in tensors(2, 32).items()})


def test_from_transformer_engine() -> None:
    before, after, packed = SECTIONS["From TransformerEngine"]
    compile(before, "docs/migrating.md", "exec")
    x = tensors(32, 2)
    names = {"query": x["q"], "key": x["k"], "value": x["v"]}
    out = run(after, **names)["out"]
    batch_first = {name: t.transpose(0, 1) for name, t in x.items()}
    ref = reference.attention(*batch_first.values(), softcap=CAP, causal=True, window=(7, 0))[0]
    torch.testing.assert_close(out, ref.transpose(0, 1).flatten(-2), rtol=1e-4, atol=1e-5)
    assert (run(after.replace("softcap=5.0", "softcap=0.0"), **names)["out"] - out).abs().max() > 0.1

    x = tensors(36)
    names = {"query": x["q"], "key": x["k"], "value": x["v"]}
    lengths = {"cu_seqlens": CU, "cu_seqlens_padded": torch.tensor([0, 26, 36], dtype=torch.int32)}
    out = run(packed, **names, **lengths)["out"]
    for first, length in ((0, 24), (26, 8)):
        part = (t[None, first : first + length] for t in x.values())
        ref = reference.attention(*part, softcap=CAP, causal=True)[0][0]
        torch.testing.assert_close(out[first : first + length], ref.flatten(-2), rtol=1e-4, atol=1e-5)
    assert not out[24:26].any()
    assert not out[34:].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TransformerEngine's attention needs a GPU")
def test_transformer_engine_before() -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")
    before, after, _ = SECTIONS["From TransformerEngine"]
    x = (t.to("cuda", torch.bfloat16) for t in tensors(32, 2).values())
    names = dict(zip(("query", "key", "value"), x, strict=True))
    uncapped = run(after.replace("softcap=5.0", "softcap=0.0"), **names)["out"]
    torch.testing.assert_close(run(before, **names)["out"], uncapped, rtol=2e-2, atol=2e-2)


def test_from_the_eager_formula() -> None:
    check_pair(*SECTIONS["From the eager formula"], torch=torch, **tensors(2, 32))


def test_models() -> None:
    hugging_face, megatron = SECTIONS["Models"]
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert run(hugging_face)["attn_implementation"] == "softcap_ops"
    compile(megatron, "docs/migrating.md", "exec")


@pytest.mark.filterwarnings("ignore")
def test_models_in_megatron() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from softcap_ops.integrations.megatron import SoftcapDotProductAttention

    spec = run(SECTIONS["Models"][1])["spec"]
    assert spec.submodules.self_attention.submodules.core_attention is SoftcapDotProductAttention


def test_every_block_is_here() -> None:
    assert {name: len(blocks) for name, blocks in SECTIONS.items()} == {
        "From flash-attn": 8, "From FlexAttention": 2, "From TransformerEngine": 3, "From the eager formula": 2,
        "Models": 2,
    }  # fmt: skip
