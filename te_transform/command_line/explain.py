"""The text of `te-transform explain` for a rule: its docstring, its needs, its refusals, and an example."""

from __future__ import annotations

import inspect as python
from collections.abc import Iterator

from te_transform.command_line.sentences import refused, told_by, yielded
from te_transform.graph.errors import in_a_line
from te_transform.inspect import plans_of
from te_transform.load import LoadError
from te_transform.plan import refusals
from te_transform.plan.match import Plan
from te_transform.plan.rule import Rule
from te_transform.report.drawing import listing

# Options that allow rules to rewrite more.
_ALLOWING = ("approximate", "chunked_loss", "pad_vocabulary")


def explanation(rule: Rule) -> Iterator[str]:
    """Yield what a rule rewrites and saves, what it needs, why it refuses, and its example before and after.

    Raises:
        LoadError: the rule's example cannot be built, or is not rewritten.
    """
    title, *more = told_by(rule) or ["a rule without a docstring in its file"]
    yield f"{rule.name}: {title}"
    yield from (f"\n{text}" for text in more)
    backends, allowed, plan = _example(rule)
    yield "\nneeds"
    yield from (f"- {need}" for need in _needs(rule, backends, allowed))
    if sentences := refused(rule):
        yield "\nrefused if"
        yield from (f"- {sentence}" for sentence in sentences)
    yield "\nrefused, like every rule, if"
    yield from (f"- {sentence}" for sentence in yielded(refusals))
    if plan is not None:
        for when, graph in (("before", plan.captured.graph), ("after", plan.canonical)):
            yield f"\n{when}"
            yield from (line for line, _ in listing(graph))


def _needs(rule: Rule, backends: list[str], allowed: tuple[str, ...]) -> Iterator[str]:
    if rule.reads:
        others = f"; other operations may also read {', '.join(rule.shares)}" if rule.shares else ""
        yield f"{', '.join(rule.reads)}, if the model has them{others}"
    if backends:
        yield f"backend={' or '.join(map(repr, backends))}"
    yield from (f"{option}=True" for option in allowed)
    asked = {name for ask in (rule.refuse, rule.build) if ask for name in python.signature(ask).parameters}
    more = [option for option in _ALLOWING if option in asked and option not in allowed]
    yield from (f"{option}=True for some matches, see the refusals" for option in more)


def _example(rule: Rule) -> tuple[list[str], tuple[str, ...], Plan | None]:
    """Return the backends and options with which the rule rewrites its example, and the plan."""
    if rule.example is None:
        return [], (), None
    for allowed in ((), _ALLOWING):
        tried = {backend: _plan_example(rule, backend, allowed) for backend in ("torch", "te")}
        fused = {backend: plan for backend, plan in tried.items() if plan.sites}
        if fused:
            asked = python.signature(rule.refuse).parameters
            return [*fused], tuple(o for o in allowed if o in asked), [*fused.values()][-1]
    reasons = dict.fromkeys(why for outcome in tried["te"].outcomes for why in outcome.reasons)
    why = "; ".join(reasons) or "nothing in it matches the pattern"
    raise LoadError(
        f"expected an example that the rule {rule.name!r} rewrites, got one that stays unchanged ({why})"
    )


def _plan_example(rule: Rule, backend: str, allowed: tuple[str, ...]) -> Plan:
    try:
        model, inputs = rule.example()
        options = dict.fromkeys(allowed, True)
        ((_, plan),), _ = plans_of(model, inputs, backend=backend, passes=(rule,), **options)
    except Exception as error:  # the user's code may raise anything
        raise LoadError(
            f"expected an example of the rule {rule.name!r} that returns its inputs and a model that is "
            f"captured as one graph, got an error ({in_a_line(error)})"
        ) from error
    return plan
