"""Training over two GPUs, NCCL: tensor parallelism and FSDP2 of the small Gemma 2, against one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_gemma2 as gemma
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_nccl_available():
    pytest.skip("needs torch.distributed with NCCL", allow_module_level=True)
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

from cp_ranks import Ranks
from test_checkpoint_fsdp import fsdp, plain, tensor_parallel

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes at a time


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, "nccl")
    yield ranks
    ranks.kill()


def _build(dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Any:
    return gemma.build(**kwargs).to("cuda", dtype)


def _losses(model: Any, tokens: torch.Tensor) -> list[float]:
    return gemma.train(model, tokens, steps=8)


def losses(kind: str, compiled: bool) -> tuple[list[float], list[float], list[float]]:
    """Of training over the ranks, of one process alike, and of one process in float32 (the formula, on the CPU)."""
    from torch.distributed.device_mesh import init_device_mesh

    torch._dynamo.reset()
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("x",))
    everything = gemma.batch(items=8, seqlen=64).cuda()
    mine = everything.chunk(2)[mesh.get_local_rank()] if kind == "fsdp" else everything
    model = _build(wrap=plain if kind == "fsdp" else None)
    if kind == "fsdp":
        fsdp(model, mesh)
    else:
        tensor_parallel(model, mesh, local=kind == "tensor_parallel")
    if compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    trained = torch.tensor(_losses(model, mine), device="cuda")
    dist.all_reduce(trained)
    exact = _losses(gemma.build().float(), everything.cpu())
    return (trained / 2).tolist(), _losses(_build(), everything), exact


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["fsdp", "tensor_parallel", "tensor_parallel_dtensor"])
def test_trains_as_one_process(two: Ranks, kind: str, compiled: bool) -> None:
    for trained, alone, exact in two.run(losses, kind, compiled):
        assert trained[-1] < trained[0] - 0.1, "nothing was learnt"
        drift = max(abs(a - b) for a, b in zip(alone, exact, strict=True))
        error = max(abs(a - b) for a, b in zip(trained, exact, strict=True))
        assert error <= 2 * drift + 0.02, f"{error:.3f} from float32, one process {drift:.3f}"
