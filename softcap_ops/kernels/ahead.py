"""Compiling a launch for a GPU that need not be here, and reading what it takes of that GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .launch import Launch

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_OF_THE_DTYPE = {"Q", "K", "V", "Out", "DOut", "Dq", "Dk", "Dv"}
_FLOATS = {"tanh_scale", "score_scale", "shift", "scale"}


class Resources(NamedTuple):
    registers: int  # of a thread
    stack: int  # bytes of a thread: what was spilled
    shared: int  # bytes of a program


def compile_for(launch: Launch, dtype: torch.dtype, target: GPUTarget) -> Any:
    """What the first call of `launch` on tensors of `dtype` would compile, for another GPU."""
    kernel = launch.kernel
    names = [p.name for p in kernel.params]
    constants = dict(zip([p.name for p in kernel.params if p.is_constexpr], launch.constants, strict=True))
    signature, constexprs, attributes = {}, {}, {}
    for i, p in enumerate(kernel.params):
        switch = {"CuQ": "PACKED", "CuK": "PACKED", "DLse": "HAS_DLSE"}.get(p.name)
        absent = switch is not None and not constants[switch]
        if p.is_constexpr or absent:
            signature[p.name], constexprs[(i,)] = "constexpr", constants.get(p.name)
        elif p.name in _FLOATS:
            signature[p.name] = "fp32"
        elif not p.name[0].isupper():
            signature[p.name] = p.annotation_type or "i32"
        else:
            own = p.name in _OF_THE_DTYPE
            signature[p.name] = f"*{_TYPES[dtype] if own else 'i32' if p.name[:2] == 'Cu' else 'fp32'}"
            if not p.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
    assert list(signature) == names
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=launch.options)


def resources(compiled: Any) -> Resources:
    """Registers and spills of a compiled kernel as its machine code states them; shared memory by Triton."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "kernel.cubin")
        code.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(code)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return Resources(registers, stack, compiled.metadata.shared)
