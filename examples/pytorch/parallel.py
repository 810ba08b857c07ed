"""FSDP2 over one mesh dimension, tensor parallelism over the other, attention on DTensors whose heads are sharded.

torchrun --nproc-per-node 4 examples/pytorch/parallel.py     # 2 x 2
python examples/pytorch/parallel.py                          # one process
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from softcap_ops import softcap_attention

HEAD_DIM = 8


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(32, heads * HEAD_DIM) for heads in (8, 4, 4))
        self.o = torch.nn.Linear(8 * HEAD_DIM, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (projection(x).unflatten(-1, (-1, HEAD_DIM)) for projection in (self.q, self.k, self.v))
        return self.o(softcap_attention(q, k, v, softcap=50.0, causal=True).flatten(-2))


if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = dist.get_world_size()
tensor_ways = 2 if world % 2 == 0 else 1
mesh = init_device_mesh("cpu", (world // tensor_ways, tensor_ways), mesh_dim_names=("fsdp", "tp"))

torch.manual_seed(0)
model = Attention()
columns = ColwiseParallel(use_local_output=False)  # hands DTensors to attention: heads are sharded, and it knows
parallelize_module(model, mesh["tp"], {"q": columns, "k": columns, "v": columns, "o": RowwiseParallel()})
fully_shard(model, mesh=mesh["fsdp"])

x = torch.randn(8, 16, 32).chunk(mesh["fsdp"].size())[mesh["fsdp"].get_local_rank()]
loss = model(x).pow(2).mean()
loss.backward()
if dist.get_rank() == 0:
    print(f"{dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))}: loss {loss.item():.6f}")
dist.destroy_process_group()
