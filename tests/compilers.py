"""A compiler in the place of inductor: AOTAutograd traces for it as for inductor, and nothing is compiled.

Compiling takes seconds to minutes. tests/gpu runs the same calls in the code that inductor generates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tag, Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch.utils._pytree import tree_map_only

from te_transform.execution.executors import inductor
from te_transform.execution.inductor_faults import checked, decompositions


class Compiler(list[tuple[fx.GraphModule, dict[str, Any]]]):
    """The graphs that were compiled, each with the options of its mode.

    Args:
        on_backward: is called when a compiled backward begins.

    Attributes:
        compile: compiles a graph; a test may put a function there that raises.
    """

    def __init__(self, on_backward: Callable[[], Any] = lambda: None):
        super().__init__()
        self.compile = partial(trace, on_backward=on_backward)

    def __call__(self, graph: fx.GraphModule, arguments: list[Any], config_patches: dict[str, Any]) -> Any:
        self.append((graph, config_patches))
        return self.compile(graph, arguments)


def install(compiler: Compiler | None = None, patch: pytest.MonkeyPatch | None = None) -> Compiler:
    """Put a compiler in the place of inductor until `patch` is undone, by default until the process ends."""
    compiler, patch = Compiler() if compiler is None else compiler, patch or pytest.MonkeyPatch()
    patch.setattr(inductor, "compile_fx", compiler)
    return compiler


def trace(
    graph: fx.GraphModule, arguments: list[Any], on_backward: Callable[[], Any] = lambda: None
) -> Callable[..., Any]:
    """Return what AOTAutograd traces, uncompiled."""

    def forward(graph: fx.GraphModule, _: Any) -> Any:
        def run(*given: Any) -> Any:
            # inductor returns inputs as they are; other outputs may lie in their memory, with own versions
            inputs = {*map(id, given)}
            return tree_map_only(Tensor, lambda out: out if id(out) in inputs else out.data, graph(*given))

        return make_boxed_func(run)

    def backward(graph: fx.GraphModule, _: Any) -> Any:
        # dropouts whose results the forward keeps are here too, unused: they would draw random numbers
        graph.graph.eliminate_dead_code(lambda node: node.is_impure() and not is_random(node))
        graph.recompile()
        return make_boxed_func(lambda *given: (on_backward(), graph.forward(*given))[1])

    def is_random(node: fx.Node) -> bool:
        return Tag.nondeterministic_seeded in getattr(node.target, "tags", ())

    # Without inductor's decompositions, aten's view of a gradient with strides that fake tensors do not
    # predict (attention's on a CPU, with a mask that learns) raises for the original too.
    return aot_module_simplified(
        graph, arguments, decompositions=decompositions(),
        fw_compiler=checked(forward), bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition, keep_inference_input_mutations=True,
    )  # fmt: skip
