"""Finds the block shapes of softcap_ops/kernels/configs.py: times candidates of each Triton kernel on this GPU.

Candidates are compiled beforehand by several processes. A candidate's distance from the first one's result shows that
it computes the same. Times are medians; work that the mask hides is not counted.

usage: python benchmarks/tune_triton.py [--kernels forward,kv,...] [--head-dims 64,128,256] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from bench_attention import SHAPES, Shape, inputs_of
from timing import burst

from softcap_ops._arguments import Parameters
from softcap_ops.backends import triton as backend
from softcap_ops.kernels.configs import Config, Configs, Pass


def _with_exp2(shapes: str, *exp2: int) -> list[Config]:
    """ "queries x keys x warps x stages ...", each with these numbers of exponentials by arithmetic."""
    blocks = [tuple(map(int, shape.split("x"))) for shape in shapes.split()]
    return [Config(m, n, warps, stages, e) for m, n, warps, stages in blocks for e in exp2]


CANDIDATES: dict[str, dict[int, list[Config]]] = {
    "forward": {
        64: _with_exp2("64x64x4x3 64x64x4x4 64x64x4x2 64x32x4x4 128x64x8x3 128x64x4x3", 0, 1, 2),
        128: _with_exp2("64x64x4x3 64x32x4x4 64x32x4x3 64x64x4x2 128x64x4x2", 0, 1, 2),
        256: _with_exp2("128x64x8x2 128x32x8x3 128x32x8x4 64x32x4x2 64x32x4x3", 0, 1, 2),
    },
    "kv": {
        64: _with_exp2("64x64x4x2 64x64x4x3 64x64x4x1 32x64x4x3 32x64x4x4", 0, 1),
        128: _with_exp2("64x64x4x2 32x64x4x2 32x64x4x3 64x64x4x1 64x128x8x2", 0, 1),
    },
    "k": {
        128: _with_exp2("64x64x4x2 32x64x4x3", 0, 1),
        256: _with_exp2("64x128x8x1 32x128x8x2 32x64x4x2 32x64x4x1 16x64x4x2", 0, 1),
    },
    "v": {
        128: _with_exp2("64x64x4x2 32x64x4x3", 0, 1),
        256: _with_exp2("32x64x4x2 64x64x4x1 32x64x4x1 64x128x8x1 16x64x4x3", 0, 1, 2),
    },
    "q": {
        64: _with_exp2("64x64x4x3 64x64x4x2 64x32x4x4 64x64x4x4", 0, 1),
        128: _with_exp2("64x64x4x2 64x64x4x3 64x64x4x1 64x32x4x3 64x32x4x2", 0, 1),
        256: _with_exp2("128x32x8x2 128x64x8x1 128x32x8x1 64x32x4x1 64x16x4x2", 0, 1),
    },
}
TUNED_ON = {64: ("d64_4k_causal",), 128: ("d128_4k_full", "gemma2_27b_8k"), 256: ("d256_4k_full", "gemma2_9b_8k")}
PRODUCTS = {"forward": 2, "kv": 4, "k": 3, "v": 2, "q": 3}  # matrix products a tile
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BASE = Config(64, 64, 4, 1)


class Task(NamedTuple):
    kernel: str  # "forward", or the gradients of a pass
    head_dim: int
    config: Config


class Machine(NamedTuple):
    capability: tuple[int, int]
    dtype: torch.dtype


def plan_of(task: Task, on: Machine) -> Any:
    """A plan of the task's kernel, and nothing else, in its configuration."""
    forward = task.kernel == "forward"
    passes = () if forward else (Pass(task.kernel, task.config),)
    return backend._Plan(
        on.capability, on.dtype, task.head_dim, packed=False, capped=True, running_max=on.dtype == torch.float16,
        fast_tanh=on.dtype != torch.float32, configs=Configs(task.config if forward else BASE, passes),
    )  # fmt: skip


def launch_of(task: Task, on: Machine) -> Any:
    plan = plan_of(task, on)
    return plan.forward if task.kernel == "forward" else plan.backward[0][1]


def compiled(task: Task, on: Machine) -> Any:
    """The task's machine code; what one process compiles, others find in Triton's cache."""
    from triton.backends.compiler import GPUTarget

    from softcap_ops.kernels.ahead import compile_for

    major, minor = on.capability
    return compile_for(launch_of(task, on), on.dtype, GPUTarget("cuda", 10 * major + minor, 32))


def resources_of(task: Task, on: Machine) -> tuple[Any, str]:
    """The task's resources, and why it cannot be compiled."""
    from softcap_ops.kernels.ahead import resources

    try:
        return resources(compiled(task, on)), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error)[:100]}"


class Runner:
    """Runs the kernels of one shape."""

    def __init__(self, s: Shape, on: Machine) -> None:
        self.shape, self.on = s, on
        qkv, dout = inputs_of(s, s.batch, s.seqlen)
        self.q, self.k, self.v = (t.detach().to(on.dtype) for t in qkv)
        self.dout = dout.to(on.dtype)
        self.saved: Any = None  # out, lse
        self.results: dict[str, Any] = {}  # of each kernel's first candidate

    def _call(self, task: Task, recorded: list[Any]) -> Any:
        plan, launch = plan_of(task, self.on), launch_of(task, self.on)
        launch._compiled[torch.cuda.current_device()] = compiled(task, self.on)

        def record(*arguments: Any) -> None:
            recorded[:] = launch, arguments
            launch(*arguments)

        record.config = task.config  # type: ignore[attr-defined]
        s = self.shape
        p = Parameters(s.softcap, s.head_dim**-0.5, s.causal, s.sides, False)
        setattr(backend, "_plan", lambda *facts: plan)  # noqa: B010
        backend._plan_and_numbers.cache_clear()
        if task.kernel == "forward":
            plan.forward = record
            return backend.forward(self.q, self.k, self.v, None, p)
        plan.backward = [(task.kernel, record)]
        mask = "q" in task.kernel, "k" in task.kernel, "v" in task.kernel
        out, lse = self.saved
        return backend.backward(self.dout, None, self.q, self.k, self.v, out, lse, None, p, mask)

    def tflops(self, task: Task) -> tuple[float, float]:
        """Of the kernel alone, its own products counted; and its distance from the first candidate's results."""
        recorded: list[Any] = []
        results = self._call(task, recorded)
        if task.kernel == "forward" and self.saved is None:
            self.saved = results
        first = self.results.setdefault(task.kernel, [t.clone() for t in results])
        distance = max(((a - b).norm() / b.norm()).item() for a, b in zip(results, first, strict=True) if a.numel())
        launch, arguments = recorded
        once = burst(lambda: launch(*arguments), 1)
        repeats = max(1, min(10, int(6 / once)))
        ms = statistics.median(burst(lambda: launch(*arguments), repeats) for _ in range(3))
        return PRODUCTS[task.kernel] / 2 * self.shape.flops / ms / 1e9, distance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(CANDIDATES))
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--compile-only", default="", metavar="MAJOR.MINOR", help="no GPU needed")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--wait-for", default=0, type=int, metavar="PID", help="time nothing while this process runs")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    major, minor = map(int, args.compile_only.split(".")) if args.compile_only else torch.cuda.get_device_capability()
    on = Machine((major, minor), DTYPES[args.dtype])
    head_dims, kernels = [int(d) for d in args.head_dims.split(",")], args.kernels.split(",")
    # The first candidate of the forward gives the backward's inputs.
    tasks = [Task("forward", d, CANDIDATES["forward"][d][0]) for d in head_dims if "forward" not in kernels]
    tasks += [Task(k, d, c) for k in kernels for d in head_dims for c in CANDIDATES[k].get(d, [])]
    start = time.perf_counter()
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(resources_of, tasks, [on] * len(tasks)))
    print(f"{len(tasks)} candidates compiled in {time.perf_counter() - start:.0f} s")
    good: dict[Task, Any] = {}
    for task, (used, error) in zip(tasks, found, strict=True):
        if error or used.shared > 227 * 1024:
            print(f"left out: {task.kernel} {task.head_dim} {tuple(task.config)}: {used or error}")
            continue
        good[task] = used
        if args.compile_only:
            print(f"{task.kernel} {task.head_dim} {tuple(task.config)}: {used}")
    if args.compile_only:
        return
    while args.wait_for and os.path.exists(f"/proc/{args.wait_for}"):
        time.sleep(0.5)
    rows = []
    for s in SHAPES:
        if s.head_dim in head_dims and s.name in TUNED_ON[s.head_dim]:
            runner = Runner(s, on)
            mine = []
            for task in good:
                if task.head_dim == s.head_dim:
                    try:
                        speed, distance = runner.tflops(task)
                        mine.append({"shape": s.name, "kernel": task.kernel, "config": tuple(task.config),
                                     "tflops": speed, "distance": distance, "stack": good[task].stack})  # fmt: skip
                    except Exception as error:
                        print(f"{s.name} {task}: {type(error).__name__}: {str(error)[:100]}")
            for row in sorted(mine, key=lambda r: (r["kernel"], -r["tflops"])):
                where = f"{row['shape']:16s} {row['kernel']:8s} {row['config']!s:22s}"
                print(f"{where} {row['tflops']:5.0f} TFLOP/s  {row['distance']:.1e}  {row['stack']} B spilled")
            rows += mine
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
