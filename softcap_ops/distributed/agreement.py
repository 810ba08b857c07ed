"""Every rank makes the same call, or every rank raises: settled before any tensor is sent.

Each rank compares its call (shapes, dtype, options, scheme, sequence lengths) with the others' by one message of 40
bytes, and says in it whether its own checks failed. Over NCCL that costs the host a wait for the device, so a call
that was agreed on once is not compared again; over gloo, where every message waits for the host anyway, each call is
compared (a rank that repeats an old call while another makes a new one would otherwise hang).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import transport

_WORDS = 4  # 256 bits of digest
settled = 0  # calls that `agree` was asked about: what fails before that, the other ranks have not heard of
_agreed: dict[str, tuple[dist.ProcessGroup, set[Any]]] = {}


def agree(
    groups: Sequence[dist.ProcessGroup], facts: dict[str, Any], error: Exception | None, device: torch.device
) -> None:
    """Return if all ranks of the groups make the call that `facts` describe and none has an error; else raise.

    groups: one group, or two that together span the ranks like the rows and columns of a table.

    Raises:
        error: on the rank that has one.
        ValueError: on the others.
    """
    global settled
    settled += 1
    groups = [g for g in groups if g.size() > 1]
    if not groups:
        if error is not None:
            raise error
        return
    key = tuple(facts.items())
    wires = [transport.wire_device(g, device) for g in groups]
    known = _known(groups)
    if error is None and key in known and all(w.type != "cpu" for w in wires):
        return
    failed = error is not None
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _WORDS).digest()
    words = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, len(digest), 8)]
    for group, wire in zip(groups, wires, strict=True):
        mine = torch.tensor([int(failed), *words], dtype=torch.int64, device=wire)
        everyone = transport.all_gather(group, mine).tolist()
        failed = failed or any(row != [0, *words] for row in everyone)
    if not failed:
        known.add(key)
        return
    raise _explained(groups, facts, error)


def _known(groups: Sequence[dist.ProcessGroup]) -> set[Any]:
    name = "/".join(g.group_name for g in groups)
    group, known = _agreed.get(name, (None, set()))
    if group is not groups[0]:  # another group of that name was destroyed since
        known = set()
        _agreed[name] = (groups[0], known)
    return known


def _explained(groups: Sequence[dist.ProcessGroup], facts: dict[str, Any], error: Exception | None) -> Exception:
    """The error to raise here. Every rank knows by now that there is one, so all come to exchange the details."""
    accounts = [(dist.get_rank(), None if error is None else f"{type(error).__name__}: {error}", facts)]
    for group in groups:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, accounts, group=group)
        accounts = sorted((a for rows in gathered for a in rows), key=lambda a: a[0])
    if error is not None:
        return error
    for rank, message, _ in accounts:
        if message is not None:
            return ValueError(f"softcap_ops: rank {rank} refused this call: {message}")
    for name in facts:
        values = {rank: theirs.get(name) for rank, _, theirs in accounts}
        if len({repr(v) for v in values.values()}) > 1:
            listed = ", ".join(f"{v} on rank {rank}" for rank, v in values.items())
            return ValueError(f"softcap_ops: the ranks of the group disagree on {name}: {listed}")
    return ValueError(f"softcap_ops: the ranks of the group disagree on the call: {accounts}")
