"""Specializations of a captured graph by shapes and mode, for inductor and CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo.convert_frame import compile_lock

from te_transform.backends.fp8.checkpointed_calls import NotedCall, NotedCalls
from te_transform.backends.fp8.current_model import in_recipe
from te_transform.backends.fp8.fp8_only import is_fp8_only
from te_transform.backends.fp8.registry import read_state
from te_transform.backends.ranks import bucket_size
from te_transform.backends.tensor_registry import TensorRegistry
from te_transform.execution.call_context import CallContext
from te_transform.execution.gathered import with_copied_vectors
from te_transform.execution.graph_version import GraphVersion
from te_transform.execution.specialize import Precomputed, Specialized
from te_transform.graph.nodes import called, numel_of, value
from te_transform.plan.match import Plan, Site
from te_transform.plan.options import Options

# The maximum number of specializations of a graph. Each takes seconds to minutes. Later calls run uncompiled.
MAX_SPECIALIZATIONS = 8

_SEEN_BY_MODE = "a mode sees its operations, which a compiled graph does not call"
_TRANSFORMED = "a function transform or forward-mode differentiation is on"
_OBSERVED_CALL = "verify() or the conversion observes the call"
_REPEATED = "a checkpoint repeats a call that ran fused, or it is reentrant"
_ACCUMULATED = "in accumulate(), kernels add gradients to buffers"
_UNREADY = "its matrix products have no scales for these weights yet"
_FP8_ONLY = "TE's modules multiply weights that are held in FP8 alone"
_FAILED = "no specialization for the call, see the notes"

SpecializedRun = Callable[..., Any]
Make = Callable[[Specialized, Precomputed, Sequence[Any], int | None], SpecializedRun | None]


class Ready(NamedTuple):
    """The specialization of a call.

    Attributes:
        lowered: the graph that `compute` computes.
        compute: computes the outputs from the arguments of a call and the tensors of `known`.
        known: the precomputed values.
        backend: updates the scales of gradients at the end of the backward, or None if there are none.
    """

    lowered: Specialized
    compute: SpecializedRun
    known: Precomputed
    backend: Any

    def arguments(self, call: CallContext) -> tuple[Any, ...]:
        """Return the arguments of `compute` in a call."""
        own = call.args if self.backend is None else with_copied_vectors(call.args)
        return (*own, *self.known.tensors)

    def update_scales(self, call: CallContext, outputs: Any) -> None:
        """Have `backend` update the scales of gradients at the end of the call's backward."""
        if call.records_gradients:
            self.backend.update_scales_after_backward(outputs)


class Specializations:
    """The specializations of one captured graph.

    In a recipe, these calls run fused:

    - calls from which matrix products take their first scales;
    - calls in accumulate();
    - repetitions of calls that ran fused, because a checkpoint requires both to save the same tensors.

    Args:
        version: the graph, and its sites that run as captured.
        make: makes the function of a specialization, or returns None if the compiler fails.
    """

    def __init__(self, version: GraphVersion, make: Make):
        plan, options = version.plan, version.options
        self.version, self.make, self.writes = version, make, version.writes
        placeholders = plan.captured.graph.find_nodes(op="placeholder")
        names = [node.name for node in placeholders]
        self.varying = [index for index, node in enumerate(placeholders) if _varies(node)]
        self.never = _why_never(plan, options)
        # the fused products, each with the index of its first parameter
        self.weights = {
            site: names.index(site.weights[0][0].meta["origin"]) for site in version.sites if site.weights
        }
        # the products that run in FP8, by recipe, precision and sizes
        self.in_recipe: dict[tuple[Any, ...], frozenset[Site]] = {}
        # by the first weight, because layers share a graph
        self.checkpointed: TensorRegistry[NotedCalls] = TensorRegistry()
        self.lowered: dict[frozenset[Site], Specialized] = {}  # by the products that run in FP8

    @property
    def options(self) -> Options:
        """The options of the conversion."""
        return self.version.options

    @property
    def products(self) -> dict[Site, int]:
        """The products that may run in FP8, each with the index of its first parameter."""
        return self.weights if self.options.recipe is not None else {}

    @property
    def _otherwise(self) -> str:
        return "uncompiled" if self.options.compile else "without CUDA graphs"

    def refuse(self, call: CallContext) -> str | None:
        """Return why no specialization can run the call, regardless of its arguments."""
        if call.is_observed:
            return _OBSERVED_CALL
        if call.is_transformed:
            return _TRANSFORMED
        if call.is_seen:
            return _SEEN_BY_MODE
        if self.never is not None:
            self.version.tell(f"a graph runs {self._otherwise}: {self.never}")
        return self.never

    def precision(self) -> tuple[Any, Any]:
        """Return the active recipe and its scaling, or None for products in the dtype of the weights."""
        recipe = self.options.backend.recipe_now() if self.products else None
        return recipe, None if recipe is None else self.options.backend.scaling_of(recipe)

    def find(self, call: CallContext) -> Ready | str:
        """Return the specialization of a call, which may be made now, or why there is none."""
        options = self.version.options
        if options.recipe is None:
            is_added = options.graphs and self._accumulates(call.args)
            return _ACCUMULATED if is_added else self._ready(call, frozenset(), None)
        if not self.products or not (call.is_checkpointed or call.in_backward):
            return self._find(call)
        weight = call.args[next(iter(self.products.values()))]
        noted = self.checkpointed.get(weight) or self.checkpointed.set(weight, NotedCalls())
        if call.in_backward:
            return self._find_again(call, noted.again() if call.is_checkpointed else None)
        ready = self._find(call)
        is_ready = isinstance(ready, Ready)
        noted.note(ran=(ready.lowered, ready.compute, ready.known.key) if is_ready else None)
        return ready

    def _find_again(self, call: CallContext, noted: NotedCall | None) -> Ready | str:
        """Return the specialization that ran a call in its forward; a checkpoint repeats the call."""
        if noted is None or noted.ran is None:
            return _REPEATED
        lowered, run, key = noted.ran
        known = lowered.look(call, repeats=True)
        if known is None or known.key != key:
            return _REPEATED
        return Ready(lowered, run, known, backend=None)

    def _find(self, call: CallContext) -> Ready | str:
        arguments = call.args
        recipe, scaling = self.precision()
        if recipe is not None and scaling is None:
            why = f"{type(recipe).__name__} runs only in TE's modules"
            self.version.tell(f"graphs run {self._otherwise}: {why}")
            return why
        if (self.options.graphs or scaling is not None) and self._accumulates(arguments):
            return _ACCUMULATED
        sites: frozenset[Site] = frozenset()
        if scaling is not None:
            in_fp8 = [in_recipe(arguments[index], site.fused.in_fp8) for site, index in self.products.items()]
            key = (scaling, tuple(in_fp8), self.sizes(arguments))
            if key not in self.in_recipe:
                inside = {site for site, is_in in zip(self.products, in_fp8, strict=True) if is_in}
                self.in_recipe[key] = self._lowered(frozenset(inside)).in_recipe(arguments)
            sites = self.in_recipe[key]
        return self._ready(call, sites, scaling)

    def _ready(self, call: CallContext, sites: frozenset[Site], scaling: Any) -> Ready | str:
        """Return the specialization whose products of `sites` run in FP8, or why there is none."""
        lowered = self.lowered.get(sites) or self._lowered(sites)
        known = lowered.constant or lowered.look(call)
        if known is None:
            held_in_fp8 = any(is_fp8_only(call.args[index]) for index in self.products.values())
            return _FP8_ONLY if held_in_fp8 else _UNREADY
        run = self._run_for(lowered, known, call, scaling)
        if run is None:
            return _FAILED
        return Ready(lowered, run, known, self.version.options.backend if sites else None)

    def _accumulates(self, arguments: Sequence[Any]) -> bool:
        """Return True in accumulate(), whose buffers a recording would not add to."""
        first = next(iter(self.weights.values()), None)
        return first is not None and read_state(arguments[first]).gradients is not None

    def sizes(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the sizes that dynamo did not guard: numbers, shapes and strides."""
        varying = (arguments[index] for index in self.varying)
        return tuple((a.shape, a.stride()) if isinstance(a, Tensor) else a for a in varying)

    def _run_for(
        self, lowered: Specialized, known: Precomputed, call: CallContext, scaling: Any
    ) -> SpecializedRun | None:
        bucket, arguments = bucket_size(), call.args
        bucket = None if bucket is None else self._bucket(call, bucket)
        sizes = self.sizes(arguments) if self.varying else ()
        shared = self._shared(arguments) if self.writes else ()
        key = (*known.key, scaling, attention_kernels(), sizes, shared, bucket)
        run = lowered.runs.get(key)
        if run is None and key not in lowered.runs:
            with compile_lock:  # compilers keep their state in variables that all threads share
                self._make(key, lowered, known, arguments, bucket)
            run = lowered.runs.get(key)
        return run

    def _make(
        self,
        key: tuple[Any, ...],
        lowered: Specialized,
        known: Precomputed,
        arguments: Sequence[Any],
        bucket: int | None,
    ) -> None:
        """Make a specialization, unless another thread has made it, or there are too many already."""
        if key in lowered.runs:
            return
        if sum(len(each.runs) for each in self.lowered.values()) < MAX_SPECIALIZATIONS:
            lowered.runs[key] = self.make(lowered, known, arguments, bucket)
            return
        verb = "compiled" if self.options.compile else "prepared"
        self.version.tell(
            f"a graph is {verb} for at most {MAX_SPECIALIZATIONS} sets of shapes and modes; other calls run "
            f"{self._otherwise}"
        )

    def _bucket(self, call: CallContext, bucket: int) -> int | None:
        """Return the bytes of gradients that are reduced at a time during the backward of this call, or None.

        None means that all gradients are reduced at its end, or that a checkpoint repeats the whole call
        outside of DDP. `bucket` is the size of DDP's buckets.
        """
        if self.options.in_cuda_graphs or not call.records_gradients:
            return None
        return None if call.is_checkpointed or call.in_backward else bucket

    def _lowered(self, sites: frozenset[Site]) -> Specialized:
        if sites not in self.lowered:
            self.lowered[sites] = Specialized(self.version, sites)
        return self.lowered[sites]

    def _shared(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return which arguments share a storage, and their offsets."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        times, indices = Counter(storages), {storage: index for index, storage in enumerate(storages)}
        return tuple(
            (indices[storage], tensor.storage_offset()) if times[storage] > 1 else None
            for storage, tensor in zip(storages, tensors, strict=True)
        )


def attention_kernels() -> tuple[bool, ...]:
    """Return the enabled kernels of PyTorch's attention, which dynamo does not guard."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def _why_never(plan: Plan, options: Options) -> str | None:
    """Return why a graph is never compiled or recorded."""
    if any(getattr(module, "draws_per_rank", False) for module in plan.captured.modules()):
        return "it contains dropouts that differ per rank"
    # without rows, inductor chooses strides that PyTorch's grouped matrix products refuse
    products = (node for node in plan.captured.graph.nodes if called(node).strip("_") == "grouped_mm")
    if options.compile and not all(map(numel_of, products)):
        return "its grouped matrix products have no tokens"
    return None


def _varies(placeholder: fx.Node) -> bool:
    """Return True if the sizes or strides of an argument may differ from the captured ones."""
    argument = value(placeholder)
    sizes = argument.shape if isinstance(argument, Tensor) else (argument,)
    if isinstance(argument, Tensor) and argument.layout is torch.strided:
        sizes = (*sizes, *argument.stride())
    return any(isinstance(size, torch.SymInt) for size in sizes)
