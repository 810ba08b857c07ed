"""ONNX export: a soft-capped call is refused by name, on every route; with the cap off it exports as plain attention.

ONNX has an Attention operator with a softcap attribute, but its first version masks before it caps and runtimes
disagree on the order (onnx/onnx#7865), which lets masked keys leak. A refusal is better than a model that computes
something else. The routes, and what stops each:

- the public functions, while any exporter traces: `exporting()`;
- the bare op under the dynamo exporter, an exported program included: the op's fake kernel (`refuse_if_exporting`);
- the bare op under the TorchScript exporter, fall-through mode included: a registered symbolic that raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import reference

MESSAGE = (
    "softcap_ops: soft-capped attention cannot be exported to ONNX: the operator softcap_ops::{op} has no ONNX "
    "counterpart that caps before it masks. Export the model with its eager attention instead (transformers: "
    'attn_implementation="eager"), call softcap_ops.reference.attention, or turn the cap off (softcap=None).'
)
MESSAGE_PACKED = MESSAGE.format(op="varlen_attention_fwd")


def exporting() -> bool:
    """Whether torch.onnx.export is running."""
    return torch.onnx.is_in_onnx_export()


def refuse_if_exporting(op: str) -> None:
    if exporting():
        raise RuntimeError(MESSAGE.format(op=op))


def attention(
    q: Tensor, k: Tensor, v: Tensor, softcap: Any, scale: Any, causal: bool, window: tuple[Any, Any]
) -> tuple[Tensor, Tensor]:
    """What the public function does while exporting: plain attention with the cap off, else the refusal."""
    if softcap:
        raise RuntimeError(MESSAGE.format(op="attention_fwd"))
    return reference.attention(q, k, v, softcap=None, scale=scale, causal=causal, window=window)


def _symbolic(op: str) -> Any:
    def refuse(g: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(MESSAGE.format(op=op))

    return refuse
