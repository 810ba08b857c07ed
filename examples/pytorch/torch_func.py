"""torch.func: gradients of each example of a batch, and an ensemble of weights, in one kernel call each."""

import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from softcap_ops import softcap_attention


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(32, 3 * 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        return softcap_attention(q, k, v, softcap=50.0, causal=True).flatten(-2)


block, x = Block(), torch.randn(6, 1, 16, 32)


def loss(weights: dict[str, Tensor], example: Tensor) -> Tensor:
    return functional_call(block, weights, (example,)).pow(2).mean()


weights = {name: p.detach() for name, p in block.named_parameters()}
per_example = vmap(grad(loss), in_dims=(None, 0))(weights, x)
print("per-example gradients:", {name: tuple(g.shape) for name, g in per_example.items()})

ensemble, buffers = stack_module_state([Block() for _ in range(3)])
outputs = vmap(lambda w, b: functional_call(block, (w, b), (x[0],)))(ensemble, buffers)
print("ensemble outputs:", tuple(outputs.shape))
assert outputs.shape == (3, 1, 16, 32)
