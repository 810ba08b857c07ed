"""Jagged torch.nested tensors: sequences of several lengths in one tensor, computed packed, without a copy."""

import torch
from torch import Tensor

from softcap_ops import softcap_attention

x = torch.nested.nested_tensor([torch.randn(n, 32) for n in (5, 17, 3)], layout=torch.jagged)
weights = [torch.randn(32, heads * 8, requires_grad=True) for heads in (4, 2, 2)]


def loss(x: Tensor) -> Tensor:
    q, k, v = ((x @ w).unflatten(-1, (-1, 8)) for w in weights)  # (batch, ragged, heads, head_dim)
    out = softcap_attention(q, k, v, softcap=50.0, causal=True)
    return out.values().pow(2).mean()


eager = torch.autograd.grad(loss(x), weights)
compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), weights)
torch.testing.assert_close(compiled, eager)
print("gradients, eager and compiled:", [tuple(g.shape) for g in eager])
