"""The front door trace(): capture the graph of one forward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import fx, nn

from te_transform.execution.attach import is_divided
from te_transform.graph.capture import capture
from te_transform.graph.edit import name_model_tensors
from te_transform.graph.fake import faked
from te_transform.graph.inputs import TraceError, as_inputs
from te_transform.graph.keywords import suggests
from te_transform.graph.names import name_as_in
from te_transform.graph.preserve import one_at_a_time, preserved
from te_transform.plan.model import ModelError, check_module, is_compiled
from te_transform.plan.options import OptionError


@suggests
@one_at_a_time
def trace(model: nn.Module, example_inputs: Any = None, *, train: bool = True) -> fx.GraphModule:
    """Return the torch-level graph of one forward of `model`, to read or to run.

    Parameters and buffers are get_attr nodes under their own names. The arguments of the forward are
    placeholders. The output is a tuple of tensors. The `meta` of each node has the `path` and `class` of the
    module that made the call. It also has dynamo's entries, such as the fake tensor `example_value`. The
    sizes of the example inputs are constants in the graph.

    Args:
        model: Any module. It stays bitwise unchanged, as does the random state.
        example_inputs: A tensor, a tuple (args), a dict (kwargs), a list of those (the first is traced), or
            None to generate inputs.
        train: True to capture the training mode (with dropout), False for the evaluation mode.

    Raises:
        TraceError: the forward failed on these inputs, or dynamo captured it as several graphs.
        te_transform.InputError: there are no inputs, and none can be generated.
        te_transform.ModelError: `model` is not a module, is compiled, or is divided among ranks.
        te_transform.OptionError: `train` is not a bool.
    """
    check_module(model, "trace")
    if not isinstance(train, bool):
        raise OptionError(f"expected True or False for train, got {train!r}")
    if is_compiled(model):
        raise ModelError(
            f"expected a plain module, got a compiled {type(model).__name__}; trace its _orig_mod"
        )
    if is_divided(model):
        raise ModelError(
            f"expected a whole model, got a {type(model).__name__} divided among ranks; call trace() before "
            "parallelize(), or read the graphs of te_transform.report(model)"
        )
    inputs = as_inputs(model, example_inputs)[0]
    graphs: list[fx.GraphModule] = []

    def keep(captured: fx.GraphModule, arguments: list[Any]) -> Any:
        name_as_in(model, captured, arguments)
        graphs.append(name_model_tensors(captured, arguments))
        return captured.forward

    on_meta = any(parameter.is_meta for parameter in model.parameters())
    arguments = inputs.clone()
    with preserved(model):
        try:
            with faked(model, arguments) if on_meta else nullcontext(arguments) as (args, kwargs):
                capture(type(model).forward, keep)(model.train(train), *args, **kwargs)
        except Exception as error:
            raise TraceError.of(model, inputs, error) from error
    if len(graphs) != 1:
        raise TraceError(
            f"expected one graph for the forward of {type(model).__name__}, got {len(graphs)} from dynamo; "
            "te_transform.inspect() lists the reasons in its breaks"
        )
    return graphs[0]
