"""Merge equal computations where fused ops need one value.

Two linears such as self.q(self.norm(x)) and self.k(self.norm(x)) can then become one product, as if the model
called the norm once. Cosines and sines of equal angles read one tensor of angles.
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
    torch.Tensor.expand, torch.neg, torch.repeat_interleave, ops.cast, ops.columns, operator.getitem,
)  # fmt: skip


def share_angles(graph: fx.Graph) -> None:
    """Make cosines and sines of angles that are computed twice read one tensor of angles."""
    _share(graph, _made_into_angles(graph), lambda readers: True)


def _made_into_angles(graph: fx.Graph) -> set[fx.Node]:
    """Return all cosines and sines, and the calls that compute their angles and may be duplicates."""
    angles: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        turns = node.target in (torch.cos, torch.sin)
        of = turns or node in angles
        angles.update([node] if turns else [])
        angles.update(
            read for read in node.all_input_nodes if of and read.target in _OF_ANGLES and not read.kwargs
        )
    return angles


def share_detached(graph: fx.Graph) -> None:
    """Make norms that detach their input twice, in the mean and in the sum, read one detached tensor."""
    _share(graph, {node for node in graph.nodes if node.target is torch.Tensor.detach}, lambda readers: True)


def share_norms(graph: fx.Graph) -> None:
    """Make linears that read equal calls of a norm read the same call.

    This requires that all readers of both calls are linears that can be merged. Otherwise each linear keeps
    its own norm, to be fused with it.
    """
    norms = {node for node in graph.nodes if node.target in ops.NORMS}
    _share(graph, norms, _readers_can_be_merged)


def _share(graph: fx.Graph, nodes: set[fx.Node], may_share: Callable[[list[fx.Node]], bool]) -> None:
    """Merge equal calls if `may_share` accepts all readers, and no call or input of it is written to."""
    kept = written(graph)
    shared: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node not in nodes or not kept.keys().isdisjoint((node, *node.all_input_nodes)):
            continue
        first = shared.setdefault((node.target, str(node.args), node.meta["region"]), node)
        if first is not node and may_share([*first.users, *node.users]):
            edit.bypass(node, first)


def _readers_can_be_merged(readers: list[fx.Node]) -> bool:
    """Return True if all readers are linears with distinct parameters, all with a bias or all without."""
    if any(reader.target is not ops.linear for reader in readers):
        return False
    weights, biases = ([reader.args[at] for reader in readers] for at in (1, 2))
    own = len({*weights}) == len(weights) and all(map(is_parameter, weights))
    return own and (not any(biases) or all(map(is_parameter, biases)))
