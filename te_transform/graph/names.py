"""Rename the calls and parameters of a captured graph to their names in the user's model.

Dynamo records the path of the code: an alias of a module, a property, or a wrapper's __getattr__. Skipping,
reports and checkpoints use named_modules(), which has one name per module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from inspect import Parameter, signature
from typing import Any

from torch import fx, nn

from te_transform.graph.nodes import name_in_model, path_said, source_of

_WRAPPED = "_checkpoint_wrapped_module"  # in PyTorch's checkpoint_wrapper() and offload_wrapper()
_ARGUMENT = re.compile(r"L\['(\w+)'\](?:\[(\d+)\]|\['(\w+)'\])?(.*)")


def without_wrappers(name: str) -> str:
    """Return a name without the parts that PyTorch's wrappers for activations add."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def name_as_in(model: nn.Module, captured: fx.GraphModule, arguments: Sequence[Any]) -> nn.Module | None:
    """Name the nodes by their paths below the captured module, a submodule of `model`.

    Args:
        arguments: the arguments of the captured call.

    Returns:
        The captured module. The model, if the graph has no submodule call, parameter or buffer. None, if the
        module is unknown.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")
    stored = zip(map(_stored_at, placeholders), arguments, strict=True)
    own = {at[1]: argument for at, argument in stored if at is not None and not at[0]}
    outermost, innermost = _module_calls(captured)
    root = model
    if outermost or own:
        root = _root(model, outermost, own)
    if root is None:
        return None
    names = {str(id(module)): path for path, module in root.named_modules()}
    _name_arguments(placeholders, root)
    for node in placeholders:
        _name_parameter(node, root, names)
    named = {key: (f"L['self'].{names[_id(key)]}", kind) for key, (said, kind) in innermost.items()
             if names.get(_id(key), path_said(said)) != path_said(said)}  # fmt: skip
    for node in captured.graph.nodes:
        if (stack := node.meta.get("nn_module_stack")) and (key := next(reversed(stack))) in named:
            node.meta["nn_module_stack"] = {**stack, key: named[key]}
    return root


def _module_calls(captured: fx.GraphModule) -> tuple[dict[str, str], dict[str, tuple[str, Any]]]:
    """Return the paths of the outermost modules by id, and dynamo's entries of the innermost ones by key."""
    outermost, innermost = {}, {}
    for stack in (node.meta.get("nn_module_stack") for node in captured.graph.nodes):
        if stack:
            first, last = next(iter(stack)), next(reversed(stack))
            outermost.setdefault(first, stack[first][0])
            innermost.setdefault(last, stack[last])
    paths = ((_id(key), path_said(said)) for key, said in outermost.items())
    return {key: path for key, path in paths if path}, innermost


def _id(key: str) -> str:
    return key.partition("@")[0]  # dynamo appends "@" and a number for repeated calls of a module


def _root(model: nn.Module, outermost: dict[str, str], own: dict[str, Any]) -> nn.Module | None:
    """Return the captured module, or None. A wrapper may hand on the attributes of what it wraps."""
    root = next((module for module in model.modules() if _is_root(module, outermost, own)), None)
    while root is not None and len(inside := [*root.children()]) == 1 and _is_root(*inside, outermost, own):
        (root,) = inside
    return root


def _is_root(module: nn.Module, outermost: dict[str, str], own: dict[str, Any]) -> bool:
    """Return True if dynamo's paths lead from the module to these submodules, parameters and buffers."""
    reached = {key: _object_at(module, path) for key, path in outermost.items()}
    matches = [str(id(part)) == key for key, part in reached.items() if part is not None]
    matches += [_object_at(module, name) is tensor for name, tensor in own.items()]
    return bool(matches) and all(matches)


def _stored_at(node: fx.Node) -> tuple[str, str] | None:
    """Return the path of the owner of a parameter or buffer, and its name; None for other nodes."""
    name = name_in_model(node).rpartition(".")[2]
    return (path_said(source_of(node).rpartition("._")[0]), name) if name else None


def _object_at(module: nn.Module, path: str) -> Any:
    """Return the object at dynamo's path by attribute and item lookup, or None if the lookup fails."""
    try:
        return reduce(_attribute_or_item, path.split("."), module)
    except Exception:  # a user's property or __getattr__ may raise anything
        return None


def _attribute_or_item(holder: Any, name: str) -> Any:
    if isinstance(holder, (list, tuple)):
        return holder[int(name)]
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def forward_parameters(model: nn.Module) -> Mapping[str, Parameter]:
    """Return the parameters of the forward; those of a module of torch.jit.trace are not known."""
    try:
        return signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _name_arguments(placeholders: Sequence[fx.Node], root: nn.Module) -> None:
    """Set node.meta["argument"] of graph inputs: how the forward of the captured module would write it.

    A wrapper such as a decorator may take (*args, **kwargs), with or without the module among them.
    """
    parameters = forward_parameters(root)
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    stored = [source_of(node) for node in placeholders if name_in_model(node)]
    for node in placeholders:
        source = source_of(node)
        if name_in_model(node) or (matched := _ARGUMENT.fullmatch(source)) is None:
            continue
        variable, index, key, rest = matched.groups()
        if variable in parameters and parameters[variable].kind is not Parameter.VAR_KEYWORD:
            node.meta["argument"] = source.replace(f"L['{variable}']", variable, 1)
        elif key is not None:
            node.meta["argument"] = f"{key}{rest}"
        elif index is not None and stored:
            has_module = any(each.startswith(f"L['{variable}'][0].") for each in stored)
            name = dict(enumerate(positional, has_module)).get(int(index))
            node.meta |= {"argument": f"{name}{rest}"} if name else {}


def _name_parameter(node: fx.Node, root: nn.Module, names: dict[str, str]) -> None:
    """Name the parameter after the module that it is read from, even if other modules share it."""
    path, _ = _stored_at(node) or ("", "")
    home = names.get(str(id(_object_at(root, path)))) if path else None
    if home is not None and home != name_in_model(node).rpartition(".")[0]:
        steps = "".join(f"._modules['{part}']" for part in home.split("."))
        node.meta["source"] = f"L['self']{steps}._{source_of(node).rpartition('._')[2]}"
