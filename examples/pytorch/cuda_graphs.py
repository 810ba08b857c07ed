"""A CUDA graph of a packed forward and backward, replayed after the sequences' lengths changed in place."""

import torch
from torch import Tensor

from softcap_ops import softcap_attention_varlen


def main() -> None:
    tokens, longest = 256, 128
    q, k, v = (
        torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 4, 4)
    )
    cu_seqlens = torch.tensor([0, 128, 200, 256], dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, ...]:
        # max_seqlen, softcap and scale are constants of the graph: take the longest length it will ever serve.
        out = softcap_attention_varlen(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest,
            softcap=50.0, causal=True,
        )  # fmt: skip
        return out, *torch.autograd.grad(out.float().pow(2).sum(), (q, k, v))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # warm up: a backend's first call tries the build out, which a capture could not hold
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    for lengths in ([0, 128, 200, 256], [0, 10, 20, 148], [0, 0, 100, 100]):
        cu_seqlens.copy_(torch.tensor(lengths))
        graph.replay()
        for actual, expected in zip(results, step(), strict=True):
            torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
        print(f"replayed with cu_seqlens {lengths}")


if torch.cuda.is_available():
    main()
else:
    print("no CUDA device: nothing to capture")
