"""The public function: check the Python types, find the group's names, unwrap DTensors, call the op."""

from __future__ import annotations

import sys
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import _schema, _validation


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    comm: str = ...,
    layout: str = ...,
    softcap: float | None,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    cu_seqlens_q_padded: Tensor | None = ...,
    cu_seqlens_k_padded: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    comm: str = ...,
    layout: str = ...,
    softcap: float | None,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    cu_seqlens_q_padded: Tensor | None = ...,
    cu_seqlens_k_padded: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    comm: str = "p2p",
    layout: str = "zigzag",
    softcap: float | None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_k_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Soft-capped attention over sequences that are split over the ranks of a process group.

    Every rank of the group calls it with its own part of the sequences and gets its own part of the result, that of
    `softcap_attention` (packed: `softcap_attention_varlen`) on the whole. See docs/context_parallel.md for which
    scheme to choose, and `softcap_ops.distributed` for helpers that split, pad and restore.

    Args:
        q: this rank's queries, (batch, seqlen_q / ranks, heads_q, head_dim); packed (rows_q / ranks, heads_q,
            head_dim); or DTensors, sharded on the sequence over the mesh dimension that `group` names.
        k, v: this rank's keys and values, (batch, seqlen_k / ranks, heads_kv, head_dim) or packed likewise.
        group: a ProcessGroup, a DeviceMesh of one dimension, a pair (DeviceMesh, dimension) or a group's name; for
            comm="a2a+p2p" a pair (a2a group, p2p group), see `two_level_groups`, or a DeviceMesh of two dimensions,
            the last of them for a2a. None takes the mesh dimension that q, a DTensor, is sharded over.
        comm: how ranks meet the keys of others. "p2p": round a ring, while computing; "all_gather": all at once;
            "a2a": trade the sequence for heads (heads_q and heads_kv divide by the ranks); "a2a+p2p": heads within
            the one group, a ring over the other.
        layout: how each sequence lies over the ranks: "zigzag" (chunks r and 2n - 1 - r of 2n on rank r of n; even
            work under a causal mask), "contiguous". Lengths divide by 2n or n; packed sequences may be padded to it.
        softcap, scale, causal, window, return_lse, deterministic, backend: see `softcap_attention`; positions are
            those in the whole sequences.
        cu_seqlens_q, cu_seqlens_k: for packed sequences, int32 (batch + 1,): first token of each whole sequence, all
            ranks together. The same on every rank.
        cu_seqlens_q_padded, cu_seqlens_k_padded: first row of each sequence where sequences are padded; rank r holds
            1/n of every entry. None: no padding.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, in tokens. Optional.

    Returns:
        out, shape and dtype of q; with return_lse (out, lse), lse (batch, heads_q, seqlen_q / ranks), packed
        (heads_q, rows_q / ranks), float32 (float64 for float64 input). Padding rows are 0, and -inf in lse.
        Differentiable, once; the gradients of k and v hold what all ranks' queries give.

    Raises:
        ValueError: an argument is wrong on some rank, or ranks disagree on the call: raised on every rank, before any
            tensor is sent. A wrong type is a TypeError, and a call no backend can serve an UnsupportedError, on the
            rank that has it, and a ValueError on the others.
    """
    if not torch.distributed.is_available():
        raise NotImplementedError("softcap_ops: this build of torch has no torch.distributed")
    from . import agreement, groups

    names = groups.group_names(_Spec.group_of(q) if group is None and _is_dtensor(q) else group)
    settled = None if torch.compiler.is_compiling() else agreement.settled
    try:
        _validation.types(q, k, v, causal, deterministic, backend)
        left, right = _validation.scalars(softcap, scale, window)
        for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if value is not None:
                _validation.integer(name, value)
        for name, text in (("comm", comm), ("layout", layout)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a str, got {type(text).__name__}")
        for name, cu in (
            ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k),
            ("cu_seqlens_q_padded", cu_seqlens_q_padded), ("cu_seqlens_k_padded", cu_seqlens_k_padded),
        ):  # fmt: skip
            if cu is not None:
                _validation.tensor(name, cu)
        if (spec := _Spec.of(q, k, v, names)) is not None:
            q, k, v = (t.to_local() for t in (q, k, v))  # type: ignore[attr-defined]
        out, lse = _schema.cp_attention_fwd(
            q, k, v, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded, max_seqlen_q, max_seqlen_k,
            names, comm, layout, softcap, scale, causal, left, right, deterministic, backend, return_lse=return_lse,
        )  # fmt: skip
    except Exception as error:
        # What fails before the op compares the ranks' calls, here or in the dispatcher, the others have yet to hear of.
        if settled is not None and settled == agreement.settled:
            _refuse(names, error, (q, k, v))
        raise
    if spec is not None:
        out, lse = spec.wrap(out, lse)
    return (out, lse) if return_lse else out


def _refuse(names: list[str], error: Exception, tensors: tuple[Any, ...]) -> None:
    """Raise `error`, and let the other ranks raise too."""
    from . import schemes

    devices = [t.device for t in tensors if isinstance(t, Tensor) and not _validation.is_fake(t)]
    with torch._C._DisableFuncTorch():  # vmap and forward mode are refused too
        schemes.refuse(names, error, devices[0] if devices else torch.device("cpu"))


def _is_dtensor(t: Any) -> bool:
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(t, DTensor)


class _Spec:
    """How DTensor inputs lie, to wrap the results the same way."""

    def __init__(self, q: Any) -> None:
        self._mesh, self._placements = q.device_mesh, q.placements
        self._packed = q.dim() == 3

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, names: list[str]) -> _Spec | None:
        """None for plain tensors. names: those of the process groups to attend over."""
        tensors = {"q": q, "k": k, "v": v}
        if not any(_is_dtensor(t) for t in tensors.values()):
            return None
        from . import groups

        for name, t in tensors.items():
            if not _is_dtensor(t):
                raise TypeError(f"{name} must be a DTensor where another of q, k and v is one")
            if t.device_mesh != q.device_mesh or t.placements != q.placements:
                raise ValueError(f"{name} must have the mesh and placements of q, {q.placements}, got {t.placements}")
            if any(p.is_partial() for p in t.placements):
                raise ValueError(f"{name} is a partial sum, got placements {t.placements}: redistribute it first")
        sharded = groups.group_names(cls.group_of(q))
        # A graph cannot look up a group by its name, to see that another one has the same ranks.
        if names != sharded and (torch.compiler.is_compiling() or groups.members(names) != groups.members(sharded)):
            raise ValueError("group must be the mesh dimension over which q is sharded on its sequence: None takes it")
        return cls(q)

    @staticmethod
    def group_of(q: Any) -> Any:
        """The mesh dimension that a DTensor is sharded over on its sequence, or the pair of them."""
        sequence = 0 if q.dim() == 3 else 1
        mesh_dims = [(q.device_mesh, i) for i, p in enumerate(q.placements) if p.is_shard(sequence)]
        if not mesh_dims:
            raise ValueError(
                f"q must be sharded on its sequence, axis {sequence}, got placements {q.placements}: "
                "softcap_attention takes DTensors that are not"
            )
        return mesh_dims[0] if len(mesh_dims) == 1 else tuple(reversed(mesh_dims))

    def wrap(self, out: Tensor, lse: Tensor) -> tuple[Any, Any]:
        from torch.distributed.tensor import DTensor, Shard

        # Axes of q to axes of lse: (batch, rows, heads) -> (batch, heads, rows), packed (rows, heads) -> (heads, rows).
        axes = {0: 1, 1: 0} if self._packed else {0: 0, 1: 2, 2: 1}
        of_lse = [Shard(axes[p.dim]) if p.is_shard() else p for p in self._placements]
        return (
            DTensor.from_local(out, self._mesh, self._placements, run_check=False),
            DTensor.from_local(lse, self._mesh, of_lse, run_check=False),
        )
