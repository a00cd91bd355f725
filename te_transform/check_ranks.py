"""Detect ranks that converted different models, before a collective hangs."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from te_transform.backends.ranks import gathered
from te_transform.execution.attach import runner_of
from te_transform.execution.timing import PACKAGES, installed_version
from te_transform.graph.keywords import suggests
from te_transform.plan.options import Options
from te_transform.reporting import report


class RanksError(RuntimeError):
    """The error for ranks that did not make the same model; the message names the ranks."""


@suggests
def check_ranks(converted: nn.Module, mesh: DeviceMesh | None = None, group: Any = None) -> None:
    """Raise on every rank of the group if the ranks' models, options or versions differ.

    Call it after convert(), before the model is wrapped or sharded. It runs one small collective. Without
    this check, ranks with different models, recipes, meshes or packages would hang in the first large
    collective, or mix up numbers.

    Args:
        converted: A model returned by te_transform.convert().
        mesh: The mesh that the model will be sharded over, if any.
        group: The process group; None means all processes.

    Raises:
        RanksError: `mesh` or `group` has a wrong type, there is no process group, or a rank differs from rank
            0; the message says in what.
        ModelError: `converted` does not come from te_transform.convert().
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise RanksError(
            f"expected a DeviceMesh for mesh, got a {type(mesh).__name__}; pass the mesh that the model will "
            "be sharded over, and a process group as group="
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise RanksError(
            f"expected a process group or None (for all) for group, got a {type(group).__name__}"
        )
    own = _fingerprint(converted, mesh)
    if not (dist.is_available() and dist.is_initialized()):
        raise RanksError(
            "expected a process group, got none; call torch.distributed.init_process_group() first"
        )
    properties = gathered(own, group)
    differ = [
        f"rank {rank} has {what} {its[what]}, rank 0 has {properties[0][what]}"
        for rank, its in enumerate(properties)
        for what in own
        if its[what] != properties[0][what]
    ]
    if differ:
        raise RanksError(f"{'; '.join(differ)}: convert the same model in the same way on all ranks")


def _fingerprint(converted: nn.Module, mesh: DeviceMesh | None) -> dict[str, str]:
    """Return the properties that must agree on all ranks, as texts or digests."""
    its_report, runner = report(converted), runner_of(converted)
    named = converted.named_parameters(remove_duplicate=False)
    parameters = [f"{name} {[*p.shape]} {p.dtype} {p.requires_grad}" for name, p in named]
    options, precision, fused = runner.options, its_report.precision, its_report.fused
    return {
        "the model": f"{type(converted).__name__} of {len(parameters)} parameters ({_digest(parameters)})",
        "the plan": f"{len(fused)} fused sites ({_digest(f'{site.rule} {site.path}' for site in fused)})",
        "the recipe": "none" if precision is None else f"{precision.recipe} ({_digest([precision.sites])})",
        "the options": " ".join(f"{name}={text}" for name, text in _execution_options(options).items()),
        "the mesh": "none" if mesh is None else f"{mesh.mesh.tolist()} {mesh.mesh_dim_names}",
        **{f"the version of {name}": installed_version(name) or "none" for name in PACKAGES},
    }


def _execution_options(options: Options) -> dict[str, Any]:
    """Return the options that change the execution; skip= is part of the plan's digest."""
    names = ("compile", "graphs", "approximate", "pad_vocabulary", "chunked_loss")
    return {"backend": options.backend.NAME, **{name: getattr(options, name) for name in names}}


def _digest(lines: Any) -> str:
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()[:12]
