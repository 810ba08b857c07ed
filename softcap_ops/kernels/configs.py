"""Block shapes, warps and pipeline stages, by GPU family, head_dim and dtype.

Those for Hopper were chosen by benchmarks/tune_triton.py on an H200. No other GPU was at hand: there they are such that
nothing spills, as far as compiling can tell. Those for float32 spill, and are not tuned.

A backward is a list of passes over the scores, each computing P anew. Two accumulators of head_dim 256 do not fit in
registers, so dk and dv are passes of their own there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Config(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys
    warps: int
    stages: int
    exp2: int = 0  # of every 4 exponentials, how many by arithmetic: see pieces.exp2


class Pass(NamedTuple):
    gradients: str  # "kv", "k", "v" or "q"
    config: Config


class Configs(NamedTuple):
    forward: Config
    backward: tuple[Pass, ...]


def _two(keys: Config, queries: Config) -> tuple[Pass, ...]:
    return Pass("kv", keys), Pass("q", queries)


# By head_dim, a power of two. 16-bit inputs.
_HOPPER = {
    64: Configs(Config(64, 64, 4, 2, 1), _two(Config(64, 64, 4, 3), Config(64, 64, 4, 3))),
    128: Configs(Config(64, 64, 4, 3), _two(Config(64, 64, 4, 2), Config(64, 32, 4, 3))),
    256: Configs(
        Config(128, 64, 8, 2, 2),
        (Pass("k", Config(64, 128, 8, 1, 1)), Pass("v", Config(32, 64, 4, 2)), Pass("q", Config(128, 32, 8, 2))),
    ),
}
_BLACKWELL = {
    64: Configs(Config(128, 128, 8, 2), _two(Config(64, 64, 4, 1), Config(128, 64, 8, 2))),
    128: Configs(Config(128, 64, 8, 2), _two(Config(64, 128, 8, 1), Config(128, 64, 8, 1))),
    256: Configs(
        Config(128, 64, 8, 1),
        (Pass("k", Config(64, 64, 4, 1)), Pass("v", Config(64, 64, 4, 1)), Pass("q", Config(64, 64, 4, 1))),
    ),
}
# Within the 99 KiB of shared memory of compute capability 8.6, 8.9 and 12.0.
_SMALL = {
    64: Configs(Config(64, 64, 4, 3), _two(Config(32, 64, 8, 1), Config(64, 32, 4, 2))),
    128: Configs(Config(64, 64, 4, 2), _two(Config(32, 64, 8, 2), Config(64, 32, 4, 1))),
    256: Configs(Config(64, 32, 8, 1), _two(Config(32, 32, 8, 1), Config(64, 32, 8, 1))),
}
_FLOAT32 = {
    64: Configs(Config(64, 32, 4, 2), _two(Config(32, 32, 4, 1), Config(32, 32, 4, 1))),
    128: Configs(
        Config(32, 32, 4, 1),
        (Pass("k", Config(16, 32, 4, 1)), Pass("v", Config(16, 32, 4, 1)), Pass("q", Config(32, 16, 4, 1))),
    ),
    256: Configs(
        Config(16, 16, 4, 1),
        (Pass("k", Config(16, 16, 4, 1)), Pass("v", Config(16, 16, 4, 1)), Pass("q", Config(16, 16, 4, 1))),
    ),
}

# Triton's interpreter: tiles so small that short sequences have full ones and edges of every kind.
_INTERPRETER = {
    64: Configs(Config(32, 16, 1, 1), _two(Config(16, 32, 1, 1), Config(32, 16, 1, 1))),
    256: Configs(
        Config(32, 16, 1, 1),
        (Pass("k", Config(16, 32, 1, 1)), Pass("v", Config(32, 16, 1, 1)), Pass("q", Config(32, 16, 1, 1))),
    ),
}
_INTERPRETER[128] = _INTERPRETER[64]


def configs_of(capability: tuple[int, int] | None, dtype: torch.dtype, block_d: int) -> Configs:
    """For tensors on a GPU of that compute capability (None: the interpreter) and a head_dim padded to block_d."""
    width = max(block_d, 64)
    if capability is None:
        return _INTERPRETER[width]
    if dtype == torch.float32:
        return _FLOAT32[width]
    return {9: _HOPPER, 10: _BLACKWELL}.get(capability[0], _SMALL)[width]
