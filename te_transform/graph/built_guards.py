"""Guards that dynamo builds itself, with the answers that it leaves out, or in fewer guards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch._dynamo.guards import GuardBuilder, GuardManagerType
from torch._guards import Guard, Source

from te_transform.graph.dynamo_patches import Patch, around, call_after
from te_transform.graph.lambda_guards import add_guard, description


def built_patches() -> Iterator[Patch]:
    """Yield the methods of dynamo that build guards, with their wrappers."""
    yield GuardBuilder, "EQUALS_MATCH", call_after(_guard_numbers)
    yield GuardBuilder, "EMPTY_NN_MODULE_HOOKS_DICT", around(_guard_no_hooks)
    yield GuardBuilder, "requires_key_order_guarding", around(_has_order)


def _guard_numbers(self: Any, guard: Guard, *_: Any, **__: Any) -> None:
    """Guard the signs of zeros, and the types of numbers in a tuple. EQUALS_MATCH guards the value's type."""
    value = self.get(guard)
    if isinstance(value, (complex, tuple, frozenset)) or (isinstance(value, float) and value == 0.0):
        text, manager = _exact_text(value), self.get_guard_manager(guard)
        code_part = description(f"exact_text({guard.name})", text)
        add_guard(manager, guard, lambda value: _exact_text(value) == text, code_part)


def _exact_text(value: Any) -> Hashable:
    """Return text that differs for 1, 1.0 and True, and for 0.0 and -0.0, which are equal."""
    return frozenset(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _guard_no_hooks(own: Callable[..., Any], self: Any, guard: Guard) -> None:
    """Guard that a module has no hooks by one guard, in place of dynamo's guard for each dict of hooks."""
    module = guard.originating_source.base
    attributes = self.get(module).__dict__
    if not _has_no_hooks(attributes):
        own(self, guard)
        return
    code_part = f"not ({module.name}._forward_hooks or other hooks)"
    if code_part in self.already_added_code_parts:
        return
    self.already_added_code_parts.add(code_part)
    manager = self.get_guard_manager_from_source(module).get_generic_dict_manager(
        f"{module.name}.__dict__", attributes, GuardManagerType.GUARD_MANAGER
    )
    add_guard(manager, guard, _has_no_hooks, code_part)


def _has_no_hooks(attributes: dict[str, Any]) -> bool:
    """Return True if all dicts of hooks are empty; a loop over their names would take longer."""
    try:
        return not (
            attributes["_forward_hooks"] or attributes["_forward_hooks_with_kwargs"]
            or attributes["_forward_pre_hooks"] or attributes["_forward_pre_hooks_with_kwargs"]
            or attributes["_backward_hooks"] or attributes["_backward_pre_hooks"]
        )  # fmt: skip
    except KeyError:  # not an attribute of the object, as in torch.jit's modules
        return False


def _has_order(own: Callable[..., bool], self: Any, source: Source) -> bool:
    """Guard no order of keys in an empty dict with attributes, such as a config that inherits from dict.

    The manager of dicts, which guards the order, checks an empty dict by its size alone. Dynamo's manager of
    objects checks the attributes, and a guard of dynamo the size.
    """
    return own(self, source) and not _is_empty(self.get(source))


def _is_empty(value: Any) -> bool:
    """Return True for a dict with attributes and without keys; do not run user code."""
    return isinstance(value, dict) and bool(type(value).__dictoffset__) and dict.__len__(value) == 0
