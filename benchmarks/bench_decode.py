"""One step of decoding on a KV cache: microseconds, beside what one would use instead, in one process.

    python benchmarks/bench_decode.py                       # on this machine's CPU: writes results/decode_cpu.json
    python benchmarks/bench_decode.py --device cuda --json FILE

CPU: ours beside the eager formula on the keys there are (transformers' way: key heads repeated, scores capped), and
SDPA *without* a cap. CUDA: ours over each backend beside that FlashAttention's own flash_attn_with_kvcache, both
captured into CUDA graphs (device time) and called from Python (what the host needs for one call). Rounds are
interleaved; each cell is the median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcap_ops import available_backends, softcap_attention_decode

RESULTS = Path(__file__).parent / "results" / "decode_cpu.json"
BLOCK_SIZE = 256
Step = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    keys: int
    heads_q: int
    heads_kv: int
    head_dim: int
    queries: int = 1
    window: int = 0  # tokens seen, the current one included; 0 = all
    paged: bool = False
    softcap: float = 50.0

    @property
    def sides(self) -> tuple[int, int]:
        return (self.window - 1, 0) if self.window else (-1, -1)

    @property
    def gigabytes(self) -> float:
        """Keys and values that one step must read, in bfloat16."""
        seen = min(self.keys, self.window + self.queries - 1) if self.window else self.keys
        return 4e-9 * self.batch * seen * self.heads_kv * self.head_dim


CPU_SHAPES = (
    Shape("gemma2_9b_1k", 1, 1024, 16, 8, 256),
    Shape("gemma2_9b_4k", 1, 4096, 16, 8, 256),
    Shape("gemma2_9b_4k_paged", 1, 4096, 16, 8, 256, paged=True),
    Shape("gemma2_9b_4k_batch_4", 4, 4096, 16, 8, 256),
    Shape("gemma2_9b_8k_window_4k", 1, 8192, 16, 8, 256, window=4096),
    Shape("gemma2_27b_4k", 1, 4096, 32, 16, 128),
    Shape("grok1_4k", 1, 4096, 48, 8, 128, softcap=30.0),
    Shape("gemma2_9b_4k_4_queries", 1, 4096, 16, 8, 256, queries=4),
)
CUDA_SHAPES = (
    Shape("gemma2_9b_1k", 1, 1024, 16, 8, 256),
    Shape("gemma2_9b_8k", 1, 8192, 16, 8, 256),
    Shape("gemma2_9b_8k_batch_16", 16, 8192, 16, 8, 256),
    Shape("gemma2_9b_8k_batch_16_paged", 16, 8192, 16, 8, 256, paged=True),
    Shape("gemma2_9b_8k_batch_16_window_4k", 16, 8192, 16, 8, 256, window=4096),
    Shape("gemma2_27b_8k_batch_16", 16, 8192, 32, 16, 128),
    Shape("grok1_8k_batch_16", 16, 8192, 48, 8, 128, softcap=30.0),
    Shape("gemma2_9b_8k_batch_16_4_queries", 16, 8192, 16, 8, 256, queries=4),
)


class Call:
    """The tensors of one shape; the cache has room for an eighth more keys than there are."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        g = torch.Generator(device).manual_seed(0)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=g, device=device).to(dtype)

        s = self.shape = shape
        room = (s.keys * 9 // 8 + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.q = 4 * randn(s.batch, s.queries, s.heads_q, s.head_dim)
        self.k, self.v = 4 * randn(s.batch, room, s.heads_kv, s.head_dim), randn(s.batch, room, s.heads_kv, s.head_dim)
        self.seqlens = torch.full((s.batch,), s.keys, dtype=torch.int32, device=device)
        self.table: Tensor | None = None
        if s.paged:
            blocks = s.batch * room // BLOCK_SIZE
            order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
            self.table = order.view(s.batch, -1)
            self.k, self.v = (t.unflatten(1, (-1, BLOCK_SIZE)).flatten(0, 1) for t in (self.k, self.v))

    def ours(self, backend: str | None = None) -> Tensor:
        s = self.shape
        return softcap_attention_decode(
            self.q, self.k, self.v, self.seqlens, block_table=self.table, softcap=s.softcap, window=s.sides,
            backend=backend,
        )  # fmt: skip

    def _keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, S, D): the keys there are, those of blocks gathered, as another implementation needs them."""
        k, v = self.k, self.v
        if self.table is not None:
            k, v = (t[self.table].flatten(1, 2) for t in (k, v))
        first = max(0, self.shape.keys - self.shape.window - self.shape.queries + 1) if self.shape.window else 0
        k, v = (t[:, first : self.shape.keys].transpose(1, 2) for t in (k, v))
        return self.q.transpose(1, 2), k, v

    def _hidden(self, keys: int) -> Tensor | None:
        """Keys that a query does not see, where there are several queries."""
        if self.shape.queries == 1:
            return None
        ones = torch.ones(self.shape.queries, keys, dtype=torch.bool, device=self.q.device)
        return ones.triu(1 + keys - self.shape.queries)

    def eager(self) -> Tensor:
        s = self.shape
        q, k, v = self._keys()
        k, v = (t.repeat_interleave(s.heads_q // s.heads_kv, 1) for t in (k, v))
        scores = s.softcap * torch.tanh(q @ k.mT * s.head_dim**-0.5 / s.softcap)
        if (hidden := self._hidden(k.shape[2])) is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return (scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v).transpose(1, 2)

    def sdpa(self) -> Tensor:
        q, k, v = self._keys()
        hidden = self._hidden(k.shape[2])
        mask = None if hidden is None else ~hidden
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def flash(self, module: str) -> Tensor:
        """FlashAttention's own function for caches."""
        function = __import__(module, fromlist=["flash_attn_with_kvcache"]).flash_attn_with_kvcache
        s, table = self.shape, {"block_table" if module == "flash_attn" else "page_table": self.table}
        return function(
            self.q, self.k, self.v, cache_seqlens=self.seqlens, causal=True, window_size=s.sides, softcap=s.softcap,
            **table,
        )  # fmt: skip


def cpu_steps(call: Call) -> dict[str, Step]:
    return {"ours": call.ours, "sdpa_uncapped": call.sdpa, "eager": call.eager}


def cuda_steps(call: Call) -> dict[str, Step]:
    """Ours over each backend that serves the call, each beside its FlashAttention."""
    steps: dict[str, Step] = {}
    modules = {"fa2": ("flash_attn",), "fa3": ("flash_attn_interface", "fa3_fwd_interface")}
    for backend, reason in available_backends().items():
        if backend == "cpu" or reason is not None:
            continue
        steps[f"ours, {backend}"] = lambda backend=backend: call.ours(backend)  # type: ignore[misc]
        for module in modules.get(backend, ()):
            steps[f"{module}.flash_attn_with_kvcache"] = lambda module=module: call.flash(module)  # type: ignore[misc]
    steps["eager"] = call.eager
    return {name: step for name, step in steps.items() if _runs(name, step)}


def _runs(name: str, step: Step) -> bool:
    try:
        step()
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError):
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
        return False
    return True


def cpu_times(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Microseconds of one call of each, over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(samples) for name, samples in times.items()}


def captured(step: Step) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph


def device_times(steps: dict[str, Step], rounds: int, replays: int = 10) -> dict[str, float]:
    """Microseconds of one replay of each step's graph."""
    graphs = {name: captured(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / replays)
    return {name: statistics.median(samples) for name, samples in times.items()}


def host_times(steps: dict[str, Step], rounds: int, calls: int = 20) -> dict[str, float]:
    """Microseconds until Python has its result back, the device still working."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                step()
            times[name].append((time.perf_counter() - start) * 1e6 / calls)
    return {name: statistics.median(samples) for name, samples in times.items()}


def distances(call: Call, steps: dict[str, Step]) -> dict[str, float]:
    """Relative to the eager formula in float32 (float64 for float32 inputs): none of them computes something else."""
    wide = Call.__new__(Call)
    wide.__dict__.update(call.__dict__)
    dtype = torch.float64 if call.q.dtype == torch.float32 else torch.float32
    wide.q, wide.k, wide.v = (t.to(dtype) for t in (call.q, call.k, call.v))
    expected = wide.eager()
    return {name: ((step().to(dtype) - expected).norm() / expected.norm()).item() for name, step in steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help=f"where to write; {RESULTS.name} by default on the CPU")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    rows: list[dict[str, Any]] = []
    for shape in CPU_SHAPES if on_cpu else CUDA_SHAPES:
        if args.shapes and shape.name not in args.shapes:
            continue
        for dtype in args.dtypes or (["float32", "bfloat16"] if on_cpu else ["bfloat16"]):
            call = Call(shape, getattr(torch, dtype), args.device)
            with torch.no_grad():
                steps = cpu_steps(call) if on_cpu else cuda_steps(call)
                row: dict[str, Any] = {"shape": asdict(shape), "dtype": dtype, "error": distances(call, steps)}
                if on_cpu:
                    row["us"] = cpu_times(steps, args.rounds)
                else:
                    row["us"] = device_times(steps, args.rounds)
                    row["host_us"] = host_times(steps, args.rounds)
            rows.append(row)
            rate = shape.gigabytes * (2 if dtype == "float32" else 1) * 1e6
            print(f"{shape.name}, {dtype}")
            for name, us in row["us"].items():
                host = f"  host {row['host_us'][name]:7.1f} us" if "host_us" in row else ""
                print(
                    f"  {name:45} {us:9.1f} us {rate / us:7.1f} GB/s{host}  error {row['error'][name]:.1e}", flush=True
                )
    path = args.json or (RESULTS if on_cpu else None)
    if path is None:
        return
    machine: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if on_cpu:
        from bench_cpu import cpu_name

        machine |= {"cpu": cpu_name(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
        machine |= {"isa": torch.ops.softcap_ops._cpu_isa(), "system": platform.platform()}
    else:
        machine |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    report = machine | {"rounds": args.rounds, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
