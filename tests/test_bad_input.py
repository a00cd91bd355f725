"""What convert() cannot take, or takes in part, is named in a sentence; nothing else happens."""

import copy
import random
import warnings
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import te_transform
from te_transform import BackendError, InputError, ModelError, OptionError, TraceError
from tests.bitwise import untouched
from tests.models.tiny import MLP, WIDTH, Attention, Tiny
from tests.zoo import CASES, seeded

X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))

# What these expect was written for the core before dynamo's, or is not met by this one yet: each has to be
# looked at, and either its expectation or the code changed.
NOT_PORTED = {
    "test_a_model_that_cannot_be_copied_asks_for_inplace",
    "test_inputs_that_the_model_refuses_are_named[a meta tensor-False]",
    "test_inputs_that_the_model_refuses_are_named[a meta tensor-True]",
    "test_inputs_that_the_model_refuses_are_named[mixed dtypes-False]",
    "test_inputs_that_the_model_refuses_are_named[mixed dtypes-True]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[forward hook]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[forward pre-hook]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[backward hook]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[backward pre-hook]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[weight_norm]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[orthogonal]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[old spectral_norm]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[LoRA subclass]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[int8]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[complex]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[integer]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[a buffer]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[norm used twice]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[shared linear]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[tied weights]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[frozen weight]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[frozen bias]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[two devices]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[siblings on two devices]",
    "test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right[a child called fused]",
    "test_a_module_entered_again_is_left_alone",
    "test_lora_by_hand_keeps_its_frozen_base",
    "test_a_model_on_meta_is_converted_without_numbers",
    "test_a_cast_between_norm_and_linear_is_no_fusion",
    "test_siblings_and_an_mlp_in_one_forward_are_both_fused",
    "test_a_tie_across_layers_survives",
    "test_a_class_that_takes_no_subclass_is_refused[Final-Final]",
    "test_a_class_that_takes_no_subclass_is_refused[Linear-FinalMLP]",
}


@pytest.fixture(autouse=True)
def _not_ported_yet(request: pytest.FixtureRequest) -> None:
    if request.node.name in NOT_PORTED:
        request.applymarker(pytest.mark.xfail(reason="not ported to the core on dynamo yet", strict=True))


def tiny() -> nn.Module:
    return seeded(Tiny)


class TwoArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.linear(left + right)


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
        "convert() was given a NoneType, a torch.nn.Module is needed: pass the model itself",
    ),
    "a class": (not_a_model(nn.Linear), "convert() was given a type, a torch.nn.Module is needed"),
    "a state dict": (
        lambda: tiny().state_dict(),
        "convert() was given a OrderedDict, a torch.nn.Module is needed",
    ),
    "no parameters": (
        nn.ReLU,
        "ReLU has no parameters, there is nothing to convert: pass a model with weights",
    ),
    "scripted": (
        lambda: torch.jit.script(tiny()),
        "RecursiveScriptModule is a ScriptModule, a Python module is needed: convert before torch.jit.script",
    ),
    "traced": (
        lambda: torch.jit.trace(tiny(), X),
        "TopLevelTracedModule is a ScriptModule, a Python module is needed",
    ),
    "scripted part": (
        scripted_part,
        "its part 1 (RecursiveScriptModule) is a ScriptModule, a Python module is needed",
    ),
    "lazy": (
        lazy,
        "Sequential has lazy tensors without a shape, real ones are needed: run it once on real inputs",
    ),
    "lazy buffers": (lazy_buffers, "Sequential has lazy tensors without a shape"),
    "converted": (
        lambda: te_transform.convert(tiny(), X, verify=False),
        "Tiny is converted already, an original model is needed: te_transform.revert() it first",
    ),
    "part converted": (
        lambda: nn.Sequential(te_transform.convert(tiny(), X, verify=False)),
        "Sequential is converted already, an original model is needed",
    ),
    "torch.compile": (
        lambda: torch.compile(tiny()),
        "OptimizedModule is a compiled module, the plain one is needed: convert its _orig_mod, compile=True",
    ),
    "torch.compile of a part": (
        lambda: nn.Sequential(torch.compile(tiny())),
        "its part 0 (OptimizedModule) is a compiled module, the plain one is needed",
    ),
    "compile()": (
        with_part(lambda model: model.compile()),
        "Tiny is compiled, the plain module is needed: convert first, then compile",
    ),
    "compile() of a part": (
        with_part(compile_block),
        "its part blocks.0 (Block) is compiled, the plain module is needed",
    ),
    "torch.compile of forward": (with_part(compile_forward), "Tiny is compiled, the plain module is needed"),
    "DataParallel": (
        lambda: nn.DataParallel(tiny()),
        "the model is wrapped by DataParallel, the plain model is needed: convert first, then wrap",
    ),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_no_plain_model_is_named(name: str, inplace: bool):
    make, sentence = MODELS[name]
    model = make()
    with untouched(model if isinstance(model, nn.Module) else nn.Module()):
        for entry in (te_transform.inspect, te_transform.convert):
            with pytest.raises(ModelError) as raised:
                entry(model, X, inplace=inplace)
            assert sentence in str(raised.value)


@pytest.fixture
def process_group(tmp_path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.FileStore(f"{tmp_path}/s", 1)
    )
    yield
    torch.distributed.destroy_process_group()


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
    sentence = (
        f"the model is wrapped by {WRAPPERS[wrap]}, the plain model is needed: convert first, then wrap"
    )
    with pytest.raises(ModelError) as raised:
        te_transform.convert(model, X)
    assert str(raised.value) == sentence


def test_a_model_that_cannot_be_copied_asks_for_inplace():
    model = with_part(lambda model: weight_norm(model.head) and None)()
    with untouched(model), pytest.raises(ModelError, match=r"^Tiny cannot be copied .*: pass inplace=True$"):
        te_transform.convert(model, X)
    converted = te_transform.convert(model, X, inplace=True)
    assert refusals(converted, "linear", "head")[0].startswith("Linear has hooks")


# What is given as inputs

INPUTS = {
    "none to invent": (
        TwoArguments,
        None,
        InputError,
        "no example inputs were given and none can be invented for TwoArguments (its forward takes left, "
        "right): pass example_inputs=(tensor, ...) or example_inputs={'name': tensor, ...}",
    ),
    "a string": (
        tiny,
        "x",
        InputError,
        "example_inputs has a str, a tensor, a tuple (args), a dict (kwargs) or a list of",
    ),
    "a number": (tiny, 3, InputError, "example_inputs has a int, a tensor, a tuple (args)"),
    "a set": (tiny, {1}, InputError, "example_inputs has a set, a tensor, a tuple (args)"),
    "an empty list": (tiny, [], InputError, "example_inputs is an empty list, one sample at least is needed"),
    "a list of None": (tiny, [None], InputError, "example_inputs has a NoneType, a tensor, a tuple (args)"),
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
        "Tiny failed on the example inputs (float32[2, 5, 16]):",
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


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_the_model_refuses_are_named(name: str, inplace: bool):
    make, given, kind, sentence = INPUTS[name]
    model = seeded(make) if isinstance(make, type) else make()
    with untouched(model):
        for entry in (te_transform.inspect, te_transform.convert):
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
    for make in (CASES["gpt2"].build, CASES["vit"].build, lambda: nn.Sequential(nn.Linear(4, 4))):
        model = make()
        with untouched(model):
            te_transform.convert(model, verify=False)


# What is given as options

OPTIONS = {
    "backend": ({"backend": "foo"}, OptionError, "backend is 'foo', 'auto', 'te' or 'torch' is needed"),
    "no backend": ({"backend": None}, OptionError, "backend is None, 'auto', 'te' or 'torch' is needed"),
    "recipe": (
        {"recipe": "fp8"},
        OptionError,
        "recipe is 'fp8', None, a TE recipe or one of fp8-delayed, fp8-current, fp8-block, mxfp8 is needed",
    ),
    "recipe on torch": (
        {"recipe": "fp8-delayed", "backend": "torch"},
        OptionError,
        "recipe is 'fp8-delayed', it needs backend='te' and this is backend 'torch', as asked: "
        "leave recipe=None",
    ),
    "skip": (
        {"skip": 3},
        OptionError,
        "skip is 3, module paths or globs such as 'model.layers.0*' are needed",
    ),
    "skip of nothing": (
        {"skip": ["no.such.module"]},
        OptionError,
        "skip has 'no.such.module', which names no module of",
    ),
    "skip of numbers": ({"skip": ["a", 3]}, OptionError, "skip has 3, module paths or globs such as"),
    "compile": (
        {"compile": "fast"},
        OptionError,
        "compile is 'fast', a bool or one of default, reduce-overhead, max-autotune, "
        "max-autotune-no-cudagraphs is needed",
    ),
    "compile number": ({"compile": 1}, OptionError, "compile is 1, a bool or one of default"),
    "passes": (
        {"passes": 3},
        OptionError,
        "passes is 3, a tuple of te_transform.Rule objects is needed, as PIPELINE is",
    ),
    "a name as passes": (
        {"passes": "linear"},
        OptionError,
        "passes is 'linear', a tuple of te_transform.Rule objects",
    ),
    "a non-rule": (
        {"passes": ["linear"]},
        OptionError,
        "passes has 'linear', te_transform.Rule objects are needed",
    ),
    "a rule's module": (
        {"passes": [te_transform.passes.linear]},
        OptionError,
        "te_transform.Rule objects are needed, as in te_transform.PIPELINE",
    ),
    "approximate": ({"approximate": "yes"}, OptionError, "approximate is 'yes', True or False is needed"),
    "verify": ({"verify": 1e-3}, OptionError, "verify is 0.001, True or False is needed"),
    "inplace": ({"inplace": None}, OptionError, "inplace is None, True or False is needed"),
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


def test_a_backend_that_is_not_there_says_what_is_missing():
    from te_transform.backends import choose

    try:
        choose("te", tiny())
    except BackendError:
        with pytest.raises(
            BackendError, match=r"backend='te' cannot be used: .*; pass backend='torch' or 'auto'"
        ):
            te_transform.convert(tiny(), X, backend="te")


# Models that are converted in part, with a reason for the rest


def refusals(converted: nn.Module, rule: str, path: str) -> list[str]:
    """Why `rule` was refused at `path`, all reasons of all of its sites there."""
    sites = [s for s in te_transform.report(converted).sites if (s.rule, s.path) == (rule, path)]
    assert all(site.status == "refused" for site in sites)
    return [reason for site in sites for reason in site.reasons]


class LoRA(nn.Module):
    """A Linear and a low rank beside it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LoRALinear(nn.Linear):
    """The same, as a subclass."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features)
        self.down, self.up = (
            nn.Parameter(torch.randn(2, WIDTH)),
            nn.Parameter(torch.randn(self.out_features, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Int8(nn.Module):
    """A Linear on int8 weights."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.scale = nn.Buffer(base.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Buffer((base.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Complex(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.linear = nn.Linear(base.in_features, base.out_features, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(torch.complex64)).real


class Integer(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        weight = torch.randint(-3, 3, base.weight.shape)
        self.linear = nn.Linear(base.in_features, base.out_features, bias=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.long()).float() + x


def hook_head(model: nn.Module) -> None:
    model.head.register_forward_hook(lambda *_: None)


def pre_hook_head(model: nn.Module) -> None:
    model.head.register_forward_pre_hook(lambda *_: None)


def backward_hook_norm(model: nn.Module) -> None:
    model.norm.register_full_backward_hook(lambda *_: None)


def backward_pre_hook_norm(model: nn.Module) -> None:
    model.norm.register_full_backward_pre_hook(lambda *_: None)


def replace_head(cls: type) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.head = cls(model.head)

    return change


def norm_reused(model: nn.Module) -> None:
    model.blocks[0].norm1 = model.norm


def share_projections(model: nn.Module) -> None:
    model.blocks[0].attention.k_proj = model.blocks[0].attention.q_proj


def tie_projections(model: nn.Module) -> None:
    model.blocks[0].attention.k_proj.weight = model.blocks[0].attention.q_proj.weight


def freeze_query(model: nn.Module) -> None:
    model.blocks[0].attention.q_proj.requires_grad_(False)


def freeze_bias(model: nn.Module) -> None:
    model.blocks[0].attention.q_proj.bias.requires_grad_(False)


def weight_buffer(model: nn.Module) -> None:
    weight = model.head.weight.detach()
    del model.head.weight
    model.head.weight = nn.Buffer(weight)


def head_on_meta(model: nn.Module) -> None:
    model.head.to("meta")


def query_on_meta(model: nn.Module) -> None:
    model.blocks[0].attention.q_proj.to("meta")


def own_fused(model: nn.Module) -> None:
    model.head.fused = True


HOOKED = "has hooks, they would see the fused module's tensors: remove them first"
ALONE = "a module that does nothing else is needed"
COMPUTED = "the linear's weight is computed at every call, a parameter is needed"
PARAMETRIZED = (
    "ParametrizedLinear is parametrized, a plain parameter is needed: "
    "torch.nn.utils.parametrize.remove_parametrizations"
)
QUERY = "blocks.0.attention.q_proj"
CALLED_TWICE = "is called 2 times in one forward, a fused module stands for one call"

PARTLY = {
    "forward hook": (hook_head, "layernorm_linear", "head", f"Linear {HOOKED}"),
    "forward pre-hook": (pre_hook_head, "layernorm_linear", "head", f"Linear {HOOKED}"),
    "backward hook": (backward_hook_norm, "layernorm_linear", "head", f"LayerNorm {HOOKED}"),
    "backward pre-hook": (backward_pre_hook_norm, "layernorm_linear", "head", f"LayerNorm {HOOKED}"),
    "weight_norm": (lambda m: parametrizations.weight_norm(m.head) and None, "linear", "head", PARAMETRIZED),
    "orthogonal": (
        lambda m: parametrizations.orthogonal(m.head) and None,
        "layernorm_linear",
        "head",
        COMPUTED,
    ),
    "old spectral_norm": (lambda m: spectral_norm(m.head) and None, "layernorm_linear", "head", COMPUTED),
    "LoRA subclass": (
        replace_head(LoRALinear),
        "layernorm_linear",
        "head",
        f"the linear is computed in the forward of LoRALinear, {ALONE}",
    ),
    "int8": (replace_head(Int8), "linear", "head", f"the linear is computed in the forward of Int8, {ALONE}"),
    "complex": (
        replace_head(Complex),
        "linear",
        "head.linear",
        "the linear's weight is complex64, a floating point parameter is needed",
    ),
    "integer": (
        replace_head(Integer),
        "linear",
        "head.linear",
        "the linear's weight is int64, a floating point parameter is needed",
    ),
    "a buffer": (
        weight_buffer,
        "linear",
        "head",
        "the linear's weight is a buffer or a constant, a parameter is needed",
    ),
    "norm used twice": (norm_reused, "layernorm_linear", "head", f"LayerNorm {CALLED_TWICE}"),
    "shared linear": (share_projections, "linear", QUERY, f"Linear {CALLED_TWICE}"),
    "tied weights": (
        tie_projections,
        "merge_siblings",
        QUERY,
        "the linear's weight is shared with another module, one that is joined or permuted needs to be the "
        "module's own: untie it",
    ),
    "frozen weight": (
        freeze_query,
        "merge_siblings",
        QUERY,
        "some of the weights are frozen, a merged weight is trained as a whole or not at all",
    ),
    "frozen bias": (
        freeze_bias,
        "merge_siblings",
        QUERY,
        "some of the biases are frozen, a merged bias is trained as a whole or not at all",
    ),
    "two devices": (
        head_on_meta,
        "layernorm_linear",
        "head",
        "the parameters are on several devices (linear on meta, layer_norm on cpu), a fused module is on one",
    ),
    "siblings on two devices": (
        query_on_meta,
        "merge_siblings",
        QUERY,
        "the parameters are on several devices (linear on meta, linear on cpu), a fused module is on one",
    ),
    "a child called fused": (
        own_fused,
        "layernorm_linear",
        "head",
        "Linear has an attribute named 'fused', the fused module needs that name",
    ),
}


@pytest.mark.parametrize("name", PARTLY)
def test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right(name: str):
    change, rule, path, reason = PARTLY[name]
    model = with_part(change)()
    with untouched(model):
        converted = te_transform.convert(model, X)
    found = refusals(converted, rule, path)
    assert any(reason in said for said in found), found
    assert te_transform.report(converted).counts.total() > 0
    same_as_original(model, converted)


def same_as_original(model: nn.Module, converted: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    expected, actual = model(X), converted(X)
    torch.testing.assert_close(actual, expected)
    originals = {name: p for name, p in model.named_parameters() if p.requires_grad}
    theirs = dict(converted.named_parameters())
    assert [*theirs] == [*dict(model.named_parameters())]
    wanted = torch.autograd.grad(
        expected.square().sum(), list(originals.values()), allow_unused=True
    )
    given = torch.autograd.grad(
        actual.square().sum(), [theirs[name] for name in originals], allow_unused=True
    )
    for name, gradient, whole in zip(originals, wanted, given, strict=True):
        if gradient is not None:
            part, atol = theirs[name].part(whole), 1e-5 * max(gradient.abs().max().item(), 1.0)
            torch.testing.assert_close(part, gradient, atol=atol, rtol=0, msg=lambda t, n=name: f"{n}: {t}")


class Twice(nn.Module):
    """One block, run two times."""

    def __init__(self):
        super().__init__()
        self.tiny = Tiny()

    def forward(self, x: Tensor) -> Tensor:
        return self.tiny(self.tiny(x))


def test_a_module_entered_again_is_left_alone():
    model = seeded(Twice)
    converted = te_transform.convert(model, X)
    assert refusals(converted, "linear", "tiny.head") == [f"Linear {CALLED_TWICE}"] * 2
    assert te_transform.report(converted).counts.total() == 0
    same_as_original(model, converted)


def test_a_frozen_model_is_fused_and_stays_frozen():
    model = tiny().requires_grad_(False)
    converted = te_transform.convert(model, X)
    assert te_transform.report(converted).counts["layernorm_mlp"] == 1
    assert not any(parameter.requires_grad for parameter in converted.parameters())
    torch.testing.assert_close(converted(X), model(X))


def test_lora_by_hand_keeps_its_frozen_base():
    model = tiny()
    attention = model.blocks[0].attention
    attention.q_proj, attention.v_proj = LoRA(attention.q_proj), LoRA(attention.v_proj)
    converted = te_transform.convert(model, X)
    assert te_transform.report(converted).counts["layernorm_mlp"] == 1
    assert not converted.blocks[0].attention.q_proj.base.weight.requires_grad
    same_as_original(model, converted)


def test_lora_by_peft():
    peft = pytest.importorskip("peft")
    model = CASES["llama"].build()
    settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, settings).eval()
    inputs = CASES["llama"].sample()
    converted = te_transform.convert(wrapped, inputs)
    assert te_transform.report(converted).counts["linear"] > 0
    torch.testing.assert_close(converted(**inputs).logits, wrapped(**inputs).logits)
    trained = {name for name, p in converted.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in wrapped.named_parameters() if p.requires_grad}


def test_a_dynamically_quantised_model():
    with warnings.catch_warnings(action="ignore"):
        model = torch.ao.quantization.quantize_dynamic(tiny(), {nn.Linear})
    converted = te_transform.convert(model, X)
    assert te_transform.report(converted).counts.total() == 0
    assert torch.equal(converted(X), model(X))


def test_a_model_on_meta_is_converted_without_numbers():
    with torch.device("meta"):
        model = Tiny()
    converted = te_transform.convert(model, X)
    assert te_transform.report(converted).counts["layernorm_mlp"] == 1
    assert converted(X.to("meta")).is_meta
    assert {name: tensor.shape for name, tensor in converted.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }


class HalfHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).bfloat16())


def test_a_cast_between_norm_and_linear_is_no_fusion():
    converted = te_transform.convert(seeded(HalfHead), X)
    assert refusals(converted, "layernorm_linear", "head") == [
        "the linear reads cast, layer_norm or rms_norm is needed"
    ]


class OneForward(nn.Module):
    """q, k, v and the MLP in the forward of one module."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y, attention, mlp = self.norm1(x), self.attention, self.mlp
        y = F.scaled_dot_product_attention(attention.q_proj(y), attention.k_proj(y), attention.v_proj(y))
        x = x + attention.out_proj(y)
        return x + mlp.fc2(mlp.act(mlp.fc1(self.norm2(x))))


def test_siblings_and_an_mlp_in_one_forward_are_both_fused():
    model = seeded(OneForward)
    converted = te_transform.convert(model, X)
    assert te_transform.report(converted).counts == {
        "merge_siblings": 1,
        "layernorm_mlp": 1,
        "layernorm_linear": 1,
        "linear": 1,
    }
    same_as_original(model, converted)


def test_a_tie_across_layers_survives():
    model = seeded(lambda: Tiny(blocks=2))
    model.blocks[1].attention.k_proj.weight = model.blocks[0].attention.k_proj.weight
    converted = te_transform.convert(model, X, verify=False)
    first, second = (block.attention.k_proj for block in converted.blocks)
    assert first.weight is second.weight
    same_as_original(model, converted)


def test_hooks_on_the_model_and_on_state_dicts_stay():
    model = tiny()
    called = []
    model.register_forward_hook(lambda *_: called.append("model"))
    model.blocks[0].register_forward_pre_hook(lambda *_: called.append("block"))
    model.head.register_state_dict_post_hook(lambda *_: called.append("state_dict"))
    converted = te_transform.convert(copy.deepcopy(model), X)
    called.clear()
    converted(X)
    converted.state_dict()
    assert called == ["block", "model", "state_dict"]


class Final(nn.Linear):
    """A linear of a class that nobody may derive from."""

    def __init_subclass__(cls, **options: object) -> None:
        raise TypeError("Final is final")


class FinalMLP(nn.Module):
    """An MLP of such a class."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))

    def __init_subclass__(cls, **options: object) -> None:
        raise TypeError("FinalMLP is final")


@pytest.mark.parametrize(("linear", "named"), [(Final, "Final"), (nn.Linear, "FinalMLP")])
def test_a_class_that_takes_no_subclass_is_refused(linear: type[nn.Linear], named: str):
    model = nn.Sequential(nn.LayerNorm(WIDTH), FinalMLP(linear))
    converted = te_transform.convert(model, X)
    reasons = {reason for site in te_transform.report(converted).refused for reason in site.reasons}
    sentence = (
        f"{named} refuses to be subclassed, a converted module is an instance of a subclass of its class"
    )
    assert sentence in reasons
    assert "layernorm_mlp" not in te_transform.report(converted).counts
    torch.testing.assert_close(converted(X), model(X))
