"""Every snippet of examples/pytorch runs, in this process."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch._dynamo.config

SNIPPETS = sorted(Path(__file__).parent.parent.joinpath("examples", "pytorch").glob("*.py"))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda path: path.stem)
def test_snippet(snippet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if snippet.stem == "parallel" and (not torch.distributed.is_available() or torch.distributed.is_initialized()):
        pytest.skip("needs torch.distributed, not yet initialized")
    with torch._dynamo.config.patch({}):  # what a snippet sets is set back
        runpy.run_path(str(snippet), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_there_are_snippets() -> None:
    assert {s.stem for s in SNIPPETS} == {
        "autocast", "checkpointing", "compile_lengths", "cuda_graphs", "export_aot", "flops_and_profile", "nested",
        "parallel", "torch_func",
    }  # fmt: skip
