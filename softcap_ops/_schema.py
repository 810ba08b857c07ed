"""The operators' schemas and tags: the one place where the ops are defined.

Everything else (fakes, autograd, kernels) attaches to the handles bound at the bottom.
A released schema only ever gains trailing arguments with defaults; tests/test_schemas.py holds the text.
"""

import torch

# Shared by all ops, in this order. `Scalar` rather than `float` for softcap and scale: the dispatcher
# turns a symbolic float passed as `float` into a constant, and a compiled graph would be rebuilt for every
# value. A symbolic float becomes a 0-d float64 CPU tensor (`*_tensor`), which then stands for the number.
_OPTIONS = (
    "Scalar? softcap, Scalar? scale=None, bool causal=False, SymInt window_left=-1, SymInt window_right=-1, "
    "bool? deterministic=None, str? backend=None, Tensor? softcap_tensor=None, Tensor? scale_tensor=None"
)
_PACKING = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
# cu_seqlens are those of the whole sequences; groups are names of process groups, as in functional collectives.
_SHARDING = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_q_padded, Tensor? cu_seqlens_k_padded, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, str[] groups, str comm, str layout"
)
# The same without `deterministic`, which decoding always is, and causal, which it is but for rare cases.
_DECODE_OPTIONS = (
    "Scalar? softcap, Scalar? scale=None, bool causal=True, SymInt window_left=-1, SymInt window_right=-1, "
    "str? backend=None, Tensor? softcap_tensor=None, Tensor? scale_tensor=None"
)
_CACHE = "Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? cache_leftpad, Tensor? block_table"
_FORWARD = "Tensor q, Tensor k, Tensor v"
_BACKWARD = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_MASK = "bool[3] output_mask=[True, True, True]"

SCHEMAS = (
    f"attention_fwd({_FORWARD}, {_OPTIONS}, bool needs_backward=False) -> (Tensor out, Tensor lse)",
    f"attention_bwd({_BACKWARD}, {_OPTIONS}, {_MASK}) -> (Tensor dq, Tensor dk, Tensor dv)",
    f"varlen_attention_fwd({_FORWARD}, {_PACKING}, {_OPTIONS}, bool needs_backward=False) -> (Tensor out, Tensor lse)",
    f"varlen_attention_bwd({_BACKWARD}, {_PACKING}, {_OPTIONS}, {_MASK}) -> (Tensor dq, Tensor dk, Tensor dv)",
    # return_lse: whether a loss may reach lse, on any rank. All ranks of an a2a then send its gradient.
    f"cp_attention_fwd({_FORWARD}, {_SHARDING}, {_OPTIONS}, bool needs_backward=False, bool return_lse=True) "
    "-> (Tensor out, Tensor lse)",
    f"cp_attention_bwd({_BACKWARD}, {_SHARDING}, {_OPTIONS}, {_MASK}) -> (Tensor dq, Tensor dk, Tensor dv)",
    f"decode_attention_fwd(Tensor q, {_CACHE}, {_DECODE_OPTIONS}, bool return_lse=True) -> (Tensor out, Tensor lse)",
)

# flexible_layout: any strides are accepted, so Inductor need not restride (copy) an input for us.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

lib = torch.library.Library("softcap_ops", "DEF")
for _schema in SCHEMAS:
    lib.define(_schema, tags=TAGS)

attention_fwd = torch.ops.softcap_ops.attention_fwd.default
attention_bwd = torch.ops.softcap_ops.attention_bwd.default
varlen_attention_fwd = torch.ops.softcap_ops.varlen_attention_fwd.default
varlen_attention_bwd = torch.ops.softcap_ops.varlen_attention_bwd.default
cp_attention_fwd = torch.ops.softcap_ops.cp_attention_fwd.default
cp_attention_bwd = torch.ops.softcap_ops.cp_attention_bwd.default
decode_attention_fwd = torch.ops.softcap_ops.decode_attention_fwd.default
