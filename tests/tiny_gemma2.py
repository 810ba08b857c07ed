"""A Gemma-2-shaped model small enough to train in a test: GQA, caps, a sliding window on alternate layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softcap_ops

VOCABULARY, WIDTH, HEADS_Q, HEADS_KV, HEAD_DIM, WINDOW = 32, 32, 8, 4, 8, 4


class Attention(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = (-1, -1) if window is None else (window - 1, 0)
        self.q = nn.Linear(WIDTH, HEADS_Q * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, HEADS_KV * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, HEADS_KV * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS_Q * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # -1 for the heads: tensor parallelism leaves each process a part of them.
        q, k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)) for p in (self.q, self.k, self.v))
        out = softcap_ops.softcap_attention(4 * q, k, v, softcap=1.0, causal=True, window=self.window)
        return self.o(out.flatten(-2))


class Layer(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4))
        self.attention = Attention(window)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before, after, before_mlp, after_mlp = self.norms
        x = x + after(self.attention(before(x)))
        hidden = before_mlp(x)
        return x + after_mlp(self.down(F.gelu(self.gate(hidden), approximate="tanh") * self.up(hidden)))


class Model(nn.Module):
    """`wrap` is applied to each layer's call: a checkpoint, for instance."""

    def __init__(self, layers: int = 2, wrap: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(WINDOW if i % 2 == 0 else None) for i in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wrap = wrap or (lambda layer, x: layer(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.wrap(layer, x)
        return 30.0 * torch.tanh(self.head(x) / 30.0)


def build(**kwargs: Any) -> Model:
    """The same weights every time, in float64: what differs between two runs is then a fault, not rounding."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Model(**kwargs).double()


def batch(items: int = 4, seqlen: int = 9) -> Tensor:
    return torch.randint(VOCABULARY, (items, seqlen + 1), generator=torch.Generator().manual_seed(2))


def train(model: nn.Module, tokens: Tensor, steps: int = 2, rate: float = 0.5) -> list[float]:
    """The loss of each step of gradient descent."""
    # One by one: a tensor-parallel model has DTensors and plain tensors, which no foreach operator takes together.
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
