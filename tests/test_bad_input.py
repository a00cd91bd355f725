"""Invalid arguments of convert() raise an error with a sentence, and change nothing."""

import logging
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import weight_norm
from torch.utils.data import DataLoader

import te_transform
from te_transform import BackendError, InputError, ModelError, OptionError, TraceError
from te_transform.rules import Call, OneOf
from tests.bitwise import untouched
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import CASES, seeded

X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def tiny() -> nn.Module:
    return seeded(Tiny)


class Counts(nn.Module):
    """Draws random numbers of every kind, counts its calls, and then fails."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += random.random() + numpy.random.rand() + torch.rand(1)
        raise RuntimeError("no forward today")


# What is given as the model


def not_a_model(what: object) -> Callable[[], object]:
    return lambda: what


def with_part(
    change: Callable[[nn.Module], object], make: Callable[[], nn.Module] = tiny
) -> Callable[[], nn.Module]:
    def changed() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
            result = change(model)
        return result if isinstance(result, nn.Module) else model

    return changed


def scripted_part() -> nn.Module:
    return nn.Sequential(tiny(), torch.jit.script(nn.Linear(WIDTH, WIDTH)))


def lazy() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(nn.LazyLinear(WIDTH), tiny())


def lazy_buffers() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d(affine=False))


def compile_block(model: nn.Module) -> None:
    model.blocks[0].compile()


def compile_forward(model: nn.Module) -> None:
    model.forward = torch.compile(model.forward)


MODELS = {
    "None": (
        not_a_model(None),
        "(), got a NoneType; pass the model itself",
    ),
    "a class": (not_a_model(nn.Linear), "(), got a type; pass the model itself"),
    "a state dict": (
        lambda: tiny().state_dict(),
        "(), got a OrderedDict; pass the model itself",
    ),
    "no parameters": (
        nn.ReLU,
        "expected a model with parameters, got a ReLU without; pass a model with weights",
    ),
    "scripted": (
        lambda: torch.jit.script(tiny()),
        "expected a Python module, got a ScriptModule: RecursiveScriptModule; convert before "
        "torch.jit.script",
    ),
    "traced": (
        lambda: torch.jit.trace(tiny(), X),
        "expected a Python module, got a ScriptModule: TopLevelTracedModule",
    ),
    "scripted part": (
        scripted_part,
        "expected a Python module, got a ScriptModule: its part 1 (RecursiveScriptModule)",
    ),
    "exported": (
        lambda: torch.export.export(tiny(), (X,)).module(),
        "expected a Python module, got a module of torch.export: GraphModule; convert the module that was "
        "exported",
    ),
    "unflattened": (
        lambda: torch.export.unflatten(torch.export.export(tiny(), (X,))),
        "expected a Python module, got a module of torch.export: UnflattenedModule",
    ),
    "lazy": (
        lazy,
        "expected tensors with shapes, got a Sequential with lazy ones; run it once on real inputs",
    ),
    "lazy buffers": (lazy_buffers, "expected tensors with shapes, got a Sequential with lazy ones"),
    "no forward": (
        lambda: nn.ModuleList([tiny()]),
        "expected a model with a forward, got a ModuleList without",
    ),
    "converted": (
        lambda: te_transform.convert(tiny(), X, verify=False),
        "expected an original model, got a converted Tiny; call te_transform.revert() first",
    ),
    "part converted": (
        lambda: nn.Sequential(te_transform.convert(tiny(), X, verify=False)),
        "expected an original model, got a converted Sequential",
    ),
    "torch.compile": (
        lambda: torch.compile(tiny()),
        "expected a plain module, got a compiled one: OptimizedModule; convert _orig_mod with compile=True",
    ),
    "torch.compile of a part": (
        lambda: nn.Sequential(torch.compile(tiny())),
        "expected a plain module, got a compiled one: its part 0 (OptimizedModule)",
    ),
    "compile()": (
        with_part(lambda model: model.compile()),
        "expected an uncompiled module, got a compiled one: Tiny; do not compile it, and convert it with "
        "compile=True",
    ),
    "compile() of a part": (
        with_part(compile_block),
        "expected an uncompiled module, got a compiled one: its part blocks.0 (Block)",
    ),
    "torch.compile of forward": (
        with_part(compile_forward),
        "expected an uncompiled module, got a compiled one: Tiny",
    ),
    "DataParallel": (
        lambda: nn.DataParallel(tiny()),
        "expected the plain model, got a model wrapped by DataParallel; convert first, then wrap",
    ),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_errors_name_models_that_are_no_plain_modules(name: str, inplace: bool):
    make, sentence = MODELS[name]
    model = make()
    with untouched(model if isinstance(model, nn.Module) else nn.Module()):
        for entry in (te_transform.inspect, te_transform.convert):
            with pytest.raises(ModelError) as raised:
                entry(model, X, inplace=inplace)
            assert sentence in str(raised.value)


def test_modules_without_the_base_class_s_init_are_named() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            self.factor = 2.0

    for entry in (te_transform.inspect, te_transform.convert, te_transform.profile):
        with pytest.raises(ModelError, match=r"got its part 1 \(Scale\), whose __init__ does not call super"):
            entry(nn.Sequential(tiny(), Scale()), X)


OTHERS: dict[str, Callable[[object], object]] = {
    "inspect": lambda model: te_transform.inspect(model, X),
    "trace": lambda model: te_transform.trace(model, X),
    "revert": te_transform.revert,
    "quantize_weights": te_transform.quantize_weights,
    "scaling_state": te_transform.scaling_state,
    "load_scaling_state": lambda model: te_transform.load_scaling_state(model, {}),
    "accumulate": lambda model: te_transform.accumulate(model, steps=2).__enter__(),
}


@pytest.mark.parametrize("what", [None, "gpt2", nn.Linear, {}], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_name_arguments_that_are_no_models(name: str, what: object):
    with pytest.raises(ModelError) as raised:
        OTHERS[name](what)
    assert str(raised.value) == (
        f"expected a torch.nn.Module for {name}(), got a {type(what).__name__}; pass the model itself"
    )


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    return fully_shard(model, mesh=mesh)


def fsdp2_part(model: nn.Module) -> nn.Module:
    fsdp2(model.blocks[0])
    return model


WRAPPERS = {
    ddp: "DistributedDataParallel",
    fsdp1: "FullyShardedDataParallel",
    fsdp2: "fully_shard (FSDP2)",
    fsdp2_part: "fully_shard (FSDP2)",
}


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_a_wrapped_model_is_named(wrap: Callable, process_group: None):
    model = wrap(tiny())
    sentence = f"expected the plain model, got a model wrapped by {WRAPPERS[wrap]}; convert first, then wrap"
    with pytest.raises(ModelError) as raised:
        te_transform.convert(model, X)
    assert str(raised.value) == sentence


def test_a_converted_model_that_is_wrapped_is_named(process_group: None):
    model, converted = tiny(), te_transform.convert(tiny(), X)
    wrapped = ddp(converted)
    with pytest.raises(
        ValueError, match=r"as the second model, got one wrapped by Dist.*; pass its \.module"
    ):
        te_transform.verify(model, wrapped, X)
    with pytest.raises(ModelError, match=r"returned by te_transform\.convert\(\), got .*; pass its \.module"):
        te_transform.report(wrapped)
    with pytest.raises(
        te_transform.RanksError, match=r"expected a process group or None \(for all\) for group, got a str"
    ):
        te_transform.check_ranks(converted, group="gloo")
    te_transform.check_ranks(converted, group=torch.distributed.group.WORLD)


def test_a_model_that_cannot_be_copied_asks_for_inplace():
    model = with_part(lambda model: weight_norm(model.head) and None)()
    with (
        untouched(model),
        pytest.raises(
            ModelError,
            match=r"^expected a model that can be copied, .* got a Tiny that cannot .*; pass inplace=True$",
        ),
    ):
        te_transform.convert(model, X)
    assert te_transform.convert(model, X, inplace=True) is model
    te_transform.report(model).expect(layernorm_mlp=1)


class Slotted(nn.Module):
    """PyTorch copies a module's __dict__ alone."""

    __slots__ = ("scale",)

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_a_copy_that_lacks_what_the_forward_reads_asks_for_inplace():
    model = Slotted()
    with untouched(model), pytest.raises(ModelError) as raised:
        te_transform.convert(model, X)
    assert str(raised.value) == (
        "expected a copy that runs like the original, got AttributeError: 'Slotted' object has no attribute "
        "'scale' from the copy of Slotted: copy.deepcopy() leaves out what the forward reads, such as "
        "__slots__; pass inplace=True"
    )
    expected = model(X)
    assert torch.equal(te_transform.convert(model, X, inplace=True)(X), expected)


class Writes(nn.Module):
    """Writes to its parameter, its buffer and an attribute, and then fails."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight += 1
        self.seen += 1
        self.calls += 1
        raise RuntimeError("no forward today")


def test_a_forward_that_writes_and_fails_leaves_the_original_as_it_was():
    model = Writes()
    with untouched(model), pytest.raises(TraceError, match="no forward today"):
        te_transform.convert(model, X)


class Final(nn.Module):
    """A class that nobody may derive from."""

    error: type[Exception] = TypeError

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __init_subclass__(cls, **options: object) -> None:
        raise cls.error("Final is final")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("error", [TypeError, KeyError])
def test_a_class_that_takes_no_subclass_is_named(
    inplace: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Final, "error", error)  # of a registry, which knows the name already
    model = Final()
    sentence = "expected a class that can be subclassed, got Final"
    with untouched(model), pytest.raises(ModelError, match=sentence):
        te_transform.convert(model, X, inplace=inplace)
    converted = te_transform.convert(nn.Sequential(nn.LayerNorm(WIDTH), model), X)
    te_transform.report(converted).expect(layernorm_linear=1)


class Sum(nn.Module):
    """A model with two arguments."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(self.norm(x)) + y


# What is given as inputs

INPUTS = {
    "a list for a tuple": (
        Sum,
        [X, X],
        InputError,
        "expected a tuple with the arguments of one call, got a list of 2 samples, and the forward takes as "
        "many arguments; pass tuple(example_inputs)",
    ),
    "a string": (
        tiny,
        "x",
        InputError,
        "expected example_inputs to be a tensor, a tuple (args), a dict (kwargs) or a list of these, "
        "got str; ",
    ),
    "a number": (tiny, 3, InputError, "a tuple (args), a dict (kwargs) or a list of these, got int; "),
    "a set": (tiny, {1}, InputError, "a tuple (args), a dict (kwargs) or a list of these, got set; "),
    "a loader": (
        tiny,
        DataLoader([X, X]),
        InputError,
        "a list of these, got DataLoader; pass one of its batches, next(iter(loader))",
    ),
    "an empty list": (
        tiny,
        [],
        InputError,
        "expected at least one sample in example_inputs, got an empty list; pass a tensor, tuple or dict",
    ),
    "a list of None": (
        tiny,
        [None],
        InputError,
        "expected example_inputs to be a tensor, a tuple (args), a dict (kwargs) or a list of these, "
        "got NoneType; pass None itself to generate inputs",
    ),
    "an iterator": (
        tiny,
        iter([X]),
        InputError,
        "a list of these, got list_iterator; pass its first item, next(...)",
    ),
    "lists of a tokenizer": (
        tiny,
        {"x": [[1, 2], [3, 4]]},
        TraceError,
        "The inputs have lists or arrays; pass tensors: tokenizer(text, return_tensors='pt').",
    ),
    "an empty tuple": (tiny, (), TraceError, "Tiny failed on the example inputs (none): TypeError:"),
    "another name": (
        tiny,
        {"y": X},
        TraceError,
        "Tiny failed on the example inputs (y=float32[2, 5, 16]): TypeError:",
    ),
    "another shape": (
        tiny,
        X[..., :7],
        TraceError,
        "Tiny failed on the example inputs (float32[2, 5, 7]): RuntimeError:",
    ),
    "another dtype": (
        tiny,
        X.long(),
        TraceError,
        "Tiny failed on the example inputs (int64[2, 5, 16]): RuntimeError:",
    ),
    "a string in a tuple": (tiny, ("x",), TraceError, "Tiny failed on the example inputs ('x'): TypeError:"),
    "a meta tensor": (
        tiny,
        X.to("meta"),
        TraceError,
        "call accepts. The model is on cpu, but the inputs are on meta.",
    ),
    "a failing forward": (
        Counts,
        X,
        TraceError,
        "RuntimeError: no forward today\nPass example_inputs that a plain",
    ),
    "mixed dtypes": (
        with_part(lambda model: model.norm.double() and None),
        X,
        TraceError,
        "Tiny failed on the example inputs (float32[2, 5, 16]): RuntimeError:",
    ),
}


UNSEEN = ("a meta tensor", "mixed dtypes")  # on fake tensors, which is all that inspect() has


class Records(logging.Handler):
    """Whose loggers have said something."""

    def __init__(self, level: int):
        super().__init__(level)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.name)


@pytest.mark.parametrize("asked", [False, True])
def test_inputs_that_do_not_fit_are_told_in_a_sentence(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dynamo's stack traces, but where its logs were asked for."""
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    if asked:
        monkeypatch.setenv("TORCH_LOGS", "dynamo")
    dynamos, ours = Records(logging.WARNING), Records(logging.DEBUG)
    places = {"torch._dynamo": dynamos, "torch._subclasses": dynamos, "te_transform.graph.capture": ours}
    for name, handler in places.items():
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
    log = logging.getLogger("te_transform.graph.capture")
    log.setLevel(logging.DEBUG)
    try:
        with pytest.raises(TraceError, match="failed on the example inputs"):
            te_transform.convert(seeded(Tiny), torch.zeros(2, 3, WIDTH + 1))
    finally:
        log.setLevel(logging.NOTSET)
    assert bool(dynamos.seen) == asked
    assert bool(ours.seen) != asked


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_the_model_refuses_are_named(name: str, inplace: bool):
    make, given, kind, sentence = INPUTS[name]
    model = seeded(make) if isinstance(make, type) else make()
    with untouched(model):
        alone = name in UNSEEN or inplace  # which inspect() does not differ in
        for entry in (te_transform.convert,) if alone else (te_transform.inspect, te_transform.convert):
            with pytest.raises(kind) as raised:
                entry(model, given, inplace=inplace)
            assert sentence in str(raised.value)


def test_a_later_sample_that_the_model_refuses_is_named():
    model = tiny()
    for inplace in (False, True):
        with (
            untouched(model, storages=False),
            pytest.raises(TraceError, match=r"Tiny failed on the example inputs \(float32\[2, 5, 7\]\)"),
        ):
            te_transform.convert(model, [X, X[..., :7]], inplace=inplace)


def test_inventing_inputs_draws_no_random_numbers():
    gpt2, vit = CASES["gpt2"].build(n_layer=1), CASES["vit"].build(num_hidden_layers=1)
    for model in (gpt2, vit, nn.Sequential(nn.Linear(4, 4))):
        with untouched(model):
            te_transform.convert(model, verify=False)


# What is given as options

OPTIONS = {
    "backend": ({"backend": "foo"}, OptionError, "expected backend 'auto', 'te' or 'torch', got 'foo'"),
    "no backend": ({"backend": None}, OptionError, "expected backend 'auto', 'te' or 'torch', got None"),
    "recipe": (
        {"recipe": "fp8"},
        OptionError,
        "expected None, a TE recipe or one of fp8-delayed, fp8-delayed-fast, fp8-current, fp8-current-fast, "
        "fp8-block, mxfp8 for recipe, got 'fp8'",
    ),
    "recipe on torch": (
        {"recipe": "fp8-delayed", "backend": "torch"},
        OptionError,
        "expected backend 'te' for the recipe 'fp8-delayed', got backend 'torch', as asked; ",
    ),
    "skip": (
        {"skip": 3},
        OptionError,
        "expected module paths or globs such as 'model.layers.0*' for skip, got 3",
    ),
    "skip of nothing": (
        {"skip": ["no.such.module"]},
        OptionError,
        "in skip, got 'no.such.module', which names no module of",
    ),
    "skip of numbers": (
        {"skip": ["a", 3]},
        OptionError,
        "module paths or globs such as 'model.layers.0*' in skip, got 3",
    ),
    "an empty skip": (
        {"skip": ""},
        OptionError,
        "module paths or globs such as 'model.layers.0*' in skip, got ''",
    ),
    "compile": (
        {"compile": "fast"},
        OptionError,
        "expected a bool or one of default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs, auto "
        "for compile, got 'fast'",
    ),
    "compile number": ({"compile": 1}, OptionError, "auto for compile, got 1"),
    "passes": (
        {"passes": 3},
        OptionError,
        "expected a tuple of te_transform.Rule objects for passes, such as PIPELINE, got 3",
    ),
    "a name as passes": (
        {"passes": "linear"},
        OptionError,
        "a tuple of te_transform.Rule objects for passes, such as PIPELINE, got 'linear'",
    ),
    "a non-rule": (
        {"passes": ["linear"]},
        OptionError,
        "as in te_transform.PIPELINE, got 'linear'",
    ),
    "a rule's module": (
        {"passes": [te_transform.passes.linear]},
        OptionError,
        "expected te_transform.Rule objects in passes, as in te_transform.PIPELINE, got ",
    ),
    "approximate": ({"approximate": "yes"}, OptionError, "expected True or False for approximate, got 'yes'"),
    "verify": ({"verify": 1e-3}, OptionError, "expected True or False for verify, got 0.001"),
    "inplace": ({"inplace": None}, OptionError, "expected True or False for inplace, got None"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_checked_first(name: str):
    options, kind, sentence = OPTIONS[name]
    model = seeded(Counts)
    with untouched(model):
        for entry in (te_transform.inspect, te_transform.convert):
            with pytest.raises(kind) as raised:
                entry(model, X, **options)
            assert sentence in str(raised.value)


def test_a_misspelled_option_is_named():
    known = "backend, passes, recipe, skip, approximate, pad_vocabulary, chunked_loss, compile, graphs"
    with pytest.raises(OptionError) as raised:
        te_transform.inspect(tiny(), X, recpie="fp8-delayed")
    needed = f"expected one of the options {known}, inplace, verify, got 'recpie'"
    assert str(raised.value) == f"{needed}; did you mean 'recipe'?"


MISSPELLED = {
    "convert": (te_transform.convert, {"verfy": True}, "; did you mean 'verify'?"),
    "parallelize": (te_transform.parallelize, {"meshes": None}, "; did you mean 'mesh'?"),
    "verify": (te_transform.verify, {"example_input": X}, "; did you mean 'example_inputs'?"),
    "trace": (te_transform.trace, {"trian": False}, "; did you mean 'train'?"),
    "accumulate": (te_transform.accumulate, {"step": 2}, "; did you mean 'steps'?"),
    "check_ranks": (te_transform.check_ranks, {"groups": None}, "; did you mean 'group'?"),
    "unlike all": (te_transform.convert, {"zzz": 1}, ""),
}


@pytest.mark.parametrize("name", MISSPELLED)
def test_a_misspelled_argument_gets_a_suggestion(name: str):
    function, arguments, suggestion = MISSPELLED[name]
    (unknown,) = arguments
    with pytest.raises(TypeError) as raised:
        function(tiny(), **arguments)
    said = f"{function.__name__}() got an unexpected keyword argument {unknown!r}{suggestion}"
    assert str(raised.value) == said


def test_a_model_that_is_not_converted_is_not_reverted():
    model = tiny()
    why = "expected a converted model, got an unconverted (Tiny|Sequential); pass what te_transform.convert"
    with untouched(model), pytest.raises(ModelError, match=why):
        te_transform.revert(model)
    converted = te_transform.convert(model, X, verify=False)
    wrapper = nn.Sequential(converted)
    te_transform.revert(wrapper)
    for reverted in (wrapper, converted):
        with pytest.raises(ModelError, match=why):
            te_transform.revert(reverted)


def test_errors_of_a_captured_forward_leave_out_the_graph():
    with pytest.raises(TraceError) as raised:
        te_transform.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), X.long())
    assert str(raised.value) == (
        "Sequential failed on the example inputs (int64[2, 5, 16]): RuntimeError: mat1 and mat2 must have "
        "the same dtype, but got Long and Float\nPass example_inputs that a plain model(...) call accepts."
    )


def test_a_backend_that_is_not_there_says_what_is_missing():
    from te_transform.backends import choose

    try:
        choose("te", tiny())
    except BackendError:
        with pytest.raises(
            BackendError, match=r"backend 'te', got none: .*; choose backend 'torch' or 'auto'"
        ):
            te_transform.convert(tiny(), X, backend="te")


def test_errors_tell_how_to_make_an_input_a_tensor():
    for given in (numpy.zeros((2, 8)), [1, 2], [[1, 2]]):
        with pytest.raises(InputError, match=r"tensor with a batch dimension, torch\.as_tensor\(\.\.\.\)"):
            te_transform.convert(tiny(), given)
    with pytest.raises(InputError, match=r"tokenizer\(text, return_tensors='pt'\)"):
        te_transform.convert(tiny(), "a sentence")


def test_trace_of_a_compiled_model_or_in_no_mode_is_refused():
    with pytest.raises(ModelError, match=r"expected a plain module, got a compiled .*; trace its _orig_mod"):
        te_transform.trace(torch.compile(tiny()), X)
    with pytest.raises(OptionError, match="expected True or False for train, got 'no'"):
        te_transform.trace(tiny(), X, train="no")


def test_the_report_of_a_wrapper_is_that_of_its_part():
    converted = te_transform.convert(tiny(), X, verify=False)
    with pytest.raises(ModelError, match=r"got a Sequential without report; pass its \.0"):
        te_transform.report(nn.Sequential(converted))
    with pytest.raises(TypeError, match="expected an integer for linear, got '1'; pass the number of sites"):
        te_transform.report(converted).expect(linear="1")


def test_rules_that_are_none_are_refused_and_those_that_ask_too_much_are_named():
    linear = te_transform.PIPELINE[-2]
    assert linear.name == "linear"
    wrong = {"name": "", "pattern": None, "refuse": None, "build": None, "reads": "x", "hands_out": "x"}
    for field, value in wrong.items():
        with pytest.raises(OptionError, match=f"expected .* for {field} of the rule .*, got "):
            te_transform.convert(tiny(), X, passes=(replace(linear, **{field: value}),))
    for refuse, told in {
        lambda lin: (): "got 'lin'; give a default to roles of only some alternatives",
        lambda: "no": "expected an iterator of reasons from refuse() of the rule 'linear', got 'no'",
        lambda: [3]: "expected sentences from refuse() of the rule 'linear', got 3",
        lambda: (
            1 / 0
        ): "expected reasons from refuse() of the rule 'linear', got ZeroDivisionError: division by zero",
        lambda: (
            1 / 0 for _ in "x"
        ): "expected reasons from refuse() of the rule 'linear', got ZeroDivisionError: division by zero",
    }.items():
        assert_told(replace(linear, refuse=refuse), told)
    assert_told(
        replace(linear, build=lambda: 3), "expected a FusedOp from build() of the rule 'linear', got 3"
    )
    assert_told(
        replace(linear, build=lambda: 1 / 0),
        "expected a FusedOp from build() of the rule 'linear', got ZeroDivisionError: division by zero",
    )


def assert_told(rule: te_transform.Rule, told: str) -> None:
    """Check that the report names the rule whose graph runs as captured."""
    notes = te_transform.report(te_transform.convert(tiny(), X, passes=(rule,))).notes
    assert any("the rule 'linear'" in note and told in note for note in notes), notes


def test_names_of_a_rule_must_be_in_its_pattern():
    linear = te_transform.PIPELINE[-2]
    for changes, told in {
        (
            "reads",
            ("lin.weight",),
        ): "in reads of the rule 'linear', got 'lin'",
        (
            "reads",
            ("linear.wieght",),
        ): "arguments of 'linear' (x, weight, bias) in reads of the rule 'linear', got 'linear.wieght'",
        (
            "hands_out",
            ("loss",),
        ): "in hands_out of the rule 'linear', got 'loss'",
        (
            "pattern",
            Call(nn.Linear, role="linear"),
        ): "in the pattern of the rule 'linear', got <class 'torch.nn.modules.linear.Linear'>",
        (
            "pattern",
            OneOf(Call("linear", role="linear")),
        ): "in the pattern of the rule 'linear', got 'linear'",
    }.items():
        with pytest.raises(OptionError, match=re.escape(told)):
            te_transform.convert(tiny(), X, passes=(replace(linear, **dict([changes])),))


def test_a_pattern_that_is_written_as_models_are_is_named():
    linear = te_transform.PIPELINE[-2]
    for function in (F.linear, F.scaled_dot_product_attention):
        rule = replace(linear, name="mine", pattern=Call(function, role="linear"), reads=())
        notes = te_transform.inspect(tiny(), X, passes=(rule, *te_transform.PIPELINE)).notes
        op = "linear" if function is F.linear else "sdpa"
        assert any(f"rule 'mine': patterns match ops.{op}, not {function.__name__};" in n for n in notes)
    assert not any("nothing resembles" in note for note in te_transform.inspect(tiny(), X).notes)
