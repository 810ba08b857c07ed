"""Counting FLOPs, and seeing in a trace which backend served each call."""

import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from softcap_ops import softcap_attention

q, k, v = (torch.randn(1, 256, heads, 64, requires_grad=True) for heads in (8, 4, 4))

for name, window in (("causal", (-1, -1)), ("causal, window of 64", (63, 0))):
    with FlopCounterMode(display=False) as counter:
        softcap_attention(q, k, v, softcap=50.0, causal=True, window=window).sum().backward()
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items() if "softcap" in str(op)}
    print(f"{name}: {counts}")

with profile() as profiler:
    softcap_attention(q, k, v, softcap=50.0, causal=True).sum().backward()
ranges = sorted({event.name for event in profiler.events() if "[" in event.name and "softcap_ops" in event.name})
print("ranges in the trace:", ranges)
assert [r.partition(" ")[0] for r in ranges] == ["softcap_ops::attention_bwd", "softcap_ops::attention_fwd"]
