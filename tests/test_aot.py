"""An AOTInductor package run from a C++ program (examples/cpp); test_export.py has the rest of export."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import Tensor

import softcap_ops

SOURCE = Path(__file__).parent.parent / "examples" / "cpp" / "run_package.cpp"
PACKAGE_DIR = Path(softcap_ops.__file__).parent.parent
PYTHON_LIBRARY = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("LDLIBRARY") or "none")
PYTHON_HEADER = Path(sysconfig.get_path("include"), "Python.h")

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU test, whose link line leaves CUDA out"),
    pytest.mark.skipif(
        PYTHON_LIBRARY.suffix != ".so" or not PYTHON_LIBRARY.exists() or not PYTHON_HEADER.exists(),
        reason="this Python cannot be embedded: no shared library or no headers",
    ),
]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(32, 3 * 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        return softcap_ops.softcap_attention(q, k, v, softcap=2.0, causal=True, window=(5, 0)).flatten(-2)


def test_from_cpp(tmp_path: Path) -> None:
    """The package imported in an embedded interpreter: the numbers are those of eager."""
    block, x = Block().eval(), torch.ones(2, 9, 32)
    program = torch.export.export(block, (x,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch_dir = Path(torch.__file__).parent
    binary = tmp_path / "run_package"
    subprocess.run(
        [
            "g++", "-std=c++20", "-O0", str(SOURCE), "-o", str(binary),
            f"-I{PYTHON_HEADER.parent}", f"-L{PYTHON_LIBRARY.parent}", f"-Wl,-rpath,{PYTHON_LIBRARY.parent}",
            f"-lpython{sys.version_info.major}.{sys.version_info.minor}", "-isystem", f"{torch_dir}/include",
            f"-L{torch_dir}/lib", f"-Wl,-rpath,{torch_dir}/lib", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10",
        ],
        check=True,
    )  # fmt: skip
    site = sysconfig.get_path("purelib")

    def run(path: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run([binary, package], env=environment, capture_output=True, text=True, timeout=120)

    done = run(os.pathsep.join([str(PACKAGE_DIR), site]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.split()[1]) == pytest.approx(block(x).sum().item(), rel=1e-4)
