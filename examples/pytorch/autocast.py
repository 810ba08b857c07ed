"""Autocast: q and k in float32 (after a norm or a rotary embedding), v in bfloat16; each gradient in its own dtype."""

import torch

from softcap_ops import softcap_attention

q, k = (torch.randn(2, 64, heads, 32, requires_grad=True) for heads in (4, 2))
v = torch.randn(2, 64, 2, 32, dtype=torch.bfloat16, requires_grad=True)

with torch.autocast("cpu", torch.bfloat16):  # or "cuda"
    out = softcap_attention(q, k, v, softcap=50.0, causal=True)
out.float().pow(2).mean().backward()  # the backward needs no context

dtypes = [out.dtype, *(t.grad.dtype for t in (q, k, v) if t.grad is not None)]
print("out and the gradients of q, k, v:", *dtypes)
assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
