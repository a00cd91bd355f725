"""The form of every JSON output: reports, verifications and profiles share one version of their fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA = 2  # grows if a field is added or removed, or changes its meaning; docs/json.md lists the fields


def as_json(fields: Mapping[str, Any]) -> str:
    """Return the fields as JSON, after "schema". Numbers that are not finite become null: JSON has none."""
    return json.dumps({"schema": SCHEMA, **_finite(fields)}, indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
