"""Match the rules on the canonical copy of a captured graph and decide, site by site, what is fused and
how."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from typing import Any

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from te_transform.backends import plain
from te_transform.canonicalize import canonicalize
from te_transform.graph import edit, ops
from te_transform.graph.nodes import argument, path_of, value
from te_transform.graph.pattern import Match, Miss, Siblings, find
from te_transform.plan.options import Options
from te_transform.plan.refusals import missed, refusals, rolled_back, shared
from te_transform.plan.rule import Deviation, Operation, Outcome, Rule, ask, reasons_of, roles, stored_in
from te_transform.plan.work import replaced


@dataclass(eq=False)
class Site:
    """One fusion: a fused op, its call in the canonical graph, and the captured values that it computes."""

    rules: list[tuple[str, str]]  # the rules that made the site, each with its path in the report
    fused: nn.Module
    node: fx.Node  # the call in the canonical graph
    deviations: tuple[Deviation, ...] = ()  # results of the check; empty before it

    @property
    def name(self) -> str:
        """The name of the op in the graphs."""
        return self.node.target

    @property
    def path(self) -> str:
        """The module path of the site in the report."""
        return self.rules[-1][1]

    @property
    def is_merged(self) -> bool:
        """True if the site merges several linears, whose results are columns of one product."""
        users = self.result.users
        is_cut = any(node.target is ops.columns and "origin" in node.meta for node in users)
        return is_cut and "origin" not in self.result.meta

    @property
    def is_product(self) -> bool:
        """True for linears of the backends, whose products gain only in TE's kernels.

        Ops of a user's own rule do not count as products here.
        """
        of_backends = isinstance(self.fused, (plain.Linear, plain.LayerNormLinear))
        return of_backends and not isinstance(self.fused, plain.PaddedLinear)

    @property
    def result(self) -> fx.Node:
        """The canonical node of the match's result: the call, or the first item of the tuple it returns."""
        items = (n for n in self.node.users if n.target is operator.getitem and n.args[1] == 0)
        return next(items, self.node) if isinstance(value(self.node), tuple) else self.node

    @property
    def outputs(self) -> list[fx.Node]:
        """The canonical nodes that replace captured nodes.

        They are the call itself, the columns of merged linears, or the items of a returned tuple.
        """
        return _standing(self.node)

    @property
    def weights(self) -> list[tuple[fx.Node, ...]]:
        """The parameters [out, in] of each matrix product; several if they are joined."""
        return [stored_in(self.node.args[position]) for position in self.fused.PRODUCTS]


def _standing(node: fx.Node) -> list[fx.Node]:
    """Return the node if it replaces a captured node, else the nearest users that do."""
    return [node] if "origin" in node.meta else [n for user in sorted(node.users) for n in _standing(user)]


@dataclass(eq=False)
class Plan:
    """The fusions of one captured graph, and the outcomes that the report prints."""

    captured: fx.GraphModule  # from dynamo, never changed
    canonical: fx.Graph
    before: fx.Graph
    modules: tuple[str, ...] = ("",)  # the paths of the modules whose forward the graph is
    sites: list[Site] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, fx.Node]:
        """The captured nodes by name."""
        return {node.name: node for node in self.captured.graph.nodes}

    def outcomes_with_sites(self) -> Iterator[tuple[Outcome, Site | None]]:
        """Yield the outcomes, each with its site.

        The site is None for refused matches, and for merged linears that became part of another site.
        """
        outputs = ((site, node) for site in self.sites for node in site.outputs)
        sites = {(site.rules[-1][0], node.meta["origin"]): site for site, node in outputs}
        for outcome in self.outcomes:
            matching = (sites.get((outcome.rule, name)) for name in outcome.inside)
            yield outcome, next(filter(None, matching), None) if outcome.status == "fused" else None

    def joins(self) -> list[fx.Node]:
        """Return the canonical nodes that join the parameters of several linears."""
        return [node for node in self.canonical.nodes if node.target is ops.join]

    def forget_tensors(self) -> None:
        """Drop all references to the tensors that the graph was captured with, once dynamo is done with it.

        PyTorch refuses to swap a tensor that has references, even weak ones, and Module.to() swaps the
        tensors of torchao.
        """
        values = (value(node) for node in self.captured.graph.nodes)
        for mode in {known.fake_mode for known in values if isinstance(known, FakeTensor)}:
            mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()

    def roll_back(self, reasons: dict[Site, str]) -> None:
        """Undo sites, and report the reason for each."""
        for site, reason in reasons.items():
            self.sites.remove(site)
            for rule, path in site.rules:
                index = self.outcomes.index(Outcome(rule, path, "fused"))
                sentences = tuple(rolled_back(reason))
                self.outcomes[index] = replace(self.outcomes[index], status="refused", reasons=sentences)


def plan(captured: fx.GraphModule, options: Options, modules: tuple[str, ...] = ("",)) -> Plan:
    """Run the rules, in order, over the canonical copy of a captured graph.

    Args:
        modules: The paths of the modules whose forward the graph is, such as the blocks that share it.
    """
    canonical = canonicalize(captured.graph, options.forms)
    planned = Plan(captured, canonical, edit.snapshot(canonical), modules)
    for rule in options.rules:
        misses: list[Miss] = []
        for match in find(rule.pattern, canonical, misses):
            taken = any(node._erased for node in match.nodes)  # overlaps an earlier match
            if not taken:
                planned.outcomes += _apply_rule(rule, match, planned, options)
        planned.outcomes += _near_misses(rule, misses, planned)
    _keep_merged(planned, options)
    return planned


def _keep_merged(planned: Plan, options: Options) -> None:
    """Add a site for each merged linear that no later rule absorbed."""
    for node in [n for n in planned.canonical.nodes if n.op == "call_function" and "merged" in n.meta]:
        _call(planned, [node], "linear", options.backend.Linear(), node.args, [node.meta["merged"]])


def _apply_rule(rule: Rule, match: Match, planned: Plan, options: Options) -> list[Outcome]:
    bound = roles(match)
    read = shared(match, rule)
    known = {**vars(options), "shared": read, **bound}
    flat = [item for role in bound.values() for item in (role if isinstance(role, tuple) else (role,))]
    operations = [item for item in flat if isinstance(item, Operation)]
    reasons = [*refusals(match, operations, options.skip, planned.modules, rule), *reasons_of(rule, known)]
    path, inside = _match_path(match, operations), _replaced(planned, match.nodes)
    if None in reasons:  # no gain: leave it out of the report
        return []
    if reasons:
        sentences = tuple(dict.fromkeys(reasons))
        return [Outcome(rule.name, path, "refused", sentences, _weights(match.nodes), inside=inside)]
    if isinstance(rule.pattern, Siblings):
        merged = edit.merge(planned.canonical, _activated_first(match.nodes))
        merged.meta["merged"] = (rule.name, path)
    else:
        _put(rule, match, planned, ask(rule, "build", known), bound, path)
    return [Outcome(rule.name, path, "fused", inside=inside)]


def _replaced(planned: Plan, nodes: Sequence[fx.Node]) -> frozenset[str]:
    """Return the names of the captured operations of a match, whose root is the first node.

    Columns of a merged linear stand for the linears that were merged. A root that replaces no captured
    operation is reshaped into one that does.
    """
    stood_for = [node for node in nodes if "merged" in node.meta or node is nodes[0]]
    return replaced(planned.by_name, {*nodes, *(end for node in stood_for for end in _standing(node))})


def _match_path(match: Match, operations: list[Operation]) -> str:
    """Return the path at which a match is reported.

    It is the innermost module around the match, or the linear if the match is norms and linears.
    """
    linears = [op for op in operations if op.op == "linear"]
    others = [op for op in operations if op.op != "linear"]
    norms = [op for op in others if op.node.target in ops.NORMS]
    if linears and len(norms) == len(others):
        return edit.innermost(op.path for op in linears)
    inner = [op.path for op in operations if op not in norms]
    return edit.innermost(inner) if inner else path_of(match.root)


def _activated_first(linears: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Return the linears in the order of their joined weights: fused MLPs activate the first half."""

    def activated(node: fx.Node) -> bool:
        return any(user.target in ops.ACTIVATION_OPS for user in node.users)

    return sorted(linears, key=lambda node: not activated(node)) if len(linears) == 2 else list(linears)


def _put(rule: Rule, match: Match, planned: Plan, fused: nn.Module, bound: dict[str, Any], path: str) -> None:
    """Replace a match by the rule's op."""
    # the match of a gated MLP contains its first linear twice, once for each half
    absorbed = list(dict.fromkeys(node.meta["merged"] for node in match.nodes if "merged" in node.meta))
    args = tuple(_op_argument(name, bound) for name in rule.reads)
    given = [bound[role].node for role in shared(match, rule)]
    readers = (user for node in given for user in node.users if user not in match.nodes)
    at = min([match.root, *readers])
    node = _call(planned, match.nodes, rule.name, fused, args, [*absorbed, (rule.name, path)], at)
    if others := [*(bound[role].node for role in rule.hands_out), *given]:
        edit.hand_out(planned.canonical, node, others)


def _call(
    planned: Plan,
    nodes: Sequence[fx.Node],
    what: str,
    fused: nn.Module,
    args: tuple,
    rules: list[tuple[str, str]],
    at: fx.Node | None = None,
) -> fx.Node:
    """Add a call of the fused op to the canonical graph, replacing `nodes`, or in front of `at`."""
    stem = f"{rules[-1][1]}.{what}".lstrip(".")
    taken = {site.name for site in planned.sites}
    name = next(n for n in chain([stem], (f"{stem}_{i}" for i in count(1))) if n not in taken)
    node = edit.replace(nodes, name, args, at)
    node.meta["fused"] = what
    node.meta.pop("merged", None)  # no longer a merged linear without a site
    planned.sites.append(Site(rules, fused, node))
    return node


def _op_argument(name: str, bound: dict[str, Any]) -> Any:
    """Return an argument of a fused op.

    `name` is a role of the match, or "role.argument". The result is None if the match lacks it.
    """
    role, _, wanted = name.partition(".")
    value_of_role = bound.get(role)
    if not wanted or value_of_role is None:
        return value_of_role.node if isinstance(value_of_role, Operation) else value_of_role
    try:
        return argument(value_of_role.node, wanted)
    except AttributeError:
        return None


def _weights(nodes: Sequence[fx.Node]) -> int:
    """Return the number of elements in the weights of the linears among `nodes`."""
    return sum(value(node.args[1]).numel() for node in set(nodes) if node.target is ops.linear)


def _near_misses(rule: Rule, misses: list[Miss], planned: Plan) -> list[Outcome]:
    """Return a refused outcome for each near miss that a user can act on.

    A near miss matches more than half of the rule's pattern.
    """
    outcomes = []
    for miss in misses:
        if 2 * len(miss.nodes) <= rule.pattern.depth or any(node._erased for node in miss.nodes):
            continue
        # report the miss like a match, at the module around its nodes; merged linears span other modules
        own = [node for node in miss.nodes if node.target not in ops.NORMS and "merged" not in node.meta]
        where, inside = edit.innermost(map(path_of, own)), _replaced(planned, miss.nodes)
        if sentences := tuple(missed(miss)):
            weights = _weights(miss.nodes)
            outcomes.append(Outcome(rule.name, where, "refused", sentences, weights, inside=inside))
    return outcomes
