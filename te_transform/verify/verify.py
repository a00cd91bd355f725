"""The front door verify(): compare two models, and find where they differ."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from te_transform.execution.attach import runners
from te_transform.graph.inputs import as_inputs
from te_transform.graph.keywords import ArgumentError, suggests
from te_transform.graph.preserve import one_at_a_time, preserved
from te_transform.plan.model import wrapped_by
from te_transform.verify.any_pair import AnyPair
from te_transform.verify.conversion import Conversion
from te_transform.verify.layout import Layout, Weights
from te_transform.verify.names import Names, uncompiled
from te_transform.verify.precision import Recipes
from te_transform.verify.variations import variations
from te_transform.verify.verification import Verification


@suggests
@one_at_a_time
def verify(
    model: nn.Module,
    converted: nn.Module,
    example_inputs: Any = None,
    *,
    names: Names | None = None,
    weights: Weights | None = None,
) -> Verification:
    """Compare `converted` with `model`, forward and each gradient, against the original in fp64.

    The second model is the converted model, or any module that claims to compute the same. Examples are a
    hand port, a model with patched kernels, and a compiled one, see docs/verify.md.

    The models run in training mode, in evaluation mode and without gradients, with dropout off. Inputs are
    the example inputs, fresh random values, another batch size and length, and a left-padded batch if the
    model has an attention_mask. Updated buffers, and inputs that a forward writes to, are compared as
    outputs.

    A converted model: all sites run fused at any size. On the example inputs, the model also runs as outside
    of verify(): in training, where calls with few tokens run unfused, or compiled. Compiled code draws other
    random numbers, so with dropout it runs without gradients only. CUDA graphs, and compiled graphs in FP8,
    are not compared. A model in FP8 is compared with an ideal emulation of FP8. After a failure,
    subsets of the sites run to find the guilty ones.

    Any other module: it runs as it is, compiled or quantized. Models in float32 also run under autocast to
    bfloat16. Further cases are a right-padded batch, one longer row, and a call after calls with the other
    inputs. Probabilities of dropouts are compared as outputs. Outputs at padding are not compared. After a
    failure, hooks on both models find the first module that differs. A model whose output is the same for all
    inputs, or has no finite number, is not verified.

    compare.py says what passes. The weights must agree bitwise: if they differ, nothing runs, and the result
    names them.

    verify() needs the memory of `model` in fp64 and of its gradients.

    Args:
        model: The original, or the converted model itself if it was converted in place. It stays unchanged.
        converted: The model returned by te_transform.convert(), or another module with the same outputs.
        example_inputs: Inputs as for convert(); the second model takes the same.
        names: For another module: a mapping from names of `model` to names of `converted`, or a function from
            name to name. It renames modules and parameters. An entry also renames what lies below it; None
            leaves a name out. By default, the names are the same.
        weights: For another module with joined, transposed or scaled weights: a differentiable function that
            makes the state dict of `converted` from that of `model`. Its derivative turns gradients of the
            second model into gradients of the first.

    Raises:
        ValueError: the two models cannot be compared, the original fails on the example inputs, or the recipe
            of the converted model cannot be emulated.
        te_transform.InputError: there are no inputs, and none can be generated, or they are an empty batch.
    """
    _check_models(model, converted, has_layout=names is not None or weights is not None)
    if runners(converted) and names is None and weights is None:
        pair = Conversion(model, converted, Recipes(converted))
    else:
        first = uncompiled(model)
        pair = AnyPair(first, converted, Layout(first, converted, names, weights))
    samples = as_inputs(pair.model, example_inputs)
    if (unequal := pair.unequal_weights()) is not None:
        return unequal
    sets = list(variations(pair.model, samples))
    with preserved(model), preserved(converted):
        return pair.verification(samples, sets)


def assert_same(
    model: nn.Module,
    other: nn.Module,
    example_inputs: Any = None,
    *,
    names: Names | None = None,
    weights: Weights | None = None,
) -> None:
    """Raise unless verify() finds that two models compute the same; for tests.

    Args:
        model: The original.
        other: The converted model, or another module with the same outputs.
        example_inputs: See verify().
        names: See verify().
        weights: See verify().

    Raises:
        AssertionError: the models differ; the message is the printed Verification.
        ValueError: see verify().
        te_transform.InputError: see verify().
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    verification = verify(model, other, example_inputs, names=names, weights=weights)
    if not verification:
        raise AssertionError(str(verification))


def _check_models(model: nn.Module, converted: nn.Module, has_layout: bool) -> None:
    for which, each in (("first", model), ("second", converted)):
        if not isinstance(each, nn.Module):
            raise ArgumentError(
                f"expected a converted model as the {which} model, or any torch.nn.Module, got a "
                f"{type(each).__name__}; call verify(model, te_transform.convert(model))"
            )
        if hasattr(each, "module") and (wrapper := wrapped_by(each)):
            raise ArgumentError(
                f"expected a plain model as the {which} model, got one wrapped by {wrapper}; pass its .module"
            )
        if any(parameter.is_meta for parameter in each.parameters()):
            raise ArgumentError(
                f"expected weights to compare, got parameters on the meta device in the {which} model; load "
                "its weights after to_empty(device=...), or remove the hooks that load them"
            )
    # a converted class is a subclass with the same name
    if runners(converted) and not has_layout and not isinstance(converted, type(model)):
        raise ArgumentError(
            f"expected two models of the same class, got a {type(model).__name__} and a converted "
            f"{type(converted).__name__}; pass the model that was converted"
        )
    first, second = (any(isinstance(p, DTensor) for p in each.parameters()) for each in (model, converted))
    if first != second:
        raise ArgumentError(
            f"expected two whole models, got a {'first' if first else 'second'} model divided among ranks; "
            "call verify() before parallelize() or fully_shard()"
        )
