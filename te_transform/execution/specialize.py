"""A captured graph that is lowered for a compiler, and the values that are computed before a call runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import and_, is_
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from te_transform.backends import plain
from te_transform.backends.chunked_loss import ChunkedLoss
from te_transform.backends.fp8.fp8_only import addresses
from te_transform.backends.fp8.products import ProductState
from te_transform.backends.joined import Join
from te_transform.backends.masks import LookedAt, MaskOp
from te_transform.backends.tracing import compiling
from te_transform.execution.call_context import CallContext
from te_transform.execution.call_sizes import symbols_of, tensor_in_call
from te_transform.execution.graph_version import GraphVersion
from te_transform.execution.lower import lower
from te_transform.graph import edit
from te_transform.graph.context import set_to
from te_transform.graph.nodes import called, has_gradient, value
from te_transform.plan.match import Site

# ops that a compiler fuses without help: all ops but attention; ops of a user's own rules stay
_LEFT = (plain.Linear, plain.LayerNormLinear, plain.Rotary, plain.CrossEntropy, ChunkedLoss)


class States:
    """The states of FP8 matrix products. Products that share a parameter share tensors."""

    def __init__(self, states: dict[fx.Node, ProductState]):
        self.states = states
        leaves = [tensor for state in states.values() for tensor in state.tensors()]
        numbers: dict[int, int] = {}
        self.pattern = tuple(numbers.setdefault(tensor.data_ptr(), len(numbers)) for tensor in leaves)
        self.tensors = [*dict(zip(self.pattern, leaves, strict=True)).values()]
        kept = {
            tensor.data_ptr() for state in states.values() for weights in state.weights for tensor in weights
        }
        # the indices of the tensors that calls write to: scales and amax
        self.written = [index for index, tensor in enumerate(self.tensors) if tensor.data_ptr() not in kept]

    def are(self, states: dict[fx.Node, ProductState]) -> bool:
        """Return True if the states are the same objects, of the same calls."""
        return len(states) == len(self.states) and all(map(is_, states.values(), self.states.values()))


class Precomputed:
    """The values that are computed before the compiled graph runs.

    Args:
        values: by node.
        staying: nodes whose tensors keep their addresses from call to call.
        states: of the FP8 products.
    """

    def __init__(self, values: dict[fx.Node, Any], staying: Collection[fx.Node], states: States):
        self.values, self.states = values, states.states
        leaves = [(node, leaf) for node, computed in values.items() for leaf in tree_leaves(computed)]
        tensors = [(node, leaf) for node, leaf in leaves if isinstance(leaf, Tensor)]
        # `.data`, so that autograd does not see writes: the next forward may come before this backward
        self.tensors = [*(tensor for _, tensor in tensors), *(tensor.data for tensor in states.tensors)]
        self.static_inputs = [*(node in staying for node, _ in tensors), *(True for _ in states.tensors)]
        self.written = [len(tensors) + index for index in states.written]
        self.computed = len(tensors)  # the number of leading tensors that are computed, not states
        answers = tuple(None if isinstance(leaf, Tensor) else leaf for _, leaf in leaves)
        self.key = (answers, states.pattern)

    def stay_as(self, arguments: Iterable[Any]) -> list[bool]:
        """Return `static_inputs` with the same result on all ranks.

        A precomputed tensor is static if it is memory of these arguments, not a copy that each call makes.
        """
        own = {*addresses([argument for argument in arguments if isinstance(argument, Tensor)])}
        computed = addresses(self.tensors[: self.computed])
        is_own = [address in own for address in computed] + [True] * (len(self.tensors) - self.computed)
        return [*map(and_, self.static_inputs, is_own)]


@dataclass(frozen=True, eq=False)
class Precomputation:
    """The nodes of a graph that are computed before the graph runs.

    Attributes:
        nodes: in the order of the module's outputs.
        module: computes them.
        reads: the indices of the arguments that the module reads.
    """

    nodes: Sequence[fx.Node]
    module: fx.GraphModule
    reads: Sequence[int]

    @classmethod
    def of(
        cls, graph: fx.GraphModule, nodes: Sequence[fx.Node], placeholders: Sequence[fx.Node]
    ) -> Precomputation:
        """Extract these nodes of a graph, and the nodes that they depend on."""
        module, inputs = edit.extract(graph, nodes, ())
        return cls(nodes, module, [placeholders.index(node) for node in inputs])

    def values(self, arguments: Sequence[Any]) -> dict[fx.Node, Any]:
        """Compute the nodes from the arguments of a call."""
        results = self.module.forward(*(arguments[index] for index in self.reads))
        return dict(zip(self.nodes, results, strict=True))


class Specialized:
    """The graph with fused attention and FP8 products, and the computation of masks and weights before it.

    Args:
        version: the graph, and its sites that run as captured. With a compiler, all sites but `products` do,
            and the compiled graph computes masks that are not causal or full. CUDA graphs cannot record the
            computation of a mask, because it copies numbers to the GPU.
        products: the sites that run in FP8.
    """

    def __init__(self, version: GraphVersion, products: frozenset[Site]):
        plan, options = version.plan, version.options
        compiles = bool(options.compile)
        others = {
            site for site in plan.sites if compiles and site not in products and isinstance(site.fused, _LEFT)
        }
        self.graph = lower(plan, version.scattered, version.disabled | others)
        self.runs: dict[tuple, Callable[..., Any] | None] = {}
        self.states = States({})  # of the last call without quantized weights
        self.constant: Precomputed | None = None  # the values, if they are the same in all calls
        nodes = list(self.graph.graph.nodes)
        placeholders = self.graph.graph.find_nodes(op="placeholder")
        calls = {node.target: node for node in nodes if node.op == "call_module"}
        self.products = {site: calls[site.name.replace(".", "_")] for site in products}
        self.weights = {
            site: [node.args[index] for index in site.fused.PRODUCTS] for site, node in self.products.items()
        }
        self.trained = {site: _trained_products(site, node) for site, node in self.products.items()}
        masks = self._masks()
        read = {node for weights in self.weights.values() for node in weights}
        joins = {node for node in nodes if isinstance(self._module(node), Join)}
        self.staying = sorted((read | joins) - {*placeholders})
        self.before = Precomputation.of(self.graph, [*masks, *self.staying], placeholders)
        for mask in masks if compiles and not options.in_cuda_graphs else ():
            self.before.module.set_submodule(mask.target, LookedAt(self._module(mask)))
        self.given = {node: placeholders.index(node) for node in read & {*placeholders}}

    @cached_property
    def reads_values(self) -> bool:
        """True if a mask depends on the values of tensors. Other masks are the same for equal sizes."""
        return any(isinstance(value(read), Tensor) for mask in self._masks() for read in mask.all_input_nodes)

    def _masks(self) -> list[fx.Node]:
        return [node for node in self.graph.graph.nodes if isinstance(self._module(node), MaskOp)]

    def _module(self, node: fx.Node) -> Any:
        return self.graph.get_submodule(node.target) if node.op == "call_module" else None

    def look(self, call: CallContext, repeats: bool = False) -> Precomputed | None:
        """Return the precomputed values of a call, or None if it must run uncompiled.

        Args:
            call: the call.
            repeats: True if a checkpoint repeats a compiled call.
        """
        if self.constant is not None:
            return self.constant
        arguments, is_recorded = call.args, call.records_gradients
        values, states = self.before.values(arguments), {}
        for site, node in self.products.items():
            weights, bias = self._weights(site, values, arguments), node.args[-1] is not None
            if repeats:
                state = site.fused.state_again(weights, bias)
            else:
                trained = [each and is_recorded for each in self.trained[site]]
                state = site.fused.state_for(weights, bias, trained)
            if state is None:
                return None
            states[node] = state
        known = self.states if self.states.are(states) else States(states)
        # a reference would keep quantized weights, or the scales of a call
        if not repeats and not any(state.weights for state in states.values()):
            self.states = known
        precomputed = Precomputed(values, self.staying, known)
        if not (self.before.reads or self.products or precomputed.tensors):
            self.constant = precomputed
        return precomputed

    def in_recipe(self, arguments: Sequence[Any]) -> frozenset[Site]:
        """Return the products that can run in the active recipe, given the sizes and weights of a call."""
        graph, values = self.graph.graph, self.before.values(arguments)
        symbols = symbols_of(graph.find_nodes(op="placeholder"))
        sizes = {symbol: arguments[index] for index, symbol in symbols.items()}
        asked, modes, products = {node: site for site, node in self.products.items()}, {}, set()
        with set_to(compiling, True):  # the inputs have no memory
            for node in graph.nodes:
                if "autocast" in called(node):  # a region begins or ends
                    modes[node] = node.target(*(modes.get(argument, argument) for argument in node.args))
                elif (site := asked.get(node)) and (x := tensor_in_call(node.args[0], sizes)) is not None:
                    why = site.fused.refuse_recipe(x, self._weights(site, values, arguments))
                    products |= {site} if why is None else set()
                    site.fused.plain_calls.update([why] if why else [])
        return frozenset(products)

    def with_known(self, known: Precomputed) -> fx.GraphModule:
        """Return the graph to compile. Its arguments are the captured graph's and `known.tensors`."""
        states = {node: {"state": state} for node, state in known.states.items()}
        return edit.with_known(self.graph, known.values, self.staying, states)

    def _weights(self, site: Site, values: dict[fx.Node, Any], arguments: Sequence[Any]) -> list[Tensor]:
        return [
            values[node] if node in values else arguments[self.given[node]] for node in self.weights[site]
        ]


def _trained_products(site: Site, call: fx.Node) -> list[bool]:
    """Return True for each product whose output needs a gradient when gradients are recorded."""
    needed = [has_gradient(argument) for argument in call.args]
    return site.fused.trained_products(needed)
