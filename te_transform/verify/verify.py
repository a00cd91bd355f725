"""The front door verify(): compare two models, and find where they differ."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from te_transform.execution.runner import runners
from te_transform.graph.inputs import as_inputs
from te_transform.graph.keywords import suggests
from te_transform.graph.preserve import one_at_a_time, preserved
from te_transform.plan.model import wrapped_by
from te_transform.verify.conversion import Conversion
from te_transform.verify.precision import Recipes
from te_transform.verify.variations import variations
from te_transform.verify.verification import Verification


@suggests
@one_at_a_time
def verify(model: nn.Module, converted: nn.Module, example_inputs: Any = None) -> Verification:
    """Compare `converted` with `model`, forward and each gradient, against the original in fp64.

    The models run in training mode, in evaluation mode and without gradients, with dropout off. Inputs are
    the example inputs, fresh random values, another batch size and length, and a left-padded batch if the
    model has an attention_mask.

    All sites run fused at any size. On the example inputs in training mode, the model also runs as outside of
    verify(), where calls with few tokens run unfused. Effects of torch.compile and CUDA graphs are not
    compared.

    compare.py says what passes. A model in FP8 is compared with an ideal emulation of FP8. The state dicts
    must agree bitwise: if they differ, nothing runs, and the result names the entries. After a failure,
    subsets of the sites run to find the guilty ones.

    verify() needs the memory of `model` in fp64 and of its gradients.

    Args:
        model: The original, or the converted model itself if it was converted in place. It stays unchanged.
        converted: The model returned by te_transform.convert().
        example_inputs: Inputs as for convert().

    Raises:
        ValueError: the two models cannot be compared, the original does not run on the example inputs, or the
            recipe of the converted model cannot be emulated.
        te_transform.InputError: there are no inputs, and none can be generated.
    """
    _check(model, converted)
    pair = Conversion(model, converted, Recipes(converted))
    samples = as_inputs(model, example_inputs)
    if (unequal := pair.unequal_weights()) is not None:
        return unequal
    sets = list(variations(model, samples))
    with preserved(model), preserved(converted):
        return pair.verification(samples, sets)


def _check(model: nn.Module, converted: nn.Module) -> None:
    if not isinstance(converted, nn.Module) or not runners(converted):
        raise ValueError(
            f"expected a converted model as the second model, got a {type(converted).__name__} that "
            "te_transform.convert() did not return; call verify(model, te_transform.convert(model))"
        )
    for which, each in (("first", model), ("second", converted)):
        if hasattr(each, "module") and (wrapper := wrapped_by(each)):
            raise ValueError(
                f"expected a plain model as the {which} model, got one wrapped by {wrapper}; pass its .module"
            )
    if not isinstance(converted, type(model)):  # a converted class is a subclass with the same name
        raise ValueError(
            f"expected two models of the same class, got a {type(model).__name__} and a converted "
            f"{type(converted).__name__}; pass the model that was converted"
        )
    for which, each in (("first", model), ("second", converted)):
        if any(parameter.is_meta for parameter in each.parameters()):
            raise ValueError(
                f"expected weights to compare, got parameters on the meta device in the {which} model; move "
                "it by to_empty(device=...) and load its weights first, or remove the hooks that load them"
            )
    first, second = (any(isinstance(p, DTensor) for p in each.parameters()) for each in (model, converted))
    if first != second:
        raise ValueError(
            f"expected two whole models, got a {'first' if first else 'second'} model divided among ranks; "
            "call verify() before parallelize() or fully_shard()"
        )
