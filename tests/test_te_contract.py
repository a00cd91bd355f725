"""Transformer Engine as tests/te_contract has recorded it: te/, and the stand-in that it is tested on,
fit it."""

import ast
import difflib
import inspect
import json
from collections.abc import Iterator
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest
import torch

from te_transform.backends import Backend, cudnn, plain, planned
from te_transform.backends.op import FusedOp
from te_transform.plan.precision_plan import RECIPES
from tests import stand_in
from tests.te_contract import record

pytestmark = pytest.mark.usefixtures("at_any_size")

CONTRACT = json.loads(record.FILE.read_text(encoding="utf-8"))
TE = record.source()
FORMS = {record.title(name, given): (name, given) for name, given in record.argument_sets()}
AGAIN = "run `python tests/te_contract/record.py` where TE is installed"

each_form = pytest.mark.parametrize("form", FORMS)


def signature(recorded: dict[str, str]) -> Signature:
    """The signature that was recorded, to bind arguments to."""
    parameters, kind = [], Parameter.POSITIONAL_OR_KEYWORD
    many = {1: Parameter.VAR_POSITIONAL, 2: Parameter.VAR_KEYWORD}
    for name, default in recorded.items():
        if name.startswith("*"):
            kind = Parameter.KEYWORD_ONLY
        if name != "*":
            given = Parameter.empty if default in ("required", "any") else default
            parameters.append(Parameter(name.strip("*"), many.get(name.count("*"), kind), default=given))
    return Signature(parameters)


def constructor(name: str) -> Signature:
    return signature(CONTRACT["modules"][name]["__init__"])


# What te/ builds


def op_of(backend: Any, name: str, given: dict[str, Any]) -> FusedOp:
    """The op that has a module of this form."""
    norm = {key: given[key] for key in ("eps", "normalization", "zero_centered_gamma") if key in given}
    norm |= {"returns_norm": True} if given.get("return_layernorm_output") else {}
    if name != "LayerNormMLP":
        return getattr(backend, name)(**norm)
    gated = "first half" if given["activation"] in plain.GATED_ACTIVATIONS.values() else "no"
    return backend.LayerNormMLP(**norm, activation=given["activation"], gated=gated)


def parameters(form: str) -> dict[str, torch.nn.Parameter]:
    """Return the recorded parameters of TE's module."""
    found = {}
    for entry in CONTRACT["parameters"][form].split("], "):
        name, described = entry.split(" ", 1)
        dtype, shape = described.rstrip("]").split("[")
        sizes = [int(size) for size in shape.split(", ")]
        found[name] = torch.nn.Parameter(torch.randn(sizes).to(getattr(torch, dtype)))
    return found


@each_form
def test_modules_are_built_with_arguments_that_te_has_and_get_its_parameters(
    te: ModuleType, form: str
) -> None:
    name, given = FORMS[form]
    op, held, kind = op_of(te, name, given), parameters(form), getattr(stand_in, name)
    tensors = [held.get(parameter) for parameter in kind.names]
    assert held.keys() <= set(kind.names)
    with te.autocast(te.recipe_of("fp8-current")):  # a linear by itself is left to PyTorch otherwise
        x = torch.randn(16, record.IN).to(given["params_dtype"])
        if given["params_dtype"] is torch.bfloat16:
            op(x, *tensors)
    kernel = op._kernel(op._weights(tensors), tensors[-1] is not None)
    assert list(kernel.names) == list(kind.names)
    made = kernel.module
    bound = constructor(name).bind(*made.sizes, **made.given).arguments
    assert bound.pop("device") == "meta"  # the word: TE puts modules on torch.device("meta") into memory
    assert {key: str(value) for key, value in bound.items()} == {k: str(v) for k, v in given.items()}


def test_every_form_is_recorded_and_every_activation_is_one_that_te_has() -> None:
    assert CONTRACT["parameters"].keys() == FORMS.keys(), AGAIN
    ours = {*plain.ACTIVATIONS.values(), *plain.GATED_ACTIVATIONS.values()}
    assert {given.get("activation") for _, given in FORMS.values()} - {None} == ours
    # TE itself looks at the name at the first call only
    assert ours - {plain.EXACT_GELU} <= set(CONTRACT["activations"])


@pytest.mark.parametrize("name", record.FUSED)
def test_the_stand_in_takes_what_te_takes(name: str) -> None:
    recorded = CONTRACT["modules"][name]["forward"]
    own = inspect.signature(getattr(stand_in, name).forward).parameters
    assert {*own} - {"self", "x"} <= {*recorded}


@pytest.mark.parametrize(
    "name",
    [
        "apply_rotary_pos_emb",
        "autocast",
        "fused_attn_bwd",
        "fused_attn_fwd",
        "parallel_cross_entropy",
    ],
)
def test_the_stand_ins_functions_take_what_tes_take(name: str) -> None:
    (home,) = [home for home in CONTRACT["functions"] if home.endswith(f".{name}")]
    own = inspect.signature(getattr(stand_in, name)).parameters
    named = {parameter for parameter in own if parameter not in ("x", "angles", "logits", "targets", "how")}
    assert named <= {*CONTRACT["functions"][home]}


# The backends


def members() -> set[str]:
    """Return the members of the protocol."""
    return {*Backend.__annotations__, "recipe_of", "recipe_now", "multiple"}


def test_every_backend_has_what_the_protocol_asks_for(te: ModuleType) -> None:
    for backend in (plain, planned, te):
        assert not [name for name in members() if not hasattr(backend, name)], backend


@pytest.mark.parametrize(
    "name", ["Linear", "LayerNormLinear", "LayerNormMLP", "Rotary", "WideLinear", "CrossEntropy"]
)
def test_the_ops_of_all_backends_are_called_alike(te: ModuleType, name: str) -> None:
    forms = [form for form in FORMS.values() if form[0] == name][-1:] or [(name, {})]
    ops = [op_of(backend, *forms[0]) for backend in (plain, planned, te)]
    assert len({op.PRODUCTS for op in ops}) == 1
    assert isinstance(ops[2], type(ops[0]))


def test_tes_attention_is_planned_where_te_is_missing(te: ModuleType) -> None:
    assert planned.DotProductAttention is cudnn.DotProductAttention
    assert issubclass(te.DotProductAttention, cudnn.DotProductAttention)


def test_plans_without_te_are_those_with_it(te: ModuleType) -> None:
    for name in (
        "NAME",
        "HAS_KERNELS",
        "HAS_BIAS",
        "ACTIVATIONS",
        "GATED_ACTIVATIONS",
        "GATES",
    ):
        assert getattr(planned, name) == getattr(te, name)
    for recipe in RECIPES:
        assert planned.multiple(recipe) == te.multiple(te.recipe_of(recipe))
    for asked in (None, 3, object()):
        for backend in (planned, te):
            with pytest.raises(ValueError, match="expected a recipe of TE"):
                backend.recipe_of(asked)


# What backends/te/ uses


def te_calls() -> Iterator[tuple[str, Signature, ast.Call]]:
    """Each call that te/ makes of TE's functions, and of its modules' methods."""
    names = record.read_of_te(TE)
    for node in [node for node in ast.walk(TE) if isinstance(node, ast.Call)]:
        spelled = ast.unparse(node.func)
        homes = names.get(spelled, ())
        if spelled.endswith(".init_fp8_metadata"):
            homes = ("transformer_engine.pytorch.Linear.init_fp8_metadata",)
        for home in homes:
            if CONTRACT["functions"].get(home):
                yield spelled, signature(CONTRACT["functions"][home]), node
        if spelled.endswith("module.forward"):
            for name in record.FUSED:
                yield spelled, signature(CONTRACT["modules"][name]["forward"]), node


def test_te_is_called_with_arguments_that_it_has() -> None:
    seen = set()
    for spelled, recorded, node in te_calls():
        args = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
        kwargs = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        whole = len(args) + len(kwargs) == len(node.args) + len(node.keywords)
        (recorded.bind if whole else recorded.bind_partial)(*args, **kwargs)
        seen.add(spelled)
    wanted = {"te.autocast", "self.module.forward", "self.module.init_fp8_metadata", "apply_rotary_pos_emb"}
    assert seen >= wanted


def test_every_function_of_te_that_is_called_is_recorded() -> None:
    names = record.read_of_te(TE)
    called = {ast.unparse(node.func) for node in ast.walk(TE) if isinstance(node, ast.Call)}
    functions = {
        name for name in called & names.keys() if not name.startswith(("FP8GlobalStateManager.", "recipes."))
    }
    known = {*CONTRACT["functions"], *(f"transformer_engine.pytorch.{name}" for name in record.FUSED)}
    missing = {name for name in functions if not known & {*names[name]}}
    assert not missing, f"add {missing} to FUNCTIONS in tests/te_contract/record.py and {AGAIN}"


def test_everything_that_is_read_of_te_was_there() -> None:
    names = record.read_of_te(TE)
    there = {name for name, homes in names.items() if any(CONTRACT["read"].get(home) for home in homes)}
    assert names.keys() == there, AGAIN
    assert len(there) > 10


@pytest.mark.parametrize("name", record.FUSED)
def test_every_attribute_that_is_read_of_tes_modules_was_there(name: str) -> None:
    read = record.read_of_modules(TE)
    assert {attribute for attribute in read if not CONTRACT["read"].get(f"{name}().{attribute}")} == set(), (
        AGAIN
    )
    assert {"fp8_meta", "_fp8_workspaces", "init_fp8_metadata"} <= read


def test_recipes_have_the_fields_that_are_read() -> None:
    for recipe in CONTRACT["recipes"].values():
        assert "max_fwd" in recipe["fp8_format"]
        assert "max_bwd" in recipe["fp8_format"]
    assert CONTRACT["recipes"]["DelayedScaling"]["margin"] == "0"
    assert "reduce_amax" in CONTRACT["recipes"]["DelayedScaling"]


# Where TE is


def test_recording_again_gives_the_file() -> None:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # its libraries are loaded in there, and each fails in its own way
        pytest.skip(f"Transformer Engine cannot be imported ({type(error).__name__}: {error})")
    file = record.FILE.read_text(encoding="utf-8").splitlines()
    changes = difflib.unified_diff(file, record.text(record.contract()).splitlines(), "recorded", "here", n=1)
    assert not (lines := [*changes]), "\n".join([f"TE here is another: {AGAIN}", *lines])
