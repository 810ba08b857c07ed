"""The released schemas and tags, as text: an argument may only ever be added at the end, with a default."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline

import softcap_ops

OPS = ("attention_fwd", "attention_bwd", "varlen_attention_fwd", "varlen_attention_bwd", "decode_attention_fwd")


def op(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.softcap_ops, name).default


def wrapped(schema: object) -> str:
    """One argument a line."""
    arguments, returns = str(schema).split(" -> ")
    return arguments.replace(", ", ",\n  ").replace("(", "(\n  ", 1).removesuffix(")") + "\n) -> " + returns


def test_attention_fwd() -> None:
    assert_expected_inline(
        wrapped(op("attention_fwd")._schema),
        """\
softcap_ops::attention_fwd(
  Tensor q,
  Tensor k,
  Tensor v,
  Scalar? softcap,
  Scalar? scale=None,
  bool causal=False,
  SymInt window_left=-1,
  SymInt window_right=-1,
  bool? deterministic=None,
  str? backend=None,
  Tensor? softcap_tensor=None,
  Tensor? scale_tensor=None,
  bool needs_backward=False
) -> (Tensor out, Tensor lse)""",
    )


def test_attention_bwd() -> None:
    assert_expected_inline(
        wrapped(op("attention_bwd")._schema),
        """\
softcap_ops::attention_bwd(
  Tensor dout,
  Tensor? dlse,
  Tensor q,
  Tensor k,
  Tensor v,
  Tensor out,
  Tensor lse,
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


def test_varlen_attention_fwd() -> None:
    assert_expected_inline(
        wrapped(op("varlen_attention_fwd")._schema),
        """\
softcap_ops::varlen_attention_fwd(
  Tensor q,
  Tensor k,
  Tensor v,
  Tensor cu_seqlens_q,
  Tensor cu_seqlens_k,
  SymInt max_seqlen_q,
  SymInt max_seqlen_k,
  Scalar? softcap,
  Scalar? scale=None,
  bool causal=False,
  SymInt window_left=-1,
  SymInt window_right=-1,
  bool? deterministic=None,
  str? backend=None,
  Tensor? softcap_tensor=None,
  Tensor? scale_tensor=None,
  bool needs_backward=False
) -> (Tensor out, Tensor lse)""",
    )


def test_varlen_attention_bwd() -> None:
    assert_expected_inline(
        wrapped(op("varlen_attention_bwd")._schema),
        """\
softcap_ops::varlen_attention_bwd(
  Tensor dout,
  Tensor? dlse,
  Tensor q,
  Tensor k,
  Tensor v,
  Tensor out,
  Tensor lse,
  Tensor cu_seqlens_q,
  Tensor cu_seqlens_k,
  SymInt max_seqlen_q,
  SymInt max_seqlen_k,
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


def test_decode_attention_fwd() -> None:
    assert_expected_inline(
        wrapped(op("decode_attention_fwd")._schema),
        """\
softcap_ops::decode_attention_fwd(
  Tensor q,
  Tensor k_cache,
  Tensor v_cache,
  Tensor cache_seqlens,
  Tensor? cache_leftpad,
  Tensor? block_table,
  Scalar? softcap,
  Scalar? scale=None,
  bool causal=True,
  SymInt window_left=-1,
  SymInt window_right=-1,
  str? backend=None,
  Tensor? softcap_tensor=None,
  Tensor? scale_tensor=None,
  bool return_lse=True
) -> (Tensor out, Tensor lse)""",
    )


def test_tags() -> None:
    tags = {name: sorted(t.name for t in op(name).tags) for name in OPS}
    assert_expected_inline(
        "\n".join(f"{name}: {', '.join(t)}" for name, t in tags.items()),
        """\
attention_fwd: flexible_layout, pt2_compliant_tag
attention_bwd: flexible_layout, pt2_compliant_tag
varlen_attention_fwd: flexible_layout, pt2_compliant_tag
varlen_attention_bwd: flexible_layout, pt2_compliant_tag
decode_attention_fwd: flexible_layout, pt2_compliant_tag""",
    )


def signature(function: Callable[..., object]) -> str:
    return "\n".join(str(p).replace("'", "") for p in inspect.signature(function).parameters.values())


def test_softcap_attention() -> None:
    assert_expected_inline(
        signature(softcap_ops.softcap_attention),
        """\
q: Tensor
k: Tensor
v: Tensor
softcap: float | None
scale: float | None = None
causal: bool = False
window: tuple[int, int] = (-1, -1)
return_lse: bool = False
deterministic: bool | None = None
backend: str | None = None""",
    )


def test_softcap_attention_varlen() -> None:
    assert_expected_inline(
        signature(softcap_ops.softcap_attention_varlen),
        """\
q: Tensor
k: Tensor
v: Tensor
cu_seqlens_q: Tensor
cu_seqlens_k: Tensor
max_seqlen_q: int
max_seqlen_k: int
softcap: float | None
scale: float | None = None
causal: bool = False
window: tuple[int, int] = (-1, -1)
return_lse: bool = False
deterministic: bool | None = None
backend: str | None = None""",
    )


def test_softcap_attention_decode() -> None:
    assert_expected_inline(
        signature(softcap_ops.softcap_attention_decode),
        """\
q: Tensor
k_cache: Tensor
v_cache: Tensor
cache_seqlens: Tensor
cache_leftpad: Tensor | None = None
block_table: Tensor | None = None
softcap: float | None
scale: float | None = None
causal: bool = True
window: tuple[int, int] = (-1, -1)
return_lse: bool = False
backend: str | None = None""",
    )
    parameters = inspect.signature(softcap_ops.softcap_attention_decode).parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert positional == ["q", "k_cache", "v_cache", "cache_seqlens"]


@pytest.mark.parametrize("function", [softcap_ops.softcap_attention, softcap_ops.softcap_attention_varlen])
def test_only_tensors_are_positional(function: Callable[..., object]) -> None:
    """case 78: no argument can take the place of another when one is added."""
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["q", "k", "v"]


@pytest.mark.parametrize("name", OPS)
def test_functional(name: str) -> None:
    """case 49: no argument is written to and no output is a view of one."""
    schema = op(name)._schema
    assert not schema.is_mutable
    assert all(a.alias_info is None for a in (*schema.arguments, *schema.returns))


@pytest.mark.parametrize("name", OPS)
def test_nothing_else_is_overloaded(name: str) -> None:
    assert getattr(torch.ops.softcap_ops, name).overloads() == ["default"]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("key", ["CPU", "CUDA", "Autograd"])
def test_kernels_registered(name: str, key: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"softcap_ops::{name}", key)
