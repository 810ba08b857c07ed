"""What compiling costs: graphs and cold seconds of a 4-layer model with soft-capped attention beside SDPA's.

Each measurement is a process of its own with empty caches; the two models take turns. A Gemma-2-shaped layer (GQA,
sliding window on alternate layers, GeGLU); SDPA has neither cap nor window, so its mask is causal everywhere.

usage: python benchmarks/bench_compile.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, WIDTH, HEADS_Q, HEADS_KV, HEAD_DIM = 4, 128, 4, 2, 32
ATTENTIONS = ("softcap_ops", "sdpa")
MODES = ("inference", "training", "training, dynamic sizes")


class Layer(nn.Module):
    def __init__(self, attention: str, window: int) -> None:
        super().__init__()
        self.attention, self.window = attention, window
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))
        self.qkv = nn.Linear(WIDTH, (HEADS_Q + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS_Q * HEAD_DIM, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before, after, before_mlp, after_mlp = self.norms
        qkv = self.qkv(before(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split([HEADS_Q, HEADS_KV, HEADS_KV], dim=-2)
        x = x + after(self.o(self.attend(q, k, v).flatten(-2)))
        gate, up = self.gate_up(before_mlp(x)).chunk(2, -1)
        return x + after_mlp(self.down(F.gelu(gate, approximate="tanh") * up))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.attention == "sdpa":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        import softcap_ops

        return softcap_ops.softcap_attention(q, k, v, softcap=50.0, causal=True, window=(self.window, -1))


def measure(attention: str, mode: str) -> dict[str, float]:
    """Compile once in this process, its caches empty; seconds from the first call to its result."""
    from torch._dynamo.utils import counters

    if attention == "softcap_ops":
        import softcap_ops  # noqa: F401
    model = nn.Sequential(*(Layer(attention, 63 if i % 2 == 0 else -1) for i in range(LAYERS)))
    training = mode.startswith("training")
    x = torch.randn(2, 128, WIDTH)
    compiled = torch.compile(model, fullgraph=True, dynamic=True if "dynamic" in mode else None)

    def step() -> None:
        with torch.set_grad_enabled(training):
            y = compiled(x)
            if training:
                y.sum().backward()

    # What any first compilation of a process pays (imports, the C++ compiler's precompiled header) is not the model's.
    torch.compile(lambda t: t.sin() + 1)(torch.randn(8))
    counters.clear()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "graphs": counters["stats"]["unique_graphs"]}


def cold(attention: str, mode: str) -> dict[str, float]:
    """`measure` in a fresh process with its own empty Inductor cache."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--one", attention, mode],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
            check=True,
            capture_output=True,
            text=True,
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def machine() -> dict[str, Any]:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("ATTENTION", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for mode in MODES:
            for attention in ATTENTIONS:
                runs.setdefault((mode, attention), []).append(cold(attention, mode))
    rows = []
    print(f"{'mode':<26}{'attention':<14}{'graphs':>7}{'seconds (median)':>18}{'range':>16}")
    for (mode, attention), results in runs.items():
        seconds = [r["seconds"] for r in results]
        row = {
            "mode": mode,
            "attention": attention,
            "graphs": results[0]["graphs"],
            "seconds": statistics.median(seconds),
            "seconds_each": seconds,
        }
        rows.append(row)
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        print(f"{mode:<26}{attention:<14}{row['graphs']:>7}{row['seconds']:>18.1f}{spread:>16}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "layers": LAYERS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
