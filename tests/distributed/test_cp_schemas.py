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
    assert_expected_inline(wrapped(torch.ops.softcap_ops.cp_attention_fwd.default._schema), "")


def test_cp_attention_bwd() -> None:
    assert_expected_inline(wrapped(torch.ops.softcap_ops.cp_attention_bwd.default._schema), "")


def test_tags() -> None:
    for name in OPS:
        op = getattr(torch.ops.softcap_ops, name).default
        assert torch.Tag.pt2_compliant_tag in op.tags
        assert torch.Tag.flexible_layout in op.tags
        assert not op._schema.is_mutable


def test_context_parallel_attention() -> None:
    parameters = inspect.signature(softcap_ops.context_parallel_attention).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["q", "k", "v"]
    assert_expected_inline("\n".join(str(p).replace("'", "") for p in parameters), "")
