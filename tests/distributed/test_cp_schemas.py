"""The context-parallel ops' released schemas and the public function's signature, as text (see test_schemas.py)."""

from __future__ import annotations

import inspect

import torch
from expecttest import assert_expected_inline

import softcap_ops

OPS = ("cp_attention_fwd", "cp_attention_bwd")


def wrapped(schema: object) -> str:
    """One argument a line."""
    arguments, returns = str(schema).split(" -> ")
    return arguments.replace(", ", ",\n  ").replace("(", "(\n  ", 1).removesuffix(")") + "\n) -> " + returns


def test_cp_attention_fwd() -> None:
    assert_expected_inline(
        wrapped(torch.ops.softcap_ops.cp_attention_fwd.default._schema),
        """\
softcap_ops::cp_attention_fwd(
  Tensor q,
  Tensor k,
  Tensor v,
  Tensor? cu_seqlens_q,
  Tensor? cu_seqlens_k,
  Tensor? cu_seqlens_q_padded,
  Tensor? cu_seqlens_k_padded,
  SymInt? max_seqlen_q,
  SymInt? max_seqlen_k,
  str[] groups,
  str comm,
  str layout,
  Scalar? softcap,
  Scalar? scale=None,
  bool causal=False,
  SymInt window_left=-1,
  SymInt window_right=-1,
  bool? deterministic=None,
  str? backend=None,
  Tensor? softcap_tensor=None,
  Tensor? scale_tensor=None,
  bool needs_backward=False,
  bool return_lse=True
) -> (Tensor out, Tensor lse)""",
    )


def test_cp_attention_bwd() -> None:
    assert_expected_inline(
        wrapped(torch.ops.softcap_ops.cp_attention_bwd.default._schema),
        """\
softcap_ops::cp_attention_bwd(
  Tensor dout,
  Tensor? dlse,
  Tensor q,
  Tensor k,
  Tensor v,
  Tensor out,
  Tensor lse,
  Tensor? cu_seqlens_q,
  Tensor? cu_seqlens_k,
  Tensor? cu_seqlens_q_padded,
  Tensor? cu_seqlens_k_padded,
  SymInt? max_seqlen_q,
  SymInt? max_seqlen_k,
  str[] groups,
  str comm,
  str layout,
  Scalar? softcap,
  Scalar? scale=None,
  bool causal=False,
  SymInt window_left=-1,
  SymInt window_right=-1,
  bool? deterministic=None,
  str? backend=None,
  Tensor? softcap_tensor=None,
  Tensor? scale_tensor=None,
  bool[3] output_mask=[True,
  True,
  True]
) -> (Tensor dq, Tensor dk, Tensor dv)""",
    )


def test_tags() -> None:
    for name in OPS:
        op = getattr(torch.ops.softcap_ops, name).default
        assert torch.Tag.pt2_compliant_tag in op.tags
        assert torch.Tag.flexible_layout in op.tags
        assert not op._schema.is_mutable


def test_context_parallel_attention() -> None:
    parameters = inspect.signature(softcap_ops.context_parallel_attention).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["q", "k", "v"]
    assert_expected_inline(
        "\n".join(str(p).replace("'", "") for p in parameters),
        """\
q: Tensor
k: Tensor
v: Tensor
group: Any
comm: str = p2p
layout: str = zigzag
softcap: float | None
scale: float | None = None
causal: bool = False
window: tuple[int, int] = (-1, -1)
cu_seqlens_q: Tensor | None = None
cu_seqlens_k: Tensor | None = None
cu_seqlens_q_padded: Tensor | None = None
cu_seqlens_k_padded: Tensor | None = None
max_seqlen_q: int | None = None
max_seqlen_k: int | None = None
return_lse: bool = False
deterministic: bool | None = None
backend: str | None = None""",
    )
