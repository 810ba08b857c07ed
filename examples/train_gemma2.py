"""Trains a small Gemma-2 on English text, its attention replaced by softcap_ops, and checks it against the original.

The model is transformers' own Gemma2ForCausalLM with a small random configuration: logits capped at 50, a sliding
window on every other layer, grouped key and value heads. It reads bytes; the text is the language reference that ships
with Python (pydoc_data.topics). The loss is compiled as one graph. The same training then runs with transformers' eager
attention, from the same weights on the same batches: the losses must agree step by step.

    make demo            or, with the package installed:  python examples/train_gemma2.py

On a machine with a CUDA GPU and a backend for it the same command trains there, in bfloat16.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib
import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from tqdm import tqdm
from transformers import Gemma2Config, Gemma2ForCausalLM

import softcap_ops
from softcap_ops.integrations import transformers as integration

matplotlib.use("Agg")

CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 48,  # the scale is 48 ** -0.5, not head_dim ** -0.5
    "sliding_window": 128,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_dropout": 0.0,
}
# Query and key weights are drawn this much wider, so that scores pass the cap: at transformers' own 0.02 they stay
# below 1, and a cap of 50 changes nothing.
HOT = 16.0


def new_model(seqlen: int, device: str) -> Gemma2ForCausalLM:
    """The same weights every time."""
    torch.manual_seed(0)
    config = Gemma2Config(**CONFIG, max_position_embeddings=seqlen)
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= HOT
            layer.self_attn.k_proj.weight *= HOT
    return model.to(device).train()


def batches(batch: int, seqlen: int, device: str) -> Iterator[Tensor]:
    """Random stretches of the text as byte values, (batch, seqlen); the same ones every time."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - seqlen, (batch,), generator=generator)
        yield torch.stack([text[start : start + seqlen] for start in starts.tolist()]).long().to(device)


def compiled_loss(model: Gemma2ForCausalLM, device: str, found: Counter[str]) -> Any:
    """The loss of a batch as one compiled graph; `found` counts our ops in its forward and backward."""

    def count(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.update(str(n.target) for n in graph.graph.nodes if str(n.target).startswith("softcap_ops."))
        return compile_fx_inner(graph, inputs, **options)

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return torch.compile(
        loss,
        fullgraph=True,
        dynamic=False,
        backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=count),
    )


def train(name: str, implementation: str, args: argparse.Namespace, device: str) -> dict[str, Any]:
    """One training run. Speed is that of the steps after the first, which compiles."""
    model = new_model(args.seqlen, device)
    model.set_attn_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    found: Counter[str] = Counter()
    loss_of = compiled_loss(model, device, found)
    source = batches(args.batch, args.seqlen, device)
    losses: list[float] = []
    started = compiled = time.perf_counter()
    with tqdm(total=args.steps, desc=f"{name:<34}", unit="step", dynamic_ncols=True) as bar:
        for step in range(args.steps):
            loss = loss_of(next(source))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 0:
                compiled = time.perf_counter()
            bar.set_postfix_str(f"loss {losses[-1]:.3f}")
            bar.update()
    seconds = time.perf_counter() - compiled
    tokens = (args.steps - 1) * args.batch * args.seqlen
    return {
        "model": model,
        "losses": losses,
        "found": found,
        "compile": compiled - started,
        "speed": tokens / seconds,
    }


@torch.no_grad()
def first_loss(capped: bool, implementation: str, args: argparse.Namespace, device: str) -> float:
    """The loss before training, with the cap or without."""
    model = new_model(args.seqlen, device).eval()
    model.set_attn_implementation(implementation)
    if not capped:
        model.config.attn_logit_softcapping = None
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
    tokens = next(batches(args.batch, args.seqlen, device))
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()


def onnx_refusal(model: Gemma2ForCausalLM, folder: Path) -> str:
    """What torch.onnx.export says of the trained model."""
    tokens = torch.zeros((1, 32), dtype=torch.long, device=model.device)
    path = folder / "gemma2.onnx"
    try:
        torch.onnx.export(model.eval(), (), str(path), kwargs={"input_ids": tokens, "use_cache": False}, verbose=False)
    except Exception as error:
        return next(line for line in str(error).splitlines() if "softcap_ops:" in line).strip()
    raise AssertionError(f"torch.onnx.export wrote {path} of a model that caps")


def plot(ours: dict[str, Any], eager: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(eager["losses"], color="#e08214", linewidth=5, alpha=0.5, label="transformers eager")
    axes.plot(ours["losses"], color="#2d004b", linewidth=1.5, label="softcap_ops")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("Gemma-2, logits capped at 50: the same training through two attentions")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch", type=int, help="sequences in a step; 2, or 4 on a GPU")
    parser.add_argument("--seqlen", type=int, help="bytes in a sequence; 1024, or 2048 on a GPU")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the plot goes")
    args = parser.parse_args()
    started = time.perf_counter()
    warnings.filterwarnings("ignore")
    # A cached graph would be loaded without passing `count`.
    torch._functorch.config.enable_autograd_cache = False
    args.out.mkdir(parents=True, exist_ok=True)

    usable = [name for name, reason in softcap_ops.available_backends().items() if reason is None]
    device = "cuda" if torch.cuda.is_available() and any(name != "cpu" for name in usable) else "cpu"
    args.batch = args.batch or (4 if device == "cuda" else 2)
    args.seqlen = args.seqlen or (2048 if device == "cuda" else 1024)
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    implementation = integration.register()
    parameters = sum(p.numel() for p in new_model(args.seqlen, device).parameters())
    print(f"Gemma-2, {parameters / 1e6:.1f}M parameters, {args.batch} x {args.seqlen} bytes a step, on {where}")
    print(f"softcap_ops backends installed: {', '.join(usable)}")

    capped, uncapped = (first_loss(c, implementation, args, device) for c in (True, False))
    assert abs(capped - uncapped) > 1e-3, f"the cap does not bite: loss {capped} with it, {uncapped} without"

    ours = train("softcap_ops, compiled", implementation, args, device)
    eager = train("transformers eager, compiled", "eager", args, device)

    # Each sums in its own order. From equal weights that is rounding, of bfloat16 on a GPU; training then amplifies it
    # step by step: hot weights make it chaotic.
    first_tolerance, tolerance = (5e-3, 1e-1) if device == "cuda" else (1e-5, 1e-2)
    differences = [abs(a - b) / b for a, b in zip(ours["losses"], eager["losses"], strict=True)]
    worst = max(differences)
    assert differences[0] < first_tolerance, f"first losses differ by {differences[0]:.1e} of their value"
    assert worst < tolerance, f"losses differ by {worst:.1e} of their value, more than {tolerance:.0e}"
    assert ours["losses"][-1] < ours["losses"][0] - 0.5, "the loss did not fall"
    layers = CONFIG["num_hidden_layers"]
    expected = {"softcap_ops.attention_fwd.default": layers, "softcap_ops.attention_bwd.default": layers}
    assert ours["found"] == expected, f"expected {expected} in the compiled graph, found {dict(ours['found'])}"
    refusal = onnx_refusal(ours["model"], args.out)
    path = args.out / "train_gemma2.png"
    plot(ours, eager, path)

    print()
    print(f"loss                   {ours['losses'][0]:.3f} -> {ours['losses'][-1]:.3f} in {args.steps} steps")
    print(
        f"against eager          losses differ by {differences[0]:.0e} of their value at the first step, by at most "
        f"{worst:.0e} at any (allowed: {first_tolerance:.0e}, {tolerance:.0e})"
    )
    print(f"the cap bites          first loss {capped:.4f} with it, {uncapped:.4f} without")
    print(f"tokens per second      {ours['speed']:,.0f} softcap_ops, {eager['speed']:,.0f} transformers eager")
    print(f"compiling              {ours['compile']:.0f} s and {eager['compile']:.0f} s")
    print("in the captured graph  " + ", ".join(f"{count} x {op}" for op, count in sorted(expected.items())))
    print(f"torch.onnx.export      {refusal}")
    print(f"loss plot              {path.resolve()}")
    print(f"took                   {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
