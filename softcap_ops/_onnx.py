"""ONNX export: a soft-capped call is refused by name, on every route; with the cap off it exports as plain attention.

ONNX has an Attention operator with a softcap attribute, but its first version masks before it caps and runtimes
disagree on the order (onnx/onnx#7865), which lets masked keys leak. A refusal is better than a model that computes
something else. What meets each route:

- `dynamo=True`, through the public function, the bare op or an exported program: the exporter traces the captured
  graph again to decompose it, then runs each node's fake kernel to promote types. The op's Autograd kernel puts plain
  attention in place of one with the cap off (`as_plain`); any other is refused by its fake (`refuse_if_exporting`).
- `dynamo=False` through the public function: `exporting_torchscript` there, then `attention`.
- `dynamo=False` with the op already in a graph (bare op, traced or scripted module), fall-through mode included:
  a symbolic function registered for each op, which refuses.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _validation, reference
from ._arguments import Options
from ._late import when_imported
from .errors import OnnxExportError

_REMEDY = (
    'Export the model with its eager attention instead (transformers: attn_implementation="eager"), '
    "or call softcap_ops.reference.attention."
)


def message(op: str, is_capped: bool = True) -> str:
    """The one refusal."""
    start = f"softcap_ops: torch.ops.softcap_ops.{op} cannot be exported to ONNX"
    if is_capped:
        return f"{start}: soft-capped attention has no ONNX operator that caps before it masks. {_REMEDY}"
    if op == "attention_fwd":
        return (
            f"{start} in this form, though its cap is off: call softcap_ops.softcap_attention in the module given to "
            "torch.onnx.export (not traced or scripted before, not on inference-mode tensors) and it exports as "
            f"plain attention. {_REMEDY}"
        )
    return f"{start}: it has no ONNX counterpart. {_REMEDY}"


def exporting_torchscript() -> bool:
    """Whether torch.onnx.export(dynamo=False) is tracing this call. Cheap, and False to torch.compile."""
    return torch.jit.is_tracing() and torch.onnx.is_in_onnx_export()


def refuse_if_exporting(op: str, o: Options) -> None:
    """Called by the fake kernels.

    Not while torch.export captures (is_exporting): torch drops the message of an exception that leaves a traced or
    scripted submodule. The exporter runs the op again outside of one.
    """
    if _exporting() and not torch.compiler.is_exporting():
        raise OnnxExportError(message(op, o.softcap_tensor is not None or capped(o.softcap)))


def as_plain(q: Tensor, k: Tensor, v: Tensor, o: Options) -> tuple[Tensor, Tensor] | None:
    """Plain attention, for an exporter that traces a dense op with the cap off; None = not such a call."""
    # The exporter traces tensor subclasses: looking at the type first spares eager calls the rest.
    if type(q) is Tensor or o.softcap_tensor is not None or capped(o.softcap) or not _exporting():
        return None
    return attention(q, k, v, None, o.scale, o.causal, (o.window_left, o.window_right))


def attention(
    q: Tensor, k: Tensor, v: Tensor, softcap: Any, scale: Any, causal: bool, window: tuple[Any, Any]
) -> tuple[Tensor, Tensor]:
    """What a dense call does while it is exported: plain attention with the cap off, else the refusal."""
    if capped(softcap):
        raise OnnxExportError(message("attention_fwd"))
    _validation.inputs(q, k, v, None, Options(None, scale, causal, *window))
    return reference.attention(q, k, v, softcap=None, scale=scale, causal=causal, window=window)


def capped(softcap: Any) -> bool:
    """A symbolic cap counts as one: comparing it with 0 would write this run's answer into the graph."""
    return softcap is not None and (isinstance(softcap, torch.SymFloat) or softcap != 0)


def _exporting() -> bool:
    # Asking torch.onnx would import it (50 ms); while it is not loaded nothing exports.
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def _refuse(op: str, softcap_index: int, g: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """A TorchScript exporter's symbolic function. args are graph values; a constant's is its node's value."""
    node = args[softcap_index].node()
    off = node.mustBeNone() or (node.kind() == "onnx::Constant" and not node.t("value").any())
    raise OnnxExportError(message(op, is_capped=not off))


def _register_symbolics() -> None:
    for op, softcap_index in (
        ("attention_fwd", 3),
        ("attention_bwd", 7),
        ("varlen_attention_fwd", 7),
        ("varlen_attention_bwd", 11),
        ("decode_attention_fwd", 6),
    ):
        # Opset 1 serves opset 9 and later, opset 9 serves 7 and 8.
        for opset in (1, 9):
            torch.onnx.register_custom_op_symbolic(f"softcap_ops::{op}", partial(_refuse, op, softcap_index), opset)


when_imported("torch.onnx", _register_symbolics)  # importing it here would double our own import time
