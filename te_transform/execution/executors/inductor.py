"""The graph compiled by inductor.

Attention runs in the kernels that an eager call would choose, products of a recipe in FP8, and the op of
somebody's own rule where it was put. All else stays as captured: inductor fuses it by itself, and on an H100
separate products of q, k and v are faster there in bf16 than a joined one, whose gradient it would have to
put together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import fx
from torch._C import _functorch as functorch
from torch._functorch import config as functorch_config
from torch._inductor import list_mode_options

from te_transform.backends.tracing import compiling
from te_transform.execution.call_context import CallContext
from te_transform.execution.console import in_a_line, status
from te_transform.execution.executors.fused import Fused
from te_transform.execution.lm_head import head_of
from te_transform.execution.lower import ScatteredGroups
from te_transform.execution.partition import in_pieces
from te_transform.execution.pieces import Piece
from te_transform.execution.prepared import Prepared
from te_transform.execution.specializations import Specializations
from te_transform.execution.specialize import Precomputed, Specialized
from te_transform.graph.marks import marked
from te_transform.graph.nodes import replaced_function
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import IN_CUDA_GRAPHS, Options

log = logging.getLogger(__name__)

_TRACED = {
    # on a smaller budget it would quantize again in the backward, when TE has updated the scales
    "activation_memory_budget": 1.0,
    # A backward is called outside of the forward's autocast, which would round what the forward has in fp32.
    "backward_pass_autocast": "off",
}


def compile_fx(*arguments: Any, **options: Any) -> Callable[..., Any]:
    """Import inductor's compile_fx at the first graph, which takes seconds, and call it."""
    from torch._inductor.compile_fx import compile_fx as inductor

    return inductor(*arguments, **options)


class Inductor:
    """Runs a graph compiled.

    Args:
        plan: of the captured graph.
        scattered: where groups are noted that a call finds scattered, see Join.
        without: its sites that run as captured.
        options: of the conversion.
        fused: runs the first call of a kind in a recipe.
        tell: gets a sentence where the graph runs uncompiled.
    """

    name = "compiled"

    def __init__(
        self,
        plan: Plan,
        scattered: ScatteredGroups,
        without: Collection[Site],
        options: Options,
        fused: Fused,
        tell: Callable[[str], None],
    ):
        self.options, self.fused, self.tell = options, fused, tell
        self.specializations = Specializations(plan, scattered, without, options, self._make, tell)

    def refuse(self, call: CallContext) -> str | None:
        """Return why the call runs uncompiled."""
        why = self.specializations.refuse(call)
        if why is not None:
            return why
        call.found = self.specializations.find(call)
        return call.found if isinstance(call.found, str) else None

    def run(self, call: CallContext) -> Any:
        """Run the compiled graph, with what is known of the call."""
        return self.specializations.run(call.found, call, self.fused.run)

    def _make(
        self, lowered: Specialized, known: Precomputed, arguments: Sequence[Any], bucket: int | None
    ) -> Prepared | None:
        graph = lowered.with_known(known)
        compile = partial(compiled, options=self.options, tell=self.tell)
        head = None if bucket is None else head_of(graph, compile)  # whose gradient is reduced by itself
        graph = graph if head is None else head.rest
        run = compile(graph, [*arguments, *known.tensors], bucket)
        return None if run is None else Prepared(run, head)


def compiled(
    graph: fx.GraphModule,
    arguments: Sequence[Any],
    bucket: int | None = None,
    record: Callable[[Piece], Callable[..., Any]] | None = None,
    *,
    options: Options,
    tell: Callable[[str], None],
) -> Callable[..., Any] | None:
    """Compile a graph for such arguments, in pieces of `bucket` bytes of gradients, or that are recorded.

    Args:
        graph: of operations and fused ops.
        arguments: tensors, and numbers, of a call.
        bucket: how many bytes of gradients are reduced at a time while the backward goes on, or None.
        record: returns what runs a piece in the place of what was compiled.
        options: of the conversion.
        tell: gets a sentence if the compiler fails.

    Returns:
        The compiled graph, or None if the compiler fails.
    """
    if (name := replaced_function(graph.graph)) is not None:
        tell(f"a graph runs uncompiled, somebody has replaced PyTorch's {name}, which compilers trace")
        return None
    # By these two the compiler knows graphs of dynamo's, whose nodes say which arguments stay where they
    # are from call to call: CUDA graphs would copy all parameters in each. A part of one is none.
    if all(hasattr(node, "_dynamo_source") for node in graph.graph.nodes if node.op == "placeholder"):
        graph.meta["dynamo_compile_id"], graph._param_name_to_source = None, {}
    doing = f"compiling a graph of {len(graph.graph.nodes)} operations"
    log.info(doing)
    token, depth = compiling.set(True), functorch.get_dynamic_layer_stack_depth()
    try:
        with status(doing), functorch_config.patch(**_TRACED):
            mode = list_mode_options("default" if options.compile is True else options.compile)
            compile = partial(compile_fx, config_patches=mode)
            # in these modes, each piece would be a CUDA graph of its own
            by_layer = options.compile not in IN_CUDA_GRAPHS
            run = in_layers(graph, arguments, compile, tell, bucket, record) if by_layer else None
            if run is None and marked(graph.graph):
                return None
            return compile(graph, arguments) if run is None else run
    except Exception as error:
        # transforms of torch.func are entered and left by operations of the graph; when PyTorch 2.11 has
        # left the last one it raises
        with suppress(RuntimeError):
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        said = in_a_line(error)
        log.warning("a graph runs uncompiled, %s", said)
        log.debug("where that came from", exc_info=error)
        tell(f"a graph runs uncompiled, {said}")
        return None
    finally:
        compiling.reset(token)


def in_layers(
    graph: fx.GraphModule,
    given: Sequence[Any],
    compile: Callable[..., Any] | None,
    tell: Callable[[str], None],
    bucket: int | None = None,
    record: Callable[[Piece], Callable[..., Any]] | None = None,
) -> Callable[..., Any] | None:
    """Return what runs the pieces of a graph, see partition.in_pieces().

    Returns:
        None if the graph has no pieces, or cannot be cut into its layers, which `tell` gets a sentence for.
    """
    run = in_pieces(graph, given, compile, bucket, record)
    if run is None and marked(graph.graph):
        how = "without CUDA graphs" if compile is None else "uncompiled"
        tell(f"a graph whose layers are dropped runs {how}, it cannot be cut into them")
    return run
