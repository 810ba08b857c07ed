"""The table of docs/backends.md: what each backend serves, as its `support_error` says, and how fast it was measured.

usage: python benchmarks/backends_table.py [--json FILE ...] [--write]      (--write: into docs/backends.md)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from softcap_ops import backends
from softcap_ops.backends import Problem

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/backends.md"
SPEEDS = tuple(ROOT / f"benchmarks/results/h200_{name}.json" for name in ("attention", "triton"))
BEGIN, END = "<!-- table: benchmarks/backends_table.py -->\n", "<!-- end of table -->\n"

CPU = Problem(
    device_type="cpu", device_index=None, capability=None, dtype=torch.bfloat16, head_dim=128, heads_q=4, heads_kv=2,
    packed=False, softcap=50.0, causal=True, window=(-1, -1), deterministic=False, needs_backward=True,
)  # fmt: skip
GPUS = {"Turing": (7, 5), "Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HEAD_DIMS = range(1, 513)


def table(speeds: Iterable[Path] = SPEEDS) -> str:
    """Markdown: a column a backend, in order of preference."""
    columns = {b.NAME: _column(b) for b in backends._TABLE}
    for shape, row in _speeds(speeds).items():
        for name, column in columns.items():
            column[shape] = row.get(name, "")
    labels = list(next(iter(columns.values())))
    lines = ["| | " + " | ".join(f"`{name}`" for name in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {label} | " + " | ".join(column[label] for column in columns.values()) + " |" for label in labels]
    return "\n".join(lines) + "\n"


def _column(backend: Any) -> dict[str, str]:
    def serves(**changes: Any) -> bool:
        return backend.support_error(dataclasses.replace(base, **changes)) is None

    gpus = [
        name
        for name, capability in GPUS.items()
        if backend.support_error(
            dataclasses.replace(CPU, device_type="cuda", device_index=0, capability=capability, head_dim=64)
        )
        is None
    ]
    capability = (9, 0) if "Hopper" in gpus else GPUS[gpus[0]] if gpus else None
    base = CPU if not gpus else dataclasses.replace(CPU, device_type="cuda", device_index=0, capability=capability)
    return {
        "runs on": ", ".join(gpus) or "CPU",
        "dtypes": ", ".join(str(d).removeprefix("torch.") for d in DTYPES if serves(dtype=d)),
        "head_dim, forward": _ranges(lambda d: serves(head_dim=d, needs_backward=False)),
        "head_dim, backward": _ranges(lambda d: serves(head_dim=d)),
        "head_dim, deterministic backward": _ranges(lambda d: serves(head_dim=d, deterministic=True)),
        "packed sequences": _yes(serves(packed=True), serves(packed=True, needs_backward=False)),
        "window": _yes(serves(window=(63, 0)), serves(window=(63, 0), needs_backward=False)),
        "cap off": _yes(serves(softcap=0.0), serves(softcap=0.0, needs_backward=False)),
        "asked for": "by name or variable" if _opt_in(backend) else "",
    }


def _opt_in(backend: Any) -> bool:
    return backend.opt_in_error() is not None


def _yes(both: bool, forward: bool) -> str:
    return "yes" if both else "forward" if forward else "no"


def _ranges(serves: Callable[[int], bool]) -> str:
    served = [d for d in HEAD_DIMS if serves(d)]
    if len(served) == len(HEAD_DIMS):
        return "any"
    if served == list(range(1, len(served) + 1)):
        return f"up to {served[-1]}" if served else "none"
    return ", ".join(map(str, served)) if 0 < len(served) < 8 else f"{len(served)} of those up to {served[-1]}"


def _speeds(paths: Iterable[Path]) -> dict[str, dict[str, str]]:
    """TFLOP/s, forward / backward, by shape and backend."""
    rows: list[dict[str, Any]] = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    found: dict[str, dict[str, str]] = {}
    for r in rows:
        prefix, _, name = r["provider"].partition(", ")
        if prefix == "ours":
            both = (f"{r[f'{way}_tflops']:.0f}" if r[f"{way}_tflops"] else "-" for way in ("forward", "backward"))
            found.setdefault(f"{r['shape']}, TFLOP/s", {})[name] = " / ".join(both)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, nargs="*", default=SPEEDS, help="what benchmarks/bench_attention.py wrote")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    text = table(args.json)
    print(text, end="")
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
