"""parallelize(): tensor and sequence parallelism of a converted model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from te_transform.backends.fp8.precision import Precision
from te_transform.backends.limits import alike_on_ranks
from te_transform.canonicalize import canonicalize
from te_transform.execution.attach import runner_of
from te_transform.execution.distances import distance, rounding
from te_transform.execution.runner import Runner
from te_transform.graph.capture import capture
from te_transform.graph.fake import ways_to_call
from te_transform.graph.inputs import Inputs, TraceError, as_inputs
from te_transform.graph.keywords import suggests
from te_transform.graph.names import name_as_in
from te_transform.graph.nodes import dtype_name
from te_transform.graph.preserve import preserved
from te_transform.parallel.collectives import Ranks
from te_transform.parallel.divided import Parallel, ParallelError
from te_transform.parallel.layout import Place, ShardLayout, lay_out
from te_transform.parallel.stale_optimizers import note_replaced
from te_transform.plan.model import wrapped_by
from te_transform.plan.options import IN_CUDA_GRAPHS, OptionError, Options, check_skip, globs_of

M = TypeVar("M", bound=nn.Module)

_CONVERT = "pass the model that te_transform.convert() returns"


@suggests
def parallelize(
    converted: M,
    mesh: DeviceMesh,
    example_inputs: Any = None,
    *,
    sequence_parallel: bool = False,
    skip: str | Sequence[str] = (),
) -> M:
    """Divide a converted model among the ranks of a mesh.

    The projections of q, k, v, gates and ups are divided by columns, and the linears that read their results
    by rows. Language model heads and embedding tables are divided by classes. The operations of the forward
    decide what is divided, not names.

    Every parameter becomes a DTensor on the mesh, under its name, with the values of the mesh's first rank.
    Make the optimizer, and apply fully_shard(), afterwards: an earlier optimizer raises in its step. All
    ranks of the mesh must get the same inputs. They return the same outputs.

    Args:
        converted: a model from te_transform.convert(); it is changed in place.
        mesh: a mesh of one dimension, such as mesh["tp"] of a larger mesh.
        example_inputs: as for convert(); None generates inputs from the config or the forward's signature.
        sequence_parallel: shard residuals, norms and dropouts between the divided products by tokens.
        skip: module paths or globs whose linears stay whole.

    Returns:
        The model itself.

    Raises:
        ParallelError: the model, the mesh or both do not fit. The model is unchanged.
        OptionError, InputError, TraceError: as convert() does.
    """
    state, ranks = _check_converted(converted, mesh)
    check_skip(globs := globs_of(skip), converted)
    if not isinstance(sequence_parallel, bool):
        raise OptionError(f"expected True or False for sequence_parallel, got {sequence_parallel!r}")
    sample = as_inputs(converted, example_inputs)[0]
    forms = state.options.forms
    layout = _find_layout(
        converted, sample, lambda graph: lay_out(canonicalize(graph, forms), ranks.count, globs)
    )
    _check_found(converted, layout, ranks)
    parallel = Parallel(ranks, sequence_parallel, tuple(layout.places), forms)
    replaced = dict(converted.named_parameters())
    with ExitStack() as undo:
        load_scales = _scales_of_first_rank(converted, state.precision, ranks, undo)
        before = _floating_outputs(converted, sample, ranks)
        parallel.distributed(converted, layout.shards, undo)
        undo.callback(state.divide, None)
        state.divide(parallel)
        load_scales()
        after = _floating_outputs(converted, sample, ranks)
        _check_outputs(converted, before, after, ranks, state.precision is not None)
        undo.pop_all()
    load_scales()
    note_replaced(replaced)
    del replaced  # the whole parameters are freed
    state.make_adjacent(converted)
    alike_on_ranks.__enter__()  # for the rest of the process: a backward may come at any time
    return converted


def _check_converted(converted: Any, mesh: Any) -> tuple[Runner, Ranks]:
    kind = type(converted).__name__
    if not isinstance(converted, nn.Module):
        raise ParallelError(f"expected a converted model, got a {kind}; {_CONVERT}")
    if wrapped := wrapped_by(converted):
        raise ParallelError(
            f"expected the converted model itself, got it wrapped by {wrapped}; parallelize() it first, "
            "then wrap it"
        )
    state = runner_of(converted)
    if state is None:
        raise ParallelError(f"expected a converted model, got {kind}, which is not converted; {_CONVERT}")
    if state.division is not None:
        raise ParallelError(
            f"expected a whole model, got {kind}, which {state.division.ranks.count} ranks share already; "
            "te_transform.revert() and convert() it first"
        )
    _check_mesh(mesh)
    _check_options(state.options)
    _check_parameters(converted, mesh)
    return state, Ranks(mesh)


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ParallelError(
            f"expected a DeviceMesh, got a {type(mesh).__name__}; pass "
            'torch.distributed.init_device_mesh("cuda", (ranks,))'
        )
    if not dist.is_available() or not dist.is_initialized():
        raise ParallelError(
            "expected a process group, got none; start the script by torchrun and call "
            "torch.distributed.init_process_group()"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise ParallelError(
            f"expected a mesh of one dimension, got {mesh.ndim} dimensions {names}; pass a part of it, "
            f"such as mesh[{names[-1] if names else 'tp'!r}]"
        )
    if mesh.get_coordinate() is None:
        raise ParallelError(
            f"expected a rank of the mesh {mesh.mesh.tolist()}, got rank {dist.get_rank()}; call this only "
            "on ranks of the mesh"
        )


def _check_options(options: Options) -> None:
    if options.compile in IN_CUDA_GRAPHS:
        raise ParallelError(
            "expected a model whose ranks record CUDA graphs together, got one with "
            f"compile={options.compile!r}; convert it with compile=True, graphs=True"
        )
    if options.run_original:
        raise ParallelError(
            "expected a captured forward, got a model that runs the user's own code; te_transform.report() "
            "says why"
        )


def _check_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter.data) or type(parameter) is not nn.Parameter:
            raise ParallelError(
                f"expected plain tensors as parameters, got a {type(parameter.data).__name__} for {name}; "
                "parallelize() the model first"
            )
        if not parameter.is_floating_point():
            raise ParallelError(
                f"expected floating-point parameters, got {dtype_name(parameter.dtype)} for {name}; make "
                "it a buffer"
            )
        if parameter.device.type != mesh.device_type:
            raise ParallelError(
                f"expected parameters on {mesh.device_type}, like the mesh, got {name} on "
                f'{parameter.device}; move the model by model.to("{mesh.device_type}") first'
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks or parameter.grad is not None:
            raise ParallelError(
                f"expected parameters without gradients and hooks, which would be lost, got some of {name}; "
                "divide the model before training, and register hooks afterwards"
            )


def _find_layout(model: nn.Module, sample: Inputs, lay: Callable[[fx.Graph], ShardLayout]) -> ShardLayout:
    """Find the parameters that the ranks divide, on tensors without memory if possible."""
    for tensors in ways_to_call(model):
        layout = ShardLayout()
        try:
            with preserved(model), tensors(model, sample.clone()) as (args, kwargs):
                names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
                run = capture(type(model).forward, _laying_out(layout, model, names, lay), dynamic=False)
                run(model.train(), *args, **kwargs)
            return layout
        except Exception as error:
            failed = error
    raise TraceError.of(model, sample, failed) from failed


def _laying_out(
    whole: ShardLayout, model: nn.Module, names: dict[int, str], lay: Callable[[fx.Graph], ShardLayout]
) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    def backend(captured: fx.GraphModule, arguments: list[Any]) -> Callable[..., Any]:
        name_as_in(model, captured, arguments)
        layout = lay(captured.graph)
        shards = {node.name: each for node, each in layout.shards.items()}
        placeholders = [node.name for node in captured.graph.find_nodes(op="placeholder")]

        def run(*arguments: Any) -> Any:
            for name, argument in zip(placeholders, arguments, strict=True):
                if name in shards and id(argument) in names:
                    whole.shards.setdefault(names[id(argument)], shards[name])
            whole.places = [*dict.fromkeys(whole.places + layout.places)]
            return captured.forward(*arguments)

        return run

    return backend


def _check_found(model: nn.Module, layout: ShardLayout, ranks: Ranks) -> None:
    if ranks.count == 1:
        return
    indivisible = [place for place in layout.places if place.indivisible]
    if indivisible:
        raise ParallelError(
            f"a mesh of {ranks.count} ranks does not divide {type(model).__name__} ({_said(indivisible)}): "
            "pass a mesh of a size that does, or leave these whole by skip="
        )
    if not layout.shards:
        said = _said(layout.places)
        raise ParallelError(
            f"nothing of {type(model).__name__} can be divided among ranks ({said or 'it has no linears'}), "
            "but division needs linears whose columns or heads are independent: use DDP or fully_shard()"
        )


def _said(places: Sequence[Place]) -> str:
    return "; ".join(f"{place.path or 'the model'}: {', '.join(place.reasons)}" for place in places)


def _scales_of_first_rank(
    model: nn.Module, precision: Precision | None, ranks: Ranks, undo: ExitStack
) -> Callable[[], None]:
    """Return a function that loads the scales of the first rank's whole model.

    Scales of a tensor hold for its shards too. Shards without scales quantize by 1 until they are loaded.
    `undo` gives each rank its own scales again.
    """
    if precision is None or not precision.is_delayed:
        return lambda: None
    own = precision.scales(model)
    common = [own]
    dist.broadcast_object_list(common, group_src=0, group=ranks.mesh.get_group())
    undo.callback(precision.load_scales, own)
    return partial(precision.load_scales, common[0])


def _floating_outputs(model: nn.Module, sample: Inputs, ranks: Ranks) -> list[Tensor]:
    """Return the floating outputs in evaluation on the first rank's sample; none on the meta device."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return []

    def common(tensor: Tensor) -> Tensor:
        # NCCL sends contiguous tensors only; the sample itself must not change
        shared = tensor.detach().to(ranks.mesh.device_type, copy=True).contiguous()
        dist.broadcast(shared, group_src=0, group=ranks.mesh.get_group())
        return shared.to(tensor.device)

    args, kwargs = tree_map_only(Tensor, common, sample.clone())
    with preserved(model), torch.no_grad():
        try:
            outputs = model.eval()(*args, **kwargs)
        except Exception as error:
            raise TraceError.of(model, sample, error) from error
    return [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]


def _check_outputs(
    model: nn.Module, before: list[Tensor], after: list[Tensor], ranks: Ranks, in_fp8: bool
) -> None:
    """Check the outputs of the divided model against those of the first rank's whole model."""
    off = max(map(distance, after, before), default=0.0)
    largest = [off]
    dist.broadcast_object_list(largest, group_src=0, group=ranks.mesh.get_group())
    if not largest[0] <= rounding(before, in_fp8):
        raise ParallelError(
            f"divided among {ranks.count} ranks, {type(model).__name__} returns other numbers, off by "
            f"{largest[0]:.2g}: code that is not captured reads its parameters, see te_transform.report()"
        )
