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
            mesh, dim = group
            if isinstance(dim, str):
                dim = mesh.mesh_dim_names.index(dim)
            return [_mesh_group(mesh, dim)]
        return [*group_names(group[0]), *group_names(group[1])]
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this rank is not a member of the process group")
    raise TypeError(f"group must be {_ACCEPTED}, got {type(group).__name__}")


def _is_mesh(group: Any) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(group, DeviceMesh)


def _mesh_group(mesh: Any, dim: int) -> str:
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


def two_level_groups(
    group: dist.ProcessGroup | None = None, *, a2a_size: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """See softcap_ops.distributed.two_level_groups."""
    ranks = dist.get_process_group_ranks(group)
    if a2a_size < 1 or len(ranks) % a2a_size:
        raise ValueError(f"a2a_size must divide the {len(ranks)} ranks of the group, got {a2a_size}")
    here = ranks.index(dist.get_rank())
    row = here // a2a_size * a2a_size
    pair = []
    for members in (ranks[row : row + a2a_size], ranks[here % a2a_size :: a2a_size]):
        # Only its members create a group: `group` need not be all of the job.
        pair.append(dist.new_group(members, use_local_synchronization=True))
    return pair[0], pair[1]
