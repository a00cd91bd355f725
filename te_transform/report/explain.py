"""Sentences on how a forward was captured, where that is not as one graph, and on how it is divided."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import fx

from te_transform.graph.capture import is_switched_off
from te_transform.report.places import listed

_SWITCHED_OFF = (
    "dynamo is switched off (by TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE, torch._dynamo.config.disable or "
    'torch.compiler.set_stance("force_eager")) and has to be on: '
)
SET_ON_MODEL = (
    "a forward is set on the model itself, as accelerate's prepare() sets one for mixed precision, and that "
    "of its class is needed (convert first, then prepare): "
)
# what to do about lines of transformers, by words of theirs
_ADVICE = {
    "layerdrop": "set layerdrop to 0 in the model's config",
    "np.random.rand": "set apply_spec_augment=False if nothing is to be masked",
    "hidden_states.requires_grad": "call freeze_feature_encoder() if the convolutions are not trained",
}
_CODE = re.compile(r'File "([^"]+)", line (\d+), in \S+, code: (.+)')


def explain_graphs(
    graphs: Iterable[tuple[str, fx.GraphModule]], reasons: Iterable[str] = (), is_set: bool = False
) -> Iterator[str]:
    """How many graphs the forward was captured as, which blocks share one, and why it is not one alone.

    Args:
        graphs: the captured graphs, each with the path of the captured module, "" for the whole model. A
            graph that blocks share comes once for each block; `before` and `after` are the largest.
        reasons: what dynamo said meanwhile of code that it does not capture.
        is_set: whether somebody has set a forward on the model itself.
    """
    modules: dict[fx.GraphModule, list[str]] = {}
    for path, graph in graphs:
        modules.setdefault(graph, []).append(path)
    if not modules:
        why = _SWITCHED_OFF if is_switched_off() else SET_ON_MODEL if is_set else ""
        yield f"nothing of the forward was captured, {why}it runs as it is"
    if len(modules) > 1:
        yield (
            f"the forward was captured as {len(modules)} graphs: the page draws all, graph_text() has the "
            "largest"
        )
    shared = Counter(listed(paths) for paths in modules.values() if len(paths) > 1)
    for where, number in shared.items():
        several = "a graph" if number == 1 else f"{number} graphs"
        yield (
            f"{where} share {several}, what lies around them, and what reads values from there, is not in "
            "this report"
        )
    yield from explain_breaks(modules, reasons)


def explain_breaks(graphs: Iterable[fx.GraphModule], reasons: Iterable[str]) -> Iterator[str]:
    """Why graphs end before the forward does; what dynamo said if none has its reason, which has the line."""
    # graphs from elsewhere have none of dynamo's
    ends = [why for g in graphs if (why := getattr(g, "compile_subgraph_reason", None)) and why.graph_break]
    places = [(why.user_stack[-1], _title(why.reason)) for why in ends]
    breaks = [_sentence(at.filename, at.lineno, at.line, title) for at, title in places]
    yield from dict.fromkeys(breaks or map(explain_reason, reasons))


def explain_reason(reason: str) -> str:
    """Dynamo's reason for not capturing a piece of code, which has several paragraphs, in a sentence."""
    found = _CODE.findall(reason)
    if found:
        return _sentence(*found[-1], _title(reason))
    return f"dynamo does not capture a piece of the forward ({_title(reason)}): it runs as it is"


def _sentence(file: str, line: int | str, code: str, title: str) -> str:
    why = f" ({title})" if title else ""
    where = f'{Path(file).name}:{line} has "{code}", which dynamo does not capture{why}'
    advice = next((f"; {what}" for words, what in _ADVICE.items() if words in code), "")
    return f"{where}: it runs as it is{advice}"


def _title(reason: str) -> str:
    """What dynamo says in its first line; "" where that says nothing."""
    if reason == "step_unsupported":
        return ""
    if reason.startswith("generic_jump"):
        return "Data-dependent branching"
    return reason.strip().splitlines()[0].rstrip(".")
