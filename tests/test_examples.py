"""Every snippet of examples/pytorch and examples/models runs, in this process."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch
import torch._dynamo.config

EXAMPLES = Path(__file__).parent.parent.joinpath("examples")
SNIPPETS = sorted(EXAMPLES.joinpath("pytorch").glob("*.py"))
MODELS = sorted(EXAMPLES.joinpath("models").glob("*.py"))
NEEDS = {"finetune_gemma2": "transformers", "megatron_spec": "megatron"}


def run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch._dynamo.config.patch({}):  # what a snippet sets is set back
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda path: path.stem)
def test_snippet(snippet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if snippet.stem == "parallel" and (not torch.distributed.is_available() or torch.distributed.is_initialized()):
        pytest.skip("needs torch.distributed, not yet initialized")
    run(snippet, capsys)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", MODELS, ids=lambda path: path.stem)
def test_model(example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    package = NEEDS.get(example.stem)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    monkeypatch.setattr("sys.argv", [str(example)])
    run(example, capsys)


def test_there_are_snippets() -> None:
    assert {s.stem for s in SNIPPETS} == {
        "autocast", "checkpointing", "compile_lengths", "cuda_graphs", "export_aot", "flops_and_profile", "nested",
        "parallel", "torch_func",
    }  # fmt: skip
    assert {s.stem for s in MODELS} == {"finetune_gemma2", "megatron_spec", "module_swap"}
