"""A captured graph that inductor compiles.

Attention runs in the kernels that an eager call would choose; norms, products and activations stay as they
were captured, for inductor fuses them by itself, and on an H100 separate products of q, k and v are faster
there than a joined one, whose gradient it would have to put together. What a mask is gets looked at before
the compiled graph runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx

from te_transform.backends import plain
from te_transform.backends.limits import compiling
from te_transform.backends.masks import Mask
from te_transform.canonicalize import written
from te_transform.graph import edit
from te_transform.graph.nodes import value
from te_transform.plan.match import Plan, Site
from te_transform.runtime.lower import lower

log = logging.getLogger(__name__)

# Kinds of calls that one graph is compiled for: each takes seconds to minutes, later ones run uncompiled.
MOST = 8


class CompiledGraph:
    """What runs in the place of a captured graph.

    Dynamo guards what the graph was captured with; what it leaves open is part of the key of a compilation:
    sizes that vary, what the masks turn out to be, and which arguments share memory that is written to.

    Args:
        plan: of the captured graph.
        without: its sites that run as they were captured.
        mode: of torch.compile; True for its default.
        uncompiled: runs where the compiler fails, or was called too often.
        failures: gets a sentence for that.
    """

    def __init__(
        self,
        plan: Plan,
        without: frozenset[Site],
        mode: bool | str,
        uncompiled: Callable[..., Any],
        failures: list[str],
    ):
        others = {site for site in plan.sites if not isinstance(site.fused, plain.DotProductAttention)}
        self.lowered = lower(plan, [], without | others)
        self.options = list_mode_options("default" if mode is True else mode)
        self.uncompiled, self.failures = uncompiled, failures
        placeholders = [node for node in self.lowered.graph.nodes if node.op == "placeholder"]
        self.masks = [node for node in self.lowered.graph.nodes if self._is_mask(node)]
        self.look, inputs = edit.extract(self.lowered, self.masks, ())
        self.places = [placeholders.index(node) for node in inputs]
        self.varies = any(map(_varies, placeholders))
        self.writes = bool(written(plan.captured.graph))
        self.runs: dict[tuple, Callable[..., Any] | None] = {}

    def _is_mask(self, node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(self.lowered.get_submodule(node.target), Mask)

    def __call__(self, *arguments: Any) -> Any:
        masks = self.look(*(arguments[place] for place in self.places))
        tensors = [mask for mask in masks if isinstance(mask, Tensor)]
        answers = tuple(None if isinstance(mask, Tensor) else mask for mask in masks)
        key = (answers, self._sizes(arguments), self._shared(arguments))
        if key not in self.runs:
            if len(self.runs) >= MOST:
                self._note(f"a graph is compiled for {MOST} kinds of calls at most, others run uncompiled")
                return self.uncompiled(*arguments)
            self.runs[key] = self._compiled(masks, [*arguments, *tensors])
        run = self.runs[key]
        return self.uncompiled(*arguments) if run is None else run(*arguments, *tensors)

    def _sizes(self, arguments: Sequence[Any]) -> tuple:
        """What dynamo has left open: numbers, shapes and strides."""
        if not self.varies:
            return ()
        return tuple((a.shape, a.stride()) if isinstance(a, Tensor) else a for a in arguments)

    def _shared(self, arguments: Sequence[Any]) -> tuple:
        """Which arguments lie in one storage, and where in it, of a graph that writes to any."""
        if not self.writes:
            return ()
        storages = [a.untyped_storage()._cdata if isinstance(a, Tensor) else None for a in arguments]
        offsets = (a.storage_offset() if isinstance(a, Tensor) else None for a in arguments)
        return tuple(zip(map(storages.index, storages), offsets, strict=True))

    def _compiled(self, masks: Sequence[Any], arguments: Sequence[Any]) -> Callable[..., Any] | None:
        """The graph, compiled for calls with these masks and arguments; None where the compiler fails."""
        graph = edit.with_known(self.lowered, dict(zip(self.masks, masks, strict=True)))
        # By these two the compiler knows graphs of dynamo's, whose nodes say which arguments stay where they
        # are from call to call: CUDA graphs would copy all parameters in each.
        graph.meta["dynamo_compile_id"], graph._param_name_to_source = None, {}
        log.info("compiling a graph of %d operations", len(graph.graph.nodes))
        token = compiling.set(True)
        try:
            return compile_fx(graph, arguments, config_patches=self.options)
        except Exception as error:
            said = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
            log.warning("a graph runs uncompiled, %s", said)
            log.debug("where that came from", exc_info=error)
            self._note(f"a graph runs uncompiled, {said}")
            return None
        finally:
            compiling.reset(token)

    def _note(self, sentence: str) -> None:
        if sentence not in self.failures:
            self.failures.append(sentence)


def _varies(placeholder: fx.Node) -> bool:
    """Whether the sizes of an argument may be others than those that the graph was captured with."""
    held = value(placeholder)
    sizes = held.shape if isinstance(held, Tensor) else (held,)
    return any(isinstance(size, torch.SymInt) for size in sizes)
