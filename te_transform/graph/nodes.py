"""Properties of a node of a captured graph: its value, its path in the model, its side effects."""

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

MADE_ANEW = "te_transform_made_anew"  # in node.meta: True if the argument is a copy, not a parameter

_NAME = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")
# Dynamo's form of `._modules` for classes with their own __getattr__, such as PEFT's models.
_IN_DICT = re.compile(r"\.__dict__\['(_modules|_parameters|_buffers)'\]")
_STORED = re.compile(r"_(?:parameters|buffers)\['[^']+'\]$")
# The captured module is the first argument, under any name. Dynamo wraps the forward of PyTorch's own modules
# in a function with the signature (*args).
_ROOT = re.compile(r"^L\['\w+'\](?:\[0\])?(?:\.__self__)?\.?")
_ON_STACK = re.compile(r"^L\['___stack\d+'\]")  # any value on the stack at a graph break

# Calls with these parts in their names change the gradient mode, autocast, vmap, or saved-tensor hooks.
_STATE = (
    "set_grad_enabled",
    "autocast",
    "inference_mode",
    "saved_tensors",
    "_vmap",
    "_grad_increment",
    "lift",
)
_IN_PLACE_OPERATORS = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
)  # fmt: skip
_IN_PLACE_METHODS = frozenset(f"__{name}__" for name in _IN_PLACE_OPERATORS)
_WRITING = frozenset(  # functions and methods; others end in "_"
    {
        "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward",
        operator.setitem, operator.delitem, setattr, delattr,
        *(getattr(operator, name) for name in _IN_PLACE_OPERATORS),
    }
)  # fmt: skip
_RANDOM = re.compile(
    r"rand(n|int|perm|om)?(_like)?|bernoulli|binomial|multinomial|(log_)?normal|cauchy|exponential|geometric"
    r"|uniform|poisson|(feature_|native_)?(alpha_)?dropout(1d|2d|3d)?|rrelu(_with_noise)?"
)


def value(node: Any) -> Any:
    """Return the example value from dynamo: a fake tensor, a number, a SymInt, a tuple of these, or None."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def is_tensor_node(node: Any) -> bool:
    return isinstance(value(node), torch.Tensor)


def has_gradient(node: Any) -> bool:
    """Return True if the value of the node is a tensor that needs a gradient."""
    return is_tensor_node(node) and value(node).requires_grad


def shape_of(node: fx.Node) -> torch.Size:
    return value(node).shape


def dtype_of(node: fx.Node) -> torch.dtype:
    return value(node).dtype


def is_wider(inside: Iterable[fx.Node], like: fx.Node) -> bool:
    """Return True if a node has a wider dtype than both `like` and fp32, the widest that a fused op uses."""
    widest = max(dtype_of(like).itemsize, torch.float32.itemsize)
    return any(dtype_of(node).itemsize > widest for node in inside)


def is_narrower(inside: Iterable[fx.Node], *ends: fx.Node) -> bool:
    """Return True if a node has a narrower dtype than all inputs and outputs, as in quantization."""
    narrowest = min(dtype_of(node).itemsize for node in ends)
    return any(dtype_of(node).itemsize < narrowest for node in inside)


def is_number(value: Any) -> bool:
    """Return True if a constant is an int or a float, not a bool."""
    return type(value) in (int, float)


def is_bias(mask: Tensor) -> bool:
    """Return True if a mask adds different numbers per head to scores [batch, heads, queries, keys].

    ALiBi and relative position biases do this. Other masks only hide keys.
    """
    return mask.is_floating_point() and mask.dim() > 2 and not same_shape(mask.shape[-3:-2], (1,))


def numel_of(node: fx.Node) -> int:
    """Return the number of elements at the sizes of the capture."""
    if not is_tensor_node(node):
        return 0
    numel = value(node).numel()  # shape.numel() would specialize symbolic sizes
    return numel if isinstance(numel, int) else numel.node.hint


def bytes_of(node: fx.Node) -> int:
    """Return the size in bytes at the sizes of the capture."""
    return numel_of(node) * dtype_of(node).itemsize if is_tensor_node(node) else 0


def storages(nodes: Iterable[fx.Node]) -> Iterator[int]:
    """Return the addresses of the fake storages of the tensors."""
    return (memory_of(node) for node in nodes if is_tensor_node(node))


def memory_of(node: fx.Node) -> int:
    """Return the address of a tensor's fake storage, or of the unwrapped tensor's storage inside vmap().

    Sparse tensors have no storage. For these, return the id of the tensor.
    """
    tensor = value(node)
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def is_parameter(node: Any) -> bool:
    """Return True if the node is a placeholder for a parameter of the model."""
    return isinstance(node, fx.Node) and node.op == "placeholder" and isinstance(value(node), nn.Parameter)


def is_model_tensor(node: Any) -> bool:
    """Return True if the node is a placeholder for a parameter or a buffer of the model."""
    return is_parameter(node) or (
        isinstance(node, fx.Node) and node.op == "placeholder" and bool(_STORED.search(source_of(node)))
    )


def stays_in_place(placeholder: fx.Node) -> bool:
    """Return True if the argument has the same memory in every call."""
    return is_model_tensor(placeholder) and not placeholder.meta.get(MADE_ANEW, False)


def name_in_model(node: fx.Node) -> str:
    """Return the dotted name of a parameter or buffer of the captured module, or "" for other tensors."""
    source = source_of(node)
    if _ON_STACK.match(source):
        return ""
    return ".".join(_NAME.findall(source)) if _ROOT.match(source) and _STORED.search(source) else ""


def source_of(node: fx.Node) -> str:
    """Return dynamo's source name of a placeholder, such as L['self']._modules['fc']._parameters['bias']."""
    source = getattr(node, "_dynamo_source", None)
    if source is None or "source" in node.meta:
        return node.meta.get("source", "")
    name = source.name
    return _IN_DICT.sub(r".\1", name() if callable(name) else name)


def path_of(node: fx.Node) -> str:
    """Return the dotted path, below the captured module, of the innermost module around the call."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.meta.get("path", "")
    return path_said(next(reversed(stack.values()))[0])


def path_below(prefix: str, path: str) -> str:
    """Return a path inside a captured module as a path in the whole model."""
    return f"{prefix}.{path}".strip(".")


reads_of, users_of = operator.attrgetter("all_input_nodes"), operator.attrgetter("users")


def reached(
    roots: Iterable[fx.Node],
    following: Callable[[fx.Node], Iterable[fx.Node]],
    where: Callable[[fx.Node], bool] = lambda node: True,
) -> list[fx.Node]:
    """Return the roots and all nodes that `following` leads to, each once.

    Nodes for which `where` is False are left out, and paths end at them.
    """
    nodes: dict[fx.Node, None] = {}
    waiting = [*roots]
    while waiting:
        node = waiting.pop()
        if node not in nodes and where(node):
            nodes[node] = None
            waiting += following(node)
    return [*nodes]


def computed_from(
    roots: Iterable[fx.Node], is_end: Callable[[fx.Node], bool] = lambda node: False
) -> set[fx.Node]:
    """Return the roots and the nodes that they depend on; do not include or pass through ends."""
    return {*reached(roots, reads_of, lambda node: not is_end(node))}


def without_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that run while the graph itself has switched gradients off, as in torch.no_grad()."""
    inside: set[fx.Node] = set()
    enabled = True
    for node in graph.nodes:
        if called(node) == "_set_grad_enabled":
            enabled = bool(node.args[0])
        elif not enabled:
            inside.add(node)
    return inside


def modules_of(node: fx.Node) -> list[tuple[str, str]]:
    """Return the path and class name of each module around the call, outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [(path_said(path), kind if isinstance(kind, str) else kind.__name__) for path, kind in stack]


def path_said(name: str) -> str:
    """Return the dotted path for dynamo's name of a module, such as L['self']._modules['layers'][0]."""
    name = _IN_DICT.sub(r".\1", name)
    if _ON_STACK.match(name):
        return ""
    name = re.sub(r"(?:^|\.)_modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]", r".\1\2\3", _ROOT.sub("", name))
    return name.partition(".__closure__")[0].strip(".")


def class_of(node: fx.Node) -> str:
    """Return the class name of the innermost module around the call, or "" for the captured module."""
    stack = node.meta.get("nn_module_stack")
    kind = next(reversed(stack.values()))[1] if stack else ""
    return kind if isinstance(kind, str) else kind.__name__


def called(node: fx.Node) -> str:
    """Return the bare name of the call: `add` for torch.add, Tensor.add, operator.add and the method."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


_FUNCTION_MODULES = torch, torch.nn.functional


def replaced_function(graph: fx.Graph) -> str | None:
    """Return the name of a PyTorch function in the graph that was monkey-patched since the capture, or None.

    Under a torch function mode, which tracing uses, PyTorch's Python functions look themselves up by name.
    Functions without a module, such as torch.mul, are looked up by name in fx.
    """
    for node in graph.nodes:
        function, module = node.target, getattr(node.target, "__module__", None)
        homes: tuple[Any, ...] = ()
        if isinstance(function, FunctionType) and module.partition(".")[0] == "torch":
            homes = (sys.modules.get(module),)
        elif isinstance(function, BuiltinFunctionType) and module is None:
            homes = _FUNCTION_MODULES
        functions = [getattr(home, function.__name__) for home in homes if hasattr(home, function.__name__)]
        if functions and all(now is not function for now in functions):
            return f"{module or 'torch'}.{function.__name__}"
    return None


def returned(graph: fx.Graph) -> Any:
    """Return the outputs of a captured graph: nodes, and values that are constant in all calls."""
    (outputs,) = next(node for node in graph.nodes if node.op == "output").args
    return outputs


def writes(node: fx.Node) -> bool:
    """Return True if the node changes a tensor or an object in place."""
    if node.op not in ("call_function", "call_method"):
        return False
    target, name = node.target, called(node)
    if target in _WRITING or name in _IN_PLACE_METHODS:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if getattr(target, "__module__", None) == "_operator":  # and_, or_ and not_ write nothing
        return False
    return (
        (isinstance(target, torch._ops.OpOverloadPacket) and _may_write(target))
        or (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("out") is not None
        or node.kwargs.get("inplace") is True
        or _inplace_by_position(node)
    )


@cache
def _may_write(packet: torch._ops.OpOverloadPacket) -> bool:
    """Return True if an operation writes to an argument that is not an `out` argument."""
    schemas = (getattr(packet, name)._schema for name in packet.overloads())
    arguments = (argument for schema in schemas for argument in schema.arguments if not argument.is_out)
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)


def _inplace_by_position(node: fx.Node) -> bool:
    """Return True if `inplace` is True by position, as in F.relu(x, True)."""
    if node.op != "call_function" or True not in node.args:
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True


def changes_state(node: fx.Node) -> bool:
    """Return True if the node changes the mode of later calls."""
    return node.op == "call_function" and any(part in called(node) for part in _STATE)


def is_random(node: fx.Node) -> bool:
    """Return True if the node draws random numbers."""
    name, _, _overload = called(node).partition(".")
    return bool(_RANDOM.fullmatch(name.strip("_")))


def is_foreign(node: fx.Node) -> bool:
    """Return True if the node calls opaque third-party code: a custom op or a function allowed in graphs.

    No guard covers state that such code reads beside its arguments.
    """
    target = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = target.name() if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
        return name.partition("::")[0] not in ("aten", "prims")
    home = getattr(target, "__module__", None) or "torch"
    return isinstance(target, FunctionType) and home.partition(".")[0] not in ("torch", "te_transform")


# Calls that torch.autocast never changes.
_AS_THEY_ARE = frozenset(
    {
        "abs", "add", "all", "any", "bool", "clamp", "clone", "eq", "full_like", "ge", "gt", "isinf", "le",
        "lt", "masked_fill", "mul", "ne", "neg", "ones_like", "rsub", "sub", "tril", "triu", "where",
        "zeros_like",
    }
)  # fmt: skip


def varies_by_autocast(node: fx.Node) -> bool:
    """Return True if torch.autocast may change the dtype of the computation, as for matrix products."""
    is_floating = any(
        is_tensor_node(read) and value(read).is_floating_point() for read in node.all_input_nodes
    )
    return is_floating and not may_be_view(node) and called(node).strip("_") not in _AS_THEY_ARE


def is_batched(node: fx.Node) -> bool:
    """Return True if the node moves a tensor into or out of a vmap()."""
    return called(node) in ("_add_batch_dim", "_remove_batch_dim")


# Calls whose result may be a view of their first argument.
_VIEW_NAMES = frozenset(
    {
        "T", "mT", "broadcast_to", "chunk", "columns", "contiguous", "detach", "expand",
        "expand_as", "flatten", "float", "getattr", "getitem", "movedim", "narrow", "permute",
        "reshape", "reshape_as", "select", "split", "split_with_sizes", "squeeze", "swapaxes",
        "swapdims", "t", "tensor_split", "to", "transpose", "type_as", "unbind", "unflatten",
        "unsqueeze", "view", "view_as",
    }
)  # fmt: skip
# Calls whose result has the same memory layout for any layout of the arguments.
_PRODUCT_NAMES = frozenset({"baddbmm", "bmm", "linear", "matmul", "scaled_dot_product_attention"})
# Calls that depend on the memory layout of a tensor.
_READS_LAYOUT = frozenset(
    {
        "as_strided", "data_ptr", "is_contiguous", "numpy", "resize_", "set_", "storage", "storage_offset",
        "stride", "tolist", "untyped_storage",
    }
)  # fmt: skip


def may_be_view(node: fx.Node) -> bool:
    """Return True if the result of the node may be a view of its first argument."""
    return node.op in ("call_function", "call_method") and called(node) in _VIEW_NAMES


def shows_layout(node: fx.Node) -> bool:
    """Return True if the tensor's memory layout is observable: the graph returns it, or a call reads it."""
    for user in node.users:
        custom = isinstance(
            user.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.OperatorBase)
        )
        if user.op not in ("call_function", "call_method") or custom or called(user) in _READS_LAYOUT:
            return True
        if called(user) == "view" and any(isinstance(argument, torch.dtype) for argument in user.args):
            return True
        if may_be_view(user) and shows_layout(user):
            return True
    return False


def goes_into_products(node: fx.Node) -> bool:
    """Return True if only matrix products, attention and contiguous() read the node or its views.

    Their results do not depend on the memory layout.
    """
    return all(
        user.op in ("call_function", "call_method")
        and (
            called(user) == "contiguous"
            or (goes_into_products(user) if may_be_view(user) else called(user) in _PRODUCT_NAMES)
        )
        for user in node.users
    )


def size_of(node: fx.Node) -> Any:
    """Return the symbolic or plain integer that the node computes, or None if it is not an integer."""
    size = value(node)
    return size if isinstance(size, (int, torch.SymInt)) and not isinstance(size, bool) else None


def argument(node: fx.Node, name: str) -> Any:
    """Return the argument of an op call for the parameter `name`, or the parameter's default.

    Raises:
        AttributeError: the op has no such parameter.
    """
    parameters = _op_parameters(node.target)
    if name not in parameters:
        raise AttributeError(
            f"expected an argument of {node.target.__name__} ({', '.join(parameters)}), got {name!r}"
        )
    index = list(parameters).index(name)
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, parameters[name].default)


@cache
def _op_parameters(op: Callable) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(op).parameters)


def same_shape(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return True if two shapes are equal for all values of their symbolic sizes; do not add a guard."""
    one, other = tuple(one), tuple(other)
    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.", such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
