"""Whether a module computes in evaluation what it was recorded to compute in training."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from te_transform.alike import module_key
from te_transform.inputs import Inputs
from te_transform.normalise import normalise
from te_transform.trace import Call, TraceError, example_of, record

Known = dict[Hashable, bool]  # by the module's class, attributes and shapes


def same_in_evaluation(call: Call, known: Known) -> bool:
    """Whether the called module, on its own, is recorded as the same operations in both modes.

    `known` has the answers for modules alike; a new one is added.
    """
    if (getattr(type(call.module).forward, "__module__", None) or "").startswith("torch.nn."):
        return True
    key = module_key(call.module), repr(fx.node.map_aggregate((call.args, call.kwargs), _shape))
    if key not in known:
        known[key] = _recorded(call, train=True) == _recorded(call, train=False)
    return known[key]


def _recorded(call: Call, train: bool) -> str | None:
    inputs = Inputs(*fx.node.map_aggregate((call.args, call.kwargs), _example))
    try:
        return str(normalise(record(call.module, inputs, train=train, free_sizes=frozenset())).graph)
    except TraceError:
        return None


def _shape(value: object) -> object:
    return value.meta["tensor_meta"] if isinstance(value, fx.Node) else value


def _example(value: object) -> object:
    return example_of(value, value.meta["tensor_meta"].shape) if isinstance(value, fx.Node) else value
