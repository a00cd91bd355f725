"""Capture a forward with dynamo: torch.fx graphs at the level of torch calls, guarded on all that the code
read."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from inspect import signature
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters
from torch._guards import CompileContext
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from te_transform.graph.fake import faked
from te_transform.graph.inputs import Inputs
from te_transform.graph.questions import guard_questions
from te_transform.graph.recompiles import Recompiles, module_of
from te_transform.graph.traceable import traceable_forms

log = logging.getLogger(__name__)

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

SETTINGS = {
    "specialize_float": True,  # else every eps and scale becomes an input of the graph
    "skip_nnmodule_hook_guards": False,  # else hooks that are added later are not seen
    # PyTorch 2.11 takes a module for unchanged while its dict is: keys that come into a dict which it holds,
    # attributes of its class and of its parameters, and another class of its own were not seen
    "use_recursive_dict_tags_for_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "skip_guards_on_constant_func_defaults": False,  # else default arguments that change are not seen
    # Dynamo counts by piece of code, which all layers of a class share, and all models of transformers. Each
    # layer may need graphs of its own: MOST_TRACED counts by module, Recompiles stops at values that change.
    "recompile_limit": sys.maxsize,
    "accumulated_recompile_limit": sys.maxsize,
    # for inference, and for export: parameters would be constants, or buffers, of the graph
    "prepare_freezing": False,
    "install_free_tensors": False,
    "use_numpy_random_stream": True,  # else it is PyTorch that draws what a forward draws with NumPy
    "optimize_ddp": False,  # a graph that runs eagerly needs no cuts at DDP's buckets
    "suppress_errors": True,  # code that dynamo fails on runs as it is
    "side_effect_replay_policy": "silent",  # else stack traces are written for a log, in 3% of the time
}
# What refers to a parameter weakly keeps module.to() from moving it where it is held in FP8 alone, until
# Python collects its garbage. Not every version that we run with has the setting.
if hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"):
    SETTINGS["invalidate_compile_context_weakrefs"] = True


# a piece of code, whether within torch.func.grad() or the like, and the id of the module
_Traced = tuple[CodeType, bool, int]
MOST_TRACED = 64  # graphs of a piece of code, for one module: guards may fail for ever
# Graphs of other functions do not count for a limit, nor do calls look through them (since PyTorch 2.13).
_ALONE = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
_NUMBERS = count(1)
_OWN = tuple(str(Path(__file__).parents[1] / folder) for folder in ("backends", "graph"))  # where ops are
_ours: ContextVar[bool] = ContextVar("_ours", default=False)  # in a capture of this file's


def capture(
    forward: Callable[..., Any],
    backend: Backend,
    leaves: Callable[[], bool] = lambda: False,
    dynamic: bool | None = None,
    reasons: dict[str, None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Callable[..., Any]:
    """`forward`, run through the callables that `backend` makes of its graphs.

    Args:
        forward: a function; which of its calls share a graph dynamo's guards decide.
        backend: called with each new graph and its example inputs; what it returns is called in the graph's
            place with dynamo off. What it raises is no reason for the forward to fail: that runs as it is.
        leaves: whether functions that are called now run as they are, where they would be captured for
            themselves because `forward` cannot be.
        dynamic: as torch.compile's: with False each size has a graph of its own.
        reasons: is told what dynamo says of code that it does not capture.
        tell: called with the reason when a call runs the user's own code because of a value that changes at
            each call; None: such calls are captured too.

    Returns:
        A function, whose `turned_off` is true once dynamo has given up on code that it was to trace: such
        code is never traced again.
    """
    for logger in _LOGGERS:
        logger.addFilter(_is_not_ours)  # once, however often
    times: Counter[_Traced] = Counter()
    recompiles = Recompiles(tell)
    context = torch._dynamo.optimize(backend, dynamic=dynamic, **_ALONE)
    forward, traced = _traceable(forward), context.callback

    # The callback runs only where a frame has to be traced: the settings hold for our captures and nobody
    # else's, and a call whose guards hold does not pay for them.
    @functools.wraps(traced)
    def trace_with_settings(frame: Any, *args: Any, **kwargs: Any) -> Any:
        # the ops' own backwards run here too, where a forward calls autograd between two graphs
        if leaves() or frame.f_code.co_filename.startswith(_OWN):
            return ConvertFrameReturn(apply_to_code=False)  # in this call alone, later ones ask again
        code, transformed = frame.f_code, _in_transform()
        key = code, transformed, id(module_of(frame))
        if times[key] >= MOST_TRACED:
            return _left(key, times)
        if (settings := recompiles.settings(frame)) is None:
            return _AS_IT_IS
        times[key] += 1
        before, run.turned_off = run.turned_off, True  # which it stays where tracing raises
        with _our_capture(settings), _noting(reasons):
            found = traced(frame, *args, **kwargs)
        recompiles.note(found, frame)
        run.turned_off = before or _gives_up(found, code, transformed)
        if found.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY:
            times[key] = MOST_TRACED
            return _left(key, times)
        if found.guarded_code is None and transformed:  # by its tensors: it would fail on them in each call
            times[key] = MOST_TRACED + 1
            return _AS_IT_IS
        # what a backend leaves is left in this call alone, too: PyTorch's own forwards share a code object
        return ConvertFrameReturn(apply_to_code=False) if leaves() else found

    context.callback = trace_with_settings
    run = context(forward)
    run.turned_off = False
    return run


@contextmanager
def _our_capture(settings: Mapping[str, Any]) -> Iterator[None]:
    """Trace with our settings and guards, in this thread alone.

    PyTorch 2.11 has one value of a setting for all threads: two that traced at once would each put back what
    they found, the later one the settings of the other.
    """
    token = _ours.set(True)
    try:
        patched = torch._dynamo.config.patch({**SETTINGS, **_left_out(), **settings})
        with compile_lock, patched, guard_questions(), traceable_forms():
            yield
    finally:
        _ours.reset(token)


# Code runs as it is in this call, with all that it calls. Where there are as many graphs as may be, dynamo
# would run others, whoever's they are: another model's, or those of one that is gone.
_AS_IT_IS = ConvertFrameReturn(
    frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False
)


def _gives_up(found: ConvertFrameReturn, code: CodeType, transformed: bool) -> bool:
    """Whether dynamo has failed on code that it was to trace, as PyTorch's own is not; in a transform it has
    failed on tensors."""
    return found.guarded_code is None and not transformed and not trace_rules.check(code)


def _in_transform() -> bool:
    """Whether a call is one within torch.func.grad() or the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _left(traced: _Traced, times: Counter[_Traced]) -> ConvertFrameReturn:
    """_AS_IT_IS for code that has reached its limit, which is said once."""
    if times[traced] == MOST_TRACED:
        times[traced] += 1
        code, *_ = traced
        where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        log.warning(
            "%s, %s, has as many graphs as it may have, one for each kind of calls: it runs as it is in "
            "calls of other kinds", where, code.co_qualname,
        )  # fmt: skip
    return _AS_IT_IS


def code_of(captured: fx.GraphModule) -> Callable[..., Any]:
    """What computes the graph, without the graph itself and all that it knows of its nodes."""
    _LazyGraphModule.force_recompile(captured)  # which prints it as code
    module = nn.Module()
    vars(module).update(
        {name: held for name, held in vars(captured).items() if name not in ("_graph", "meta")}
    )
    return MethodType(type(captured).forward, module)


# What dynamo logs of code that it does not capture: for inputs that do not fit, stack traces of 5,000 lines
# before the error that says so, and of a number that is read off a tensor, settings to change.
_LOGGERS = (
    logging.getLogger("torch._dynamo.convert_frame"),
    logging.getLogger("torch._dynamo.variables.tensor"),
    logging.getLogger("torch._subclasses.fake_tensor"),
)


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Whether a record of these loggers is shown. Those of our captures are not, whose reasons are in the
    report; they go to this file's logger as details, and everywhere if dynamo's logs were asked for."""
    if not _ours.get() or "TORCH_LOGS" in os.environ:
        return True
    log.debug("%s", record.getMessage(), exc_info=record.exc_info)
    return False


class _Methods(set[Callable[..., Any]]):
    """A set that is empty where it is copied: PyTorch 2.11 writes a copy of all settings as JSON at each
    capture, and where functions are among them it logs that it could not."""

    def __deepcopy__(self, memo: dict[int, Any]) -> set[Callable[..., Any]]:
        return set()


def _left_out() -> dict[str, _Methods]:
    """The setting of the methods of loggers that captured code leaves out, where others would end a graph:
    beside those that are set already the ones that log a sentence once, as GPT-2 does before its loss."""
    once = (method for name, method in vars(logging.Logger).items() if name.endswith("_once"))
    left_out = _Methods({*torch._dynamo.config.ignore_logging_functions, *once})
    return {"ignore_logging_functions": left_out}


def _traceable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that dynamo traces, whatever it has traced of others."""
    forward = _alone(forward)
    # PyTorch's own forwards dynamo traces within a function around them, which all of them share: where it
    # failed once, as with inputs that do not fit, it traces none of them again
    is_pytorchs = isinstance(forward, FunctionType) and trace_rules.check(forward)
    return _alone(wrap_inline(forward)) if is_pytorchs else forward


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function on a code object of its own.

    Dynamo keeps captures, and counts them for its limit, by code object, and which sizes vary by its name.
    Decorators give all that they decorate the same one: the forwards of all models of transformers would
    share a limit.
    """
    if not isinstance(function, FunctionType):
        return function
    name = f"{function.__code__.co_name}__converted_{next(_NUMBERS)}"
    alone = FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    alone.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(alone, function)


@contextmanager
def _noting(reasons: dict[str, None] | None) -> Iterator[None]:
    """Add what dynamo says meanwhile of code that it does not capture."""
    kinds = ("graph_break", "unimplemented")  # a piece between two graphs; else a function without any
    before = [Counter(counters[kind]) for kind in kinds]
    try:
        yield
    finally:
        said = [Counter(counters[kind]) - known for kind, known in zip(kinds, before, strict=True)]
        if reasons is not None:
            reasons |= dict.fromkeys(said[0] or said[1])


def is_switched_off() -> bool:
    """Whether somebody has told dynamo to leave all code as it is, in this process or for this while."""
    return torch._dynamo.config.disable or torch._dynamo.eval_frame._stance.stance == "force_eager"


def is_our_capture() -> bool:
    """Whether what is traced is traced for capture()."""
    return _ours.get()


def is_capturing() -> bool:
    """Whether somebody else is tracing this code: a compiler, an exporter, a jit."""
    by_jit = torch.jit.is_tracing() or torch.jit.is_scripting()
    return by_jit or is_compiling_here() or is_fx_symbolic_tracing()


def is_compiling_here() -> bool:
    """Whether this code is traced by a compiler or an exporter.

    PyTorch 2.13 says of all threads that they are compiled while one of them is; what it compiles is kept by
    thread.
    """
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return True
    return torch.compiler.is_compiling() and CompileContext.try_get() is not None


def ways_to_call(model: nn.Module) -> list[Callable[..., AbstractContextManager]]:
    """Without memory, and on the model's own tensors, where it has any, for code that looks at values."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    return [on_fake_tensors] if on_meta else [on_fake_tensors, _on_its_own_tensors]


@contextmanager
def _on_its_own_tensors(model: nn.Module, inputs: Inputs) -> Iterator[tuple[tuple, dict[str, Any]]]:
    yield inputs.clone()


@contextmanager
def on_fake_tensors(model: nn.Module, inputs: Inputs) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """The inputs as fake tensors, for a model whose parameters and buffers are fake too meanwhile.

    A forward then computes shapes and dtypes, in no time and no memory. A model on the meta device is taken
    for one on the CPU.
    """
    with faked(model, inputs.clone()) as arguments:
        yield arguments
