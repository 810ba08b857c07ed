"""Speed, error and memory of soft-capped attention on one GPU: ours over each backend beside its peers, in one run.

Peers: FlashAttention-2 and -3 called directly, FA3 and cuDNN (SDPA) without the cap, FlexAttention with exact and
approximate tanh, and the eager formula. Times are medians over rounds (timing.py); work that the mask hides is not
counted, a backward is 2.5 forwards. Inputs are hot: scores of standard deviation 16, where a cap of 50 or 30 bends.
Errors are against the formula in float32 on the first 1024 tokens.

usage: python benchmarks/bench_attention.py [--only NAME,...] [--shapes NAME,...] [--together]
           [--json FILE] [--plot FILE]
       python benchmarks/bench_attention.py --table FILE [--of tflops|ms|mib]     (of FILE, in Markdown)

The shapes few_* have few queries on many keys, where only splitting the keys fills a GPU: they are measured when named.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timing import burst, in_rounds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import softcap_ops
from softcap_ops import reference


class Shape(NamedTuple):
    name: str
    batch: int
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool = True
    window: int = 0  # tokens seen, the current one included; 0 = all
    softcap: float = 50.0
    queries: int = 0  # 0 = as many as keys; else unmasked

    @property
    def flops(self) -> float:
        """Of one forward: two products of 2 * head_dim operations for each visible pair."""
        s, w = self.seqlen, min(self.window, self.seqlen)
        pairs = w * s - w * w / 2 if w else s * s / 2 if self.causal else (self.queries or s) * s
        return 4.0 * self.batch * self.heads_q * self.head_dim * pairs

    @property
    def sides(self) -> tuple[int, int]:
        return (self.window - 1, 0) if self.window else (-1, -1)


SHAPES = (
    Shape("d64_4k_causal", 4, 4096, 32, 32, 64),
    Shape("d128_1k_causal", 16, 1024, 16, 16, 128),
    Shape("d128_4k_full", 4, 4096, 16, 16, 128, causal=False),
    Shape("d128_4k_causal", 4, 4096, 16, 16, 128),
    Shape("d128_16k_full", 1, 16384, 16, 16, 128, causal=False, softcap=30.0),
    Shape("d128_16k_causal", 1, 16384, 16, 16, 128),
    Shape("d256_4k_full", 4, 4096, 8, 8, 256, causal=False),
    Shape("d256_4k_causal", 4, 4096, 8, 8, 256),
    Shape("gemma2_27b_8k", 1, 8192, 32, 16, 128),
    Shape("gemma2_9b_8k", 1, 8192, 16, 8, 256),
    Shape("gemma2_9b_8k_swa", 1, 8192, 16, 8, 256, window=4096),
)
FEW_QUERIES = tuple(
    Shape(f"few_{batch}x{queries}", batch, 8192, 32, 16, 128, causal=False, queries=queries)
    for batch, queries in ((1, 1), (1, 16), (1, 128), (1, 256), (8, 1), (8, 16), (8, 64))
)
CHECKED = 1024  # tokens on which the error is taken

Attention = Callable[[Tensor, Tensor, Tensor, Shape], Tensor]


@dataclass
class Row:
    shape: str
    provider: str
    forward_ms: float | None = None
    forward_tflops: float | None = None
    backward_ms: float | None = None
    backward_tflops: float | None = None
    error_out: float | None = None
    error_grad: float | None = None
    forward_mib: float | None = None  # peak above the inputs
    backward_mib: float | None = None
    note: str = ""


# ---- providers -------------------------------------------------------------------------------------------------


def providers() -> dict[str, Attention]:
    """Every way to compute it that is installed here. A name that ends in "no cap" computes plain attention."""
    found: dict[str, Attention] = {}
    for name, reason in softcap_ops.available_backends().items():
        if name != "cpu" and reason is None:
            found[f"ours, {name}"] = _ours(name)
    for name, load in (
        ("fa2", _fa2), ("fa3", _fa3), ("flex", _flex_exact), ("flex approx", _flex_approximate),
    ):  # fmt: skip
        try:
            found |= load()
        except Exception as error:
            print(f"no {name}: {type(error).__name__}: {error}")
    found["cudnn, no cap"] = _cudnn
    found["eager"] = _eager
    return found


def _ours(backend: str) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor, s: Shape) -> Tensor:
        return softcap_ops.softcap_attention(
            q, k, v, softcap=s.softcap, causal=s.causal, window=s.sides, backend=backend
        )

    return call


def _fa2() -> dict[str, Attention]:
    from flash_attn import flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor, s: Shape) -> Tensor:
        return flash_attn_func(q, k, v, causal=s.causal, window_size=s.sides, softcap=s.softcap)

    return {"fa2 direct": call}


def _fa3() -> dict[str, Attention]:
    from flash_attn_interface import flash_attn_func

    def call(softcap: bool) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor, s: Shape) -> Tensor:
            cap = s.softcap if softcap else 0.0
            out = flash_attn_func(q, k, v, causal=s.causal, window_size=s.sides, softcap=cap)
            return out[0] if isinstance(out, tuple) else out

        return run

    return {"fa3 direct": call(True), "fa3, no cap": call(False)}


def _flex(name: str, score_mod_of: Callable[[float], Any]) -> dict[str, Attention]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 512
    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[tuple[int, bool, int], Any] = {}
    mods: dict[float, Any] = {}

    def call(q: Tensor, k: Tensor, v: Tensor, s: Shape) -> Tensor:
        key = (q.shape[1], s.causal, s.window)
        if key not in masks:
            n, w = q.shape[1], s.window

            def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
                return (i >= j) & (i - j < w) if w else i >= j

            masks[key] = create_block_mask(visible, None, None, n, n, device="cuda") if s.causal else None
        if s.softcap not in mods:
            mods[s.softcap] = score_mod_of(s.softcap)
        qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
        gqa = s.heads_q != s.heads_kv
        return compiled(qt, kt, vt, score_mod=mods[s.softcap], block_mask=masks[key], enable_gqa=gqa).transpose(1, 2)

    return {name: call}


def _flex_exact() -> dict[str, Attention]:
    def score_mod_of(softcap: float) -> Any:
        return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)

    return _flex("flex, exact tanh", score_mod_of)


def _flex_approximate() -> dict[str, Attention]:
    from attn_gym.mods import generate_tanh_softcap

    return _flex("flex, approximate tanh", lambda softcap: generate_tanh_softcap(softcap, approx=True))


def _cudnn(q: Tensor, k: Tensor, v: Tensor, s: Shape) -> Tensor:
    if s.window:
        raise NotImplementedError("no window")
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    gqa = s.heads_q != s.heads_kv
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(qt, kt, vt, is_causal=s.causal, enable_gqa=gqa).transpose(1, 2)


def _eager(q: Tensor, k: Tensor, v: Tensor, s: Shape) -> Tensor:
    return reference.attention(q, k, v, softcap=s.softcap, causal=s.causal, window=s.sides)[0]


# ---- measuring -------------------------------------------------------------------------------------------------


def inputs_of(s: Shape, batch: int, seqlen: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """q, k, v that require gradients, and dout."""
    g = torch.Generator("cuda").manual_seed(0)
    queries = min(s.queries or seqlen, seqlen)

    def randn(tokens: int, heads: int) -> Tensor:
        return torch.randn(batch, tokens, heads, s.head_dim, generator=g, device="cuda")

    q, k = 4 * randn(queries, s.heads_q), 4 * randn(seqlen, s.heads_kv)
    v, dout = randn(seqlen, s.heads_kv), randn(queries, s.heads_q)
    q, k, v = (t.bfloat16().requires_grad_() for t in (q, k, v))
    return (q, k, v), dout.bfloat16()


def errors(attention: Attention, s: Shape, capped: bool) -> tuple[float, float | None]:
    leaves, dout = inputs_of(s, 1, min(CHECKED, s.seqlen))
    exact = [t.detach().float().requires_grad_() for t in leaves]
    cap = s.softcap if capped else None
    expected, _ = reference.attention(*exact, softcap=cap, causal=s.causal, window=s.sides)
    expected_grads = torch.autograd.grad(expected, exact, dout.float())
    with torch.no_grad():
        error_out = _distance(attention(*leaves, s), expected)
    try:
        grads = torch.autograd.grad(attention(*leaves, s), leaves, dout)
    except NotImplementedError:
        return error_out, None
    return error_out, max(_distance(a, b) for a, b in zip(grads, expected_grads, strict=True))


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.detach().float() - b.detach()).norm() / b.detach().norm()).item()


def _peak_mib(call: Callable[[], object]) -> float:
    call()  # the first may also make masks and load kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class Turn(contextlib.AbstractContextManager[None]):
    """One shape's turn to be timed, where each has a process of its own: they compile together, and are timed alone."""

    def __init__(self, folder: str, shape: str, shapes: int) -> None:
        self.folder, self.shape, self.shapes = Path(folder), shape, shapes

    def __enter__(self) -> None:
        (self.folder / f"{self.shape}.ready").touch()
        while len(list(self.folder.glob("*.ready"))) < self.shapes:
            time.sleep(0.1)
        self.lock = (self.folder / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        self.lock.close()


def measure(
    s: Shape, chosen: dict[str, Attention], rounds: int, turn: contextlib.AbstractContextManager[None]
) -> list[Row]:
    rows = {name: Row(s.name, name) for name in chosen}
    leaves, dout = inputs_of(s, s.batch, s.seqlen)
    forwards: dict[str, Callable[[], object]] = {}
    backwards: dict[str, Callable[[], object]] = {}

    def prepare(name: str, attention: Attention) -> None:
        row = rows[name]
        out: Any = None
        try:
            row.error_out, row.error_grad = errors(attention, s, capped=not name.endswith("no cap"))

            def forward(attention: Attention = attention) -> object:
                with torch.no_grad():
                    return attention(*leaves, s)

            row.forward_mib = _peak_mib(forward)
            if name != "eager":
                forwards[name] = forward
            out = attention(*leaves, s)

            def backward(out: Tensor = out) -> object:
                return torch.autograd.grad(out, leaves, dout, retain_graph=True)

            row.backward_mib = _peak_mib(backward)
            if name == "eager":  # too large to keep beside the others
                row.forward_ms, row.backward_ms = burst(forward, 2), burst(backward, 2)
            else:
                backwards[name] = backward
        except (RuntimeError, NotImplementedError) as error:
            row.note = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"

    for name, attention in chosen.items():
        if name != "eager":
            prepare(name, attention)
    torch.cuda.synchronize()
    with turn:
        for name, times in in_rounds(forwards, rounds).items():
            rows[name].forward_ms = statistics.median(times)
        for name, times in in_rounds(backwards, rounds).items():
            rows[name].backward_ms = statistics.median(times)
        if "eager" in chosen:
            prepare("eager", chosen["eager"])
        torch.cuda.empty_cache()
    for row in rows.values():
        row.forward_tflops = s.flops / row.forward_ms / 1e9 if row.forward_ms else None
        row.backward_tflops = 2.5 * s.flops / row.backward_ms / 1e9 if row.backward_ms else None
    return list(rows.values())


# ---- reporting -------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]], of: str = "tflops") -> str:
    """Markdown: a line a shape, forward / backward of each provider in `of`: "tflops" (TFLOP/s), "ms" or "mib"."""
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    names = list(dict.fromkeys(r["provider"] for r in rows))
    cells = {(r["shape"], r["provider"]): r for r in rows}

    def cell(shape: str, name: str) -> str:
        r = cells.get((shape, name), {})
        digits = 3 if of == "ms" else 0
        f, b = (f"{x:.{digits}f}" if (x := r.get(f"{way}_{of}")) else "-" for way in ("forward", "backward"))
        return f"{f} / {b}"

    lines = ["| shape | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {s} | " + " | ".join(cell(s, n) for n in names) + " |" for s in shapes]
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    names = [n for n in dict.fromkeys(r["provider"] for r in rows) if n != "eager"]
    figure, axes = plt.subplots(2, 1, figsize=(13, 8), sharex=True)
    for axis, way in zip(axes, ("forward", "backward"), strict=True):
        for i, name in enumerate(names):
            values = {r["shape"]: r[f"{way}_tflops"] or 0.0 for r in rows if r["provider"] == name}
            positions = [x + 0.8 * (i / len(names) - 0.5) for x in range(len(shapes))]
            axis.bar(positions, [values.get(s, 0.0) for s in shapes], 0.8 / len(names), label=name)
        axis.set_ylabel(f"{way}, TFLOP/s")
    axes[0].legend(ncols=6, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    axes[1].set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _versions() -> dict[str, str]:
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("flash_attn", "triton"):
        try:
            found[name] = __import__(name).__version__
        except Exception as error:
            found[name] = f"none ({type(error).__name__})"
    return found


def measure_together(shapes: list[str], arguments: list[str], wait_for: int) -> list[dict[str, Any]]:
    """The rows of all shapes, each from a process of its own: see `Turn`."""
    with tempfile.TemporaryDirectory() as folder:
        workers, turns = [], len(shapes) + bool(wait_for)
        for shape in shapes:
            command = [sys.executable, __file__, *arguments, "--shapes", shape, "--json", f"{folder}/{shape}.json"]
            workers.append(subprocess.Popen([*command, "--turn", folder, "--turns", str(turns)]))
        while wait_for and os.path.exists(f"/proc/{wait_for}"):
            time.sleep(0.5)
        if wait_for:
            Path(folder, "gate.ready").touch()
        running = dict(zip(shapes, workers, strict=True))
        while running:
            time.sleep(0.2)
            for shape in [shape for shape, worker in running.items() if worker.poll() is not None]:
                del running[shape]
                Path(folder, f"{shape}.ready").touch()  # one that failed must not keep the others waiting
        return [row for shape in shapes if os.path.exists(f"{folder}/{shape}.json")
                for row in json.loads(Path(folder, f"{shape}.json").read_text())["rows"]]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="providers whose name starts with one of these")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further shape after this")
    parser.add_argument("--together", action="store_true", help="a process a shape, to compile all at once")
    parser.add_argument(
        "--wait-for", type=int, default=0, metavar="PID", help="with --together: time nothing before it ends"
    )
    parser.add_argument("--turn", default="", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", default="")
    parser.add_argument("--plot", default="")
    parser.add_argument("--table", default="")
    parser.add_argument("--of", default="tflops", choices=("tflops", "ms", "mib"), help="what --table shows")
    args = parser.parse_args()
    if args.table:
        with open(args.table) as file:
            rows = json.load(file)["rows"]
        print(table(rows, args.of))
        if args.plot:
            plot(rows, args.plot)
        return
    named = args.shapes.split(",") if args.shapes else [s.name for s in SHAPES]
    known = {s.name: s for s in SHAPES + FEW_QUERIES}
    if unknown := set(named) - set(known):
        parser.error(f"--shapes: no {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    names = [name for name in known if name in named]
    if args.together:
        rows = measure_together(names, ["--only", args.only, "--rounds", str(args.rounds)], args.wait_for)
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"versions": _versions(), "rows": rows}, file, indent=1)
        print(table(rows))
        return
    only = tuple(filter(None, args.only.split(",")))
    chosen = {n: f for n, f in providers().items() if not only or n.startswith(only)}
    results: list[dict[str, Any]] = []
    started = time.perf_counter()
    for s in map(known.__getitem__, names):
        if time.perf_counter() - started > args.seconds:
            continue
        turn = Turn(args.turn, s.name, args.turns) if args.turn else contextlib.nullcontext()
        for row in measure(s, chosen, args.rounds, turn):
            results.append(asdict(row))
            f, b = row.forward_tflops or 0.0, row.backward_tflops or 0.0
            errors_text = f"{row.error_out or 0:.1e} {row.error_grad or 0:.1e}"
            memory = f"{row.forward_mib or 0:6.0f} {row.backward_mib or 0:6.0f} MiB"
            print(f"{row.shape:17s} {row.provider:24s} {f:5.0f} {b:5.0f} TFLOP/s  {errors_text}  {memory}  {row.note}",
                  flush=True)  # fmt: skip
        torch.cuda.empty_cache()
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"versions": _versions(), "rows": results}, file, indent=1)
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
