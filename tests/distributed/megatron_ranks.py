"""What each rank does in the tests of the Megatron integration."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_megatron as tiny
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

import softcap_ops
from softcap_ops import DotProductAttention, UnsupportedError
from softcap_ops.integrations.megatron import (
    SoftcapDotProductAttention,
    SoftcapGemma2DotProductAttention,
    with_softcap,
)

HALF = {"window_size": (5, 0), "window_attn_skip_freq": 2}  # the first of two layers slides


def check_training(tp: int, cp: int, hot: bool, overrides: dict[str, Any]) -> float:
    """Losses and gradients of several steps are those of Megatron's capped attention on one rank.

    Returns how far the loss of the uncapped model is away.
    """
    with tiny.megatron():
        losses, gradients = tiny.train(tiny.model(tiny.config(**overrides), tiny.CappedDotProductAttention, hot))
        plain = tiny.config(**overrides, attn_logit_softcapping=None)
        uncapped, _ = tiny.train(tiny.model(plain, tiny.CappedDotProductAttention, hot), steps=1)
    with tiny.megatron(tp=tp, cp=cp):
        gpt = tiny.model(tiny.config(**overrides), SoftcapDotProductAttention, hot)
        ours, mine = tiny.train(gpt)
        for name, p in gpt.named_parameters():
            expected = tiny.part_of(name, gradients[name], p)
            # In float64, but for Megatron's cross entropy, which is in float32.
            error = torch.linalg.vector_norm(mine[name] - expected)
            assert error <= 1e-6 * torch.linalg.vector_norm(gradients[name]), f"{name}: {error}"
    assert ours == pytest.approx(losses, rel=1e-6)
    assert losses[-1] < losses[0]
    return abs(uncapped[0] - losses[0])


def _core(cls: type = SoftcapDotProductAttention, layer: int = 1, mask: str = "causal", **overrides: Any) -> Any:
    kwargs = {name: overrides.pop(name) for name in ("attention_dropout", "softmax_scale") if name in overrides}
    extra = {name: overrides.pop(name) for name in ("query_pre_attn_scalar",) if name in overrides}
    options = tiny.config(**overrides)
    for name, value in extra.items():
        setattr(options, name, value)
    return cls(config=options, layer_number=layer, attn_mask_type=AttnMaskType[mask], attention_type="self", **kwargs)


def _qkv(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    q = 3 * torch.randn(*shape, tiny.HEADS, tiny.HEAD_DIM, dtype=torch.float64)
    k, v = (torch.randn(*shape, tiny.GROUPS, tiny.HEAD_DIM, dtype=torch.float64) for _ in range(2))
    return q, k, v


def _plain(**arguments: Any) -> DotProductAttention:
    return DotProductAttention(tiny.HEADS, tiny.HEAD_DIM, num_gqa_groups=tiny.GROUPS, softcap=tiny.CAP, **arguments)


def check_packed() -> None:
    """PackedSeqParams, tight and padded, with causal and no mask."""
    cu = torch.tensor([0, 9, 13], dtype=torch.int32)
    padded = torch.tensor([0, 12, 20], dtype=torch.int32)
    q, k, v = _qkv(20)
    with tiny.megatron():
        for name, theirs in (("causal", "padding_causal"), ("no_mask", "padding")):
            for offsets in (None, padded):
                packing = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 9, "max_seqlen_kv": 9}
                packing |= {"cu_seqlens_q_padded": offsets, "cu_seqlens_kv_padded": offsets}
                params = PackedSeqParams(qkv_format="thd", **packing)
                out = _core()(q, k, v, None, attn_mask_type=AttnMaskType[name], packed_seq_params=params)
                expected = _plain(attn_mask_type=theirs, qkv_format="thd")(q, k, v, **packing)
                assert torch.equal(out, expected)
                assert (
                    _core(attn_logit_softcapping=0.0)(q, k, v, None, packed_seq_params=params) - out
                ).abs().max() > 0.1


def check_packed_group_of_the_batch() -> None:
    """cp_group and local_cp_size of a batch stand in for the group of the model, in that call alone."""
    cu = torch.tensor([0, 8, 24], dtype=torch.int32)
    q, k, v = _qkv(24)
    with tiny.megatron(cp=2):
        core = _core()
        group = core.cp_group
        packing = {"qkv_format": "thd", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        whole = _plain(attn_mask_type="padding_causal")(q, k, v, **packing)
        off = core(q, k, v, None, packed_seq_params=PackedSeqParams(**packing, local_cp_size=1))
        assert torch.equal(off, whole)
        assert core.cp_group is group
        where = {"rank": group.rank(), "ranks": 2, "dim": 0, "cu_seqlens_padded": cu}
        mine = [softcap_ops.distributed.split_sequence(t, **where) for t in (q, k, v)]
        expected = softcap_ops.distributed.split_sequence(whole, **where)
        for params in (PackedSeqParams(**packing), PackedSeqParams(**packing, cp_group=group, local_cp_size=2)):
            torch.testing.assert_close(core(*mine, None, packed_seq_params=params), expected)


def check_layers() -> None:
    """Window, scale, mask and cap of each layer, in Megatron's (seqlen, batch, ...)."""
    q, k, v = _qkv(12, 2)
    with tiny.megatron():
        for layer in (1, 2, 3, 4):
            window = (3, 0) if layer % 2 else None
            out = _core(layer=layer, window_size=(3, 0), window_attn_skip_freq=2)(q, k, v, None)
            assert torch.equal(out, _plain(window_size=window)(q, k, v)), layer
        out = _core(softmax_scale=0.2)(q, k, v, None)
        assert torch.equal(out, _plain(softmax_scale=0.2)(q, k, v))
        assert torch.equal(_scaled_by_config(0.2)(q, k, v, None), out)
        # The scores' scale does not depend on the layer (query-key layer scaling divides by it, then multiplies).
        assert torch.equal(_core(layer=4)(q, k, v, None), _core(layer=1)(q, k, v, None))
        mask = torch.zeros(2, 1, 1, 12, dtype=torch.bool)
        mask[1, ..., 7:] = True
        out = _core(mask="padding")(q, k, v, mask)
        assert torch.equal(out, _plain(attn_mask_type="padding")(q, k, v, mask))
        # A mask that is causal may be given, another one may not.
        causal = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
        for _ in range(2):
            assert torch.equal(_core()(q, k, v, causal), _plain()(q, k, v))
        causal[..., 6:, :6] = True  # two documents
        with pytest.raises(UnsupportedError, match="attention_mask that is not causal"):
            _core()(q, k, v, causal)
        _check_masks(q, k, v)
        # One step of decoding on a cache: Megatron passes no_mask.
        core = _core(window_size=(3, 0))
        out = core(q[-1:], k, v, None, attn_mask_type=AttnMaskType.no_mask)
        torch.testing.assert_close(out, core(q, k, v, None)[-1:])
        assert _core().sharded_state_dict("p.", (), {"dp_cp_group": None}) == {}
        assert _core(deterministic_mode=True).deterministic is True


def _scaled_by_config(scale: float) -> SoftcapDotProductAttention:
    options = tiny.config()
    options.softmax_scale = scale
    return SoftcapDotProductAttention(options, 1, AttnMaskType.causal, "self")


def _check_masks(q: Tensor, k: Tensor, v: Tensor) -> None:
    """A mask that says more than causal or no_mask is refused, and a harmless one taken. 12 tokens, batch 2."""
    core, no_mask = _core(), AttnMaskType.no_mask
    padding = torch.zeros(2, 1, 1, 12, dtype=torch.bool)
    padding[1, ..., 7:] = True
    wider = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)  # made for a longer sequence
    for mask in (padding, (padding, padding), wider[..., :6, :6]):
        with pytest.raises(UnsupportedError, match=r"Use AttnMaskType\.padding_causal"):
            core(q, k, v, mask)
    assert torch.equal(core(q, k, v, wider), core(q, k, v, None))
    wider[..., 3, 0] = True
    with pytest.raises(UnsupportedError, match=r"Use AttnMaskType\.padding_causal"):
        core(q, k, v, wider)
    for mask in (padding, (padding, padding)):
        with pytest.raises(UnsupportedError, match=r"with AttnMaskType\.no_mask"):
            core(q, k, v, mask, attn_mask_type=no_mask)
    with pytest.raises(UnsupportedError, match=r"with AttnMaskType\.no_mask"):
        core(q[-1:], k, v, padding, attn_mask_type=no_mask)
    expected = core(q, k, v, None, attn_mask_type=no_mask)
    assert torch.equal(core(q, k, v, torch.zeros_like(padding), attn_mask_type=no_mask), expected)
    assert torch.equal(core(q[-1:], k, v, wider, attn_mask_type=no_mask), expected[-1:])


def check_context_parallel_masks() -> None:
    """Megatron's dataloader gives each rank its rows of the causal mask, of all keys."""
    q, k, v = _qkv(16, 2)
    causal = torch.ones(2, 1, 32, 32, dtype=torch.bool).triu(1)
    with tiny.megatron(cp=2):
        core = _core()
        mine = softcap_ops.distributed.split_sequence(causal, rank=core.cp_group.rank(), ranks=2, dim=2)
        assert torch.equal(core(q, k, v, mine), core(q, k, v, None))
        mine = mine.clone()
        mine[1, ..., -1, 0] = True
        with pytest.raises(UnsupportedError, match="attention_mask that is not causal"):
            core(q, k, v, mine)


def check_refusals() -> None:
    arguments = (1, AttnMaskType.causal, "self")
    with tiny.megatron():
        for name, value in (
            ("attention_dropout", 0.1), ("apply_query_key_layer_scaling", True), ("qk_clip", True),
            ("log_max_attention_logit", True), ("flash_decode", True), ("softmax_type", "off-by-one"),
            ("fp8_dot_product_attention", True), ("fp8_multi_head_attention", True), ("multi_latent_attention", True),
            ("batch_invariant_mode", True),
        ):  # fmt: skip
            options = tiny.config()
            setattr(options, name, value)
            with pytest.raises(UnsupportedError, match=name):
                SoftcapDotProductAttention(options, *arguments)
        options = tiny.config()
        del options.attn_logit_softcapping
        with pytest.raises(ValueError, match="attn_logit_softcapping"):
            SoftcapDotProductAttention(options, *arguments)
        with pytest.raises(ValueError, match="SoftcapGemma2DotProductAttention"):
            _core(query_pre_attn_scalar=4)
        for channels in ({"k_channels": 16}, {"v_channels": 16}):
            with pytest.raises(UnsupportedError, match="kv_channels"):
                SoftcapDotProductAttention(tiny.config(), *arguments, **channels)
        q, k, v = _qkv(6, 2)
        with pytest.raises(TypeError, match="attention_mask must be a Tensor"):
            _core()(q, k, v, [[True]], attn_mask_type=AttnMaskType.no_mask)
        with pytest.raises(UnsupportedError, match="attention_bias"):
            _core()(q, k, v, None, attention_bias=torch.zeros(1))
        with pytest.raises(UnsupportedError, match="arbitrary"):
            _core()(q, k, v, None, attn_mask_type=AttnMaskType.arbitrary)
        with pytest.raises(ValueError, match="no core_attention"):
            with_softcap(object())

        # What calls flash-attention past core_attention refuses ours, and nobody else's.
        ours, theirs = (
            tiny.model(tiny.config(), core, False).decoder.layers[0].self_attention
            for core in (SoftcapDotProductAttention, tiny.CappedDotProductAttention)
        )
        for method in ("flash_decode", "flash_decode_and_prefill"):
            with pytest.raises(UnsupportedError, match="dynamic inference"):
                getattr(ours, method)()
            with pytest.raises(TypeError, match="argument"):
                getattr(theirs, method)()


def check_static_inference() -> None:
    """Prefill and steps of decoding on Megatron's static cache give the logits of the whole, window included."""
    from megatron.core.inference.contexts import StaticInferenceContext

    prefill = 20
    ids, _ = tiny.tokens()
    positions = torch.arange(tiny.SEQLEN).expand_as(ids)
    with tiny.megatron(), torch.no_grad():
        for overrides in ({}, HALF):
            gpt = tiny.model(tiny.config(**overrides), SoftcapDotProductAttention, hot=True).eval()
            context = StaticInferenceContext(tiny.BATCH, tiny.SEQLEN)
            logits = []
            for start, stop in ((0, prefill), *((i, i + 1) for i in range(prefill, tiny.SEQLEN))):
                part = (t[:, start:stop] for t in (ids, positions))
                logits.append(gpt(*part, None, inference_context=context, runtime_gather_output=True)[:, -1])
                context.sequence_len_offset += stop - start
            whole = gpt(ids, positions, None)[:, prefill - 1 :]
            torch.testing.assert_close(torch.stack(logits, 1), whole, rtol=1e-5, atol=1e-6)


def check_gemma2_layers() -> None:
    """Layers of Megatron-Bridge's Gemma 2 are those of transformers' Gemma 2, window and scale included."""
    from transformers import Gemma2Config
    from transformers.models.gemma2 import modeling_gemma2

    scalar, window, cap = 24, 8, 5.0
    config = Gemma2Config(
        num_hidden_layers=4, hidden_size=tiny.HIDDEN, num_attention_heads=tiny.HEADS, head_dim=tiny.HEAD_DIM,
        num_key_value_heads=tiny.GROUPS, query_pre_attn_scalar=scalar, sliding_window=window,
        attn_logit_softcapping=cap, attention_dropout=0.0,
    )  # fmt: skip
    q, k, v = _qkv(32, 2)
    behind = torch.arange(32).unsqueeze(1) - torch.arange(32)
    with tiny.megatron():
        outputs = []
        for index in range(4):
            layer = modeling_gemma2.Gemma2Attention(config, index)
            hidden = behind < 0
            if layer.sliding_window is not None:
                hidden = hidden | (behind >= layer.sliding_window)
            mask = torch.zeros(1, 1, 32, 32, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
            expected, _ = modeling_gemma2.eager_attention_forward(
                layer, *(t.permute(1, 2, 0, 3) for t in (q, k, v)), mask, scaling=layer.scaling, softcap=cap
            )
            core = _core(
                SoftcapGemma2DotProductAttention, index + 1, window_size=(window - 1, 0), query_pre_attn_scalar=scalar,
                attn_logit_softcapping=cap,
            )  # fmt: skip
            out = core(q, k, v, None)
            # transformers takes its softmax in float32
            torch.testing.assert_close(out, expected.transpose(0, 1).flatten(-2), rtol=1e-5, atol=1e-5)
            outputs.append(out)
            core.softcap = 0.0
            assert (core(q, k, v, None) - out).abs().max() > 0.1, "the cap does not bite"
        assert not torch.allclose(outputs[0], outputs[1]), "both kinds of layer are the same"
        assert torch.equal(outputs[0], outputs[2])
