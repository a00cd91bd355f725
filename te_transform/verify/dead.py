"""Find comparisons that show nothing: constant outputs, and parameters that no gradient reaches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn

from te_transform.graph.preserve import same_state
from te_transform.verify.compare import GRADIENT, Row
from te_transform.verify.replay import named_tensors
from te_transform.verify.variations import Variation
from te_transform.verify.verification import DEAD


def constant_outputs(model: nn.Module, sets: Iterable[Variation]) -> Iterator[Row]:
    """Yield a failing row if the model returns the same for all inputs, or no finite number for any."""
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for each in sets:
        args, kwargs = each.inputs.clone()
        with same_state(model), torch.no_grad(), suppress(Exception):  # the model rejects some sizes
            for name, tensor in named_tensors(model.eval()(*args, **kwargs)):
                if tensor.is_floating_point():
                    seen[f"{name} {list(tensor.shape)}"].append(tensor)
    if seen and not any(bool(tensor.isfinite().any()) for tensors in seen.values() for tensor in tensors):
        reason = "has no finite number for any inputs: find the first inf or nan, and correct what makes it"
        yield Row(DEAD, "output", False, reason=reason)
    pairs = [(tensors[0], other) for tensors in seen.values() for other in tensors[1:]]
    if pairs and all(torch.equal(one, other) for one, other in pairs):
        reason = "is the same for all inputs: train the model first, or fill the weights that are zero"
        yield Row(DEAD, "output", False, reason=reason)


def without_gradient(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the parameters whose gradient is zero in every case."""
    is_zero: dict[str, bool] = {}
    for row in rows:
        name = row.name.removeprefix(GRADIENT)
        if name != row.name and not name.startswith("input "):
            is_zero[name] = is_zero.get(name, True) and row.zero
    return tuple(name for name, zero in is_zero.items() if zero)
