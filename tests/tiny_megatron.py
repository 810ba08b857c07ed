"""A Megatron-Core GPT small enough to train in a test, on a CPU where Megatron itself has none in mind.

Its own unfused attention, with the cap put between its scores and its softmax, is what ours is compared with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from softcap_ops import distributed as cp
from softcap_ops.integrations.megatron import with_softcap

VOCABULARY, HIDDEN, HEADS, GROUPS, HEAD_DIM, CAP, SEQLEN, BATCH = 32, 32, 4, 2, 8, 2.0, 32, 3
HOT = 20.0  # how much wider the weights of q, k and v are drawn, so that scores pass the cap


class CappedDotProductAttention(DotProductAttention):
    """Megatron's unfused attention with the cap where Gemma 2 has it: after the scale, before the mask."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        softmax, cap = self.scale_mask_softmax.forward, config.attn_logit_softcapping

        def forward(scores: Tensor, *rest: Any) -> Tensor:
            return softmax(cap * torch.tanh(scores / cap) if cap else scores, *rest)

        self.scale_mask_softmax.forward = forward


class _Tracker:
    """In place of Megatron's tracker of CUDA generators: there is nothing random."""

    @contextlib.contextmanager
    def fork(self, *names: Any) -> Iterator[None]:
        yield

    def is_initialized(self) -> bool:
        return False


def _causal(seqlen: int) -> Tensor:
    return torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1)


def _sliding(sq: int, sk: int, window: tuple[int, int]) -> Tensor:
    diagonal = torch.arange(sk) - torch.arange(sq).unsqueeze(1) - (sk - sq)
    return (diagonal < -window[0]) | (diagonal > window[1])


@contextlib.contextmanager
def megatron(device: str = "cpu", tp: int = 1, cp: int = 1, **groups: Any) -> Iterator[None]:
    """Megatron's process groups, and on a CPU its calls of CUDA answered."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            for module, name, answer in (
                (torch.cuda, "current_device", lambda: torch.device("cpu")),
                (tensor_parallel, "get_cuda_rng_tracker", _Tracker),
                (random, "_get_cuda_rng_state", lambda *args, **kwargs: None),
                (random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
                (fused_softmax, "get_default_causal_mask", _causal),
                (fused_softmax, "get_sliding_window_causal_mask", _sliding),
            ):
                stack.enter_context(mock.patch.object(module, name, answer))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, context_parallel_size=cp, create_gloo_process_groups=False, **groups
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def config(**overrides: Any) -> TransformerConfig:
    softcap = overrides.pop("attn_logit_softcapping", CAP)
    options: dict[str, Any] = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_query_groups": GROUPS,
        "kv_channels": HEAD_DIM, "ffn_hidden_size": 2 * HIDDEN, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "use_cpu_initialization": True, "masked_softmax_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "persist_layer_norm": False, "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(), **overrides,
    }  # fmt: skip
    result = TransformerConfig(**options)
    result.attn_logit_softcapping = softcap
    return result


def model(options: TransformerConfig, core_attention: type, hot: bool, device: str = "cpu") -> GPTModel:
    """The same weights for every attention and every number of ranks."""
    torch.manual_seed(0)
    spec = with_softcap(get_gpt_layer_local_spec(), core_attention)
    result = GPTModel(
        config=options, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=SEQLEN,
        position_embedding_type="learned_absolute", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if hot and name.endswith("linear_qkv.weight"):
                parameter.mul_(HOT)
    return result.to(device).double()


def tokens() -> tuple[Tensor, Tensor]:
    """(inputs, labels), (batch, seqlen)."""
    ids = torch.randint(VOCABULARY, (BATCH, SEQLEN + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def train(gpt: GPTModel, steps: int = 3, rate: float = 0.3) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step of gradient descent, and the gradients of the last, of the whole batch on every rank."""
    group = parallel_state.get_context_parallel_group()
    ranks, rank = group.size(), group.rank()
    inputs, labels = tokens()
    positions = torch.arange(SEQLEN).expand_as(inputs)
    device = next(gpt.parameters()).device
    inputs, labels, positions = (
        cp.split_sequence(t, rank=rank, ranks=ranks).to(device) for t in (inputs, labels, positions)
    )
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for _ in range(steps):
        gpt.zero_grad()
        loss = gpt(inputs, positions, None, labels=labels).sum() / (BATCH * SEQLEN)
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
        with torch.no_grad():
            for name, p in gpt.named_parameters():
                dist.all_reduce(p.grad, group=group)
                gradients[name] = p.grad.clone()
                p -= rate * p.grad
    return losses, gradients


def part_of(name: str, whole: Tensor, mine: torch.nn.Parameter) -> Tensor:
    """The part of a gradient that this tensor-parallel rank has."""
    if not getattr(mine, "tensor_model_parallel", False):
        return whole
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(size, mine.partition_dim)[rank]
