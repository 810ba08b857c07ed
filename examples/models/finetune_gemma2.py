"""Fine-tune a Gemma-2 checkpoint with transformers, its attention by softcap_ops.

python examples/models/finetune_gemma2.py                                  # a small random checkpoint, made on the spot
python examples/models/finetune_gemma2.py --model google/gemma-2-2b        # yours

Batches are padded, layers are recomputed in the backward (gradient checkpointing), and the result is saved as any
transformers model is. `attn_implementation=register()` is all that names softcap_ops.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from softcap_ops.integrations.transformers import register


def small_checkpoint(path: Path) -> str:
    """Gemma-2 in small: capped at 50, a window on every other layer, weights wide enough for the cap to bite."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=16, attention_dropout=0.0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 40
            layer.self_attn.k_proj.weight *= 40
    model.save_pretrained(path)
    return str(path)


def batches(vocabulary: int, batch: int, seqlen: int, device: str) -> Any:
    """Counting up, from anywhere and padded on the right: (input_ids, attention_mask, labels)."""
    generator = torch.Generator().manual_seed(0)
    while True:
        start = torch.randint(1, vocabulary, (batch, 1), generator=generator)
        ids = (start + torch.arange(seqlen) - 1) % (vocabulary - 1) + 1
        length = torch.randint(seqlen // 2, seqlen + 1, (batch, 1), generator=generator)
        mask = torch.arange(seqlen) < length
        yield {
            "input_ids": ids.where(mask, 0).to(device),
            "attention_mask": mask.long().to(device),
            "labels": ids.where(mask, -100).to(device),
        }


def load(checkpoint: str, implementation: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=implementation, dtype=dtype)


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune Gemma-2 with softcap_ops attention.")
    parser.add_argument("--model", help="a transformers checkpoint; by default a small random one")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--seqlen", type=int, default=48, help="tokens in a row, padding included")
    parser.add_argument("--out", type=Path, help="where the result goes; by default nowhere")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.model or small_checkpoint(Path(folder, "gemma2"))
        model, eager = (load(checkpoint, name, dtype).to(device) for name in (register(), "eager"))
    model.train()

    source = batches(min(model.config.vocab_size, 256), args.batch, args.seqlen, device)
    first = next(source)
    with torch.no_grad():
        ours, theirs = loss_of(model, first).item(), loss_of(eager, first).item()
    print(f"loss before: {ours:.5f}, by transformers' eager attention: {theirs:.5f}")
    assert abs(ours - theirs) < (1e-4 if dtype == torch.float32 else 2e-2) * theirs
    del eager

    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if args.model is None else 1e-5)
    losses = []
    for _ in range(args.steps):
        loss = loss_of(model, next(source))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss after {args.steps} steps: {losses[-1]:.5f}")
    assert losses[-1] < losses[0]
    if args.out is not None:
        model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
