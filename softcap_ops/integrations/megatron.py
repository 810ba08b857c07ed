"""Megatron-Core: soft-capped attention as the `core_attention` of a layer spec.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from softcap_ops.integrations.megatron import with_softcap

    config.attn_logit_softcapping = 50.0
    model = GPTModel(config, transformer_layer_spec=with_softcap(get_gpt_layer_local_spec()), ...)

The cap comes from `config.attn_logit_softcapping`, the window of each layer from `config.window_size` and
`config.window_attn_skip_freq`, the scale from `config.softmax_scale`; heads are those of the tensor-parallel rank, and
sequences are split over the context-parallel group in Megatron's order. What is not offered is refused when the model
is built.

Importing this makes Megatron's dynamic inference and flash_decode refuse layers with this attention: both call
flash-attention themselves, past core_attention, without the cap.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from typing import Any, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from .. import _validation
from ..distributed import shard_positions
from ..errors import UnsupportedError
from ..modules import DotProductAttention, _attend, _Call, _refuse_unless_true

# Fields of a config that change attention in a way that is not offered here, and what to do.
_NOT_OFFERED = {
    "apply_query_key_layer_scaling": "It guards float16 scores; here they are float32: set it to False.",
    "qk_clip": "It needs the largest score, which is not kept.",
    "log_max_attention_logit": "It needs the largest score, which is not kept.",
    "flash_decode": "It calls flash-attention past core_attention, without the cap.",
    "batch_invariant_mode": "",
    "fp8_dot_product_attention": "",
    "fp8_multi_head_attention": "",
    "multi_latent_attention": "",
}


class SoftcapDotProductAttention(DotProductAttention):
    """Megatron's `core_attention`, in place of DotProductAttention or TEDotProductAttention.

    Takes what those take. `config` must have `attn_logit_softcapping`, a bound of the scaled scores, None or 0.0 = off:
    Megatron's own TransformerConfig has no such field, so set the attribute or add the field in a subclass.

    Args:
        config: TransformerConfig.
        layer_number: from 1, over all pipeline stages.
        attn_mask_type: AttnMaskType; the forward's takes its place.
        attention_type: "self" or "cross".
        attention_dropout: must be 0, and where None config.attention_dropout must be.
        softmax_scale: factor of q kT; None = config.softmax_scale, and where that is None kv_channels ** -0.5.
        k_channels, v_channels: head_dim, the same for both; where one is None it is config.kv_channels.
        num_splits: of no effect.
        cp_comm_type: "p2p", "all_gather", "a2a" or "a2a+p2p"; None = "p2p".
        pg_collection: process groups tp, cp, and for "a2a+p2p" hcp; None = those of parallel_state.

    Raises:
        ValueError: config has no attn_logit_softcapping, or a value is wrong.
        UnsupportedError: the config asks for what is not offered; the message names the field.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        for field, remedy in _NOT_OFFERED.items():
            if getattr(config, field, False):
                _refuse(f"config.{field}={getattr(config, field)}", remedy)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            _refuse(f"attention dropout ({dropout})", "Set config.attention_dropout = 0.0.")
        if not hasattr(config, "attn_logit_softcapping"):
            raise ValueError("config.attn_logit_softcapping must be set to the cap of attention scores; None = off")
        cp_comm_type = "p2p" if cp_comm_type is None else cp_comm_type
        tp_group, cp_group = _groups(config, cp_comm_type, pg_collection)
        if softmax_scale is None:
            softmax_scale = getattr(config, "softmax_scale", None)
        super().__init__(
            num_attention_heads=config.num_attention_heads,
            kv_channels=(
                config.kv_channels if k_channels is None else k_channels,
                config.kv_channels if v_channels is None else v_channels,
            ),
            num_gqa_groups=config.num_query_groups,
            attn_mask_type=attn_mask_type.name,
            window_size=self._window(config, layer_number),
            tp_size=config.tensor_model_parallel_size,
            tp_group=tp_group,
            layer_number=layer_number,
            attention_type=attention_type,
            cp_group=cp_group,
            cp_comm_type=cp_comm_type,
            softmax_scale=self._scale(config) if softmax_scale is None else softmax_scale,
            softmax_type=getattr(config, "softmax_type", "vanilla"),
            softcap=config.attn_logit_softcapping,
        )
        self.config = config
        if getattr(config, "deterministic_mode", False):
            self.deterministic = True

    def _window(self, config: Any, layer_number: int) -> tuple[int, int] | None:
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        return tuple(config.window_size) if slides else None

    def _scale(self, config: Any) -> float | None:
        if getattr(config, "query_pre_attn_scalar", None) is not None:
            raise ValueError(
                f"config.query_pre_attn_scalar={config.query_pre_attn_scalar}: pass softmax_scale, or use "
                "SoftcapGemma2DotProductAttention"
            )
        return None

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attention of this rank's heads.

        Args:
            query: (sq, b, heads, d), packed (t, heads, d).
            key, value: (sk, b, groups, d), packed (t, groups, d).
            attention_mask: with a padding mask type bool (b, 1, 1, s), True = padding, or a pair of them. With causal
                (1 or b, 1, sq, sk) or larger, True = hidden, which must hide what is later and nothing else; sk is the
                whole length under context parallelism. With no_mask it must hide nothing. Not looked at with packed
                sequences.
            attn_mask_type: None = the constructor's.
            attention_bias: must be None.
            packed_seq_params: PackedSeqParams; its cp_group, or local_cp_size=1, stands in for the constructor's group
                in this call.

        Returns:
            (sq, b, heads * d), packed (t, heads * d).

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
            UnsupportedError: an argument asks for what is not offered, an attention_mask that hides more than its type
                above all.
            RuntimeError: in its place, in a compiled graph or on a GPU, where what a mask holds is an assert on the
                device: it comes later, and CUDA can no longer be used after it.
        """
        if attention_bias is not None:
            _refuse("attention_bias")
        kind = name = self.attn_mask_type if attn_mask_type is None else attn_mask_type.name
        given: dict[str, Any] = {}
        qkv_format = self.qkv_format
        if packed_seq_params is not None:
            qkv_format = packed_seq_params.qkv_format or qkv_format
            given = {field: getattr(packed_seq_params, field, None) for field in _PACKING}
            given.update(_group_of_batch(packed_seq_params))
        if qkv_format == "thd":
            name = {"causal": "padding_causal", "no_mask": "padding"}.get(name, name)
        elif name == "no_mask" and self.window_size is not None and query.shape[0] == 1:
            name = "causal_bottom_right"  # a decoding step: Megatron drops the mask, but the window still counts
        call = self._call(qkv_format=qkv_format, attn_mask_type=name, attention_mask=attention_mask, **given)
        self._check(query, key, value, call)
        if attention_mask is not None and qkv_format != "thd":
            axis = 0 if qkv_format == "sbhd" else 1
            _check_mask(attention_mask, kind, query.shape[axis], key.shape[axis], call)
        return _attend(query, key, value, call)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Nothing: there are no parameters."""
        return {}


class SoftcapGemma2DotProductAttention(SoftcapDotProductAttention):
    """The same for Megatron-Bridge's Gemma 2: scale and windows as Gemma2ModelProvider means them.

    The scale is config.query_pre_attn_scalar ** -0.5 unless a softmax_scale is given, and layers 1, 3, 5, ... (Gemma's
    0, 2, 4, ...) have config.window_size.
    """

    def _window(self, config: Any, layer_number: int) -> tuple[int, int] | None:
        return tuple(config.window_size) if config.window_size and layer_number % 2 == 1 else None

    def _scale(self, config: Any) -> float:
        return config.query_pre_attn_scalar**-0.5


def with_softcap(spec: Any, core_attention: type = SoftcapDotProductAttention) -> Any:
    """A copy of a layer or block spec in which every `core_attention` is ours.

    Args:
        spec: ModuleSpec of a layer, or TransformerBlockSubmodules.
        core_attention: what to put in.

    Raises:
        ValueError: the spec has no core_attention.
    """
    result, replaced = _replace(spec, core_attention)
    if not replaced:
        raise ValueError(f"the spec holds no core_attention: {spec}")
    return result


def gemma2_layer_spec(config: Any) -> Any:
    """Megatron-Bridge's spec of a Gemma-2 layer with soft-capped attention by softcap_ops.

    provider = Gemma2ModelProvider2B(transformer_layer_spec=gemma2_layer_spec, ...)
    """
    from megatron.bridge.models.gemma import gemma2_provider

    return with_softcap(gemma2_provider.gemma2_layer_spec(config), SoftcapGemma2DotProductAttention)


_PACKING = (
    "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv",
)  # fmt: skip


# The mask found right last, its version, and for what: all layers of a step share it.
_found_right: tuple[weakref.ref[Tensor], tuple[Any, ...]] | None = None


def _check_mask(mask: Any, kind: str, seqlen_q: int, seqlen_k: int, call: _Call) -> None:
    """Refuse a mask that says more than its type: of documents in a row, for instance (reset_attention_mask).

    Megatron's unfused attention applies any mask that it is given, TransformerEngine none with these two types.
    """
    global _found_right
    if kind not in ("causal", "no_mask") or (kind == "causal" and seqlen_q == 1):
        return
    if isinstance(mask, (tuple, list)):
        if kind == "causal":
            raise UnsupportedError(_MORE_THAN[kind])
        for part in mask:
            _check_mask(part, kind, seqlen_q, seqlen_k, call)
        return
    _validation.tensor("attention_mask", mask)
    if kind == "no_mask" and seqlen_q == 1 and mask.dim() > 1 and mask.shape[-2] > 1:
        return  # the mask of all steps, in a step of decoding: which of its rows is this one it does not say
    cached = not torch.compiler.is_compiling() and not mask.is_inference()
    found = (mask._version, kind, seqlen_q, seqlen_k, call.ranks) if cached else ()
    if cached and _found_right is not None and _found_right[0]() is mask and _found_right[1] == found:
        return
    right = ~mask.bool().any() if kind == "no_mask" else _is_causal(mask, seqlen_q, seqlen_k, call)
    _refuse_unless_true(right, _MORE_THAN[kind])
    if cached:
        _found_right = (weakref.ref(mask), found)


def _is_causal(mask: Tensor, seqlen_q: int, seqlen_k: int, call: _Call) -> Tensor:
    """bool (): whether the mask hides what is later and nothing else. It may be made for longer sequences."""
    rows = torch.arange(seqlen_q, device=mask.device)
    if call.ranks > 1:  # this rank's rows, of all keys
        seqlen_k *= call.ranks
        rows = shard_positions(rank=_rank(call.cp_group), ranks=call.ranks, seqlen=seqlen_k).to(mask.device)
    mask = mask[..., :seqlen_q, :seqlen_k]
    if tuple(mask.shape[-2:]) != (seqlen_q, seqlen_k):
        raise UnsupportedError(_MORE_THAN["causal"])
    return (mask == (torch.arange(seqlen_k, device=mask.device) > rows.unsqueeze(1))).all()


_MORE_THAN = {
    "causal": "softcap_ops: an attention_mask that is not causal, with AttnMaskType.causal, is not offered in Megatron "
    "models. Use AttnMaskType.padding_causal for padding, PackedSeqParams for several sequences in a row.",
    "no_mask": "softcap_ops: an attention_mask that hides something, with AttnMaskType.no_mask, is not offered in "
    "Megatron models. Use AttnMaskType.padding for padding.",
}


def _rank(cp_group: Any) -> int:
    """This rank of a context-parallel group, or of the pair [a2a group, p2p group]."""
    if isinstance(cp_group, (list, tuple)):
        a2a, p2p = cp_group
        return p2p.rank() * a2a.size() + a2a.rank()
    return cp_group.rank()


def _group_of_batch(packed_seq_params: Any) -> dict[str, Any]:
    """The context-parallel group of this batch, where it has one of its own."""
    group = getattr(packed_seq_params, "cp_group", None)
    local_size = getattr(packed_seq_params, "local_cp_size", None)
    if group is not None:
        return {"cp_group": group}
    if local_size is None:
        return {}
    if local_size != 1:
        raise ValueError(f"packed_seq_params.local_cp_size must be 1 where there is no cp_group, got {local_size}")
    return {"cp_group": None}


def _groups(config: Any, cp_comm_type: str, pg_collection: Any) -> tuple[Any, Any]:
    """(tensor-parallel group, context-parallel group or groups)."""
    if pg_collection is not None:
        tp, cp, hcp = (getattr(pg_collection, name, None) for name in ("tp", "cp", "hcp"))
    else:
        tp = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        cp = parallel_state.get_context_parallel_group(check_initialized=False)
        hcp = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    if config.context_parallel_size == 1:  # a group may exist for another part of the model
        return tp, None
    name, group = ("hcp", hcp) if cp_comm_type == "a2a+p2p" else ("cp", cp)
    if group is None:
        raise ValueError(f"config.context_parallel_size={config.context_parallel_size}, and there is no group {name!r}")
    return tp, group


def _replace(spec: Any, core_attention: type) -> tuple[Any, bool]:
    if isinstance(spec, list):
        parts = [_replace(part, core_attention) for part in spec]
        return [part for part, _ in parts], any(replaced for _, replaced in parts)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec, False
    result, replaced_any = copy.copy(spec), False
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        new, replaced = (core_attention, True) if field.name == "core_attention" else _replace(value, core_attention)
        if replaced:
            setattr(result, field.name, new)
            replaced_any = True
    return result, replaced_any


def _refuse_bypass(name: str) -> None:
    """Make a method of Megatron's Attention refuse layers whose core_attention is ours."""
    original = getattr(Attention, name, None)
    if original is None or getattr(original, "_refuses_softcap", False):
        return

    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(self, "core_attention", None), SoftcapDotProductAttention):
            _refuse(
                f"dynamic inference (Attention.{name})",
                "It calls flash-attention past core_attention, without the cap: use static batching.",
            )
        return original(self, *args, **kwargs)

    guarded._refuses_softcap = True  # type: ignore[attr-defined]
    setattr(Attention, name, guarded)


for _name in ("flash_decode", "flash_decode_and_prefill"):
    _refuse_bypass(_name)


def _refuse(what: str, remedy: str = "") -> NoReturn:
    raise UnsupportedError(f"softcap_ops: {what} is not offered in Megatron models. {remedy}".rstrip())
