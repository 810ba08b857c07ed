"""A model written for TransformerEngine's attention module, with a soft cap: one import and one argument change.

It trains on padded batches, (seqlen, batch, ...), the lengths given as cu_seqlens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# from transformer_engine.pytorch import DotProductAttention
from softcap_ops import DotProductAttention

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD_DIM, WINDOW = 32, 64, 4, 2, 16, 8


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD_DIM, bias=False)
        self.attention = DotProductAttention(
            HEADS,
            HEAD_DIM,
            num_gqa_groups=GROUPS,
            attn_mask_type="padding_causal",
            window_size=(WINDOW - 1, 0) if number % 2 == 0 else None,
            layer_number=number + 1,
            softcap=2.0,  # new
        )
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, GROUPS, GROUPS], dim=-2)
        x = x + self.out(self.attention(4 * q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(i) for i in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cu_seqlens)
        return self.head(x)


def batch(generator: torch.Generator, sequences: int = 8, longest: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of several lengths that count up from anywhere: (tokens, targets, cu_seqlens)."""
    position = torch.arange(longest + 1).unsqueeze(1)
    tokens = (position + torch.randint(VOCABULARY, (sequences,), generator=generator)) % VOCABULARY
    lengths = torch.randint(8, longest + 1, (sequences,), generator=generator)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    targets = tokens[1:].masked_fill(position[:-1] >= lengths, -100)  # past a sequence's end is padding
    return tokens[:-1], targets, cu_seqlens


torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(40):
    tokens, targets, cu_seqlens = batch(generator)
    loss = F.cross_entropy(model(tokens, cu_seqlens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.5 * losses[0]

with torch.no_grad():
    capped = model(tokens, cu_seqlens)
    for module in model.modules():
        if isinstance(module, DotProductAttention):
            module.softcap = 0.0
    difference = (model(tokens, cu_seqlens) - capped).abs().max().item()
print(f"without the cap, logits differ by up to {difference:.2f}")
assert difference > 1e-2
