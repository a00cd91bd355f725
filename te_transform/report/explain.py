"""Sentences on how a forward was captured, where that is not as one graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import fx

from te_transform.report.places import listed


def explain_graphs(graphs: Iterable[tuple[str, fx.GraphModule]]) -> Iterator[str]:
    """Which modules were captured, and how often one graph serves several of them.

    Args:
        graphs: the captured graphs, each with the path of the captured module, "" for the whole model. A
            graph that blocks share comes once for each block; the report shows the largest.
    """
    modules: dict[fx.GraphModule, list[str]] = {}
    for path, graph in graphs:
        modules.setdefault(graph, []).append(path)
    if not modules:
        yield "nothing of the forward was captured, it runs as it is"
    if len(modules) > 1:
        yield f"the forward was captured as {len(modules)} graphs, the largest is the one shown"
    for paths in modules.values():
        if any(paths):
            yield (
                f"{listed(paths)} was captured by itself"
                if len(paths) == 1
                else f"{listed(paths)} share a graph"
            )
    yield from filter(None, map(explain_break, modules))


def explain_break(captured: fx.GraphModule) -> str | None:
    """Why the graph ends before the forward does, None where it does not."""
    why = getattr(captured, "compile_subgraph_reason", None)  # dynamo's; graphs from elsewhere have none
    if why is None or not why.graph_break:
        return None
    place = why.user_stack[-1]
    return (
        f'{Path(place.filename).name}:{place.lineno} has "{place.line}", which dynamo does not capture '
        f"({explain_reason(why.reason)}): it runs as it is, between two graphs"
    )


def explain_reason(reason: str) -> str:
    """What dynamo says in its first line, without its advice."""
    if reason.startswith("generic_jump"):
        return "a branch on a tensor's value"
    return reason.strip().splitlines()[0].rstrip(".")
