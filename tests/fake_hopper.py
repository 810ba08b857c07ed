"""The Hopper library as its header describes it, written out in PyTorch so that the adapter runs on a CPU.

The header itself says how its structs are laid out: what the adapter packs is read back by it, field by field.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from softcap_ops import reference
from softcap_ops.backends import hopper

HEADER = Path(__file__).parents[1] / "csrc" / "cuda" / "softcap_hopper.h"
_TYPES = {"uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


def structure(name: str) -> type[ctypes.Structure]:
    """A struct of the header as a ctypes type."""
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", text, re.DOTALL)
    assert body is not None
    fields = []
    for declaration in body[1].split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*(?:const )?(\w+\*?)\s+(.*?)\s*", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        c_type = ctypes.c_void_p if kind.endswith("*") else _TYPES[kind]
        fields += [(n.strip(), c_type) for n in names.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


FwdArgs = structure("softcap_hopper_fwd_args")
BwdArgs = structure("softcap_hopper_bwd_args")
WORKSPACE = 4096
_DTYPES = (torch.bfloat16, torch.float16)


class FakeLibrary:
    """The entry points on CPU pointers, refusing what the real ones refuse; `calls` records the decoded structs."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def softcap_hopper_error_string(self, code: int) -> bytes:
        return b"the driver refused a tensor map"

    def softcap_hopper_fwd(self, arguments: bytes) -> int:
        a = self._decode(FwdArgs, arguments)
        self.calls.append(a)
        q, k, v = (_tensor(a, name).float() for name in "qkv")
        out, lse = _formula(a, q, k, v)
        _tensor(a, "out").copy_(out)
        _at(a.lse, lse.numel(), torch.float32).copy_(lse.flatten())
        return 0

    def softcap_hopper_bwd_workspace(self, arguments: bytes) -> int:
        assert self._decode(BwdArgs, arguments).workspace is None
        return WORKSPACE

    def softcap_hopper_bwd(self, arguments: bytes) -> int:
        a = self._decode(BwdArgs, arguments)
        self.calls.append(a)
        _at(a.workspace, WORKSPACE, torch.uint8).fill_(0xFF)  # it must be there, and no result
        q, k, v = (_tensor(a, name).float() for name in "qkv")
        with torch.enable_grad():
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out, lse = _formula(a, *leaves)
        given = _at(a.lse, lse.numel(), torch.float32).view(lse.shape)
        torch.testing.assert_close(given, lse.detach())
        assert (_tensor(a, "out").float() - out).norm() <= 4e-3 * out.norm()
        dout = _tensor(a, "dout").float()
        dlse = torch.zeros_like(lse)
        if a.dlse:
            dlse = _at(a.dlse, lse.numel(), torch.float32).view(lse.shape).masked_fill(lse.isneginf(), 0.0)
        outputs = [(y, g) for y, g in ((out, dout), (lse, dlse)) if y.requires_grad]
        grads = torch.autograd.grad([y for y, _ in outputs], leaves, [g for _, g in outputs], allow_unused=True)
        for name, leaf, grad in zip(("dq", "dk", "dv"), leaves, grads, strict=True):
            grad = torch.zeros_like(leaf) if grad is None else grad
            _at(getattr(a, name), grad.numel(), _DTYPES[a.dtype]).copy_(grad.flatten())
        return 0

    @staticmethod
    def _decode(kind: Any, arguments: bytes) -> Any:
        a = kind.from_buffer_copy(arguments)
        assert a.struct_size == ctypes.sizeof(kind) == len(arguments)
        return a


def _formula(a: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"softcap": a.softcap, "scale": a.scale, "causal": bool(a.causal)}
    options["window"] = (a.window_left, a.window_right)
    if not a.cu_seqlens_q:
        return reference.attention(q, k, v, **options)
    starts = {f"cu_seqlens_{n}": _at(getattr(a, f"cu_seqlens_{n}"), a.batch + 1, torch.int32) for n in "qk"}
    for name, longest in (("q", a.seqlen_q), ("k", a.seqlen_k)):
        assert max(starts[f"cu_seqlens_{name}"].diff().tolist(), default=0) <= longest
    return reference.attention_varlen(q, k, v, **starts, **options)


def _at(pointer: int, elements: int, dtype: torch.dtype) -> Tensor:
    """The elements that lie at an address."""
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype)


def _tensor(a: Any, name: str) -> Tensor:
    """A tensor operand, with the alignment that bulk copies ask for."""
    like = "k" if name in ("k", "v") else "q"
    heads = getattr(a, f"heads_{like}")
    strides = [getattr(a, f"{name}_stride_{axis}") for axis in ("batch", "token", "head")]
    shape = [a.batch, getattr(a, f"seqlen_{like}"), heads]
    if a.cu_seqlens_q:
        strides, shape = strides[1:], [getattr(a, f"total_{like}"), heads]
    pointer = getattr(a, name)
    if 0 in shape:
        return torch.empty(*shape, a.head_dim, dtype=_DTYPES[a.dtype])
    assert pointer % 16 == 0
    assert all(s % 8 == 0 and s > 0 for s, n in zip(strides, shape, strict=True) if n > 1)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + a.head_dim - 1
    return _at(pointer, extent, _DTYPES[a.dtype]).as_strided([*shape, a.head_dim], [*strides, 1])


def install(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Let the adapter call a fake library, on CPU tensors."""
    library = FakeLibrary()
    monkeypatch.setattr(hopper, "_load", functools.cache(lambda: library))
    monkeypatch.setattr(hopper, "_stream", lambda device: 0x5757)
    return library
