"""Train a small Gemma-2-shaped model on sequences that are split over N processes.

    torchrun --nproc-per-node 4 examples/long_context.py --seqlen 8192

Each process holds a part of every sequence: its tokens, its activations, its keys and values. Only attention needs the
others, and `context_parallel_attention` meets them; everything else in the model works on positions one by one. Every
second layer sees a sliding window, of which only the edge travels. Weights are the same on all processes, so their
gradients are summed over the group, as in data parallelism. With --check the first step is repeated on one process.

The task: each token follows from the one before it by one fixed permutation, but for a tenth that are random. The loss
falls from log(vocabulary) as the model learns it.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import softcap_ops
from softcap_ops import distributed as cp

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, SOFTCAP = 64, 128, 8, 4, 32, 50.0


class Attention(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.window = (window - 1, 0) if window else (-1, -1)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], split: dict[str, Any] | None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=-2)
        q, k = rotate(q, rotation), rotate(k, rotation)
        options: dict[str, Any] = {"softcap": SOFTCAP, "causal": True, "window": self.window}
        if split is None:
            attended = softcap_ops.softcap_attention(q, k, v, **options)
        else:
            attended = softcap_ops.context_parallel_attention(q, k, v, **split, **options)
        return self.out(attended.flatten(-2))


class Block(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention(window)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], split: dict[str, Any] | None) -> Tensor:
        x = x + self.attention(self.norms[0](x), rotation, split)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Alternating local and global layers, as Gemma 2 has them."""

    def __init__(self, layers: int, window: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(window if i % 2 == 0 else 0) for i in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, split: dict[str, Any] | None) -> Tensor:
        """Logits (batch, rows, vocabulary) of this process's rows, which stand at `positions` of their sequence."""
        x = self.embed(tokens)
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=tokens.device) / HEAD_DIM)
        angles = positions[:, None] * frequencies
        rotation = angles.cos()[:, None], angles.sin()[:, None]
        for block in self.blocks:
            x = block(x, rotation, split)
        return self.head(self.norm(x))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (Su et al. 2021)."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def batch_of(step: int, batch: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of whole sequences, the same on every process."""
    g = torch.Generator().manual_seed(step)
    follower = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))
    noise = torch.randint(VOCABULARY, (batch, seqlen), generator=g)
    is_noise = torch.rand(batch, seqlen, generator=g) < 0.1
    tokens = noise.clone()
    for i in range(1, seqlen):
        tokens[:, i] = torch.where(is_noise[:, i], noise[:, i], follower[tokens[:, i - 1]])
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100  # ignored by cross_entropy
    return tokens, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=1024, help="tokens of a whole sequence")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--window", type=int, default=128, help="tokens that a local layer sees")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--comm", default="p2p", choices=["p2p", "all_gather", "a2a"])
    parser.add_argument("--layout", default="zigzag", choices=["zigzag", "contiguous"])
    parser.add_argument("--compile", action="store_true", help="compile the model, as one graph")
    parser.add_argument("--check", action="store_true", help="compare the first step with one process")
    args = parser.parse_args()

    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    shared = on_gpu and torch.cuda.device_count() < local_ranks
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    dist.init_process_group("nccl" if on_gpu and not shared else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if on_gpu else torch.float32

    torch.manual_seed(0)  # the same weights everywhere
    model = Model(args.layers, args.window).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = torch.compile(model, fullgraph=True) if args.compile else model
    where: dict[str, Any] = {"rank": rank, "ranks": ranks, "layout": args.layout}
    positions = cp.shard_positions(seqlen=args.seqlen, **where).to(device)
    split = {"group": dist.group.WORLD, "comm": args.comm, "layout": args.layout}

    for step in range(args.steps):
        start = time.perf_counter()
        tokens, targets = (t.to(device) for t in batch_of(step, args.batch, args.seqlen))
        # Targets are shifted before the split: the successor of a shard's last token is on another rank.
        count = (targets >= 0).sum()
        logits = run(cp.split_sequence(tokens, **where), positions, split)
        own_targets = cp.split_sequence(targets, **where)
        loss = F.cross_entropy(logits.float().flatten(0, 1), own_targets.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        # Each process has the gradient of its own positions' loss: the sum is that of the whole.
        for parameter in model.parameters():
            _all_reduce(parameter.grad, shared)
        total = loss.detach().clone()
        _all_reduce(total, shared)
        if args.check and step == 0:
            _check(model, tokens, targets, total, rank)
        optimizer.step()
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            milliseconds = (time.perf_counter() - start) * 1e3
            print(
                f"step {step:3d}  loss {total.item():.4f}  (log {VOCABULARY} = {math.log(VOCABULARY):.4f})  "
                f"{milliseconds:.0f} ms, {args.seqlen // ranks} of {args.seqlen} tokens on each of {ranks} processes",
                flush=True,
            )
    dist.destroy_process_group()


def _all_reduce(t: Tensor | None, through_host: bool) -> None:
    assert t is not None
    if not through_host:
        dist.all_reduce(t)
        return
    host = t.cpu()
    dist.all_reduce(host)
    t.copy_(host)


def _check(model: Model, tokens: Tensor, targets: Tensor, loss: Tensor, rank: int) -> None:
    """The whole sequence on one process gives the same loss and the same gradients."""
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    logits = model(tokens, torch.arange(tokens.shape[1], device=tokens.device), None)
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    of_one = torch.autograd.grad(expected, list(model.parameters()))
    error = max(
        ((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(gradients, of_one, strict=True)
    )
    off = (loss - expected).abs().item()
    tolerance = 1e-4 if tokens.device.type == "cpu" else 5e-2
    if rank == 0:
        print(f"check: loss off by {off:.1e}, gradients by at most {error:.1e} of their size")
    if error > tolerance or off > tolerance:
        raise SystemExit("the sharded step differs from one process")


if __name__ == "__main__":
    main()
