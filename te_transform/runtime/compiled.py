"""A captured graph that inductor compiles, that runs as CUDA graphs, or both.

For inductor, attention runs in the kernels that an eager call would choose, products of a recipe in FP8, and
the op of somebody's own rule where it was put. All else stays as it was captured, for inductor fuses it by
itself, and on an H100 separate products of q, k and v are faster there in bf16 than a joined one, whose
gradient it would have to put together. Without inductor, all sites are fused. What a mask is gets looked at
before the graph runs.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _functorch as functorch
from torch._dynamo.convert_frame import compile_lock
from torch._functorch import config as functorch_config
from torch._inductor import list_mode_options

from te_transform.backends import limits
from te_transform.backends.collectives import OwnRandom, Ranks
from te_transform.backends.joined import state_of
from te_transform.backends.quantized import addresses, closed, forms_of
from te_transform.backends.running import in_recipe
from te_transform.backends.tracing import compiling, in_backward, saving_hooks
from te_transform.canonicalize import written
from te_transform.graph.marks import marked
from te_transform.graph.nodes import (
    called,
    numel_of,
    replaced_function,
    returned,
    stays_in_place,
    storages,
    value,
)
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import IN_CUDA_GRAPHS, Options
from te_transform.runtime.console import in_a_line, status
from te_transform.runtime.cuda_graphs import stream_now
from te_transform.runtime.heads import Head, head_of
from te_transform.runtime.lower import Apart
from te_transform.runtime.lowered import Known, Lowered
from te_transform.runtime.pieces import Piece, dropped
from te_transform.runtime.prepared import Prepared
from te_transform.runtime.ranks import bucket_size
from te_transform.runtime.recordings import Function, Kind
from te_transform.runtime.regions import in_pieces
from te_transform.runtime.replayed import Replayed

log = logging.getLogger(__name__)

# Kinds of calls that one graph is compiled for: each takes seconds to minutes, later ones run uncompiled.
MOST = 8
_OVERLAP = "runs without CUDA graphs, it returns two tensors in one memory"
_TRACED = {
    # on a smaller budget it would quantize again in the backward, when TE has updated the scales
    "activation_memory_budget": 1.0,
    # A backward is called outside of the forward's autocast, which would round what the forward has in fp32.
    "backward_pass_autocast": "off",
}


def compile_fx(*arguments: Any, **options: Any) -> Callable[..., Any]:
    """inductor's, which is imported by the first graph that is compiled: that takes seconds."""
    from torch._inductor.compile_fx import compile_fx as inductor

    return inductor(*arguments, **options)


class CompiledGraph:
    """What runs in the place of a captured graph where it is compiled, or replayed.

    A call in a recipe runs as always while products take their first scales from it; the first of its kind
    shows which of them run in FP8. So do calls in which TE's own modules keep more than scales: of
    checkpoints, and of accumulate().

    Args:
        plan: of the captured graph.
        apart: where groups are noted that a call finds apart, see Join.
        without: its sites that run as they were captured.
        options: of the conversion.
        uncompiled: runs where the graph cannot, the compiler fails, or was called too often.
        failures: gets a sentence for that.
        ranks: that the model is divided among.
    """

    def __init__(
        self,
        plan: Plan,
        apart: Apart,
        without: Collection[Site],
        options: Options,
        uncompiled: Callable[..., Any],
        failures: list[str],
        ranks: Ranks | None,
    ):
        self.plan, self.apart, self.without, self.backend = plan, apart, frozenset(without), options.backend
        self.options = options
        self.how = "uncompiled" if options.compile else "without CUDA graphs"
        self.uncompiled, self.failures, self.ranks = uncompiled, failures, ranks
        placeholders = [node for node in plan.captured.graph.nodes if node.op == "placeholder"]
        names = [node.name for node in placeholders]
        self.varies = any(map(_varies, placeholders))
        self.why_not = _why_not(plan, options)
        seen = written(plan.captured.graph)
        self.writes = [place for place, node in enumerate(placeholders) if node in seen]
        self.stays = [stays_in_place(node) or node in seen for node in placeholders]
        self.outputs_overlap = _overlap(returned(plan.captured.graph), placeholders)
        # the fused products, each with the place of its first parameter; and those that may run in FP8
        self.weights = {
            site: names.index(site.weights[0][0].meta["origin"])
            for site in plan.sites
            if site.weights and site not in self.without
        }
        self.products = self.weights if options.recipe is not None else {}
        self.in_fp8: dict[tuple, frozenset[Site]] = {}  # by kind of call
        self.unseen: dict[tuple, frozenset[int]] = {}  # layers that no call of the kind has run yet
        self.lowered: dict[frozenset[Site], Lowered] = {}  # by what runs in FP8
        # the last call without gradients that was replayed, by all that the next step of a generation has in
        # common with it; what was recorded is let go of elsewhere
        self.last: tuple[tuple, Prepared, weakref.ref[Kind]] | None = None

    def __call__(self, *arguments: Any) -> Any:
        with limits.replayed if self.options.in_cuda_graphs else nullcontext():
            return self._call(arguments)

    def _call(self, arguments: Sequence[Any]) -> Any:
        if self.why_not:
            self._note(f"a graph runs {self.how}, {self.why_not}")
            return self.uncompiled(*arguments)
        recipe = self.backend.recipe_now() if self.products else None
        scaling = None if recipe is None else self.backend.scaling_of(recipe)
        step = self._step(arguments, (recipe is None, scaling))
        if (outputs := self._repeated(step, arguments)) is not None:
            return outputs
        if recipe is not None and scaling is None:
            self._note(f"graphs run {self.how}, {type(recipe).__name__} has products in TE's modules alone")
            return self.uncompiled(*arguments)
        if self.products and (saving_hooks() or in_backward()):
            return self.uncompiled(*arguments)
        first = next(iter(self.weights.values()), None)
        if self.options.graphs and first is not None and state_of(arguments[first]).gradients is not None:
            return self.uncompiled(*arguments)  # kernels add gradients to buffers that accumulate() made
        sites: frozenset[Site] = frozenset()
        if scaling is not None:
            told = [in_recipe(arguments[place], site.fused.in_fp8) for site, place in self.products.items()]
            kind = (scaling, tuple(told), self._sizes(arguments))
            if kind not in self.in_fp8:
                return self._first(kind, arguments)
            sites = self.in_fp8[kind]
        lowered = self._lowered(sites)
        known = lowered.look(arguments)
        run = None if known is None else self._run(lowered, known, arguments, scaling)
        if run is None:
            return self.uncompiled(*arguments)
        outputs = run(*arguments, *known.tensors)
        if sites and torch.is_grad_enabled():
            self.backend.update_scales_after_backward(outputs)
        if step is not None and not known.states and not lowered.reads_values:
            # what was computed before is the arguments' own memory, not a copy that each call makes anew
            own = {*addresses(known.tensors)} <= {*step[0]}
            kind = run.kind_of([*arguments, *known.tensors], len(arguments)) if own else None
            self.last = None if kind is None else (step, run, weakref.ref(kind))
        return outputs

    def _step(self, arguments: Sequence[Any], precision: tuple) -> tuple | None:
        """What two calls without gradients that one recording computes have in common; None where only a look
        at more than the arguments' memory could tell."""
        if not self.options.graphs or torch.is_grad_enabled() or self.ranks is not None:
            return None
        others = [argument for argument, stays in zip(arguments, self.stays, strict=True) if not stays]
        if self.writes:
            written = {arguments[place].untyped_storage()._cdata for place in self.writes}
            tensors = (other for other in others if isinstance(other, Tensor))
            if any(tensor.untyped_storage()._cdata in written for tensor in tensors):
                return None
        where = addresses([*compress(arguments, self.stays)])
        values = [other for other in others if not isinstance(other, Tensor)]
        here = torch.is_inference_mode_enabled(), stream_now()
        return where, values, self._sizes(arguments), precision, _attention(), here

    def _repeated(self, step: tuple | None, arguments: Sequence[Any]) -> Any:
        """The outputs of a call like the last one, which takes half of the CPU's time so; None of another."""
        last = self.last  # which another thread may change
        if step is None or last is None or last[0] != step:
            return None
        _, prepared, reference = last
        kind = reference()
        return None if kind is None else prepared.again(kind, arguments)

    def _run(self, lowered: Lowered, known: Known, arguments: Sequence[Any], scaling: Any) -> Prepared | None:
        """What is compiled for such a call, now where this is the first; None where nothing is."""
        bucket = self._bucket()
        key = (*known.key, scaling, _attention(), self._sizes(arguments), self._shared(arguments), bucket)
        if key not in lowered.runs:
            with compile_lock:  # compilers keep what they do in variables that all threads share
                self._compile(key, lowered, known, arguments, bucket)
        return lowered.runs.get(key)

    def _bucket(self) -> int | None:
        """How many bytes of gradients are reduced at a time while the backward of this call goes on; None
        where all are at its end, or a checkpoint is to repeat the call: outside of DDP, as one whole."""
        if self.options.in_cuda_graphs or not torch.is_grad_enabled() or saving_hooks() or in_backward():
            return None
        return bucket_size()

    def _compile(
        self, key: tuple, lowered: Lowered, known: Known, arguments: Sequence[Any], bucket: int | None
    ) -> None:
        """Compile the graph for such calls, unless another thread has, or for too many others."""
        if key in lowered.runs:
            return
        if sum(len(each.runs) for each in self.lowered.values()) < MOST:
            lowered.runs[key] = self._made(lowered, known, arguments, bucket)
        else:
            made = "compiled" if self.options.compile else "prepared"
            self._note(f"a graph is {made} for {MOST} kinds of calls at most, others run {self.how}")

    def _first(self, kind: tuple, arguments: Sequence[Any]) -> Any:
        """Run a first call of its kind uncompiled, which shows what runs in FP8.

        There are several until each layer has run in one.
        """
        outputs = self.uncompiled(*arguments)
        self.unseen[kind] = self.unseen.get(kind, dropped.get()) & dropped.get()
        if self.unseen[kind]:
            return outputs
        inside = {site for site, told in zip(self.products, kind[1], strict=True) if told}
        self.in_fp8[kind] = self._lowered(frozenset(inside)).ran_in_recipe(arguments)
        return outputs

    def _lowered(self, sites: frozenset[Site]) -> Lowered:
        if sites not in self.lowered:
            self.lowered[sites] = Lowered(self.plan, self.apart, self.without, sites, self.options)
        return self.lowered[sites]

    def _sizes(self, arguments: Sequence[Any]) -> tuple:
        """What dynamo has left open: numbers, shapes and strides."""
        if not self.varies:
            return ()
        return tuple((a.shape, a.stride()) if isinstance(a, Tensor) else a for a in arguments)

    def _shared(self, arguments: Sequence[Any]) -> tuple:
        """Which arguments lie in one storage, and where in it, of a graph that writes to any."""
        if not self.writes:
            return ()
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        times, places = Counter(storages), {storage: place for place, storage in enumerate(storages)}
        return tuple(
            (places[storage], tensor.storage_offset()) if times[storage] > 1 else None
            for storage, tensor in zip(storages, tensors, strict=True)
        )

    def _made(
        self, lowered: Lowered, known: Known, arguments: Sequence[Any], bucket: int | None
    ) -> Prepared | None:
        """What runs calls with these arguments; None where the compiler fails."""
        graph = lowered.with_known(known)
        compiles, in_graphs = self.options.compile, self.options.graphs
        is_apart = in_graphs or bucket is not None  # what the head gives is copied, or reduced, by itself
        head = head_of(graph, self._compiled if compiles else None) if is_apart else None
        graph = graph if head is None else head.rest
        given = [*arguments, *known.tensors]
        record = self._recorder(graph, known, arguments) if in_graphs else None
        by_layer = record is not None and bool(marked(graph.graph))
        make = partial(self._compiled, bucket=bucket) if compiles else self._plain
        run = make(graph, given, record=record if by_layer else None)
        if run is None or record is None or by_layer:
            return None if run is None else Prepared(run, head)
        if self.outputs_overlap:
            self._note(f"a graph {_OVERLAP}")
            return Prepared(run, head)
        return record(run, [node for node in graph.graph.nodes if node.op == "placeholder"], head)

    def _recorder(
        self, graph: fx.GraphModule, known: Known, arguments: Sequence[Any]
    ) -> Callable[..., Prepared]:
        """Return a function that lets operations of the graph run as CUDA graphs.

        Its arguments are what runs the operations, the nodes that they read, and the head beside them.
        """
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        # what is copied anew lies where the last call's copy lay, unless other layers ran
        as_own = self.ranks is not None or bool(marked(graph.graph))
        known_stay = known.stay_as(compress(arguments, self.stays)) if as_own else known.stays
        given = dict(zip(placeholders, [*arguments, *known.tensors], strict=True))
        stays = dict(zip(placeholders, [*self.stays, *known_stay], strict=True))
        writes = {placeholders[place] for place in self.writes}
        states = {placeholders[len(arguments) + place] for place in known.written}

        def record(run: Callable[..., Any], inputs: Sequence[fx.Node], head: Head | None = None) -> Prepared:
            forms = forms_of([given.get(node) for node in inputs])
            stay = [*(stays.get(node, False) for node in inputs), *(True for _ in forms)]
            writes_to, states_in = (
                [place for place, node in enumerate(inputs) if node in nodes] for nodes in (writes, states)
            )

            def recorded(*tensors: Any) -> Any:
                return run(*closed(tensors, forms))

            function = Function(recorded, stay, writes_to, states_in, self._note, self.ranks)
            return Prepared(run, head, Replayed(function), forms)

        return record

    def _in_pieces(
        self, graph: fx.GraphModule, given: Sequence[Any], compile: Callable[..., Any] | None, **how: Any
    ) -> Callable[..., Any] | None:
        """Return what runs the pieces of a graph, see regions.in_pieces(); None if it has none, or cannot be
        cut into its layers."""
        run = in_pieces(graph, given, compile, **how)
        if run is None and marked(graph.graph):
            self._note(f"a graph whose layers are dropped runs {self.how}, it cannot be cut into them")
        return run

    def _recorded_piece(self, record: Callable[..., Prepared], piece: Piece) -> Callable[..., Any]:
        """Return what runs a piece of a graph as CUDA graphs of its own."""
        run = piece.run or self._in_recipe(piece.module)
        if not piece.outputs:
            return run
        if _overlap(piece.outputs, piece.inputs):
            self._note(f"a part of a graph {_OVERLAP}")
            return run
        return record(run, piece.inputs)

    def _plain(
        self, graph: fx.GraphModule, given: Sequence[Any], record: Callable[..., Prepared] | None
    ) -> Callable[..., Any] | None:
        """Return what runs the graph as it is, or in pieces that are recorded; None if it cannot be cut."""
        if record is None:
            return self._in_recipe(graph)
        return self._in_pieces(graph, given, None, record=partial(self._recorded_piece, record))

    def _in_recipe(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """The graph as it is, in the recipe that is on: a backward, too, may run it again."""
        recipe = self.backend.recipe_now() if self.products else None
        if recipe is None:
            return graph.forward

        def run(*arguments: Any) -> Any:
            with self.backend.within_step(recipe):
                return graph.forward(*arguments)

        return run

    def _compiled(
        self,
        graph: fx.GraphModule,
        arguments: Sequence[Any],
        bucket: int | None = None,
        record: Callable[..., Prepared] | None = None,
    ) -> Callable[..., Any] | None:
        """The graph, compiled for such arguments, in pieces of so many bytes of gradients, or in pieces that
        are recorded; None where the compiler fails."""
        if (name := replaced_function(graph.graph)) is not None:
            self._note(
                f"a graph runs uncompiled, somebody has replaced PyTorch's {name}, which compilers trace"
            )
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
                asked = self.options.compile
                mode = list_mode_options("default" if asked is True else asked)
                compile = partial(compile_fx, config_patches=mode)
                by_layer = asked not in IN_CUDA_GRAPHS  # each piece would be a graph of its own
                each = None if record is None else partial(self._recorded_piece, record)
                how = {"bucket": bucket, "record": each}
                run = self._in_pieces(graph, arguments, compile, **how) if by_layer else None
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
            self._note(f"a graph runs uncompiled, {said}")
            return None
        finally:
            compiling.reset(token)

    def _note(self, sentence: str) -> None:
        if sentence not in self.failures:
            self.failures.append(sentence)


def _why_not(plan: Plan, options: Options) -> str | None:
    """Why a graph is never compiled, or never replayed."""
    if any(isinstance(module, OwnRandom) for module in plan.captured.modules()):
        return "each rank has dropouts of its own in it"
    # of no rows inductor lays the operands out in a way that PyTorch's products by groups refuse
    products = (node for node in plan.captured.graph.nodes if called(node).strip("_") == "grouped_mm")
    if options.compile and not all(map(numel_of, products)):
        return "its products by groups are of no tokens"
    return None


def _attention() -> tuple[bool, ...]:
    """Which of its kernels PyTorch's attention may choose from, which dynamo does not guard."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _overlap(outputs: Iterable[Any], inputs: Iterable[fx.Node]) -> bool:
    """Whether two tensors that are returned, and made, lie in one memory."""
    nodes = [node for node in dict.fromkeys(outputs) if isinstance(node, fx.Node)]
    given = set(storages(inputs))
    made = [storage for storage in storages(nodes) if storage not in given]
    return len(set(made)) < len(made)


def _varies(placeholder: fx.Node) -> bool:
    """Whether the sizes of an argument may be others than those that the graph was captured with."""
    held = value(placeholder)
    sizes = held.shape if isinstance(held, Tensor) else (held,)
    return any(isinstance(size, torch.SymInt) for size in sizes)
