"""Many steps of training a small soft-capped model: each CUDA backend follows the eager formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softcap_ops
from softcap_ops import reference

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, STEPS = 64, 128, 4, 2, 64, 2, 60


class Block(nn.Module):
    """A pre-norm transformer block in Gemma 2's manner: capped scores, every second layer a window of 16 tokens."""

    def __init__(self, local: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.window = (15, -1) if local else (-1, -1)

    def forward(self, x: Tensor, backend: str) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=-2)
        # Scores of a few caps, so that the cap is part of what is learnt.
        options = {"softcap": 2.0, "scale": 1.0, "causal": True, "window": self.window}
        if backend == "eager":
            attended, _ = reference.attention(q, k, v, **options)
        else:
            attended = softcap_ops.softcap_attention(q, k, v, backend=backend, **options)
        x = x + self.out(attended.flatten(-2))
        return x + self.mlp(self.norms[1](x))


def losses(backend: str, compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(VOCABULARY, WIDTH),
            "blocks": nn.ModuleList(Block(local=i % 2 == 0) for i in range(LAYERS)),
            "head": nn.Linear(WIDTH, VOCABULARY),
        }
    ).to("cuda", torch.bfloat16 if backend != "float32" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(tokens: Tensor) -> Tensor:
        x = model["embed"](tokens)
        for block in model["blocks"]:  # type: ignore[attr-defined]
            x = block(x, "eager" if backend == "float32" else backend)
        return F.cross_entropy(model["head"](x[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    step = torch.compile(loss_of, fullgraph=True) if compiled else loss_of
    g = torch.Generator().manual_seed(1)
    history = []
    for _ in range(STEPS):
        # Each sequence counts up from a random start by a random stride: learnt only by looking back.
        start, stride = (torch.randint(VOCABULARY, (8, 1), generator=g) for _ in range(2))
        tokens = ((start + stride * torch.arange(96)) % VOCABULARY).cuda()
        loss = step(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_follows_the_formula(backend: str, compiled: bool) -> None:
    actual, eager, exact = losses(backend, compiled), losses("eager"), losses("float32")
    assert actual[-1] < actual[0] - 0.5, "nothing was learnt"
    # bfloat16 training drifts from float32's; the backend may not drift further than the bfloat16 formula does.
    drift = max(abs(a - b) for a, b in zip(eager, exact, strict=True))
    error = max(abs(a - b) for a, b in zip(actual, exact, strict=True))
    assert error <= 2 * drift + 0.02, f"{error:.3f} from float32, the formula {drift:.3f}"
