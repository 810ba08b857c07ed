"""Process groups: what a user may pass for one, and their names, by which an op of a compiled graph finds them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_ACCEPTED = (
    "a ProcessGroup, a one-dimensional DeviceMesh, a pair (DeviceMesh, dimension), a group's name, or for "
    'comm="a2a+p2p" a pair (a2a group, p2p group) or a two-dimensional DeviceMesh whose last dimension is the a2a one'
)


def group_names(group: Any) -> list[str]:
    """The names of the one group, or of the (a2a, p2p) pair, that `group` stands for.

    Raises ValueError if this rank is not in it, TypeError for anything that is no group.
    """
    if isinstance(group, str):
        return [group]
    if isinstance(group, dist.ProcessGroup):
        return [group.group_name]
    if _is_mesh(group):
        if group.ndim == 1:
            return [_mesh_group(group, 0)]
        if group.ndim == 2:
            return [_mesh_group(group, 1), _mesh_group(group, 0)]
        raise ValueError(
            f"group: a DeviceMesh must have one or two dimensions, got {group.ndim}: pass (mesh, dimension)"
        )
    if isinstance(group, (tuple, list)) and len(group) == 2:
        if _is_mesh(group[0]) and isinstance(group[1], (int, str)):
            return [_mesh_group(*group)]
        return [*group_names(group[0]), *group_names(group[1])]
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this rank is not a member of the process group")
    raise TypeError(f"group must be {_ACCEPTED}, got {type(group).__name__}")


def _is_mesh(group: Any) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(group, DeviceMesh)


def _mesh_group(mesh: Any, dim: int | str) -> str:
    names = mesh.mesh_dim_names or ()
    if dim not in names and dim not in range(-mesh.ndim, mesh.ndim):
        raise ValueError(f"group: the DeviceMesh has no dimension {dim!r}, but {mesh.ndim}, named {names}")
    if mesh.get_coordinate() is None:
        raise ValueError("group: this rank is not a member of the DeviceMesh")
    return mesh.get_group(dim).group_name


def resolve(names: list[str]) -> list[dist.ProcessGroup]:
    """The groups of these names. Raises ValueError for an unknown one."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    result = []
    for name in names:
        try:
            result.append(_resolve_process_group(name))  # type: ignore[arg-type]
        except RuntimeError as error:
            raise ValueError(f"group: this rank knows no process group named {name!r}") from error
    return result


def members(names: list[str]) -> list[list[int]]:
    """The ranks of each of these groups."""
    return [dist.get_process_group_ranks(group) for group in resolve(names)]


def two_level_groups(
    group: dist.ProcessGroup | None = None, *, a2a_size: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """See softcap_ops.distributed.two_level_groups."""
    outside = dist.GroupMember.NON_GROUP_MEMBER
    mine = [] if group is outside else dist.get_process_group_ranks(group)
    asked: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(asked, (tuple(mine), a2a_size))
    asked = list(dict.fromkeys(entry for entry in asked if entry[0]))
    for ranks, size in asked:
        if size < 1 or len(ranks) % size:
            raise ValueError(f"a2a_size must divide the {len(ranks)} ranks of the group, got {size}")
    # Every rank creates all groups, those of others too. That only their members do so is on offer
    # (use_local_synchronization), and hangs where these have created different numbers of groups before.
    pair: list[Any] = [outside, outside]
    for ranks, size in asked:
        rows = [ranks[start : start + size] for start in range(0, len(ranks), size)]
        for level, groups in enumerate((rows, zip(*rows, strict=True))):
            for members in groups:
                created = dist.new_group(list(members))
                pair[level] = created if dist.get_rank() in members else pair[level]
    return pair[0], pair[1]
