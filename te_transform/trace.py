"""Record one real forward of a model into a torch.fx.Graph.

Symbolic tracing follows Python and stops at the first `if` on a tensor; recording runs the model and writes
down each torch-level call it makes. One sample is one path: the graph holds the branches and the sizes of
this call.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, takewhile
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from te_transform.inputs import InputError, Inputs, as_inputs, invent
from te_transform.preserve import preserved

# nn.MultiheadAttention hides a linear, an attention core and another linear behind this one function.
_LOOK_INSIDE = (torch.nn.functional.multi_head_attention_forward,)

# These say that they are torch._tensor.pow and pow_, which no generated code can import.
_MISNAMED = {torch.Tensor.__pow__: torch.Tensor.pow, torch.Tensor.__ipow__: torch.Tensor.pow_}


class TraceError(RuntimeError):
    """The model could not be run on the inputs given; the model is as it was."""

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs, error: Exception) -> TraceError:
        return cls(
            f"{type(model).__name__} failed on the example inputs ({inputs}): {type(error).__name__}: "
            f"{error}\n"
            "Pass example_inputs that a plain model(...) call accepts."
        )


@dataclass(frozen=True)
class Passed:
    """An argument that an owner's forward hands on unseen: recorded by name, its children get the value."""

    name: str
    value: Any


@dataclass(eq=False)
class Call:
    """One call of one module: `args`, `kwargs` and `output` hold an fx.Node where the module saw a tensor."""

    path: str
    module: nn.Module
    parent: Call | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    def within(self, owner: Call) -> bool:
        """Whether this call is `owner` or was made, at any depth, by it."""
        call: Call | None = self
        while call is not None and call is not owner:
            call = call.parent
        return call is owner


@dataclass(eq=False)
class Recording:
    """A recorded forward: its graph, the tensors the get_attr nodes name, every module call in the order
    made.

    `shapes` is the ShapeEnv of a symbolic recording, in which sizes are expressions of the inputs' sizes.
    """

    root: nn.Module
    inputs: Inputs
    graph: fx.Graph = field(default_factory=fx.Graph)
    attributes: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    shapes: ShapeEnv | None = None
    renamed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made_by: dict[Call | None, list[fx.Node]] = field(default_factory=dict)  # as index() found it
    evaluated: dict[Hashable, bool] = field(default_factory=dict)  # see evaluation.py

    def index(self) -> None:
        """Note which nodes each module call made, for `inside`: once for many questions."""
        self.made_by = defaultdict(list)
        for node in self.graph.nodes:
            self.made_by[node.meta.get("call")].append(node)

    @cached_property
    def places(self) -> dict[Call, int]:
        """Where each call stands among `calls`."""
        return {call: place for place, call in enumerate(self.calls)}

    @cached_property
    def times(self) -> Counter[nn.Module]:
        """How often each module was called."""
        return Counter(call.module for call in self.calls)

    def inside(self, call: Call) -> list[fx.Node]:
        """What `call`, and the calls within it, made of the graph at the last index(), and is still there."""
        start = self.places[call]
        below = takewhile(lambda later: later.within(call), islice(self.calls, start, None))
        return sorted(n for inner in below for n in self.made_by.get(inner, ()) if not n._erased)

    def now(self, value: Any) -> Any:
        """`value`, a node as it was recorded, as it stands in the graph after rewriting."""
        while isinstance(value, fx.Node) and value in self.renamed:
            value = self.renamed[value]
        return value

    def module(self) -> fx.GraphModule:
        """The graph as an executable GraphModule over the model's own parameters."""
        used = {n.target for n in self.graph.nodes if n.op == "get_attr"}
        # a dictionary as root keeps the dotted names without copying the user's modules
        root = {name: tensor for name, tensor in self.attributes.items() if name in used}
        return fx.GraphModule(root, self.graph, class_name=type(self.root).__name__)


def trace(model: nn.Module, example_inputs: Any = None, *, train: bool = True) -> fx.GraphModule:
    """The torch-level graph of one forward of `model`, to read or to run.

    Parameters and buffers are get_attr nodes under their own names; every node's `meta` has the `path` and
    `class` of the module that made the call, and `tensor_meta`. The sizes of this sample are constants of the
    graph.

    Args:
        model: any module; it is left bitwise as it was, its random state too.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments, a list of those (the
            first is traced), or None to have them invented; where that cannot be done, a module that torch.fx
            can trace symbolically (most MLPs) is, with its children as call_module nodes.
        train: record the training path (with its dropouts) or the evaluation path.

    Raises:
        TraceError: the forward failed on these inputs.
        te_transform.InputError: there are no inputs and none can be invented.
    """
    try:
        inputs = as_inputs(model, example_inputs)[0]
    except InputError:
        if example_inputs is not None:
            raise
        return _symbolic(model, train)
    return record(model, inputs, train=train).module()


def _symbolic(model: nn.Module, train: bool) -> fx.GraphModule:
    """torch.fx's own trace, of a copy: one that fails leaves proxies in the attributes of what it traced."""
    try:
        return fx.symbolic_trace(copy.deepcopy(model).train(train))
    except Exception:
        invent(model)  # says what is missing; that torch.fx needs no inputs was only a chance
        raise


def record(
    model: nn.Module,
    inputs: Inputs,
    *,
    train: bool = True,
    free_sizes: frozenset[int] | None = None,
    owner: nn.Module | None = None,
) -> Recording:
    """Run `model` once on `inputs` and write down its calls; see `trace`.

    With `free_sizes` the recording is symbolic: dimensions of the inputs that have one of these sizes become
    symbols, and other sizes expressions of them. Such a recording, or one of a model on the meta device, runs
    on fake
    tensors: no memory, no arithmetic. Arguments that are Passed reach the children of `owner` as what they
    stand for.
    """
    fake = free_sizes is not None or any(p.is_meta for p in model.parameters())
    recording = Recording(model, inputs, shapes=None if free_sizes is None else ShapeEnv(duck_shape=False))
    tensors = _named_tensors(model)
    with preserved(model), torch.no_grad(), contextlib.ExitStack() as stack:
        for module in model.modules():
            module.training = train
        args, kwargs = inputs.clone()
        if fake:
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True, shape_env=recording.shapes))
            stack.enter_context(enable_python_dispatcher())  # some C++ compositions ask for sizes as numbers
            fakes = {name: _fake(mode, t) for name, t in tensors.items()}
            stack.enter_context(_reparametrize_module(model, fakes, tie_weights=True))
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: _fake(mode, t, free_sizes or ()), (args, kwargs)
            )
        else:
            fakes = tensors
        tape = _Tape(recording, owner, {id(t): name for name, t in reversed(fakes.items())}, tensors)
        for name, leaf in inputs.named_leaves(model, args, kwargs):
            tape.placeholder(name, leaf)
        try:
            with _watched(model, tape), tape:
                output = model(*args, **kwargs)
        except Exception as error:
            raise TraceError.of(model, inputs, error) from error
        recording.graph.output(tape.to_nodes(output))
    _drop_unread(recording.graph)
    return recording


def example_of(node: fx.Node, shape: Iterable[int]) -> torch.Tensor:
    """Zeros of this shape, of the dtype and on the device that the node was recorded with.

    On the CPU for a model on the meta device, which is recorded as if it were there.
    """
    device = node.meta["device"]
    dtype = node.meta["tensor_meta"].dtype
    return torch.zeros(tuple(shape), dtype=dtype, device="cpu" if device.type == "meta" else device)


class _Tape(TorchFunctionMode):
    def __init__(
        self,
        recording: Recording,
        owner: nn.Module | None,
        names: dict[int, str],
        tensors: dict[str, torch.Tensor],
    ):
        super().__init__()
        self.recording, self.graph, self.owner = recording, recording.graph, owner
        self.names, self.tensors = names, tensors
        self.nodes = WeakIdKeyDictionary()  # tensor or Passed -> node: a recording keeps no activation alive
        self.frames: list[Call] = []
        self.last_leaf = self.graph._root

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOK_INSIDE:
            with self:
                return _without_dispatch(func)(*args, **kwargs)
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__setitem__":
            self._bind(args[0], self._emit(setitem, args, kwargs))
        elif _has_tensor(out):
            self._bind(out, self._emit(func, args, kwargs))
        return out

    def _emit(self, func: Callable, args: tuple, kwargs: dict) -> fx.Node:
        node_args, node_kwargs = self.to_nodes(args), self.to_nodes(kwargs)
        if getattr(func, "__name__", "") == "__get__":  # a property: x.T arrives as its descriptor's getter
            func, node_args = getattr, (node_args[0], func.__self__.__name__)
        node = self.graph.call_function(_MISNAMED.get(func, func), node_args, node_kwargs)
        self._annotate(node)
        return node

    def _annotate(self, node: fx.Node) -> None:
        frame = self.frames[-1]
        node.meta.update(call=frame, path=frame.path)
        node.meta["class"] = type(frame.module)
        node.meta["nn_module_stack"] = {f.path: (f.path, type(f.module)) for f in self.frames}

    def _bind(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, torch.Tensor):
            self.nodes[value] = node
            node.meta.update(tensor_meta=_extract_tensor_metadata(value), device=value.device)
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                if _has_tensor(item):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    self._annotate(part)
                    self._bind(item, part)

    def placeholder(self, name: str, leaf: Any) -> None:
        if isinstance(leaf, (torch.Tensor, Passed)) and leaf not in self.nodes:
            self._leaf(self.graph.placeholder(name), leaf)

    def _leaf(self, node: fx.Node, leaf: torch.Tensor | Passed) -> None:
        node.meta.update(call=None, path=str(node.target).rpartition(".")[0])
        self.last_leaf = node
        self.nodes[leaf] = node
        self._bind(leaf, node)

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        if tensor not in self.nodes:
            name = self.names.get(id(tensor)) or f"_constant_{len(self.recording.attributes)}"
            self.recording.attributes[name] = self.tensors.get(name, tensor)
            with self.graph.inserting_after(self.last_leaf):
                self._leaf(self.graph.create_node("get_attr", name), tensor)
        return self.nodes[tensor]

    def to_nodes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if isinstance(value, Passed):
            return self.nodes[value]
        if isinstance(value, slice):
            return slice(*(self.to_nodes(v) for v in (value.start, value.stop, value.step)))
        if isinstance(value, (tuple, list)):
            return (list if type(value) is list else tuple)(self.to_nodes(v) for v in value)
        if isinstance(value, Mapping):
            return {str(k): self.to_nodes(v) for k, v in value.items()}
        return value

    def enter(self, path: str, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Note the call; where its arguments are Passed ones, the arguments that they stand for."""
        parent = self.frames[-1] if self.frames else None
        call = Call(path, module, parent, self.to_nodes(args), self.to_nodes(kwargs))
        self.recording.calls.append(call)
        self.frames.append(call)
        if self.owner is None or parent is None or parent.module is not self.owner:
            return None
        values = [value.value if isinstance(value, Passed) else value for value in (*args, *kwargs.values())]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def leave(self, output: Any) -> None:
        call = self.frames.pop()
        call.output = self.to_nodes(output)


def setitem(value: torch.Tensor, index: Any, item: Any) -> torch.Tensor:
    """`value[index] = item`, returning `value`, so that later nodes read the written tensor."""
    value[index] = item
    return value


@contextlib.contextmanager
def _watched(model: nn.Module, tape: _Tape) -> Iterator[None]:
    """Tell `tape` of every module call below `model`, with the arguments forward() itself gets."""
    handles = []
    try:
        for path, module in model.named_modules():
            enter = _entering(tape, path)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(
                module.register_forward_hook(
                    lambda m, a, out: tape.leave(out), prepend=True, always_call=True
                )
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entering(tape: _Tape, path: str) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict] | None]:
    return lambda module, args, kwargs: tape.enter(path, module, args, kwargs)


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, free_sizes: Collection[int] = ()) -> torch.Tensor:
    if tensor.is_meta:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if not any(size in free_sizes for size in tensor.shape):
        return mode.from_tensor(tensor, static_shapes=True)
    sizes = [DimDynamic.DYNAMIC if size in free_sizes else DimDynamic.STATIC for size in tensor.shape]
    source = ConstantSource(f"input_{id(tensor)}")
    return mode.from_tensor(
        tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes), source=source
    )


def _without_dispatch(func: Callable) -> Callable:
    """`func` with its own torch-function check switched off: its body runs, and the calls in it are seen."""
    namespace = {**func.__globals__, "has_torch_function": lambda *_: False}
    body = type(func)(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
