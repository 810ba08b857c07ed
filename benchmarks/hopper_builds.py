"""Several builds of the Hopper kernels beside their peers: which are right, and how fast, in one run and one file.

usage: hopper_builds.py --lib NAME=PATH[:head_dim,...] [--lib ...] [--json FILE] [--seconds N]
       hopper_builds.py --table FILE      (the numbers of FILE as Markdown tables)

Each build is first checked against float64 by hopper_check.py and hopper_backward_check.py, a process for each head_dim
that may fail or hang: where one does, that build is not timed at that head_dim. Then forward and backward of all builds
and of the peers (FlashAttention-3 and -2 through their raw operators, with and without the cap) are timed side by side
(timing.py). Ratios are medians over the rounds of speeds within a round. Inputs: anchor, scores of deviation 16; cold,
N(0, 1); saturated, every score far outside of the cap. The file is written anew after each shape; after --seconds no
further shape is begun.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import bench_attention
import torch
from bench_attention import Shape
from hopper_backward_check import BackwardLibrary
from hopper_check import libraries
from timing import in_rounds

FOLDER = Path(__file__).parent
SCRIPTS = ("hopper_check.py", "hopper_backward_check.py")
FA3, FA3_CAPPED = "fa3 nocap", "fa3 cap"
SHAPES = {
    shape.name: shape
    for shape in (
        *bench_attention.SHAPES,
        Shape("d64_1k_causal", 16, 1024, 32, 32, 64),
        Shape("d64_16k_causal", 1, 16384, 32, 32, 64),
        Shape("d64_16k_full", 1, 16384, 32, 32, 64, causal=False),
    )
}


def check(builds: dict[str, tuple[str, list[int]]], cases: str, seconds: float) -> dict[str, dict[str, Any]]:
    """At which head_dims each build is right, and what is wrong at the others; all are checked side by side."""
    running = {}
    for name, (path, head_dims) in builds.items():
        for d in head_dims:
            for script in SCRIPTS:
                command = [sys.executable, str(FOLDER / script), "--lib", f"{name}={path}:{d}", "--packed"]
                command += ["--cases", cases, "--seed", "1"]
                running[name, d, script] = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
    found: dict[str, dict[str, Any]] = {
        name: {"right": list(head_dims), "failures": []} for name, (_, head_dims) in builds.items()
    }
    end = time.monotonic() + seconds
    for (name, d, script), process in running.items():
        try:
            text, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + f"\nFAIL {name} d{d}: {script} did not end within {seconds:g} s"
        print(f"---- {name} d{d}: {script}, exit {process.returncode}\n{text}", flush=True)
        if process.returncode != 0:
            build, lines = found[name], text.strip().splitlines()
            build["right"] = [x for x in build["right"] if x != d]
            build["failures"] += [x for x in lines if x.startswith("FAIL ")][:3] or [f"d{d} {script}", *lines[-3:]]
    return found


def inputs(shape: str, kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, dout."""
    _, b, s, hq, hk, d, *_ = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, dout = (torch.randn(b, s, h, d, device="cuda", generator=generator) for h in (hq, hk, hk, hq))
    if kind == "anchor":
        q, k = q * 4, k * 4
    elif kind == "saturated":
        signs = torch.randn(b, s, hk, 1, device="cuda", generator=generator).sign()
        q, k = q.abs() * 20, k.abs() * signs
    return [x.to(dtype) for x in (q, k, v, dout)]


def calls(
    libs: dict[str, Any], names: list[str], shape: str, kind: str, softcap: float, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """name -> (forward, backward) of everything that serves the shape."""
    s = SHAPES[shape]
    q, k, v, dout = inputs(shape, kind, dtype)
    found = {}
    for name, (lib, dims) in libs.items():
        if s.head_dim not in dims:
            continue
        out, lse = torch.empty_like(q), torch.empty(s.batch, s.heads_q, s.seqlen, device="cuda")
        forward = functools.partial(lib.run, lib.fill(q, k, v, out, lse, softcap, None, s.causal, s.sides))
        forward()
        tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": None}
        grads = [torch.empty_like(x) for x in (q, k, v)]
        filled = lib.fill_backward(tensors, grads, softcap, s.head_dim**-0.5, s.causal, s.sides)
        found[name] = (forward, functools.partial(lib.run_backward, filled))
    return found | peers(names, q, k, v, dout, softcap, s)


def peers(names: Any, q: Any, k: Any, v: Any, dout: Any, softcap: float, s: Shape) -> Any:
    """name -> (forward, backward), functions without arguments that run a peer on these inputs; those that import."""
    found: dict[str, Any] = {}
    scale = q.shape[-1] ** -0.5
    if "cudnn" in names and not s.window:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]

        def cudnn() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    leaves[0], leaves[1], leaves[2], is_causal=s.causal, enable_gqa=q.shape[2] != k.shape[2]
                )

        out, g = cudnn(), dout.transpose(1, 2)
        found["cudnn nocap"] = (cudnn, lambda: torch.autograd.grad(out, leaves, g, retain_graph=True))
    grads = [torch.empty_like(x) for x in (q, k, v)]
    if "fa3" in names:
        try:
            import flash_attn_3._C  # noqa: F401

            for label, cap in (("fa3 nocap", 0.0), ("fa3 cap", softcap)):
                options = {
                    "softmax_scale": scale,
                    "is_causal": s.causal,
                    "window_size_left": s.sides[0],
                    "window_size_right": s.sides[1],
                    "softcap": cap,
                }
                forward = functools.partial(torch.ops.flash_attn_3.fwd, q, k, v, **options)
                o, lse, *_ = forward()
                backward = functools.partial(
                    torch.ops.flash_attn_3.bwd, dout, q, k, v, o, lse, *grads, **options, deterministic=False
                )
                found[label] = (forward, backward)
        except Exception as error:
            print("no fa3:", repr(error)[:300])
    if "fa2" in names:
        try:
            from flash_attn import flash_attn_interface as fa2

            for label, cap in (("fa2 nocap", 0.0), ("fa2 cap", softcap)):
                common = {"softmax_scale": scale, "causal": s.causal, "softcap": cap, "alibi_slopes": None}
                common |= {"window_size_left": s.sides[0], "window_size_right": s.sides[1], "dropout_p": 0.0}
                forward = functools.partial(fa2._flash_attn_forward, q, k, v, return_softmax=False, **common)
                o, lse, *_ = forward()
                backward = functools.partial(
                    fa2._flash_attn_backward, dout, q, k, v, o, lse, *grads, deterministic=False, **common
                )
                found[label] = (forward, backward)
        except Exception as error:
            print("no fa2:", repr(error)[:300])
    return found


def rates(runs: dict[str, Any], work: float, rounds: int) -> dict[str, list[float]]:
    """TFLOP/s of each in each round; one that fails is left out."""
    for name, run in list(runs.items()):
        try:
            run()
        except (RuntimeError, NotImplementedError) as error:
            del runs[name]
            print("not timed:", name, repr(error)[:150], flush=True)
    return {name: [work / ms / 1e9 for ms in times] for name, times in in_rounds(runs, rounds).items()}


def rows_of(found: dict[str, list[float]], **facts: Any) -> list[dict[str, Any]]:
    """One row each, with its speed relative to FlashAttention-3."""
    rows = []
    for name, speeds in found.items():
        row = facts | {"name": name, "tflops": round(statistics.median(speeds), 1)}
        row["rounds"] = [round(x, 1) for x in speeds]
        for key, peer in (("to_fa3_nocap", FA3), ("to_fa3_cap", FA3_CAPPED)):
            if peer in found:
                ratios = [x / y for x, y in zip(speeds, found[peer], strict=True)]
                row[key] = round(statistics.median(ratios), 3)
        rows.append(row)
    return rows


def versions(names: list[str]) -> dict[str, str]:
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        found["driver"] = "unknown"
    if "fa2" in names:
        try:
            found["flash_attn"] = metadata.version("flash-attn")
        except metadata.PackageNotFoundError:
            found["flash_attn"] = "not installed"
    return found


def table(report: dict[str, Any]) -> str:
    """Markdown: a table for each direction and kind of inputs; builds also as shares of FlashAttention-3's speeds."""
    rows, text = report["rows"], []
    for direction, kind in dict.fromkeys((r["direction"], r["inputs"]) for r in rows):
        part = [r for r in rows if (r["direction"], r["inputs"]) == (direction, kind)]
        names = list(dict.fromkeys(r["name"] for r in part))
        by = {(r["shape"], r["name"]): r for r in part}
        text += [f"{direction}, {kind} inputs, cap {part[0]['softcap']:g}", ""]
        text += ["| shape | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for shape in dict.fromkeys(r["shape"] for r in part):
            cells = [_cell(by.get((shape, name)), name in report["builds"]) for name in names]
            text.append(f"| {shape} | " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def _cell(row: dict[str, Any] | None, build: bool) -> str:
    if row is None:
        return "-"
    shares = [f"{row[key]:.2f}" for key in ("to_fa3_nocap", "to_fa3_cap") if key in row]
    return f"{row['tflops']:.0f}" + (f" ({', '.join(shares)})" if build and shares else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", default=[], help="NAME=PATH[:head_dim,...]")
    parser.add_argument("--cases", default="", help="of the checks; all unless given")
    parser.add_argument("--check-seconds", type=float, default=150.0)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--inputs", default="anchor,cold")
    parser.add_argument("--peers", default="fa3,fa2")
    parser.add_argument("--softcap", type=float, default=50.0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="of what is timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directions", default="forward,backward")
    parser.add_argument("--seconds", type=float, default=1e9, help="of the whole run")
    parser.add_argument("--json", type=Path, default=Path("hopper_builds.json"))
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    begin = time.monotonic()
    builds = libraries(args.lib, str)  # opened once they are found right
    names = args.peers.split(",")
    report: dict[str, Any] = {"versions": versions(names), "builds": check(builds, args.cases, args.check_seconds)}
    report["rows"] = rows = []
    right = {name: found["right"] for name, found in report["builds"].items()}
    libs = {name: (BackwardLibrary(path), right[name]) for name, (path, _) in builds.items() if right[name]}
    for kind in args.inputs.split(","):
        for shape in args.shapes.split(","):
            if time.monotonic() - begin > args.seconds:
                print("out of time before", shape, kind, flush=True)
                continue
            both = calls(libs, names, shape, kind, args.softcap, getattr(torch, args.dtype))
            for which, direction in enumerate(("forward", "backward")):
                if direction not in args.directions.split(","):
                    continue
                work = SHAPES[shape].flops * (2.5 if which else 1.0)
                runs = {name: pair[which] for name, pair in both.items()}
                facts = {"shape": shape, "direction": direction, "inputs": kind}
                facts |= {"softcap": args.softcap, "dtype": args.dtype}
                rows += rows_of(rates(runs, work, args.rounds), **facts)
            del both, runs
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    wrong = [x for found in report["builds"].values() for x in found["failures"]]
    print(*(wrong or ["all right"]), sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
