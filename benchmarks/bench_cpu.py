"""Soft-capped attention on this machine's CPU, beside what one would use instead, in one process.

    python benchmarks/bench_cpu.py                      # the table of the README, some minutes
    python benchmarks/bench_cpu.py --compiled --rounds 9
    python benchmarks/bench_cpu.py --shapes d64_1k_causal --no-memory
    python benchmarks/bench_cpu.py --table benchmarks/results/cpu.json   # that file as the README's table

Columns: `ours` with the cap, SDPA *without* a cap (it has none), the eager formula with the cap, and, with
`--compiled`, that formula under torch.compile. Rounds are interleaved (A B C A B C ...), so that a change in
the machine's speed meets all alike; each cell is the median. Peak memory is what one call needs on top of its
inputs and its results, as the system sees it (VmHWM in /proc/self/status), in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from softcap_ops import available_backends, softcap_attention

RESULTS = Path(__file__).parent / "results" / "cpu.json"
SOFTCAP = 50.0


@dataclass(frozen=True)
class Shape:
    name: str
    seq: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool = True


SHAPES = [
    Shape(f"d{d}_{seq // 1024}k_{'causal' if causal else 'full'}", seq, heads, heads_kv, d, causal)
    for seq, heads, heads_kv, d in (
        (1024, 8, 8, 64),
        (4096, 4, 4, 64),
        (1024, 8, 4, 128),
        (2048, 8, 4, 128),
        (4096, 8, 4, 128),
        (2048, 8, 4, 256),
        (4096, 4, 2, 256),
    )
    for causal in (True, False)
]


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return softcap_attention(q, k, v, softcap=SOFTCAP, causal=causal)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    s = SOFTCAP * torch.tanh(s / SOFTCAP)
    if causal:
        sq, skv = s.shape[-2:]
        hidden = torch.ones(sq, skv, dtype=torch.bool, device=s.device).triu(1 + skv - sq)
        s = s.masked_fill(hidden, float("-inf"))
    return (s.softmax(-1, dtype=torch.float32).to(v.dtype) @ v).transpose(1, 2)


@functools.cache
def compiled() -> Callable[..., Tensor]:
    return torch.compile(eager, dynamic=False)


def compiled_eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return compiled()(q, k, v, causal)


PROVIDERS: dict[str, Callable[..., Tensor]] = {
    "ours": ours,
    "sdpa_uncapped": sdpa,
    "eager": eager,
    "compiled_eager": compiled_eager,
}


def make_inputs(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v (which require gradients) and dout; q and k are hot enough to bend the cap."""
    torch.manual_seed(0)
    q = torch.randn(1, shape.seq, shape.heads, shape.head_dim) * 3
    k = torch.randn(1, shape.seq, shape.heads_kv, shape.head_dim) * 3
    v = torch.randn(1, shape.seq, shape.heads_kv, shape.head_dim)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)] + [torch.randn_like(q).to(dtype)]


def run(provider: str, backward: bool, shape: Shape, tensors: list[Tensor]) -> list[Tensor]:
    q, k, v, dout = tensors
    attention = PROVIDERS[provider]
    if not backward:
        with torch.no_grad():
            return [attention(q, k, v, shape.causal)]
    out = attention(q, k, v, shape.causal)
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


def median_times(
    providers: list[str], backward: bool, shape: Shape, dtype: torch.dtype, rounds: int
) -> dict[str, float]:
    """Milliseconds of one call of each, over interleaved rounds."""
    tensors = make_inputs(shape, dtype)
    for provider in providers:
        run(provider, backward, shape, tensors)
    times: dict[str, list[float]] = {provider: [] for provider in providers}
    for _ in range(rounds):
        for provider in providers:
            start = time.perf_counter()
            run(provider, backward, shape, tensors)
            times[provider].append((time.perf_counter() - start) * 1e3)
    return {provider: statistics.median(samples) for provider, samples in times.items()}


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_memory_here(provider: str, backward: bool, shape: Shape, dtype: torch.dtype) -> int:
    """Bytes one call needs beyond inputs and results. Meaningful only in a fresh process."""
    small = Shape("warm", 64, shape.heads, shape.heads_kv, shape.head_dim, shape.causal)
    run(provider, backward, small, make_inputs(small, dtype))
    tensors = make_inputs(shape, dtype)
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    results = run(provider, backward, shape, tensors)
    needed = _status("VmHWM") - before
    return max(0, needed - sum(x.untyped_storage().nbytes() for x in results))


def peak_memory(provider: str, backward: bool, shape: Shape, dtype: torch.dtype) -> int | None:
    """The same in a process of its own; None where the system cannot tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    request = json.dumps([provider, backward, asdict(shape), str(dtype).removeprefix("torch.")])
    command = [sys.executable, __file__, "--measure-memory", request]
    # Freed memory must go back to the system, or a call would run unseen in what its preparation left behind.
    limits = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **limits})
    return int(done.stdout.split()[-1])


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def table(rows: list[dict], providers: list[str]) -> str:
    """Markdown: milliseconds, time of the others over ours, and peak extra memory in MB."""
    others = [p for p in providers if p != "ours"]
    head = ["shape", "dtype", "pass", "ours ms", *(f"{p} ms (ratio)" for p in others)]
    with_memory = any(row["peak_bytes"] for row in rows)
    if with_memory:
        head += [f"{p} MB" for p in providers if p != "compiled_eager"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        ms = row["ms"]
        cells = [row["shape"]["name"], row["dtype"], row["pass"], f"{ms['ours']:.1f}"]
        cells += [f"{ms[p]:.1f} ({ms[p] / ms['ours']:.2f})" for p in others]
        if with_memory:
            cells += [f"{row['peak_bytes'][p] / 1e6:.1f}" for p in providers if p in row["peak_bytes"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def readme_table(rows: list[dict]) -> str:
    """Markdown, a line a shape and dtype: forward / forward + backward, the others' times as multiples of ours."""
    pairs: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        pairs.setdefault((row["shape"]["name"], row["dtype"]), {})[row["pass"]] = row
    lines = [
        "| tokens x heads x head_dim | mask | dtype | softcap_ops, ms | SDPA, no cap | eager, capped | peak MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for (_, dtype), row in pairs.items():
        both = row["forward"], row["forward+backward"]
        s = Shape(**both[0]["shape"])
        heads = f"{s.heads}" if s.heads == s.heads_kv else f"{s.heads}({s.heads_kv})"
        ours = " / ".join(f"{r['ms']['ours']:.0f}" for r in both)
        ratios = [" / ".join(f"x{r['ms'][p] / r['ms']['ours']:.2f}" for r in both) for p in ("sdpa_uncapped", "eager")]
        peaks = ", ".join(f"{both[1]['peak_bytes'][p] / 1e6:.1f}" for p in ("ours", "sdpa_uncapped", "eager"))
        cells = [f"{s.seq} x {heads} x {s.head_dim}", "causal" if s.causal else "full", dtype, ours, *ratios, peaks]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="also time the eager formula under torch.compile")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory readings")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the README's table of a result, run nothing")
    parser.add_argument("--measure-memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table:
        print(readme_table(json.loads(args.table.read_text())["rows"]))
        return

    missing = available_backends()["cpu"]
    if missing is not None:
        sys.exit(f"nothing to measure: {missing}")
    if args.measure_memory:
        provider, backward, shape, dtype = json.loads(args.measure_memory)
        print(peak_memory_here(provider, backward, Shape(**shape), getattr(torch, dtype)))
        return

    providers = ["ours", "sdpa_uncapped", "eager"] + (["compiled_eager"] if args.compiled else [])
    rows: list[dict] = []
    for shape in (shape for shape in SHAPES if shape.name in args.shapes):
        for dtype in args.dtypes:
            for backward in (False, True):
                torch_dtype = getattr(torch, dtype)
                ms = median_times(providers, backward, shape, torch_dtype, args.rounds)
                peak = {}
                if not args.no_memory:
                    for provider in providers:
                        if provider != "compiled_eager":  # its peak is the compiler's
                            peak[provider] = peak_memory(provider, backward, shape, torch_dtype)
                step = "forward+backward" if backward else "forward"
                rows.append({"shape": asdict(shape), "dtype": dtype, "pass": step, "ms": ms, "peak_bytes": peak})
                print(table(rows[-1:], providers).splitlines()[-1], file=sys.stderr, flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "isa": torch.ops.softcap_ops._cpu_isa(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "softcap": SOFTCAP,
        "rounds": args.rounds,
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows, providers))


if __name__ == "__main__":
    main()
