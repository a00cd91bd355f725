"""Calls of a captured graph as CUDA graphs: forward and backward are recorded once, and replayed.

The CPU then launches two graphs instead of hundreds of kernels. PyTorch's own ways, the trees of
torch.compile and torch.cuda.make_graphed_callables, hand out the memory that the next replay writes to: a
gradient that was kept, or that autograd accumulates into, changes silently or may not be read any more. Here
outputs are copies, gradients are nobody's any more when they are overwritten, and what a replay cannot do,
the function itself does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version, saved_tensors_hooks

from te_transform.backends.collectives import Ranks
from te_transform.backends.joined import check_unwritten, known_as, local, parameter_of, versions
from te_transform.backends.limits import on_kernels_device
from te_transform.backends.tracing import batches_gradients, in_backward, recorded, saving_hooks
from te_transform.runtime.console import in_a_line, status

log = logging.getLogger(__name__)

WARM_UPS = 2  # calls of a kind that run as they are: kernels are loaded, plans made, gradients looked at
MOST_CHANGES = 2  # of which outputs get gradients, each of which is recorded anew
MOST = 8  # kinds that are kept, each of which holds all memory of a step
# What a replay may differ by from the function itself, relative to the norm: some kernels add up in any order
DIFFERENT = 0.02
# Calls of the function itself, at most, where a replay differs by more, to see how far rounding takes that.
# Few do not show it: a key's bias has a gradient of rounding alone, which is 10% off where cuDNN's attention
# adds up in one order and not in another, and some of these orders are seldom.
REPEATS = 16

Run = Callable[..., Sequence[Any]]
_RECORDING = threading.RLock()  # PyTorch records in one stream that all threads share
_LISTING = threading.Lock()  # of what there is in `_ALL`, which other threads add to


class Replayed:
    """A function of tensors, whose calls are replayed from the third of a kind on.

    Args:
        run: the function; returns a sequence of tensors, and of values that are the same in all calls.
        stays: for each argument whether its memory is the model's, and belongs to the kind of call; others
            are copied to where the recorded kernels read them.
        writes: the places of the arguments that it writes to.
        states: the places of those in which it notes what it has seen, for others: FP8's largest values.
        note: gets a sentence where calls cannot be replayed.
        ranks: that the model is divided among. A recording calls the function more often than a call does,
            and each of these calls exchanges numbers with other ranks: all have to record in the same one. So
            the kind of a call is not told by where its tensors lie, which each rank finds by itself; where
            they do not lie as in the recording, the function runs.
    """

    def __init__(
        self,
        run: Run,
        stays: Sequence[bool],
        writes: Sequence[int],
        states: Sequence[int],
        note: Callable[[str], None],
        ranks: Ranks | None = None,
    ):
        self.run, self.stays, self.writes, self.note = run, stays, writes, note
        self.ranks, self.is_divided = ranks, ranks is not None
        self.changes = [*writes, *states]
        self.kinds: dict[tuple, Kind] = {}
        self.lock = threading.RLock()
        with _LISTING:
            _ALL.add(self)

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        if _is_recorded_by_others():
            return self.run(*arguments)
        with self.lock:
            kind = self.kind_of(arguments)
            if kind.refused or kind.is_waiting():
                return self.run(*arguments)
            if kind.calls < WARM_UPS or not kind.knows_gradients():
                return kind.warmed_up(self.run, arguments)
            if kind.graphs is not None and not kind.graphs.frees_gradients(arguments):
                if self.is_divided:  # on the other ranks nobody may hold them
                    return self.run(*arguments)
                kind.copies_gradients, kind.graphs = True, None  # whoever holds them keeps the memory
            if kind.graphs is None and (why := self._record(kind, arguments)) is not None:
                return self._refused(kind, why, arguments)
            if self.is_divided and not self._lies(kind.graphs, arguments):
                return self.run(*arguments)
            return kind.replayed(self, arguments)

    def agreed(self, why: str | None) -> str | None:
        """Why calls cannot be replayed, on this rank or on another."""
        return why if self.ranks is None else self.ranks.agreed(why)

    def _lies(self, graphs: _Recorded, arguments: Sequence[Any]) -> bool:
        """Whether what stays lies where it was recorded."""
        lies = all(arguments[place].data_ptr() == at for place, at in graphs.staying.items())
        if not lies:
            self.note(
                "a graph of a divided model runs without CUDA graphs, its parameters lie elsewhere than when "
                "it was recorded: change what they hold in place, as copy_() and load_state_dict() do"
            )
        return lies

    def again(self, kind: Kind) -> Callable[..., Sequence[Any]] | None:
        """What replays calls without gradients of this kind, by whoever's arguments; None where nothing
        does."""
        with self.lock:
            graphs = kind.graphs
            if graphs is None or kind not in self.kinds.values() or _is_recorded_by_others():
                return None

        def replay(*arguments: Any) -> Sequence[Any]:
            with self.lock:
                return graphs.returned(graphs.forward(arguments), arguments)

        return replay

    def kind_of(self, arguments: Sequence[Any]) -> Kind:
        """Calls that differ in nothing but the values of their tensors."""
        told = tuple(
            (a.data_ptr() if stays and not self.is_divided else None, a.requires_grad)
            if isinstance(a, Tensor)
            else a
            for a, stays in zip(arguments, self.stays, strict=True)
        )
        key = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), stream_now(), told
        kind = self.kinds.pop(key, None)
        if kind is None:
            kind = Kind(trained_among(arguments))
            while len(self.kinds) >= MOST:
                del self.kinds[next(iter(self.kinds))]
        self.kinds[key] = kind  # as the last, the one to let go of is that of the longest ago
        return kind

    def forget_moved(self) -> None:
        """Let go of what was recorded for parameters that are gone, or lie elsewhere now."""
        for key, kind in list(self.kinds.items()):
            if kind.graphs is not None and kind.graphs.has_moved():
                self.kinds.pop(key, None)

    def _record(self, kind: Kind, arguments: Sequence[Any]) -> str | None:
        """Record a call and hold it to the function; why such calls cannot be replayed."""
        with _LISTING:
            everyone = list(_ALL)
        for each in everyone:  # another graph's, if the change that moved parameters made this one
            each.forget_moved()
        why = _unfit(arguments)
        if not kind.writes <= {*self.changes}:
            why = "it writes to tensors that its operations do not name"
        why = self.agreed(why)
        if why is None:
            try:
                with status("recording CUDA graphs"), _RECORDING:
                    kind.graphs, why = _recorded(self, kind, arguments)
            except Exception as error:
                why = _why(error)
        if why is not None:
            kind.graphs = None
        return why

    def _refused(self, kind: Kind, why: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """The call as it is, and so are all of its kind from now on; where it raises, as it does for inputs
        that do not fit, the next one is recorded. (On several ranks it might raise on one alone.)"""
        kind.refused = self.is_divided
        outputs = self.run(*arguments)
        kind.refused = True
        log.warning("a graph runs without CUDA graphs, %s", why)
        self.note(f"a graph runs without CUDA graphs, {why}")
        return outputs


_ALL: weakref.WeakSet[Replayed] = weakref.WeakSet()


def stream_now() -> int:
    """The CUDA stream that is on; 0 where there is none."""
    # torch.cuda.current_stream() takes ten times as long, of each call that is replayed
    on = torch.cuda.is_initialized()
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) if on else 0


def _why(error: Exception) -> str:
    log.debug("where that came from", exc_info=error)
    return in_a_line(error)


def _is_recorded_by_others() -> bool:
    """Whether the call is a part of what somebody else records or repeats: a CUDA graph, a checkpoint."""
    return recorded() or saving_hooks() or in_backward()


def _versions(arguments: Sequence[Any]) -> dict[int, int]:
    tensors = ((place, a) for place, a in enumerate(arguments) if isinstance(a, Tensor))
    return {place: a._version for place, a in tensors if not a.is_inference()}


def trained_among(arguments: Sequence[Any]) -> list[int]:
    """The places of the arguments that need a gradient, one for each tensor."""
    return [*{id(a): place for place, a in enumerate(arguments) if _is_trained(a)}.values()]


def _is_trained(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad and torch.is_grad_enabled()


def _unfit(arguments: Sequence[Any]) -> str | None:
    """Why a call with such arguments cannot be recorded, or None."""
    devices = set()
    for argument in arguments:
        if isinstance(argument, torch.Generator):
            return "it is given a random generator"
        if isinstance(argument, Tensor):
            if type(argument) not in (Tensor, torch.nn.Parameter):
                return f"it reads a {type(argument).__name__}"
            if not on_kernels_device(argument):
                return f"it reads a tensor on {argument.device.type}"
            devices.add(argument.device)
    return None if len(devices) == 1 else f"it reads tensors on {len(devices)} GPUs"


@dataclass(eq=False)
class Kind:
    """One kind of call: what is known of it, and what was recorded.

    `wanted` are the outputs that got gradients in its warm-ups.
    """

    trained: list[int]  # the places of the arguments that need a gradient, one for each tensor
    writes: set[int] = field(default_factory=set)  # the places of arguments that calls were seen to write to
    calls: int = 0
    wanted: set[int] = field(default_factory=set)
    refused: bool = False
    changes: int = 0  # of `wanted`, after it was recorded
    copies_gradients: bool = False  # because they are held beside `.grad`
    graphs: _Recorded | None = None
    waiting: Callable[[], Any] | None = None  # a weak reference to the last forward that has had no backward

    def knows_gradients(self) -> bool:
        """Whether a backward has shown which outputs get gradients, if there is one."""
        return not self.trained or bool(self.wanted)

    def is_waiting(self) -> bool:
        """Whether a replay would overwrite what the backward of the one before still reads."""
        return self.waiting is not None and self.waiting() is not None

    def warmed_up(self, run: Run, arguments: Sequence[Any]) -> Sequence[Any]:
        """A call that runs as it is, and shows which of its outputs get gradients."""
        self.calls += 1
        before = _versions(arguments)
        outputs = run(*arguments)
        now, given = _versions(arguments), set(map(id, arguments))
        self.writes |= {place for place, version in before.items() if now[place] != version}
        for place, output in enumerate(outputs):
            made = isinstance(output, Tensor) and id(output) not in given
            if self.trained and made and output.requires_grad:
                output.register_hook(partial(self._note_gradient, place))
        return outputs

    def _note_gradient(self, place: int, grad: Tensor | None) -> None:
        if grad is not None:  # a function of several outputs calls the hooks of all
            self.wanted.add(place)

    def record_for(self, wanted: set[int], note: Callable[[str], None]) -> None:
        """Let the next call be recorded for other outputs with a gradient, unless they change too often."""
        self.wanted, self.graphs, self.changes = wanted, None, self.changes + 1
        if self.changes > MOST_CHANGES:
            self.refused = True
            note("a graph runs without CUDA graphs, its outputs get gradients now here, now there")

    def replayed(self, owner: Replayed, arguments: Sequence[Any]) -> Sequence[Any]:
        """A call by replay."""
        graphs = self.graphs
        if not self.trained:
            return graphs.returned(graphs.forward(arguments), arguments)
        trained = [arguments[place] for place in self.trained]
        return graphs.returned(_Replay.apply(self, owner, arguments, *trained), arguments)


class Graphs:
    """The CUDA graphs of a forward and of its backward.

    Args:
        forward: returns tensors; run once, while it is recorded.
        backward: from what `forward` returned to gradients; None where there is none.
        device: where they run.
    """

    def __init__(
        self,
        forward: Callable[[], list[Tensor]],
        backward: Callable[[list[Tensor]], list[Tensor | None]] | None,
        device: torch.device,
    ):
        self.first, self.second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.gradients: list[Tensor | None] = []
        with torch.cuda.device(device):
            pool = torch.cuda.graph_pool_handle()
            try:
                with torch.cuda.graph(self.first, pool, capture_error_mode="thread_local"):
                    self.outputs = forward()
                if backward is not None:
                    with torch.cuda.graph(self.second, pool, capture_error_mode="thread_local"):
                        self.gradients = backward(self.outputs)
            except Exception:
                _end_capture(device, pool)
                raise
        self.outputs = [output.detach() for output in self.outputs]

    def replay_forward(self) -> None:
        """Compute `outputs` anew."""
        self.first.replay()

    def replay_backward(self) -> None:
        """Compute `gradients` anew, of the last forward."""
        self.second.replay()

    def free(self) -> None:
        """Let go of what was recorded, which cannot be replayed any more."""
        self.first.reset()
        self.second.reset()


def _end_capture(device: torch.device, pool: Any) -> None:
    """End for PyTorch what CUDA broke off.

    PyTorch itself does not (2.11): the allocator would go on to look where each request comes from, and the
    random generator could draw nothing outside of a graph any more.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it was ended, the recording failed for another reason
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


class _Recorded:
    """What was recorded of one call, and how others are computed by it.

    Args:
        owner: whose call it was.
        kind: of call.
        arguments: of the call; those that do not stay are copies, which others are copied to.
        outputs: what the function returns of these.
    """

    def __init__(self, owner: Replayed, kind: Kind, arguments: Sequence[Any], outputs: Sequence[Any]):
        tensors = {place: a for place, a in enumerate(arguments) if isinstance(a, Tensor)}
        self.copies = {place: tensor for place, tensor in tensors.items() if not owner.stays[place]}
        self.staying = {place: tensor.data_ptr() for place, tensor in tensors.items() if owner.stays[place]}
        # Kernels read memory, whoever's it is now: parameters that are gone need not stay for them.
        self.parameters = [(weakref.ref(tensors[place]), at) for place, at in self.staying.items()
                           if isinstance(tensors[place], torch.nn.Parameter)]  # fmt: skip
        self.writes = owner.writes
        # what a repetition of the call reads as it was
        self.read = sorted(tensors.keys() - {*owner.changes})
        numbers = {id(argument): place for place, argument in enumerate(arguments)}
        # of the outputs: those that are arguments, by the places of these; tensors that are made; the rest
        self.given = {p: numbers[id(out)] for p, out in enumerate(outputs) if id(out) in numbers}
        made = {p for p, out in enumerate(outputs) if isinstance(out, Tensor)} - self.given.keys()
        # how many of the first arguments a replay needs, the others it reads where they lie
        self.needs = 1 + max([*self.copies, *self.writes, *self.given.values()], default=-1)
        self.tensors = sorted(made)
        self.values = [None if p in made or p in self.given else out for p, out in enumerate(outputs)]
        returned = [outputs[place] for place in self.tensors]
        # by their numbers among the tensors: those that have a gradient, that get one, that have none
        self.differentiable = [n for n, out in enumerate(returned) if kind.trained and out.requires_grad]
        self.wanted = [number for number in self.differentiable if self.tensors[number] in kind.wanted]
        self.without = sorted({*range(len(returned))} - {*self.differentiable})
        self.seeds = [torch.zeros_like(returned[number]) for number in self.wanted]
        self.watched: list[int] = []  # the places of staying arguments that the backward reads
        trained: list[Tensor] = []

        def forward() -> list[Tensor]:
            found, trained[:] = call_on_views(owner.run, arguments, kind.trained)
            return [found[place] for place in self.tensors]

        def backward(found: list[Tensor]) -> list[Tensor | None]:
            used = [found[number] for number in self.wanted]
            return list(gradients_of(used, trained, self.seeds))

        with _casting_anew():
            self.graphs = Graphs(forward, backward if kind.trained else None, returned[0].device)
        self.storages = {grad.untyped_storage()._cdata: grad.untyped_storage()
                         for grad in self.graphs.gradients if grad is not None}  # fmt: skip
        self.alone: dict[int, int] = {}  # how often each of them is held where nobody else holds it
        self.copies_gradients = kind.copies_gradients

    def watch(self, saved: Sequence[Tensor]) -> None:
        """Note which arguments lie in what autograd has saved for a backward."""
        spans = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in saved]
        self.watched = [
            place
            for place, at in self.staying.items()
            if any(start <= at < start + length for start, length in spans)
        ]

    def has_moved(self) -> bool:
        """Whether parameters are gone, or lie elsewhere now."""
        found = ((reference(), place) for reference, place in self.parameters)
        return any(parameter is None or parameter.data_ptr() != place for parameter, place in found)

    def forward(self, arguments: Sequence[Any]) -> list[Tensor]:
        """The tensors that a call returns."""
        with torch.no_grad():
            for place, copy in self.copies.items():
                copy.copy_(arguments[place], non_blocking=True)
            self.graphs.replay_forward()
            for place in self.writes:
                if not arguments[place].is_inference():
                    increment_version(arguments[place])
            return [output.clone() for output in self.graphs.outputs]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the last forward, from those of its tensors; see frees_gradients()."""
        with torch.no_grad():
            for number, seed in zip(self.wanted, self.seeds, strict=True):
                seed.copy_(grads[number])
            self.graphs.replay_backward()
            given: set[int] = set()  # two gradients may be one tensor, which autograd hands out as two
            found: list[Tensor | None] = []
            for grad in self.graphs.gradients:
                storage = None if grad is None else grad.untyped_storage()._cdata
                is_own = self.copies_gradients or storage in given
                found.append(None if grad is None else grad.clone() if is_own else grad.detach())
                given.add(storage)
            return found

    def frees_gradients(self, arguments: Sequence[Any]) -> bool:
        """Whether the memory of the recorded gradients may be written to.

        They are handed out where they are, and become `.grad` without a copy: most steps have dropped them
        by the next forward. Where `.grad` still holds them, as over an accumulation, it gets a copy now. What
        somebody else holds is not to be written to any more.
        """
        held = self._held()
        if not held:
            return True
        for parameter in map(parameter_of, arguments):
            grad = None if parameter is None else parameter.grad
            if grad is not None and local(grad).untyped_storage()._cdata in held:
                parameter.grad = grad.clone()
        grad = None  # else it would be held here
        return not self._held()

    def _held(self) -> set[int]:
        """Those of the recorded gradients' storages that somebody else holds too."""
        counts = {storage: torch._C._storage_Use_Count(storage) for storage in self.storages}
        if not self.alone:
            self.alone = counts
        return {storage for storage, count in counts.items() if count > self.alone[storage]}

    def returned(self, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> list[Any]:
        """The outputs of a call with these arguments, of the tensors that it made and all else."""
        outputs = list(self.values)
        for place, number in self.given.items():
            outputs[place] = arguments[number]
        for place, tensor in zip(self.tensors, tensors, strict=True):
            outputs[place] = tensor
        return outputs


class _Forward:
    """A forward whose backward has not been yet, for as long as somebody may still call it."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: Kind, owner: Replayed, arguments: Sequence[Any], *trained: Tensor
    ) -> tuple[Tensor, ...]:
        graphs = kind.graphs
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.graphs, ctx.arguments = kind, graphs, arguments
        ctx.owner, ctx.before = owner, [arguments[place].clone() for place in owner.writes]
        ctx.forward = _Forward()
        kind.waiting = weakref.ref(ctx.forward)
        ctx.random, ctx.autocast = _random_state(trained[0].device), autocast_now(trained[0].device.type)
        ctx.read = _noted([arguments[place] for place in graphs.read])
        outputs = graphs.forward(arguments)
        ctx.watched = _noted([arguments[place] for place in graphs.watched])
        ctx.save_for_backward(torch.empty(0))  # which autograd frees after a backward that is the last
        ctx.mark_non_differentiable(*(outputs[number] for number in graphs.without))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        kind, graphs, _ = ctx.kind, ctx.graphs, ctx.saved_tensors
        given = [number for number, grad in enumerate(grads) if grad is not None]
        if not given:
            return None, None, None, *(None for _ in kind.trained)
        is_last = kind.waiting is not None and kind.waiting() is ctx.forward
        if given != graphs.wanted:
            # A gradient of zeros for the others would not do: parameters that nothing reached would get one.
            kind.record_for({graphs.tensors[number] for number in given}, ctx.owner.note)
        if given != graphs.wanted or not is_last or torch.is_grad_enabled() or batches_gradients():
            return None, None, None, *_computed_again(ctx, grads)
        _check_unchanged(ctx.watched)
        found = graphs.backward(grads)
        kind.waiting = None  # from here on another forward may overwrite what this one left
        return None, None, None, *found


def _noted(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """What tells whether they are written to, or laid elsewhere, before the backward."""
    return [(tensor, version, tensor.data_ptr()) for tensor, version in versions(tensors)]


def _check_unchanged(noted: Sequence[tuple[Tensor, int, int]]) -> None:
    check_unwritten([(tensor, version) for tensor, version, _ in noted])
    for tensor, _, place in noted:
        if tensor.data_ptr() != place:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} was given other memory between the forward and its "
                "backward, which is a CUDA graph and reads the memory of before: assign to .data after the "
                "backward, or convert the model with graphs=False"
            )


def _computed_again(ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients of a call that was replayed, by calling the function itself, in the autocast and with the
    random numbers of then: for a second backward, one that is itself differentiated, and outputs that never
    had a gradient."""
    _check_unchanged(ctx.read)
    recorded, writes = torch.is_grad_enabled(), ctx.owner.writes
    with _as_it_was(ctx.arguments, writes), torch.enable_grad():
        _set_random_state(ctx.arguments[ctx.kind.trained[0]].device, ctx.random)
        _put_back([ctx.arguments[place] for place in writes], ctx.before)
        with torch.autocast(**ctx.autocast):
            outputs, trained = call_on_views(ctx.owner.run, ctx.arguments, ctx.kind.trained)
        pairs = [
            (outputs[place], grad)
            for place, grad in zip(ctx.graphs.tensors, grads, strict=True)
            if grad is not None
        ]
        used, given = zip(*pairs, strict=True)
        return gradients_of(used, trained, given, create_graph=recorded)


def call_on_views(
    run: Run, arguments: Sequence[Any], trained: Sequence[int]
) -> tuple[list[Any], list[Tensor]]:
    """What the function returns, and views of these arguments, to which gradients lead and no further.

    Some arguments are computed from others, and each gets its own part. Hooks of parameters see what leaves a
    replay, once. And autograd, which goes back in the streams that a forward ran in, remembers another one
    for parameters.
    """
    views = {id(arguments[place]): _view(arguments[place]) for place in trained}
    found = run(*(views.get(id(argument), argument) for argument in arguments))
    # what is returned as it was given is the argument itself
    own = {id(view): arguments[place] for place, view in zip(trained, views.values(), strict=True)}
    return [own.get(id(output), output) for output in found], [*views.values()]


def _view(argument: Tensor) -> Tensor:
    return known_as(argument.view_as(argument), argument)


def autocast_now(device: str) -> dict[str, Any]:
    """What torch.autocast is to be called with for the precision that is on, in a backward outside of it."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return {"device_type": device, "dtype": dtype, "enabled": enabled, "cache_enabled": False}


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


def _copied(argument: Tensor) -> Tensor:
    """A tensor of the same numbers and layout, in memory of its own."""
    own = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)
    return known_as(own.copy_(argument.detach()).requires_grad_(_is_trained(argument)), argument)


@contextlib.contextmanager
def _casting_anew() -> Iterator[None]:
    """Let torch.autocast cast weights in what is recorded: a replay would read copies that were made
    before, and others would read those that it makes."""
    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


@contextlib.contextmanager
def _as_it_was(arguments: Sequence[Any], writes: Sequence[int]) -> Iterator[None]:
    """Put back what is written to meanwhile, and the states of random generators."""
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    tensors = [arguments[place] for place in writes]
    before = [tensor.detach().clone() for tensor in tensors]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            _put_back(tensors, before)


def _put_back(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for tensor, was in zip(tensors, before, strict=True):
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
            tensor.copy_(was)


def _recorded(owner: Replayed, kind: Kind, arguments: Sequence[Any]) -> tuple[_Recorded | None, str | None]:
    """What was recorded of a call, held to what the function itself computes; or why there is nothing."""
    held = [
        argument if stays or not isinstance(argument, Tensor) else _copied(argument)
        for argument, stays in zip(arguments, owner.stays, strict=True)
    ]
    saved: list[Tensor] = []
    with _as_it_was(held, owner.changes), noting_waits() as waits:
        with saved_tensors_hooks(partial(_noted_in, saved), lambda tensor: tensor):
            outputs, trained = call_on_views(owner.run, held, kind.trained)
        if (why := _unfit_outputs(outputs, held)) is not None:  # which is so on each rank
            return None, why
        seeds = {place: torch.randn_like(outputs[place]) for place in sorted(kind.wanted)}
        expected = _with_gradients(outputs, trained, seeds)
    recorded = None
    if waits:
        why = f"it waits for the GPU: {waits[0]}"
    else:
        try:
            with _as_it_was(held, owner.changes):
                recorded = _Recorded(owner, kind, held, outputs)
                if owner.ranks is not None:
                    owner.ranks.freed_before_end(recorded.graphs)
        except Exception as error:
            why = _why(error)
    if (why := owner.agreed(why)) is not None or recorded is None:
        return None, why
    recorded.watch(saved)
    del outputs, trained, saved
    with _as_it_was(held, owner.changes):
        recorded.frees_gradients(())
        found = recorded.returned(recorded.forward(arguments), held)
        if kind.trained:
            found += recorded.backward([seeds.get(place) for place in recorded.tensors])
        off = [*map(distance, found, expected)]
        del found
    why = _beyond_rounding(owner, kind, held, seeds, expected, off)
    return (recorded if why is None else None), why


def _beyond_rounding(
    owner: Replayed,
    kind: Kind,
    held: list[Any],
    seeds: Mapping[int, Tensor],
    expected: Sequence[Any],
    off: Sequence[float],
) -> str | None:
    """What of a recording is further off from what the function computed than rounding takes it, or None.

    In FP8 rounding goes far, and kernels that add up in any order round differently in each call: thousands
    of numbers in bf16 that are added to one row, as an embedding's gradients are, by several percent.
    """
    allowed = [DIFFERENT] * len(off)
    for _ in range(REPEATS):
        if owner.agreed(_too_far(off, allowed)) is None:
            return None
        again = [2 * each for each in _distances(owner, kind, held, seeds, expected)]
        allowed = [*map(max, allowed, again)]
    return owner.agreed(_too_far(off, allowed))


def _too_far(off: Sequence[float], allowed: Sequence[float]) -> str | None:
    """The result that is furthest from what is allowed, if it is further off, or None."""
    each, most = max(zip(off, allowed, strict=True), key=lambda pair: pair[0] / pair[1])
    if each <= most:
        return None
    return f"what was recorded computes other numbers, off by {each:.2g} where rounding is {most:.2g}"


def _distances(
    owner: Replayed, kind: Kind, held: list[Any], seeds: Mapping[int, Tensor], expected: Sequence[Any]
) -> list[float]:
    """How far the function itself is from what it computed, called again with gradients rounded otherwise."""
    with _as_it_was(held, owner.changes):
        outputs, trained = call_on_views(owner.run, held, kind.trained)
        rounded = {place: _rounded_otherwise(seed) for place, seed in seeds.items()}
        return [*map(distance, _with_gradients(outputs, trained, rounded), expected)]


def _rounded_otherwise(seed: Tensor) -> Tensor:
    """The same numbers, off by what bf16 may round by."""
    return seed * (1 + 2**-8 * (2 * torch.rand_like(seed) - 1))


def _noted_in(saved: list[Tensor], tensor: Tensor) -> Tensor:
    saved.append(tensor.detach())
    return tensor


def _with_gradients(
    outputs: Sequence[Any], trained: Sequence[Tensor], seeds: Mapping[int, Tensor]
) -> list[Any]:
    """The outputs, and the gradients that lead from those of some outputs to the arguments."""
    found = [output.detach() if isinstance(output, Tensor) else output for output in outputs]
    if not trained:
        return found
    used, given = [outputs[place] for place in seeds], [*seeds.values()]
    return [*found, *gradients_of(used, trained, given)]


def gradients_of(
    outputs: Sequence[Tensor], arguments: Sequence[Tensor], grads: Sequence[Tensor], **how: bool
) -> tuple[Tensor | None, ...]:
    """Of the arguments; without autocast, which a backward is called outside of."""
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, arguments, grads, allow_unused=True, **how)


def _unfit_outputs(outputs: Sequence[Any], arguments: Sequence[Any]) -> str | None:
    """Why these outputs cannot be handed out as copies, or None."""
    given = {a.untyped_storage()._cdata for a in arguments if isinstance(a, Tensor)}
    themselves = set(map(id, arguments))
    tensors = [out for out in outputs if isinstance(out, Tensor) and id(out) not in themselves]
    if any(tensor.untyped_storage()._cdata in given for tensor in tensors):
        return "it returns memory of an argument"
    if any(not on_kernels_device(tensor) for tensor in tensors) or not tensors:
        return "it returns no tensor on the GPU, or others too"
    return None


@contextlib.contextmanager
def noting_waits() -> Iterator[list[str]]:
    """What makes the CPU wait for the GPU meanwhile, which no CUDA graph can have in it."""
    found: list[str] = []
    if not torch.cuda.is_available():
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += (str(w.message).splitlines()[0] for w in caught if "synchronizing CUDA" in str(w.message))


def rounding(outputs: Iterable[Tensor], in_fp8: bool = False) -> float:
    """How far two models that compute the same may be from each other, by their dtypes."""
    return 0.3 if in_fp8 or any(tensor.dtype.itemsize <= 2 for tensor in outputs) else 0.01


def distance(one: Any, other: Any) -> float:
    """How far a result is from another, relative to the norm of that."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return 0.0 if one is other or one == other else math.inf
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    wide = torch.promote_types(other.dtype, torch.float32)  # fp64 copies of logits may not fit beside them
    off, norm = (torch.linalg.vector_norm(t, dtype=wide).item() for t in (one - other, other))
    if off < math.inf and 1e-15 < norm < math.inf:  # all numbers are finite, and their squares not 0
        return off / norm
    finite = other.isfinite()
    if not torch.equal(one.isfinite(), finite):
        return math.inf
    off = torch.where(finite, one.double() - other.double(), 0.0).norm().item()
    norm = torch.where(finite, other.double(), 0.0).norm().item()
    return off / norm if norm else math.inf if off else 0.0
