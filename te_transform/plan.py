"""Match the rules on a normalised recording and decide, site by site, what is fused and how."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from te_transform import rewrite, vocabulary
from te_transform.config import Options
from te_transform.dispatch import dispatches
from te_transform.forward import Drafts, Refusal, rewrite_forward
from te_transform.guards import Rewritten
from te_transform.layout import qkv_layout
from te_transform.originals import holders
from te_transform.pattern import Match, Miss, Siblings, find
from te_transform.refusals import refusals
from te_transform.rotary import rotary_of
from te_transform.rule import Operation, Outcome, Rule, ask, roles
from te_transform.slots import takes_subclasses
from te_transform.trace import Call, Recording
from te_transform.weights import Concat, Layout, LedgerError, Move, Piece, SwapHalves

Columns = tuple[int, int]


@dataclass(eq=False)
class Site:
    """One fusion to be made: the fused module, on meta, what its parameters are made of, and where it
    goes."""

    rules: list[tuple[str, str]]  # the rules that made it, each with the path it is reported at
    path: str  # that it is reported at
    host: str  # of the module that the fused one will be a child of
    fused: nn.Module
    layouts: dict[str, Layout]
    linears: list[tuple[Operation, Columns | None]] = field(default_factory=list)
    norm: Operation | None = None
    plain: bool = False  # norms in front run where they stand, transposed weights are read where they are
    owner: Call | None = None
    rewritten: Rewritten | None = None  # None: the owner calls its attention core by name
    scale: float | None = None
    rotary: nn.Module | None = None  # whose cosines and sines turn what the owner's core gets

    @property
    def norm_in_front(self) -> bool:
        """Whether the norm is called before the fused module's place, by itself."""
        return self.norm is not None and not (self.owner and self.norm.call.within(self.owner))

    @property
    def name(self) -> str:
        """The fused module's path in the converted model."""
        return f"{self.host}.fused".lstrip(".")


@dataclass(eq=False)
class Plan:
    """Everything convert() is going to do, and everything the report will say of it."""

    recording: Recording
    sites: dict[str, Site] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    drafts: dict[str, Drafts] = field(default_factory=dict)  # of rewritten forwards, by rule
    projections: dict[str, str] = field(default_factory=dict)  # path of a fused QKV projection -> its layout

    @cached_property
    def held(self) -> Counter[int]:
        """How many modules hold each parameter, by its id."""
        return holders(self.recording.root)

    def unmerged(self, operation: Operation) -> list[tuple[Operation, Columns | None]]:
        """The operation, or the linears that it was made of, with their columns."""
        return self.sites[operation.merged].linears if operation.merged else [(operation, None)]

    def roll_back(self, refused: list[Outcome]) -> None:
        """Let `refused` stand in the report where the same rules and paths were said to be fused."""
        instead = {(outcome.rule, outcome.path): outcome for outcome in refused}
        kept = [instead.pop((o.rule, o.path), o) if o.status == "fused" else o for o in self.outcomes]
        self.outcomes = kept + list(instead.values())
        for node in self.recording.graph.nodes:
            if node.target in {f"{outcome.path}.fused".lstrip(".") for outcome in refused}:
                node.target = f"{node.target} (rolled back)"


def plan(recording: Recording, options: Options) -> Plan:
    """Run the rules, in order, over a normalised recording: its graph is rewritten, the model is only
    read."""
    made = Plan(recording, projections=_projections(recording))
    for rule in options.passes:
        misses: list[Miss] = []
        recording.index()
        for match in find(rule.pattern, recording.graph, misses):
            taken = any(node._erased for node in match.nodes)  # in part, by a match before
            if not taken:
                made.outcomes.append(_apply(rule, match, made, options))
        made.outcomes += _near_misses(rule, misses)
    return made


def _projections(recording: Recording) -> dict[str, str]:
    cores = [node for node in recording.graph.nodes if node.target is vocabulary.sdpa]
    with unset_fake_temporarily():  # rows are numbered, also of a model of fake tensors
        layouts = [layout for core in cores if (layout := qkv_layout(core))]
        return {layout.projection.meta["path"]: layout.name for layout in layouts}


def _apply(rule: Rule, match: Match, made: Plan, options: Options) -> Outcome:
    bound = roles(match, made.recording)
    known = {**bound, "backend": options.backend, "approximate": options.approximate}
    operations = [op for role in bound.values() for op in (role if isinstance(role, tuple) else (role,))]
    operations = [op for op in operations if isinstance(op, Operation)]
    path = match.root.meta["path"]
    unmerged = [op for operation in operations for op, _ in made.unmerged(operation)]
    reasons = [*refusals(match, operations, unmerged, made.recording, options)]
    if not any("a parameter is needed" in reason for reason in reasons):
        reasons += ask(rule.refuse, known)
    if not reasons:
        try:
            moves = ask(rule.weights, known) if callable(rule.weights) else rule.weights
            fused, backend = ask(rule.build, known), options.backend
            # a rule may bring a module of its own, of which nothing is known
            plain = backend.PLAIN and type(fused).__module__ == backend.__name__
            site = _site(rule, match, operations, fused, moves, made, plain)
        except Refusal as reason:
            reasons = [str(reason)]
    if reasons:
        return Outcome(rule.name, path, "refused", tuple(dict.fromkeys(reasons)))
    _put(site, rule, match, made)
    return Outcome(rule.name, site.path, "fused")


def _site(
    rule: Rule,
    match: Match,
    operations: list[Operation],
    fused: nn.Module,
    moves: tuple[Move, ...],
    made: Plan,
    plain: bool,
) -> Site:
    linears = [op for op in operations if op.word == "linear"]
    norm = next((op for op in operations if op.word in ("layer_norm", "rms_norm")), None)
    merged = [made.sites[op.merged] for op in linears if op.merged]
    readers = [pair for op in linears for pair in made.unmerged(op)]
    owner = _owner(match, norm, [op for op, _ in readers])
    path = owner.path if owner else readers[0][0].path
    site = Site(
        rules=[*(made_by for absorbed in merged for made_by in absorbed.rules), (rule.name, path)],
        path=path,
        host=readers[0][0].path if owner and readers and _runs_its_children(owner.module) else path,
        fused=fused,
        layouts=_layouts(rule, moves, operations, fused, made),
        linears=readers,
        norm=norm,
        plain=plain,
        owner=owner,
    )
    if site.norm_in_front and plain:
        fused.normalised = True
    _check_host(site, made)
    _check_ties(site, made)
    if (
        owner is not None
        and not linears
        and dispatches(owner.module, getattr(fused, "stands_for", ("eager",)))
    ):
        site.scale = operations[0].scale
        site.rotary = rotary_of(owner, made.recording) if hasattr(fused, "plain_calls") else None
    elif owner is not None:
        outside = norm.call if site.norm_in_front else None
        joined = {op.module for op, span in readers if span is not None}
        name = site.name.removeprefix(owner.path).lstrip(".")
        fuse = partial(_fuse_in, rule=rule, merged=joined, name=name)
        known = made.drafts.setdefault(rule.name, {})
        site.rewritten = rewrite_forward(owner, made.recording, outside, not plain, fuse, known)
    return site


def _runs_its_children(module: nn.Module) -> bool:
    """Whether the module's forward may go through all its children, where one more would be run too."""
    if hasattr(type(module), "__iter__"):  # nn.Sequential
        return True
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is None or not {"_modules", "children", "named_children"}.isdisjoint(code.co_names)


def _check_host(site: Site, made: Plan) -> None:
    host = made.recording.root.get_submodule(site.host)
    if hasattr(host, "fused") and site.host not in {absorbed.host for absorbed in made.sites.values()}:
        raise Refusal(
            f"{type(host).__name__} has an attribute named 'fused', the fused module needs that name"
        )
    if site.owner and not takes_subclasses(type(site.owner.module)):
        raise Refusal(
            f"{type(site.owner.module).__name__} refuses to be subclassed, a converted module is an instance "
            "of a subclass of its class"
        )
    if site.owner and any(
        other.owner and other.owner.module is site.owner.module for other in made.sites.values()
    ):
        raise Refusal(
            f"the forward of {type(host).__name__} is rewritten for another fusion, one is possible"
        )


def _check_ties(site: Site, made: Plan) -> None:
    operations = [op for op, _ in site.linears] + ([site.norm] if site.norm else [])
    for operation in operations:
        for argument, stored in operation.stored.items():
            joined = not any(
                layout.is_same and layout.pieces[0].name == stored.name for layout in site.layouts.values()
            )
            if joined and made.held[id(stored.tensor)] > 1:
                raise Refusal(
                    f"the {operation.word}'s {argument} is shared with another module, one that is joined or "
                    "permuted needs to be the module's own: untie it"
                )


def _owner(match: Match, norm: Operation | None, linears: list[Operation]) -> Call | None:
    """The module whose own forward holds the glue of the match; None where norm and linear meet without
    any."""
    glue = [
        n for n in match.nodes if n.target is not vocabulary.linear and (norm is None or n is not norm.node)
    ]
    return rewrite.innermost([n.meta["call"] for n in glue] + [op.call for op in linears]) if glue else None


def _put(site: Site, rule: Rule, match: Match, made: Plan) -> None:
    """Rewrite the graph for `site`, which replaces the sites of merged linears that it contains."""
    for node in match.nodes:
        made.sites.pop(node.meta.get("merged"), None)
    made.sites[site.name] = site
    recording = made.recording
    if isinstance(rule.pattern, Siblings):
        columns = rewrite.merge(recording, match.nodes, site.name, site.fused.weight, site.fused.bias)
        site.linears = [(op, span) for (op, _), span in zip(site.linears, columns, strict=True)]
    else:
        rewrite.call_fused(recording, match.nodes, site.name, _inputs(match, recording))


def _inputs(match: Match, recording: Recording) -> tuple[Any, ...]:
    """What the fused module is called with: the pattern's x, or all the arguments of the one call it
    replaces."""
    if "x" in match.bound:
        return (recording.now(match.bound["x"]),)  # which an earlier fusion may have made its output
    return match.root.args[:1] if match.root.target is vocabulary.linear else match.root.args


def _fuse_in(local: Recording, rule: Rule, merged: set[nn.Module], name: str) -> None:
    """Put `rule`'s fusion, in which the linears `merged` are one, into an owner's recording."""
    for match in find(Siblings(vocabulary.linear, "linears"), local.graph):
        if {node.meta["call"].module for node in match.nodes} <= merged:
            rewrite.merge(local, match.nodes, "merged", torch.empty(0, device="meta"), None)
    matches = find(rule.pattern, local.graph)
    if len(matches) != 1:
        raise Refusal(
            f"recorded on its own the module holds {len(matches)} such places, exactly one is needed"
        )
    rewrite.call_fused(local, matches[0].nodes, name, _inputs(matches[0], local))


def _layouts(
    rule: Rule, moves: tuple[Move, ...], operations: list[Operation], fused: nn.Module, made: Plan
) -> dict[str, Layout]:
    """Every fused parameter's make-up, the moves of a merged linear put in place of its rows.

    Raises:
        LedgerError: a move is misspelt or missing, or a shape does not fit: the rule is wrong, not the model.
    """
    known = {
        f"{name}.{target}": layout
        for name, site in made.sites.items()
        for target, layout in site.layouts.items()
    }
    layouts = {}
    for move in moves:
        source = _source(move, rule, operations, known)
        if source is not None:
            layouts[move.target.removeprefix("fused.")] = source
    parameters = dict(fused.named_parameters())
    if layouts.keys() != parameters.keys():
        raise LedgerError(
            f"rule {rule.name!r} moves {sorted(layouts)}, its fused {type(fused).__name__} has "
            f"{sorted(parameters)}"
        )
    for name, layout in layouts.items():
        rows = sum(piece.rows for piece in layout.pieces)
        if rows != parameters[name].shape[0]:
            raise LedgerError(
                f"rule {rule.name!r} moves {rows} rows into {name}, which has {parameters[name].shape[0]}"
            )
    return layouts


def _source(move: Move, rule: Rule, operations: list[Operation], known: dict[str, Layout]) -> Layout | None:
    role, _, name = move.source.partition(".")
    sources = [op for op in operations if op.role == role]
    if not sources or isinstance(move, Concat) != (len(sources) > 1):
        raise LedgerError(
            f"rule {rule.name!r} moves {move.source!r}, the match has {len(sources)} operations {role!r}"
        )
    pieces = [_layout_of(op, name, known) for op in sources]
    if any(piece is None for piece in pieces):
        return None
    layout = (
        Layout(tuple(p for layout in pieces for p in layout.pieces))
        if isinstance(move, Concat)
        else pieces[0]
    )
    return layout.halves_swapped() if isinstance(move, SwapHalves) else layout


def _layout_of(op: Operation, name: str, known: dict[str, Layout]) -> Layout | None:
    stored = op.stored.get(name)
    if stored is None:
        return None
    return known.get(stored.name) or Layout(
        (Piece(stored.name, getattr(op, name).shape[0], stored.transposed),)
    )


def _near_misses(rule: Rule, misses: list[Miss]) -> list[Outcome]:
    outcomes = []
    for miss in misses:
        if 2 * len(miss.nodes) >= rule.pattern.depth and not any(node._erased for node in miss.nodes):
            last = miss.nodes[-1]
            found = _named(miss.found)
            reason = f"the {_named(last)} reads {found}, {miss.wanted} is needed"
            outcomes.append(Outcome(rule.name, miss.nodes[0].meta["path"], "refused", (reason,)))
    return outcomes


def _named(value: Any) -> str:
    if not isinstance(value, fx.Node):
        return repr(value)
    if value.op in ("placeholder", "get_attr"):
        return f"the input {value.name}" if value.op == "placeholder" else f"the parameter {value.target}"
    return getattr(value.target, "__name__", str(value.target))
