"""The graph compiled by inductor.

Attention runs in the kernels that an eager call would choose, and the matrix products of a recipe run in FP8.
Ops of a user's own rules run where the rules put them. All other operations stay as captured, because
inductor fuses them. In bf16 on an H100, separate q, k and v products are faster there than a joined product,
whose gradient inductor would have to concatenate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import fx
from torch._C import _functorch as functorch
from torch._functorch import config as functorch_config
from torch._inductor import list_mode_options

from te_transform.backends.tracing import compiling
from te_transform.execution.call_context import CallContext
from te_transform.execution.console import status
from te_transform.execution.graph_version import GraphVersion
from te_transform.execution.inductor_faults import (
    EXACT_SETTINGS,
    checked,
    decompositions,
    leave_out_idle_dropouts,
)
from te_transform.execution.lm_head import CompileHead, Head, head_of, with_head
from te_transform.execution.partition import in_pieces
from te_transform.execution.pieces import Piece, computes
from te_transform.execution.specializations import Specializations
from te_transform.execution.specialize import Precomputed, Specialized
from te_transform.execution.version_checked import VersionChecked
from te_transform.graph.context import set_to
from te_transform.graph.effects import changes_tensors
from te_transform.graph.errors import in_a_line
from te_transform.graph.marks import marked
from te_transform.graph.nodes import replaced_function
from te_transform.plan.options import IN_CUDA_GRAPHS, Options

log = logging.getLogger(__name__)

_TRACED = {
    # with a smaller budget, the backward would quantize again, after TE has updated the scales
    "activation_memory_budget": 1.0,
    # the backward runs outside of the forward's autocast, which would round fp32 tensors of the forward
    "backward_pass_autocast": "off",
}


def compile_fx(
    graph: fx.GraphModule, arguments: Sequence[Any], config_patches: dict[str, Any]
) -> Callable[..., Any]:
    """Call inductor's compile_fx. The import at the first graph takes seconds."""
    from torch._inductor import compile_fx as inductor

    inner, settings = checked(inductor.compile_fx_inner), config_patches | EXACT_SETTINGS
    return inductor.compile_fx(graph, arguments, inner, settings, decompositions())


class Inductor:
    """The executor that runs a compiled graph.

    Args:
        version: the graph, and its sites that run as captured.
    """

    name = "compiled"

    def __init__(self, version: GraphVersion):
        self.options, self.tell = version.options, version.tell
        self.specializations = Specializations(version, self._make)

    def refuse(self, call: CallContext) -> str | None:
        """Return why the call runs uncompiled."""
        why = self.specializations.refuse(call)
        if why is not None:
            return why
        call.prepared = self.specializations.find(call)
        return call.prepared if isinstance(call.prepared, str) else None

    def run(self, call: CallContext) -> Any:
        """Run the compiled graph."""
        ready = call.prepared
        outputs = ready.compute(*ready.arguments(call))
        if ready.backend is not None:
            ready.update_scales(call, outputs)
        return outputs

    def _make(
        self, lowered: Specialized, known: Precomputed, arguments: Sequence[Any], bucket: int | None
    ) -> Callable[..., Any] | None:
        graph = lowered.with_known(known)
        compile = partial(compiled, options=self.options, tell=self.tell)
        head = self._head_apart(graph, compile, bucket)
        graph = graph if head is None else head.rest
        has_operations = any(map(computes, graph.graph.nodes))
        run = compile(graph, [*arguments, *known.tensors], bucket) if has_operations else graph.forward
        return None if run is None else with_head(run, head)

    def _head_apart(self, graph: fx.GraphModule, compile: CompileHead, bucket: int | None) -> Head | None:
        """Return the head if it is compiled by itself: under DDP, or with logits beside a loss."""
        head = head_of(graph, compile, recorded=False)
        if head is None or bucket is not None:
            return head
        return None if head.logits is None or self.options.in_cuda_graphs else head


def compiled(
    graph: fx.GraphModule,
    arguments: Sequence[Any],
    bucket: int | None = None,
    record: Callable[[Piece], Callable[..., Any]] | None = None,
    *,
    options: Options,
    tell: Callable[[str], None],
) -> Callable[..., Any] | None:
    """Compile a graph for these arguments, whole or in pieces.

    Args:
        graph: of operations and fused ops.
        arguments: the tensors and numbers of a call.
        bucket: the bytes of gradients per piece, which are reduced during the backward; None without DDP.
        record: returns the function that runs a compiled piece as CUDA graphs.
        options: of the conversion.
        tell: receives a sentence if the compiler fails.

    Returns:
        The compiled graph, or None if the compiler fails.
    """
    if (name := replaced_function(graph.graph)) is not None:
        tell(f"a graph runs uncompiled: other code has replaced PyTorch's {name}, which compilers trace")
        return None
    # With these two entries, the compiler treats the graph as one from dynamo, whose nodes name the arguments
    # with fixed addresses. CUDA graphs would otherwise copy all parameters in each call. A part of a graph
    # does not have such nodes.
    if all(hasattr(node, "_dynamo_source") for node in graph.graph.find_nodes(op="placeholder")):
        graph.meta["dynamo_compile_id"], graph._param_name_to_source = None, {}
    leave_out_idle_dropouts(graph.graph)
    doing = f"compiling a graph of {len(graph.graph.nodes)} operations"
    log.info(doing)
    try:
        mode = list_mode_options("default" if options.compile is True else options.compile)

        def compile(graph: fx.GraphModule, arguments: Sequence[Any]) -> Callable[..., Any]:
            run = _without_switch(compile_fx(graph, arguments, config_patches=mode))
            read = enumerate(graph.graph.find_nodes(op="placeholder"))
            precomputed = {index for index, node in read if "example_value" not in node.meta}
            return VersionChecked(run, precomputed)

        with status(doing), _tracing(graph):
            if options.compile not in IN_CUDA_GRAPHS:  # in these, each piece would be a CUDA graph of its own
                run = in_pieces(graph, arguments, compile, tell, bucket, record)
                if run is not None or marked(graph.graph):
                    return run
            return compile(graph, arguments)
    except Exception as error:
        said = in_a_line(error)
        log.warning("a graph runs uncompiled: %s", said)
        log.debug("the traceback of this error", exc_info=error)
        tell(f"a graph runs uncompiled: {said}")
        return None


def _without_switch(run: Any) -> Callable[..., Any]:
    """Return a compiled graph without the wrapper that switches dynamo off. Dynamo is off when graphs run.

    Other wrappers copy its attributes. They differ from the id, which some versions of PyTorch note.
    """
    is_switch = getattr(run, "_torchdynamo_wrapper_id", None) == id(run)
    return run._torchdynamo_orig_callable if is_switch else run


@contextmanager
def _tracing(graph: fx.GraphModule) -> Iterator[None]:
    """Tell ops that they are traced, and leave the transforms of torch.func that a failed trace entered."""
    depth = functorch.get_dynamic_layer_stack_depth()
    # a graph from AOTAutograd's cache would not be checked, see inductor_faults.py
    cache = {"enable_autograd_cache": False} if any(map(changes_tensors, graph.graph.nodes)) else {}
    try:
        with set_to(compiling, True), functorch_config.patch(**_TRACED, **cache):
            yield
    except Exception:
        with suppress(RuntimeError):  # PyTorch 2.11 raises when it leaves the last transform
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        raise
