"""Guards on the attributes of a dict without keys, as of a config that inherits from dict.

Dynamo's manager of dicts, which guards the order of keys, checks an empty dict by its size alone. A dict
without keys has no order. Dynamo's manager of objects checks its attributes, and a guard of dynamo its size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._guards import Source

from te_transform.graph.dynamo_patches import Patch


def empty_dict_patches() -> Iterator[Patch]:
    """Yield the method of dynamo that chooses the manager of a dict, with its wrapper."""
    yield GuardBuilder, "requires_key_order_guarding", _has_order


def _has_order(own: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(own)
    def is_guarded(self: Any, source: Source) -> bool:
        return own(self, source) and not _is_empty(self.get(source))

    return is_guarded


def _is_empty(held: Any) -> bool:
    """Return True for a dict with attributes and without keys; do not run user code."""
    return isinstance(held, dict) and bool(type(held).__dictoffset__) and dict.__len__(held) == 0
