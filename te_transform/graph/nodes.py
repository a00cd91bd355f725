"""What is known of a node of a captured graph: its value, its place in the model, whether it changes
anything."""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

MADE_ANEW = "te_transform_made_anew"  # in the meta of an argument that is no parameter's own memory

_NAME = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
# How dynamo says `._modules` of a class that has a __getattr__ of its own, as PEFT's models have.
_IN_DICT = re.compile(r"\.__dict__\['(_modules|_parameters|_buffers)'\]")
_STORED = re.compile(r"_(?:parameters|buffers)\['[^']+'\]$")
# The captured module: dynamo wraps the forward of PyTorch's own modules in a function of (*args).
_ROOT = re.compile(r"^L\['\w+'\](?:\[0\])?(?:\.__self__)?\.?")  # the first argument, whatever its name is
_ON_STACK = re.compile(r"^L\['___stack\d+'\]")  # what code held where a graph ended, whatever that is

# These calls change the state that later calls run in: the gradient mode, autocast, saved-tensor hooks.
_STATE = (
    "set_grad_enabled",
    "autocast",
    "inference_mode",
    "saved_tensors",
    "_vmap",
    "_grad_increment",
    "lift",
)
_TOUCHING_METHODS = frozenset(
    {
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "requires_grad_",
        "backward",
        "set_",
    }
)
_TOUCHING_FUNCTIONS = frozenset({operator.setitem, operator.delitem, setattr, delattr})
_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "imatmul",
        "iand",
        "ior",
        "ixor",
    )
)
_RANDOM = re.compile(
    r"^(rand|randn|randint|randperm|bernoulli|normal|multinomial|exponential|uniform|poisson|dropout"
    r"|alpha_dropout|feature_dropout|rrelu)|_like_random$"
)


def value(node: Any) -> Any:
    """What the node computes, as dynamo saw it: a fake tensor, a number, a SymInt, a tuple of those, or
    None."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def is_tensor_node(node: Any) -> bool:
    return isinstance(value(node), torch.Tensor)


def shape_of(node: fx.Node) -> torch.Size:
    return value(node).shape


def dtype_of(node: fx.Node) -> torch.dtype:
    return value(node).dtype


def is_wider(inside: Iterable[fx.Node], like: fx.Node) -> bool:
    """Whether one of these is computed in a wider dtype than an op has for such a value: its own or fp32."""
    widest = max(dtype_of(like).itemsize, torch.float32.itemsize)
    return any(dtype_of(node).itemsize > widest for node in inside)


def is_narrower(inside: Iterable[fx.Node], *ends: fx.Node) -> bool:
    """Whether one of these is rounded to a narrower dtype than what goes in and what comes out have: models
    quantize by that."""
    narrowest = min(dtype_of(node).itemsize for node in ends)
    return any(dtype_of(node).itemsize < narrowest for node in inside)


def is_number(value: Any) -> bool:
    """Whether a constant is a number, and no truth value."""
    return type(value) in (int, float)


def is_bias(mask: Tensor) -> bool:
    """Whether what is added to scores [batch, heads, queries, keys] is another number for each head, as ALiBi
    and relative positions are, and so no mask that only hides."""
    return mask.is_floating_point() and mask.dim() > 2 and not same_shape(mask.shape[-3:-2], (1,))


def numel_of(node: fx.Node) -> int:
    """How many numbers, at the sizes that the graph was captured with."""
    if not is_tensor_node(node):
        return 0
    numel = value(node).numel()  # a shape's numel() would bind symbolic sizes to these numbers
    return numel if isinstance(numel, int) else numel.node.hint


def bytes_of(node: fx.Node) -> int:
    """What these numbers take, at the sizes that the graph was captured with."""
    return numel_of(node) * dtype_of(node).itemsize if is_tensor_node(node) else 0


def storages(nodes: Iterable[fx.Node]) -> Iterator[int]:
    """What memory the tensors lie in, by the addresses of their fake storages."""
    return (memory_of(node) for node in nodes if is_tensor_node(node))


def memory_of(node: fx.Node) -> int:
    """What memory a tensor lies in, by the address of its fake storage; within vmap() that of all of it.

    Sparse tensors have none, and are by themselves.
    """
    held = value(node)
    while is_functorch_wrapped_tensor(held):
        held = get_unwrapped(held)
    return held.untyped_storage()._cdata if held.layout is torch.strided else id(held)


def is_parameter(node: Any) -> bool:
    """Whether the node is a parameter of the model, as it is stored."""
    return isinstance(node, fx.Node) and node.op == "placeholder" and isinstance(value(node), nn.Parameter)


def is_model_tensor(node: Any) -> bool:
    """Whether the node is a parameter or a buffer of the model, as it is stored."""
    return is_parameter(node) or (
        isinstance(node, fx.Node) and node.op == "placeholder" and bool(_STORED.search(source_of(node)))
    )


def stays_in_place(placeholder: fx.Node) -> bool:
    """Whether the argument is in the same memory from call to call, as the model stores it."""
    return is_model_tensor(placeholder) and not placeholder.meta.get(MADE_ANEW, False)


def name_in_model(node: fx.Node) -> str:
    """The dotted name of a parameter or buffer below the captured module; "" where it has none there."""
    source = source_of(node)
    if _ON_STACK.match(source):
        return ""
    return ".".join(_NAME.findall(source)) if _ROOT.match(source) and _STORED.search(source) else ""


def source_of(node: fx.Node) -> str:
    """The name that dynamo has for where a placeholder comes from:
    L['self']._modules['fc']._parameters['bias']."""
    source = getattr(node, "_dynamo_source", None)
    if source is None or "source" in node.meta:
        return node.meta.get("source", "")
    name = source.name
    return _IN_DICT.sub(r".\1", name() if callable(name) else name)


def path_of(node: fx.Node) -> str:
    """The dotted path of the innermost module whose forward made this call, below the captured module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.meta.get("path", "")
    return path_said(next(reversed(stack.values()))[0])


def computed_from(
    roots: Iterable[fx.Node], is_end: Callable[[fx.Node], bool] = lambda node: False
) -> set[fx.Node]:
    """Return the roots and all that they are computed from, but ends and what only ends are computed from."""
    found: set[fx.Node] = set()
    waiting = [*roots]
    while waiting:
        node = waiting.pop()
        if node not in found and not is_end(node):
            found.add(node)
            waiting += node.all_input_nodes
    return found


def modules_of(node: fx.Node) -> list[tuple[str, str]]:
    """Return path and class name of each module around the call, the outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [(path_said(path), kind if isinstance(kind, str) else kind.__name__) for path, kind in stack]


def path_said(name: str) -> str:
    """The dotted path in what dynamo calls a module: L['self']._modules['layers'][0]."""
    name = _IN_DICT.sub(r".\1", name)
    if _ON_STACK.match(name):
        return ""
    name = re.sub(r"(?:^|\.)_modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]", r".\1\2\3", _ROOT.sub("", name))
    return name.partition(".__closure__")[0].strip(".")


def class_of(node: fx.Node) -> str:
    """The name of the class of that module, "" where it is the captured module itself."""
    stack = node.meta.get("nn_module_stack")
    kind = next(reversed(stack.values()))[1] if stack else ""
    return kind if isinstance(kind, str) else kind.__name__


def called(node: fx.Node) -> str:
    """The bare name of what the node calls: `add` of torch.add, Tensor.add, operator.add and the method."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


_HOMES = torch, torch.nn.functional


def replaced_function(graph: fx.Graph) -> str | None:
    """The name of a function of PyTorch's that the graph calls and in whose place there is another by now.

    Where modes see calls, as in whatever traces a graph, PyTorch's Python functions call themselves by their
    names; and fx finds those that have no module of their own, as torch.mul, by their names alone.
    """
    for node in graph.nodes:
        function, module = node.target, getattr(node.target, "__module__", None)
        homes: tuple[Any, ...] = ()
        if isinstance(function, FunctionType) and module.partition(".")[0] == "torch":
            homes = (sys.modules.get(module),)
        elif isinstance(function, BuiltinFunctionType) and module is None:
            homes = _HOMES
        found = [getattr(home, function.__name__) for home in homes if hasattr(home, function.__name__)]
        if found and all(held is not function for held in found):
            return f"{module or 'torch'}.{function.__name__}"
    return None


def returned(graph: fx.Graph) -> Any:
    """What a captured graph returns: nodes, and values that are the same in all calls."""
    (found,) = next(node for node in graph.nodes if node.op == "output").args
    return found


def writes(node: fx.Node) -> bool:
    """Whether the node changes a tensor or an object in place."""
    if node.op not in ("call_function", "call_method"):
        return False
    if (
        node.target in _TOUCHING_METHODS
        or node.target in _TOUCHING_FUNCTIONS
        or node.target in _IN_PLACE_OPERATORS
    ):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.OpOverloadPacket) and _may_write(node.target):
        return True
    if node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None:
        return True
    name = called(node)
    if node.target in _named_operators():  # operator.and_, or_ and not_ end in "_" and write nothing
        return False
    if name.endswith("_") and not name.endswith("__"):
        return True
    if name.startswith("__i") and name.endswith("__") and name[3:-2] in _IN_PLACE_NAMES:
        return True
    return _inplace_by_position(node)


@cache
def _may_write(packet: torch._ops.OpOverloadPacket) -> bool:
    """Whether an operation changes one of its arguments, other than what it is told to put its result in."""
    schemas = (getattr(packet, name)._schema for name in packet.overloads())
    arguments = (argument for schema in schemas for argument in schema.arguments if not argument.is_out)
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)


_IN_PLACE_NAMES = frozenset(f.__name__[1:] for f in _IN_PLACE_OPERATORS)


@cache
def _named_operators() -> frozenset[Callable]:
    return (
        frozenset(f for f in vars(operator).values() if callable(f))
        - _IN_PLACE_OPERATORS
        - _TOUCHING_FUNCTIONS
    )


def _inplace_by_position(node: fx.Node) -> bool:
    """F.relu(x, True) writes into x: `inplace` may be given by position."""
    if node.op != "call_function" or True not in node.args:
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True


def changes_state(node: fx.Node) -> bool:
    """Whether the node changes the mode that the calls after it run in."""
    return node.op == "call_function" and any(part in called(node) for part in _STATE)


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    return bool(_RANDOM.match(called(node).strip("_")))


def is_foreign(node: fx.Node) -> bool:
    """Whether the node calls somebody else's code as a whole, an operation of a library or a function that is
    allowed in graphs: what it reads beside its arguments nobody guards."""
    target = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = target.name() if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
        return name.partition("::")[0] not in ("aten", "prims")
    home = getattr(target, "__module__", None) or "torch"
    return isinstance(target, FunctionType) and home.partition(".")[0] not in ("torch", "te_transform")


# Calls that torch.autocast leaves as they are, whatever they read.
_AS_THEY_ARE = frozenset(
    {
        "abs", "add", "all", "any", "bool", "clamp", "clone", "eq", "full_like", "ge", "gt", "isinf", "le",
        "lt", "masked_fill", "mul", "ne", "neg", "ones_like", "rsub", "sub", "tril", "triu", "where",
        "zeros_like",
    }
)  # fmt: skip


def varies_by_autocast(node: fx.Node) -> bool:
    """Whether torch.autocast may have the node computed in another dtype, as it has products of tensors that
    are floating."""
    is_floating = any(
        is_tensor_node(read) and value(read).is_floating_point() for read in node.all_input_nodes
    )
    return is_floating and not may_be_view(node) and called(node).strip("_") not in _AS_THEY_ARE


def is_batched(node: fx.Node) -> bool:
    """Whether the node takes a tensor into a vmap(), or out of it."""
    return called(node) in ("_add_batch_dim", "_remove_batch_dim")


# Calls whose result may be a view of their first argument.
_VIEWS = frozenset(
    {
        "T", "mT", "broadcast_to", "chunk", "columns", "contiguous", "detach", "expand",
        "expand_as", "flatten", "float", "getattr", "getitem", "movedim", "narrow", "permute",
        "reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes",
        "swapdims", "t", "tensor_split", "to", "transpose", "type_as", "unbind", "unflatten",
        "unsqueeze", "view", "view_as",
    }
)  # fmt: skip
# Calls whose result lies in memory in the same way, however their arguments do.
_PRODUCTS = frozenset({"baddbmm", "bmm", "linear", "matmul", "scaled_dot_product_attention"})
# Calls that see how a tensor lies in memory.
_LAYOUTS = frozenset(
    {
        "as_strided", "data_ptr", "is_contiguous", "numpy", "resize_", "set_", "storage", "storage_offset",
        "stride", "tolist", "untyped_storage",
    }
)  # fmt: skip


def may_be_view(node: fx.Node) -> bool:
    """Whether what the node computes may be a view of its first argument."""
    return node.op in ("call_function", "call_method") and called(node) in _VIEWS


def shows_layout(node: fx.Node) -> bool:
    """Whether somebody can see how the node's tensor lies in memory: it leaves the graph, or a call looks."""
    for user in node.users:
        custom = isinstance(
            user.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.OperatorBase)
        )
        if user.op not in ("call_function", "call_method") or custom or called(user) in _LAYOUTS:
            return True
        if called(user) == "view" and any(isinstance(argument, torch.dtype) for argument in user.args):
            return True
        if may_be_view(user) and shows_layout(user):
            return True
    return False


def goes_into_products(node: fx.Node) -> bool:
    """Whether products and attention alone read it, or views of it, or what lays it out anew: they give the
    same in any layout."""
    return all(
        user.op in ("call_function", "call_method")
        and (
            called(user) == "contiguous"
            or (goes_into_products(user) if may_be_view(user) else called(user) in _PRODUCTS)
        )
        for user in node.users
    )


def size_of(node: fx.Node) -> Any:
    """A symbolic or plain integer that the node computes, None where it computes something else."""
    held = value(node)
    return held if isinstance(held, (int, torch.SymInt)) and not isinstance(held, bool) else None


def argument(node: fx.Node, name: str) -> Any:
    """The argument that a call of one of the ops passes for the parameter `name`, its default where it passes
    none.

    Raises:
        AttributeError: the op has no such parameter.
    """
    parameters = _parameters(node.target)
    if name not in parameters:
        raise AttributeError(
            f"{node.target.__name__} has no argument {name!r}, it has {', '.join(parameters)}"
        )
    index = list(parameters).index(name)
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, parameters[name].default)


@cache
def _parameters(op: Callable) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(op).parameters)


def same_shape(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two shapes are equal whatever the symbolic sizes in them are; asks without leaving a guard."""
    one, other = tuple(one), tuple(other)
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as sentences name it: bfloat16."""
    return str(dtype).removeprefix("torch.")
