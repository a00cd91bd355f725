"""Lower a plan to a graph that runs: the captured graph, in which one fused op replaces each site.

All other operations of the graph are bitwise those that dynamo captured.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Collection, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from te_transform.backends import plain
from te_transform.backends.joined import Join, Split
from te_transform.backends.masks import KeptMasks, MaskOp
from te_transform.canonicalize import written
from te_transform.canonicalize.linears import TURNS
from te_transform.graph import edit, ops
from te_transform.graph.bound import module_of
from te_transform.graph.nodes import (
    called,
    dtype_of,
    goes_into_products,
    has_gradient,
    is_batched,
    is_bias,
    is_foreign,
    is_model_tensor,
    is_parameter,
    is_random,
    is_tensor_node,
    same_shape,
    shape_of,
    shows_layout,
    value,
    varies_by_autocast,
)
from te_transform.plan.match import Plan, Site
from te_transform.plan.work import origins

# ops that run as many operations in plain PyTorch as were captured
_IN_AS_MANY = (plain.CrossEntropy, plain.PaddedLinear, plain.Rotary)
_SINGLE = (*ops.NORMS, *ops.ACTIVATION_OPS)

# groups of joined parameters that are not adjacent in memory
ScatteredGroups = list[tuple[weakref.ref, ...]]


def lower(plan: Plan, scattered: ScatteredGroups, without: Collection[Site] = ()) -> fx.GraphModule:
    """Return the captured graph with its sites fused.

    Args:
        plan: its captured graph is copied.
        scattered: receives groups of parameters that a call finds scattered, see Join.
        without: sites that run as captured.
    """
    lowering = _Lowering(plan, scattered)
    for site in _in_order(plan, without):
        lowering.put(site)
    return lowering.finished()


def lower_unfused(
    plan: Plan, scattered: ScatteredGroups, without: Collection[Site] = (), rotations: bool = False
) -> fx.GraphModule:
    """Return the captured graph with unfused matrix products.

    Attention is fused, and so are ops that gain in plain PyTorch, and norms and activations that were
    captured as several operations. Rotary embeddings are fused if `rotations` is True, because their kernel
    gains only with many tokens.
    """
    lowering = _Lowering(plan, scattered)
    for site in _in_order(plan, without):
        if site.is_product:
            lowering.put_parts(site)
        elif rotations or not isinstance(site.fused, plain.Rotary):
            lowering.put(site)
    return lowering.finished()


def is_as_captured(plan: Plan, without: Collection[Site]) -> bool:
    """Return True if lower_unfused() changes no operation except masks, without kernels."""
    return not any(map(partial(_is_rewritten, plan), _in_order(plan, without)))


def _is_rewritten(plan: Plan, site: Site) -> bool:
    if isinstance(site.fused, plain.DotProductAttention):
        return site.fused.written_out
    if site.is_product:
        return any(
            len(part.meta["spelled"]) > 1
            for part in _norms_and_activations(plan, _replaced_names(plan, site))
        )
    return not isinstance(site.fused, _IN_AS_MANY)


def _norms_and_activations(plan: Plan, names: Collection[str]) -> Iterator[fx.Node]:
    """Return the norms and activations among the captured nodes with these names."""
    nodes = (node for node in plan.before.nodes if node.target in _SINGLE)
    return (node for node in nodes if node.meta.get("origin") in names)


def _replaced_names(plan: Plan, site: Site) -> set[str]:
    """Return the names of the captured nodes that a site replaces."""
    inside, _ = edit.needed(*_captured_ends(plan, site))
    return {node.name for node in inside}


def _in_order(plan: Plan, without: Collection[Site]) -> list[Site]:
    sites = (site for site in plan.sites if site not in without and not _is_single_linear(site))
    return sorted(sites, key=lambda site: site.node)


def _is_single_linear(site: Site) -> bool:
    """Return True if the site is a single linear in plain PyTorch, which equals the captured operation."""
    return type(site.fused) is plain.Linear and len(site.weights[0]) == 1


def reference(plan: Plan, site: Site) -> tuple[fx.GraphModule, tuple[fx.Node, ...]]:
    """Extract the captured operations that a site replaces.

    Returns:
        A module of these operations, which returns a tuple of the site's outputs, and its arguments. These
        are captured nodes: the site's inputs, and nodes that are read only for their dtype or shape.
    """
    outputs, inputs = _captured_ends(plan, site)
    return edit.extract(plan.captured, outputs, inputs | edit.read_aside(outputs, inputs))


def _captured_ends(plan: Plan, site: Site) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return the captured nodes of the site's outputs and of its inputs."""
    outputs = [plan.by_name[node.meta["origin"]] for node in site.outputs]
    return outputs, {plan.by_name[name] for name in origins(site.node.all_input_nodes)}


def _is_asked_for(site: Site, mask: Tensor) -> bool:
    """Return True if it pays to classify the mask at run time.

    A bias per head is never causal, a window or padding. The gradients of kernels are correct with it if
    every query sees a key, and so is the forward beside a fill with a number that the bias does not contain.
    """
    fill, hidden = site.node.args[9:11]
    is_trained = site.fused.written_out and any(map(has_gradient, site.node.all_input_nodes))
    is_filled = hidden is not None and fill not in (None, -math.inf)
    return not is_bias(mask) or is_trained or is_filled


class _SharedCalls:
    """The calls that all layers make with the same arguments. The lowered graph makes each of them once."""

    def __init__(self) -> None:
        self.calls: dict[tuple, fx.Node] = {}
        self.views: dict[tuple, fx.Node] = {}

    def key(self, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Return a key that is the same for equal calls. Floating-point calls also need the same mode."""
        is_hiding = is_tensor_node(node) and dtype_of(node) is torch.bool
        read = fx.map_arg(args, self._first_view)
        return node.target, str(read), tuple(kwargs.items()), None if is_hiding else node.meta["region"]

    def _first_view(self, node: fx.Node) -> fx.Node:
        """Return the first node that takes the same slice of the same tensor, as all layers do of a bias."""
        if node.target is operator.getitem and is_tensor_node(node) and is_tensor_node(node.args[0]):
            return self.views.setdefault((str(node.args), value(node).requires_grad), node)
        return node


class _Masks:
    """The masks that are classified from their values at run time.

    Args:
        captured: the graph.
        written: the names of its nodes that are written to in place.
    """

    def __init__(self, captured: fx.Graph, written: set[str]):
        self.calls: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.kept = KeptMasks(set())
        self.in_modes = any("autocast" in called(node) for node in captured.nodes)
        self.written = written

    def are_provable(self, make: fx.GraphModule, inputs: tuple[fx.Node, ...]) -> bool:
        """Return True if a mask can be computed anywhere before its attention.

        Its inputs must be sizes, buffers and data that the graph never writes to. Two cases are excluded:

        - a vmap(), which begins and ends with calls that no node reads;
        - matrix products in a graph that changes autocast, which may compute them in another dtype.
        """
        inside = [node for node in make.graph.nodes if node.op not in ("placeholder", "output")]
        calls = all(node.op in ("call_function", "call_method") for node in inside)
        pure = calls and not any(is_random(n) or is_batched(n) or is_foreign(n) for n in inside)
        if self.in_modes and any(map(varies_by_autocast, inside)):
            return False
        learned = any(map(is_parameter, inputs)) or any(map(has_gradient, (*inputs, *inside)))
        return pure and not learned and not self.written & {node.name for node in (*inputs, *inside)}


class _Lowering:
    """The rewrite of a copy of the captured graph, site by site in the order of the canonical graph.

    `stands` maps the name of each captured node to the node of the copy that now has its value.
    """

    def __init__(self, plan: Plan, scattered: ScatteredGroups):
        self.plan, self.scattered = plan, scattered
        self.graph, self.stands = edit.copy_by_name(plan.captured.graph)
        self.module = module_of(plan.captured, self.graph)
        self.written = {node.name for node in written(plan.captured.graph)}
        self.masks, self.shared = _Masks(plan.captured.graph, self.written), _SharedCalls()
        # Outputs of sites, copies of canonical calls, and moved masks. Unread nodes are erased only at the
        # end, because a later site may read a value that the captured graph computes twice.
        self.added: dict[fx.Node, None] = {}
        self.put_already: set[str] = set()  # a norm may be part of several sites

    def put(self, site: Site) -> None:
        """Call the site's op at the position of its first output."""
        outputs = {node: self.stands[node.meta["origin"]] for node in site.outputs}
        at = self._place_of(site, outputs.values())
        copies: dict[fx.Node, fx.Node] = {}
        args = self._inner(site.node.args, at, copies)
        if isinstance(site.fused, plain.DotProductAttention):
            args = self._with_mask(site, args, at)
        name = site.name.replace(".", "_")
        self.module.add_submodule(name, site.fused)
        copies[site.node] = edit.insert_call(self.graph, at, name, args, like=site.node)
        parts = self._split(site, at, copies) if site.is_merged else {}
        for canonical, old in outputs.items():
            if canonical in parts:
                new = self._own(old, parts[canonical], at)
            else:
                new = self._laid_out(site, canonical, old, self._node(canonical, at, copies, new=True), at)
            self.stands[canonical.meta["origin"]] = new
            self.added[new] = None
            edit.replace_uses(old, new)
            # the canonical graph leaves out calls that compute nothing, which may come before the last input
            edit.move_readers_behind(new)
        edit.erase_cascade(self.graph, outputs.values(), _replaced_names(self.plan, site), staying=self.added)

    def _laid_out(self, site: Site, canonical: fx.Node, old: fx.Node, new: fx.Node, at: fx.Node) -> fx.Node:
        """Return an output, as a copy if its memory order could be noticed, or if it is written to."""
        if canonical.target in TURNS:  # the result of the linear has another memory order
            if old.name in self.written or not goes_into_products(old):
                return self._own_copy(new, at)
            edit.take_any_layout(old)
            return new
        if isinstance(site.fused, plain.DotProductAttention) and site.fused.written_out:
            # kernels return the heads of a token together in memory, matrix products the tokens of a head
            return self._own(old, new, at) if goes_into_products(old) else self._own_copy(new, at)
        if old.name not in self.written:
            return new
        # autograd forbids in-place writes to views from a Function, which kernels return; and the backward of
        # attention reads the output of its forward
        return edit.insert_call(self.graph, at, torch.clone, (new,), like=canonical)

    def _place_of(self, site: Site, outputs: Collection[fx.Node]) -> fx.Node:
        """Return the first output, or the last output if an input of the site comes after the first."""
        read = [self.stands[name] for name in origins(site.node.all_input_nodes)]
        first = min(outputs)
        return first if all(node < first for node in read) else max(outputs)

    def put_parts(self, site: Site) -> None:
        """Compute each norm and activation of the site by one operation."""
        inside = _replaced_names(self.plan, site)
        for part in _norms_and_activations(self.plan, inside - self.put_already):
            name = part.meta["origin"]
            self.put_already.add(name)
            if len(part.meta["spelled"]) == 1:
                continue
            old = self.stands[name]
            args = self._inner(part.args, old, {})
            self.stands[name] = edit.insert_call(self.graph, old, part.target, args, like=part)
            edit.replace_uses(old, self.stands[name])
            edit.erase_cascade(self.graph, [old], inside)

    def finished(self) -> fx.GraphModule:
        """Return the graph as a compiled module."""
        edit.erase_cascade(self.graph, self.added, set())
        self.graph.lint()
        masks = [node for node in self.graph.nodes if node in self.masks.calls.values()]
        for node in masks[:-1]:
            self.module.get_submodule(node.target).is_last = False
        self.module.recompile()
        # fx prints a graph at its first call; a graph that cannot be printed must fail here
        _LazyGraphModule.force_recompile(self.module)
        return self.module

    def _split(self, site: Site, at: fx.Node, copies: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Split the columns of a merged product."""
        sizes = [shape_of(weight)[0] for weight in site.weights[0]]
        joined = [self._node(arg, at, copies) for arg in site.node.all_input_nodes if arg.target is ops.join]
        whole = self._node(site.result, at, copies, new=True)
        name = f"{site.name}_split".replace(".", "_")
        self.module.add_submodule(name, Split(sizes))
        split = edit.insert_call(self.graph, at, name, (whole, *joined), like=site.result)
        starts = list(accumulate(sizes, initial=0))
        return {
            columns: edit.insert_call(
                self.graph, at, operator.getitem, (split, starts.index(columns.args[1])), like=columns
            )
            for columns in site.outputs
            if columns.target is ops.columns
        }

    def _own(self, old: fx.Node, columns: fx.Node, at: fx.Node) -> fx.Node:
        """Return the columns of a linear, as a copy if the layout could be noticed or written to."""
        if not shows_layout(old) and old.name not in self.written:
            edit.take_any_layout(old)
            return columns
        return self._own_copy(columns, at)

    def _own_copy(self, x: fx.Node, at: fx.Node) -> fx.Node:
        own = {"memory_format": torch.contiguous_format}
        return edit.insert_call(self.graph, at, torch.clone, (x,), own, like=x)

    def _inner(self, args: Any, at: fx.Node, copies: dict[fx.Node, fx.Node]) -> Any:
        """Return the arguments of a canonical call as nodes of the new graph, before `at`."""
        return fx.node.map_aggregate(
            args, lambda arg: self._node(arg, at, copies) if isinstance(arg, fx.Node) else arg
        )

    def _node(self, node: fx.Node, at: fx.Node, copies: dict[fx.Node, fx.Node], new: bool = False) -> fx.Node:
        if node in copies:
            return copies[node]
        if "origin" in node.meta and not new:
            return self.stands[node.meta["origin"]]
        copies[node] = self._copied(node, at, copies)
        return copies[node]

    def _copied(self, node: fx.Node, at: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copy a canonical call into the new graph."""
        args, kwargs = self._inner(node.args, at, copies), self._inner(dict(node.kwargs), at, copies)
        if node.target is not ops.join:
            # all layers share a mask, which is computed and classified once; if floating-point, once per mode
            key = self.shared.key(node, args, kwargs)
            shared = is_tensor_node(node) and not is_random(node) and not self._reads_written(args)
            if shared and key in self.shared.calls:
                return self.shared.calls[key]
            call = edit.insert_call(self.graph, at, node.target, args, kwargs, like=node)
            self.added[call] = None
            if shared:
                self.shared.calls[key] = call
            return call
        name = f"join_{at.name}_{len(copies)}"
        self.module.add_submodule(name, Join(self.scattered))
        return edit.insert_call(self.graph, at, name, args, like=node)

    def _reads_written(self, args: tuple) -> bool:
        """Return True if an argument of the call may be written to before an equal call."""
        return any(arg.name in self.written for arg in args if isinstance(arg, fx.Node))

    def _with_mask(self, site: Site, args: tuple, at: fx.Node) -> tuple:
        """Return the arguments of attention, with the mask classified at run time if possible.

        A row that a mask of finite numbers masks fully has uniform weights. The canonical form zeros the
        query of such a row. The op zeros it instead, and skips this if the mask is causal or masks nothing.
        """
        query, mask, sinks = args[0], args[3], args[8]
        hidden = None
        if isinstance(query, fx.Node) and query.target is ops.zero_hidden:
            query, hidden = query.args
        # a single query has another mask in each step of generation, and each classification synchronizes
        is_one = same_shape(shape_of(query)[-2:-1], (1,))
        if isinstance(mask, fx.Node) and not is_one and _is_asked_for(site, value(mask)):
            mask = self._proved(mask, hidden, at, sinks is not None)
        return (query, *args[1:3], mask, *args[4:], hidden)

    def _proved(self, mask: fx.Node, hidden: fx.Node | None, at: fx.Node, beside_sinks: bool) -> fx.Node:
        known = mask, beside_sinks
        if known not in self.masks.calls:
            make, inputs = edit.extract(self.module, [mask] if hidden is None else [mask, hidden], ())
            if not self.masks.are_provable(make, inputs):
                return mask
            name = f"mask_{len(self.masks.calls)}"
            stored = [is_model_tensor(node) for node in inputs]
            self.module.add_submodule(name, MaskOp(make, stored, beside_sinks, self.masks.kept))
            self.masks.calls[known] = edit.insert_call(self.graph, at, name, inputs, like=mask)
            self.added[mask] = None
        return self.masks.calls[known]
