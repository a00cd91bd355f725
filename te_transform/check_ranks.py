"""Processes that disagree get an error, where a collective would wait for ever."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from te_transform.execution.runner import runner_of
from te_transform.execution.timing import version_of
from te_transform.graph.keywords import suggests
from te_transform.plan.options import Options
from te_transform.reporting import report

_PACKAGES = ("te_transform", "torch", "transformer_engine", "transformers")


class RanksError(RuntimeError):
    """The processes of a group have not made the same model; the message names them."""


@suggests
def check_ranks(converted: nn.Module, mesh: DeviceMesh | None = None, group: Any = None) -> None:
    """Raise in every process of the group unless all have converted the same model in the same way.

    One small collective, before the first large one: processes whose models, recipes, meshes or packages
    differ would wait for each other for ever in it, or mix up numbers. Call it after convert(), before the
    model is wrapped or sharded.

    Args:
        converted: what te_transform.convert() returned.
        mesh: that the model is going to be sharded over, if it is.
        group: the processes; None is all of them.

    Raises:
        RanksError: `mesh` or `group` is something else, no process group is there, or processes differ from
            the first one; the message says in what, and what each has.
        ModelError: `converted` does not come from te_transform.convert().
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise RanksError(
            f"the mesh is a {type(mesh).__name__}, a DeviceMesh is needed: pass the one that the model is "
            "going to be sharded over, and a process group as group="
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise RanksError(
            f"the group is a {type(group).__name__}, a process group or None (for all) is needed"
        )
    own = _fingerprint(converted, mesh)
    if not (dist.is_available() and dist.is_initialized()):
        raise RanksError(
            "no process group is there, one is needed: call torch.distributed.init_process_group() first"
        )
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group)
    differ = [
        f"rank {rank} has {what} {its[what]}, rank 0 has {found[0][what]}"
        for rank, its in enumerate(found)
        for what in own
        if its[what] != found[0][what]
    ]
    if differ:
        raise RanksError(f"{'; '.join(differ)}: all have to convert the same model in the same way")


def _fingerprint(converted: nn.Module, mesh: DeviceMesh | None) -> dict[str, str]:
    """What has to be the same in all processes, in words or as digests."""
    made, carried = report(converted), runner_of(converted)
    named = converted.named_parameters(remove_duplicate=False)
    parameters = [f"{name} {[*p.shape]} {p.dtype} {p.requires_grad}" for name, p in named]
    options, precision = carried.options, made.precision
    return {
        "the model": f"{type(converted).__name__} of {len(parameters)} parameters ({_digest(parameters)})",
        "the plan": f"{len(made.fused)} fused sites ({_digest(f'{s.rule} {s.path}' for s in made.fused)})",
        "the recipe": "none" if precision is None else f"{precision.recipe} ({_digest([precision.sites])})",
        "the options": " ".join(f"{name}={told}" for name, told in _told(options).items()),
        "the mesh": "none" if mesh is None else f"{mesh.mesh.tolist()} {mesh.mesh_dim_names}",
        **{f"the version of {name}": version_of(name) or "none" for name in _PACKAGES},
    }


def _told(options: Options) -> dict[str, Any]:
    """The options that change what runs, in words; skip= shows in the plan."""
    names = ("compile", "graphs", "approximate", "pad_vocabulary", "chunked_loss")
    return {"backend": options.backend.NAME, **{name: getattr(options, name) for name in names}}


def _digest(lines: Any) -> str:
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()[:12]
