"""What a model computes twice is one value, where ops need that.

Where a model has self.q(self.norm(x)) and self.k(self.norm(x)), the linears become one product then, as
where it calls the norm once. Angles whose cosines and sines are taken of two equal ones are one tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from te_transform.canonicalize.inplace import written
from te_transform.graph import edit, ops
from te_transform.graph.nodes import is_parameter

_OF_ANGLES = (
    torch.cat, torch.mul, torch.div, torch.matmul, torch.transpose, torch.reshape, torch.unsqueeze,
    torch.Tensor.expand, torch.neg, ops.cast, operator.getitem,
)  # fmt: skip


def share_angles(graph: fx.Graph) -> None:
    """Let cosines and sines of angles that are computed twice read one tensor of them."""
    _share(graph, _made_into_angles(graph), lambda readers: True)


def _made_into_angles(graph: fx.Graph) -> set[fx.Node]:
    """Return cosines and sines, and the calls that compute what they are taken of, as far as any two of these
    may be the same."""
    angles: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        turns = node.target in (torch.cos, torch.sin)
        of = turns or node in angles
        angles.update([node] if turns else [])
        angles.update(
            read for read in node.all_input_nodes if of and read.target in _OF_ANGLES and not read.kwargs
        )
    return angles


def share_norms(graph: fx.Graph) -> None:
    """Let linears that read the same norm of the same value read one call of it.

    Only where all that read either are linears that can be merged: alone, each has a norm of its own.
    """
    norms = {node for node in graph.nodes if node.target in ops.NORMS}
    _share(graph, norms, _can_be_merged)


def _share(graph: fx.Graph, nodes: set[fx.Node], may_share: Callable[[list[fx.Node]], bool]) -> None:
    """Let equal calls be one, where all that reads either may, and nothing of them is written to."""
    kept = written(graph)
    shared: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node not in nodes or not kept.isdisjoint((node, *node.all_input_nodes)):
            continue
        first = shared.setdefault((node.target, str(node.args), node.meta["region"]), node)
        if first is not node and may_share([*first.users, *node.users]):
            edit.bypass(graph, node, first)


def _can_be_merged(readers: list[fx.Node]) -> bool:
    """Whether all are linears with parameters of their own, all with a bias or none."""
    if any(reader.target is not ops.linear for reader in readers):
        return False
    weights, biases = ([reader.args[at] for reader in readers] for at in (1, 2))
    own = len({*weights}) == len(weights) and all(map(is_parameter, weights))
    return own and (not any(biases) or all(map(is_parameter, biases)))
