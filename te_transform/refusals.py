"""Why a match may not be rewritten, whatever the rule: said once, here."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.utils import parametrize

from te_transform.config import Options
from te_transform.evaluation import same_in_evaluation
from te_transform.pattern import Match
from te_transform.rule import Operation
from te_transform.slots import takes_subclasses
from te_transform.trace import Recording
from te_transform.weights import dtype_name

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WEIGHTED = ("linear", "layer_norm", "rms_norm")
_LINEAR_FORWARDS = {nn.Linear.forward}


def refusals(
    match: Match,
    operations: list[Operation],
    unmerged: list[Operation],
    recording: Recording,
    options: Options,
) -> Iterator[str]:
    """Every generic reason, as a clause of what the model has, a comma, and one of what is needed.

    `unmerged` are the operations, with those that a merged one was made of in its place.
    """
    for operation in operations:
        yield from _skipped(operation, options)
        if operation.word in WEIGHTED and operation.merged is None:
            yield from _of_module(operation, recording)
            yield from _of_weights(operation)
    yield from _mixed(unmerged)
    yield from _read_elsewhere(match)


def solo(operation: Operation, recording: Recording) -> bool:
    """Whether the operation is all that one call of a module does: its input, its output, nothing else."""
    call, node = operation.call, operation.node
    if call is None:
        return False
    given = [*call.args, *call.kwargs.values()]
    return (
        len(given) == 1
        and recording.now(given[0]) is recording.now(node.args[0])
        and recording.now(call.output) is node
        and all(n is node or n in node.args[1:] for n in recording.inside(call))
    )


def _skipped(operation: Operation, options: Options) -> Iterator[str]:
    for glob in options.skip:
        parts = operation.path.split(".")
        if any(fnmatchcase(".".join(parts[:depth]), glob) for depth in range(1, len(parts) + 1)):
            yield f"the module is skipped by skip={glob!r}, leave it out of skip= to have it fused"


def _of_module(operation: Operation, recording: Recording) -> Iterator[str]:
    module, kind = operation.module, type(operation.module).__name__
    if not solo(operation, recording):
        yield (
            f"the {operation.word} is computed in the forward of {kind}, a module that does nothing else is "
            "needed"
        )
        return
    calls = recording.times[module]
    if calls > 1:
        yield f"{kind} is called {calls} times in one forward, a fused module stands for one call"
    if not same_in_evaluation(operation.call, recording.evaluated):
        yield f"{kind} computes something else in evaluation mode, a fused module is the same in both"
    if not takes_subclasses(type(module)):
        yield f"{kind} refuses to be subclassed, a converted module is an instance of a subclass of its class"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        yield f"{kind} has hooks, they would see the fused module's tensors: remove them first"
    if parametrize.is_parametrized(module):
        yield (
            f"{kind} is parametrized, a plain parameter is needed: "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    if isinstance(module, nn.Linear) and type(module).forward not in _LINEAR_FORWARDS:
        yield f"{kind} is a Linear with a forward of its own, nn.Linear's is needed"


def _of_weights(operation: Operation) -> Iterator[str]:
    for name in ("weight", "bias"):
        value = getattr(operation, name, None)
        what = f"the {operation.word}'s {name}"
        if isinstance(value, fx.Node):
            yield f"{what} is computed at every call, a parameter is needed"
        elif isinstance(value, Tensor):
            yield from _of_weight(what, operation.stored[name].tensor)


def _of_weight(what: str, stored: Tensor) -> Iterator[str]:
    if not isinstance(stored, nn.Parameter):
        yield f"{what} is a buffer or a constant, a parameter is needed"
    elif type(stored.data) is not Tensor and not is_fake(stored):
        yield f"{what} is a {type(stored.data).__name__}, a plain tensor is needed"
    if not stored.is_floating_point():
        yield f"{what} is {dtype_name(stored.dtype)}, a floating point parameter is needed"


def _mixed(operations: list[Operation]) -> Iterator[str]:
    weights = [
        (op.word, op.weight) for op in operations if op.word in WEIGHTED and isinstance(op.weight, Tensor)
    ]
    if len({weight.dtype for _, weight in weights}) > 1:
        found = ", ".join(dict.fromkeys(f"{word} {dtype_name(weight.dtype)}" for word, weight in weights))
        yield f"the parameters are of several dtypes ({found}), a fused module has one"
    if len({weight.device for _, weight in weights}) > 1:
        found = ", ".join(dict.fromkeys(f"{word} on {weight.device}" for word, weight in weights))
        yield f"the parameters are on several devices ({found}), a fused module is on one"


def _read_elsewhere(match: Match) -> Iterator[str]:
    own = set(match.nodes)
    for node in () if any(isinstance(bound, tuple) for bound in match.bound.values()) else match.nodes[1:]:
        readers = sorted({_reader(user) for user in node.users if user not in own})
        if readers:
            word = getattr(node.target, "__name__", str(node.target))
            yield (
                f"the output of the {word} is also read by {', '.join(readers)}, the fused module does not "
                "hand it out"
            )


def _reader(user: fx.Node) -> str:
    return "the model's output" if user.op == "output" else getattr(user.target, "__name__", str(user.target))
