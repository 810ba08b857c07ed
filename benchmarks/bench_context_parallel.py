"""Context parallelism: every scheme on N ranks beside one rank on the whole sequence, and beside the cost model.

For each shape, scheme and layout: forward and backward time of the slowest rank, how much of it is exposed
communication (the same run with messages left out is subtracted), bytes sent a rank, and the time that the cost model
of softcap_ops.distributed predicts from two speeds measured in the same run: the kernel's on one rank, and a link's.

usage: torchrun --nproc-per-node N benchmarks/bench_context_parallel.py [options]   (GPUs over NCCL, else gloo)
       python benchmarks/bench_context_parallel.py --ranks N [options]              (starts N processes itself)
       python benchmarks/bench_context_parallel.py --model --ranks N   (what the cost model says; nothing is run)
options: --shapes NAME,...  --comm NAME,...  --rounds N  --json FILE  --backend NAME (of the kernel)  --trace FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import softcap_ops
from softcap_ops import distributed as cp
from softcap_ops.distributed import a2a, agreement, p2p, transport


class Shape(NamedTuple):
    name: str
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    window: int = 0  # tokens seen, the current one included; 0 = all before
    softcap: float = 50.0

    @property
    def options(self) -> dict[str, Any]:
        window = (self.window - 1, 0) if self.window else (-1, -1)
        return {"softcap": self.softcap, "causal": True, "window": window}


GPU_SHAPES = tuple(
    Shape(f"d{head_dim}_{seqlen // 1024}k{'_swa' if window else ''}", seqlen, 4096 // head_dim, kv, head_dim, window)
    for head_dim, kv in ((128, 16), (256, 8))
    for seqlen in (16384, 32768, 65536, 131072)
    for window in (0, 4096)
)
CPU_SHAPES = (
    Shape("d64_2k", 2048, 8, 4, 64),
    Shape("d64_4k", 4096, 8, 4, 64),
    Shape("d64_4k_swa", 4096, 8, 4, 64, window=256),
)
SCHEMES = (
    ("p2p", "zigzag"),
    ("p2p", "contiguous"),
    ("all_gather", "zigzag"),
    ("a2a", "contiguous"),
    ("a2a+p2p", "zigzag"),
)


RING = "ring-flash-attn, no cap"  # PyPI's package over FlashAttention-2, where it is installed
try:
    ring: Any = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
except Exception:
    ring = None


@dataclass
class Row:
    shape: str
    comm: str  # "one rank" for the whole sequence on one
    layout: str
    ranks: int
    forward_ms: float
    backward_ms: float
    exposed_forward_ms: float = 0.0
    exposed_backward_ms: float = 0.0
    sent_forward_mib: float = 0.0  # by the rank that sends most
    sent_backward_mib: float = 0.0
    model_forward_ms: float = 0.0
    model_backward_ms: float = 0.0
    error: float = 0.0  # of out, against one rank's: ||x - y|| / ||y||


# ---- measuring -----------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """One run, all ranks starting together; the slowest rank's time."""
    dist.barrier()
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return slowest(time.perf_counter() - start, device)


def slowest(seconds: float, device: torch.device) -> float:
    t = torch.tensor(seconds, dtype=torch.float64, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians(calls: Sequence[Callable[[], Any]], rounds: int, device: torch.device) -> list[float]:
    """Median time of each call over interleaved rounds, after one that warms up."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds + 1):
        for call, of_call in zip(calls, times, strict=True):
            seconds = seconds_of(call, device)
            if i:
                of_call.append(seconds)
    return [statistics.median(t) for t in times]


class _Silent:
    """An exchange that sends nothing: what is received is whatever the memory holds."""

    def __init__(self, group: Any, send: Any, receive: Any, device: torch.device) -> None:
        self.received = None if receive is None else torch.zeros(receive[0], dtype=receive[1], device=device)

    def wait(self) -> Tensor | None:
        return self.received


@contextlib.contextmanager
def without_messages() -> Iterator[None]:
    """The same work on every rank, and nothing sent: the results are wrong, the times are those of the work."""
    saved = p2p.Exchange, a2a.all_to_all, transport.all_to_all, transport.all_gather, agreement.agree

    def no_all_to_all(group: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.contiguous() for t in tensors]

    def no_all_gather(group: Any, t: Tensor) -> Tensor:
        return t.unsqueeze(0).repeat(group.size(), *[1] * t.dim())

    p2p.Exchange = _Silent  # type: ignore[misc, assignment]
    a2a.all_to_all = transport.all_to_all = no_all_to_all  # type: ignore[assignment]
    transport.all_gather = no_all_gather
    agreement.agree = lambda *args: None
    try:
        yield
    finally:
        p2p.Exchange, a2a.all_to_all, transport.all_to_all, transport.all_gather, agreement.agree = saved  # type: ignore[misc]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def link_speed(device: torch.device, mebibytes: int) -> float:
    """Bytes a second that every rank sends to its neighbour and receives from the other, all at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    message = torch.zeros(mebibytes << 20, dtype=torch.uint8, device=device)

    def call() -> None:
        receive = (message.shape, torch.uint8, (rank - 1) % ranks)
        transport.Exchange(_world(), (message, (rank + 1) % ranks), receive, device).wait()

    return message.nbytes / medians([call], 5, device)[0]


# ---- one shape -----------------------------------------------------------------------------------------------


def run(shape: Shape, args: argparse.Namespace, device: torch.device, link: float) -> list[Row]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)
    sizes = ((shape.heads_q, 4.0), (shape.heads_kv, 4.0), (shape.heads_kv, 1.0), (shape.heads_q, 1.0))
    q, k, v, dout = (
        (torch.randn(1, shape.seqlen, heads, shape.head_dim, generator=g, device=device) * size).to(dtype)
        for heads, size in sizes
    )

    def one_rank(*qkv: Tensor) -> Tensor:
        return softcap_ops.softcap_attention(*qkv, **shape.options, backend=args.backend)

    whole_out: Tensor = one_rank(q, k, v)
    alone = [t.clone().requires_grad_() for t in (q, k, v)]
    graph = one_rank(*alone) if rank == 0 else None

    def forward_alone() -> None:
        if rank == 0:
            one_rank(q, k, v)

    def backward_alone() -> None:
        if graph is not None:
            torch.autograd.grad(graph, alone, dout, retain_graph=True)

    forward, backward = medians([forward_alone, backward_alone], args.rounds, device)
    rows = [Row(shape.name, "one rank", "", 1, forward * 1e3, backward * 1e3)]
    flops = cp.cost(0, 1, comm="p2p", **_cost_arguments(shape, dtype)).forward_flops

    for comm, layout in SCHEMES:
        a2a_size = 2 if comm == "a2a+p2p" else 1
        heads_split = ranks if comm == "a2a" else a2a_size
        if (args.comm and comm not in args.comm) or shape.heads_kv % heads_split or ranks % a2a_size:
            continue
        group: Any = cp.two_level_groups(a2a_size=2) if comm == "a2a+p2p" else dist.group.WORLD
        where: dict[str, Any] = {"rank": rank, "ranks": ranks, "layout": layout}
        local = [cp.split_sequence(t, **where).requires_grad_() for t in (q, k, v)]
        local_dout = cp.split_sequence(dout, **where)

        def attention(group: Any = group, comm: str = comm, layout: str = layout, local: Any = local) -> Tensor:
            return softcap_ops.context_parallel_attention(
                *local, group=group, comm=comm, layout=layout, **shape.options, backend=args.backend
            )

        out = attention()

        def backward_call(out: Tensor = out, local: Any = local, local_dout: Tensor = local_dout) -> None:
            torch.autograd.grad(out, local, local_dout, retain_graph=True)

        forward, backward = medians([attention, backward_call], args.rounds, device)
        with without_messages():
            quiet_forward, quiet_backward = medians([attention, backward_call], args.rounds, device)
        expected = cp.split_sequence(whole_out, **where).float()
        error = ((out.float() - expected).norm() / expected.norm()).item()
        if args.trace and comm == "p2p" and layout == "zigzag":
            trace(f"{args.trace}/{shape.name}_{{}}.json", {"forward": attention, "backward": backward_call}, device)
        costs = [
            cp.cost(r, ranks, comm=comm, layout=layout, a2a_size=a2a_size, **_cost_arguments(shape, dtype))
            for r in range(ranks)
        ]
        speeds = flops / (rows[0].forward_ms * 1e-3), 2.5 * flops / (rows[0].backward_ms * 1e-3)
        rows.append(
            Row(
                shape.name, comm, layout, ranks, forward * 1e3, backward * 1e3,
                (forward - quiet_forward) * 1e3, (backward - quiet_backward) * 1e3,
                max(c.sent_forward for c in costs) / 2**20, max(c.sent_backward for c in costs) / 2**20,
                cp.busiest(costs, speeds[0], link) * 1e3, cp.busiest(costs, speeds[1], link, backward=True) * 1e3,
                slowest(error, device),
            )
        )  # fmt: skip
    if ring is not None and not shape.window:
        where = {"rank": rank, "ranks": ranks, "layout": "zigzag"}
        local = [cp.split_sequence(t, **where).requires_grad_() for t in (q, k, v)]
        local_dout = cp.split_sequence(dout, **where)

        def peer(local: Any = local) -> Tensor:
            return ring(*local, causal=True)

        out = peer()
        forward, backward = medians([peer, lambda: backward_call(out, local, local_dout)], args.rounds, device)
        rows.append(Row(shape.name, RING, "zigzag", ranks, forward * 1e3, backward * 1e3))
    return rows


def trace(path: str, calls: dict[str, Callable[[], Any]], device: torch.device) -> None:
    """Write a profile of each call on rank 0, and say how much of the messages' time kernels were running."""
    for name, call in calls.items():
        dist.barrier()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            _synchronize(device)
        if dist.get_rank() == 0:
            profile.export_chrome_trace(path.format(name))
            on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            spans = {
                kind: [(e.time_range.start, e.time_range.end) for e in on_device if ("nccl" in e.name) == kind]
                for kind in (True, False)
            }
            messages, hidden = sum(b - a for a, b in spans[True]), _overlap(spans[True], spans[False])
            print(f"  {name}: messages {messages / 1e3:.2f} ms, of which {hidden / 1e3:.2f} ms beside kernels")


def _overlap(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """How long at least one of `others` runs during the spans."""
    merged: list[list[float]] = []
    for a, b in sorted(others):
        if merged and a <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], b)
        else:
            merged.append([a, b])
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in merged)


def _cost_arguments(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "seqlen_q": shape.seqlen,
        "heads_q": shape.heads_q,
        "heads_kv": shape.heads_kv,
        "head_dim": shape.head_dim,
        "causal": True,
        "window": shape.options["window"],
        "element_size": dtype.itemsize,
    }


def table(rows: list[Row]) -> str:
    head = (
        f"{'shape':<14} {'scheme':<22} {'fwd ms':>9} {'bwd ms':>9} {'exposed':>16} {'MiB sent':>16} {'model ms':>18} "
        f"{'speed-up':>8} {'error':>8}"
    )
    lines = [head]
    for row in rows:
        alone = next(r for r in rows if r.shape == row.shape and r.comm == "one rank")
        gain = (alone.forward_ms + alone.backward_ms) / (row.forward_ms + row.backward_ms)
        lines.append(
            f"{row.shape:<14} {f'{row.comm} {row.layout}':<22} {row.forward_ms:>9.2f} {row.backward_ms:>9.2f} "
            f"{f'{row.exposed_forward_ms:.2f} / {row.exposed_backward_ms:.2f}':>16} "
            f"{f'{row.sent_forward_mib:.1f} / {row.sent_backward_mib:.1f}':>16} "
            f"{f'{row.model_forward_ms:.2f} / {row.model_backward_ms:.2f}':>18} {gain:>8.2f} {row.error:>8.1e}"
        )
    return "\n".join(lines)


# ---- starting ------------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """What every rank runs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    on_gpu = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()) if on_gpu else torch.device("cpu")  # noqa: E501  # fmt: skip
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        # One rank may use what the N together use, so that a speed-up is one.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    link = link_speed(device, 64 if on_gpu else 8)
    what = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads a rank"
    if rank == 0:
        print(f"{ranks} ranks over {dist.get_backend()}: {what}; a link moves {link / 1e9:.2f} GB/s each way")
    rows = []
    for shape in GPU_SHAPES if on_gpu else CPU_SHAPES:
        if args.shapes and shape.name not in args.shapes:
            continue
        rows += run(shape, args, device, link)
        if rank == 0:
            print(table([r for r in rows if r.shape == shape.name]), flush=True)
    if rank == 0 and args.json:
        facts = {"ranks": ranks, "device": what, "link_bytes_per_second": link, "torch": torch.__version__}
        Path(args.json).write_text(json.dumps({**facts, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")


def _spawned(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    backend = "nccl" if torch.cuda.device_count() >= args.ranks and not args.cpu else "gloo"
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=args.ranks)
    work(args)
    dist.barrier()  # a rank that leaves early takes the others' connections with it
    dist.destroy_process_group()


def model(ranks: int, teraflops: float) -> str:
    """The cost model's forward + backward times, in ms, as a Markdown table: shapes down, schemes across."""
    schemes = (*SCHEMES[:-1], ("all_gather", "contiguous"), ("a2a+p2p", "zigzag"))
    names = [f"{comm} {layout}" for comm, layout in schemes]
    lines = [f"| tokens | window | GB/s | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for seqlen, window in ((16384, 0), (131072, 0), (131072, 4096)):
        shape = Shape("", seqlen, 32, 16, 128, window)
        for gigabytes in (400, 50, 10):
            times = []
            for comm, layout in schemes:
                costs = [
                    cp.cost(r, ranks, comm=comm, layout=layout, a2a_size=4, **_cost_arguments(shape, torch.bfloat16))
                    for r in range(ranks)
                ]
                speeds = teraflops * 1e12, gigabytes * 1e9
                times.append(sum(cp.busiest(costs, *speeds, backward=backward) for backward in (False, True)) * 1e3)
            cells = (f"**{t:.1f}**" if t <= 1.02 * min(times) else f"{t:.1f}" for t in times)
            lines.append(f"| {seqlen} | {window or 'none'} | {gigabytes} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, where torchrun does not")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default=None, help="kernel backend, as in softcap_attention")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where there are GPUs")
    parser.add_argument("--json", default=None)
    parser.add_argument("--trace", default=None, metavar="FOLDER", help="write profiles of p2p zigzag on GPUs here")
    parser.add_argument("--model", action="store_true", help="print what the cost model says for --ranks")
    parser.add_argument("--tflops", type=float, default=600.0, help="of the kernel, for --model")
    for name in ("shapes", "comm"):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=[])
    args = parser.parse_args()
    if args.model:
        print(model(args.ranks, args.tflops))
    elif "RANK" in os.environ:
        # As many GPUs as ranks: NCCL. Fewer, or none: gloo, through host memory.
        shared = torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"])
        dist.init_process_group("gloo" if args.cpu or shared else "nccl")
        work(args)
        dist.barrier()
        dist.destroy_process_group()
    else:
        rendezvous = str(Path(tempfile.mkdtemp(), "rendezvous"))
        torch.multiprocessing.spawn(_spawned, (args, rendezvous), args.ranks)


if __name__ == "__main__":
    main()
