"""torch.export with dynamic sizes, saved and loaded; and, where a C++ compiler is at hand, an AOTInductor package.

A process that loads either must import softcap_ops first: the file holds the operator's name, not its kernels.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from softcap_ops import softcap_attention


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(32, 3 * 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        return softcap_attention(q, k, v, softcap=50.0, causal=True).flatten(-2)


block = Block().eval()
sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seqlen", min=2, max=4096)}
program = torch.export.export(block, (torch.randn(2, 16, 32),), dynamic_shapes=(sizes,))
x = torch.randn(5, 100, 32)  # other sizes than those exported with

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "block.pt2")
    torch.export.save(program, file)
    torch.testing.assert_close(torch.export.load(file).module()(x), block(x))
    print(f"exported program: {file.stat().st_size} bytes, right at {tuple(x.shape)}")
    if shutil.which("g++"):
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder, "aoti.pt2")))
        with torch.no_grad():
            torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), block(x))
        print(f"AOTInductor package: {Path(package).stat().st_size} bytes, right at {tuple(x.shape)}")
