"""`DotProductAttention`: TransformerEngine's attention module with a soft cap, without TransformerEngine.

Constructor and forward have TransformerEngine's argument names, defaults and layouts (transformer_engine.pytorch.
DotProductAttention, 2.x), and `softcap` besides. A model swaps one for the other by changing the import.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import _padding, _validation
from .api import softcap_attention, softcap_attention_varlen
from .distributed import context_parallel_attention
from .errors import UnsupportedError

MASK_TYPES = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right",
)  # fmt: skip
FORMATS = ("sbhd", "bshd", "thd")


class _Mask(NamedTuple):
    """What a query may see: attn_mask_type, window_size and bottom_right_diagonal put together."""

    name: str
    padding: bool
    causal: bool
    window: tuple[int, int]  # (left, right), inclusive, -1 = unlimited; causal: right is 0
    top_left: bool  # the diagonal starts at (query 0, key 0); else it ends at (last query, last key)

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window}


class _Call(NamedTuple):
    """One call, every default filled in."""

    qkv_format: str
    mask: _Mask
    options: dict[str, Any]  # softcap, scale, deterministic
    cp_group: Any
    comm: str
    attention_mask: Any = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None

    @property
    def ranks(self) -> int:
        """Over how many ranks each sequence is split."""
        if self.cp_group is None:
            return 1
        if isinstance(self.cp_group, (list, tuple)):
            return math.prod(g.size() for g in self.cp_group)
        return self.cp_group.size()


class DotProductAttention(torch.nn.Module):
    """Soft-capped attention with TransformerEngine's module interface.

    Differences from `transformer_engine.pytorch.DotProductAttention`:

    - `softcap`, here and in `forward`: bound of the scaled scores (Gemma 2: 50, Grok-1: 30); 0.0 = off.
    - It runs wherever the ops do, on a CPU too, in every dtype they have.
    - Causal masks that start at the top left work with different lengths of q and k too, but for padded, packed or
      context-parallel ones, which are refused.
    - attention_mask may mark padding anywhere in a row, not only at its end.
    - Padding is 0 in the output; a query that sees no key gets 0.
    - Windows and context parallelism go together in every cp_comm_type.
    - It compiles with fullgraph=True, context parallelism and checkpointing included.
    - Not offered, refused by name: dropout, ALiBi and other biases, arbitrary masks, softmax_type other than
      "vanilla", return_max_logit, score_mod, FP8, values of another head_dim than keys, KV caches (inference_params).

    Args:
        num_attention_heads: query heads, over all tensor-parallel ranks.
        kv_channels: head_dim, or a pair of twice the same.
        num_gqa_groups: key and value heads, over all tensor-parallel ranks; None = num_attention_heads.
        attention_dropout: must be 0.
        qkv_format: layout of the tensors: "sbhd", "bshd" or "thd" (packed).
        attn_mask_type: "no_mask", "padding", "causal", "padding_causal" (both with the diagonal at the top left),
            "causal_bottom_right" or "padding_causal_bottom_right".
        window_size: (left, right) tokens around the diagonal, inclusive, -1 = unlimited. "sliding_window = W" in a
            model's configuration is (W - 1, 0).
        bottom_right_diagonal: where the diagonal of a window without a causal mask ends; None = bottom right.
        tp_size, tp_group: tensor parallelism: each rank holds its part of the heads.
        attention_type: "self" or "cross".
        cp_group, cp_comm_type: context parallelism, see `set_context_parallel_group`.
        softmax_scale: factor of q kT; None = head_dim ** -0.5.
        softcap: bound of the scaled scores; 0.0 or None = off.
        sequence_parallel, get_rng_state_tracker, cp_global_ranks, cp_stream, layer_number, name: taken, and of no
            effect: they serve dropout, communication that is organised otherwise here, and debugging.

    Raises:
        ValueError, TypeError: a value is wrong; the message names the argument.
        UnsupportedError: what it asks for is not offered; the message names the argument.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
        *,
        softcap: float | None = 0.0,
    ) -> None:
        super().__init__()
        pair = tuple(kv_channels) if isinstance(kv_channels, (tuple, list)) else (kv_channels, kv_channels)
        if len(pair) != 2 or not all(isinstance(n, int) for n in pair):
            raise TypeError(f"kv_channels must be an int, or a pair of ints, got {kv_channels!r}")
        head_dim, head_dim_v = pair
        _refuse_unless(head_dim == head_dim_v, f"kv_channels={kv_channels}: values of another size than keys")
        _refuse_unless(not attention_dropout, f"attention_dropout={attention_dropout}")
        _refuse_unless(softmax_type == "vanilla", f"softmax_type={softmax_type!r}")
        _refuse_unless(not return_max_logit, f"return_max_logit={return_max_logit}")
        if attention_type not in ("self", "cross"):
            raise ValueError(f'attention_type must be "self" or "cross", got {attention_type!r}')
        _validation.number("softmax_scale", softmax_scale, "None means head_dim ** -0.5")
        _check_softcap(softcap)

        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.tp_group = tp_group
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        for what, heads in (("num_attention_heads", num_attention_heads), ("num_gqa_groups", self.num_gqa_groups)):
            if heads < 1 or heads % self.tp_size:
                raise ValueError(f"{what} must divide by tp_size, {self.tp_size}, got {heads}")
        if num_attention_heads % self.num_gqa_groups:
            raise ValueError(f"num_gqa_groups must divide num_attention_heads, {num_attention_heads}, got "
                             f"{self.num_gqa_groups}")  # fmt: skip

        self.head_dim = head_dim
        self.qkv_format = _checked_format(qkv_format)
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        _mask(attn_mask_type, window_size, bottom_right_diagonal)
        self.softmax_scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        self.softcap = softcap
        self.attention_type = attention_type
        self.layer_number = 1 if layer_number is None else layer_number
        self.name = name
        # TransformerEngine's switch. Otherwise torch.use_deterministic_algorithms decides at each call.
        self.deterministic = True if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0" else None
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, head_dim={self.head_dim}, "
            f"softcap={self.softcap}, {self.qkv_format}, {self.attn_mask_type}, window={self.window_size}"
        )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The group over which heads are shared out."""
        self.tp_group = tp_group

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int] | None = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Split each sequence over the ranks of a group from now on, or no longer.

        Args:
            cp_group: a ProcessGroup; for cp_comm_type "a2a+p2p" a list [a2a group, p2p group]; None = off. Rank r of n
                holds chunks r and 2n - 1 - r of the 2n chunks of each sequence (TransformerEngine's order,
                `softcap_ops.distributed.split_sequence`).
            cp_global_ranks, cp_stream: of no effect.
            cp_comm_type: "p2p", "all_gather", "a2a" or "a2a+p2p", see `context_parallel_attention`.
        """
        if cp_comm_type not in ("p2p", "all_gather", "a2a", "a2a+p2p"):
            raise ValueError(f'cp_comm_type must be "p2p", "all_gather", "a2a" or "a2a+p2p", got {cp_comm_type!r}')
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # TransformerEngine's checkpoints hold FP8 statistics here, empty ones without FP8.
        for key in (f"{prefix}_extra_state", f"{prefix}fused_attention._extra_state"):
            state_dict.pop(key, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        *,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of this rank's heads.

        Args:
            query_layer, key_layer, value_layer: (s, b, h, d), (b, s, h, d) or packed (t, h, d), by qkv_format.
            attention_mask: with a padding mask type, bool (b, 1, 1, s), True = padding; a pair of them, for q and for
                k and v, where these differ. Not looked at with the other mask types.
            cu_seqlens_q, cu_seqlens_kv: int32 (b + 1,): the lengths of the sequences, summed up. Needed for thd; with
                a padding mask type they stand in for attention_mask, tokens at the start of each row.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: for thd, where each sequence begins if there is padding between.
            max_seqlen_q, max_seqlen_kv: for thd, at least the longest sequence, in tokens. None: read from cu_seqlens,
                for which a GPU must be waited for, and which cannot be compiled.
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal, softcap: in place of the constructor's;
                None = the constructor's.
            checkpoint_core_attention: keep q, k and v alone and compute forward again in the backward.
            qkv_layer, kv_layer, qkv_interleave_dim: q, k and v, or k and v, in one tensor with an axis of 3 or 2 at
                qkv_interleave_dim, -3 or -2.
            fast_zero_fill, pad_between_seqs, num_splits: taken, and of no effect: hints to kernels.
            The others must have their defaults.

        Returns:
            (s, b, h * d), (b, s, h * d) or (t, h * d), contiguous, dtype of query_layer.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
            UnsupportedError: an argument asks for what is not offered, or no backend can serve the call.
            RuntimeError: in place of UnsupportedError, sequences of different lengths of q and k under a diagonal at
                the top left, in a compiled graph or on a GPU: there it is an assert on the device, which comes later
                and after which CUDA can no longer be used. What cu_seqlens hold is not checked there at all.
        """
        _refuse_unless(core_attention_bias_type == "no_bias", f"core_attention_bias_type={core_attention_bias_type!r}")
        for name, value in (
            ("core_attention_bias", core_attention_bias), ("alibi_slopes", alibi_slopes), ("score_mod", score_mod),
            ("score_mod_bprop", score_mod_bprop), ("score_mod_tensors", score_mod_tensors),
            ("score_mod_bprop_tensors", score_mod_bprop_tensors),
        ):  # fmt: skip
            _refuse_unless(value is None, name)
        _refuse_unless(not fp8_output, "fp8_output=True")
        _refuse_unless(not bf16_backward, "bf16_backward=True")
        if inference_params is not None:
            _refuse(
                "inference_params (a KV cache)",
                "Pass all keys and values so far, with a mask type that ends in bottom_right.",
            )
        q, k, v = _unpacked(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim)
        call = self._call(
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            softcap=softcap,
            attention_mask=attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
        )
        self._check(q, k, v, call)
        if checkpoint_core_attention:
            return checkpoint(_attend, q, k, v, call, use_reentrant=False)
        return _attend(q, k, v, call)

    def _call(
        self,
        *,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        **given: Any,
    ) -> _Call:
        """What to compute: arguments of `forward`, and of the constructor where those are None."""
        mask = _mask(
            self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            self.window_size if window_size is None else window_size,
            self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
        )
        options = {
            "softcap": self.softcap if softcap is None else softcap,
            "scale": self.softmax_scale,
            "deterministic": self.deterministic,
        }
        qkv_format = self.qkv_format if qkv_format is None else _checked_format(qkv_format)
        return _Call(qkv_format, mask, options, **{"cp_group": self.cp_group, "comm": self.cp_comm_type, **given})

    def _check(self, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> None:
        """Types and shapes of the tensors, under the names that they have here."""
        rank = 3 if call.qkv_format == "thd" else 4
        heads = (self.num_attention_heads, self.num_gqa_groups, self.num_gqa_groups)
        names = ("query_layer", "key_layer", "value_layer")
        for name, t, total in zip(names, (q, k, v), heads, strict=True):
            _validation.tensor(name, t)
            if t.dim() != rank:
                raise ValueError(
                    f'{name} must have {rank} dimensions for qkv_format="{call.qkv_format}", got {t.dim()}'
                )
            expected = (total // self.tp_size, self.head_dim)
            if tuple(t.shape[-2:]) != expected:
                raise ValueError(
                    f"{name} must have {expected[0]} heads of {expected[1]} on this rank, got shape {tuple(t.shape)}"
                )
            if t.device != q.device:
                raise ValueError(f"{name} must be on the device of query_layer, {q.device}, got {t.device}")
        if v.shape != k.shape:
            raise ValueError(f"value_layer must have the shape of key_layer, {tuple(k.shape)}, got {tuple(v.shape)}")
        batch_axis = {"bshd": 0, "sbhd": 1, "thd": None}[call.qkv_format]
        if batch_axis is not None and k.shape[batch_axis] != q.shape[batch_axis]:
            raise ValueError(
                f"key_layer must have the batch of query_layer, {q.shape[batch_axis]}, got shape {tuple(k.shape)}"
            )
        if call.mask.padding:
            batch = None if batch_axis is None else q.shape[batch_axis]
            for name in ("cu_seqlens_q", "cu_seqlens_kv"):
                if (cu_seqlens := getattr(call, name)) is not None:
                    _check_cu_seqlens(name, cu_seqlens, batch, q.device)
                    batch = cu_seqlens.shape[0] - 1


def _attend(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    """Attention in the layout of the call; heads and head_dim come out as one axis."""
    if call.qkv_format == "thd":
        return _packed(q, k, v, call).flatten(-2)
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        if getattr(call, name) is not None:
            raise ValueError(f'{name} is for qkv_format="thd", not "{call.qkv_format}"')
    sequence_first = call.qkv_format == "sbhd"
    if sequence_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    out = (_padded if call.mask.padding else _dense)(q, k, v, call)
    return (out.transpose(0, 1) if sequence_first else out).flatten(-2).contiguous()


def _dense(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    """(batch, seqlen, heads, head_dim) without padding."""
    mask = call.mask
    aligned = not mask.top_left or q.shape[1] == k.shape[1]
    if call.ranks > 1:
        if not aligned:
            _refuse(f"attn_mask_type={mask.name!r} with different lengths of q and k, under context parallelism")
        return _context_parallel(q, k, v, call)
    if aligned:
        return softcap_attention(q, k, v, **mask.options, **call.options)
    return _top_left(q, k, v, mask.window, call.options)


def _padded(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    """(batch, seqlen, heads, head_dim), each row with padding of its own."""
    if call.ranks > 1:
        _refuse(
            f"attn_mask_type={call.mask.name!r} in a dense layout, under context parallelism",
            'Pack the sequences (qkv_format="thd").',
        )
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_kv
    if (cu_q is None) != (cu_k is None):
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_kv"
        raise ValueError(f"{missing} must be given where the other is")
    given: tuple[Any, Any]
    of: Callable[[str, Any, Tensor], _padding.Packed]
    if cu_q is not None:
        given, of = (cu_q, cu_k), _from_lengths
    elif call.attention_mask is not None:
        mask = call.attention_mask
        given, of = tuple(mask) if isinstance(mask, (tuple, list)) else (mask, mask), _from_mask
        if len(given) != 2:
            raise ValueError(f"attention_mask must be a Tensor or a pair of them, got {len(given)}")
    else:
        raise ValueError(f"attn_mask_type={call.mask.name!r} needs attention_mask, or cu_seqlens_q and cu_seqlens_kv")
    pad_q = of("q", given[0], q)
    pad_k = pad_q if given[0] is given[1] and q.shape[1] == k.shape[1] else of("kv", given[1], k)
    out = _among_padding(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), pad_q, pad_k, q.shape[1], k.shape[1], call
    )  # fmt: skip
    return out.unflatten(0, q.shape[:2])


def _packed(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
    """(tokens, heads, head_dim)."""
    if not call.mask.padding:
        raise ValueError(f'attn_mask_type must be a padding one for qkv_format="thd", got {call.mask.name!r}')
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_kv
    if cu_q is None or cu_k is None:
        raise ValueError(f'{"cu_seqlens_q" if cu_q is None else "cu_seqlens_kv"} must be given for qkv_format="thd"')
    if call.ranks > 1:
        if call.mask.top_left:
            _check_equal_lengths(cu_q, cu_k, call.mask.name)
        return _context_parallel(
            q, k, v, call, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
            cu_seqlens_q_padded=call.cu_seqlens_q_padded, cu_seqlens_k_padded=call.cu_seqlens_kv_padded,
            max_seqlen_q=call.max_seqlen_q, max_seqlen_k=call.max_seqlen_kv,
        )  # fmt: skip
    pad_q = _from_offsets("cu_seqlens_q_padded", cu_q, call.cu_seqlens_q_padded, q.shape[0])
    pad_k = _from_offsets("cu_seqlens_kv_padded", cu_k, call.cu_seqlens_kv_padded, k.shape[0])
    max_q = _longest("max_seqlen_q", cu_q) if call.max_seqlen_q is None else call.max_seqlen_q
    max_k = _longest("max_seqlen_kv", cu_k) if call.max_seqlen_kv is None else call.max_seqlen_kv
    return _among_padding(q, k, v, pad_q, pad_k, max_q, max_k, call)


def _among_padding(
    q: Tensor, k: Tensor, v: Tensor, pad_q: _padding.Packed, pad_k: _padding.Packed, max_q: Any, max_k: Any, call: _Call
) -> Tensor:
    """Rows, (tokens and padding, heads, head_dim), of which only the tokens count."""
    if call.mask.top_left:
        _check_equal_lengths(pad_q.cu_seqlens, pad_k.cu_seqlens, call.mask.name)
    out = softcap_attention_varlen(
        pad_q.pack(q),
        pad_k.pack(k),
        pad_k.pack(v),
        cu_seqlens_q=pad_q.cu_seqlens,
        cu_seqlens_k=pad_k.cu_seqlens,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        **call.mask.options,
        **call.options,
    )
    return pad_q.unpack(out)


def _context_parallel(q: Tensor, k: Tensor, v: Tensor, call: _Call, **packing: Any) -> Tensor:
    group = tuple(call.cp_group) if isinstance(call.cp_group, list) else call.cp_group
    return context_parallel_attention(
        q, k, v, group=group, comm=call.comm, layout="zigzag", **packing, **call.mask.options, **call.options
    )


def _top_left(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], options: dict[str, Any]) -> Tensor:
    """A window around the diagonal of the top left corner, in terms of the ops' one at the bottom right.

    Keys that no query sees and queries that see no key are left out: then neither side of the shifted window is
    negative, which would read as unlimited.
    """
    left, right = window
    seqlen = q.shape[1]
    if right >= 0:
        k, v = k[:, : seqlen + right], v[:, : seqlen + right]
    if left >= 0:
        q = q[:, : k.shape[1] + left]
    shift = k.shape[1] - q.shape[1]
    shifted = (left + shift if left >= 0 else -1, right - shift if right >= 0 else -1)
    out = softcap_attention(q, k, v, window=shifted, **options)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, seqlen - out.shape[1]))


def _mask(name: str, window: tuple[int, int] | None, bottom_right: bool | None) -> _Mask:
    """TransformerEngine's rules for the three arguments together."""
    if not isinstance(name, str):
        raise TypeError(f"attn_mask_type must be a str, got {name!r}")
    name = name.replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    _refuse_unless(name != "arbitrary", 'attn_mask_type="arbitrary"')
    if name not in MASK_TYPES:
        raise ValueError(f"attn_mask_type must be one of {list(MASK_TYPES)}, got {name!r}")
    causal = "causal" in name
    if window is None:
        window = (-1, 0) if causal else (-1, -1)
    if not isinstance(window, (tuple, list)) or not all(isinstance(n, (int, torch.SymInt)) for n in window):
        raise TypeError(f"window_size must be a pair of ints, (left, right), got {window!r}")
    if len(window) != 2 or min(window) < -1:
        raise ValueError(f"window_size must be (left, right), each at least 0 or -1 = unlimited, got {window}")
    left, right = window
    if causal:
        right = 0
    elif (left, right) == (-1, 0):  # TransformerEngine's name for a causal mask, which this is not
        right = -1
    elif left < 0 <= right or right < 0 <= left:
        raise ValueError(f"window_size must be (-1, -1) or limited on both sides for {name!r}, got {window}")
    top_left = "bottom_right" not in name if causal else bottom_right is False and left >= 0
    return _Mask(name, "padding" in name, causal, (left, right), top_left)


def _unpacked(
    q: Tensor | None, k: Tensor | None, v: Tensor | None, qkv: Tensor | None, kv: Tensor | None, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, wherever they were given."""
    if qkv is None and kv is None:
        if q is None or k is None or v is None:
            name = "query_layer" if q is None else "key_layer" if k is None else "value_layer"
            raise ValueError(f"{name} must be given, unless qkv_layer or kv_layer is")
        return q, k, v
    if dim not in (-3, -2):
        raise ValueError(f"qkv_interleave_dim must be -3 or -2, got {dim}")
    if qkv is not None:
        _validation.tensor("qkv_layer", qkv)
        if not all(t is None for t in (q, k, v, kv)):
            raise ValueError("qkv_layer holds q, k and v: query_layer, key_layer, value_layer, kv_layer must be None")
        if qkv.dim() < 4 or qkv.shape[dim] != 3:
            raise ValueError(f"qkv_layer must have size 3 at qkv_interleave_dim={dim}, got shape {tuple(qkv.shape)}")
        return qkv.select(dim, 0), qkv.select(dim, 1), qkv.select(dim, 2)
    _validation.tensor("kv_layer", kv)
    assert kv is not None
    if q is None or k is not None or v is not None:
        raise ValueError("kv_layer holds k and v: query_layer must be given, key_layer and value_layer must be None")
    if kv.dim() < 4 or kv.shape[dim] != 2:
        raise ValueError(f"kv_layer must have size 2 at qkv_interleave_dim={dim}, got shape {tuple(kv.shape)}")
    return q, kv.select(dim, 0), kv.select(dim, 1)


def _from_mask(side: str, mask: Any, x: Tensor) -> _padding.Packed:
    """From TransformerEngine's (batch, 1, 1, seqlen), True = padding."""
    _validation.tensor("attention_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"attention_mask must be bool, True = padding, got {mask.dtype}")
    batch, seqlen = x.shape[:2]
    if tuple(mask.shape) != (batch, 1, 1, seqlen):
        raise ValueError(
            f"attention_mask must have shape ({batch}, 1, 1, {seqlen}) for {side}, or be a pair of such masks, for q "
            f"and for k and v, where their lengths differ, got {tuple(mask.shape)}"
        )
    return _padding.from_mask(~mask.flatten(1))


def _from_lengths(side: str, cu_seqlens: Any, x: Tensor) -> _padding.Packed:
    """From the lengths of the sequences, each at the start of its row."""
    if _readable(cu_seqlens) and (cu_seqlens.diff() > x.shape[1]).any():
        raise ValueError(
            f"cu_seqlens_{side} must hold sequences of at most {x.shape[1]} tokens, the length of a row, got "
            f"{cu_seqlens.tolist()}"
        )
    return _padding.from_lengths(cu_seqlens, x.shape[1])


def _from_offsets(name: str, cu_seqlens: Tensor, padded: Any, rows: int) -> _padding.Packed:
    """From packed rows with padding between the sequences."""
    if padded is not None:
        _check_cu_seqlens(name, padded, cu_seqlens.shape[0] - 1, cu_seqlens.device)
        if _readable(padded):
            slots = padded.diff()
            if (padded[:1] < 0).any() or (slots < 0).any() or (padded[-1:] > rows).any():
                raise ValueError(f"{name} must rise from at least 0 to at most the {rows} rows, got {padded.tolist()}")
            if (cu_seqlens.diff() > slots).any():
                raise ValueError(
                    f"{name} must leave each sequence as many rows as it has tokens, got {padded.tolist()} for "
                    f"{cu_seqlens.tolist()}"
                )
    return _padding.from_offsets(cu_seqlens, padded, rows)


def _check_cu_seqlens(name: str, value: Any, batch: int | None, device: torch.device) -> None:
    """int32 (batch + 1,) on the device of the rows; batch None: any."""
    _validation.tensor(name, value)
    _validation.cu_seqlens(name, value, device, batch=batch, query="query_layer")


def _readable(t: Tensor) -> bool:
    """Whether reading it stops neither a GPU nor a graph."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling() and not _validation.is_fake(t)


def _refuse_unless_true(condition: Tensor, message: str) -> None:
    """Refuse by what the data say: at once, or by an assert on the device where reading it would stop that.

    No double quotes in the message: Inductor puts an assertion's message into C++ as it is.
    """
    if not _readable(condition):
        torch._assert_async(condition, message)
    elif not condition:
        raise UnsupportedError(message)


def _check_equal_lengths(cu_q: Tensor, cu_k: Tensor, name: str) -> None:
    """Refuse a diagonal at the top left of sequences with more queries than keys, or fewer."""
    if cu_q is cu_k:
        return
    message = (
        f"softcap_ops: attn_mask_type='{name}' (its diagonal at the top left) with sequences of different lengths of q "
        f"and k is not offered. Use 'padding_causal_bottom_right', or pass the sequences densely."
    )
    if cu_q.shape != cu_k.shape:
        raise ValueError(f"cu_seqlens_kv must have the shape of cu_seqlens_q, {tuple(cu_q.shape)}, got "
                         f"{tuple(cu_k.shape)}")  # fmt: skip
    _refuse_unless_true((cu_q == cu_k).all(), message)


def _longest(name: str, cu_seqlens: Tensor) -> int:
    if torch.compiler.is_compiling():
        raise ValueError(f"{name} must be given in a compiled model: reading it from cu_seqlens would break the graph")
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0


def _checked_format(qkv_format: str) -> str:
    if qkv_format not in FORMATS:
        raise ValueError(f"qkv_format must be one of {list(FORMATS)}, got {qkv_format!r}")
    return qkv_format


def _check_softcap(softcap: Any) -> None:
    _validation.number("softcap", softcap, "0.0 or None turns the cap off")
    if softcap is not None and not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and positive, or 0.0 or None for off, got {softcap}")


def _refuse_unless(offered: bool, what: str) -> None:
    if not offered:
        _refuse(what)


def _refuse(what: str, remedy: str = "") -> NoReturn:
    raise UnsupportedError(f"softcap_ops: {what} is not offered by DotProductAttention. {remedy}".rstrip())
