"""The Hopper library as its header describes it, written out in PyTorch so that the adapter runs on a CPU.

The header itself says how its structs are laid out: what the adapter packs is read back by it, field by field.
"""

from __future__ import annotations

import ctypes
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
_DTYPES = (torch.bfloat16, torch.float16)


class FakeLibrary:
    """softcap_hopper_fwd on CPU pointers, refusing what the real one refuses; `calls` records the decoded structs."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def softcap_hopper_error_string(self, code: int) -> bytes:
        return b"the driver refused a tensor map"

    def softcap_hopper_fwd(self, arguments: bytes) -> int:
        a = FwdArgs.from_buffer_copy(arguments)
        assert a.struct_size == ctypes.sizeof(FwdArgs) == len(arguments)
        self.calls.append(a)
        q, k, v, out = (_tensor(a, name, "q" if name in ("q", "out") else "k") for name in ("q", "k", "v", "out"))
        options: dict[str, Any] = {"softcap": a.softcap, "scale": a.scale, "causal": bool(a.causal)}
        options["window"] = (a.window_left, a.window_right)
        floats = [t.float() for t in (q, k, v)]
        if a.cu_seqlens_q:
            starts = {f"cu_seqlens_{n}": _at(getattr(a, f"cu_seqlens_{n}"), a.batch + 1, torch.int32) for n in "qk"}
            for name, longest in (("q", a.seqlen_q), ("k", a.seqlen_k)):
                assert max(starts[f"cu_seqlens_{name}"].diff().tolist(), default=0) <= longest
            result, lse = reference.attention_varlen(*floats, **starts, **options)
            lse_shape: tuple[int, ...] = (a.heads_q, a.total_q)
        else:
            result, lse = reference.attention(*floats, **options)
            lse_shape = (a.batch, a.heads_q, a.seqlen_q)
        out.copy_(result)
        _at(a.lse, lse.numel(), torch.float32).view(lse_shape).copy_(lse)
        return 0


def _at(pointer: int, elements: int, dtype: torch.dtype) -> Tensor:
    """The elements that lie at an address."""
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype)


def _tensor(a: Any, name: str, like: str) -> Tensor:
    """A tensor operand, with the alignment that bulk copies ask for."""
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
    monkeypatch.setattr(hopper, "_load", lambda: library)
    monkeypatch.setattr(hopper, "_stream", lambda device: 0x5757)
    return library

