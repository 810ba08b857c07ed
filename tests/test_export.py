"""torch.export and AOTInductor: the op stays one node, sizes may change, files load in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_python
from samples import Sample
from torch import Tensor
from torch.export import Dim, export

import softcap_ops


class Dense(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"softcap": 5.0, "causal": True, "window": (20, -1), **options}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return softcap_ops.softcap_attention(q, k, v, return_lse=True, **self.options)


class Packed(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return softcap_ops.softcap_attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4096, max_seqlen_k=4096, softcap=5.0, causal=True
        )


def dense_inputs(batch: int = 2, seqlen: int = 48, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    sample = Sample("exported", batch=batch, seqlen_q=seqlen, heads_q=4, heads_kv=2)
    return sample.inputs(hot=True, seed=seed).qkv


def packed_inputs(*lengths: int) -> tuple[Tensor, ...]:
    sample = Sample("exported", lengths_q=lengths, lengths_k=lengths)
    return (*sample.inputs(hot=True).qkv, sample.cu_seqlens()[0])


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def op_names(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if str(n.target).startswith("softcap_ops")]


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_static(strict: bool) -> None:
    program = export(Dense(), dense_inputs(), strict=strict)
    assert op_names(program) == ["softcap_ops.attention_fwd.default"]
    assert_same(program.module()(*dense_inputs(seed=1)), Dense()(*dense_inputs(seed=1)))


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_dynamic(strict: bool) -> None:
    """case 60: batch and lengths are symbols, queries and keys apart from each other."""
    batch, seqlen_q, seqlen_k = Dim("batch"), Dim("seqlen_q"), Dim("seqlen_k")
    shapes = ({0: batch, 1: seqlen_q}, {0: batch, 1: seqlen_k}, {0: batch, 1: seqlen_k})
    module = Dense(window=(-1, -1))
    program = export(module, dense_inputs(), dynamic_shapes=shapes, strict=strict)
    for batch_size, length_q, length_k in ((2, 48, 48), (1, 1, 129), (5, 70, 33), (3, 257, 257)):
        q, _, _ = dense_inputs(batch_size, length_q)
        _, k, v = dense_inputs(batch_size, length_k)
        assert_same(program.module()(q, k, v), module(q, k, v))


def test_dynamic_packed() -> None:
    tokens, entries = Dim("tokens"), Dim("entries")
    shapes = ({0: tokens}, {0: tokens}, {0: tokens}, {0: entries})
    program = export(Packed(), packed_inputs(17, 40, 3), dynamic_shapes=shapes)
    assert op_names(program) == ["softcap_ops.varlen_attention_fwd.default"]
    for lengths in ((17, 40, 3), (5, 6), (100, 1, 2, 3, 4)):
        x = packed_inputs(*lengths)
        assert_same(program.module()(*x), Packed()(*x))


def test_decompositions_keep_the_op() -> None:
    program = export(Dense(), dense_inputs()).run_decompositions()
    assert op_names(program) == ["softcap_ops.attention_fwd.default"]
    assert_same(program.module()(*dense_inputs(seed=1)), Dense()(*dense_inputs(seed=1)))


@pytest.mark.parametrize("softcap", [None, 0.0, 5, 5.0])
def test_kinds_of_cap(softcap: float | None) -> None:
    module = Dense(softcap=softcap)
    program = export(module, dense_inputs())
    assert_same(program.module()(*dense_inputs(seed=1)), module(*dense_inputs(seed=1)))


def test_training() -> None:
    """An exported program is differentiable: the op keeps its autograd formula."""
    program = export(Dense(), dense_inputs())

    def gradients(module: Any) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in dense_inputs(seed=1)]
        out, lse = module(*leaves)
        return torch.autograd.grad(out.pow(2).sum() + lse.sum(), leaves)

    assert_same(gradients(program.module()), gradients(Dense()))


def test_saved_program_in_a_fresh_process(tmp_path: Path) -> None:
    """case 60: with softcap_ops imported it runs; without, the error names the op that is missing."""
    inputs = dense_inputs(seed=1)
    torch.export.save(export(Dense(), dense_inputs()), tmp_path / "program.pt2")
    torch.save((inputs, Dense()(*inputs)), tmp_path / "expected.pt")
    script = """
        import sys, torch
        {imports}
        inputs, expected = torch.load("expected.pt")
        out = torch.export.load("program.pt2").module()(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(out, expected))
        print("equal")
    """
    done = run_python(script.format(imports="import softcap_ops"), cwd=tmp_path)
    assert done.stdout == "equal\n", done.stderr
    without = run_python(script.format(imports=""), cwd=tmp_path)
    assert without.returncode != 0
    assert "softcap_ops" in without.stderr


def test_aot_inductor_package_in_a_fresh_process(tmp_path: Path) -> None:
    """case 60: a compiled package, dynamic in the length, with and without softcap_ops imported."""
    seqlen = Dim("seqlen", min=2, max=4096)
    program = export(Dense(), dense_inputs(), dynamic_shapes=({1: seqlen},) * 3)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    inputs = dense_inputs(seqlen=77, seed=1)
    torch.save((inputs, Dense()(*inputs)), tmp_path / "expected.pt")
    script = """
        import sys, torch
        {imports}
        inputs, expected = torch.load("expected.pt")
        out = torch._inductor.aoti_load_package(sys.argv[1])(*inputs)
        torch.testing.assert_close(list(out), list(expected), rtol=1e-5, atol=1e-5)
        print("equal")
    """
    done = run_python(script.format(imports="import softcap_ops"), package, cwd=tmp_path)
    assert done.stdout == "equal\n", done.stderr
    without = run_python(script.format(imports=""), package, cwd=tmp_path)
    assert without.returncode != 0
    assert "softcap_ops" in without.stderr
