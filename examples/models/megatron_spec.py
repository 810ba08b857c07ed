"""A Megatron-Core GPT whose layer spec has soft-capped attention, a window on every other layer, and two ways to split.

python examples/models/megatron_spec.py                                             # one process
torchrun --nproc-per-node 2 examples/models/megatron_spec.py --tensor-parallel 2
torchrun --nproc-per-node 2 examples/models/megatron_spec.py --context-parallel 2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from softcap_ops.distributed import split_sequence
from softcap_ops.integrations.megatron import with_softcap

VOCABULARY, SEQLEN, BATCH = 64, 64, 4


class Config(TransformerConfig):
    """Megatron's configuration with the one field that it lacks."""

    attn_logit_softcapping: float = 50.0


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Counting up from anywhere: (tokens, labels), (batch, seqlen)."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    ids = (start + torch.arange(SEQLEN + 1)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Megatron GPT with soft-capped attention.")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share the heads")
    parser.add_argument("--context-parallel", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_parallel, context_parallel_size=args.context_parallel
    )
    config = Config(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16, softmax_scale=0.25,
        window_size=(15, 0), window_attn_skip_freq=2, attention_dropout=0.0, hidden_dropout=0.0,
        tensor_model_parallel_size=args.tensor_parallel, context_parallel_size=args.context_parallel,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPTModel(
        config=config,
        transformer_layer_spec=with_softcap(get_gpt_layer_local_spec()),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQLEN,
    )

    group = parallel_state.get_context_parallel_group()
    where = {"rank": group.rank(), "ranks": group.size()}
    positions = split_sequence(torch.arange(SEQLEN).expand(BATCH, -1), **where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(args.steps):
        tokens, labels = (split_sequence(t, **where) for t in batch(generator))
        loss = model(tokens, positions, None, labels=labels).sum() / (BATCH * SEQLEN)
        loss.backward()
        total = loss.detach()
        for tensor in (total, *(p.grad for p in model.parameters() if p.grad is not None)):
            dist.all_reduce(tensor, group=group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    core = model.decoder.layers[0].self_attention.core_attention
    if dist.get_rank() == 0:
        print(core)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
