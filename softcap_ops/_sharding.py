"""DTensor: the ops run on shards of the batch or of the heads; sequence shards are refused.

Attention mixes positions of a sequence, so a shard of it cannot be computed alone: that is context parallelism.
DTensor would gather such inputs silently, at the cost that sharding was meant to avoid; we say so instead.

torch.distributed.tensor takes most of a second to import, so nothing is registered until it has been imported
by someone: `register()` is called when softcap_ops loads, and again by the Autograd kernels until it took.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

from . import _schema
from ._arguments import split

_registered = False


def register() -> None:
    """Register the strategies with DTensor if it is imported and has not got them yet."""
    global _registered
    if _registered or "torch.distributed.tensor" not in sys.modules:
        return
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # it is being imported right now, or this torch is built without distributed
        return
    _registered = True
    for packed, forward, backward in (
        (False, _schema.attention_fwd, _schema.attention_bwd),
        (True, _schema.varlen_attention_fwd, _schema.varlen_attention_bwd),
    ):
        register_sharding(forward)(partial(_forward, packed))
        register_sharding(backward)(partial(_backward, packed))


class _Axes:
    """Where the sharded axes are: (in q, k, v, out and their gradients; in lse and its gradient)."""

    def __init__(self, packed: bool) -> None:
        self.sequence = 0 if packed else 1
        self.heads = (1, 0) if packed else (2, 1)
        self.batch = None if packed else (0, 0)


def _choices(packed: bool, q: Any, k: Any) -> list[tuple[Any, Any]]:
    """The placements one mesh dimension may use: pairs for (tensors like q, tensors like lse)."""
    from torch.distributed.tensor import Replicate, Shard

    axes = _Axes(packed)
    choices: list[tuple[Any, Any]] = [(Replicate(), Replicate())]
    if axes.batch is not None:
        choices.append((Shard(axes.batch[0]), Shard(axes.batch[1])))
    heads_q, heads_kv = q.shape[axes.heads[0]], k.shape[axes.heads[0]]
    ways = math.prod(
        size for size, placement in zip(q.mesh.shape, q.placements, strict=True) if placement.is_shard(axes.heads[0])
    )
    if heads_kv % ways == 0:
        choices.append((Shard(axes.heads[0]), Shard(axes.heads[1])))
    elif ways > 1:
        raise ValueError(
            f"softcap_ops: q is sharded {ways} ways over its {heads_q} heads, which needs the heads of k and v to be "
            f"divisible by {ways}, got {heads_kv}"
        )
    return choices


def _check(packed: bool, **tensors: Any) -> None:
    sequence = _Axes(packed).sequence
    for name, spec in tensors.items():
        for placement in spec.placements:
            if placement.is_shard(sequence):
                axis, others = ("tokens", "heads") if packed else ("sequence", "batch or the heads")
                raise ValueError(
                    f"softcap_ops: {name} is sharded over its {axis} (axis {sequence}), got placements "
                    f"{tuple(spec.placements)}: shard the {others} instead, or gather it; a sequence longer than one "
                    "device needs context parallelism"
                )
            if placement.is_partial():
                raise ValueError(
                    f"softcap_ops: {name} is a partial sum, got placements {tuple(spec.placements)}: attention is not "
                    "linear in it; redistribute it to Replicate or Shard first"
                )


def _placements(args: tuple[Any, ...], leading: list[Any]) -> list[Any]:
    """One placement an argument, in order: `leading`, then Replicate for tensors and None for what is no tensor."""
    from torch.distributed.tensor import Replicate

    is_tensor = [hasattr(a, "placements") for a in args]
    wanted = leading + [Replicate()] * (len(args) - len(leading))
    return [placement if tensor else None for placement, tensor in zip(wanted, is_tensor, strict=True)]


def _forward(packed: bool, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    q, k, v = args[:3]
    _check(packed, q=q, k=k, v=v)
    return [([x, y], _placements(args, [x, x, x])) for x, y in _choices(packed, q, k)]


def _backward(packed: bool, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    from torch.distributed.tensor import Replicate

    _, _, q, k, v = args[:5]
    _check(packed, q=q, k=k, v=v)
    tail = split(args[7:], packed)[2]
    mask = tail[0] if tail else (True, True, True)
    return [
        ([x if wanted else Replicate() for wanted in mask], _placements(args, [x, y, x, x, x, x, y]))
        for x, y in _choices(packed, q, k)
    ]
