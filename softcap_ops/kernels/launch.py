"""Launching: the first call of a kind goes through Triton's JIT, every later one straight to what it compiled.

The JIT looks at each argument's type, value and alignment anew in every call, which takes tens of microseconds with as
many arguments as these kernels have. Here all of that follows from the constants and the dtype: the kernels' integers
have fixed types and are not specialised on, and pointers are aligned (the caller sees to it).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.runtime import _allocation

from ..errors import UnsupportedError
from .configs import Config


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for a kernel's descriptors, where the program around has not told Triton how to get some."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


class Launch:
    """One kernel with its constants and configuration, for tensors of one dtype."""

    def __init__(self, kernel: Any, constants: tuple[Any, ...], config: Config) -> None:
        self.kernel, self.constants, self.config = kernel, constants, config
        self._compiled: dict[int, Any] = {}  # by device index

    @property
    def options(self) -> dict[str, Any]:
        """For the compiler. (Fused multiply-adds: the default of Triton up to 3.9.)"""
        return {"num_warps": self.config.warps, "num_stages": self.config.stages, "enable_fp_fusion": True}

    def __call__(self, device: torch.device, programs: int, *args: Any) -> None:
        """Run `programs` programs on the device's current stream; args are those before the constants."""
        if not isinstance(self.kernel, triton.JITFunction):  # Triton's interpreter, on CPU tensors
            self.kernel[(programs,)](*args, *self.constants)
            return
        index = device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(device, programs, *args)
            return
        if _allocation._allocator.get() is _allocation._NULL_ALLOCATOR:
            triton.set_allocator(_scratch)
        compiled = self._compiled.get(index)
        if compiled is None:
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    "softcap_ops: a Triton kernel that this call needs has not been loaded yet, which cannot be done "
                    "while a CUDA graph is captured. Warm up: run the call once before the capture."
                )
            self._compiled[index] = self.kernel[(programs,)](*args, *self.constants, **self.options)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args,
            *self.constants,
        )  # fmt: skip
