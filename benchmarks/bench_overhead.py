"""Host cost of one call, in microseconds, at a shape whose GPU work is too small to hide it: (1, 128, 8, 128) bf16.

Ours over each CUDA backend beside that backend's own wrapper, FA3's raw operators and SDPA, in one run, interleaved.

usage: python benchmarks/bench_overhead.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import softcap_ops

SHAPE = (1, 128, 8, 128)  # batch, seqlen, heads, head_dim
SOFTCAP = 50.0
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def candidates() -> dict[str, Attention]:
    """Name and call of each way to compute causal attention here; all but SDPA capped."""
    found: dict[str, Attention] = {}
    for name, reason in softcap_ops.available_backends().items():
        if name != "cpu" and reason is None:
            found[f"softcap_ops over {name}"] = _ours(name)
    try:
        from flash_attn import flash_attn_func

        found["FA2's own wrapper"] = lambda q, k, v: flash_attn_func(q, k, v, causal=True, softcap=SOFTCAP)
    except Exception as error:
        print(f"no flash_attn: {error}")
    try:
        from flash_attn_interface import flash_attn_func as fa3_func

        found["FA3's own wrapper"] = lambda q, k, v: _first(fa3_func(q, k, v, causal=True, softcap=SOFTCAP))
        found["FA3's raw operators"] = _RawFa3.attention
    except Exception as error:
        print(f"no flash_attn_interface: {error}")
    found["SDPA, cuDNN, no cap"] = _sdpa
    return found


def _ours(backend: str) -> Attention:
    return lambda q, k, v: softcap_ops.softcap_attention(q, k, v, softcap=SOFTCAP, causal=True, backend=backend)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


class _RawFa3(torch.autograd.Function):
    """The least that Python can do: FA3's raw operators, nothing checked, under a bare Function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, *_ = torch.ops.flash_attn_3.fwd.default(
            q, k, v, softmax_scale=SHAPE[-1] ** -0.5, is_causal=True, softcap=SOFTCAP, num_splits=1
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn_3.bwd.default(
            dout, q, k, v, out, lse, *grads, softmax_scale=SHAPE[-1] ** -0.5, is_causal=True, softcap=SOFTCAP
        )
        return grads

    @classmethod
    def attention(cls, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cls.apply(q, k, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(qt, kt, vt, is_causal=True).transpose(1, 2)


def measure(calls: dict[str, Callable[[], object]], number: int = 200, rounds: int = 9) -> dict[str, float]:
    """Median microseconds of host time a call, the candidates taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(10):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(number):
                call()
            times[name].append((time.perf_counter() - start) / number * 1e6)
            torch.cuda.synchronize()
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="", help="file for the numbers")
    args = parser.parse_args()
    q, k, v, dout = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = tuple(t.clone().requires_grad_() for t in (q, k, v))

    def forward(attention: Attention) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return attention(q, k, v)

        return call

    def both(attention: Attention) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(*leaves), leaves, dout)

    rows: dict[str, dict[str, float]] = {}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for what, make, number in (("forward, no_grad", forward, 200), ("forward + backward", both, 100)):
            runnable = {}
            for name, attention in candidates().items():
                try:
                    (call := make(attention))()
                    runnable[name] = call
                except Exception as error:
                    print(f"{name}, {what}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            for name, microseconds in measure(runnable, number).items():
                rows.setdefault(name, {})[what] = microseconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {SHAPE} bfloat16, us a call")
    for name, row in rows.items():
        print(f"{name:28s}" + "".join(f"  {what} {us:7.1f}" for what, us in row.items()))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "us": rows}, file, indent=1)


if __name__ == "__main__":
    main()
