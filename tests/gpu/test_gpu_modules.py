"""DotProductAttention on the GPU computes what it computes on a CPU in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softcap_ops import DotProductAttention

HEADS, GROUPS, HEAD_DIM, CAP = 4, 2, 64, 5.0
CU = torch.tensor([0, 70, 103], dtype=torch.int32)
PADDED = torch.tensor([0, 80, 128], dtype=torch.int32)
MASK = torch.zeros(2, 1, 1, 96, dtype=torch.bool)
MASK[0, ..., :20], MASK[1, ..., 60:] = True, True

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("sbhd", {}),
    "window": ("bshd", {"window_size": (15, 0)}),
    "more_keys_top_left": ("bshd", {"rows_q": 40}),
    "more_keys_bottom_right": ("bshd", {"rows_q": 40, "attn_mask_type": "causal_bottom_right"}),
    "padding_mask": ("bshd", {"attn_mask_type": "padding_causal", "attention_mask": MASK}),
    "padding_lengths": ("sbhd", {"attn_mask_type": "padding", "cu_seqlens_q": CU, "cu_seqlens_kv": CU}),
    "packed": ("thd", {"attn_mask_type": "padding_causal", "cu_seqlens_q": CU, "cu_seqlens_kv": CU.clone()}),
    "packed_with_padding": (
        "thd",
        {
            "attn_mask_type": "padding_causal", "cu_seqlens_q": CU, "cu_seqlens_kv": CU, "cu_seqlens_q_padded": PADDED,
            "cu_seqlens_kv_padded": PADDED, "max_seqlen_q": 70, "max_seqlen_kv": 70,
        },
    ),
    "checkpointed": ("sbhd", {"checkpoint_core_attention": True}),
}  # fmt: skip


def evaluate(x: list[Tensor], device: str, dtype: torch.dtype, compiled: bool, **arguments: Any) -> list[Tensor]:
    """out, dq, dk, dv."""
    attend: Any = DotProductAttention(HEADS, HEAD_DIM, GROUPS, softcap=arguments.pop("softcap", CAP))
    attend = torch.compile(attend, fullgraph=True) if compiled else attend
    arguments = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in arguments.items()}
    leaves = [t.to(device, dtype).requires_grad_() for t in x[:3]]
    out = attend(*leaves, **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, x[3].to(device, dtype))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("hot", [False, True], ids=["cold", "hot"])
@pytest.mark.parametrize("name", CASES)
def test_module(name: str, hot: bool, compiled: bool) -> None:
    qkv_format, arguments = CASES[name]
    rows_q = arguments.get("rows_q", 96)
    arguments = {k: v for k, v in arguments.items() if k != "rows_q"} | {"qkv_format": qkv_format}
    if compiled and qkv_format == "thd" and "max_seqlen_q" not in arguments:
        arguments |= {"max_seqlen_q": 70, "max_seqlen_kv": 70}

    def random(rows: int, *rest: int) -> Tensor:
        lead = {"bshd": (2, rows), "sbhd": (rows, 2), "thd": (128,)}[qkv_format]
        return torch.randn(*lead, *rest).bfloat16()

    q, k, v = random(rows_q, HEADS, HEAD_DIM), random(96, GROUPS, HEAD_DIM), random(96, GROUPS, HEAD_DIM)
    x = [q * 3 if hot else q, k, v, random(rows_q, HEADS * HEAD_DIM)]
    expected = evaluate(x, "cpu", torch.float64, False, **arguments)
    actual = evaluate(x, "cuda", torch.bfloat16, compiled, **arguments)
    for what, a, b in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        error = torch.linalg.vector_norm(a.cpu().double() - b) / torch.linalg.vector_norm(b)
        assert error < 2e-2, f"{what}: {error}"
    if hot:
        uncapped = evaluate(x, "cpu", torch.float64, False, softcap=0.0, **arguments)
        difference = torch.linalg.vector_norm(uncapped[0] - expected[0]) / torch.linalg.vector_norm(expected[0])
        assert difference > 0.1
