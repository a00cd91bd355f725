"""Capture a forward with dynamo: torch.fx graphs of torch calls, with guards on all values that were read."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from inspect import signature
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters
from torch._guards import CompileContext
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from te_transform.graph.context import set_to
from te_transform.graph.errors import in_full
from te_transform.graph.questions import guard_questions
from te_transform.graph.recompiles import Recompiles, module_in_frame
from te_transform.graph.traceable import traceable_forms
from te_transform.graph.traced_masks import makes_masks

log = logging.getLogger(__name__)

DynamoBackend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

SETTINGS = {
    "specialize_float": True,  # False makes every eps and scale a graph input
    "skip_nnmodule_hook_guards": False,  # True misses hooks that are added later
    # With these two settings, PyTorch 2.11 skips guards of a module while its __dict__ is unchanged. Dynamo
    # misses new keys in a dict attribute, changed attributes of class or parameters, and a changed class.
    "use_recursive_dict_tags_for_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "skip_guards_on_constant_func_defaults": False,  # True misses changed default arguments
    # Dynamo counts recompiles by code object, which all layers of a class share, and all models of
    # transformers. Each layer may need its own graphs. MOST_TRACED counts by module, and Recompiles limits
    # captures for changing values.
    "recompile_limit": sys.maxsize,
    "accumulated_recompile_limit": sys.maxsize,
    # settings for inference and export, which turn parameters into constants or buffers of the graph
    "prepare_freezing": False,
    "install_free_tensors": False,
    "use_numpy_random_stream": True,  # False replaces NumPy's random numbers by PyTorch's
    "optimize_ddp": False,  # eager graphs need no splits at DDP's buckets
    "suppress_errors": True,  # code that dynamo fails on runs unchanged
    "side_effect_replay_policy": "silent",  # other policies format stack traces for a log, 3% of the time
    "run_gc_after_compile": False,  # _garbage_collected() does this, after dynamo's last frame has ended
}
# Weak references to an FP8-only parameter prevent module.to() from moving the parameter, until garbage
# collection. Some supported PyTorch versions do not have this setting.
if hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"):
    SETTINGS["invalidate_compile_context_weakrefs"] = True
if hasattr(torch._dynamo.config, "record_runtime_overhead"):
    SETTINGS["record_runtime_overhead"] = False  # True calls two functions before each graph, for profilers


# the code object, True inside a torch.func transform such as grad(), and the id of the module
_Traced = tuple[CodeType, bool, int]
MOST_TRACED = 64  # graphs per code object and module, since guards may fail in every call
# Since PyTorch 2.13: graphs of other functions do not count for limits, and calls do not check their guards.
_ISOLATED = (
    {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
)
_CAPTURED, _capture_numbers = "__converted_", count(1)  # in names of functions that are captured
_OP_FOLDERS = tuple(
    str(Path(__file__).parents[1] / folder) for folder in ("backends", "graph")
)  # folders with ops
_ours: ContextVar[bool] = ContextVar("_ours", default=False)  # True during a capture()
_errors: ContextVar[list[str]] = ContextVar("_errors")  # internal errors of dynamo during a capture()


def capture(
    forward: Callable[..., Any],
    backend: DynamoBackend,
    leaves: Callable[[], bool] = lambda: False,
    dynamic: bool | None = None,
    reasons: dict[str, str] | None = None,
    tell: Callable[[str], None] | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[..., Any]:
    """Return a function that runs `forward` through the callables that `backend` returns for its graphs.

    Args:
        forward: a function; dynamo's guards decide which of its calls share a graph.
        backend: called with each new graph and its example inputs. The returned callable replaces the graph
            and runs with dynamo disabled. If the backend raises, the forward runs the original code.
        leaves: called for each frame that dynamo would trace; True if the frame runs the original code in
            this call. Dynamo may try functions inside `forward` if it cannot capture `forward` itself.
        dynamic: as in torch.compile: with False, each size has its own graph.
        reasons: receives dynamo's reasons for code that it does not capture, each with the function that it
            traced, the innermost one if several end for one reason.
        tell: called with the reason when a call runs the user's own code because a value changes with each
            call. None: such calls are captured too.
        within: returns a context for each trace.

    Returns:
        A function. Its `turned_off` is True after dynamo has failed on code of the user: dynamo never traces
        this code again.
    """
    for logger in _LOGGERS:
        logger.addFilter(_is_visible)  # repeated calls add the filter once
    times: Counter[_Traced] = Counter()
    recompiles = Recompiles(tell)
    context = torch._dynamo.optimize(backend, dynamic=dynamic, **_ISOLATED)
    forward, traced = _traceable(forward), context.callback

    # The callback runs only for frames that dynamo must trace. The settings therefore apply only to these
    # captures, and calls with passing guards have no overhead.
    @functools.wraps(traced)
    def trace_with_settings(frame: Any, *args: Any, **kwargs: Any) -> Any:
        # also reached by the backward of an op, if a forward calls autograd between two graphs
        if leaves() or frame.f_code.co_filename.startswith(_OP_FOLDERS):
            return ConvertFrameReturn(apply_to_code=False)  # only this call; later calls ask again
        code, transformed = frame.f_code, torch._C._functorch.peek_interpreter_stack() is not None
        key = code, transformed, id(module_in_frame(frame))
        if times[key] >= MOST_TRACED:
            return _run_original_at_limit(key, times)
        if makes_masks(frame.f_code) or (settings := recompiles.settings(frame)) is None:
            return _RUN_ORIGINAL
        times[key] += 1
        before, run.turned_off = run.turned_off, True  # stays True if tracing raises
        with _our_capture(settings), _noting(reasons, code), within():
            converted = traced(frame, *args, **kwargs)
        recompiles.note(converted, frame)
        run.turned_off = before or _gives_up(converted, code, transformed)
        if converted.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY:
            times[key] = MOST_TRACED
            return _run_original_at_limit(key, times)
        if converted.guarded_code is None and transformed:  # every call fails on the transform's tensors
            times[key] = MOST_TRACED + 1
            return _RUN_ORIGINAL
        # a backend may also set `leaves`, only for this call: PyTorch's own forwards share a code object
        return ConvertFrameReturn(apply_to_code=False) if leaves() else converted

    context.callback = trace_with_settings
    run = context(forward)
    run.turned_off = False
    return run


@contextmanager
def _our_capture(settings: Mapping[str, Any]) -> Iterator[None]:
    """Trace with this file's settings and guards, in one thread at a time.

    PyTorch 2.11 shares settings between threads. If two threads traced at once, one of them would restore the
    temporary settings of the other.
    """
    patched = torch._dynamo.config.patch({**SETTINGS, **_ignored_logging(), **settings})
    without_warnings = patch.object(torch._dynamo.utils, "warn_once", log.debug)
    with (
        set_to(_ours, True), compile_lock, _garbage_collected(), patched, without_warnings,
        guard_questions(), traceable_forms(),
    ):  # fmt: skip
        yield


@contextmanager
def _garbage_collected() -> Iterator[None]:
    """Free the garbage of a capture at its end.

    An exception that dynamo catches is in a reference cycle with its frames. These frames hold the frames of
    the caller, the outputs among their variables, and thus the gradient accumulators of the parameters. A
    parameter that later gets another shape through `.data` would keep the accumulator of its earlier shape.
    Without collections in between, the youngest generation contains all garbage of the capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


# The frame and all functions that it calls run the original code in this call. SKIP is needed at the graph
# limit: dynamo would otherwise run existing graphs of other models, or of deleted models.
_RUN_ORIGINAL = ConvertFrameReturn(
    frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False
)


def _gives_up(traced: ConvertFrameReturn, code: CodeType, transformed: bool) -> bool:
    """Return True if dynamo has failed on code of the user.

    PyTorch's own code does not count. Failures inside a transform do not count: they depend on the tensors.
    """
    return traced.guarded_code is None and not transformed and not trace_rules.check(code)


def _run_original_at_limit(traced: _Traced, times: Counter[_Traced]) -> ConvertFrameReturn:
    """Return _RUN_ORIGINAL for code that has reached its limit, and log a warning once."""
    if times[traced] == MOST_TRACED:
        times[traced] += 1
        code, *_ = traced
        where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        log.warning(
            "%s, %s, has reached its limit of graphs: calls without a matching graph run the original code",
            where, code.co_qualname,
        )  # fmt: skip
    return _RUN_ORIGINAL


def code_of(captured: fx.GraphModule) -> Callable[..., Any]:
    """Return the generated forward of a graph module, without the graph and its metadata."""
    _LazyGraphModule.force_recompile(captured)  # generates the code
    module = nn.Module()
    vars(module).update(
        {name: attribute for name, attribute in vars(captured).items() if name not in ("_graph", "meta")}
    )
    return MethodType(type(captured).forward, module)


# Loggers of dynamo for code that it does not capture, and for guards that it cannot build. For inputs with
# wrong shapes, dynamo logs stack traces of 5,000 lines before the error. For item() calls, it logs advice to
# change settings.
_LOGGERS = (
    logging.getLogger("torch._dynamo.convert_frame"),
    logging.getLogger("torch._dynamo.variables.tensor"),
    logging.getLogger("torch._subclasses.fake_tensor"),
    logging.getLogger("torch._guards"),
)


def _is_visible(record: logging.LogRecord) -> bool:
    """Return True if a log record does not come from a capture(), or TORCH_LOGS is set.

    Reasons of captures are in the report. Their records go to this file's logger at the debug level.
    """
    if not _ours.get() or "TORCH_LOGS" in os.environ:
        return True
    log.debug("%s", record.getMessage(), exc_info=record.exc_info)
    error = record.exc_info and record.exc_info[1]
    if error and not isinstance(error, TorchDynamoException):  # those are counted, or come from a backend
        _errors.get().append(in_full(error))
    return False


class _Methods(set[Callable[..., Any]]):
    """A set whose deep copy is empty.

    PyTorch 2.11 writes a copy of all settings as JSON at each capture, and logs a failure for functions.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> set[Callable[..., Any]]:
        return set()


def _ignored_logging() -> dict[str, _Methods]:
    """Return the setting of logging methods that dynamo ignores; other methods cause graph breaks.

    It adds methods that log a message once, such as warning_once(), which GPT-2 calls before its loss.
    """
    once = (method for name, method in vars(logging.Logger).items() if name.endswith("_once"))
    left_out = _Methods({*torch._dynamo.config.ignore_logging_functions, *once})
    return {"ignore_logging_functions": left_out}


def _traceable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that dynamo traces independently of other forwards."""
    forward = _with_own_code(forward)
    # Dynamo traces PyTorch's own forwards inside a shared wrapper function. After one failure, for example on
    # inputs with wrong shapes, dynamo would trace none of them again.
    is_pytorchs = isinstance(forward, FunctionType) and trace_rules.check(forward)
    return _with_own_code(wrap_inline(forward)) if is_pytorchs else forward


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of the function with its own code object and name.

    Dynamo stores and counts captures by code object, and records dynamic sizes by its name. A decorator's
    wrappers share one code object: the forwards of all models of transformers would share a limit.
    """
    if not isinstance(function, FunctionType):
        return function
    name = f"{function.__code__.co_name}{_CAPTURED}{next(_capture_numbers)}"
    alone = FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    alone.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(alone, function)


@contextmanager
def _noting(reasons: dict[str, str] | None, code: CodeType) -> Iterator[None]:
    """Add dynamo's reasons from this context for code that it does not capture to `reasons`."""
    kinds = ("graph_break", "unimplemented")  # for code between two graphs; for functions without a graph
    before = [Counter(counters[kind]) for kind in kinds]
    errors: list[str] = []
    try:
        with set_to(_errors, errors):
            yield
    finally:
        said = [Counter(counters[kind]) - known for kind, known in zip(kinds, before, strict=True)]
        if reasons is not None:
            name = code.co_name.partition(_CAPTURED)[0]
            place = f"{name}() at {Path(code.co_filename).name}:{code.co_firstlineno}"
            reasons |= dict.fromkeys(said[0] or said[1] or errors, place)


def is_switched_off() -> bool:
    """Return True if dynamo is disabled, by its config or by torch.compiler.set_stance("force_eager")."""
    return torch._dynamo.config.disable or torch._dynamo.eval_frame._stance.stance == "force_eager"


def is_our_capture() -> bool:
    """Return True during a capture() of this file."""
    return _ours.get()


def is_capturing() -> bool:
    """Return True if a compiler, an exporter, torch.jit or torch.fx traces this code."""
    return is_compiling_here() or torch.jit.is_tracing() or is_fx_symbolic_tracing()


def is_compiling_here() -> bool:
    """Return True if a compiler or an exporter traces this code in this thread.

    In PyTorch 2.13, torch.compiler.is_compiling() is True in all threads while one thread compiles. The
    CompileContext is per thread.
    """
    if not torch.compiler.is_compiling():
        return False
    known = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
    return known or CompileContext.try_get() is not None
