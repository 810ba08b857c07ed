"""Wrong calls, on all ranks or on one: what each rank gets to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cp_cases import two_level

import softcap_ops

_SHAPE = (2, 8, 4, 8)


def _cu(*entries: int) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int32)


# name: (what is wrong, part of the message on the ranks that are wrong)
MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "odd length": ({"q": (2, 7, 4, 8), "k": (2, 7, 4, 8)}, "must be a multiple of"),
    "odd length of k": ({"k": (2, 5, 4, 8)}, "k must hold an even number of positions"),
    "batches differ": ({"k": (1, 8, 4, 8)}, "k must have the batch of q"),
    "heads do not group": ({"k": (2, 8, 3, 8)}, "positive multiple"),
    "heads do not divide": ({"q": (2, 8, 6, 8), "k": (2, 8, 3, 8), "comm": "a2a"}, "must divide by"),
    "comm": ({"comm": "ring"}, "comm must be one of ['p2p', 'all_gather', 'a2a', 'a2a+p2p'], got 'ring'"),
    "layout": ({"layout": "striped"}, "layout must be one of ['zigzag', 'contiguous'], got 'striped'"),
    "one group for two levels": ({"comm": "a2a+p2p"}, "needs a pair (a2a group, p2p group)"),
    "softcap": ({"softcap": -1.0}, "softcap must be finite and positive"),
    "nan softcap": ({"softcap": float("nan")}, "softcap must be finite and positive"),
    "scale": ({"scale": float("inf")}, "scale must be finite"),
    "window": ({"window": (-2, 0)}, "window[0] must be -1 (unlimited) or at least 0"),
    "window of three": ({"window": (1, 2, 3)}, "window must be a pair"),
    "softcap of a wrong type": ({"softcap": "50"}, "softcap must be a number or None"),
    "causal of a wrong type": ({"causal": 1}, "causal must be a bool, got int"),
    "deterministic of a wrong type": ({"deterministic": "yes"}, "deterministic must be a bool or None, got str"),
    "backend of a wrong type": ({"backend": 3}, "backend must be a str or None, got int"),
    "cu_seqlens of a wrong type": ({"cu_seqlens_q": [0, 16]}, "cu_seqlens_q must be a Tensor, got list"),
    "a plain k beside DTensors": ({"dtensors": "qv"}, "k must be a DTensor where another of q, k and v is one"),
    "sparse": ({"sparse": True}, "Could not run 'softcap_ops::cp_attention_fwd'"),
    "dtype": ({"dtype": torch.int64}, "q must be float32"),
    "backend": ({"backend": "none"}, "backend must be None or one of"),
    "padded without packing": ({"cu_seqlens_q_padded": _cu(0, 8)}, "cu_seqlens_q_padded is for packed sequences"),
    "one cu_seqlens": ({"cu_seqlens_q": _cu(0, 8)}, "cu_seqlens_k must be given"),
}
_PACKED = {"q": (16, 4, 8), "k": (16, 4, 8), "cu_seqlens_q": _cu(0, 16, 32), "cu_seqlens_k": _cu(0, 16, 32)}
MISUSES |= {
    "packed, not padded": ({**_PACKED, "cu_seqlens_q": _cu(0, 13, 32)}, "see softcap_ops.distributed.pad_sequences"),
    "packed, too long": ({**_PACKED, "cu_seqlens_k": _cu(0, 16, 64)}, "must end within the 16 x 2 rows"),
    "packed, decreasing": ({**_PACKED, "cu_seqlens_k": _cu(0, 16, 8)}, "must not decrease"),
    "packed, of two dimensions": (
        {**_PACKED, "cu_seqlens_q": _cu(0, 16, 32)[None], "cu_seqlens_k": _cu(0, 16, 32)[None]},
        "cu_seqlens_q must have shape (batch + 1,), got (1, 3)",
    ),
    "packed, int64": ({**_PACKED, "cu_seqlens_q": _cu(0, 16, 32).long()}, "cu_seqlens_q must be int32"),
    "packed, padding too small": ({**_PACKED, "cu_seqlens_q_padded": _cu(0, 8, 24)}, "room for its 16 tokens"),
    "packed, max_seqlen": ({**_PACKED, "max_seqlen_q": 15}, "max_seqlen_q must be at least the longest sequence, 16"),
    "packed, batches differ": ({**_PACKED, "cu_seqlens_k": _cu(0, 32)}, "as many entries as cu_seqlens_q"),
}

# name: what rank 1 passes that rank 0 does not
DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 30.0}, "disagree on softcap: 50.0 on rank 0, 30.0 on rank 1"),
    "scale": ({"scale": 0.5}, "disagree on scale"),
    "causal": ({"causal": False}, "disagree on causal: True on rank 0, False on rank 1"),
    "window": ({"window": (4, -1)}, "disagree on window: (-1, -1) on rank 0, (4, -1) on rank 1"),
    "comm": ({"comm": "all_gather"}, "disagree on comm: p2p on rank 0, all_gather on rank 1"),
    "layout": ({"layout": "contiguous"}, "disagree on layout"),
    "length": ({"q": (2, 6, 4, 8), "k": (2, 6, 4, 8)}, "disagree on the shape of q"),
    "keys": ({"k": (2, 16, 4, 8)}, "disagree on the shape of k"),
    "batch": ({"q": (1, 8, 4, 8), "k": (1, 8, 4, 8)}, "disagree on the shape of q"),
    "dtype": ({"dtype": torch.float64}, "disagree on the dtype of q"),
    "packing": (_PACKED, "disagree on the shape of q"),
    "return_lse": ({"return_lse": True}, "disagree on return_lse: False on rank 0, True on rank 1"),
    "gradient": ({"requires_grad": True}, "disagree on whether a gradient is needed"),
}


def _call(wrong: dict[str, Any], compiled: bool) -> Any:
    options: dict[str, Any] = {"q": _SHAPE, "k": _SHAPE, "dtype": torch.float32, "requires_grad": False}
    options |= {"softcap": 50.0, "causal": True, "group": dist.group.WORLD, **wrong}
    shape_q, shape_k, dtype, grad = (options.pop(name) for name in ("q", "k", "dtype", "requires_grad"))
    q, k, v = (torch.ones(shape, dtype=dtype, requires_grad=grad) for shape in (shape_q, shape_k, shape_k))
    if options.pop("sparse", False):
        q, k, v = (t.to_sparse() for t in (q, k, v))
    if names := options.pop("dtensors", ""):
        q, k, v = (_sharded(t) if name in names else t for name, t in zip("qkv", (q, k, v), strict=True))
    torch._dynamo.reset()
    attention = softcap_ops.context_parallel_attention
    if compiled:
        attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
    try:
        return attention(q, k, v, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _sharded(t: torch.Tensor) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(t, mesh, [Shard(1)], run_check=False)


def everywhere(name: str) -> Any:
    """Every rank makes the same mistake."""
    return _call(MISUSES[name][0], False)


def on_one_rank(name: str, wrong_rank: int, compiled: bool) -> Any:
    """One rank makes the mistake, the others a good call they have made before."""
    good = _call({}, compiled)
    assert isinstance(good, torch.Tensor), good
    result = _call(MISUSES[name][0] if dist.get_rank() == wrong_rank else {}, compiled)
    assert isinstance(_call({}, compiled), torch.Tensor)  # nothing is left over
    return result


def disagreeing(name: str, compiled: bool) -> Any:
    assert isinstance(_call({}, compiled), torch.Tensor)
    result = _call(DISAGREEMENTS[name][0] if dist.get_rank() == 1 else {}, compiled)
    assert isinstance(_call({}, compiled), torch.Tensor)
    return result


def two_level_disagreement(wrong_rank: int) -> Any:
    groups = {"group": two_level(dist.get_world_size()), "comm": "a2a+p2p"}
    assert isinstance(_call(groups, False), torch.Tensor)
    return _call({**groups, **({"softcap": 30.0} if dist.get_rank() == wrong_rank else {})}, False)


def outside_the_group() -> Any:
    """Rank 0 is in the group, the others are not; it works for rank 0, alone in it."""
    group = dist.new_group([0])
    return _call({"group": group}, False)


def wrong_groups() -> list[Any]:
    return [_call({"group": group}, False) for group in (None, 5, "no such group", (dist.group.WORLD,) * 3)]


def wrong_mesh_dimensions() -> list[Any]:
    """Of a mesh without rank 0: dimensions that it does not have, then, on rank 0, one that it has."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [1], mesh_dim_names=("cp",))
    return [_call({"group": (mesh, dim)}, False) for dim in ("dp", 1, "cp")]


def another_mesh_dimension(compiled: bool) -> Any:
    """q is sharded over the one, and the group is the other: as many ranks, but others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    x = DTensor.from_local(torch.ones(_SHAPE), mesh, [Replicate(), Shard(1)], run_check=False)
    attention = softcap_ops.context_parallel_attention
    if compiled:
        attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
    same_ranks = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    if not compiled:
        attention(x, x, x, group=same_ranks, softcap=5.0)
    for group in ((mesh, "cp"), None):
        attention(x, x, x, group=group, softcap=5.0)
    try:
        return attention(x, x, x, group=(mesh, "dp"), softcap=5.0)
    except Exception as error:
        return str(error)


def two_levels_after_other_groups() -> list[list[int]]:
    """Ranks that have made different numbers of groups before, and groups of a part of the job."""
    from softcap_ops.distributed import two_level_groups

    part = dist.new_group([0, 1, 3])
    results = []
    for group, size in ((None, 2), (part, 3), (part, 1)):
        for made in two_level_groups(group, a2a_size=size):
            outside = made is dist.GroupMember.NON_GROUP_MEMBER
            results.append([] if outside else dist.get_process_group_ranks(made))
    with pytest.raises(ValueError, match="a2a_size must divide the 3 ranks of the group, got 2"):
        two_level_groups(part, a2a_size=2)
    return results


def collectives_of_repeated_calls() -> tuple[int, int]:
    """How many messages of the agreement a first and a second call of one configuration make."""
    from softcap_ops.distributed import agreement

    counts = []
    original = agreement.transport.all_gather
    calls = 0

    def counting(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args)

    agreement.transport.all_gather = counting
    try:
        for _ in range(2):
            calls = 0
            _call({"softcap": 12.5}, False)
            counts.append(calls)
    finally:
        agreement.transport.all_gather = original
    return counts[0], counts[1]


def uneven_lengths(layout: str) -> Any:
    """2999 tokens over four ranks, as a loader without padding deals them out."""
    shape = (1, 749 if dist.get_rank() == 3 else 750, 4, 8)
    return _call({"q": shape, "k": shape, "layout": layout}, False)
