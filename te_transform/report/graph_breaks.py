"""Explain how a forward was captured if it is not one graph: missing capture, graph breaks, shared graphs."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx

from te_transform.graph.capture import is_switched_off
from te_transform.graph.grouped import grouped
from te_transform.report.places import listed

_SWITCHED_OFF = (
    "dynamo is switched off (by TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE, torch._dynamo.config.disable or "
    'torch.compiler.set_stance("force_eager")); switch it on; '
)
SET_ON_MODEL = (
    "a forward is set on the model itself, as accelerate's prepare() sets one for mixed precision, but the "
    "forward of its class is needed; convert first, then prepare; "
)
_OF_TENSOR = (
    "compute the assigned value before the conversion, or keep it in a local variable: dynamo does not "
    "know the attributes of a tensor that the forward creates"
)
# words of a line or of dynamo's reason -> what to do; the first entry that matches applies
_ADVICE = {
    "layerdrop": "set layerdrop to 0 in the model's config",
    "np.random.rand": "set apply_spec_augment=False if you do not need masking",
    "hidden_states.requires_grad": "call freeze_feature_encoder() if the convolutions are not trained",
    "Observed exception": (
        "it raises only when dynamo traces it: pass every argument, such as attention_mask, because some "
        "forwards make a missing one only outside of a trace"
    ),
    "assert ": "python -O removes asserts, which leaves one graph",
    "GetAttrVariable(TensorVariable": _OF_TENSOR,  # PyTorch 2.11
    "Data-dependent": "select between tensors with torch.where(), or pass the condition as a Python bool",
    "Tensor.item()": "keep the value a tensor, or compute it before the forward and pass a Python number",
    "python_type()": _OF_TENSOR,
}
_TORCH = str(Path(torch.__file__).parent)
_TRIED = re.compile(r"Developer debug context: (.*)")
_CODE = re.compile(r'File "([^"]+)", line (\d+), in \S+, code: (.+)')


def explain_graphs(
    graphs: Iterable[tuple[str, fx.GraphModule]],
    reasons: Mapping[str, str] | None = None,
    is_set: bool = False,
) -> Iterator[str]:
    """Yield the number of graphs of the forward, the blocks that share a graph, and the graph breaks.

    Args:
        graphs: the captured graphs, each with the path of the captured module ("" for the whole model). A
            graph that several blocks share appears once per block; the report's `before` and `after` are the
            largest graph.
        reasons: dynamo's reasons for code that it does not capture, each with the function that it traced.
        is_set: True if a forward is set on the model itself.
    """
    modules = grouped((graph, path) for path, graph in graphs)
    if not modules:
        why = _SWITCHED_OFF if is_switched_off() else SET_ON_MODEL if is_set else ""
        yield f"the forward was not captured: {why}your own code runs"
    if len(modules) > 1:
        yield (
            f"the forward was captured as {len(modules)} graphs: the HTML page draws all of them, "
            "graph_text() returns the largest"
        )
    shared = Counter(listed(paths) for paths in modules.values() if len(paths) > 1)
    for where, number in shared.items():
        several = "a graph" if number == 1 else f"{number} graphs"
        yield (
            f"{where} share {several}; this report leaves out the code around them and the operations that "
            "read values from it"
        )
    yield from explain_breaks(modules, reasons or {})


def explain_breaks(graphs: Iterable[fx.GraphModule], reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield why graphs end before the forward does.

    Graphs know the line of code of a break. If no graph has a reason, dynamo's messages are used.
    """
    # graphs that dynamo did not make have no reason
    ends = [why for g in graphs if (why := getattr(g, "compile_subgraph_reason", None)) and why.graph_break]
    breaks = [_sentence(why.user_stack, why.reason) for why in ends]
    yield from dict.fromkeys(breaks or itertools.starmap(explain_reason, reasons.items()))


def explain_reason(reason: str, function: str) -> str:
    """Condense dynamo's reason for code that it cannot capture, several paragraphs, to one sentence.

    The sentence names the line of code, or the traced `function` if dynamo does not say which line it was.
    """
    if frames := [FrameSummary(file, int(line), "", line=code) for file, line, code in _CODE.findall(reason)]:
        return _sentence(frames, reason)
    title = _title(reason)
    return f"dynamo cannot capture {function} ({title}): your own code runs there{_advice_for(title)}"


def _sentence(stack: Sequence[FrameSummary], reason: str) -> str:
    """Return a sentence on the innermost line of code outside PyTorch, or on the innermost line."""
    at = next((at for at in reversed(stack) if not at.filename.startswith(_TORCH)), stack[-1])
    title = _title(reason)
    why = f" ({title})" if title else ""
    where = f'{Path(at.filename).name}:{at.lineno} has "{at.line}", which dynamo cannot capture{why}'
    tried = "".join(_TRIED.findall(reason))
    return f"{where}: your own code runs there{_advice_for(f'{at.line} {title} {tried}')}"


def _advice_for(said: str) -> str:
    """Return "; " and what to do about a line and dynamo's reason, or "" if no entry matches."""
    return next((f"; {what}" for words, what in _ADVICE.items() if words in said), "")


def _title(reason: str) -> str:
    """Return the first line of dynamo's reason, or "" if it says nothing useful."""
    if reason == "step_unsupported":
        return ""
    if reason.startswith("generic_jump"):
        return "Data-dependent branching"
    return reason.strip().splitlines()[0].rstrip(".")
