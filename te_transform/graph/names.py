"""Where calls and parameters of a captured graph lie, by the names that the user's model has for them.

Dynamo says by which way the code came there: a second name of the same module, a property, the __getattr__ of
a wrapper. What users skip, report and save goes by named_modules(), which has one name for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch import fx, nn

from te_transform.graph.nodes import name_in_model, path_said, source_of


def name_as_in(model: nn.Module, captured: fx.GraphModule, arguments: Sequence[Any]) -> nn.Module | None:
    """Give the nodes the names that they have below the module of `model` whose forward was captured.

    Args:
        arguments: of the call that the graph was captured in.

    Returns:
        That module; where the graph has nothing that a module holds, the model; None where it is unknown.
    """
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    stored = zip(map(_stored_at, placeholders), arguments, strict=True)
    own = {at[1]: argument for at, argument in stored if at is not None and not at[0]}
    outermost, innermost = _calls(captured)
    root = model
    if outermost or own:
        root = next((module for module in model.modules() if _is_root(module, outermost, own)), None)
    if root is None:
        return None
    names = {str(id(module)): path for path, module in root.named_modules()}
    for node in placeholders:
        _name_parameter(node, root, names)
    named = {key: (f"L['self'].{names[_id(key)]}", kind) for key, (said, kind) in innermost.items()
             if names.get(_id(key), path_said(said)) != path_said(said)}  # fmt: skip
    for node in captured.graph.nodes:
        if (stack := node.meta.get("nn_module_stack")) and (key := next(reversed(stack))) in named:
            node.meta["nn_module_stack"] = {**stack, key: named[key]}
    return root


def _calls(captured: fx.GraphModule) -> tuple[dict[str, str], dict[str, tuple[str, Any]]]:
    """The paths of the modules that the captured forward itself calls, by their ids; and what dynamo says of
    those that make the calls, by what it knows them by."""
    outermost, innermost = {}, {}
    for stack in (node.meta.get("nn_module_stack") for node in captured.graph.nodes):
        if stack:
            first, last = next(iter(stack)), next(reversed(stack))
            outermost.setdefault(first, stack[first][0])
            innermost.setdefault(last, stack[last])
    paths = ((_id(key), path_said(said)) for key, said in outermost.items())
    return {key: path for key, path in paths if path}, innermost


def _id(key: str) -> str:
    return key.partition("@")[0]  # of a module that is called again, dynamo numbers the calls


def _is_root(module: nn.Module, outermost: dict[str, str], own: dict[str, Any]) -> bool:
    """Whether these calls, and these parameters and buffers, are found from it as dynamo says."""
    reached = {key: _reached(module, path) for key, path in outermost.items()}
    found = [str(id(part)) == key for key, part in reached.items() if part is not None]
    found += [_reached(module, name) is held for name, held in own.items()]
    return bool(found) and all(found)


def _stored_at(node: fx.Node) -> tuple[str, str] | None:
    """The path of the module that holds the parameter or buffer, and its name there; None of others."""
    name = name_in_model(node).rpartition(".")[2]
    return (path_said(source_of(node).rpartition("._")[0]), name) if name else None


def _reached(module: nn.Module, path: str) -> Any:
    """What dynamo's path leads to, as the code would come there; None where it leads nowhere."""
    try:
        return reduce(_held, path.split("."), module)
    except Exception:  # of a property, or a __getattr__, of the user's own
        return None


def _held(holder: Any, name: str) -> Any:
    if isinstance(holder, (list, tuple)):
        return holder[int(name)]
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _name_parameter(node: fx.Node, root: nn.Module, names: dict[str, str]) -> None:
    """A parameter that two modules share keeps the name in the one that it is read of."""
    path, _ = _stored_at(node) or ("", "")
    found = names.get(str(id(_reached(root, path)))) if path else None
    if found is not None and found != name_in_model(node).rpartition(".")[0]:
        held = "".join(f"._modules['{part}']" for part in found.split("."))
        node.meta["source"] = f"L['self']{held}._{source_of(node).rpartition('._')[2]}"
