"""Guards on the attributes of a dict without keys, as of a config that inherits from dict.

Dynamo's manager of dicts checks an empty dict by its size alone. A manager of objects checks its attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.guards import DictGuardManager, GuardBuilder, GuardManagerType, get_verbose_code_parts
from torch._guards import Guard, Source

from te_transform.graph.dynamo_patches import Patch


def empty_dict_patches() -> Iterator[Patch]:
    """Yield the methods of dynamo that choose and fill managers of guards, with their wrappers."""
    yield GuardBuilder, "get_guard_manager_type", _manager_of_objects
    yield GuardBuilder, "guard_on_dict_keys_and_order", _guard_size


def _manager_of_objects(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def manager_type(self: Any, source: Source, held: Any) -> Any:
        is_empty = isinstance(held, dict) and dict.__len__(held) == 0
        if is_empty and type(held).__dictoffset__:
            return GuardManagerType.GUARD_MANAGER
        return own(self, source, held)

    return manager_type


def _guard_size(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def guard_keys(self: Any, held: Any, guard: Guard) -> None:
        manager = self.get_guard_manager(guard)
        if isinstance(manager, DictGuardManager):
            own(self, held, guard)
        else:
            told = get_verbose_code_parts(f"not {guard.name}", guard)
            manager.add_dict_length_check_guard(0, told, guard.user_stack)

    return guard_keys
