"""Describe single operations: the names of inputs, and the text that a click on an operation shows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import fx

from te_transform.execution.timing import duration
from te_transform.graph.nodes import name_in_model
from te_transform.page.pairs import inactive_reason
from te_transform.plan.memory import size_text
from te_transform.plan.rule import Outcome
from te_transform.report.drawing import call_of, described, module_text

_DYNAMO_AFFIXES = re.compile(r"^[lL]_(kwargs_|args_)?|_$")  # dynamo's prefixes and suffix of argument names


def argument_text(node: fx.Node) -> str:
    """Return the name of a graph input in a call of the model, or "input 1" if it has no name."""
    name = node.meta.get("argument") or _DYNAMO_AFFIXES.sub("", node.name)
    return f"input {name}" if name.isdecimal() else name


def detail(node: fx.Node) -> str:
    """Describe an operation in lines: name, dtype and shape, module, call, and the model's tensors."""
    name = argument_text(node) if node.op == "placeholder" else node.name
    own = {each.name: argument_text(each) for each in node.all_input_nodes if each.op == "placeholder"}
    call = re.sub(r"\w+", lambda word: own.get(word[0], word[0]), call_of(node))
    tensors = [
        f"{name_in_model(source)}: {described(source)}"
        for source in node.all_input_nodes
        if name_in_model(source)
    ]
    lines = [name, described(node), module_text(node), call, *tensors]
    spelled = node.meta.get("spelled", ())
    captured = [f"captured as: {', '.join(map(str, spelled))}"] if len(spelled) > 1 else []
    inactive = [f"inactive: {why}"] if (why := inactive_reason(node)) else []
    return "\n".join(filter(None, [*lines, *captured, *inactive, *_number_lines(node.meta.get("outcome"))]))


def _number_lines(outcome: Outcome | None) -> Iterator[str]:
    """Yield lines on a fused op's predicted time, precision, memory and measured errors."""
    if outcome is None:
        return
    if outcome.seconds is not None and outcome.fused_seconds is not None:
        fused, before = duration(outcome.fused_seconds), duration(outcome.seconds)
        yield f"predicted time of a call on an H100: {fused}, {before} unfused"
    if outcome.precision:
        yield outcome.precision
    if outcome.kept:
        yield f"predicted memory kept for the backward: {size_text(outcome.kept)}"
    for off in outcome.deviations:
        yield f"{off.name}: error {off.converted:.1e}, unfused {off.original:.1e}, allowed {off.allowed:.1e}"
