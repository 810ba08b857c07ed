"""DTensor: the ops run on shards of the batch or of the heads; sequence shards are refused.

Attention mixes positions of a sequence, so a shard of it cannot be computed alone: that is context parallelism.
DTensor would gather such inputs silently, at the cost that sharding was meant to avoid; we say so instead.
A refusal is an UnsupportedError: any other exception leaves DTensor as a RuntimeError.

torch.distributed.tensor takes most of a second to import, so the strategies are registered once someone imports it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from . import _schema
from ._arguments import split, split_decode
from ._late import when_imported
from .errors import UnsupportedError

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
    register_sharding(_schema.decode_attention_fwd)(_decode)


class _Axes:
    """Where the axes are: of the sequence in q, k, v; of heads and batch in (tensors like q, tensors like lse)."""

    def __init__(self, packed: bool) -> None:
        self.sequence = 0 if packed else 1
        self.heads = (1, 0) if packed else (2, 1)
        self.batch = None if packed else (0, 0)


def _choices(packed: bool, q: Any, k: Any, v: Any) -> list[tuple[Any, Any]]:
    """The placements one mesh dimension may use: pairs for (tensors like q, tensors like lse)."""
    from torch.distributed.tensor import Replicate, Shard

    _refuse_placements(packed, q=q, k=k, v=v)
    axes = _Axes(packed)
    choices: list[tuple[Any, Any]] = [(Replicate(), Replicate())]
    if axes.batch is not None:
        choices.append((Shard(axes.batch[0]), Shard(axes.batch[1])))
    # Only where heads are sharded already, and evenly: DTensor would also split 3 of them as 2 and 1, which parts a
    # group of query heads from the key head that it reads.
    axis = axes.heads[0]
    meshes = zip(q.mesh.shape, q.placements, k.placements, v.placements, strict=True)
    ways = [size for size, *placements in meshes if any(p.is_shard(axis) for p in placements)]
    if ways:
        _refuse_uneven_heads(axis, ways, q=q, k=k, v=v)
        choices.append((Shard(axes.heads[0]), Shard(axes.heads[1])))
    return choices


def _refuse_uneven_heads(axis: int, ways: list[int], **tensors: Any) -> None:
    shards = 1
    for size in ways:
        shards *= size
    for name, spec in tensors.items():
        heads = spec.shape[axis]
        if heads % shards != 0:
            raise UnsupportedError(
                f"softcap_ops: heads sharded {shards} ways need a number of them divisible by {shards} in q, k and v, "
                f"got {heads} in {name}: shard fewer ways, repeat the heads of k and v, or redistribute to Replicate"
            )


def _refuse_placements(packed: bool, **tensors: Any) -> None:
    sequence = _Axes(packed).sequence
    for name, spec in tensors.items():
        for placement in spec.placements:
            if placement.is_shard(sequence):
                axis, others = ("tokens", "heads") if packed else ("sequence", "batch or the heads")
                raise UnsupportedError(
                    f"softcap_ops: {name} is sharded over its {axis} (axis {sequence}), got placements "
                    f"{tuple(spec.placements)}: shard the {others} instead, or gather it; a sequence longer than one "
                    "device needs context parallelism (softcap_ops.context_parallel_attention)"
                )
            if placement.is_partial():
                raise UnsupportedError(
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
    return [([x, y], _placements(args, [x, x, x])) for x, y in _choices(packed, *args[:3])]


def _backward(packed: bool, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    from torch.distributed.tensor import Replicate

    tail = split(args[7:], packed)[2]
    mask = tail[0] if tail else (True, True, True)
    return [
        ([x if wanted else Replicate() for wanted in mask], _placements(args, [x, y, x, x, x, x, y]))
        for x, y in _choices(packed, *args[2:5])
    ]


def _decode(*args: Any) -> list[tuple[list[Any], list[Any]]]:
    """As the dense forward; the lengths go with the batch. Blocks are shared by all sequences: replicated, but for
    their heads."""
    from torch.distributed.tensor import Replicate, Shard

    q, k, v = args[:3]
    paged, return_lse = args[5] is not None, split_decode(args[3:])[2]
    if paged:
        for name, spec in (("k_cache", k), ("v_cache", v)):
            if any(p.is_shard(0) or p.is_shard(1) for p in spec.placements):
                raise UnsupportedError(
                    f"softcap_ops: {name} is sharded over its blocks, which any sequence may use, got placements "
                    f"{tuple(spec.placements)}: shard the heads instead"
                )
    choices = []
    for x, y in _choices(False, q, k, v):
        by_batch = x == Shard(0)
        cache = Replicate() if paged and by_batch else x
        lengths = x if by_batch else Replicate()
        outputs = [x, y if return_lse else Replicate()]
        choices.append((outputs, _placements(args, [x, cache, cache, lengths, lengths, lengths])))
    return choices


when_imported("torch.distributed.tensor", register)
