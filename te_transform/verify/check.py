"""Check the sites of a captured graph on the values of one call, and report the wrong ones."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from te_transform.execution.attach import with_setting
from te_transform.execution.captured_graph import CapturedGraph
from te_transform.execution.lower import lower, reference
from te_transform.graph.errors import in_full
from te_transform.graph.inputs import Inputs
from te_transform.graph.nodes import called, has_gradient, is_parameter, name_in_model, path_of, value
from te_transform.graph.preserve import hidden_from_checkpoints, same_random
from te_transform.graph.structure import structure
from te_transform.plan.match import Plan, Site
from te_transform.plan.rule import Deviation
from te_transform.verify.compare import Contenders, judge
from te_transform.verify.replay import Subject, in_double, widened


def check_sites(graph: CapturedGraph, arguments: Sequence[Any]) -> dict[Site, str]:
    """Compare each site with the captured operations that it replaces, on the values of one call.

    Forward and gradients are compared against fp64, with dropout off (see compare.py). The captured graph
    runs once, without gradients, and each site is checked as soon as its values exist. This needs the memory
    of one site in fp64. With less memory, the reference is the site's own dtype, with random rounding as the
    measure.

    A graph on fake tensors, or on the meta device, is not checked. Equal sites differ only in values, which
    do not influence rewriting. Therefore only the first MOST_ALIKE of them are checked (verify() compares
    every layer).

    Args:
        graph: The graph; it is not changed.
        arguments: The arguments of the call; they are not changed.

    Returns:
        A description of the failure for each wrong site. All sites store their deviations, or those of an
        equal site.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if not graph.plan.sites or any(is_fake(tensor) or tensor.is_meta for tensor in tensors):
        return {}
    with _apart(tensors):
        walk = _Walk(graph.plan)
        with torch.no_grad():
            walk.run(*map(_own_argument, arguments))
            walk.let_stand_for_all()
    return walk.wrong


_LAYER_PREFIX = r"(?:\w+\.)*\d+\."  # the path prefix of a layer; reasons contain no paths
# The number of equal sites to check: a model has one per layer, and a check takes as long as 20 calls.
MOST_ALIKE = 8


@contextmanager
def _apart(tensors: list[Tensor]) -> Iterator[None]:
    """Isolate the check from the surrounding call.

    Random states do not change, hooks of parameters do not run, and a checkpoint around the call does not
    record the check's operations.
    """
    hooked = [each for each in tensors if isinstance(each, nn.Parameter) and each._backward_hooks]
    unhooked = with_setting(hooked, "_backward_hooks", None)
    with unhooked, torch.inference_mode(False), same_random(tensors), _disable_current_modes():
        yield


def _own_argument(argument: Any) -> Any:
    """Return the argument, cloned if a forward might write to it."""
    written = isinstance(argument, Tensor) and not isinstance(argument, nn.Parameter)
    return argument.clone() if written else argument


@dataclass(frozen=True, eq=False)
class _Pair:
    """A site and the captured operations that it replaces, as modules with the same arguments."""

    site: Site
    fused: fx.GraphModule
    reference: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @classmethod
    def of(cls, plan: Plan, site: Site) -> _Pair:
        alone, inputs = reference(plan, site)
        fused = lower(replace(plan, captured=alone, sites=[site], outcomes=[]), [])
        return cls(site, fused, alone, inputs, tuple(plan.by_name[n.meta["origin"]] for n in site.outputs))

    @property
    def is_same(self) -> bool:
        """True if nothing is replaced: in plain PyTorch, a linear by itself stays the captured one."""
        return all(node.op != "call_module" for node in self.fused.graph.nodes)

    @property
    def key(self) -> tuple:
        """The key that equal sites share: the operations before and after, and the metadata of the inputs.

        Inputs that are neither parameters nor trained must be the same nodes, because the values of masks
        select kernels.
        """
        inputs = (
            (_node_properties(n), "" if is_parameter(n) or has_gradient(n) else n.name) for n in self.inputs
        )
        return structure(self.fused), structure(self.reference), tuple(inputs)

    def wrong(self, values: dict[str, Any]) -> str | None:
        """Return the failure of the site on these values of captured nodes by name, or None.

        A failure is the largest error relative to the allowed one, or the exception that the site raised.
        """
        try:
            with torch.enable_grad(), hidden_from_checkpoints():  # torch.func.grad() does not support hooks
                rows = judge(self._contenders(values), self._given(values), large=True)
        except Exception as error:  # any error rolls back only this site
            return f"on its recorded inputs it raised {in_full(error)}"
        self.site.deviations = tuple(
            Deviation(row.name, row.converted, row.original, row.allowed) for row in rows if row.dtype
        )
        failed = [row for row in rows if not row.ok]
        if not failed:
            return None
        worst = max(failed, key=lambda row: row.times)
        return str(replace(worst, name=re.sub(_LAYER_PREFIX, "", worst.name)))

    def _given(self, values: dict[str, Any]) -> Inputs:
        """Return the site's inputs without parameters; they require gradients as in the model."""
        given = []
        for node in self.inputs:
            if not isinstance(values[node.name], nn.Parameter):
                is_trained = has_gradient(node)
                given.append(values[node.name].detach().requires_grad_() if is_trained else values[node.name])
        return Inputs(tuple(given))

    def _contenders(self, values: dict[str, Any]) -> Contenders:
        own = {node: values[node.name] for node in self.inputs if isinstance(values[node.name], nn.Parameter)}
        wide = {node: widened(parameter) for node, parameter in own.items()}
        return Contenders(
            self._subject(self.reference, own),
            self._subject(self.fused, own),
            self._subject(self.reference, wide, double=True),
        )

    def _subject(
        self, module: fx.GraphModule, parameters: dict[fx.Node, Tensor], double: bool = False
    ) -> Subject:
        paths = _distinct(self.outputs)
        names = [(name_in_model(node) or node.name, tensor) for node, tensor in parameters.items()]

        def call(*given: Any) -> dict[str, Any]:
            rest = iter(given)
            arguments = [parameters[n] if n in parameters else next(rest) for n in self.inputs]
            return dict(zip(paths, module(*arguments), strict=True))

        return Subject(call, lambda: names, partial(in_double, module) if double else nullcontext)


def _node_properties(node: fx.Node) -> Any:
    tensor = value(node)
    if not isinstance(tensor, Tensor):
        return repr(tensor)
    return str(tensor.shape), str(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad


def _distinct(outputs: tuple[fx.Node, ...]) -> list[str]:
    """Return names of the outputs: module paths if they are distinct, else node names."""
    paths = [path_of(node) for node in outputs] if len(outputs) > 1 else [""]
    return paths if len(set(paths)) == len(paths) else [node.name for node in outputs]


class _Walk(fx.Interpreter):
    """The interpreter that runs the captured graph and judges each site once its last value is computed.

    All operations of a site lie in one region, without writes between them. Its inputs are therefore
    unchanged when the site is judged.
    """

    def __init__(self, plan: Plan):
        super().__init__(plan.captured)
        self.wrong: dict[Site, str] = {}
        self.results: dict[str, Any] = {}
        self.due: dict[fx.Node, list[_Pair]] = defaultdict(list)
        self.alike: dict[tuple, list[Site]] = defaultdict(list)
        for site in plan.sites:
            try:
                pair = _Pair.of(plan, site)
            except Exception as error:
                self.wrong[site] = f"it could not be built on its own, {in_full(error)}"
                continue
            if pair.is_same:
                continue
            alike = self.alike[pair.key]
            alike.append(site)
            if len(alike) <= MOST_ALIKE:
                self.due[max(pair.outputs)].append(pair)
        self.waiting = Counter(node.name for pairs in self.due.values() for p in pairs for node in p.inputs)

    def run_node(self, node: fx.Node) -> Any:
        # without gradients, a tensor takes no hook
        result = self.env[node.args[0]] if called(node) == "register_hook" else super().run_node(node)
        if node.name in self.waiting:
            self.results[node.name] = result
        for pair in self.due.get(node, ()):
            if (reason := pair.wrong(self.results)) is not None:
                self.wrong[pair.site] = reason
            self._drop(pair)
        return result

    def let_stand_for_all(self) -> None:
        """Give sites that were not checked the results of equal sites that were."""
        for alike in self.alike.values():
            checked, others = alike[:MOST_ALIKE], alike[MOST_ALIKE:]
            wrong = next((site for site in checked if site in self.wrong), checked[0])
            for site in others:
                site.deviations = wrong.deviations
                self.wrong |= {site: self.wrong[wrong]} if wrong in self.wrong else {}

    def _drop(self, pair: _Pair) -> None:
        """Free the values that no later site reads."""
        for node in pair.inputs:
            self.waiting[node.name] -= 1
            if not self.waiting[node.name]:
                del self.results[node.name]
