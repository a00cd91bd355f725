"""Sentences on how a forward was captured, where that is not as one graph, and on how it is divided."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary

import torch
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
# What to do about a line, by words of the line, and then by words of dynamo's reason.
_ADVICE = {
    "layerdrop": "set layerdrop to 0 in the model's config",
    "np.random.rand": "set apply_spec_augment=False if nothing is to be masked",
    "hidden_states.requires_grad": "call freeze_feature_encoder() if the convolutions are not trained",
    "assert ": "python -O leaves asserts out, and one graph remains",
    "Data-dependent": "choose between tensors by torch.where(), or pass the answer as a Python bool",
    "Tensor.item()": "keep it a tensor, or compute it before the forward and pass it as a Python number",
    "python_type()": (
        "compute what is assigned before the conversion, or keep it in a local variable: dynamo does not "
        "know the attributes of a tensor that the forward makes"
    ),
}
_TORCH = str(Path(torch.__file__).parent)
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
    places = [(_own(why.user_stack), _title(why.reason)) for why in ends]
    breaks = [_sentence(at.filename, at.lineno, at.line, title) for at, title in places]
    yield from dict.fromkeys(breaks or map(explain_reason, reasons))


def explain_reason(reason: str) -> str:
    """Dynamo's reason for not capturing a piece of code, which has several paragraphs, in a sentence."""
    if found := [FrameSummary(file, int(line), "", line=code) for file, line, code in _CODE.findall(reason)]:
        at = _own(found)
        return _sentence(at.filename, at.lineno, at.line, _title(reason))
    title = _title(reason)
    return f"dynamo does not capture a piece of the forward ({title}): it runs as it is{_step(title)}"


def _own(stack: Sequence[FrameSummary]) -> FrameSummary:
    """Return the innermost frame that is not PyTorch's own, or the innermost one if all are."""
    return next((at for at in reversed(stack) if not at.filename.startswith(_TORCH)), stack[-1])


def _sentence(file: str, line: int | None, code: str | None, title: str) -> str:
    why = f" ({title})" if title else ""
    where = f'{Path(file).name}:{line} has "{code}", which dynamo does not capture{why}'
    return f"{where}: it runs as it is{_step(f'{code} {title}')}"


def _step(said: str) -> str:
    """Return what to do about a line and dynamo's reason, if anything is known."""
    return next((f"; {what}" for words, what in _ADVICE.items() if words in said), "")


def _title(reason: str) -> str:
    """What dynamo says in its first line; "" where that says nothing."""
    if reason == "step_unsupported":
        return ""
    if reason.startswith("generic_jump"):
        return "Data-dependent branching"
    return reason.strip().splitlines()[0].rstrip(".")
