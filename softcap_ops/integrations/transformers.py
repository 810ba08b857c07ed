"""Hugging Face transformers: attention by name.

    from softcap_ops.integrations import transformers as softcap_transformers

    name = softcap_transformers.register()
    model = Gemma2ForCausalLM.from_pretrained("google/gemma-2-2b", attn_implementation=name)

Each layer's cap, scale and window reach the op as the model gives them, key and value heads un-repeated. Padding,
packed sequences and KV caches compute what transformers' eager attention computes for the real tokens; at a padding
token the output is 0, except in the last column without gradients, off which generation reads the next token. What is
not offered is refused by name: nothing runs uncapped, unmasked or without dropout in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .._padding import Packed, cumulative, from_mask
from ..api import softcap_attention, softcap_attention_decode, softcap_attention_varlen
from ..errors import UnsupportedError

# No double quotes: Inductor puts an assertion's message into C++ as it is.
_REMEDY = "attn_implementation='eager' offers it."


# What some models hand their attention beside q, k, v and the mask, and what ours would drop.
_CHANGES_SCORES = {
    "position_bias": "an additive bias",
    "head_mask": "a mask of heads",
    "sinks": "an attention sink",
    "s_aux": "an attention sink",
    "indices": "a choice of keys",
    "block_indices": "a choice of keys",
}


def register(name: str = "softcap_ops") -> str:
    """Register softcap_ops with transformers as an attention implementation.

    Args:
        name: what `attn_implementation=` and `set_attn_implementation` will know it by. transformers gives some names
            a meaning of their own: "flash" in one, "/" and "|".

    Returns:
        The name.

    Raises:
        ValueError: transformers would not take the name for ours.
        UnsupportedError: this transformers has another mask interface (before 5.4).
    """
    if name in ("eager", "sdpa", "flex_attention") or not name or any(part in name for part in ("flash", "/", "|")):
        raise ValueError(
            f'name must differ from transformers\' own implementations and hold no "flash", "/" or "|", got {name!r}'
        )
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 4):
        raise UnsupportedError(f"softcap_ops needs transformers 5.4 or newer, found {transformers.__version__}")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)
    return name


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        module: the attention layer; read for `is_causal` and its config.
        query: (batch, heads_q, seqlen_q, head_dim).
        key, value: (batch, heads_kv, seqlen_k, head_dim).
        attention_mask: what the mask function below returned: None; int32 (1 or 2, batch, 1), the end and beginning
            of each row's keys; or bool (batch, tokens), False = padding, for the first `tokens` keys. Later keys do not
            exist yet, and the queries are the last of those tokens. With a leading axis, bool (1, batch, tokens), every
            query sees all tokens, or those of its window; (1, batch, 0): there is no padding.
        dropout: must be 0.
        scaling: factor of q kT; None = head_dim ** -0.5.
        sliding_window: tokens that a query sees, itself included.
        softcap: the cap; None only in a model that has none.
        is_causal: must be true here or in the module, unless the mask says that queries see what is later.
        position_ids: (batch or 1, seqlen_q); without a mask, a position that does not follow the one before it starts
            a new sequence.
        cu_seq_lens_*, max_length_*: packed sequences, as DataCollatorWithFlattening gives them.

    Returns:
        (out (batch, seqlen_q, heads_q, head_dim), None).
    """
    _refuse_what_is_not_offered(module, attention_mask, dropout, softcap, is_causal, kwargs)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 token or None, got {sliding_window}")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    options: dict[str, Any] = {
        "softcap": softcap,
        "scale": scaling,
        "causal": True,
        "window": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
    }

    if attention_mask is not None and _is_both_ways(attention_mask):
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            _refuse("packed sequences (cu_seq_lens) with bidirectional attention")
        if sliding_window is not None:  # that of the mask: what a model passes as `sliding_window` is one more in some
            config: Any = module.config
            options["window"] = (config.sliding_window, config.sliding_window)
        return _both_ways(q, k, v, attention_mask[0], {**options, "causal": False}), None
    if attention_mask is not None:
        if _is_key_ranges(attention_mask):
            return _decoded(q, k, v, attention_mask, options), None
        return _padded(q, k, v, attention_mask.to(torch.bool), options), None

    packing: tuple[Any, ...] = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if any(part is not None for part in packing):
        if any(part is None for part in packing):
            raise ValueError("cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k must be given together")
        return _packed(q, k, v, packing, options), None

    if position_ids is not None and 1 < q.shape[1] == k.shape[1]:
        starts = _sequence_starts(position_ids, q.shape[0])
        if torch.compiler.is_compiling():
            # Which way to go depends on data: assume one sequence a row, and stop the graph where it is not so.
            torch._assert_async(
                ~starts[:, 1:].any(),
                "softcap_ops: position_ids of packed sequences in a compiled model: pass cu_seq_lens_q, cu_seq_lens_k, "
                "max_length_q and max_length_k too (DataCollatorWithFlattening(return_flash_attn_kwargs=True))",
            )
        elif starts[:, 1:].any():
            cu_seqlens, longest = _cu_seqlens_from_starts(starts)
            return _packed(q, k, v, (cu_seqlens, cu_seqlens, longest, longest), options), None

    return softcap_attention(q, k, v, **options), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask interface: the key columns that exist, and which of them are padding.

    Args:
        q_length, kv_length: tokens in this forward, columns of the keys that attention will get.
        q_offset, kv_offset: position of the first query and of the first key column.
        mask_function: the pattern; causal, with or without a window and packing, is what `attention` computes.
        attention_mask: bool (batch, positions), False = padding, as the user gave it.
        use_vmap: whether the model added a pattern of its own.
        config: the model's.
        kwargs: of these, allow_is_bidirectional_skip is read: that the pattern is bidirectional, with a window or not.

    Returns:
        None where every token of this forward sees those before it in it, and there are no others. Without gradients,
        where padding is on the left if anywhere: the range of each row's keys, see `_key_ranges`; this is what
        generation meets. Else bool (batch_size, columns so far), False = padding. For a bidirectional pattern bool
        (1, batch_size, columns or 0), see `attention`.
    """
    both_ways = bool(kwargs.get("allow_is_bidirectional_skip"))
    _refuse_other_patterns(mask_function, batch_size, q_length, q_offset, device, use_vmap, config, both_ways)
    if both_ways:
        if not (isinstance(q_offset, int) and q_offset == kv_offset == 0):
            _refuse("bidirectional attention on a KV cache")
        if attention_mask is None or (not torch.compiler.is_compiling() and attention_mask.all()):
            attention_mask = torch.ones((batch_size, 0), dtype=torch.bool, device=device)
        return attention_mask.to(torch.bool).unsqueeze(0)
    columns = q_offset + q_length - kv_offset  # a static cache is longer than what it holds
    if torch.is_grad_enabled():
        return _key_mask(batch_size, int(columns), kv_length, kv_offset, attention_mask, device)
    if attention_mask is None:
        return None if _is_whole(columns, q_length, kv_length) else _key_ranges(batch_size, columns, None, device)
    if torch.compiler.is_compiling():
        padding = _left_padding(attention_mask)
        real = attention_mask & (torch.arange(attention_mask.shape[1], device=device) < columns + kv_offset)
        torch._assert_async(
            (real.sum(1) == (columns + kv_offset - padding).clamp(min=0)).all(),
            "softcap_ops: an attention_mask with padding elsewhere than on the left, in a compiled model. " + _REMEDY,
        )
        return _key_ranges(batch_size, columns, padding - kv_offset, device)
    columns = int(columns)
    if attention_mask.all() and attention_mask.shape[1] >= columns + kv_offset:
        return None if _is_whole(columns, q_length, kv_length) else _key_ranges(batch_size, columns, None, device)
    padding, real = _left_padding(attention_mask), attention_mask[:, : columns + kv_offset].sum(1)
    if torch.equal(real, (columns + kv_offset - padding).clamp(min=0)):
        return _key_ranges(batch_size, columns, padding - kv_offset, device)
    return _key_mask(batch_size, columns, kv_length, kv_offset, attention_mask, device)


def _is_whole(columns: int | Tensor, q_length: int, kv_length: int) -> bool:
    """A forward without a past: all keys are those of its own tokens."""
    return isinstance(columns, int) and columns == q_length == kv_length


def _left_padding(attention_mask: Tensor) -> Tensor:
    return (attention_mask.cumsum(1) == 0).sum(1)


def _key_ranges(batch_size: int, columns: int | Tensor, padding: Tensor | None, device: Any) -> Tensor:
    """What the decode op needs of a mask that hides nothing but left padding: int32 (2, batch, 1), the columns before
    which each row's keys end and at which they begin; (1, batch, 1) where all begin at 0.

    Its shape does not depend on the number of columns: a compiled step with a static cache is compiled once.
    """
    ends = torch.zeros(batch_size, dtype=torch.int32, device=device) + columns
    if padding is None:
        return ends.to(torch.int32).view(1, -1, 1)
    return torch.stack([ends, torch.minimum(padding.clamp(min=0), ends)]).to(torch.int32).unsqueeze(-1)


def _is_key_ranges(mask: Tensor) -> bool:
    """Told from a mask by its dimensions: no mask of a model's has three."""
    return mask.dim() == 3 and mask.dtype == torch.int32


def _is_both_ways(mask: Tensor) -> bool:
    return mask.dim() == 3 and mask.dtype == torch.bool


def _key_mask(
    batch_size: int, columns: int, kv_length: int, kv_offset: int, attention_mask: Tensor | None, device: Any
) -> Tensor | None:
    """Bool (batch, columns), False = padding; None where there is none."""
    if attention_mask is None:
        if columns == kv_length:
            return None
        return torch.ones((batch_size, columns), dtype=torch.bool, device=device)
    mask = attention_mask[:, kv_offset : kv_offset + columns].to(torch.bool)
    if mask.shape[1] < columns:
        mask = torch.nn.functional.pad(mask, (0, columns - mask.shape[1]))
    if columns == kv_length and mask.all():
        return None
    return mask


def _refuse(what: str, remedy: str = _REMEDY) -> NoReturn:
    raise UnsupportedError(f"softcap_ops: {what} is not offered in transformers models. {remedy}")


def _refuse_what_is_not_offered(
    module: torch.nn.Module,
    mask: Tensor | None,
    dropout: float,
    softcap: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    config: Any = getattr(module, "config", None)
    if dropout > 0:
        _refuse(f"dropout (attention_dropout={dropout})", f"Set config.attention_dropout = 0.0; {_REMEDY}")
    if softcap is None and getattr(config, "attn_logit_softcapping", None) is not None:
        _refuse(
            f"{type(module).__name__} with config.attn_logit_softcapping={config.attn_logit_softcapping}: it does not "
            "pass its cap to attention, which",
            "Set config.attn_logit_softcapping = None to run it uncapped.",
        )
    both_ways = mask is not None and _is_both_ways(mask)
    if not both_ways and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        _refuse("bidirectional attention (is_causal=False) without a mask of transformers' that says so")
    if mask is not None and mask.dim() != 2 and not both_ways and not _is_key_ranges(mask):
        _refuse(f"an attention_mask of {mask.dim()} dimensions (one of the model's or the caller's own)")
    for name in ("block_table", "k_cache", "v_cache"):
        if kwargs.get(name) is not None:
            _refuse(f"a paged KV cache ({name})", "Generate with model.generate, not with continuous batching.")
    for name, what in _CHANGES_SCORES.items():
        if kwargs.get(name) is not None:
            _refuse(f"{what} ({name})")
    for name, value in kwargs.items():
        if name != "num_items_in_batch" and isinstance(value, Tensor) and value.is_floating_point():  # (Trainer's)
            _refuse(f"{name}, a tensor that may change the scores,")
    output_attentions = kwargs.get("output_attentions")
    if getattr(config, "output_attentions", False) if output_attentions is None else output_attentions:
        _refuse("output_attentions=True (the weights are never formed)")


def _refuse_other_patterns(
    mask_function: Callable[..., Tensor] | None,
    batch_size: int,
    q_length: int,
    q_offset: int | Tensor,
    device: Any,
    use_vmap: bool,
    config: Any,
    both_ways: bool,
) -> None:
    """Refuse what is neither causal nor bidirectional: `attention` would compute a causal mask in its place.

    A pattern is closures over closures, which say little of themselves. But all that let a token see beyond itself
    (prefix, image blocks) let some token see the next one.
    """
    if use_vmap:
        _refuse("a mask function of the model's own (or_mask_function, and_mask_function)")
    if getattr(config, "attention_chunk_size", None) is not None:
        _refuse(f"chunked attention (config.attention_chunk_size={config.attention_chunk_size})")
    if both_ways or mask_function is None or q_length < 2:
        return
    batch = torch.arange(batch_size, device=device).unsqueeze(1)
    tokens = torch.arange(q_length - 1, device=device).unsqueeze(0) + q_offset
    sees_next = mask_function(batch, torch.zeros_like(batch), tokens, tokens + 1).any()
    if torch.compiler.is_compiling():
        torch._assert_async(~sees_next, "softcap_ops: a mask in which a token sees a later one. " + _REMEDY)
    elif sees_next:
        _refuse("a mask in which a token sees a later one")


def _decoded(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, options: dict[str, Any]) -> Tensor:
    """On the cache as it lies, left padding skipped: nothing is gathered, and no length leaves the device."""
    ends, leftpad = ranges[0, :, 0], (ranges[1, :, 0] if ranges.shape[0] == 2 else None)
    try:
        return softcap_attention_decode(q, k, v, ends, cache_leftpad=leftpad, **options)
    except UnsupportedError:  # no backend here reads caches
        if torch.compiler.is_compiling():
            raise
        columns = torch.arange(int(ends.max()), device=q.device)
        mask = columns < ends.unsqueeze(1)
        return _padded(q, k, v, mask if leftpad is None else mask & (columns >= leftpad.unsqueeze(1)), options)


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Only the real tokens of each row, as one packed batch; 0 at the others, but for the last column."""
    columns = mask.shape[1]
    k, v = k[:, :columns], v[:, :columns]
    batch, seqlen_q = q.shape[:2]
    mask_q = mask[:, columns - seqlen_q :]
    if mask.all():
        return softcap_attention(q, k, v, **options)
    if seqlen_q == 1:
        return _last_column(q, k, v, mask, options)
    if options["window"] != (-1, -1):
        _refuse_padding_between(mask)
    rows_q, rows_k = (m.flatten().nonzero().squeeze(1) for m in (mask_q, mask))
    out = _varlen(
        q.flatten(0, 1)[rows_q],
        k.flatten(0, 1)[rows_k],
        v.flatten(0, 1)[rows_k],
        mask_q.sum(1, dtype=torch.int32),
        mask.sum(1, dtype=torch.int32),
        options,
    )
    padded = out.new_zeros((batch * seqlen_q, *out.shape[1:])).index_copy(0, rows_q, out)
    padded = padded.unflatten(0, (batch, seqlen_q))
    if not torch.is_grad_enabled() and not mask[:, -1].all():
        # A prompt padded on the right: generation reads the next token off its last column all the same.
        padded[:, -1:] = _last_column(q[:, -1:], k, v, mask, options)
    return padded


def _both_ways(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Queries of all tokens on all keys, or those in a window, that are not padding: bool (batch, columns or 0)."""
    windowed = options["window"] != (-1, -1)
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    if windowed and seqlen_q != seqlen_k:
        _refuse("a sliding window in cross attention")
    if mask.shape[1] == 0:
        return softcap_attention(q, k, v, **options)
    if mask.shape[1] != seqlen_k:
        raise ValueError(f"attention_mask must have a column for each of the {seqlen_k} keys, got {mask.shape[1]}")
    # What a query at padding sees nobody reads. With a window it is left out, so that tokens keep their distances.
    pad_k = from_mask(mask)
    pad_q = Packed(torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q, None)
    if windowed:
        _refuse_padding_between(mask)
        pad_q = pad_k
    out = softcap_attention_varlen(
        pad_q.pack(q.flatten(0, 1)), pad_k.pack(k.flatten(0, 1)), pad_k.pack(v.flatten(0, 1)),
        cu_seqlens_q=pad_q.cu_seqlens, cu_seqlens_k=pad_k.cu_seqlens, max_seqlen_q=seqlen_q, max_seqlen_k=seqlen_k,
        **options,
    )  # fmt: skip
    return pad_q.unpack(out).unflatten(0, (batch, seqlen_q))


def _refuse_padding_between(mask: Tensor) -> None:
    """The packed op counts a window in tokens, transformers in columns: the same where tokens lie together."""
    what = "a sliding window over padding between tokens"
    runs = (mask.to(torch.int8).diff(dim=1) == 1).sum(1) + mask[:, 0]
    if torch.compiler.is_compiling():
        torch._assert_async((runs <= 1).all(), f"softcap_ops: {what}. " + _REMEDY)
    elif (runs > 1).any():
        _refuse(what, "Pad on the left before adding tokens.")


def _last_column(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """One query a row, at the last column, on the keys that it sees: any of them may be missing."""
    left = options["window"][0]
    if left >= 0:
        mask = mask.clone()
        mask[:, : max(0, mask.shape[1] - 1 - left)] = False
    rows = mask.flatten().nonzero().squeeze(1)
    ones = torch.ones(q.shape[0], dtype=torch.int32, device=q.device)
    keys, values = (t.flatten(0, 1)[rows] for t in (k, v))
    options = {**options, "window": (-1, -1)}
    return _varlen(q.flatten(0, 1), keys, values, ones, mask.sum(1, dtype=torch.int32), options).unsqueeze(1)


def _varlen(q: Tensor, k: Tensor, v: Tensor, lengths_q: Tensor, lengths_k: Tensor, options: dict[str, Any]) -> Tensor:
    return softcap_attention_varlen(
        q, k, v,
        cu_seqlens_q=cumulative(lengths_q), cu_seqlens_k=cumulative(lengths_k),
        max_seqlen_q=int(lengths_q.max()), max_seqlen_k=int(lengths_k.max()),
        **options,
    )  # fmt: skip


def _packed(q: Tensor, k: Tensor, v: Tensor, packing: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    cu_q, cu_k, max_q, max_k = packing
    out = softcap_attention_varlen(
        *(t.flatten(0, 1) for t in (q, k, v)),
        cu_seqlens_q=cu_q.to(torch.int32).contiguous(),
        cu_seqlens_k=cu_k.to(torch.int32).contiguous(),
        max_seqlen_q=int(max_q),
        max_seqlen_k=int(max_k),
        **options,
    )
    return out.unflatten(0, q.shape[:2])


def _sequence_starts(position_ids: Tensor, batch: int) -> Tensor:
    """Bool (batch, seqlen): the tokens at which a sequence begins, a row's first included."""
    if position_ids.dim() != 2:
        _refuse(f"position_ids of {position_ids.dim()} dimensions")
    first = torch.ones_like(position_ids[:, :1], dtype=torch.bool)
    return torch.cat([first, position_ids.diff(dim=1) != 1], dim=1).expand(batch, -1)


def _cu_seqlens_from_starts(starts: Tensor) -> tuple[Tensor, int]:
    begins = starts.flatten().nonzero().squeeze(1)
    ends = torch.cat([begins[1:], begins.new_tensor([starts.numel()])])
    lengths = (ends - begins).to(torch.int32)
    return cumulative(lengths), int(lengths.max())
