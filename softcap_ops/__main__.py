"""`python -m softcap_ops`: what this machine has, and what each backend would say to a few typical calls."""

from __future__ import annotations

import dataclasses
import platform

import torch

from . import __version__, _extension, backends
from .backends import Problem

_BASE = Problem(
    device_type="cpu",
    device_index=None,
    capability=None,
    dtype=torch.bfloat16,
    head_dim=256,
    heads_q=16,
    heads_kv=8,
    packed=False,
    softcap=50.0,
    causal=True,
    window=(-1, -1),
    deterministic=False,
    needs_backward=True,
)

# What to ask: a name a person recognises, and how the call differs from training Gemma-2 9B in bfloat16.
_CALLS: tuple[tuple[str, dict[str, object]], ...] = (
    ("Gemma-2 9B, training", {}),
    ("  sliding window 4096", {"window": (4095, 0)}),
    ("  packed sequences", {"packed": True}),
    ("  deterministic", {"deterministic": True}),
    ("  float16", {"dtype": torch.float16}),
    ("  float32", {"dtype": torch.float32}),
    ("  inference", {"needs_backward": False}),
    ("  decoding on a KV cache", {"needs_backward": False, "cached": True}),
    ("  in blocks of 16 keys", {"needs_backward": False, "cached": True, "block_size": 16}),
    ("  in blocks of 256 keys", {"needs_backward": False, "cached": True, "block_size": 256}),
    ("Gemma-2 27B, training", {"head_dim": 128, "heads_q": 32, "heads_kv": 16}),
    ("Grok-1, inference", {"head_dim": 128, "heads_q": 48, "softcap": 30.0, "needs_backward": False}),
    ("no cap, head_dim 64", {"head_dim": 64, "softcap": 0.0}),
)


def report() -> str:
    """The report as text: versions and devices, each backend's state, and a table of verdicts a device."""
    lines = [
        f"softcap_ops {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}",
        f"CPU kernel: {_extension.LOAD_ERROR or 'loaded'}; {torch.get_num_threads()} threads",
    ]
    devices: list[tuple[str, dict[str, object]]] = [("CPU", {})]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            capability = torch.cuda.get_device_capability(i)
            name = f"cuda:{i} {torch.cuda.get_device_name(i)} (compute capability {capability[0]}.{capability[1]})"
            devices.append((name, {"device_type": "cuda", "device_index": i, "capability": capability}))
    else:
        lines.append("CUDA: no usable GPU")
    lines += ["", "backends, in order of preference:"]
    installed = backends.available_backends()
    width = max(map(len, installed))
    lines += [f"  {name:<{width}}  {reason or 'installed'}" for name, reason in installed.items()]
    for name, device in devices:
        lines += ["", *_verdicts(name, device)]
    return "\n".join(lines)


def _verdicts(device_name: str, device: dict[str, object]) -> list[str]:
    """A table, calls down and backends across: `*` runs the call, `yes` could, a number is the reason below it."""
    names = list(backends.available_backends())
    width = max(len(call) for call, _ in _CALLS)
    notes: dict[str, int] = {}
    rows = []
    for call, change in _CALLS:
        verdicts = backends.refusals(dataclasses.replace(_BASE, **(device | change)))  # type: ignore[arg-type]
        chosen = next((name for name, reason in verdicts.items() if reason is None), None)
        cells = []
        for name in names:
            reason = verdicts[name]
            if reason is None:
                cells.append("*" if name == chosen else "yes")
            else:
                cells.append(f"({notes.setdefault(f'{name}: {reason}', len(notes) + 1)})")
        rows.append(f"  {call:<{width}}  " + "  ".join(f"{cell:<6}" for cell in cells).rstrip())
    header = f"  {'':<{width}}  " + "  ".join(f"{name:<6}" for name in names).rstrip()
    legend = [f"  ({number}) {note}" for note, number in notes.items()]
    return [f"{device_name}: * = selected, yes = could run it", header, *rows, *legend]


if __name__ == "__main__":
    print(report())
