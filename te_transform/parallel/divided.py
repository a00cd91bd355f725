"""A converted model on the ranks of a tensor-parallel group.

The parameters are DTensors, and each rank computes with its own shards. The user's forward may contain sizes
and numbers of heads, so it is captured as on one rank. For the capture, stand-ins of the whole size and
without memory replace the parameters. The captured graph is then rewritten to read the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from te_transform.backends.fp8.registry import share_state
from te_transform.backends.joined import local, standing_for
from te_transform.backends.ranks import gathered
from te_transform.canonicalize.op import Forms
from te_transform.graph.nodes import MADE_ANEW, is_parameter
from te_transform.parallel.collectives import Move, Ranks, Shards
from te_transform.parallel.layout import Place
from te_transform.parallel.sharded import on_shards
from te_transform.parallel.sharding import Refusal
from te_transform.plan.rule import Outcome
from te_transform.report.places import gather


class ParallelError(RuntimeError):
    """The error for a model, mesh or call that cannot be divided among ranks; the message says what to do."""


@dataclass(eq=False)
class Divided:
    """A parameter of a divided model.

    The FP8 state of a parameter belongs to its stand-in, which is the same tensor in each call.

    Attributes:
        shards: the share that a rank computes with, or None if each rank computes with the whole parameter.
        stand_in: replaces the parameter during captures.
        parameter: the DTensor of the last call.
        version: of the DTensor at the last call.
    """

    shards: Shards | None
    stand_in: nn.Parameter | None = None
    parameter: DTensor | None = None
    version: int = 0

    def stand_in_for(self, parameter: DTensor) -> nn.Parameter:
        """Return a parameter of the whole size without memory, filled with NaN.

        Grouped products read strides of a matrix during capture, so a stack of matrices has memory for one
        matrix.
        """
        stand_in, self.parameter = self.stand_in, parameter
        if stand_in is None or (stand_in.dtype, stand_in.device) != (parameter.dtype, parameter.device):
            sizes = (1, *parameter.shape[1:]) if parameter.dim() == 3 else (1,)
            one = torch.full(sizes, math.nan, dtype=parameter.dtype, device=parameter.device)
            stand_in = nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)
            if self.stand_in is not None:
                share_state(self.stand_in, stand_in)
            self.stand_in = stand_in
        stand_in.requires_grad_(parameter.requires_grad)
        share_state(stand_in, parameter)
        if parameter._version != self.version:
            # A write to a DTensor does not change the version of its local tensor, by which FP8 weights are
            # cached. After a call has taken a view of the local tensor, its version must not change any more.
            self.version = parameter._version
            increment_version(local(parameter))
        return stand_in

    def share(self, ranks: Ranks, move: Move | None) -> Tensor:
        """Return this rank's share, redistributed by `move`. Gradients reach the DTensor."""
        if self.shards is None or self.shards.is_plain:
            share = self.parameter.to_local()
        else:
            # Each rank has rows of q, k and v of one product, or several ranks have the same heads. Gather
            # all rows, and take the rows of this rank.
            whole = self.parameter.redistribute(placements=[Replicate()]).to_local(
                grad_placements=[Partial()]
            )
            share = ranks.share(whole, self.shards)
        return self._standing(share if move is None else move(share))

    def whole(self) -> Tensor:
        """Return the whole tensor, gathered."""
        return self._standing(self.parameter.full_tensor())

    def _standing(self, tensor: Tensor) -> Tensor:
        share_state(self.stand_in, local(self.parameter))  # to_local() makes another tensor in each call
        return standing_for(tensor, self.parameter)


_ReadArgument = Callable[[str, Divided], Tensor]  # of an argument, by its name


@dataclass(eq=False)
class Parallel:
    """The division of a converted model.

    Args:
        ranks: the group.
        sequence: True if residuals and norms are sharded too.
        places: the divided and undivided parts of the model, for the report.
        forms: the canonical forms that the model's rules need besides the usual ones.
        divided: the parameters by module and name; tied parameters share one entry.
        standing: the parameters by the ids of the stand-ins of a call.
    """

    ranks: Ranks
    sequence: bool
    places: tuple[Place, ...]
    forms: tuple[Forms, ...] = ()
    divided: dict[tuple[nn.Module, str], Divided] = field(default_factory=dict)
    standing: dict[int, Divided] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict) -> Parallel:
        raise ParallelError(
            "a model that is divided among ranks cannot be copied: copy the converted model, then divide the "
            "copy by te_transform.parallelize()"
        )

    def __reduce__(self) -> tuple:
        raise ParallelError(
            "a model that is divided among ranks cannot be pickled: save its state_dict(), by "
            "torch.distributed.checkpoint or of full_tensor()s"
        )

    def distributed(self, model: nn.Module, shards: Mapping[str, Shards], undo: ExitStack) -> None:
        """Replace each parameter of the model by a DTensor with the first rank's values.

        Tied parameters stay tied. `undo` restores the original parameters.
        """
        replacements: dict[int, tuple[nn.Parameter, Divided]] = {}
        before = [*model.named_parameters(remove_duplicate=False)]
        known = {id(parameter): shards[name] for name, parameter in before if name in shards}
        for name, parameter in before:
            if id(parameter) not in replacements:
                split = known.get(id(parameter))  # under any name of a tied parameter
                stored = Replicate() if split is None else Shard(parameter.dim() + split.dim)
                tensor = distribute_tensor(parameter.detach(), self.ranks.mesh, [stored])
                dtensor, divided = nn.Parameter(tensor, parameter.requires_grad), Divided(split)
                divided.stand_in_for(dtensor)  # both share their FP8 state
                replacements[id(parameter)] = dtensor, divided
            module, own = _holder(model, name)
            undo.callback(module._parameters.__setitem__, own, parameter)
            module._parameters[own], self.divided[module, own] = replacements[id(parameter)]

    def sentences(self) -> Iterator[str]:
        """Yield sentences for the report: what is divided among the ranks, and why the rest is not."""
        ranks = self.ranks.count
        outcomes = [Outcome(place.what, place.path, "refused", place.reasons) for place in self.places]
        for places in gather(outcomes):
            where = f"{places.rule}: {', '.join(places.lines)}"
            if places.reasons:
                yield f"whole on each of {ranks} ranks is {where}, because {', '.join(places.reasons)}"
            else:
                yield f"divided among {ranks} ranks is {where}"

    def collect(self) -> None:
        """Replace the DTensors by whole parameters."""
        parameters: dict[int, nn.Parameter] = {}
        for (module, name), divided in self.divided.items():
            if id(divided) not in parameters:
                dtensor = module._parameters[name]
                parameters[id(divided)] = nn.Parameter(dtensor.detach().full_tensor(), dtensor.requires_grad)
            module._parameters[name] = parameters[id(divided)]

    @contextmanager
    def standing_in(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Replace the parameters of these modules by stand-ins, for a call that is captured."""
        with self._replaced(modules, Divided.stand_in_for) as replaced:
            self.standing = {id(d.stand_in): d for d in replaced} or self.standing
            yield

    @contextmanager
    def whole(self, modules: Iterable[nn.Module], repeats: bool = False) -> Iterator[None]:
        """Replace the parameters of these modules by gathered tensors, for a call of the user's own code.

        Each rank runs this call by itself.

        Raises:
            ParallelError: the backward `repeats` parts of the code, after the gathered tensors are gone.
        """
        if repeats:
            raise ParallelError(
                "expected no activation checkpoints in a divided model, got some inside its blocks, or "
                "around blocks in no list; turn them off, or checkpoint whole blocks"
            )
        with self._replaced(modules, lambda divided, dtensor: dtensor.full_tensor()):
            yield

    @contextmanager
    def _replaced(
        self, modules: Iterable[nn.Module], make: Callable[[Divided, DTensor], Tensor]
    ) -> Iterator[list[Divided]]:
        tensors: dict[int, Tensor] = {}
        before, replaced = [], []
        try:
            for module in modules:
                for name, parameter in module._parameters.items():
                    divided = self.divided.get((module, name))
                    if divided is None or not isinstance(parameter, DTensor):  # replaced by an outer call
                        continue
                    if id(divided) not in tensors:
                        tensors[id(divided)] = make(divided, parameter)
                        replaced.append(divided)
                    before.append((module, name, parameter))
                    module._parameters[name] = tensors[id(divided)]
            yield replaced
        finally:
            for module, name, parameter in before:
                module._parameters[name] = parameter

    def graph(
        self, captured: fx.GraphModule, fuse: Callable[[fx.GraphModule], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Return the callable that replaces a captured graph.

        Layers that share the graph may be divided differently.
        """
        names = [node.name for node in captured.graph.find_nodes(op="placeholder")]
        functions: dict[tuple, tuple[Callable[..., Any], _ReadArgument]] = {}

        def run(*arguments: Any) -> Any:
            divided = [self.standing.get(id(argument)) for argument in arguments]
            key = tuple(own and own.shards for own in divided)
            if key not in functions:
                functions[key] = self._on_shards(captured, fuse, dict(zip(names, key, strict=True)))
            function, read = functions[key]
            each = zip(names, arguments, divided, strict=True)
            return function(*(given if own is None else read(name, own) for name, given, own in each))

        return run

    def _on_shards(
        self, captured: fx.GraphModule, fuse: Callable[..., Any], shards: dict[str, Shards | None]
    ) -> tuple[Callable[..., Any], _ReadArgument]:
        """Return the function for these shards of a graph's arguments, and how it reads the arguments."""
        known = {name: each for name, each in shards.items() if each is not None}
        try:
            sharded = on_shards(captured, known, self.ranks, self.sequence, self.forms)
        except Refusal:  # run on parameters that are gathered in each call
            for node in filter(is_parameter, captured.graph.nodes):
                node.meta[MADE_ANEW] = True
            return fuse(captured), lambda name, divided: divided.whole()
        if sharded.common_random:
            check_random(self.ranks)
        moves = sharded.moves
        return fuse(sharded.module), lambda name, divided: divided.share(self.ranks, moves.get(name))


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter, and the name of the parameter there."""
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def check_random(ranks: Ranks) -> None:
    """Check that the ranks draw the same random numbers.

    Raises:
        ParallelError: the states of their random generators differ.
    """
    device = ranks.mesh.device_type
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    states = gathered(state.numpy().tobytes(), ranks.mesh.get_group())
    if len(set(states)) > 1:
        raise ParallelError(
            f"expected equal random generators on {ranks.count} ranks, because dropouts read shared values, "
            "got different ones; call torch.manual_seed() with the same seed on all ranks of this mesh"
        )
