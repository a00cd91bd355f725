"""trace(): the graph of one forward, to read."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import fx, nn

from te_transform.execution.runner import is_divided
from te_transform.graph.capture import capture, on_fake_tensors
from te_transform.graph.edit import name_model_tensors
from te_transform.graph.inputs import TraceError, as_inputs
from te_transform.graph.keywords import suggests
from te_transform.graph.names import name_as_in
from te_transform.graph.preserve import one_at_a_time, preserved
from te_transform.plan.model import ModelError, check_module, is_compiled
from te_transform.plan.options import OptionError


@suggests
@one_at_a_time
def trace(model: nn.Module, example_inputs: Any = None, *, train: bool = True) -> fx.GraphModule:
    """The torch-level graph of one forward of `model`, to read or to run.

    Parameters and buffers are get_attr nodes under their own names, what the forward is given are
    placeholders; the outputs are a tuple of tensors. Every node's `meta` has the `path` and `class` of the
    module that made the call, and what dynamo notes, the fake tensor `example_value` among it. The sizes of
    this sample are constants.

    Args:
        model: any module; it is left bitwise as it was, its random state too.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments, a list of those (the
            first is traced), or None to have them invented.
        train: capture the training path (with its dropouts) or the evaluation path.

    Raises:
        TraceError: the forward failed on these inputs, or dynamo captures it in several pieces.
        te_transform.InputError: there are no inputs and none can be invented.
        te_transform.ModelError: `model` is no module, is compiled, or is divided among ranks.
        te_transform.OptionError: `train` is no bool.
    """
    check_module(model, "trace")
    if not isinstance(train, bool):
        raise OptionError(f"train is {train!r}, True or False is needed")
    if is_compiled(model):
        raise ModelError(
            f"{type(model).__name__} is a compiled module, the plain one is needed: trace its _orig_mod"
        )
    if is_divided(model):
        raise ModelError(
            f"{type(model).__name__} is divided among ranks, a whole model is needed: trace() it before "
            "parallelize(), or read the graphs of te_transform.report(model)"
        )
    inputs = as_inputs(model, example_inputs)[0]
    found: list[fx.GraphModule] = []

    def keep(captured: fx.GraphModule, arguments: list[Any]) -> Any:
        name_as_in(model, captured, arguments)
        found.append(name_model_tensors(captured, arguments))
        return captured.forward

    on_meta = any(parameter.is_meta for parameter in model.parameters())
    with preserved(model):
        try:
            with on_fake_tensors(model, inputs) if on_meta else nullcontext(inputs.clone()) as (args, kwargs):
                capture(type(model).forward, keep)(model.train(train), *args, **kwargs)
        except Exception as error:
            raise TraceError.of(model, inputs, error) from error
    if len(found) != 1:
        raise TraceError(
            f"dynamo captures the forward of {type(model).__name__} in {len(found)} pieces, one is needed: "
            "te_transform.inspect() has the reasons, in its breaks"
        )
    return found[0]
