"""torch.compile of a packed batch: one graph for all lengths, max_seqlen read from cu_seqlens inside the graph."""

from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from softcap_ops import softcap_attention_varlen

torch._dynamo.config.capture_scalar_outputs = True  # lets .item() into the graph


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    longest: Any = cu_seqlens.diff().max().item()
    return softcap_attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest,
        softcap=50.0, causal=True,
    )  # fmt: skip


counter = CompileCounterWithBackend("aot_eager")  # backend="inductor" is the one to use
compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
for lengths in ([9, 20, 4], [50, 1, 1, 1, 1], [11, 12]):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), heads, 16) for heads in (6, 2, 2))
    torch.testing.assert_close(compiled(q, k, v, cu_seqlens), attention(q, k, v, cu_seqlens))
print(f"{counter.frame_count} graph for three batches of different lengths")
assert counter.frame_count == 1
