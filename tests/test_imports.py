"""Importing costs nothing and survives a broken machine. Each test is a process of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers import run_python

import softcap_ops

PACKAGE = Path(softcap_ops.__file__).parent

# One call of each kind, so that "it imports" means "it works".
USE = """
import torch
q = torch.randn(1, 5, 2, 8, requires_grad=True)
out = softcap_ops.softcap_attention(q, q, q, softcap=5.0, causal=True)
out.sum().backward()
assert q.grad.isfinite().all()
print("works")
"""


def works(script: str, **options: object) -> str:
    done = run_python(script, **options)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_importing_imports() -> None:
    """No kernel library, no compiler, nothing of ONNX, distributed tensors or transformers; and no CUDA context."""
    script = """
        import sys, torch
        before = set(sys.modules)
        import softcap_ops
        heavy = ("flash_attn", "triton", "torch._dynamo", "torch._inductor", "onnx", "transformers",
                 "torch.distributed.tensor", "torch.onnx._internal.exporter", "numpy", "sympy")
        new = set(sys.modules) - before
        print([m for m in heavy if any(n == m or n.startswith((m + ".", m + "_")) for n in new)])
        print(torch.cuda.is_initialized())
    """
    assert works(script) == "[]\nFalse\n"


def test_what_is_looked_for_before_it_is_imported() -> None:
    """Libraries ask importlib whether a module is there: the registrations that wait for it go on waiting."""
    script = """
        import importlib.util
        import torch, softcap_ops
        for name in ("torch.utils.flop_counter", "torch.onnx", "torch.distributed.tensor"):
            for _ in range(2):
                assert importlib.util.find_spec(name) is not None
        from torch.utils.flop_counter import FlopCounterMode
        import torch.onnx
        import torch.distributed.tensor
        from torch.onnx._internal.torchscript_exporter.registration import registry
        q = torch.randn(1, 8, 2, 8)
        with FlopCounterMode(display=False) as counter:
            softcap_ops.softcap_attention(q, q, q, softcap=5.0)
        print(counter.get_total_flops() > 0, registry.is_registered_op("softcap_ops::attention_fwd", 17))
        print(softcap_ops._sharding._registered)
    """
    assert works(script) == "True True\nTrue\n"


def test_type_hints_are_published() -> None:
    """Without the marker a type checker takes every name of an installed package for Any."""
    assert Path(softcap_ops.__file__).with_name("py.typed").is_file()


def test_using_imports_no_flash_attn() -> None:
    """A CPU call asks nothing of a GPU library."""
    script = f"import softcap_ops, sys\n{USE}\nprint([m for m in sys.modules if m.startswith('flash_attn')])"
    assert works(script) == "works\n[]\n"


@pytest.fixture
def flash_attn(tmp_path: Path) -> Path:
    """A folder for sys.path with a flash_attn that cannot be imported, as after an upgrade of torch."""
    for name in ("flash_attn", "flash_attn_interface", "flash_attn_2_cuda", "flash_attn_3"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(
            "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E')"
        )
    return tmp_path


@pytest.mark.parametrize(
    "script",
    [
        f"import softcap_ops\n{USE}",
        f"try: import flash_attn\nexcept ImportError: pass\nimport softcap_ops\n{USE}",
        f"import softcap_ops\ntry: import flash_attn\nexcept ImportError: pass\n{USE}",
    ],
    ids=["alone", "after", "before"],
)
def test_broken_flash_attn(flash_attn: Path, script: str) -> None:
    assert works(script, paths=[str(flash_attn)]) == "works\n"


def test_broken_flash_attn_in_the_reports(flash_attn: Path) -> None:
    """What asks every backend survives as well."""
    script = f"""
import runpy, softcap_ops
{USE}
assert softcap_ops.available_backends()["cpu"] is None
assert "would run on: cpu" in softcap_ops.explain(q, q, q, softcap=5.0)
runpy.run_module("softcap_ops", run_name="__main__")
"""
    assert "works\n" in works(script, paths=[str(flash_attn)])


@pytest.mark.parametrize(
    "order",
    [
        ("torch", "softcap_ops"),
        ("softcap_ops", "torch"),
        ("torch.distributed.tensor", "softcap_ops"),
        ("softcap_ops", "torch.distributed.tensor"),
        ("torch._dynamo", "softcap_ops"),
        ("torch.onnx", "softcap_ops"),
        ("softcap_ops.reference", "softcap_ops.backends.cpu", "softcap_ops"),
        ("flash_attn", "softcap_ops"),
        ("softcap_ops", "flash_attn"),
    ],
    ids=" then ".join,
)
def test_any_order(order: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").write_text("import torch\n__version__ = '2.8.3'\n")
    imports = "\n".join(f"import {name}" for name in order)
    assert works(f"{imports}\n{USE}", paths=[str(tmp_path)]) == "works\n"


@pytest.fixture
def without_extension(tmp_path: Path) -> Path:
    """A folder with the package but for its compiled kernels."""
    shutil.copytree(PACKAGE, tmp_path / "softcap_ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


WITHOUT = """
import torch, softcap_ops
q = torch.randn(1, 5, 2, 8)
print(softcap_ops.available_backends()["cpu"])
for call in (lambda: softcap_ops.softcap_attention(q, q, q, softcap=5.0),
             lambda: softcap_ops.softcap_attention(q, q, q, softcap=5.0, backend="cpu"),
             lambda: torch.ops.softcap_ops.attention_fwd(q, q, q, 5.0)):
    try:
        call()
    except softcap_ops.UnsupportedError as error:
        assert "cpu" in str(error) and softcap_ops.available_backends()["cpu"] in str(error), error
    else:
        raise AssertionError("ran without a kernel")
print(softcap_ops.explain(q, q, q, softcap=5.0).splitlines()[0][:40])
out, lse = softcap_ops.reference.attention(q, q, q, softcap=5.0)
meta = softcap_ops.softcap_attention(*(torch.empty(2, 5, 4, 8, device="meta") for _ in "qkv"), softcap=5.0)
print(tuple(meta.shape))
"""


def test_missing_extension(without_extension: Path) -> None:
    """The package imports, says why it has no kernel, and traces and refers as before."""
    assert works(WITHOUT, paths=[str(without_extension)]).splitlines() == [
        "_C.so was not built for this installation",
        "softcap_ops: no backend can serve this c",
        "(2, 5, 4, 8)",
    ]


def test_extension_that_does_not_load(without_extension: Path) -> None:
    """A file of another architecture or torch: the loader's own words are kept."""
    (without_extension / "softcap_ops" / "_C.so").write_bytes(b"not a library")
    reason, *_ = works(WITHOUT, paths=[str(without_extension)]).splitlines()
    assert reason.startswith("_C.so cannot be loaded: ")
    assert "_C.so" in reason.removeprefix("_C.so")


def test_report() -> None:
    """python -m softcap_ops: versions, each backend, a table."""
    report = works("import runpy; runpy.run_module('softcap_ops', run_name='__main__')")
    assert report.startswith(f"softcap_ops {softcap_ops.__version__}, torch ")
    assert "CPU kernel: loaded" in report
    for name in softcap_ops.available_backends():
        assert name in report


def test_report_without_extension(without_extension: Path) -> None:
    script = "import runpy; runpy.run_module('softcap_ops', run_name='__main__')"
    assert "CPU kernel: _C.so was not built" in works(script, paths=[str(without_extension)])
